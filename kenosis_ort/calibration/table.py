"""The calibration table: what was measured on every tensor, on which model, with which settings and data."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from kenosis_ort.calibration.cached_samples import CachedSamples
from kenosis_ort.calibration.config import CalibrationConfig
from kenosis_ort.calibration.statistics import TensorStatistics
from kenosis_ort.calibration.table_format import table_from_dict, table_to_dict, to_stock
from kenosis_ort.errors import CalibrationError, OutputError, did_you_mean
from kenosis_ort.storage.writing import regular, write_text

if TYPE_CHECKING:
    from onnxruntime.quantization.calibrate import TensorsData

__all__ = ["CalibrationTable", "TensorStatistics"]

_DIGEST_SIZE = 2**256


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
        cached: Some of the samples, for the passes that need them; None where it holds none, as a table of an earlier
            version, one of stock's, or one that was to hold no data.
        outdated: It is of weights that an earlier version changed before it collected.
        part: The same of some of the samples alone, as far as `collect` was asked for it; files do not hold it.
    """

    tensors: Mapping[str, TensorStatistics]
    config: CalibrationConfig = field(default_factory=CalibrationConfig)
    samples: int = 0
    model_fingerprint: str | None = None
    data_fingerprint: str | None = None
    made_up: bool = False
    cached: CachedSamples | None = None
    outdated: bool = False
    part: CalibrationTable | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", MappingProxyType(dict(self.tensors)))

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __reduce__(self) -> tuple[object, ...]:
        known = (self.model_fingerprint, self.data_fingerprint, self.made_up, self.cached, self.outdated)
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
            self._ranges[name] = self._statistics(name).range(self.config, name)
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
                "The calibration cache was produced from another model, or from this one before its graph or weights "
                "changed.",
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
        if self.outdated or other.outdated:
            raise CalibrationError(
                "Calibration tables for weights that were changed by different data cannot be merged.",
                fix="Write the tables with kenosis_ort.calibrate of this version.",
            )
        if self.model_fingerprint != other.model_fingerprint:
            raise CalibrationError("Calibration tables of different models cannot be merged.")
        if self.config.relevant() != other.config.relevant():
            raise CalibrationError("Calibration tables of different settings cannot be merged.")
        if self.tensors.keys() != other.tensors.keys():
            odd = sorted(self.tensors.keys() ^ other.tensors.keys())
            where = ", ".join(odd[:5])
            raise CalibrationError("Calibration tables of different tensors cannot be merged.", where=where)
        fixed = [n for n, s in (*self.tensors.items(), *other.tensors.items()) if s.fixed is not None]
        if fixed:
            raise CalibrationError("Calibration tables with ranges set by hand cannot be merged.", where=fixed[0])
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
        return to_stock(self)

    def to_json(self) -> str:
        """The table as JSON that `from_json`, and stock's ``load_tensors_data``, read."""
        return json.dumps(table_to_dict(self))

    @classmethod
    def from_json(cls, text: str) -> CalibrationTable:
        """Reads a table from `to_json`, or from a cache file that stock wrote.

        Raises:
            CalibrationError: The text is not JSON, not a calibration table, or of another schema version.
        """
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CalibrationError(f"The calibration cache is not valid JSON: {error}.") from error
        return cls(**table_from_dict(raw))

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
            raise CalibrationError(f"The calibration cache cannot be written: {reason}.", where=str(target)) from error

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
            raise CalibrationError(f"The calibration cache cannot be read: {reason}.", where=str(path)) from error
        except CalibrationError as error:
            raise CalibrationError(error.what, where=str(path), fix=error.fix) from error
