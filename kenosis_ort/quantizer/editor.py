"""What performing a plan needs of stock's quantizer: names, initializers, nodes, and Q and DQ of the caller's kind."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper

from kenosis_ort.graph.walk import all_names, reserve_name
from kenosis_ort.quantizer._ort_compat import IndexedONNXModel

Array = np.ndarray[Any, Any]

_FIELDS: Final[dict[int, str]] = {
    TensorProto.FLOAT: "float_data",
    TensorProto.INT8: "int32_data",
    TensorProto.UINT8: "int32_data",
    TensorProto.INT16: "int32_data",
    TensorProto.UINT16: "int32_data",
    TensorProto.INT32: "int32_data",
}
"""Where lists of the usual numbers are stored: they are many, and `onnx.helper.make_tensor` asks much of each."""


class QdqEditor:
    """Edits the model of one quantizer.

    Args:
        quantizer: Stock's quantizer, with an indexed model.
    """

    def __init__(self, quantizer: Any) -> None:
        self.quantizer = quantizer
        self.model: IndexedONNXModel = quantizer.model
        self.nodes: dict[str, onnx.NodeProto] = {node.name: node for node in self.model.nodes()}
        self._bounds: dict[str, str] = {}
        self._taken = all_names(self.model.model) | self.model.initializer().by_name.keys()

    def fresh(self, name: str) -> str:
        """The name, with a number behind it where the model has that name already."""
        return reserve_name(name, self._taken)

    def constant(self, name: str) -> onnx.TensorProto:
        """An initializer with its content."""
        found: onnx.TensorProto | None = self.quantizer.weights.get(name)
        return self.model.constant(name) if found is None else found

    def add_list(self, name: str, array: Array, elem_type: int | None = None) -> None:
        """Adds an initializer stored as a list of numbers, as stock stores scales and zero points."""
        kind = helper.np_dtype_to_tensor_dtype(array.dtype) if elem_type is None else elem_type
        self.model.add_initializer(_listed(name, kind, array))

    def add_quantize(
        self, real: str, integers: str, name: str, grid: tuple[str, str], **attributes: int | None
    ) -> None:
        """Adds Q; ``grid`` names scale and zero point."""
        self._add("QuantizeLinear", real, integers, name, grid, attributes)

    def add_dequantize(
        self, integers: str, real: str, name: str, grid: tuple[str, str], **attributes: int | None
    ) -> None:
        """Adds DQ; ``grid`` names scale and zero point."""
        self._add("DequantizeLinear", integers, real, name, grid, attributes)

    def add_clip(self, integers: str, clipped: str, name: str, bounds: tuple[int, int], *, signed: bool) -> None:
        """Adds a Clip of bytes."""
        dtype = np.dtype(np.int8 if signed else np.uint8)
        ends = []
        for bound in bounds:
            end = f"{dtype.name}_{bound}".replace("-", "minus_")
            if end not in self._bounds:
                self._bounds[end] = self.fresh(end)
                self.add_list(self._bounds[end], np.asarray(bound, dtype))
            ends.append(self._bounds[end])
        self.model.add_node(helper.make_node("Clip", [integers, *ends], [clipped], name=name))

    def _add(
        self, kind: str, source: str, result: str, name: str, grid: tuple[str, str], attributes: dict[str, int | None]
    ) -> None:
        given: dict[str, Any] = {key: value for key, value in attributes.items() if value is not None}
        domain = self.quantizer.qdq_op_domain
        node = onnx.NodeProto(op_type=kind, input=(source, *grid), output=(result,), name=name, domain=domain)
        node.attribute.extend(helper.make_attribute(key, given[key]) for key in sorted(given))
        self.model.add_node(node)


def _listed(name: str, kind: int, array: Array) -> onnx.TensorProto:
    """A tensor that holds a list of numbers, as `onnx.helper.make_tensor` makes it."""
    field = _FIELDS.get(kind)
    if field is None:
        return helper.make_tensor(name, kind, array.shape, array.ravel().tolist())
    return onnx.TensorProto(data_type=kind, name=name, dims=array.shape, **{field: array.ravel().tolist()})
