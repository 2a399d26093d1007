"""The calibration cache: used where it belongs, refused where not, and written for the next run.

A table is of the weights as they came, and holds samples beside the ranges: passes that change weights say what becomes
of ranges, and those that need data have it. So a run with a table does what one with the reader does.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import onnx

from kenosis_ort.calibration import cached_samples
from kenosis_ort.calibration.statistics import CalibrationConfig
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.errors import CalibrationCacheError, CalibrationError
from kenosis_ort.flow.samples import KeepingReader
from kenosis_ort.storage.writing import is_possible

_FIX = "Delete the cache file, or name another one, so that calibration runs again."


class CalibrationCache:
    """One cache file.

    Args:
        path: The file; read if it exists.

    Attributes:
        table: What the file holds; None where it is still to be written.
        is_used: The ranges are the table's, so that nothing was calibrated.

    Raises:
        CalibrationCacheError: The file is damaged, or no calibration table, or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_used = False
        with self._refusing():
            self.table = CalibrationTable.load(path) if os.path.exists(path) else None
            if self.table is None:
                _check_writable(path)

    def table_for(
        self, model: onnx.ModelProto, tensors: Sequence[str], config: CalibrationConfig, data: KeepingReader | None
    ) -> CalibrationTable | None:
        """The table for a model, after its data are found to be those at hand.

        Args:
            model: The model whose ranges are needed.
            tensors: Its tensors.
            config: How they would be calibrated.
            data: The samples at hand, or those of the table; read to their end where the table is returned.

        Returns:
            The table; None where there is none yet, or one of changed weights, and the reader is at hand.

        Raises:
            CalibrationCacheError: The table is of another model, other options or other data.
        """
        table = self.table
        has_reader = data is not None and data.is_whole
        if table is None or (table.outdated and has_reader):
            return None
        if table.outdated:
            raise self._refusal(
                "The calibration cache is of an earlier version, which had changed the weights before calibration."
            )
        with self._refusing():
            table.check_matches(cached_samples.model_fingerprint(model), replace(config, sketch=False))
            missing = [t for t in tensors if t not in table]
            if missing:
                raise CalibrationError(
                    f"the calibration cache lacks {len(missing)} tensors, '{missing[0]}' among them",
                    fix="delete the cache, or pass the options that it was made with",
                )
        if data is not None:
            found = data.read_all()
            if has_reader:
                self.check_data(f"{found:064x}")
        self.is_used = True
        return table

    def check_data(self, fingerprint: str | None) -> None:
        """Checks that the data at hand are the table's.

        Raises:
            CalibrationCacheError: They are others.
        """
        known = None if self.table is None else self.table.data_fingerprint
        if None not in (known, fingerprint) and known != fingerprint:
            raise self._refusal("The calibration cache was produced from other data.")

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except CalibrationError as error:
            raise CalibrationCacheError(error.what, where=str(self.path), fix=error.fix or _FIX) from error

    def _refusal(self, what: str) -> CalibrationCacheError:
        return CalibrationCacheError(what, where=str(self.path), fix=_FIX)


def _check_writable(path: Path) -> None:
    """Checks, before any sample is read, that a file can be written once all are."""
    folder = next(parent for parent in path.parents if os.path.exists(parent))
    if not is_possible(path) or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise CalibrationError("The calibration cache cannot be written.", fix="Name a file in a folder of yours.")
