"""Files of calibration tables: ranges, samples and where these come from.

The file format of a calibration table, and stock's.

A file is what ``onnxruntime.quantization``'s ``save_tensors_data`` writes (``data``, ``calibration_method``,
``smooth_quant``), so that stock's ``load_tensors_data`` reads it, with one more key, ``kenosis``, that holds the whole
table under a schema version, with a check sum over the file. A file without that key is stock's own. Samples stand
under ``kenosis_samples``; each is checked by its digest.

How a calibration table's file holds samples: arrays as text, their sizes checked before memory is taken.

Where calibration samples come from, and what was assumed when they were made up.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import onnx

from kenosis_ort.calibration.cached_samples import MOST_BYTES, CachedSamples, digest_of, feed_digest
from kenosis_ort.calibration.config import CalibrationConfig
from kenosis_ort.calibration.feeds import Sample
from kenosis_ort.calibration.histogram import HALF, Histogram
from kenosis_ort.calibration.statistics import ChannelRange, TensorStatistics
from kenosis_ort.errors import CalibrationError, OptionError

if TYPE_CHECKING:
    from onnxruntime.quantization.calibrate import TensorsData

    from kenosis_ort.calibration.table import CalibrationTable


class Known(str, Enum):
    """How well the scale of an input's values is known."""

    GIVEN = "given by the caller"
    REAL = "taken from the real samples"
    GRAPH = "found in the graph"
    STATISTICS = "fitted to the statistics of a BatchNormalization"
    CONVENTION = "a convention"
    GUESS = "a guess"


@dataclass(frozen=True)
class Provenance:
    """Where samples come from.

    Attributes:
        inputs: What was assumed about each input, for people.
        known: How well the scale of each input's values is known, by its name.
        natural: Whether the samples are made after what the inputs are in nature; random tokens and features are not.
        real: Number of real feeds, which come first.
    """

    inputs: tuple[str, ...] = ()
    known: Mapping[str, Known] = field(default_factory=dict)
    natural: bool = False
    real: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "known", MappingProxyType(dict(self.known)))


_NUMBERS: Final[Mapping[str, np.dtype[Any]]] = {
    kind.name: kind
    for kind in map(onnx.helper.tensor_dtype_to_np_dtype, onnx.helper.get_all_tensor_dtypes())
    if not kind.hasobject and kind.kind not in "SU"
}
"""Types of tensors whose bytes are their content; no other can be named in a file."""
_DAMAGED = "Delete the file, so that calibration runs again."


def pack_samples(cached: CachedSamples) -> tuple[dict[str, Any] | None, list[Any]]:
    """The cached samples as plain JSON data: what identifies them, and the samples themselves.

    Numbers in their reader are left out: of several readers' samples they say nothing.

    Returns:
        None and nothing where a sample holds what is neither an array nor a sequence of arrays.
    """
    samples = cached.samples
    try:
        packed = [{name: _pack(value) for name, value in sample.items()} for sample in samples]
    except TypeError:
        return None, []
    digests = [f"{digest_of(sample):064x}" for sample in samples]
    return {"most": cached.most, "budget": cached.budget, "cut": f"{cached.cut:x}", "digests": digests}, packed


def unpack_samples(head: Mapping[str, Any] | None, raw: Sequence[Any]) -> CachedSamples | None:
    """Reads what `pack_samples` returned.

    Raises:
        CalibrationError: A sample is not what its digest says, or the samples are larger than they may be.
        KeyError: Or TypeError or ValueError; the data is damaged in another way.
    """
    if head is None:
        return None
    size = sum(_size(value) for sample in raw for value in sample.values())
    if size > min(int(head["budget"]), MOST_BYTES) or len(raw) != len(head["digests"]):
        raise CalibrationError(f"The samples in the calibration table take {size} bytes.", fix=_DAMAGED)
    cached = CachedSamples(int(head["most"]), int(head["budget"]), copies=False)
    cached.cut_at(int(head["cut"], 16))
    for known, packed in zip(head["digests"], raw, strict=True):
        values = {str(name): _unpack(value) for name, value in packed.items()}
        digest = feed_digest(values)
        if digest != int(known, 16):
            raise CalibrationError(
                "A sample in the calibration table was edited: its digest does not fit.", fix=_DAMAGED
            )
        cached.add(Sample(values, None, digest))
    return cached


def _pack(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_pack(item) for item in value]
    array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    if array.dtype.name in _NUMBERS:
        content = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
        return {"dtype": array.dtype.name, "shape": list(array.shape), "base64": content}
    if all(isinstance(item, str) for item in array.reshape(-1).tolist()):
        width = array.dtype.itemsize // 4 if array.dtype.kind == "U" else 0
        return {"width": width, "shape": list(array.shape), "text": array.reshape(-1).tolist()}
    raise TypeError(f"a sample holds {array.dtype}, which no file does")


def _size(packed: Any) -> int:
    """The bytes that a value will take; those of numbers as their text is long, before it is decoded."""
    if isinstance(packed, list):
        return sum(map(_size, packed))
    shape = [int(size) for size in packed["shape"]]
    count, is_text = math.prod(shape), "text" in packed
    size = count * (4 * int(packed["width"]) if is_text else _NUMBERS[packed["dtype"]].itemsize)
    there = count == len(packed["text"]) if is_text else -(-size // 3) * 4 == len(packed["base64"])
    if min(shape, default=0) < 0 or size < 0 or not there:
        raise ValueError("the size of an array is not what its shape says")
    return size


def _unpack(packed: Any) -> Any:
    if isinstance(packed, list):
        return [_unpack(item) for item in packed]
    shape = [int(size) for size in packed["shape"]]
    if "text" in packed:
        kind = np.dtype(f"<U{int(packed['width'])}" if packed["width"] else object)
        return np.array([str(item) for item in packed["text"]], kind).reshape(shape)
    try:
        content = base64.b64decode(packed["base64"], validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from error
    return np.frombuffer(content, _NUMBERS[packed["dtype"]]).reshape(shape).copy()


SCHEMA_VERSION = 2
_SAMPLES = "kenosis_samples"
_STOCK_NAMES = {
    "minmax": "MinMax",
    "entropy": "Entropy",
    "percentile": "Percentile",
    "distribution": "Distribution",
}


def _stock_fields(table: CalibrationTable, name: str) -> dict[str, Any]:
    """Fields of stock's ``TensorData``, as arrays of the tensor's element type."""
    statistics = table.tensors[name]
    dtype = np.dtype(statistics.dtype)
    low, high = table.range_of(name)
    shape = (1,) if table.method == "minmax" else ()
    out: dict[str, Any] = {}
    if table.method == "distribution" and statistics.histogram is not None:
        moments = statistics.moments(table.config, name)
        out["avg"] = np.array(moments.mean, dtype)
        out["std"] = np.array(moments.std, dtype)
        out["hist"] = moments.counts
        out["hist_edges"] = moments.edges.astype(dtype)
    out["lowest"] = np.full(shape, low, dtype)
    out["highest"] = np.full(shape, high, dtype)
    return out


def to_stock(table: CalibrationTable) -> TensorsData:
    """The table's ranges as stock's ``TensorsData``."""
    from onnxruntime.quantization.calibrate import CalibrationMethod, TensorData, TensorsData

    data = {name: TensorData(**_stock_fields(table, name)) for name in table.tensors}
    return TensorsData(CalibrationMethod[_STOCK_NAMES[table.method]], data)


def _array(values: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {"data": values.tolist(), "dtype": str(values.dtype), "CLS": "numpy.array"}


def _histogram_to_dict(histogram: Histogram) -> dict[str, Any]:
    used = np.flatnonzero(histogram.counts)
    first, last = (int(used[0]), int(used[-1]) + 1) if used.size else (0, 0)
    return {"exponent": histogram.exponent, "first": first, "counts": histogram.counts[first:last].tolist()}


def _histogram_from_dict(raw: dict[str, Any]) -> Histogram:
    counts = np.zeros(2 * HALF, np.int64)
    stored = np.asarray(raw["counts"], np.int64)
    counts[int(raw["first"]) : int(raw["first"]) + stored.size] = stored
    return Histogram(int(raw["exponent"]), counts)


def _pair(raw: Any) -> tuple[float, float] | None:
    return None if raw is None else (float(raw[0]), float(raw[1]))


def _statistics_to_dict(statistics: TensorStatistics) -> dict[str, Any]:
    out: dict[str, Any] = {
        "low": statistics.low,
        "high": statistics.high,
        "count": statistics.count,
        "dtype": statistics.dtype,
    }
    if statistics.histogram is not None:
        out["histogram"] = _histogram_to_dict(statistics.histogram)
    if statistics.channels is not None:
        channels = statistics.channels
        ends = {end: _packed(getattr(channels, end)) for end in ("low", "high")}
        out["channels"] = {"axis": channels.axis, "rank": channels.rank, **ends}
    for key in ("averaged", "fixed"):
        if getattr(statistics, key) is not None:
            out[key] = list(getattr(statistics, key))
    return out


def _statistics_from_dict(raw: dict[str, Any]) -> TensorStatistics:
    histogram, channels = raw.get("histogram"), raw.get("channels")
    return TensorStatistics(
        low=float(raw["low"]),
        high=float(raw["high"]),
        count=int(raw["count"]),
        dtype=str(raw["dtype"]),
        histogram=None if histogram is None else _histogram_from_dict(histogram),
        averaged=_pair(raw.get("averaged")),
        fixed=_pair(raw.get("fixed")),
        channels=None if channels is None else _channels_from_dict(channels),
    )


def _packed(array: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(array, "<f4").tobytes()).decode()  # they are of a float32 tensor


def _channels_from_dict(raw: Mapping[str, Any]) -> ChannelRange:
    low, high = (np.frombuffer(base64.b64decode(raw[end]), "<f4").astype(np.float64) for end in ("low", "high"))
    return ChannelRange(int(raw["axis"]), int(raw["rank"]), low, high)


def table_to_dict(table: CalibrationTable) -> dict[str, Any]:
    """The table as plain JSON data, readable by stock."""
    data = {}
    for name in table.tensors:
        fields = _stock_fields(table, name)
        data[name] = {**{k: _array(v) for k, v in fields.items()}, "CLS": "TensorData"}
    out: dict[str, Any] = {
        "CLS": "TensorsData",
        "data": data,
        "calibration_method": {
            "CLS": "CalibrationMethod",
            "value": f"CalibrationMethod.{_STOCK_NAMES[table.method]}",
        },
        "smooth_quant": False,
        "kenosis": {
            "schema": SCHEMA_VERSION,
            "config": table.config.to_dict(),
            "samples": table.samples,
            "model_fingerprint": table.model_fingerprint,
            "data_fingerprint": table.data_fingerprint,
            "made_up": table.made_up,
            "tensors": {name: _statistics_to_dict(s) for name, s in table.tensors.items()},
        },
    }
    if table.cached is not None:
        out["kenosis"]["kept"], out[_SAMPLES] = pack_samples(table.cached)
    out["kenosis"]["checksum"] = _checksum(out)
    return out


def _checksum(raw: Mapping[str, Any]) -> str:
    """A SHA-256 over all that a file holds but the check sum itself, and samples, whose digests it holds."""
    ours = {key: value for key, value in raw["kenosis"].items() if key != "checksum"}
    summed = {key: value for key, value in raw.items() if key != _SAMPLES}
    return hashlib.sha256(json.dumps({**summed, "kenosis": ours}, sort_keys=True).encode()).hexdigest()


def table_from_dict(raw: Any) -> dict[str, Any]:
    """The arguments of a ``CalibrationTable`` from `table_to_dict`'s data or from stock's.

    Raises:
        CalibrationError: The data is no calibration table, or of another schema version.
    """
    if not isinstance(raw, dict) or raw.get("CLS") != "TensorsData":
        raise CalibrationError(
            "The file is not a calibration table.",
            fix="Give a file written by CalibrationTable.save or by onnxruntime.quantization's save_tensors_data.",
        )
    ours = raw.get("kenosis")
    try:
        if ours is None:
            return _from_stock(raw)
        if ours.get("schema") not in (1, SCHEMA_VERSION):
            raise CalibrationError(
                f"The calibration table is of schema {ours.get('schema')!r}, and this version reads 1 and "
                f"{SCHEMA_VERSION}.",
                fix="Delete the cache file, so that calibration runs again.",
            )
        if ours.get("checksum") != _checksum(raw):
            raise CalibrationError(
                "The calibration table is damaged or was edited: its check sum does not fit.",
                fix="Delete the cache file, so that calibration runs again.",
            )
        origin = ours.get("origin") or {}  # of schema 1, whose tables were of weights that passes had changed
        return {
            "made_up": bool(ours.get("made_up", origin.get("made_up", False))),
            "outdated": bool(origin.get("changes") or origin.get("biases")),
            "cached": unpack_samples(ours["kept"], raw[_SAMPLES]) if "kept" in ours else None,
            "tensors": {name: _statistics_from_dict(s) for name, s in ours["tensors"].items()},
            "config": CalibrationConfig(**ours["config"]),
            "samples": int(ours["samples"]),
            "model_fingerprint": ours["model_fingerprint"],
            "data_fingerprint": ours["data_fingerprint"],
        }
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, CalibrationError) and not isinstance(error, OptionError):
            raise
        raise CalibrationError(
            f"The calibration table is damaged: {error!r}.",
            fix="Delete the cache file, so that calibration runs again.",
        ) from error


def _from_stock(raw: dict[str, Any]) -> dict[str, Any]:
    by_stock = {v: k for k, v in _STOCK_NAMES.items()}
    method = by_stock[str(raw["calibration_method"]["value"]).rpartition(".")[2]]
    tensors = {}
    for name, fields in raw["data"].items():
        low, high = _stock_number(fields["lowest"]), _stock_number(fields["highest"])
        dtype = fields["lowest"].get("dtype", "float32") if isinstance(fields["lowest"], dict) else "float32"
        tensors[name] = TensorStatistics(low=low, high=high, dtype=dtype, fixed=(low, high))
    return {"tensors": tensors, "config": CalibrationConfig(method=method)}


def _stock_number(raw: Any) -> float:
    values = np.asarray(raw["data"] if isinstance(raw, dict) else raw, np.float64).reshape(-1)
    if values.size != 1:
        raise ValueError(f"a range end has {values.size} values")
    return float(values[0])
