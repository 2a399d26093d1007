"""Sizes of dynamic inputs, found by running the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.calibration.session import ObservedModel, SessionSettings, run
from kenosis_ort.calibration.synthetic.consumers import Consumers
from kenosis_ort.calibration.synthetic.kinds import InputInfo, Kind
from kenosis_ort.calibration.synthetic.shapes import has_free_axes, resolve_shapes, sizes_to_try
from kenosis_ort.errors import CalibrationError
from kenosis_ort.graph.operators import HEAVY

Array = npt.NDArray[Any]
Shapes = dict[str, tuple[int, ...]]

_PEAKS = 24  # tensors looked at
_ODD = 4.0  # times the least peak


def find_shapes(
    proto: onnx.ModelProto,
    infos: Sequence[InputInfo],
    given: Mapping[str, tuple[int, ...]],
    feed: Callable[[Shapes], dict[str, Array]],
    settings: SessionSettings,
) -> Shapes:
    """Returns fixed shapes of all inputs with which the model runs.

    The usual sizes come first. Nets that take sound in blocks may run with blocks of a wrong length and then compute
    something else, with values hundreds of times too large: of the lengths that run, the longest is taken whose values
    are not much larger than those of any other.

    Args:
        proto: The model.
        infos: Its inputs.
        given: Shapes that are known.
        feed: Makes a feed of given shapes.
        settings: How to run the model.

    Raises:
        CalibrationError: It runs with no size, or a given shape contradicts the model's.
    """
    consumers = Consumers(proto)
    channels = {i.name: c for i in infos if (c := consumers.conv_channels(i.name)) is not None}
    features = {i.name: f for i in infos if (f := consumers.features(i.name)) is not None}

    def shapes_for(size: int | None) -> Shapes:
        return resolve_shapes(infos, given, channels=channels, features=features, size=size)

    free = [i for i in infos if i.name not in given and has_free_axes(i)]
    if not free:
        return shapes_for(None)
    blocks = any(i.kind is Kind.AUDIO for i in free)
    outputs = [value.name for value in proto.graph.output]
    watched = [*outputs, *(_layers(proto, set(outputs)) if blocks else ())]
    with ObservedModel(proto, settings) as model:
        session = model.session(watched)
    first_error: CalibrationError | None = None
    found: list[tuple[Shapes, int, float]] = []
    for size in sizes_to_try(infos):
        try:
            shapes = shapes_for(size)
            values = run(session, watched, dict(feed(shapes)), 0)
        except CalibrationError as error:
            first_error = first_error or error
            continue
        if size is None or not blocks:
            return shapes
        found.append((shapes, size, max((_peak(value) for value in values), default=0.0)))
    if found:
        least = min(peak for _, _, peak in found)
        usual = [(size, shapes) for shapes, size, peak in found if peak <= _ODD * least]
        return max(usual, key=lambda entry: entry[0])[1]
    raise CalibrationError(
        f"No size of the dynamic inputs was found with which the model runs ({first_error}).",
        where=", ".join(f"input '{info.name}' ({info.describe()})" for info in free),
        fix="Give SyntheticReader(input_shapes={name: shape}), or a reader of real data.",
    ) from first_error


def shapes_of(feed: Mapping[str, Array], infos: Sequence[InputInfo]) -> Shapes:
    """Returns the shapes of a real feed for the inputs of dynamic ones, with a batch of one.

    Args:
        feed: A real feed.
        infos: The inputs.
    """
    batches = {info.shape[0] for info in infos if info.shape and isinstance(info.shape[0], str)}
    out: Shapes = {}
    for info in infos:
        if info.name in feed and has_free_axes(info):
            sizes = zip(info.shape, feed[info.name].shape, strict=True)
            out[info.name] = tuple(
                1 if dim in batches or (axis == 0 and dim is None) else size for axis, (dim, size) in enumerate(sizes)
            )
    return out


def _layers(proto: onnx.ModelProto, known: set[str]) -> list[str]:
    names = [n.output[0] for n in proto.graph.node if n.op_type in HEAVY and n.output[0] not in known]
    return names[:: max(1, -(-len(names) // _PEAKS))]


def _peak(value: Any) -> float:
    array = np.asarray(value)
    return float(np.abs(array).max(initial=0.0)) if array.dtype.kind == "f" else 0.0
