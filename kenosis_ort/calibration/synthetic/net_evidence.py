"""What a net itself tells of samples: by its BatchNormalizations, its outputs, and the bounds of its activations.

Each BatchNormalization stores the mean and variance of every channel over the training data. Made-up samples that bring
about other ones are not natural there; and since the shape of a channel's distribution changes less than its scale, the
range on natural data follows: the normalized extremes of the made-up samples, scaled to the stored deviation.

An output that answers nothing: a detector that finds nothing in all of the made-up samples shows no range of finding.
The last layers of such a net work on what it was trained to find. A text detector that is shown photographs without
text says zero everywhere, and its last layers keep to a part of the range that they have on text.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import onnx

from kenosis_ort.calibration.feeds import Feed
from kenosis_ort.calibration.part_session import initializer_arrays, outputs_of
from kenosis_ort.calibration.synthetic.stem import ChannelMoments, distance, is_live
from kenosis_ort.graph.constants import BOUNDS, Is, having
from kenosis_ort.graph.walk import attribute_float

Range = tuple[float, float]

_FITTING: Final = 0.5  # misfit up to which a BatchNormalization's prediction takes the place of the measurement


@dataclass(frozen=True)
class NetEvidence:
    """Evidence of the net about a few samples.

    Attributes:
        misfits: Of its BatchNormalizations, by name of the node, see `fit_batch_norms`.
        ranges: Predicted ranges by tensor name; empty where weights were changed since.
        silent: Outputs that answer nothing, by name, see `silent_outputs`.
    """

    misfits: Mapping[str, float]
    ranges: Mapping[str, Range]
    silent: Mapping[str, str] = field(default_factory=dict)


def net_evidence(
    source: onnx.ModelProto,
    feeds: Sequence[Feed],
    *,
    custom_op_libraries: Sequence[str] = (),
) -> NetEvidence:
    """Evidence about samples from a model's BatchNormalizations and outputs.

    Args:
        source: The float model before BatchNormalizations are folded.
        feeds: A few samples.
        custom_op_libraries: Shared libraries with custom operators.
    """
    fits = fit_batch_norms(source, feeds, custom_op_libraries=tuple(custom_op_libraries))
    good = [fit for fit in fits if fit.misfit <= _FITTING]
    ranges = predicted_ranges(source, good, hard_bounds(source))
    silent = silent_outputs(source, feeds, custom_op_libraries=custom_op_libraries)
    return NetEvidence({fit.node or fit.tensor: fit.misfit for fit in fits}, ranges, silent)


# ---- bounds ----------------------------------------------------------------------------------------------------------

_WITHIN = having(Is.MOVE) | having(Is.PICK)


def hard_bounds(proto: onnx.ModelProto) -> dict[str, Range]:
    """The bounds of the tensors of the main graph that have any; an end without one is infinite."""
    limits = {name for node in proto.graph.node if node.op_type == "Clip" for name in node.input[1:] if name}
    constants = {name: float(np.min(a)) for name, a in initializer_arrays(proto, limits).items() if a.size == 1}
    found: dict[str, Range] = {}
    for node in proto.graph.node:
        bound = _bound(node, found, constants)
        if bound is not None:
            found.update(dict.fromkeys(node.output, bound))
    return found


def _bound(node: onnx.NodeProto, found: Mapping[str, Range], constants: Mapping[str, float]) -> Range | None:
    if node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type in BOUNDS:
        return BOUNDS[node.op_type]
    if node.op_type == "Clip":
        least, most = [*node.input[1:3], "", ""][:2]
        low = attribute_float(node, "min", constants.get(least, -math.inf))
        return low, attribute_float(node, "max", constants.get(most, math.inf))
    if node.op_type in _WITHIN and node.input:
        return found.get(node.input[0])
    if node.op_type == "Concat" and all(name in found for name in node.input):
        return min(found[n][0] for n in node.input), max(found[n][1] for n in node.input)
    return None


# ---- BatchNormalizations ---------------------------------------------------------------------------------------------


_EXCITED = 0.02  # least measured deviation, as a share of the stored one
_MOST_DEVIATIONS = 16.0
_KEEPING = frozenset({"Relu", "Clip", "LeakyRelu", "MaxPool", "Identity", "Dropout"})


@dataclass(frozen=True)
class BatchNormFit:
    """Fit of the samples to one BatchNormalization's stored statistics.

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
    moments = {name: ChannelMoments() for name in names}
    for arrays_of_feed in outputs_of(proto, names, feeds, custom_op_libraries):
        for name, array in arrays_of_feed.items():
            moments[name].add(np.moveaxis(array, 1, 0))
    return tuple(_fit(node, arrays, moments[node.input[0]]) for node in nodes if moments[node.input[0]].count)


def _fit(node: onnx.NodeProto, arrays: Mapping[str, Any], seen: ChannelMoments) -> BatchNormFit:
    gamma, beta, mean0, variance0 = (arrays[name].astype(np.float64) for name in node.input[1:])
    epsilon = attribute_float(node, "epsilon", 1e-5)
    stored = np.sqrt(np.maximum(variance0, 0.0) + epsilon)
    mean, spread = seen.mean, seen.deviation
    excited = is_live(stored) & (spread > _EXCITED * stored)
    scale = np.maximum(spread, 1e-30)
    ends = [np.clip((end - mean) / scale, -_MOST_DEVIATIONS, _MOST_DEVIATIONS) for end in (seen.low, seen.high)]
    normalized = np.stack([np.where(gamma > 0, gamma * e, gamma * f) for e, f in (ends, ends[::-1])]) + beta
    used = normalized[:, excited] if excited.any() else beta[None, :].repeat(2, axis=0)
    misfit = distance((mean, spread), (mean0, stored))
    return BatchNormFit(node.name, node.output[0], misfit, (float(used[0].min()), float(used[1].max())))


def predicted_ranges(
    proto: onnx.ModelProto, fits: Iterable[BatchNormFit], bounds: Mapping[str, Range]
) -> dict[str, Range]:
    """The ranges on natural data of the outputs of BatchNormalizations and of activations behind them.

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
                alpha = attribute_float(node, "alpha", 0.01)
                low, high = (alpha * end if end < 0 else end for end in (low, high))
            out[node.output[0]] = (min(max(low, least), most), max(min(high, most), least))
    return out


_YES: Final = 0.5
"""Probability that a yes begins with: an output of its own yes or no says no below it."""
_LEAST_SAMPLES: Final = 4
_SAME: Final = 1e-4  # change between samples, as a share of the output's size
_YES_OR_NO: Final = frozenset({"Sigmoid", "HardSigmoid"})


def silent_outputs(
    proto: onnx.ModelProto, feeds: Sequence[Mapping[str, Any]], *, custom_op_libraries: Iterable[str] = ()
) -> dict[str, str]:
    """The outputs that answer nothing to any of the samples, by name, with the end of a sentence about them.

    Those are outputs of a Sigmoid none of whose numbers reaches a yes, and outputs that do not depend on the sample.

    Args:
        proto: The float model.
        feeds: A few samples; of fewer than four nothing is said.
        custom_op_libraries: Shared libraries with custom operators.
    """
    names = [value.name for value in proto.graph.output if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT]
    if len(feeds) < _LEAST_SAMPLES or not names:
        return {}
    answers = list(outputs_of(proto, names, feeds, custom_op_libraries))
    made_by = {name: node.op_type for node in proto.graph.node for name in node.output}
    bounds = hard_bounds(proto)
    found = {}
    for name in names:
        arrays = [answer[name] for answer in answers]
        if not all(array.size for array in arrays):
            continue
        top = max(float(array.max()) for array in arrays)
        if made_by.get(name) in _YES_OR_NO and bounds.get(name) == (0.0, 1.0) and top < _YES:
            found[name] = f"never rises above {top:.2g} of 1"
        elif len({array.shape for array in arrays}) == 1:
            stacked = np.stack(arrays).astype(np.float64)
            change, size = float(np.abs(stacked - stacked[0]).max()), float(np.abs(stacked).max())
            if size > 0 and change <= _SAME * size:
                found[name] = "is the same for all samples"
    return found
