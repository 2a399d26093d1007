"""The linear layers of a float model, MatMul and Gemm with constant weights, and their exchange for other kernels.

Dynamic quantization of the linear layers: int8 weights, and activations quantized by their own range on every run.

No calibration is needed, and no range has to hold all inputs, which decoders with heavy tails need (9 dB more than
static ranges there). A value that one layer reads goes to ``com.microsoft.DynamicQuantizeMatMul``; one that several
read is quantized once, by DynamicQuantizeLinear, for ``com.microsoft.MatMulIntegerToFloat`` kernels. Bias and output
are float. These are the kernels that the session's optimizer makes of ``quantize_dynamic``'s result; written
directly they do not depend on its patterns. 2.0x to 3.5x of FP32 a layer, measured on ONNX Runtime 1.31.1.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.graph.constants import drop_stale_value_info
from kenosis_ort.graph.live import Attributes, Inputs, LiveGraph
from kenosis_ort.graph.outside import array_in
from kenosis_ort.graph.product_pairs import LARGEST_PAIR, ROWS_DOWN
from kenosis_ort.graph.shapes import value_types
from kenosis_ort.graph.view import GraphView, ir, optional
from kenosis_ort.graph.walk import MAIN_DOMAINS, opset_of
from kenosis_ort.quantizer.grids import quantize_weight

CONTRIB: Final = "com.microsoft"
_LEAST: Final = 16
"""Matrices with fewer rows or columns stay float: converting what they read takes longer than the product."""

Float32 = npt.NDArray[np.float32]


class LinearLayer(NamedTuple):
    """``output = data @ matrix + bias``.

    Attributes:
        node: The MatMul or Gemm.
        last: The node that writes the output: the same one, or the Add behind a MatMul.
        constant: Holds the matrix.
        transposed: It holds the transpose.
        bias: Shape (N,); None without.
        siblings: Layers that read the same data, this one included.
        place: Which of how many layers it is, from 1.
    """

    node: ir.Node
    last: ir.Node
    constant: onnx.TensorProto
    transposed: bool
    bias: Float32 | None
    siblings: int = 1
    place: tuple[int, int] = (1, 1)

    @property
    def name(self) -> str:
        """Name of its node."""
        return self.node.name or ""

    @property
    def data(self) -> str:
        """Name of a float32 value of shape (..., K), of rank 2 at least."""
        value = self.node.inputs[0]
        return "" if value is None else value.name or ""

    @property
    def output(self) -> str:
        """Name of the value of shape (..., N)."""
        return self.last.outputs[0].name or ""

    @property
    def weight(self) -> tuple[str, bool]:
        """Key of the matrix: name of the constant, and whether it is transposed."""
        return self.constant.name, self.transposed

    @property
    def matrix(self) -> Float32:
        """The matrix, shape (K, N); read anew each time, so that not all of them are in memory twice."""
        array = np.asarray(array_in(self.constant), np.float32)
        return np.ascontiguousarray(array.T) if self.transposed else array


Maker = Callable[[LinearLayer, LiveGraph], bool]
"""Makes a layer anew in a graph, by `become` or otherwise; tells whether it did."""


def become(
    graph: LiveGraph, layer: LinearLayer, operator: str, inputs: Inputs, attributes: Attributes | None = None
) -> None:
    """Makes a layer one node of the runtime's own domain, under the layer's name in the place of its last node."""
    graph.rewrite(layer.last, operator, inputs, attributes, domain=CONTRIB)
    if layer.last is not layer.node:
        layer.last.name = layer.name
        graph.remove(layer.node)


def linear_layers(proto: onnx.ModelProto) -> tuple[str, ...]:
    """The names of a prepared model's nodes that `exchange_layers` would make anew, in graph order."""
    return tuple(layer.name for layer in _layers(GraphView(proto), value_types(proto)))


def exchange_layers(proto: onnx.ModelProto, make: Maker) -> onnx.ModelProto | None:
    """A copy of a model whose linear layers are made anew, None if it has none.

    Args:
        proto: A prepared float model: nodes named, constants as initializers. Not changed.
        make: Called with each layer, in graph order, and the copy.
    """
    graph = LiveGraph(proto, copied=True)
    layers = list(_layers(graph, value_types(proto)))
    if not layers:
        return None
    readers = Counter(layer.data for layer in layers)
    ends = {
        layer.last: layer._replace(siblings=readers[layer.data], place=(number, len(layers)))
        for number, layer in enumerate(layers, 1)
    }
    made = [make(ends[node], graph) for node in graph.nodes if node in ends]
    model = graph.write()
    if any(made):
        drop_stale_value_info(model)
    return model


def _layers(graph: GraphView, types: Mapping[str, onnx.TypeProto]) -> Iterator[LinearLayer]:
    for node in graph.nodes:
        if node.op_type not in ("MatMul", "Gemm") or node.domain not in MAIN_DOMAINS:
            continue
        options, (data, weight) = node.attributes, node.inputs[:2]
        if options.get_float("alpha", 1.0) != 1.0 or options.get_int("transA", 0) != 0 or data is None:
            continue
        kind = types.get(data.name or "", onnx.TypeProto()).tensor_type
        if kind.elem_type != onnx.TensorProto.FLOAT or len(kind.shape.dim) < 2 or graph.constant(data) is not None:
            continue
        matrix, constant = _constant(graph, weight), graph.constant(weight)
        if constant is None or matrix is None or matrix.ndim != 2 or min(matrix.shape) < _LEAST:
            continue
        transposed = bool(options.get_int("transB", 0))
        columns = matrix.shape[0 if transposed else 1]
        last, bias = _bias_behind(graph, node, columns) if node.op_type == "MatMul" else (node, None)
        given = optional(node, 2)
        if given is not None:
            row = _row(_constant(graph, given), columns)
            if row is None:
                continue
            bias = (row * np.float32(options.get_float("beta", 1.0))).astype(np.float32)
        yield LinearLayer(node, last, constant, transposed, bias)


def _bias_behind(graph: GraphView, node: ir.Node, width: int) -> tuple[ir.Node, Float32 | None]:
    """The Add that puts a bias on a MatMul and that bias, or the MatMul itself and None."""
    value = node.outputs[0]
    if graph.is_private(value):
        (reader,) = graph.readers(value)
        if reader.op_type == "Add" and reader.domain in MAIN_DOMAINS:
            other = reader.inputs[1] if reader.inputs[0] is value else reader.inputs[0]
            bias = _row(_constant(graph, other), width)
            if bias is not None:
                return reader, bias
    return node, None


def _constant(graph: GraphView, value: ir.Value | None) -> Float32 | None:
    """The content of a finite float32 constant, None if the value is anything else."""
    tensor = graph.constant(value)
    if tensor is None or tensor.data_type != onnx.TensorProto.FLOAT:
        return None
    array = np.asarray(array_in(tensor), np.float32)
    return array if np.isfinite(array).all() else None


def _row(array: Float32 | None, width: int) -> Float32 | None:
    """A constant as a bias of shape (width,), None if it is none; one number stands for all columns."""
    if array is None or array.ndim > 2 or array.size not in (1, width) or (array.ndim == 2 and array.shape[0] != 1):
        return None
    return np.ascontiguousarray(np.broadcast_to(array.reshape(-1), (width,)))


_MIN_OPSET = 11  # DynamicQuantizeLinear


def dynamic(
    proto: onnx.ModelProto, *, reduce_range: bool = False, largest_pair: int | None = LARGEST_PAIR
) -> onnx.ModelProto | None:
    """A copy of a model with dynamically quantized linear layers, None if it has none.

    Whether the installed runtime loads the result is for the caller to see.

    Args:
        proto: A prepared float model. Not changed.
        reduce_range: 7-bit weights.
        largest_pair: What two neighbouring weights of one sign may sum to where kernels add their products in int16;
            None where none do.
    """
    if opset_of(proto) < _MIN_OPSET:
        return None
    orders = () if largest_pair is None else (ROWS_DOWN,)
    how: Mapping[str, Any] = {"reduce_range": reduce_range, "orders": orders, "largest_pair": largest_pair}
    weights: dict[tuple[str, bool], tuple[ir.Value, ir.Value]] = {}  # which several layers may share, like data
    integers: dict[str, list[ir.Value]] = {}

    def make(layer: LinearLayer, graph: LiveGraph) -> bool:
        if layer.weight not in weights:
            quantized, name = quantize_weight(layer.matrix, axis=1, **how), layer.constant.name
            values = graph.add_constant(quantized.values, f"{name}_int8")
            weights[layer.weight] = values, graph.add_constant(quantized.scale, f"{name}_scale")
        weight, scale = weights[layer.weight]
        bias = None if layer.bias is None else graph.add_constant(layer.bias, f"{layer.output}_bias")
        kind, inputs = "DynamicQuantizeMatMul", [layer.node.inputs[0], weight, scale, None, bias]
        if layer.siblings > 1:
            name = layer.data
            if name not in integers:
                made = [ir.Value(name=graph.fresh_name(f"{name}_{part}")) for part in ("uint8", "scale", "zero_point")]
                base = graph.fresh_name(f"{name}_quantize")
                graph.insert_before(layer.last, "DynamicQuantizeLinear", layer.node.inputs[:1], output=made, base=base)
                integers[name] = made
            data, data_scale, zero_point = integers[name]
            kind, inputs = "MatMulIntegerToFloat", [data, weight, data_scale, scale, zero_point, None, bias]
        while inputs[-1] is None:
            inputs.pop()
        become(graph, layer, kind, inputs)
        return True

    return exchange_layers(proto, make)
