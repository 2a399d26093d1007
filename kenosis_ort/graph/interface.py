"""The interface of a model: what callers feed and get back, as the model as it came declares it."""

from __future__ import annotations

import onnx


def restore_interface(model: onnx.ModelProto, original: onnx.ModelProto) -> None:
    """Declares inputs and outputs as the original does, with their default values, in place.

    On the way inputs lose their defaults, and inference makes up names for sizes that the original leaves open.
    """
    stored = {tensor.name for tensor in model.graph.initializer}
    left = {value.name for value in model.graph.input} - stored
    model.graph.initializer.extend(t for t in original.graph.initializer if t.name in left)
    for values, declared in ((model.graph.input, original.graph.input), (model.graph.output, original.graph.output)):
        types = {value.name: value.type for value in declared if value.type.WhichOneof("value")}
        for value in values:
            if value.name in types:
                value.type.CopyFrom(types[value.name])
