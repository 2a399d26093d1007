"""The calibration table: what was measured on every tensor, on which model, with which settings and data; and its file.

A file is what ``onnxruntime.quantization``'s ``save_tensors_data`` writes (``data``, ``calibration_method``,
``smooth_quant``), so that stock's ``load_tensors_data`` reads it, with one more key, ``kenosis``, that holds the whole
table under a schema version, with a check sum over the file. A file without that key is stock's own. Samples stand
under ``kenosis_samples``; each is checked by its digest.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kenosis_ort.calibration.cached_samples import CachedSamples, pack_samples, unpack_samples
from kenosis_ort.calibration.methods import CalibrationConfig, distribution_moments, range_of
from kenosis_ort.calibration.statistics import HALF, ChannelRange, Histogram, TensorStatistics
from kenosis_ort.errors import CalibrationError, OptionError, OutputError, did_you_mean
from kenosis_ort.storage.writing import regular, write_text

if TYPE_CHECKING:
    from onnxruntime.quantization.calibrate import TensorsData

__all__ = ["CalibrationTable", "TensorStatistics"]

_DIGEST_SIZE = 2**256
_SCHEMA: Final = 2
"""Versions that are read; the last one is written."""
_SAMPLES: Final = "kenosis_samples"
_STOCK_NAMES: Final = {
    "minmax": "MinMax",
    "entropy": "Entropy",
    "percentile": "Percentile",
    "distribution": "Distribution",
}
_DAMAGED: Final = "Delete the cache file, so that calibration runs again."
_ALIKE: Final = "Collect both of the same model, with the same settings."


@dataclass(frozen=True)
class CalibrationTable:
    """Statistics of all observed tensors.

    Attributes:
        tensors: Statistics by tensor name.
        config: The settings they were collected with.
        samples: Number of samples (feeds) seen; 0 where it is not known.
        model_fingerprint: Of the calibrated model, from `model_fingerprint`; None where it is not known.
        data_fingerprint: Of the feeds, independent of their order; None where it is not known.
        made_up: All samples were made up.
        cached: Some of the samples, for the passes that need them; None where it holds none, as a table of stock's or
            one that was to hold no data.
        part: The same of some of the samples alone, as far as `collect` was asked for it; files do not hold it.
    """

    tensors: Mapping[str, TensorStatistics]
    config: CalibrationConfig = field(default_factory=CalibrationConfig)
    samples: int = 0
    model_fingerprint: str | None = None
    data_fingerprint: str | None = None
    made_up: bool = False
    cached: CachedSamples | None = None
    part: CalibrationTable | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", MappingProxyType(dict(self.tensors)))

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __reduce__(self) -> tuple[object, ...]:
        known = (self.model_fingerprint, self.data_fingerprint, self.made_up, self.cached)
        return (type(self), (dict(self.tensors), self.config, self.samples, *known))

    @property
    def method(self) -> str:
        """The calibration method."""
        return self.config.method

    @cached_property
    def _ranges(self) -> dict[str, tuple[float, float]]:
        return {}

    def range_of(self, name: str) -> tuple[float, float]:
        """The range of a tensor by the table's method.

        Raises:
            CalibrationError: The tensor was not observed.
        """
        if name not in self._ranges:
            self._ranges[name] = range_of(self._statistics(name), self.config, name)
        return self._ranges[name]

    def _statistics(self, name: str) -> TensorStatistics:
        found = self.tensors.get(name)
        if found is None:
            raise CalibrationError(
                f"The calibration table holds nothing about this tensor.{did_you_mean(name, self.tensors)}",
                where=f"tensor '{name}'",
                fix="Calibrate again with this model, and delete the cache file if one was used.",
            )
        return found

    def with_ranges(self, ranges: Mapping[str, tuple[float, float]]) -> CalibrationTable:
        """A table in which the given tensors have the given ranges.

        Raises:
            CalibrationError: A tensor was not observed.
        """
        changed = {name: replace(self._statistics(name), fixed=(float(a), float(b))) for name, (a, b) in ranges.items()}
        return replace(self, tensors={**self.tensors, **changed})

    def check_matches(self, model_fingerprint: str | None, config: CalibrationConfig) -> None:
        """Checks that the table fits a model and settings.

        A table from stock's cache file knows neither model nor settings: only the method is compared then.

        Args:
            model_fingerprint: Fingerprint of the model at hand; None is not compared.
            config: The settings asked for.

        Raises:
            CalibrationError: They differ; the message names what.
        """
        fix = "Delete the cache file, or name another one, so that calibration runs again."
        if self.method != config.method:
            raise CalibrationError(
                f"The calibration cache was produced with method '{self.method}', not '{config.method}'.", fix=fix
            )
        if None not in (self.model_fingerprint, model_fingerprint) and self.model_fingerprint != model_fingerprint:
            raise CalibrationError(
                "The calibration cache was produced from another model, or from this one before its graph, weights or "
                "rewrites changed.",
                fix=fix,
            )
        if config.sketch and not self.config.keeps_histogram:
            raise CalibrationError("The calibration cache holds no histograms, which were asked for.", fix=fix)
        if self.model_fingerprint is None:
            return
        mine, asked = self.config.relevant(), config.relevant()
        differing = sorted(k for k in mine.keys() | asked.keys() if mine.get(k) != asked.get(k))
        if differing:
            details = ", ".join(f"{k} is {mine.get(k)!r} there and {asked.get(k)!r} here" for k in differing)
            raise CalibrationError(f"The calibration cache was produced with other settings: {details}.", fix=fix)

    def merge(self, other: CalibrationTable) -> CalibrationTable:
        """The table of both data sets together, as if one run had seen all samples.

        Exact for minima, maxima, counts, histograms and the samples that are kept, in whatever order tables are merged;
        the moving average is that of all samples up to rounding.

        Raises:
            CalibrationError: The tables are of different models, settings or tensors, or their moving average
                depends on the order of the samples.
        """
        if self.config.is_chunked:
            raise CalibrationError(
                "A moving average over chunks depends on the order of the samples, so that tables cannot be merged.",
                fix="Collect without strided and max_intermediate_outputs.",
            )
        odd = ", ".join(sorted(self.tensors.keys() ^ other.tensors.keys())[:5])
        fixed = next((n for n, s in (*self.tensors.items(), *other.tensors.items()) if s.fixed is not None), None)
        for differs, what, where, fix in (
            (self.model_fingerprint != other.model_fingerprint, "of different models", None, _ALIKE),
            (self.config.relevant() != other.config.relevant(), "of different settings", None, _ALIKE),
            (odd, "of different tensors", odd, _ALIKE),
            (fixed, "with ranges set by hand", fixed, "Set them later."),
        ):
            if differs:
                raise CalibrationError(f"Calibration tables {what} cannot be merged.", where=where, fix=fix)
        weights = (max(self.samples, 1), max(other.samples, 1))
        merged = {n: s.merge(other.tensors[n], weights=weights) for n, s in self.tensors.items()}
        data = None
        if self.data_fingerprint is not None and other.data_fingerprint is not None:
            data = f"{(int(self.data_fingerprint, 16) + int(other.data_fingerprint, 16)) % _DIGEST_SIZE:064x}"
        cached = None if self.cached is None or other.cached is None else self.cached.merge(other.cached)
        return replace(
            self,
            tensors=merged,
            samples=self.samples + other.samples,
            data_fingerprint=data,
            made_up=self.made_up and other.made_up,
            cached=cached,
            part=None,
        )

    def to_tensors_data(self) -> TensorsData:
        """The ranges in stock's own type, which ``QDQQuantizer`` takes."""
        from onnxruntime.quantization.calibrate import CalibrationMethod, TensorData, TensorsData

        data = {name: TensorData(**_stock_fields(self, name)) for name in self.tensors}
        return TensorsData(CalibrationMethod[_STOCK_NAMES[self.method]], data)

    def to_json(self) -> str:
        """The table as JSON that `from_json`, and stock's ``load_tensors_data``, read."""
        return json.dumps(_to_dict(self))

    @classmethod
    def from_json(cls, text: str) -> CalibrationTable:
        """Reads a table from `to_json`, or from a cache file that stock wrote.

        Raises:
            CalibrationError: The text is not JSON, not a calibration table, or of another schema version.
        """
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CalibrationError(f"The calibration cache is not valid JSON: {error}.", fix=_DAMAGED) from error
        return _from_dict(raw)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the table to a file, whole or not at all.

        Raises:
            CalibrationError: The file cannot be written.
        """
        target = Path(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_text(target, self.to_json(), "the calibration cache")
        except OSError as error:
            reason = error.what if isinstance(error, OutputError) else error.strerror or error
            raise CalibrationError(
                f"The calibration cache cannot be written: {reason}.", where=str(target), fix="Name another path."
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CalibrationTable:
        """Reads a table from a file written by `save` or by stock's ``save_tensors_data``.

        Raises:
            CalibrationError: The file is missing, a folder, unreadable or not a calibration table.
        """
        try:
            return cls.from_json(regular(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CalibrationError(
                f"The calibration cache cannot be read: {reason}.", where=str(path), fix="Name a table that was saved."
            ) from error
        except CalibrationError as error:
            raise CalibrationError(error.what, where=str(path), fix=error.fix) from error


# ---- the file -------------------------------------------------------------------------------------------------------


def _stock_fields(table: CalibrationTable, name: str) -> dict[str, np.ndarray[Any, Any]]:
    """Fields of stock's ``TensorData``, as arrays of the tensor's element type."""
    statistics = table.tensors[name]
    dtype = np.dtype(statistics.dtype)
    low, high = table.range_of(name)
    shape = (1,) if table.method == "minmax" else ()
    out: dict[str, np.ndarray[Any, Any]] = {}
    if table.method == "distribution" and statistics.histogram is not None:
        moments = distribution_moments(statistics.histogram, statistics.low, statistics.high, table.config)
        out["avg"], out["std"] = (np.array(moment, dtype) for moment in moments[:2])
        out["hist"], out["hist_edges"] = moments[2], moments[3].astype(dtype)
    out["lowest"] = np.full(shape, low, dtype)
    out["highest"] = np.full(shape, high, dtype)
    return out


def _histogram_to_dict(histogram: Histogram) -> dict[str, Any]:
    used = np.flatnonzero(histogram.counts)
    first, last = (int(used[0]), int(used[-1]) + 1) if used.size else (0, 0)
    return {"exponent": histogram.exponent, "first": first, "counts": histogram.counts[first:last].tolist()}


def _histogram_from_dict(raw: Mapping[str, Any]) -> Histogram:
    counts = np.zeros(2 * HALF, np.int64)
    stored = np.asarray(raw["counts"], np.int64)
    counts[int(raw["first"]) : int(raw["first"]) + stored.size] = stored
    return Histogram(int(raw["exponent"]), counts)


def _channels_to_dict(channels: ChannelRange) -> dict[str, Any]:
    low, high = (
        base64.b64encode(np.ascontiguousarray(end, "<f4").tobytes()).decode()  # they are of a float32 tensor
        for end in (channels.low, channels.high)
    )
    return {"axis": channels.axis, "rank": channels.rank, "low": low, "high": high}


def _channels_from_dict(raw: Mapping[str, Any]) -> ChannelRange:
    low, high = (np.frombuffer(base64.b64decode(raw[end]), "<f4").astype(np.float64) for end in ("low", "high"))
    return ChannelRange(int(raw["axis"]), int(raw["rank"]), low, high)


def _pair(raw: Any) -> tuple[float, float]:
    return float(raw[0]), float(raw[1])


_NUMBERS: Final[Mapping[str, Callable[[Any], Any]]] = {"low": float, "high": float, "count": int, "dtype": str}
_PARTS: Final[Mapping[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]]] = {
    "histogram": (_histogram_to_dict, _histogram_from_dict),
    "channels": (_channels_to_dict, _channels_from_dict),
    "averaged": (list, _pair),
    "fixed": (list, _pair),
}
"""Fields of statistics that may be None and are left out then: how each is written and read."""


def _statistics_to_dict(statistics: TensorStatistics) -> dict[str, Any]:
    parts = {name: (write, getattr(statistics, name)) for name, (write, _) in _PARTS.items()}
    return {
        **{name: getattr(statistics, name) for name in _NUMBERS},
        **{name: write(value) for name, (write, value) in parts.items() if value is not None},
    }


def _statistics_from_dict(raw: Mapping[str, Any]) -> TensorStatistics:
    found = {name: read(raw[name]) for name, read in _NUMBERS.items()}
    parts = {name: read(raw[name]) for name, (_, read) in _PARTS.items() if raw.get(name) is not None}
    return TensorStatistics(**found, **parts)


def _to_dict(table: CalibrationTable) -> dict[str, Any]:
    """The table as plain JSON data, readable by stock."""
    data: dict[str, Any] = {}
    for name in table.tensors:
        fields = _stock_fields(table, name)
        arrays = {k: {"data": v.tolist(), "dtype": str(v.dtype), "CLS": "numpy.array"} for k, v in fields.items()}
        data[name] = {**arrays, "CLS": "TensorData"}
    out: dict[str, Any] = {
        "CLS": "TensorsData",
        "data": data,
        "calibration_method": {
            "CLS": "CalibrationMethod",
            "value": f"CalibrationMethod.{_STOCK_NAMES[table.method]}",
        },
        "smooth_quant": False,
        "kenosis": {
            "schema": _SCHEMA,
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


def _from_dict(raw: Any) -> CalibrationTable:
    """The table from `_to_dict`'s data or from stock's.

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
        if ours.get("schema") != _SCHEMA:
            raise CalibrationError(
                f"The calibration table is of schema {ours.get('schema')!r}, and this version reads {_SCHEMA}.",
                fix=_DAMAGED,
            )
        if ours.get("checksum") != _checksum(raw):
            raise CalibrationError(
                "The calibration table is damaged or was edited: its check sum does not fit.", fix=_DAMAGED
            )
        return CalibrationTable(
            {name: _statistics_from_dict(s) for name, s in ours["tensors"].items()},
            CalibrationConfig(**ours["config"]),
            int(ours["samples"]),
            ours["model_fingerprint"],
            ours["data_fingerprint"],
            made_up=bool(ours["made_up"]),
            cached=unpack_samples(ours["kept"], raw[_SAMPLES]) if "kept" in ours else None,
        )
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, CalibrationError) and not isinstance(error, OptionError):
            raise
        raise CalibrationError(f"The calibration table is damaged: {error!r}.", fix=_DAMAGED) from error


def _from_stock(raw: Mapping[str, Any]) -> CalibrationTable:
    by_stock = {v: k for k, v in _STOCK_NAMES.items()}
    method = by_stock[str(raw["calibration_method"]["value"]).rpartition(".")[2]]
    tensors = {}
    for name, fields in raw["data"].items():
        low, high = _stock_number(fields["lowest"]), _stock_number(fields["highest"])
        dtype = fields["lowest"].get("dtype", "float32") if isinstance(fields["lowest"], dict) else "float32"
        tensors[name] = TensorStatistics(low=low, high=high, dtype=dtype, fixed=(low, high))
    return CalibrationTable(tensors, CalibrationConfig(method=method))


def _stock_number(raw: Any) -> float:
    values = np.asarray(raw["data"] if isinstance(raw, dict) else raw, np.float64).reshape(-1)
    if values.size != 1:
        raise ValueError(f"a range end has {values.size} values")
    return float(values[0])
