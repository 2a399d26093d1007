"""Means by channel of a float model and of its quantized form, as bias correction compares them.

Where samples can be stacked, the quantized model corrects itself in one run over all of them: each layer's output is
followed by nodes that compute what `Response.shift_for` does, and the layers behind see the shifted output. Whether a
graph takes another batch than it was exported with, and whether its rows are samples of their own, is tried on the
float model: the means of the last feed by itself have to be those that it has behind a row of the feed before it.
Means of the float model need no stack: feed by feed they take half as long, since memory is not paged in anew.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from kenosis_ort.accuracy.channel_statistics import LEAST_SLOPE, Activation, channel_statistics
from kenosis_ort.calibration.parts import estimate_bytes
from kenosis_ort.calibration.statistics import ChannelStatistics
from kenosis_ort.errors import VerificationError
from kenosis_ort.graph import walk
from kenosis_ort.graph.outside import array_in
from kenosis_ort.graph.shapes import shaped_by
from kenosis_ort.graph.view import ir
from kenosis_ort.passes.layers import Float64
from kenosis_ort.runtime.session import open_session

_log = logging.getLogger(__name__)
Array = npt.NDArray[Any]
Means = npt.NDArray[np.float32]
Feed = Mapping[str, Any]
_AXES_ARE_INPUTS = 18  # operator set from which ReduceMean takes its axes as an input
_TINY = 1e-37
_ALIKE = 1e-3  # of the largest mean of a value: another batch may take another kernel
_MOST_BYTES = 2**30  # of what is alive at a time
_ALIVE = 6  # times the largest layer output of all samples: outputs of neighbours, in float and quantized and back


class Corrected(NamedTuple):
    """A layer whose bias may move.

    Attributes:
        layer: Its name.
        quantized: Name of its output in the quantized model.
        activation: What follows it in the float model.
        axis: Axis of the channels, not negative.
        rank: Rank of its output.
    """

    layer: str
    quantized: str
    activation: Activation
    axis: int
    rank: int


def shifts_in_one_run(
    model: onnx.ModelProto,
    quantized: onnx.ModelProto,
    feeds: Sequence[Feed],
    targets: Sequence[Corrected],
    float_means: FloatMeans,
    libraries: Sequence[str],
) -> dict[str, Float64] | None:
    """The shifts of all layers, None where the samples cannot be run in one batch.

    Args:
        model: The float model. Not changed.
        quantized: The quantized model in QDQ form. Not changed.
        feeds: Samples or batches of them.
        targets: The layers.
        float_means: Knows, and keeps, means of the float model from one call to the next.
        libraries: Shared libraries of custom operators to register.

    Returns:
        Shifts in the units of the output, float64 (channels,), by layer name.
    """
    stacked = _stacked(feeds)
    if stacked is None:
        return None
    times = len(next(iter(stacked.values()))) / len(next(iter(feeds[0].values())))  # of an export for one batch too
    if times > feeds_within(_MOST_BYTES, model, feeds[0], [t.activation.value for t in targets]):
        return None
    try:
        expected = float_means.of(model, feeds, targets, libraries)
        if expected is None:
            return None
        constants = {t.name: t for t in model.graph.initializer}
        made = _Made(quantized, {target.quantized for target in targets}, _open_shapes(model), renamed=True)
        outputs = [made.corrected(t, wanted, constants) for t, wanted in zip(targets, expected, strict=True)]
        session = open_session(made.finished(outputs), threads=0, custom_op_libraries=libraries)
        found = session.answer(stacked, outputs).values()
    except VerificationError as error:
        _log.info("biases are corrected layer by layer: %s", error)
        return None
    return {t.layer: np.asarray(shift, np.float64).reshape(-1) for t, shift in zip(targets, found, strict=True)}


def feeds_within(budget: int, model: onnx.ModelProto, feed: Feed, values: Sequence[str]) -> float:
    """Number of feeds like one that a run takes together in a budget of bytes; infinite where sizes are not known.

    Args:
        budget: Of what is alive at a time.
        model: The float model, shapes inferred.
        feed: One of them.
        values: The outputs of layers.
    """
    sizes = estimate_bytes(model, feed, values)
    if len(sizes) < len({*values}):  # as behind a Reshape to a computed size, which hides the batch
        sizes = estimate_bytes(shaped_by(model, feed), feed, values)
    largest = max(sizes.values(), default=0)
    return budget / (_ALIVE * largest) if largest else math.inf


def _stacked(feeds: Sequence[Feed]) -> dict[str, Array] | None:
    """One feed with the rows of all, None where the inputs have no rows in common."""
    for feed in feeds:
        rows = {len(value) if isinstance(value, np.ndarray) and value.ndim else 0 for value in feed.values()}
        if len(rows) != 1 or 0 in rows or feed.keys() != feeds[0].keys():
            return None
    if not feeds or any(np.shape(feed[n])[1:] != np.shape(feeds[0][n])[1:] for feed in feeds for n in feed):
        return None
    return {name: np.concatenate([feed[name] for feed in feeds]) for name in feeds[0]}


class FloatMeans:
    """Means of values of the float model by sample and channel, computed once for the same model and samples.

    Biases are corrected for each choice of ranges anew, and always against the same means.
    """

    def __init__(self) -> None:
        self._model: onnx.ModelProto | None = None
        self._feeds: list[Feed] = []
        self._known: dict[tuple[str, int], Means] = {}
        self._statistics: dict[str, ChannelStatistics] = {}
        self._stacks = True

    def one_by_one(
        self, model: onnx.ModelProto, feeds: Sequence[Feed], axes: Mapping[str, int], libraries: Sequence[str]
    ) -> Mapping[str, ChannelStatistics]:
        """Statistics of values by channel, as `channel_statistics` returns them, of samples run one by one."""
        self._begin(model, feeds)
        missing = {value: axis for value, axis in axes.items() if value not in self._statistics}
        if missing:
            self._statistics |= channel_statistics(model, feeds, missing, custom_op_libraries=libraries)
        return self._statistics

    def _begin(self, model: onnx.ModelProto, feeds: Sequence[Feed]) -> None:
        """Forgets what is of another model, or of other samples."""
        if model is not self._model or list(map(id, feeds)) != list(map(id, self._feeds)):
            self._model, self._feeds, self._known, self._statistics = model, list(feeds), {}, {}
            self._stacks = True

    def of(
        self, model: onnx.ModelProto, feeds: Sequence[Feed], targets: Sequence[Corrected], libraries: Sequence[str]
    ) -> list[Means] | None:
        """The means behind each activation, float32, of its rank with axes of rows and channels.

        Returns None where they depend on the batch.

        Raises:
            VerificationError: The runtime does not load the model, or refuses a feed or two stacked.
        """
        self._begin(model, feeds)
        missing = {(t.activation.output, t.axis): t for t in targets}
        missing = {key: target for key, target in missing.items() if key not in self._known}
        if missing and self._stacks:
            made = _Made(model, {value for value, _ in missing}, _open_shapes(model))
            outputs = [made.means(value, target) for (value, _), target in missing.items()]
            self._stacks = False  # also where the runtime refuses
            runner = open_session(made.finished(outputs), threads=0, custom_op_libraries=libraries)
            last = list(runner.answer(feeds[-1], outputs).values())
            if len(feeds) > 1:
                # Of one axis are the bytes of a picture too, of which the last one is no picture.
                rows = slice(-1, None) if all(np.ndim(value) > 1 for value in feeds[-1].values()) else slice(None)
                behind = {name: np.concatenate([feeds[-2][name][rows], value]) for name, value in feeds[-1].items()}
                together = runner.answer(behind, outputs).values()
                if not all(_are_last_rows(a, b) for a, b in zip(last, together, strict=True)):
                    return None
            self._stacks = True
            found = [*([*runner.answer(feed, outputs).values()] for feed in feeds[:-1]), last]
            means = ([np.asarray(array, np.float32) for array in arrays] for arrays in zip(*found, strict=True))
            self._known.update(zip(missing, map(np.concatenate, means), strict=True))
        return [self._known[t.activation.output, t.axis] for t in targets] if self._stacks else None


def _are_last_rows(alone: Array, together: Array) -> bool:
    rows = len(alone)
    if not 0 < rows < len(together):
        return False
    return np.allclose(alone, together[-rows:], rtol=0.0, atol=_ALIKE * float(np.abs(together).max(initial=0.0)))


class _Made:
    """The part of a graph that computes some values, for any number of rows, to which nodes are added.

    Args:
        model: Where the values are computed. Not changed.
        values: The values.
        open_shapes: As `_open_shapes` finds them in the float model, whose nodes keep their names.
        renamed: They are computed under another name, `raw`, so that nodes added can give theirs a meaning.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        values: Collection[str],
        open_shapes: Mapping[str, Sequence[int]],
        *,
        renamed: bool = False,
    ) -> None:
        self._model = model
        self._opset = walk.opset_of(model)
        self._prefix = walk.reserve_name("correction", {name.partition("/")[0] for name in walk.all_names(model)})
        self._count = 0
        self._raw = {name: self._name(name) for name in values} if renamed else {}
        self._initializers: list[onnx.TensorProto] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._reads = set(values)
        self._body: list[list[onnx.NodeProto]] = []  # a node, and what was added behind it
        self._behind: dict[str, list[onnx.NodeProto]] = {}
        for node in reversed(model.graph.node):
            if not self._reads.intersection(node.output):
                continue
            self._reads.update(walk.read_names(node))
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            if (shape := open_shapes.get(node.name)) is not None:
                shape_name = self._constant(np.array(shape, np.int64))
                copy = helper.make_node("Reshape", [copy.input[0], shape_name], copy.output, name=copy.name)
            self._body.append([copy])
            for at, name in enumerate(node.output):
                copy.output[at] = self._raw.get(name, name)
                self._behind[name] = self._body[-1]
        self._body.reverse()

    def finished(self, outputs: Sequence[str]) -> onnx.ModelProto:
        """The model; sizes of its inputs are open."""
        source = self._model
        made = onnx.ModelProto(ir_version=source.ir_version)
        made.opset_import.extend(source.opset_import)
        graph = made.graph
        graph.name = "correction"
        graph.node.extend(node for nodes in self._body for node in nodes)
        graph.initializer.extend(t for t in source.graph.initializer if t.name in self._reads)
        graph.initializer.extend(self._initializers)
        graph.input.extend(_with_open_rows(value) for value in source.graph.input)
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
        return made

    def means(self, value: str, target: Corrected, nodes: list[onnx.NodeProto] | None = None) -> str:
        """The means of a value by row and channel, of the value's rank, computed behind it or by further nodes."""
        over = [axis for axis in range(1, target.rank) if axis != target.axis]
        nodes = self._behind[value] if nodes is None else nodes
        return self._mean(value, over, nodes) if over else self._add("Identity", [value], nodes)

    def corrected(self, target: Corrected, expected: Means, constants: Mapping[str, onnx.TensorProto]) -> str:
        """Shifts a layer's output so that the means behind its activation are the expected ones; returns the shift."""
        nodes, raw, rows = self._behind[target.quantized], self._raw[target.quantized], len(expected)
        before = self.means(self._activated(raw, target, constants, nodes), target, nodes)
        off = self._add("Sub", [self._constant(expected), before], nodes)
        wanted = self._mean(off, [0], nodes)
        if rows > 1:  # the mean less what its standard error leaves open, as `certain_mean`
            apart = self._add("Sub", [off, wanted], nodes)
            variance = self._mean(self._add("Mul", [apart, apart], nodes), [0], nodes)
            variance = self._add("Div", [variance, self._number(rows - 1)], nodes)
            squared = self._add("Max", [self._add("Mul", [wanted, wanted], nodes), self._number(_TINY)], nodes)
            share = self._add("Sub", [self._number(1.0), self._add("Div", [variance, squared], nodes)], nodes)
            wanted = self._add("Mul", [wanted, self._add("Max", [share, self._number(0.0)], nodes)], nodes)
        if target.activation.nodes:
            moved = self._add("Add", [raw, wanted], nodes)
            behind = self.means(self._activated(moved, target, constants, nodes), target, nodes)
            gained = self._mean(self._add("Sub", [behind, before], nodes), [0], nodes)
            still = self._add("Equal", [wanted, self._number(0.0)], nodes)  # then any slope will do
            divisor = self._add("Where", [still, self._number(1.0), wanted], nodes)
            slope = self._add("Div", [gained, divisor], nodes)
            wanted = self._add("Div", [wanted, self._add("Max", [slope, self._number(LEAST_SLOPE)], nodes)], nodes)
        nodes.append(helper.make_node("Add", [raw, wanted], [target.quantized]))
        return wanted

    def _activated(
        self, value: str, target: Corrected, constants: Mapping[str, onnx.TensorProto], nodes: list[onnx.NodeProto]
    ) -> str:
        """Value behind a layer's activation, for a value in the place of the layer's output."""
        now = {target.activation.value: value}
        for node in target.activation.nodes:
            copy = ir.to_proto(node)
            copy.name = ""
            for at, name in enumerate(copy.input):
                if name in constants and name not in now:
                    constant = onnx.TensorProto()
                    constant.CopyFrom(constants[name])
                    constant.name = now[name] = self._name(name)
                    self._initializers.append(constant)
                copy.input[at] = now.get(name, name)
            for at, name in enumerate(copy.output):
                copy.output[at] = now[name] = self._name(name)
            nodes.append(copy)
        return now[target.activation.output]

    def _add(self, op_type: str, inputs: list[str], nodes: list[onnx.NodeProto], **attributes: Any) -> str:
        output = self._name(op_type)
        nodes.append(helper.make_node(op_type, inputs, [output], **attributes))
        return output

    def _name(self, what: str) -> str:
        """A new name; none of the model begins like it."""
        self._count += 1
        return f"{self._prefix}/{what}/{self._count}"

    def _mean(self, value: str, axes: list[int], nodes: list[onnx.NodeProto]) -> str:
        if self._opset < _AXES_ARE_INPUTS:
            return self._add("ReduceMean", [value], nodes, axes=axes)
        return self._add("ReduceMean", [value, self._constant(np.array(axes, np.int64))], nodes)

    def _number(self, number: float) -> str:
        return self._constant(np.array(number, np.float32))

    def _constant(self, array: Array) -> str:
        key = array.dtype.str, array.shape, array.tobytes()
        if key not in self._constants:
            self._constants[key] = self._name("constant")
            self._initializers.append(numpy_helper.from_array(array, self._constants[key]))
        return self._constants[key]


def _open_shapes(model: onnx.ModelProto) -> dict[str, list[int]]:
    """Shapes with the number of rows left open, by name of the node of an export for one batch that fixes it.

    These are Reshapes to constant sizes, and Gathers of all that a flat value holds, in order, as exporters spell a
    flattened mean. Rows are the slowest axis, also where a Reshape joins others to them, so that the first size may be
    open; whether the rows of a stack are samples of their own all the same is tried on the float model.
    """
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    sizes = {v.name: [dim.dim_value for dim in v.type.tensor_type.shape.dim] for v in model.graph.value_info}
    found = {}
    for node in model.graph.node:
        if node.op_type not in ("Reshape", "Gather") or node.input[1] not in constants:
            continue
        array = array_in(constants[node.input[1]])
        if node.op_type == "Reshape" and array.size and array.min() > 0:
            found[node.name] = [-1, *array.tolist()[1:]]
        elif sizes.get(node.input[0]) == [array.size] and np.array_equal(array.reshape(-1), np.arange(array.size)):
            found[node.name] = [-1, *array.shape[1:]]
    return found


def _with_open_rows(value: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    """The declaration of an input without its sizes."""
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type") or not tensor.HasField("shape"):
        return value
    return helper.make_tensor_value_info(value.name, tensor.elem_type, [None] * len(tensor.shape.dim))
