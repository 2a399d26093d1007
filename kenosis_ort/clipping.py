"""What a quantized model computes on x86-64 processors of other classes, simulated bit by bit on the one at hand.

The runtime writes the optimized graph down. It is cut at the layers of which pairs of products can clip in int16 (see
`kenosis_ort.graph.product_pairs`); what lies between them runs in the runtime as it is. The sums of such a layer are
made here in float64, where they are exact, what clipping takes from the pairs that can clip is added, and the result is
scaled and rounded in float32 as the runtime does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from kenosis_ort.errors import CalibrationError, UnsupportedModelError, last_gate
from kenosis_ort.graph import product_pairs
from kenosis_ort.graph.load import read_source
from kenosis_ort.graph.outside import array_in
from kenosis_ort.graph.shapes import windows
from kenosis_ort.graph.walk import attribute_float, attribute_int, read_names
from kenosis_ort.runtime.session import Array, Model, open_session, session_options, write_optimized
from kenosis_ort.storage.writing import Scratch
from kenosis_ort.targets.proof import ClippingLoss

Feed = Mapping[str, Any]
_INT16: Final = np.iinfo(np.int16)
_POSITIONS: Final = 4096  # of a picture, taken at a time: they bound the memory of pairs


@last_gate
def clipping_loss(model: Model, feeds: Iterable[Feed], *, samples: int = 32) -> tuple[ClippingLoss, ...]:
    """Loss of a quantized model's outputs on x86-64 processors that add pairs of products in int16.

    Args:
        model: Path, serialized model or `ModelProto` of QDQ or QOperator form, by any tool. Not changed.
        feeds: Samples, arrays by input name.
        samples: Most of them that are run.

    Returns:
        One entry an output of numbers, the same whichever processor this runs on.

    Raises:
        CalibrationError: There are no samples.
        ModelLoadError: The file is missing or is not an ONNX model.
        UnsupportedModelError: A layer that can clip is of a form that is not simulated.
        VerificationError: The runtime refuses the model.
    """
    simulation = ClippingSimulation(model)
    taken = list(itertools.islice(iter(feeds), samples))
    if not taken:
        raise CalibrationError("there are no samples to run the model on", fix="pass some data")
    exact = [simulation.run(feed, clips=False) for feed in taken]
    clipped = [simulation.run(feed, clips=True) for feed in taken] if simulation.layers else exact
    return tuple(_loss(name, exact, clipped) for name in exact[0] if exact[0][name].dtype.kind in "fiu")


def _loss(name: str, exact: Sequence[Mapping[str, Array]], clipped: Sequence[Mapping[str, Array]]) -> ClippingLoss:
    want, got = ([np.asarray(each[name], np.float64) for each in outputs] for outputs in (exact, clipped))
    signal = sum(float(np.square(a).sum()) for a in want)
    noise = sum(float(np.square(a - b).sum()) for a, b in zip(want, got, strict=True))
    db = np.inf if noise == 0.0 else 10.0 * np.log10(max(signal, np.finfo(float).tiny) / noise)
    same = None
    if all(a.ndim and a.shape[-1] > 1 for a in want):
        equal = [a.argmax(-1) == b.argmax(-1) for a, b in zip(want, got, strict=True)]
        same = float(np.mean(np.concatenate([each.reshape(-1) for each in equal])))
    return ClippingLoss(name, float(db), same)


class ClippingSimulation:
    """Runs a model with exact or with clipped sums of pairs, whichever the processor at hand computes.

    Args:
        model: As for `clipping_loss`.

    Attributes:
        layers: Names of the layers of which pairs can clip.

    Raises:
        UnsupportedModelError: A layer that can clip is of a form that is not simulated.
        VerificationError: The runtime refuses the model.
    """

    def __init__(self, model: Model) -> None:
        self._model = _optimized(model)
        graph = self._model.graph
        self._tensors = {t.name: t for t in graph.initializer}
        self._outputs = [value.name for value in graph.output]
        self._inputs = [value.name for value in graph.input if value.name not in self._tensors]
        self._parts = self._cut(graph.node)
        self.layers = tuple(part.nodes[0].name for part in self._parts if part.order is not None)
        self._sessions: dict[int, ort.InferenceSession] = {}

    def run(self, feed: Feed, *, clips: bool) -> dict[str, Array]:
        """Outputs by name.

        Args:
            feed: Arrays by input name.
            clips: Sums of pairs are clipped to int16, as without VNNI; else exact, as with it.
        """
        known: dict[str, Any] = {name: feed[name] for name in self._inputs if name in feed}
        for at, part in enumerate(self._parts):
            if part.order is None:
                known.update(self._between(at, part, known))
            else:
                (layer,) = part.nodes
                call = _Call(layer, [self._value(name, known) for name in layer.input], part.order, clips)
                known[layer.output[0]] = _OPERATORS[layer.op_type](call)
            known = {name: value for name, value in known.items() if name in part.needed}
        return {name: np.asarray(self._value(name, known)) for name in self._outputs}

    def _cut(self, nodes: Sequence[onnx.NodeProto]) -> list[_Part]:
        """Parts in order: a layer that can clip, or what lies between two of them."""
        orders = [self._order(node) for node in nodes]
        parts = []
        for is_between, group in itertools.groupby(zip(nodes, orders, strict=True), lambda each: each[1] is None):
            members = list(group)
            if is_between:
                parts.append(_Part([node for node, _ in members]))
            else:
                parts += [_Part([node], order) for node, order in members]
        needed = frozenset(self._outputs)
        for part in reversed(parts):
            part.needed = needed
            needed |= part.reads
        return parts

    def _order(self, node: onnx.NodeProto) -> product_pairs.PairOrder | None:
        """Order in which a layer that can clip reads its weights, None for other nodes."""
        at = product_pairs.stored_weights(node)
        tensor = None if at is None or at >= len(node.input) else self._tensors.get(node.input[at])
        zero_point = self._tensors.get(product_pairs.data_zero_point(node))
        if tensor is None or tensor.data_type != TensorProto.INT8:
            return None
        if zero_point is not None and zero_point.data_type == TensorProto.INT8:
            return None
        order = product_pairs.pair_order(node, tuple(tensor.dims))
        if order is None or not product_pairs.can_clip(array_in(tensor), order).any():
            return None
        if node.op_type not in _OPERATORS or order.rows != 1:
            raise UnsupportedModelError(
                f"clipped products of {node.op_type} with weights of shape {tuple(tensor.dims)} are not simulated",
                where=f"node '{node.name}'",
                fix="ask without data which layers can clip",
            )
        return order

    def _value(self, name: str, known: Mapping[str, Any]) -> Array | None:
        if name in self._tensors:
            return np.asarray(array_in(self._tensors[name]))
        return np.asarray(known[name]) if name else None

    def _between(self, at: int, part: _Part, known: Mapping[str, Any]) -> dict[str, Any]:
        """Runs the nodes of a part in the runtime."""
        wanted = [name for node in part.nodes for name in node.output if name in part.needed]
        given = {name: known[name] for name in sorted(part.reads) if name in known}
        if at not in self._sessions:
            kinds = {n: helper.np_dtype_to_tensor_dtype(np.asarray(v).dtype) for n, v in given.items()}
            typed = [helper.make_tensor_value_info(n, kind, None) for n, kind in kinds.items()]
            tensors = [self._tensors[name] for name in sorted(part.reads) if name in self._tensors]
            graph = helper.make_graph(part.nodes, "part", typed, [onnx.ValueInfoProto(name=n) for n in wanted], tensors)
            opsets, version = self._model.opset_import, self._model.ir_version
            model = helper.make_model(graph, ir_version=version, opset_imports=opsets)
            self._sessions[at] = open_session(model, optimize=False)
        return dict(zip(wanted, self._sessions[at].run(wanted, given), strict=True))


@dataclass
class _Part:
    """Nodes that run together.

    Attributes:
        nodes: In order.
        order: In which the only node, a layer of which pairs can clip, reads its weights; None for a part that the
            runtime runs.
        needed: Names of the values that later parts or the model's outputs read.
    """

    nodes: Sequence[onnx.NodeProto]
    order: product_pairs.PairOrder | None = None
    needed: frozenset[str] = frozenset()

    @property
    def reads(self) -> frozenset[str]:
        """Names of all values that its nodes read."""
        return frozenset(name for node in self.nodes for name in read_names(node) if name)


def _optimized(model: Model) -> onnx.ModelProto:
    """The model as the runtime optimizes it, but for the layouts of one processor's float kernels."""
    source = read_source(model)
    with Scratch("verify") as folder:
        options = session_options()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        write_optimized(options, folder / "model.onnx", 1 << 40)
        open_session(source.proto, options=options, folder=source.folder, name=source.name)
        return onnx.load(folder / "model.onnx")


# ---- the arithmetic of layers ---------------------------------------------------------------------------------------


def _sums(data: Array, zero: int, stored: Array, zeros: Array, *, clips: bool) -> Array:
    """Sums of products, exact or of clipped pairs, of shape (n, rows).

    Args:
        data: uint8 of shape (n, K), as the kernel reads them.
        zero: Their zero point.
        stored: int8 weights of shape (rows, K), neighbours side by side.
        zeros: Their zero points, shape (rows,).
        clips: Sums of two products are clipped to int16.
    """
    real = stored.astype(np.float64) - zeros[:, None]
    sums = (data.astype(np.float64) - zero) @ real.T
    if not clips:
        return np.asarray(sums)
    odd = [(0, 0), (0, data.shape[1] % 2)]
    data, stored = np.pad(data, odd), np.pad(stored, odd)
    first, second = data[:, ::2].astype(np.int32), data[:, 1::2].astype(np.int32)
    for row, weights in enumerate(stored.reshape(len(stored), -1, 2).astype(np.int32)):
        pairs = np.flatnonzero(np.abs(weights.sum(axis=1)) > product_pairs.LARGEST_PAIR)
        if pairs.size:
            product = first[:, pairs] * weights[pairs, 0] + second[:, pairs] * weights[pairs, 1]
            sums[:, row] += (np.clip(product, _INT16.min, _INT16.max) - product).sum(axis=1)
    return np.asarray(sums)


class _Call(NamedTuple):
    """One run of a layer.

    Attributes:
        node: The layer.
        values: What it reads, None for optional inputs that it lacks.
        order: In which it reads its weights.
        clips: Sums of pairs are clipped to int16.
    """

    node: onnx.NodeProto
    values: Sequence[Any]
    order: product_pairs.PairOrder
    clips: bool

    def inputs(self, count: int) -> Sequence[Any]:
        """The first inputs, None for those it lacks."""
        return [*self.values, *[None] * count][:count]


def _matrix(call: _Call, data: Array, zero: Array | None, stored: Array, zeros: Array | None) -> Array:
    """Sums of a product of data (..., K) with a matrix, of shape (..., N)."""
    rows = stored.transpose(call.order.axes)
    spread = np.broadcast_to(np.zeros(1) if zeros is None else zeros.reshape(-1).astype(np.float64), len(rows))
    flat = data.reshape(-1, data.shape[-1])
    sums = _sums(flat, 0 if zero is None else int(zero.reshape(-1)[0]), rows, spread, clips=call.clips)
    return sums.reshape(*data.shape[:-1], len(rows))


def _requantized(sums: Array, scale: Array, out_zero: Array) -> Array:
    """Integers of the output's type: scaled in float32, rounded half to even."""
    limits = np.iinfo(out_zero.dtype)
    scaled = np.rint(sums.astype(np.float32) * scale.astype(np.float32)) + np.float32(out_zero.reshape(-1)[0])
    return np.asarray(np.clip(scaled, limits.min, limits.max).astype(out_zero.dtype))


def _conv(call: _Call) -> Array:
    """QLinearConv."""
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias = call.inputs(9)
    groups, taps = attribute_int(call.node, "group", 1), w.ndim - 2
    known = {a.name: list(a.ints) for a in call.node.attribute if a.name in ("strides", "dilations", "pads")}
    auto_pad = next((a.s.decode() for a in call.node.attribute if a.name == "auto_pad"), "")
    views = windows(x, w.shape[2:], **known, auto_pad=auto_pad, filling=x_zero.reshape(-1)[0])
    shape = views.shape[2 : 2 + taps]
    rows = w.transpose(call.order.axes).reshape(len(w), -1)
    zeros = np.broadcast_to(w_zero.reshape(-1).astype(np.float64), len(w))
    per_group, channels = len(w) // groups, x.shape[1] // groups
    out = np.empty((len(x), len(w), int(np.prod(shape))), np.float64)
    for image, group in itertools.product(range(len(x)), range(groups)):
        part = views[image, group * channels : (group + 1) * channels]
        flat = np.moveaxis(part, 0, -1).reshape(int(np.prod(shape)), -1)  # (places, window and channel)
        own = slice(group * per_group, (group + 1) * per_group)
        for at in range(0, len(flat), _POSITIONS):
            piece = flat[at : at + _POSITIONS]
            out[image, own, at : at + _POSITIONS] = _sums(piece, int(x_zero), rows[own], zeros[own], clips=call.clips).T
    if bias is not None:
        out += bias.reshape(-1, 1)
    scale = np.broadcast_to((x_scale * w_scale / y_scale).reshape(-1), len(w))[:, None]
    return _requantized(out, scale, y_zero).reshape(len(x), len(w), *shape)


def _product(call: _Call) -> Array:
    """QLinearMatMul."""
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = call.inputs(8)
    sums = _matrix(call, a, a_zero, b, b_zero)
    return _requantized(sums, np.asarray(a_scale * b_scale / y_scale).reshape(-1), y_zero)


def _gemm(call: _Call) -> Array:
    """QGemm."""
    a, a_scale, a_zero, b, b_scale, b_zero, bias, y_scale, y_zero = call.inputs(9)
    sums = _matrix(call, a.T if attribute_int(call.node, "transA", 0) else a, a_zero, b, b_zero)
    sums = sums if bias is None else sums + bias
    scale = np.float32(attribute_float(call.node, "alpha", 1.0)) * a_scale * b_scale
    if y_scale is None:
        return np.asarray(sums.astype(np.float32) * scale.reshape(-1).astype(np.float32))
    return _requantized(sums, (scale / y_scale).reshape(-1), y_zero)


def _integer(call: _Call) -> Array:
    """MatMulInteger."""
    a, b, a_zero, b_zero = call.inputs(4)
    return np.asarray(_matrix(call, a, a_zero, b, b_zero).astype(np.int32))


def _to_float(call: _Call) -> Array:
    """MatMulIntegerToFloat."""
    a, b, a_scale, b_scale, a_zero, b_zero, bias = call.inputs(7)
    sums = _matrix(call, a, a_zero, b, b_zero)
    real = sums.astype(np.float32) * np.asarray(a_scale * b_scale, np.float32).reshape(-1)
    return np.asarray(real if bias is None else real + bias)


def _dynamic(call: _Call) -> Array:
    """DynamicQuantizeMatMul."""
    a, b, b_scale, b_zero, bias = call.inputs(5)
    low, high = min(float(a.min(initial=0.0)), 0.0), max(float(a.max(initial=0.0)), 0.0)
    scale = np.float32((np.float32(high) - np.float32(low)) / np.float32(255)) or np.float32(1)
    zero = np.uint8(np.rint(np.clip(np.float32(-low) / scale, 0, 255)))
    data = np.clip(np.rint(a / scale) + np.float32(zero), 0, 255).astype(np.uint8)
    return _to_float(call._replace(values=(data, b, scale, b_scale, np.asarray(zero), b_zero, bias)))


_OPERATORS: Final[Mapping[str, Callable[[_Call], Array]]] = {
    "QLinearConv": _conv,
    "QLinearMatMul": _product,
    "QGemm": _gemm,
    "MatMulInteger": _integer,
    "MatMulIntegerToFloat": _to_float,
    "DynamicQuantizeMatMul": _dynamic,
}
