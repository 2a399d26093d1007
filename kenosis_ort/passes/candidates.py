"""The float model and its candidates run on samples, none twice on the same: sessions and outputs are kept.

The float model, with which everything is compared, has one session for a whole call. Of candidates the latest few keep
theirs.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy.typing as npt
import onnx

from kenosis_ort.errors import CalibrationError, VerificationError
from kenosis_ort.graph.outside import weight_bytes
from kenosis_ort.runtime.session import HERE, Executor, Running, Session, open_session, repeats

Array = npt.NDArray[Any]
Feed = Mapping[str, Any]
Model = Path | onnx.ModelProto

_MOST_WEIGHTS: Final = 2**26
"""Bytes of weights of a candidate whose session is cached."""
_MOST_OUTPUTS: Final = 2**26
"""Bytes of a candidate's outputs that are kept."""
_MOST_FLOAT_OUTPUTS: Final = 2**28
"""The same of the float model's."""
_CACHED: Final = 2  # what stood before a change, and what it led to
_REMEMBERED: Final = 8
"""Candidates whose outputs are kept longer than their sessions: what stands after a pass has tried some of its own."""
_FEW_OUTPUTS: Final = 2**23
"""Bytes of a candidate's outputs that are kept longer."""


class _Known:
    """Outputs by the identity of the feed, which is held too, so that no other object takes it.

    Args:
        most: Bytes that are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._found: dict[int, tuple[Feed, dict[str, Array]]] = {}
        self.bytes = 0

    def get(self, feed: Feed) -> dict[str, Array] | None:
        """The outputs for a feed, None where they are not kept."""
        known = self._found.get(id(feed))
        return None if known is None else known[1]

    def keep(self, feed: Feed, outputs: dict[str, Array]) -> None:
        """Keeps outputs as long as there is room."""
        size = sum(array.nbytes for array in outputs.values())
        if self.bytes + size <= self._most:
            self._found[id(feed)] = feed, outputs
            self.bytes += size

    def __bool__(self) -> bool:
        return bool(self._found)


class Reference:
    """Runs the float model.

    Args:
        model: The model, or its file. Not changed.
        custom_op_libraries: Libraries with custom operators to register.
        stays_open: Whether the session stays open; that of a large model is opened when it is needed again.
    """

    def __init__(
        self, model: Path | onnx.ModelProto, *, custom_op_libraries: Sequence[str] = (), stays_open: bool = True
    ) -> None:
        self._model = model
        self._libraries = tuple(custom_op_libraries)
        self._stays_open = stays_open
        self._runner: Session | None = None
        self._known = _Known(_MOST_FLOAT_OUTPUTS)
        self._random: frozenset[str] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the outputs.

        Raises:
            VerificationError: The runtime does not load the model.
        """
        try:
            return self._opened().outputs
        finally:
            self._rest()

    def outputs(self, feeds: Sequence[Feed]) -> list[dict[str, Array]]:
        """The outputs by name for each of some feeds; those of the same object are computed once.

        Raises:
            CalibrationError: The model fails on a feed.
            VerificationError: The runtime does not load the model.
        """
        if not feeds:
            return []
        opened = self._opened()
        found: list[dict[str, Array]] = []
        try:
            found += (self._outputs(opened, feed) for feed in feeds)
        except VerificationError as error:
            raise CalibrationError(error.what, where=f"held-out sample {len(found)}", fix=error.fix) from error
        finally:
            self._rest()
        return found

    def stream(self, feeds: Iterable[Feed]) -> Iterator[dict[str, Array]]:
        """Yields the outputs by name for each feed, and keeps none; raises as `outputs`."""
        opened = self._opened()
        for at, feed in enumerate(feeds):
            known = self._known.get(feed)
            try:
                outputs = opened.answer(feed) if known is None else known
            except VerificationError as error:
                raise CalibrationError(error.what, where=f"held-out sample {at}", fix=error.fix) from error
            yield outputs
        self._rest()

    def run(self, feed: Feed) -> list[Array]:
        """The outputs for one feed in the order of the model, computed anew.

        Raises:
            VerificationError: The runtime does not load the model, or refuses the feed.
        """
        try:
            return list(self._opened().answer(feed).values())
        finally:
            self._rest()

    def random(self, feed: Feed) -> frozenset[str]:
        """The names of outputs that are others on each run of the same feed; found out once.

        Raises:
            CalibrationError: The model fails on the feed.
        """
        if self._random is None:
            (first,) = self.outputs([feed])
            names = list(first)
            again = dict(zip(names, self.run(feed), strict=True))
            self._random = frozenset(name for name in names if not repeats(first[name], again[name]))
        return self._random

    def _outputs(self, opened: Session, feed: Feed) -> dict[str, Array]:
        known = self._known.get(feed)
        if known is not None:
            return known
        outputs = opened.answer(feed)
        self._known.keep(feed, outputs)
        return outputs

    def _opened(self) -> Session:
        if self._runner is None:
            self._runner = open_session(self._model, threads=0, custom_op_libraries=self._libraries)
        return self._runner

    def _rest(self) -> None:
        if not self._stays_open:
            self._runner = None


@dataclass(eq=False)
class _Run:
    """One candidate that was run.

    Attributes:
        model: It; held, so that no other object takes its identity.
        runner: Its session, here or elsewhere; None where it was let go of.
        known: Its outputs.
    """

    model: Model
    runner: Running | None
    known: _Known = field(default_factory=lambda: _Known(_MOST_OUTPUTS))


class Candidates:
    """Runs candidates. They must not be changed while they are compared.

    Args:
        custom_op_libraries: Libraries with custom operators to register.
        executor: Runs them.
    """

    def __init__(self, custom_op_libraries: Sequence[str] = (), executor: Executor = HERE) -> None:
        self._libraries = tuple(custom_op_libraries)
        self._executor = executor
        self._latest: deque[_Run] = deque(maxlen=_REMEMBERED)

    def outputs(self, model: Model, feeds: Iterable[Feed], *, keep: bool = True) -> Iterator[dict[str, Array]]:
        """The outputs by name for each feed.

        Args:
            model: The candidate; the cache key is its identity.
            feeds: Samples, likewise.
            keep: Whether the outputs may be asked for again.

        Raises:
            VerificationError: The runtime refuses the candidate; while iterated, a feed.
        """
        run = next((run for run in self._latest if run.model is model), None)
        if run is None:
            run = _Run(model, None)
            if isinstance(model, onnx.ModelProto) and weight_bytes(model) <= _MOST_WEIGHTS:
                self._let_go()
                self._latest.append(run)
        asked, answers = itertools.tee((feed, run.known.get(feed)) for feed in feeds)
        if run.runner is None and run.known and all(run.known.get(feed) is not None for feed in feeds):
            return _joined(run, answers, iter(()), keep=keep)
        if run.runner is None:
            run.runner = self._executor.open(model, threads=0, custom_op_libraries=self._libraries)
        computed = run.runner.runs(feed for feed, known in asked if known is None)
        return _joined(run, answers, computed, keep=keep)

    def _let_go(self) -> None:
        """Closes the sessions of all but the latest candidates, of which one more is to come."""
        old = list(self._latest)[: 1 - _CACHED]
        for run in old:
            run.runner = None
            if run.known.bytes > _FEW_OUTPUTS or not run.known:
                self._latest.remove(run)

    def each(self, models: Iterable[Model], feeds: Sequence[Feed]) -> Iterator[Iterator[dict[str, Array]]]:
        """Yields `outputs` of one candidate after the other, each to be iterated before the next; raises as that.

        Args:
            models: Candidates; each is made when the executor has room for it.
            feeds: Samples.
        """
        under_way: deque[Iterator[dict[str, Array]]] = deque()
        for model in models:
            under_way.append(self.outputs(model, feeds))
            if len(under_way) > self._executor.ahead:
                yield under_way.popleft()
        while under_way:
            yield under_way.popleft()


def _joined(
    run: _Run,
    feeds: Iterable[tuple[Feed, dict[str, Array] | None]],
    computed: Iterator[dict[str, Array]],
    *,
    keep: bool,
) -> Iterator[dict[str, Array]]:
    """Yields cached and computed outputs in the order of the feeds, and caches some of them."""
    for feed, known in feeds:
        outputs = next(computed) if known is None else known
        if keep and known is None:
            run.known.keep(feed, outputs)
        yield outputs
