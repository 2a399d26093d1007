"""Scale of an input, from the linear stem behind it and the statistics stored there.

The stem is linear up to the first BatchNormalization or the first layer with a bias. What the model says there - the
running statistics, or the size of a folded bias - tells the scale of the input: it is measured there with trial inputs.

Mean and deviation of features are fitted so that the first BatchNormalization sees the statistics it has stored. The
stem's response to each group of inputs (a feature, a channel) is measured once: to a constant, and
to noise. Means follow by regularized least squares, with neighbouring groups taken to be alike where the statistics
leave it open; variances, which are not negative, by multiplicative updates (M. E. Daube-Witherspoon and G. Muehllehner,
1986). Neither needs gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort

from kenosis_ort.calibration.part_session import ObservedModel, SessionSettings, run
from kenosis_ort.calibration.synthetic.consumers import Consumers
from kenosis_ort.calibration.synthetic.drawing import Doubles, Draws, deviation, pink
from kenosis_ort.graph.constants import HEAVY, Is, having

MOST_GROUPS = 2048
_NOISE = 0.01  # of the stored means, as a share of the prior's variance
_ROUNDS = 30  # few, so that what the statistics leave open stays even
_TRIALS = 24
_DEAD = 1e-3  # channels whose stored deviation is below that share of the median are left out
_STEPS = 64.0


class ChannelMoments:
    """Mean, deviation and extremes by channel over samples."""

    def __init__(self) -> None:
        self.count = 0
        self._total: Any = 0.0
        self._squares: Any = 0.0
        self.low: Any = np.inf
        self.high: Any = -np.inf

    def add(self, rows: npt.NDArray[Any]) -> None:
        """Adds the values of a sample, of shape (channels, ...)."""
        values = rows.reshape(len(rows), -1).astype(np.float64)
        self.count += values.shape[1]
        self._total = self._total + values.sum(axis=1)
        self._squares = self._squares + (values * values).sum(axis=1)
        self.low = np.minimum(self.low, values.min(axis=1, initial=np.inf))
        self.high = np.maximum(self.high, values.max(axis=1, initial=-np.inf))

    @property
    def mean(self) -> Doubles:
        return np.asarray(self._total / self.count)

    @property
    def deviation(self) -> Doubles:
        return np.asarray(np.sqrt(np.maximum(self._squares / self.count - self.mean * self.mean, 0.0)))


Moments = tuple[Doubles, Doubles]
"""Mean and standard deviation."""


def is_live(deviation: Doubles) -> npt.NDArray[np.bool_]:
    """Mask of the channels whose stored deviation says something."""
    return np.asarray(deviation > _DEAD * np.median(deviation))


def distance(seen: Moments, stored: Moments) -> float:
    """Distance of statistics by channel from stored ones.

    The median over the live channels of ``ln(s / s0)**2 + ((m - m0) / s0)**2``: 0 for equal statistics, 0.5 for half or
    double the deviation.
    """
    (mean, spread), (stored_mean, deviation), live = seen, stored, is_live(stored[1])
    cost = np.log(np.maximum(spread, 1e-12) / deviation) ** 2 + ((mean - stored_mean) / deviation) ** 2
    return float(np.median(cost[live])) if live.any() else np.inf


def fit_moments(
    stem: Stem, shape: tuple[int, ...], axis: int, sample: Callable[[int], Doubles], dtype: npt.DTypeLike
) -> tuple[Doubles, Doubles, float] | None:
    """Fits mean and deviation of each group along an axis.

    Args:
        stem: A front that ends at a BatchNormalization.
        shape: Shape of the input, batch first.
        axis: Of the groups.
        sample: Noise of unit variance and the shape, by index.
        dtype: Of the input.

    Returns:
        Mean and deviation, which broadcast to the shape without the first axis, and what remains between measured and
        stored statistics (`distance`); None where there are too many groups, or nothing arrives.
    """
    point, groups = stem.point, shape[axis]
    if point is None or point.stored is None or groups > MOST_GROUPS:
        return None
    # What each group brings about, as a constant and as noise.
    (target, spread), live = point.stored, is_live(point.stored[1])
    base = stem.respond([np.zeros(shape, dtype)])[0].mean(axis=1)
    if base.shape != target.shape:  # a BatchNormalization of other channels, which the runtime refuses to run
        return None
    constant, variance = np.empty((len(target), groups)), np.empty((len(target), groups))
    noise = _noise(shape, axis)
    for group in range(groups):
        one, noisy = np.zeros(shape), np.zeros(shape)
        here = tuple(group if a == axis else slice(None) for a in range(len(shape)))
        one[here], noisy[here] = 1.0, noise[here]
        first, second = stem.respond([one.astype(dtype), noisy.astype(dtype)])
        constant[:, group] = first.mean(axis=1) - base
        variance[:, group] = ((second - base[:, None]) ** 2).mean(axis=1)
    # Means and variances that bring about the stored ones.
    scaled, wanted = constant[live] / spread[live, None], (target - base)[live] / spread[live]
    means = _smooth_solution(scaled, wanted)
    squares = _positive_solution(variance[live] / spread[live, None] ** 2)
    outline = tuple(groups if a == axis else 1 for a in range(1, len(shape)))
    mean, deviations = means.reshape(outline), np.sqrt(squares).reshape(outline)
    if not np.isfinite(deviations).all() or not deviations.any():
        return None
    # All deviations together are set right by what is measured.
    trials = [sample(i) for i in range(_TRIALS)]
    _, measured = stem.moments((mean + deviations * t).astype(dtype) for t in trials)
    deviations = deviations * np.exp(np.median(np.log(spread[live] / np.maximum(measured[live], 1e-12))))
    # Rounded, so that the last bits of the runtime's sums, which depend on the processor, do not matter.
    unit = float(2.0 ** np.round(np.log2(max(float(np.median(deviations)), 1e-30)))) / _STEPS
    mean, deviations = np.rint(mean / unit) * unit, np.maximum(np.rint(deviations / unit), 1.0) * unit
    fitted = stem.moments((mean + deviations * t).astype(dtype) for t in trials)
    return mean, deviations, distance(fitted, point.stored)


def _noise(shape: tuple[int, ...], axis: int) -> Doubles:
    """Noise of unit variance, smooth along the axes that are no groups."""
    moved = [size for a, size in enumerate(shape) if a not in (0, axis)]
    values = pink(Draws(0, "trial"), (shape[0], shape[axis], *moved), axes=min(len(moved), 2))
    return np.moveaxis(values / deviation(values), 1, axis)


def _smooth_solution(matrix: Doubles, wanted: Doubles) -> Doubles:
    """The likeliest x with ``matrix @ x = wanted``, up to noise, of values that are alike among neighbours."""
    groups = matrix.shape[1]
    distance = np.subtract.outer(np.arange(groups), np.arange(groups)) / max(groups / 16, 1.0)
    prior = 1.0 + 0.5 / (1.0 + distance**2) + 0.1 * np.eye(groups)
    spread = matrix @ prior @ matrix.T
    noise = _NOISE * float(np.trace(spread)) / len(spread) + 1e-30
    solution: Doubles = prior @ matrix.T @ np.linalg.solve(spread + noise * np.eye(len(spread)), wanted)
    return solution


def _positive_solution(matrix: Doubles) -> Doubles:
    """X >= 0 that brings ``matrix @ x`` near 1 everywhere."""
    x = np.full(matrix.shape[1], 1.0 / max(float(matrix.sum(axis=1).mean()), 1e-30))
    pull = matrix.sum(axis=0)
    for _ in range(_ROUNDS):
        x = x * pull / np.maximum(matrix.T @ (matrix @ x), 1e-30)
    return x


_LINEAR = having(Is.MOVE) | frozenset(
    {"Conv", "MatMul", "Gemm", "Add", "Sub", "Mul", "Div", "Cast", "Slice", "Concat", "Pad", "AveragePool", "Split",
     "Constant"}
)  # fmt: skip


@dataclass(frozen=True)
class StemPoint:
    """A point behind the linear stem.

    Attributes:
        tensor: Its name.
        axis: Of the channels.
        stored: Running mean and standard deviation of each channel; None without BatchNormalization.
        bias: Size of each channel's bias; zeros where there is none.
    """

    tensor: str
    axis: int
    stored: Moments | None
    bias: Doubles


class Stem:
    """The stem of a model behind one input, ready to run; `point` is None where there is none.

    Args:
        proto: The model.
        name: The input.
    """

    def __init__(self, proto: onnx.ModelProto, name: str) -> None:
        self.name = name
        self.point, self._nodes = _find(proto, name, Consumers(proto))
        self._session: ort.InferenceSession | None = None
        if self.point is not None:
            part = _cut(proto, name, self.point.tensor, self._nodes)
            with ObservedModel(part, SessionSettings(threads=1, optimize=False)) as model:
                self._session = model.session([self.point.tensor])

    def respond(self, arrays: Iterable[npt.NDArray[np.generic]]) -> list[Doubles]:
        """Values at the point for each input, of shape (channels, positions)."""
        assert self.point is not None
        assert self._session is not None
        out: list[Doubles] = []
        for index, array in enumerate(arrays):
            found = run(self._session, [self.point.tensor], {self.name: array}, index)
            moved = np.moveaxis(found[self.point.tensor].astype(np.float64), self.point.axis, 0)
            out.append(moved.reshape(moved.shape[0], -1))
        return out

    def moments(self, arrays: Iterable[npt.NDArray[np.generic]]) -> Moments:
        """Mean and deviation by channel over all of the inputs."""
        values = np.concatenate(self.respond(arrays), axis=1)
        return values.mean(axis=1), values.std(axis=1)


def _find(proto: onnx.ModelProto, name: str, consumers: Consumers) -> tuple[StemPoint | None, list[onnx.NodeProto]]:
    linear, heavy = {name}, set[str]()
    nodes: list[onnx.NodeProto] = []
    biased: StemPoint | None = None
    for node in proto.graph.node:
        if not any(i in linear for i in node.input):
            continue
        if node.op_type == "BatchNormalization" and node.input[0] in heavy:
            mean, variance = consumers.array(node.input[3]), consumers.array(node.input[4])
            if mean is not None and variance is not None:
                stored = mean, np.sqrt(np.maximum(variance, 1e-12))
                return StemPoint(node.input[0], 1, stored, np.zeros_like(mean)), nodes
        if node.op_type not in _LINEAR or not all(not i or i in linear or i in consumers.constants for i in node.input):
            continue
        linear.update(node.output)
        nodes.append(node)
        if node.op_type in HEAVY or any(i in heavy for i in node.input):
            heavy.update(node.output)
        if biased is None and node.op_type in HEAVY:
            biased = _biased(node, consumers)
    return biased, nodes


def _biased(node: onnx.NodeProto, consumers: Consumers) -> StemPoint | None:
    output, bias, axis = node.output[0], consumers.array(node.input[2]) if len(node.input) > 2 else None, 1
    if node.op_type == "MatMul":
        axis = -1
        for child, index in consumers.of(output):
            added = consumers.array(child.input[1 - index]) if child.op_type == "Add" else None
            if added is not None and added.ndim == 1:
                output, bias = child.output[0], added
    weight = consumers.constants.get(node.input[1])
    if weight is None:
        return None
    channels = int(weight.dims[0] if node.op_type == "Conv" else weight.dims[-1])
    return StemPoint(output, axis, None, np.zeros(channels) if bias is None else np.abs(bias.reshape(-1)))


def _cut(proto: onnx.ModelProto, name: str, tensor: str, nodes: list[onnx.NodeProto]) -> onnx.ModelProto:
    """The part of a model that computes a tensor from one input."""
    needed, chosen = {tensor}, []
    made = {output: node for node in proto.graph.node for output in node.output if node.op_type == "Constant"}
    for node in reversed(nodes):
        if needed.intersection(node.output):
            chosen.append(node)
            needed.update(node.input)
    chosen += [made[i] for i in sorted(needed & made.keys())]
    part = onnx.ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import)
    part.graph.name = "front"
    part.graph.node.extend(reversed(chosen))
    part.graph.initializer.extend(t for t in proto.graph.initializer if t.name in needed)
    part.graph.input.extend(v for v in proto.graph.input if v.name == name)
    part.graph.output.append(onnx.ValueInfoProto(name=tensor))
    return part
