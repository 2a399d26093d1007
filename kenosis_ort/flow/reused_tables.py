"""Calibration tables that need no sweep: read from a cache file, or carried over to changed weights.

A cached table is of the weights as they came, and holds samples beside the ranges: passes that change weights say what
becomes of ranges, and those that need data have it. So a run with a table does what one with the reader does.

Ranges are carried over to a model whose weights a pass has changed, without its data: what the net computes stays, but
for the channels that were scaled, and their ranges follow from the ranges by channel that calibration collected,
exactly. Histograms do not follow; they are collected again, of the kept samples alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx

from kenosis_ort.calibration import cached_samples
from kenosis_ort.calibration.methods import CalibrationConfig
from kenosis_ort.calibration.statistics import Rescaling, TensorStatistics
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.errors import CalibrationCacheError, CalibrationError
from kenosis_ort.flow.samples import KeepingReader
from kenosis_ort.graph.outside import array_in
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
            The table; None where there is none yet.

        Raises:
            CalibrationCacheError: The table is of another model, other options or other data.
        """
        table = self.table
        if table is None:
            return None
        with self._refusing():
            table.check_matches(cached_samples.model_fingerprint(model), replace(config, sketch=False))
            missing = [t for t in tensors if t not in table]
            if missing:
                raise CalibrationError(
                    f"the calibration cache lacks {len(missing)} tensors, '{missing[0]}' among them",
                    fix="delete the cache, or pass the options that it was made with",
                )
        if data is not None:
            found = f"{data.read_all():064x}"
            if data.is_whole and table.data_fingerprint not in (None, found):
                what = "The calibration cache was produced from other data."
                raise CalibrationCacheError(what, where=str(self.path), fix=_FIX)
        self.is_used = True
        return table

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except CalibrationError as error:
            raise CalibrationCacheError(error.what, where=str(self.path), fix=error.fix or _FIX) from error


def _check_writable(path: Path) -> None:
    """Checks, before any sample is read, that a file can be written once all are."""
    folder = next(parent for parent in path.parents if os.path.exists(parent))
    if not is_possible(path) or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise CalibrationError("The calibration cache cannot be written.", fix="Name a file in a folder of yours.")


Observe = Callable[[Sequence[str]], CalibrationTable]
"""Collects statistics of tensors of the changed model."""


@dataclass(frozen=True)
class RewrittenNet:
    """A model whose weights passes change, with the same in forms for integers.

    Attributes:
        drafted: The model whose values passes speak of.
        model: It in forms for integers.
        tensors: The values of that whose ranges are needed.
    """

    drafted: onnx.ModelProto
    model: onnx.ModelProto
    tensors: Collection[str]

    @cached_property
    def origins(self) -> dict[str, str]:
        """Names in the model before by value: a rewrite keeps a value's name, or that of the node that computes it."""
        before = {node.name: node for node in self.drafted.graph.node}
        known = [*(v.name for v in self.drafted.graph.input), *(name for n in before.values() for name in n.output)]
        found = dict(zip(known, known, strict=True))
        for node in self.model.graph.node:
            old = before.get(node.name)
            if old is not None and old.op_type == node.op_type:
                for new, name in zip(node.output, old.output, strict=False):
                    found.setdefault(new, name)
        return found

    def way_to(self, value: str) -> list[Any]:
        """Path to a value that a rewrite made: operators with their constants, and values from before."""
        makers = {name: node for node in self.model.graph.node for name in node.output}
        constants = {tensor.name: tensor for tensor in self.model.graph.initializer}
        waiting, seen, found = [value], {value}, list[Any]()
        while waiting:
            name = waiting.pop()
            node = makers.get(name)
            if name in self.origins or node is None:
                found.append(self.origins.get(name, name))
                continue
            known = (constants.get(name) for name in node.input)
            read = [None if t is None else (tuple(t.dims), hash(array_in(t).tobytes())) for t in known]
            found.append((node.op_type, read))
            more = [i for i in node.input if i and i not in seen and i not in constants]
            seen.update(more)
            waiting += more
        return found


def following_table(
    table: CalibrationTable,
    old: RewrittenNet,
    new: RewrittenNet,
    rescaled: Mapping[str, Rescaling] | None,
    observe: Observe,
    few: Observe | None,
) -> CalibrationTable:
    """The table of a net with changed weights; it has no part and no fingerprint.

    Args:
        table: The ranges of the weights as they came; tensors of the old net that it lacks have a type without a range.
        old: The net that the table is of.
        new: The same with changed weights.
        rescaled: What became of values, by their names where passes change it; None where any may have changed.
        observe: Collects what does not follow, over the samples of the table that are kept.
        few: Collects histograms of what was scaled, over as many as they need; None where they are not needed.
    """
    found: dict[str, TensorStatistics] = {}
    scaled: list[str] = []
    for name in new.tensors:
        if rescaled is None:
            break
        known, how = table.tensors.get(name), rescaled.get(new.origins.get(name, ""))
        if how is not None:
            source = table.tensors.get(how.source or name)
            follows = None if source is None else how.of(source)
            if follows is not None:
                found[name] = follows
                scaled.append(name)
        elif known is not None and (not rescaled or name in new.origins or _stays(name, old, new, rescaled)):
            found[name] = known
    missing = [n for n in new.tensors if n not in found and (n in table.tensors or n not in old.tensors)]
    if missing:
        seen = observe(tuple(new.tensors))
        found |= {name: seen.tensors[name] for name in missing if name in seen.tensors}
    if scaled and few is not None:
        seen = seen if missing else few(tuple(scaled))
        found |= {n: replace(found[n], histogram=seen.tensors[n].histogram) for n in scaled if n in seen.tensors}
    tensors = {name: found[name] for name in new.tensors if name in found}
    return replace(table, tensors=tensors, model_fingerprint=None, part=None)


def _stays(name: str, old: RewrittenNet, new: RewrittenNet, rescaled: Mapping[str, Rescaling]) -> bool:
    """Whether a value that a rewrite made is surely what it was: it reads the same values and constants."""
    before = old.way_to(name)
    return before == new.way_to(name) and not any(isinstance(part, str) and part in rescaled for part in before)
