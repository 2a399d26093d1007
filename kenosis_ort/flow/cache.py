"""The calibration cache of a quantization: used where it belongs, refused where not, written for the next run.

A first run with a cache does what one without does, and keeps in the table what it decided about the weights, with the
statistics that it followed: ranges hold for the very weights that they were collected with. A later run repeats the
changes instead of deciding anew. A table that holds no decision, as ``calibrate`` and stock write it, is of the weights
as they came; where samples are at hand and say that other weights are better, they are calibrated again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from kenosis_ort.calibration.fingerprint import model_fingerprint
from kenosis_ort.calibration.origin import TableOrigin, WeightChange
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.errors import CalibrationCacheError, CalibrationError
from kenosis_ort.flow.request import Request
from kenosis_ort.flow.samples import KeepingReader
from kenosis_ort.flow.steps import calibration_config

if TYPE_CHECKING:
    from kenosis_ort.flow.layouts import Layout

_FIX = "Delete the cache file, or name another one, so that calibration runs again."


class CalibrationCache:
    """One cache file.

    Args:
        path: The file; read if it exists.

    Attributes:
        table: What the file holds; None where it is still to be written.
        is_used: The ranges are the table's, so that nothing was calibrated.
        model_fingerprint: Of the model before its weights were changed; empty before `check_model`.

    Raises:
        CalibrationCacheError: The file is damaged, or no calibration table, or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_used = False
        self.model_fingerprint = ""
        with self._refusing():
            self.table = CalibrationTable.load(path) if path.exists() else None
            if self.table is None:
                _check_writable(path)

    @property
    def origin(self) -> TableOrigin | None:
        """What the table was collected on; None where that is not known."""
        return None if self.table is None else self.table.origin

    def check_model(self, prepared: onnx.ModelProto) -> None:
        """Checks that the table is of a model, before its weights are changed.

        Raises:
            CalibrationCacheError: It is of another one.
        """
        self.model_fingerprint = model_fingerprint(prepared)
        if self.origin is not None and self.origin.model_fingerprint != self.model_fingerprint:
            raise self._refusal(
                "The calibration cache was produced from another model, or from this one before its graph or weights, "
                "or options that shape it, changed."
            )

    def decided(self, request: Request) -> tuple[WeightChange, ...] | None:
        """Returns the changes of weights to repeat; None where the table holds no decision under these options.

        Raises:
            CalibrationCacheError: The table is of weights changed under other options.
        """
        origin = self.origin
        if origin is None or origin.settings == settings_of(request):
            return None if origin is None else origin.changes
        if origin.changes:
            raise self._refusal(
                "The calibration cache was produced with other settings: it holds ranges for weights that were changed "
                f"under {origin.settings}, and {settings_of(request)} was asked for."
            )
        return None

    def table_for(self, layout: Layout, data: KeepingReader | None) -> CalibrationTable | None:
        """Returns the table for a model, after its data are found to be those at hand.

        Args:
            layout: The model whose ranges are needed, the tensors, and what was done to its weights.
            data: The samples at hand; read to their end where the table is returned.

        Returns:
            The table; None where there is none yet, or where samples are at hand and passes changed the weights by
            them, and the table is of the weights as they came.

        Raises:
            CalibrationCacheError: The table is of another model, other options or other data.
        """
        table, origin = self.table, self.origin
        if table is None:
            return None
        fingerprint = model_fingerprint(layout.builder.prepared.proto)
        if data is not None and origin is None and (layout.changes or layout.biases):
            return None
        if data is not None and origin is not None and not origin.changes and table.model_fingerprint != fingerprint:
            return None
        with self._refusing():
            table.check_matches(fingerprint, replace(calibration_config(layout.builder.request), sketch=False))
            missing = [t for t in layout.tensors if t not in table]
            if missing:
                raise CalibrationError(
                    f"the calibration cache lacks {len(missing)} tensors, '{missing[0]}' among them",
                    fix="delete the cache, or pass the options that it was made with",
                )
        if data is not None:
            self.check_data(f"{data.read_all():064x}")
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

    def keep(self, table: CalibrationTable, origin: TableOrigin) -> None:
        """Writes the table for the next run.

        Raises:
            CalibrationError: The file cannot be written.
        """
        replace(table, origin=origin).save(self.path)

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
    folder = next(parent for parent in path.parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise CalibrationError("The calibration cache cannot be written.", fix="Name a file in a folder of yours.")


def settings_of(request: Request) -> str:
    """Returns the options that decide about changes of weights, in words."""
    recipe = request.recipe
    return json.dumps(
        {
            "equalize": recipe.equalize,
            "bias_correction": recipe.bias_correction,
            "smooth": recipe.smooth,
            "insist": bool(request.extra_options.get("SmoothQuant")),
            "insert": request.inserts_smoothing,
            "per_channel": request.per_channel,
            "reduce_range": request.reduce_range,
            "activation_type": str(request.activation_type),
            "weight_type": str(request.weight_type),
            "metric": request.metric is not None,
        }
    )
