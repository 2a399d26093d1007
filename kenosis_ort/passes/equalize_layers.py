"""Cross-layer equalization: channels of a value brought to like ranges, so that one scale serves them all.

Source: Nagel, van Baalen, Blankevoort, Welling, "Data-Free Quantization Through Weight Equalization and Bias
Correction", ICCV 2019, section 4.1 and 4.1.3. A layer's output channel ``c`` is multiplied by ``t[c]`` and the input
channel of the layer behind it divided by ``t[c]``, see `layers`.

What is different here:

* The paper equalizes weights because it has one scale a weight tensor. With scales by channel a row's factor costs its
  own layer nothing; what matters is the one scale of the activation between the layers, and the columns of the second
  layer. ``t = D^-a * r^b`` with ``D`` the activation's range by channel and ``r`` the largest relative weight of the
  column; ``a = b = 1/2`` is the paper's rule. The exponents are chosen a link by the predicted noise of the second
  layer's outputs (rounding of activations and of weights), ``a = b = 0`` among them: no link gets worse by prediction.
* A Clip (Relu6) is kept. A channel that gets to its bound stays as it is; another may grow until its largest value is
  at the bound, less a margin. Through Relu, LeakyRelu, PRelu and pooling the result is exact to float rounding for
  every input. Through a Clip it is exact as long as no channel gets further beyond its observed range than the
  margin; what lies beyond is cut at the bound.
* A bias that keeps a channel above 0 all the time (high-bias absorption) is moved on to the second layer where that
  layer does not pad: padding puts in zeros, which the moved bias does not know of. Exact on the observed range.

It is exact in float, and by predicted noise it never loses. Prediction is not enough: it sees neither the scales of the
other values nor what samples beyond the few that were looked at do to a range (O-Net of MTCNN 25.9 dB with predicted
equalization, 38.4 without). So it is evaluated on the whole net.
"""

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
import onnx

from kenosis_ort.calibration.statistics import ChannelStatistics, Rescaling
from kenosis_ort.graph.live import LiveGraph
from kenosis_ort.graph.view import GraphView
from kenosis_ort.passes.contract import Candidate, Context, Skipped, State, Statistics, WeightPass
from kenosis_ort.passes.layers import LARGEST_FACTOR, Float64, Layer, Link, LinkNoise, find_links, weights_of
from kenosis_ort.passes.recipe import setting

_log = logging.getLogger(__name__)

_ACTIVATION_EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)
_WEIGHT_EXPONENTS = (0.0, 0.25, 0.5)
_WORTH = 0.97  # a change must lower the predicted noise by at least 3 %
_LEAST_SAMPLES = 16  # from which on the least value seen says something about the least there is
_CLIP_HEADROOM = 1.5  # the same up to a Clip's bound, where what exceeds it is cut
_CLIP_WORTH = 0.8  # and by 20 % through a Clip, as the net is then the same on the observed range only


class Equalized(NamedTuple):
    """The equalized model.

    Attributes:
        model: A copy (the model given, without pairs), of the same nodes and names; only weights and biases differ.
        notes: Sentences for the report.
        pairs: What became of the values between two layers, for each pair in graph order.
    """

    model: onnx.ModelProto
    notes: tuple[str, ...]
    pairs: tuple[Mapping[str, Rescaling], ...]

    @property
    def rescaled(self) -> dict[str, Rescaling]:
        """Rescaling of the values whose channels were scaled, by name."""
        return {value: how for pair in self.pairs for value, how in pair.items()}


def values_for_equalization(graph: GraphView, *, nodes: Collection[str] | None = None) -> dict[str, int]:
    """The values whose `channel_statistics` `equalize` needs, with the axis of their channels."""
    found: dict[str, int] = {}
    for link in find_links(graph, nodes=nodes):
        found[link.value] = -1 if link.repeat > 1 or not link.second.is_convolution else 1
        if link.clipped:
            found[link.clipped] = link.first.channel_axis
    return found


@np.errstate(over="ignore", invalid="ignore")  # of a net whose values grow without end nothing is predicted better
def equalize(
    model: onnx.ModelProto,
    *,
    peaks: Mapping[str, ChannelStatistics],
    nodes: Collection[str] | None = None,
    per_channel: bool = True,
) -> Equalized:
    """Equalizes the channels between layers.

    Args:
        model: The prepared float model: BatchNormalization folded, shapes inferred. Not changed.
        peaks: Statistics by value, of those that `values_for_equalization` names or of layer outputs (from data, or
            from BatchNormalization, see `batch_norm_statistics`). Links without any are left alone.
        nodes: Names of the layers to touch, None for all.
        per_channel: Whether weights get a scale by output channel.

    Returns:
        A changed copy; where nothing pays, the model itself without pairs.
    """
    graph = LiveGraph(model, copied=True)
    pairs = []
    for link in find_links(graph, nodes=nodes):
        pair = _equalize_link(link, graph, peaks, per_channel)
        if pair is not None:
            pairs.append(pair)
    notes = []
    if pairs:
        absorbed = sum(any(np.any(how.shift) for how in pair.values()) for pair in pairs)
        more = f" {absorbed} of them had biases that moved on to the second layer." if absorbed else ""
        notes.append(f"The channels between {len(pairs)} pairs of layers were equalized.{more}")
    return Equalized(graph.write() if pairs else model, tuple(notes), tuple(pairs))


def _equalize_link(
    link: Link, graph: LiveGraph, peaks: Mapping[str, ChannelStatistics], per_channel: bool
) -> dict[str, Rescaling] | None:
    observed = _statistics(link, peaks)
    if observed is None:
        return None
    first, second = weights_of(graph, link.first), weights_of(graph, link.second)
    absorbed = _absorb(link, graph, observed, second)
    if absorbed.any():
        observed = _shifted(observed, absorbed)
    noise = LinkNoise(link, observed, second, per_channel)
    least, most = _limits(link, observed)
    best, factors = noise.of(np.ones(link.first.channels_out)), np.ones(link.first.channels_out)
    start, worth = best, _CLIP_WORTH if link.has_clip else _WORTH
    for a in _ACTIVATION_EXPONENTS:
        for b in _WEIGHT_EXPONENTS:
            tried = np.clip(noise.factors(a, b), least, most)
            predicted = noise.of(tried)
            if predicted < min(best, start * worth):
                best, factors = predicted, tried
    if best == start and not absorbed.any():
        return None
    _apply(link, graph, first, second, factors)
    _log.debug("'%s' to '%s': noise %.3g for %.3g", link.first.name, link.second.name, best, start)
    return _rescaled(link, factors, absorbed)


def _rescaled(link: Link, factors: Float64, absorbed: Float64) -> dict[str, Rescaling]:
    """Ranges of the values between the layers after the change, within the bounds of an activation."""
    axes, low, high = link.axes, -math.inf, math.inf
    found = {link.values[0]: Rescaling(link.first.channel_axis, factors, absorbed)}
    for node, value in zip(link.path, link.values[1:], strict=True):
        if node.op_type == "Relu":
            low = max(low, 0.0)
        elif node.op_type == "Clip":
            low, high = max(low, link.bounds[0]), min(high, link.bounds[1])
        spread = 1 if axes[value] == link.first.channel_axis else link.repeat
        found[value] = Rescaling(axes[value], np.repeat(factors, spread), np.repeat(absorbed, spread), low, high)
    return found


# ---- statistics -----------------------------------------------------------------------------------------------------


def _statistics(link: Link, peaks: Mapping[str, ChannelStatistics]) -> ChannelStatistics | None:
    """The statistics by channel of the first layer of what the second one reads."""
    direct = peaks.get(link.value)
    if direct is not None and direct.channels == link.second.channels_in:
        return direct if link.repeat == 1 else _folded(direct, link.repeat)
    for value in (link.clipped, link.values[0]):
        found = peaks.get(value)
        if found is not None and found.channels == link.first.channels_out:
            return _behind(link, found)
    return None


def _folded(statistics: ChannelStatistics, repeat: int) -> ChannelStatistics:
    """The statistics of the channels before a Flatten."""

    def rows(a: Float64) -> Float64:
        return a.reshape(*a.shape[:-1], -1, repeat)

    return ChannelStatistics(
        rows(statistics.low).min(axis=-1),
        rows(statistics.high).max(axis=-1),
        rows(statistics.mean).mean(axis=-1),
        rows(statistics.second_moment).mean(axis=-1),
        rows(statistics.sample_means).mean(axis=-1),
    )


def _behind(link: Link, before: ChannelStatistics) -> ChannelStatistics:
    """Upper bound of the activations' output for a bound of their input."""
    low, high = link.bounds
    if any(node.op_type == "Relu" for node in link.path):
        low = max(low, 0.0)
    clipped = {name: np.clip(getattr(before, name), low, high) for name in ("low", "high", "mean")}
    return replace(before, **clipped)


def _shifted(statistics: ChannelStatistics, by: Float64) -> ChannelStatistics:
    return ChannelStatistics(
        statistics.low - by,
        statistics.high - by,
        statistics.mean - by,
        np.maximum(statistics.second_moment - 2.0 * by * statistics.mean + by**2, 0.0),
        statistics.sample_means - by,
    )


# ---- factors --------------------------------------------------------------------------------------------------------


def _limits(link: Link, observed: ChannelStatistics) -> tuple[Float64, Float64]:
    """The least and the largest factor of each channel."""
    least = np.full(observed.channels, 1.0 / LARGEST_FACTOR)
    most = np.full(observed.channels, LARGEST_FACTOR)
    for bound, reached in ((link.bounds[1], observed.high), (-link.bounds[0], -observed.low)):
        if math.isfinite(bound) and bound > 0.0:
            room = bound / np.maximum(reached * _CLIP_HEADROOM, bound / LARGEST_FACTOR)
            fixed = room <= 1.0
            most = np.where(fixed, np.minimum(most, 1.0), np.minimum(most, np.maximum(room, 1.0)))
            least = np.where(fixed, 1.0, least)
    return least, most


# ---- biases and edits -----------------------------------------------------------------------------------------------


def _absorb(link: Link, graph: LiveGraph, observed: ChannelStatistics, second: Float64) -> Float64:
    """Moves the lower bound of each channel from the first layer's bias to the second's; returns it."""
    none = np.zeros(link.first.channels_out)
    if not link.is_relu or _pads(link.second) or link.has_clip or link.second.operator in ("MatMul", "ConvTranspose"):
        return none
    if 0 < len(observed.sample_means) < _LEAST_SAMPLES:
        return none
    floor = np.maximum(observed.low - 0.5 * (observed.mean - observed.low), 0.0)  # below the least value seen
    worth = floor > 0.05 * np.maximum(observed.high, 0.0)
    by = np.where(worth, floor, 0.0)
    if not by.any() or link.repeat != 1:
        return none
    return by if _shift_biases(link, graph, by, second) else none


def _shift_biases(link: Link, graph: LiveGraph, by: Float64, second: Float64) -> bool:
    alpha, beta = (link.second.node.attributes.get_float(name, 1.0) for name in ("alpha", "beta"))
    biases = link.first.bias, link.second.bias
    if biases[0] is None or biases[1] is None:
        return False
    if beta != 1.0 or link.first.node.attributes.get_float("beta", 1.0) != 1.0:
        return False
    before, behind = graph.content(biases[0]), graph.content(biases[1])
    moved = (second.sum(axis=2) * link.second.by_group(by)).sum(axis=1) * alpha
    first = (before.astype(np.float64) - by.reshape(before.shape)).astype(np.float32)
    graph.replace_array(biases[0], first)
    graph.replace_array(biases[1], (behind.astype(np.float64) + moved.reshape(behind.shape)).astype(np.float32))
    return True


def _pads(layer: Layer) -> bool:
    attributes = layer.node.attributes
    named = attributes.get_string("auto_pad", "") not in ("NOTSET", "VALID", "")
    return layer.is_convolution and (named or any(attributes.get_ints("pads", ())))


def _apply(link: Link, graph: LiveGraph, first: Float64, second: Float64, factors: Float64) -> None:
    graph.replace_array(link.first.weight, link.first.stored(first * factors[:, None, None]))
    for constant in (link.first.bias, link.offset):
        if constant is not None:
            bias = graph.content(constant)
            graph.replace_array(constant, (bias.astype(np.float64) * factors).reshape(bias.shape).astype(np.float32))
    inputs = link.second.by_group(np.repeat(factors, link.repeat))
    graph.replace_array(link.second.weight, link.second.stored(second / inputs[:, :, None]))


@dataclass(frozen=True)
class Equalization(WeightPass):
    """Channels of neighbouring layers are scaled so that one scale for all of them loses less.

    Attributes:
        equalize: Cross-layer equalization of channels.
    """

    name: ClassVar[str] = "equalize"
    title: ClassVar[str] = "Equalization"

    equalize: bool = setting("equalize")

    def points(self, state: State, context: Context) -> Mapping[str, int]:
        return values_for_equalization(state.prepared.graph, nodes=set(context.nodes))

    def scaled(self, graph: GraphView, *, nodes: Collection[str], insert: bool) -> Mapping[str, int]:
        return {value: axis for link in find_links(graph, nodes=nodes) for value, axis in link.axes.items()}

    def apply(self, state: State, statistics: Statistics, context: Context) -> Candidate | Skipped:
        peaks, model = {**statistics, **context.known}, state.prepared.proto
        found = equalize(model, peaks=peaks, nodes=set(context.nodes), per_channel=context.per_channel)
        if not found.pairs:
            return Skipped("nothing to gain by prediction")
        changed = state.with_weights(found.model, found.notes, found.rescaled)
        return Candidate(changed, f"{len(found.pairs)} places")
