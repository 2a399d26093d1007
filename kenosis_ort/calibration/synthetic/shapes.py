"""Shapes of made-up samples: where sizes are dynamic, the model is run with usual ones."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from kenosis_ort.calibration.feeds import fits
from kenosis_ort.calibration.part_session import ObservedModel, SessionSettings, run
from kenosis_ort.calibration.synthetic.kinds import Array, InputInfo, InputKind
from kenosis_ort.calibration.synthetic.stem import Consumers
from kenosis_ort.errors import CalibrationError
from kenosis_ort.graph.constants import HEAVY

_SIZES = (64, 128, 256, 320, 416, 512, 640, 576, 16, 8, 1, 1600, 4000)
_AUDIO_SIZES = (512, 576, 1024, 1600, 4000, 480, 640, 320, 256, 160)
_IMAGE_SIDE = 224
_STEPS = 32
_AUDIO_STEPS = 16_000
_ARRAY_BYTES = 2**31

Hints = Mapping[tuple[str, int], int]
Shapes = dict[str, tuple[int, ...]]


def resolve_shapes(
    infos: Sequence[InputInfo], given: Mapping[str, tuple[int, ...]], hints: Hints, size: int | None = None
) -> Shapes:
    """A fixed shape of every input; sizes of one name are the same everywhere, ``a + b`` is their sum.

    Args:
        infos: The inputs.
        given: Shapes that the caller gave.
        hints: Sizes by input name and axis that the model's operators tell.
        size: For dynamic axes other than the batch, channels and states; None chooses by kind.

    Raises:
        CalibrationError: A given shape contradicts the model's, or a tensor would be absurdly large.
    """
    symbols: dict[str, int] = {}
    for info in infos:
        if info.name in given:
            _check_given(info, given[info.name])
            pairs = zip(info.shape, given[info.name], strict=True)
            symbols.update({d: w for d, w in pairs if isinstance(d, str)})
    # Sums such as "past_length + length" come after their terms.
    for info in infos:
        for axis, dim in enumerate(info.shape):
            if isinstance(dim, str) and "+" not in dim:
                symbols.setdefault(dim, _default_size(info, axis, size, hints))
    out: Shapes = {}
    for info in infos:
        sizes = [
            dim if isinstance(dim, int) else _symbol(dim or "", symbols) or _default_size(info, axis, size, hints)
            for axis, dim in enumerate(info.shape)
        ]
        out[info.name] = given.get(info.name, tuple(sizes))
        if np.prod(out[info.name], dtype=np.float64) * 4 > _ARRAY_BYTES:
            raise CalibrationError(
                f"The input's shape {out[info.name]} is too large to make up.",
                where=f"input '{info.name}'",
                fix="Give input_shapes, or a reader of real data.",
            )
    return out


def has_free_axes(info: InputInfo) -> bool:
    """Whether an axis other than the batch is dynamic."""
    return not all(isinstance(d, int) for d in info.shape[1:])


def _symbol(name: str, symbols: Mapping[str, int]) -> int:
    terms = [term.strip(" ()") for term in name.split("+")]
    sizes = [int(term) if term.isdigit() else symbols.get(term, 0) for term in terms]
    return symbols.get(name) or (sum(sizes) if all(sizes) else 0)


def _check_given(info: InputInfo, wanted: tuple[int, ...]) -> None:
    if not fits(info.shape, wanted):
        raise CalibrationError(
            f"The shape {wanted} does not fit the model's input ({info.describe()}).",
            where=f"input '{info.name}'",
            fix="Correct input_shapes.",
        )


def _default_size(info: InputInfo, axis: int, size: int | None, hints: Hints) -> int:
    if axis == 0 or info.kind is InputKind.STATE:
        return 1
    if (info.name, axis) in hints or size is not None:
        return hints.get((info.name, axis), size or 0)
    if info.kind is InputKind.IMAGE:
        return _IMAGE_SIDE
    return _AUDIO_STEPS if info.kind is InputKind.AUDIO and axis == len(info.shape) - 1 else _STEPS


def _hints(consumers: Consumers, infos: Sequence[InputInfo]) -> Hints:
    """The channels of images, which a Conv tells, and the last axis of others where a matrix tells it."""
    found: dict[tuple[str, int], int] = {}
    for info in infos:
        last = len(info.shape) - 1
        if info.kind is InputKind.IMAGE:
            found[info.name, last if info.channels_last else last - 2] = consumers.conv_channels(info.name) or 3
        elif (features := consumers.features(info.name)) is not None:
            found[info.name, last] = features
    return found


_PEAKS = 24  # tensors looked at
_ODD = 4.0  # times the least peak


def find_shapes(
    proto: onnx.ModelProto,
    infos: Sequence[InputInfo],
    given: Mapping[str, tuple[int, ...]],
    feed: Callable[[Shapes], dict[str, Array]],
    settings: SessionSettings,
) -> Shapes:
    """Fixed shapes of all inputs with which the model runs.

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
    hints = _hints(Consumers(proto), infos)
    free = [i for i in infos if i.name not in given and has_free_axes(i)]
    if not free:
        return resolve_shapes(infos, given, hints)
    blocks = any(i.kind is InputKind.AUDIO for i in free)
    outputs = [value.name for value in proto.graph.output]
    watched = [*outputs, *(_layers(proto, set(outputs)) if blocks else ())]
    with ObservedModel(proto, settings) as model:
        session = model.session(watched)
    first_error: CalibrationError | None = None
    found: list[tuple[Shapes, int, float]] = []
    # The usual sizes first; for sound those of the blocks that nets take.
    audio = any(info.kind is InputKind.AUDIO for info in infos)
    for size in (None, *dict.fromkeys((*_AUDIO_SIZES, *_SIZES) if audio else _SIZES)):
        try:
            shapes = resolve_shapes(infos, given, hints, size)
            values = run(session, watched, dict(feed(shapes)), 0)
        except CalibrationError as error:
            first_error = first_error or error
            continue
        if size is None or not blocks:
            return shapes
        found.append((shapes, size, max((_peak(value) for value in values), default=0.0)))
    if found:
        least = min(peak for _, _, peak in found)
        return max((entry for entry in found if entry[2] <= _ODD * least), key=lambda entry: entry[1])[0]
    raise CalibrationError(
        f"No size of the dynamic inputs was found with which the model runs ({first_error}).",
        where=", ".join(f"input '{info.name}' ({info.describe()})" for info in free),
        fix="Give SyntheticReader(input_shapes={name: shape}), or a reader of real data.",
    ) from first_error


def shapes_of(feed: Mapping[str, Array], infos: Sequence[InputInfo]) -> Shapes:
    """The shapes of a real feed for the inputs of dynamic ones, with a batch of one.

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
