"""Copies of models, safe for models over protobuf's 2 GiB limit."""

from __future__ import annotations

from collections.abc import Callable, Collection

import onnx


def copy_model(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a deep copy of a model."""
    return copy_without_weights(proto, lambda _: False)


def copy_without_weights(proto: onnx.ModelProto, drop: Callable[[onnx.TensorProto], bool]) -> onnx.ModelProto:
    """Returns a deep copy of a model, leaving out the main graph's initializers for which ``drop`` is true.

    Initializers are copied one at a time, so no message as large as the whole model is ever built.
    """
    copy = onnx.ModelProto()
    copy_fields(proto, copy, skip=("graph",))
    copy_fields(proto.graph, copy.graph, skip=("initializer",))
    for tensor in proto.graph.initializer:
        if not drop(tensor):
            copy.graph.initializer.add().CopyFrom(tensor)
    return copy


def copy_with_hollow_weights(proto: onnx.ModelProto, hollow: Collection[str]) -> onnx.ModelProto:
    """Returns a deep copy of a model in which the named initializers keep name, type and shape, but no content."""
    copy = copy_without_weights(proto, lambda _: True)
    for tensor in proto.graph.initializer:
        if tensor.name in hollow:
            copy.graph.initializer.add(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        else:
            copy.graph.initializer.add().CopyFrom(tensor)
    return copy


_Message = onnx.ModelProto | onnx.GraphProto | onnx.TensorProto


def copy_fields(source: _Message, target: _Message, *, skip: Collection[str]) -> None:
    """Copies all fields that are set, but for those named in ``skip``, to a message of the same type."""
    for descriptor, value in source.ListFields():
        if descriptor.name in skip:
            continue
        if isinstance(value, (int, float, str, bytes)):
            setattr(target, descriptor.name, value)
        elif hasattr(value, "CopyFrom") and not hasattr(value, "append"):
            getattr(target, descriptor.name).CopyFrom(value)
        else:
            getattr(target, descriptor.name).extend(value)
