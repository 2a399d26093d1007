"""Rows of a linear layer's input brought to one size at run time: dynamic quantization by token on static kernels.

With ``r`` the largest magnitude of each row of ``x`` (a token, as a rule)::

    x @ W + b = r * ((x / r) @ W) + b

``x / r`` lies in [-1, 1] whatever the token, so that one static range serves rows of all sizes: a massive first or last
token costs the others nothing. In float nothing changes but for rounding. The runtime keeps its static integer kernel,
behind Abs, ReduceMax, Max and Div; for 128 rows of 3072 in front of 768 units that takes 4 to 15 % longer than the
static layer alone, half of what ``MatMulNBits`` takes, the only kernel that quantizes by row itself;
``DynamicQuantizeMatMul``, as fast as static, has one range for all rows of a call.
Source: per-token quantization as in Yao et al., "ZeroQuant", NeurIPS 2022, https://arxiv.org/abs/2206.01861, section
4.1, by the algebra above instead of kernels; massive tokens: Sun et al. 2024, https://arxiv.org/abs/2402.17762.

The product is written as a Div by ``1 / r``, which no runtime has an integer kernel for, so that no planner finds one.
Layers that read one value share the sizes of its rows. Not changed: layers over constants, Gemms with alpha or transA.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from kenosis_ort.accuracy.channel_statistics import float_ranks
from kenosis_ort.calibration.statistics import Rescaling
from kenosis_ort.graph.live import Attribute, LiveGraph
from kenosis_ort.graph.shapes import infer_shapes
from kenosis_ort.graph.view import GraphView, ir
from kenosis_ort.passes import contract
from kenosis_ort.passes.input_moments import observe
from kenosis_ort.passes.layers import Float64, Layer, layer_of
from kenosis_ort.passes.recipe import setting

_AXES_ARE_INPUTS: Final = 18
_LEAST: Final = 1e-30
"""Rows of zeros stay zeros."""
_LEVELS: Final = 255
_LEAST_SIZE: Final = 16  # of both sides of a matrix; sizing rows costs more than smaller products


class RowNoise(NamedTuple):
    """Rounding noise of a value by row, for layers that read it.

    Attributes:
        value: Its name.
        layers: Names of the linear layers that read it.
        static: Mean over all rows of the noise as a share of the row's signal, at most 1, in one range for all.
        by_row: The same in a range of each row's own.
        price: Elements a row that sizing reads and writes.
    """

    value: str
    layers: tuple[str, ...]
    static: float
    by_row: float
    price: int

    @property
    def gain(self) -> float:
        """Noise that sizing its rows takes away, for its price."""
        return (self.static - self.by_row) / self.price


def row_noise(
    graph: GraphView,
    feeds: Sequence[Mapping[str, Any]],
    *,
    nodes: Collection[str],
    custom_op_libraries: Sequence[str] = (),
) -> list[RowNoise]:
    """Error of one range for all rows, for each value that linear layers read.

    Args:
        graph: Prepared float model, shapes inferred.
        feeds: Samples, at least one.
        nodes: Names of the integer layers.
        custom_op_libraries: Shared libraries with custom operators to register.

    Raises:
        CalibrationError: The model fails on a sample.
    """
    groups = _groups(graph, nodes)
    if not groups:
        return []
    seen: dict[str, list[Float64]] = {group.name or "": [] for group in groups}

    def take(arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        for name, array in arrays.items():
            rows = array.reshape(-1, array.shape[-1])
            parts = rows.min(axis=1), rows.max(axis=1), np.einsum("rc,rc->r", rows, rows)
            seen[name].append(np.array(parts, np.float64))

    observe(graph.proto, seen, feeds, take, custom_op_libraries)
    noise = []
    for group, layers in groups.items():
        low, high, squares = np.concatenate(seen[group.name or ""], axis=1)
        alive = squares > 0.0
        if alive.any():
            static, by_row = _shares(low[alive], high[alive], squares[alive] / layers[0].channels_in)
            # Abs, ReduceMax and Div read the row, and a Div each layer's output.
            price = 3 * layers[0].channels_in + sum(layer.channels_out for layer in layers)
            noise.append(RowNoise(group.name or "", tuple(layer.name for layer in layers), static, by_row, price))
    return noise


def with_row_scales(
    model: onnx.ModelProto, values: Collection[str], *, nodes: Collection[str]
) -> tuple[onnx.ModelProto, dict[str, int]]:
    """The model with the rows of some values brought to one size in front of the layers that read them.

    Args:
        model: Prepared float model, shapes inferred. Not changed.
        values: Some of those that `row_noise` named.
        nodes: Names of the integer layers.

    Returns:
        A copy, equal to the original in float but for rounding; and the values of one size, which the layers read now,
        with their channels.
    """
    graph, scaled = LiveGraph(model, copied=True), dict[str, int]()
    least = graph.register(numpy_helper.from_array(np.asarray(_LEAST, np.float32), graph.fresh_name("least_row")))
    is_input = graph.opset() >= _AXES_ARE_INPUTS
    axes = [graph.add_constant(np.array([-1], np.int64), "row_axes")] if is_input else []
    as_attribute: dict[str, Attribute] = {} if is_input else {"axes": [-1]}
    for value, layers in _groups(graph, nodes).items():
        if value.name not in values:
            continue
        first, add, parts = layers[0].node, graph.insert_before, ("size", "largest", "rows", "inverse", "even")
        size, largest, rows, inverse, even = (_value(graph, f"{value.name}_{part}") for part in parts)
        add(first, "Abs", [value], output=size, base=f"{size.name}_Abs")
        add(first, "ReduceMax", [size, *axes], output=largest, base=largest.name or "", keepdims=1, **as_attribute)
        add(first, "Max", [largest, least], output=rows, base=f"{rows.name}_Max")
        add(first, "Div", [value, rows], output=even, base=f"{even.name}_Div")
        add(first, "Reciprocal", [rows], output=inverse, base=f"{inverse.name}_Reciprocal")
        scaled[even.name or ""] = layers[0].channels_in
        for layer in layers:
            _read_even(layer, graph, even, inverse)
    result = graph.write()
    infer_shapes(result, thorough=False)
    return result, scaled


def _read_even(layer: Layer, graph: LiveGraph, even: ir.Value, inverse: ir.Value) -> None:
    """Gives a layer rows of one size, and its output their sizes; a Gemm's bias comes behind that."""
    node, name = layer.node, layer.output.name
    graph.read(node, 0, even)
    bias = _taken_off(layer, graph)
    output = graph.hand_over(layer.output, f"{name}_even")
    scaled = output if bias is None else _value(graph, f"{name}_scaled")
    graph.append_behind(node, "Div", [layer.output, inverse], output=scaled, base=f"{scaled.name}_Div")
    if bias is not None:
        graph.append_behind(node, "Add", [scaled, bias], output=output, base=f"{output.name}_Add")


def _taken_off(layer: Layer, graph: LiveGraph) -> ir.Value | None:
    """Takes the bias off a Gemm; returns a constant to add instead, None for none or zeros."""
    if layer.bias is None:
        return None
    beta = layer.node.attributes.get_float("beta", 1.0)
    bias: Float64 = beta * np.asarray(graph.content(layer.bias), np.float64)
    graph.read(layer.node, 2, None)
    layer.node.resize_inputs(2)
    return graph.add_constant(bias.astype(np.float32), f"{layer.bias.name}_behind") if bias.any() else None


def _value(graph: LiveGraph, base: str) -> ir.Value:
    return ir.Value(name=graph.fresh_name(base))


def _groups(graph: GraphView, nodes: Collection[str]) -> dict[ir.Value, list[Layer]]:
    """The layers whose rows can be scaled, by the value that they read, in graph order."""
    ranks = float_ranks(graph.proto)
    found: dict[ir.Value, list[Layer]] = {}
    for node in graph.nodes:
        if node.op_type not in ("MatMul", "Gemm") or node.name not in nodes:
            continue
        layer, value = layer_of(node, graph), node.inputs[0]
        if layer is None or value is None or node.attributes.get_float("alpha", 1.0) != 1.0:
            continue
        if (graph.dims(value) or ())[:-1] == (1,):
            continue  # a single row, which has none beside it
        if ranks.get(layer.data, 0) >= 2 and min(layer.shape) >= _LEAST_SIZE:
            found.setdefault(value, []).append(layer)
    return found


def _shares(low: Float64, high: Float64, power: Float64) -> tuple[float, float]:
    """The mean share of rounding's noise, a twelfth of the squared step, in rows' power: static, and by row."""
    least = min(float(low.min()), 0.0)
    whole = max(float(high.max()), 0.0) - least
    own = np.maximum(high, -low) * (2 if least < 0.0 else 1)
    static, by_row = (float(np.minimum((width / _LEVELS) ** 2 / (12 * power), 1.0).mean()) for width in (whole, own))
    return static, by_row


_FEEDS: Final = 8  # rows are many in each
_GAIN: Final = 2.0  # 3 dB of a layer's own noise
_MASSIVE: Final = 8.0  # 9 dB: some row has three times the range of the others; rows of normal numbers have 3 to 4 dB
_NOISE: Final = 1e-4  # of a row's signal, below which one range is good enough
_WORTH: Final = 0.8  # of the error is left: 1 dB, without which nothing is done
_MORE: Final = 0.5  # of the error is left with twice the layers, each of which takes a tenth longer


@dataclass(frozen=True)
class RowScales(contract.WeightPass):
    """Rows of a linear layer's input, tokens as a rule, are brought to one size where one range cannot serve all.

    It comes before equalization and SmoothQuant: these would spend channels on what is a matter of few tokens. What is
    a matter of channels, whose rows differ in size too, is left to SmoothQuant, which costs no time.

    Attributes:
        row_scales: Layers whose rows differ much in size get the size of each row at run time.
    """

    name: ClassVar[str] = "row_scales"
    title: ClassVar[str] = "Scaling of rows"

    row_scales: bool = setting("row_scales")

    def points(self, state: contract.State, context: contract.Context) -> Mapping[str, int]:
        smoothing = context.active.get("smooth")
        return {} if smoothing is None else smoothing.points(state, context)

    def apply(
        self, state: contract.State, statistics: contract.Statistics, context: contract.Context
    ) -> contract.Candidate | contract.Skipped:
        if not context.mixes:
            return contract.Skipped("the runtime takes no float node between integer ones")
        found = [
            each
            for each in row_noise(
                state.prepared.graph,
                context.fit[:_FEEDS],
                nodes=context.nodes,
                custom_op_libraries=context.custom_op_libraries,
            )
            if each.static > max(_GAIN * each.by_row, _NOISE)
        ]
        if not any(each.static > _MASSIVE * each.by_row for each in found):
            return contract.Skipped("one range serves all rows")
        found.sort(key=lambda each: -each.gain)
        before, changed, count = context.score(state), _scaled(state, found, context), len(found)
        first = best = context.score(changed)
        if not (first.beats(before) and first.error < _WORTH * before.error):
            return contract.Skipped(f"the error does not fall by 1 dB with {count} values scaled by row")
        smoothing = context.active.get("smooth")
        smoothed = None if smoothing is None else smoothing.apply(state, statistics, context)
        if isinstance(smoothed, contract.Candidate) and not first.error < _WORTH * context.score(smoothed.state).error:
            return contract.Skipped(
                "the outliers are channels: smoothing them leaves no more of the error, and costs no time"
            )
        while half := count // 2:  # with the most to gain, as long as these serve as well
            fewer = _scaled(state, found[:half], context)
            score = context.score(fewer)
            if _MORE * score.error > best.error:
                break
            changed, count, best = fewer, half, min(best, score, key=lambda each: each.error)
        return contract.Candidate(changed, f"{_layers(found[:count])} layers behind {count} values", decided=True)


def _scaled(state: contract.State, found: Sequence[RowNoise], context: contract.Context) -> contract.State:
    """The state with some values scaled by row; all others stay what they were."""
    model, values = with_row_scales(state.prepared.proto, [each.value for each in found], nodes=context.nodes)
    note = (
        f"Rows brought to one size at run time in front of {_layers(found)} linear layers: one range does not serve "
        "tokens that differ so much."
    )
    return state.with_weights(model, (note,), {v: Rescaling(-1, np.ones(n)) for v, n in values.items()})


def _layers(found: Sequence[RowNoise]) -> int:
    return sum(len(each.layers) for each in found)
