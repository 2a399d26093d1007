"""A float model and a QDQ model side by side: which tensors are pairs, values of both on samples, and sums over them.

Pairs are found by name first: quantizers keep the names of values or add a suffix. Where an activation was absorbed
(its node is gone and Q clips instead), the tensor stands for what the activation wrote. Where a rewrite changed the
net, a tensor without a counterpart is left out.

Values are compared in parts that fit the memory. Sums by channel are enough for SQNR, cosine, range and clipping,
whatever the number of samples.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx

from kenosis_ort.accuracy.outputs import decibels
from kenosis_ort.accuracy.value_grids import Float64, GridReader, ValueGrid
from kenosis_ort.calibration.parts import estimate_bytes
from kenosis_ort.graph.qdq import DQ, QDQ_OPS, Q
from kenosis_ort.graph.shapes import infer_shapes, value_types
from kenosis_ort.runtime.session import Array, open_session

_UNKNOWN_BYTES = 2**22  # taken for tensors of unknown shape
_RESCALED = 0.05  # mean distance of the channels' gains from 1 beyond which they are taken for a rescaling
_LEAST_COUNT = 64  # elements a channel has to have for its gain to mean anything
_EXPLAINED = 0.25  # share of the noise that may be left once it is undone
_ABSORBED = ("Relu", "Clip")
_SUFFIXES = ("_QuantizeLinear_Input", "_DequantizeLinear_Output", "_barrier")
_LOOKED_THROUGH = 4  # nodes between a float value and its Q that only the quantized model has


class Pair(NamedTuple):
    """One activation.

    Attributes:
        name: Its name in the float model.
        quantized: Name of the dequantized value in the quantized model.
        node: Name of the node that makes it there, "" for graph inputs.
        grid: What it can hold; None where scale or zero point are no constants, or there are several.
    """

    name: str
    quantized: str
    node: str
    grid: ValueGrid | None


class WeightPair(NamedTuple):
    """One constant.

    Attributes:
        name: Its name in the float model.
        node: The node that reads it.
        grid: What it holds.
    """

    name: str
    node: str
    grid: ValueGrid


class Pairing:
    """Matches two models.

    Args:
        float_model: The float model. Not changed.
        quantized: A QDQ model made of it, by whatever quantizer. Not changed.
    """

    def __init__(self, float_model: onnx.ModelProto, quantized: onnx.ModelProto) -> None:
        self._float_nodes = {node.name: node for node in float_model.graph.node if node.name}
        self.float_readers: dict[str, list[onnx.NodeProto]] = {}
        for node in float_model.graph.node:
            for name in node.input:
                self.float_readers.setdefault(name, []).append(node)
        self._float_outputs = {v.name for v in float_model.graph.output}
        self._float_values = {v.name for v in float_model.graph.input}
        self._float_values |= {name for node in float_model.graph.node for name in node.output if name}
        self.float_constants = {t.name: t for t in float_model.graph.initializer}
        self._grids = GridReader(quantized)
        self._producers = self._grids.producers
        self._readers: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
        for node in self._grids.nodes:
            for index, name in enumerate(node.input):
                self._readers.setdefault(name, []).append((node, index))
        self.quantized_count = 0

    def activations(self) -> Iterator[Pair]:
        """Yields the quantized activations that have a counterpart, each once, in the quantized model's order."""
        seen: set[str] = set()
        for node in self._grids.nodes:
            quantizer = self._quantizer(node) if node.op_type == DQ else None
            if quantizer is None:
                continue
            self.quantized_count += 1
            name = self._float_name(quantizer.input[0], node.output[0])
            if name is None or name in seen:
                continue
            seen.add(name)
            maker, grid = self._maker(quantizer.input[0]), self._grids.grid(quantizer)
            known = None if grid is None or grid.scale.size > 1 else grid
            yield Pair(name, node.output[0], maker.name if maker is not None else "", known)

    def weights(self) -> Iterator[WeightPair]:
        """Yields the quantized constants that have a counterpart."""
        seen: set[str] = set()
        for node in self._grids.nodes:
            if node.op_type != DQ or node.input[0] not in self._grids.constants:
                continue
            for reader, index in self._readers.get(node.output[0], ()):
                name, grid = self._float_constant(reader, index, node), self._grids.grid(node)
                if name is not None and grid is not None and name not in seen:
                    seen.add(name)
                    yield WeightPair(name, reader.name, grid)

    def before(self, pair: Pair) -> set[str]:
        """The dequantized values that a quantized value was computed from, the nearest on each way."""
        quantizer = self._quantizer(self._producers[pair.quantized])
        assert quantizer is not None  # `activations` found it
        found: set[str] = set()
        pending, seen = [str(quantizer.input[0])], set[str]()
        while pending:
            name = pending.pop()
            maker = self._producers.get(name)
            if maker is None or name in seen:
                continue
            seen.add(name)
            if maker.op_type == DQ:
                if maker.input[0] in self._producers:
                    found.add(name)
                continue
            pending += list(maker.input)
        return found

    def _quantizer(self, dequantizer: onnx.NodeProto) -> onnx.NodeProto | None:
        """The Q in front of a DQ, before the Clip of integers that is between them below 8 bits."""
        node = self._producers.get(dequantizer.input[0])
        if node is not None and node.op_type == "Clip":
            node = self._producers.get(node.input[0])
        return node if node is not None and node.op_type == Q else None

    def _maker(self, name: str) -> onnx.NodeProto | None:
        """The node that computes a value, looking through barriers and activations that are its own."""
        node = self._producers.get(name)
        for _ in range(_LOOKED_THROUGH):
            above = self._producers.get(node.input[0]) if node is not None and node.input else None
            own = node is not None and (node.op_type in _ABSORBED or node.name not in self._float_nodes)
            if not own or above is None or above.op_type == DQ:
                return node
            node = above
        return node

    def _float_name(self, source: str, dequantized: str) -> str | None:
        name = source
        for _ in range(_LOOKED_THROUGH):
            for candidate in (dequantized, name, *(name.removesuffix(s) for s in _SUFFIXES)):
                if candidate in self._float_values:
                    return self._behind_absorbed(candidate)
            node = self._producers.get(name)
            if node is None or len(node.input) != 1:
                return None
            name = str(node.input[0])
        return None

    def _behind_absorbed(self, name: str) -> str:
        """Output of the activation that reads the value in the float model and is gone in the other."""
        readers = self.float_readers.get(name, [])
        if len(readers) == 1 and readers[0].op_type in _ABSORBED and name not in self._float_outputs:
            written = str(readers[0].output[0])
            if written not in self._producers and f"{written}{_SUFFIXES[0]}" not in self._producers:
                return written
        return name

    def _float_constant(self, reader: onnx.NodeProto, index: int, node: onnx.NodeProto) -> str | None:
        twin = self._float_nodes.get(reader.name)
        candidates = [twin.input[index]] if twin is not None and index < len(twin.input) else []
        candidates += [node.input[0].removesuffix("_quantized"), node.output[0].removesuffix(_SUFFIXES[1])]
        return next((c for c in candidates if c in self.float_constants), None)


class ChannelSums:
    """Adds up a float tensor and its quantized version over samples.

    Args:
        grid: What the quantized one can hold, None if unknown: what lies less than half a step beyond is not clipped.
    """

    def __init__(self, grid: ValueGrid | None = None) -> None:
        self._bounds: tuple[float, float] | None = None
        if grid is not None:
            (low, high), half = grid.range, float(grid.scale.max()) / 2
            self._bounds = low - half, high + half
        self._sums: Float64 | None = None
        self.least, self.largest = float("inf"), float("-inf")
        self.elements = self.clipped = self.odd = 0

    def add(self, reference: Array, actual: Array) -> bool:
        """Adds one sample.

        Args:
            reference: Float tensor; axis 1 are channels where there are two axes or more.
            actual: The other one.

        Returns:
            False, without adding, if the shapes differ.
        """
        if reference.shape != actual.shape:
            return False
        x, y = _by_channel(reference), _by_channel(actual)
        finite = np.isfinite(x) & np.isfinite(y)
        if not finite.all():
            self.odd += int(finite.size - finite.sum())
            x, y = np.where(finite, x, 0.0), np.where(finite, y, 0.0)
        counts, difference = np.full(x.shape[0], x.shape[1]), x - y
        sums = np.stack([counts, x.sum(1), y.sum(1), _dot(x, x), _dot(x, y), _dot(y, y), _dot(difference, difference)])
        if self._sums is None:
            self._sums = sums
        elif self._sums.shape == sums.shape:
            self._sums += sums
        else:  # the number of channels depends on the sample: one channel for all
            self._sums = self._sums.sum(1, keepdims=True) + sums.sum(1, keepdims=True)
        if x.size:
            self.least, self.largest = min(self.least, float(x.min())), max(self.largest, float(x.max()))
        self.elements += x.size
        if self._bounds is not None:
            self.clipped += int(np.count_nonzero((x < self._bounds[0]) | (x > self._bounds[1])))
        return True

    @property
    def clipping(self) -> float:
        """Share of the float tensor's elements beyond what the quantized one can hold, 0..1."""
        return self.clipped / self.elements if self.elements else 0.0

    @property
    def rms(self) -> float:
        """Root mean square of the float tensor."""
        return 0.0 if self._sums is None or not self.elements else float(np.sqrt(self._sums[3].sum() / self.elements))

    def plain(self) -> tuple[float, float]:
        """SQNR in dB and cosine of the two as they are."""
        if self._sums is None:
            return float("nan"), float("nan")
        _, _, _, xx, xy, yy, dd = self._sums.sum(1)
        norm = float(np.sqrt(xx * yy))
        return decibels(float(xx), float(dd)), float(xy) / norm if norm > 0 else float("nan")

    def result(self) -> tuple[float, float, bool]:
        """SQNR in dB, cosine, and whether the channels were found rescaled and compared without that.

        Equalization multiplies the channels of inner tensors by constants, and shifts them: no error, but no match.
        """
        if self._sums is None:
            return float("nan"), float("nan"), False
        count, sx, sy, xx, xy, yy, dd = self._sums
        if len(count) < 2 or count.min() < _LEAST_COUNT:
            return (*self.plain(), False)
        n = np.maximum(count, 1)
        vx, vy, cov = xx - sx * sx / n, yy - sy * sy / n, xy - sx * sy / n
        live = (vx > 1e-9 * np.maximum(xx, 1e-300)) & (xx > 1e-6 * xx.max(initial=0.0))
        varies = live & (vy > 1e-9 * yy) & (cov > 0)  # a channel that is gone has no gain
        gains = np.where(varies, cov / np.where(varies, vx, 1.0), 1.0)
        left = np.where(varies, np.maximum(vy - gains * cov, 0.0) / gains**2, dd)
        undone = float(np.minimum(left, dd).sum())
        weights = np.where(live, xx, 0.0)
        distance = float((weights * np.abs(np.log(np.clip(gains, 1e-6, 1e6)))).sum() / max(weights.sum(), 1e-300))
        if distance > _RESCALED and undone < _EXPLAINED * float(dd.sum()):
            correlation = float(np.sqrt(max(0.0, 1.0 - undone / max(float(vx.sum()), 1e-300))))
            return decibels(float(vx.sum()), undone), correlation, True
        return (*self.plain(), False)


def _by_channel(array: Array) -> Float64:
    values = np.asarray(array, dtype=np.float64)
    if values.ndim < 2:
        return values.reshape(1, -1)
    return np.moveaxis(values, 1, 0).reshape(values.shape[1], -1)


def _dot(x: Float64, y: Float64) -> Float64:
    out: Float64 = np.einsum("ij,ij->i", x, y)
    return out


def chunks(
    model: onnx.ModelProto, values: Mapping[str, str], feed: Mapping[str, Any], memory: int
) -> Iterator[dict[str, str]]:
    """Yields the values in parts that fit the memory in both models; one empty part if there are none."""
    shaped = onnx.ModelProto()
    shaped.CopyFrom(model)
    infer_shapes(shaped, thorough=False)
    sizes = estimate_bytes(shaped, feed, set(values))
    chunk: dict[str, str] = {}
    size_of_chunk = 0
    for name, other in values.items():
        size = 2 * sizes.get(name, _UNKNOWN_BYTES)
        if chunk and size_of_chunk + size > memory:
            yield chunk
            chunk, size_of_chunk = {}, 0
        chunk[name] = other
        size_of_chunk += size
    if chunk or not values:
        yield chunk


def answers(
    real: onnx.ModelProto,
    quantized: onnx.ModelProto,
    values: Mapping[str, str],
    feeds: Sequence[Mapping[str, Any]],
    custom_op_libraries: Sequence[str],
    threads: int,
) -> Iterator[tuple[dict[str, Array], dict[str, Array]]]:
    """Yields what both models return on each feed, with values of theirs beside the outputs."""
    given = {value.name for value in real.graph.input}
    options: Mapping[str, Any] = {"threads": threads, "custom_op_libraries": custom_op_libraries}
    with (
        open_session(real, further=[name for name in values if name not in given], **options) as first,
        open_session(quantized, further=[name for name in values.values() if name not in given], **options) as second,
    ):
        for feed in feeds:
            a, b = (s.answer({k: v for k, v in feed.items() if k in s.inputs}) for s in (first, second))
            yield {**{name: np.asarray(feed[name]) for name in given if name in feed}, **a}, b


def compare_layers(
    float_model: onnx.ModelProto,
    quantized: onnx.ModelProto,
    feeds: Sequence[Mapping[str, Any]],
    *,
    custom_op_libraries: Sequence[str] = (),
    threads: int = 1,
    budget: int = 2**28,
) -> dict[str, float]:
    """Signal power over noise power in dB over all samples by value that exists in both models; inf if equal.

    The noise is that of the node and of all before it.

    Compared are quantized values, as their DQ gives them, and what float nodes compute. What lies inside a fused
    integer kernel (the value between a Conv and its Relu) exists nowhere and is left out.

    Args:
        float_model: The model that was quantized; not changed.
        quantized: What became of it; not changed.
        feeds: A few samples; all models run once a sample and part.
        custom_op_libraries: Libraries with custom operators to register.
        threads: Threads of the sessions.
        budget: Bytes of intermediate values that a run may hold; where they take more, the models are run in parts.

    Returns:
        The values by their names in the float model, in its order.

    Raises:
        VerificationError: The runtime does not load a model.
    """
    if not feeds:
        return {}
    pairs = _comparable(float_model, quantized)
    sums, differ = {name: ChannelSums() for name in pairs}, set[str]()
    for chunk in chunks(float_model, pairs, feeds[0], budget):
        for a, b in answers(float_model, quantized, chunk, feeds, custom_op_libraries, threads):
            for name, other in chunk.items():
                if a[name].dtype.kind != "f" or not sums[name].add(a[name], b[other]):
                    differ.add(name)
    return {name: total.plain()[0] for name, total in sums.items() if name not in differ}


def _comparable(float_model: onnx.ModelProto, quantized: onnx.ModelProto) -> dict[str, str]:
    """Name in the quantized model of each value of the float model, in the float model's order."""
    producers = {name: node for node in quantized.graph.node for name in node.output if name}
    restored = {pair.name: pair.quantized for pair in Pairing(float_model, quantized).activations()}
    outputs, types = {value.name for value in quantized.graph.output}, value_types(float_model)
    constants = {tensor.name for tensor in float_model.graph.initializer}
    values = [value.name for value in float_model.graph.input]
    values += [name for node in float_model.graph.node for name in node.output if name]
    pairs = {}
    for name in values:
        if name in constants or name not in types or types[name].tensor_type.elem_type != onnx.TensorProto.FLOAT:
            continue
        if name in restored:
            pairs[name] = restored[name]
        elif name in producers and (name in outputs or not _reads_integers(producers[name], producers)):
            pairs[name] = name
    return pairs


def _reads_integers(node: onnx.NodeProto, producers: Mapping[str, onnx.NodeProto]) -> bool:
    """Whether a node is, or may be merged into, an integer kernel: its value must not be looked at."""
    if node.op_type in QDQ_OPS:
        return node.op_type == Q
    makers = (producers.get(name) for name in node.input)
    return any(maker is not None and maker.op_type == DQ for maker in makers)
