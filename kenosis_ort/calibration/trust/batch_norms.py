"""What the BatchNormalizations of a model know about its natural inputs, against what made-up samples do.

Each stores the mean and variance of every channel over the training data. Made-up samples that bring about other ones
are not natural there; and since the shape of a channel's distribution changes less than its scale, the range on natural
data follows: the normalized extremes of the made-up samples, scaled to the stored deviation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.calibration.session import ObservedModel, SessionSettings, initializer_arrays, run

Range = tuple[float, float]

_LIVE = 1e-3  # least stored deviation, as a share of the median
_EXCITED = 0.02  # least measured deviation, as a share of the stored one
_MOST_DEVIATIONS = 16.0
_KEEPING = frozenset({"Relu", "Clip", "LeakyRelu", "MaxPool", "Identity", "Dropout"})


@dataclass(frozen=True)
class BatchNormFit:
    """How natural the samples look to one BatchNormalization.

    Attributes:
        node: Its name.
        tensor: Its output.
        misfit: Median over the live channels of ``ln(s / s0)**2 + ((m - m0) / s0)**2``; 0 for equal statistics, 0.5 for
            half the deviation.
        range: Of its output on natural data, predicted.
    """

    node: str
    tensor: str
    misfit: float
    range: Range


class _Moments:
    """Sums over samples, by channel."""

    def __init__(self) -> None:
        self.count = 0
        self.total: Any = 0.0
        self.squares: Any = 0.0
        self.low: Any = np.inf
        self.high: Any = -np.inf

    def add(self, array: npt.NDArray[Any]) -> None:
        values = np.moveaxis(array, 1, 0).reshape(array.shape[1], -1).astype(np.float64)
        self.count += values.shape[1]
        self.total = self.total + values.sum(axis=1)
        self.squares = self.squares + (values * values).sum(axis=1)
        self.low, self.high = np.minimum(self.low, values.min(axis=1)), np.maximum(self.high, values.max(axis=1))


def fit_batch_norms(
    proto: onnx.ModelProto, feeds: Iterable[Mapping[str, Any]], *, custom_op_libraries: tuple[str, ...] = ()
) -> tuple[BatchNormFit, ...]:
    """Compares the statistics at all BatchNormalizations with the stored ones.

    Args:
        proto: The float model before BatchNormalizations are folded.
        feeds: A few samples.
        custom_op_libraries: Shared libraries with custom operators.

    Returns:
        One entry for each BatchNormalization of constant parameters, in graph order.
    """
    nodes = [node for node in proto.graph.node if node.op_type == "BatchNormalization" and len(node.input) == 5]
    arrays = initializer_arrays(proto, {name for node in nodes for name in node.input[1:]})
    nodes = [node for node in nodes if all(name in arrays for name in node.input[1:])]
    if not nodes:
        return ()
    names = list(dict.fromkeys(node.input[0] for node in nodes))
    moments = {name: _Moments() for name in names}
    settings = SessionSettings(custom_op_libraries=custom_op_libraries)
    with ObservedModel(proto, settings) as model:
        session = model.session(names)
        for index, feed in enumerate(feeds):
            for name, array in zip(names, run(session, names, dict(feed), index), strict=True):
                moments[name].add(array)
    return tuple(_fit(node, arrays, moments[node.input[0]]) for node in nodes if moments[node.input[0]].count)


def _fit(node: onnx.NodeProto, arrays: Mapping[str, Any], seen: _Moments) -> BatchNormFit:
    gamma, beta, mean0, variance0 = (arrays[name].astype(np.float64) for name in node.input[1:])
    epsilon = next((a.f for a in node.attribute if a.name == "epsilon"), 1e-5)
    stored = np.sqrt(np.maximum(variance0, 0.0) + epsilon)
    mean = seen.total / seen.count
    spread = np.sqrt(np.maximum(seen.squares / seen.count - mean * mean, 0.0))
    live = stored > _LIVE * np.median(stored)
    cost = np.log(np.maximum(spread, 1e-12) / stored) ** 2 + ((mean - mean0) / stored) ** 2
    excited = live & (spread > _EXCITED * stored)
    scale = np.maximum(spread, 1e-30)
    ends = [np.clip((end - mean) / scale, -_MOST_DEVIATIONS, _MOST_DEVIATIONS) for end in (seen.low, seen.high)]
    normalized = np.stack([np.where(gamma > 0, gamma * e, gamma * f) for e, f in (ends, ends[::-1])]) + beta
    used = normalized[:, excited] if excited.any() else beta[None, :].repeat(2, axis=0)
    return BatchNormFit(
        node.name,
        node.output[0],
        float(np.median(cost[live])),
        (float(used[0].min()), float(used[1].max())),
    )


def predicted_ranges(
    proto: onnx.ModelProto, fits: Iterable[BatchNormFit], bounds: Mapping[str, Range]
) -> dict[str, Range]:
    """Returns the ranges on natural data of the outputs of BatchNormalizations and of activations behind them.

    Args:
        proto: The model that the fits were made on.
        fits: From `fit_batch_norms`.
        bounds: What an operator's output cannot exceed, from `hard_bounds`.
    """
    out = {fit.tensor: fit.range for fit in fits}
    for node in proto.graph.node:
        if node.op_type in _KEEPING and node.input and node.input[0] in out:
            low, high = out[node.input[0]]
            least, most = bounds.get(node.output[0], (-np.inf, np.inf))
            if node.op_type == "LeakyRelu":
                low *= next((a.f for a in node.attribute if a.name == "alpha"), 0.01) if low < 0 else 1.0
            out[node.output[0]] = (min(max(low, least), most), max(min(high, most), least))
    return out
