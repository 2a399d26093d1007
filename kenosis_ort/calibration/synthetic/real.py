"""What a handful of real samples say about the scale of the inputs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort

from kenosis_ort.calibration.feeds import check_feed, input_specs, sample_feeds
from kenosis_ort.calibration.synthetic.kinds import InputInfo
from kenosis_ort.calibration.synthetic.pictures import Preprocessing
from kenosis_ort.errors import CalibrationError

Array = npt.NDArray[Any]
Doubles = npt.NDArray[np.float64]
Feeds = Sequence[Mapping[str, Array]]

_MOST = 256
_LEAST_SPREAD = 1e-6


def real_feeds(reader: Any, proto: onnx.ModelProto) -> list[dict[str, Array]]:
    """Copies of all feeds of a reader.

    Raises:
        CalibrationError: There are none, too many to keep, or they do not fit the model.
    """
    required, optional = input_specs(proto)
    feeds: list[dict[str, Array]] = []
    for index, feed in enumerate(itertools.islice(sample_feeds(reader), _MOST + 1)):
        checked = check_feed(feed, required, optional, index)
        feeds.append({name: np.array(v.numpy() if isinstance(v, ort.OrtValue) else v) for name, v in checked.items()})
    if not feeds:
        raise CalibrationError("The reader of real samples yields none.", fix="Leave real= out, or rewind the reader.")
    if len(feeds) > _MOST:
        raise CalibrationError(
            f"There are more than {_MOST} real samples, which need no made-up ones beside them.",
            fix="Use the reader of real samples itself, without SyntheticReader.",
        )
    return feeds


def pixels_of(feeds: Feeds, info: InputInfo) -> Preprocessing:
    """The preprocessing that brings black and white to the extremes of each channel of the real images."""
    axis = -1 if info.channels_last else -3
    pixels = [np.moveaxis(feed[info.name].astype(np.float64), axis, 0) for feed in feeds]
    low = np.min([p.reshape(p.shape[0], -1).min(axis=1) for p in pixels], axis=0)
    high = np.max([p.reshape(p.shape[0], -1).max(axis=1) for p in pixels], axis=0)
    width = np.maximum(high - low, _LEAST_SPREAD)
    mean, std = tuple(float(v) for v in -low / width), tuple(float(v) for v in 1 / width)
    return Preprocessing(0.0, 1.0, mean, std, name="as the real samples")


def loudest_of(feeds: Feeds, name: str) -> float:
    """The largest magnitude of an input."""
    return max(float(np.abs(feed[name].astype(np.float64)).max(initial=0.0)) for feed in feeds) or 1.0


def moments_of(feeds: Feeds, name: str, axis: int) -> tuple[Doubles, Doubles]:
    """Mean and deviation of each group along an axis, broadcasting to the shape without the first axis."""
    moved = [np.moveaxis(feed[name].astype(np.float64), axis, 0) for feed in feeds]
    values = np.concatenate([m.reshape(m.shape[0], -1) for m in moved], axis=1)
    outline = tuple(values.shape[0] if a == axis else 1 for a in range(1, moved[0].ndim))
    spread = np.maximum(values.std(axis=1), _LEAST_SPREAD)
    return values.mean(axis=1).reshape(outline), spread.reshape(outline)
