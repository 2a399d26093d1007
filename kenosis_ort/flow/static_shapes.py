"""Symbolic dimensions of a model for a runtime that takes none: a batch of any size becomes one, others are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import onnx

from kenosis_ort.errors import UnsupportedModelError
from kenosis_ort.graph.load import LoadedModel
from kenosis_ort.graph.outside import copy_model

_TOOL: Final = "python -m onnxruntime.tools.make_dynamic_shape_fixed"


def with_static_shapes(loaded: LoadedModel, target: str) -> tuple[LoadedModel, tuple[str, ...]]:
    """A model without symbolic dimensions, and what was done, in sentences.

    The first dimension of an input is taken for the batch and becomes 1.

    Args:
        loaded: The model; not changed.
        target: Name of the target, for messages.

    Raises:
        UnsupportedModelError: Another dimension is symbolic, or an input's number of dimensions is not known.
    """
    given = {tensor.name for tensor in loaded.proto.graph.initializer}
    inputs = [info for info in loaded.proto.graph.input if info.name not in given]
    opened = [info for info in inputs if not _is_static(info)]
    for info in opened:
        dims = info.type.tensor_type.shape.dim
        if not info.type.tensor_type.HasField("shape") or any(not d.dim_value for d in dims[1:]):
            example = ",".join(str(d.dim_value or ("1" if i == 0 else "N")) for i, d in enumerate(dims)) or "1,3,N,N"
            raise UnsupportedModelError(
                f"target '{target}' takes static shapes alone, and input '{info.name}' is {_text(info)}",
                where=loaded.name,
                fix=f"{_TOOL} --input_name {info.name} --input_shape {example} (numbers for N) model.onnx fixed.onnx, "
                "and samples of that shape",
            )
    if not opened:
        return loaded, ()
    proto = copy_model(loaded.proto)
    names = {info.name for info in opened}
    for info in proto.graph.input:
        if info.name in names:
            batch = info.type.tensor_type.shape.dim[0]
            if batch.dim_param:
                _set_everywhere(proto.graph, batch.dim_param, 1)
            batch.dim_value = 1
    shown = ", ".join(f"'{info.name}' {_text(info)}" for info in opened)
    note = f"Target '{target}' takes static shapes alone: the batch is 1 in the file (inputs were {shown})."
    return replace(loaded, proto=proto), (note,)


def _set_everywhere(graph: onnx.GraphProto, symbol: str, size: int) -> None:
    """Gives a symbolic dimension its size, wherever the graph names it."""
    for info in (*graph.input, *graph.output, *graph.value_info):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param == symbol:
                dim.dim_value = size


def _is_static(info: onnx.ValueInfoProto) -> bool:
    tensor = info.type.tensor_type
    return tensor.HasField("shape") and all(dim.dim_value for dim in tensor.shape.dim)


def _text(info: onnx.ValueInfoProto) -> str:
    """A shape in words."""
    if not info.type.tensor_type.HasField("shape"):
        return "of unknown shape"
    return f"[{', '.join(d.dim_param or str(d.dim_value or '?') for d in info.type.tensor_type.shape.dim)}]"
