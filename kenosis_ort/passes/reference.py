"""Runs of the float model and of candidates on samples: no model runs twice on the same sample, outputs are kept.

The float model, with which everything is compared, has one session for a whole call. Of candidates the latest few keep
theirs.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import onnx

from kenosis_ort.calibration.feeds import Feed
from kenosis_ort.errors import CalibrationError, VerificationError
from kenosis_ort.graph.outside import weight_bytes
from kenosis_ort.runtime.session import HERE, Array, Executor, Running, Session, open_session, repeats

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


class _Run:
    """A model that is run, which is held, so that no other object takes its identity.

    Args:
        model: It.
        most: Bytes of outputs that are kept.

    Attributes:
        runner: Its session, here or elsewhere; None where it is not open.
        bytes: Of the outputs that are kept.
    """

    def __init__(self, model: Model, most: int) -> None:
        self.model, self._most, self.bytes = model, most, 0
        self.runner: Running | None = None
        self._outputs: dict[int, tuple[Feed, dict[str, Array]]] = {}  # by the identity of the feed, held likewise

    def known(self, feed: Feed) -> dict[str, Array] | None:
        """The outputs for a feed, None where they are not kept."""
        found = self._outputs.get(id(feed))
        return None if found is None else found[1]

    def joined(
        self, feeds: Iterable[tuple[Feed, dict[str, Array] | None]], computed: Iterator[dict[str, Array]], *, keep: bool
    ) -> Iterator[dict[str, Array]]:
        """Yields known and computed outputs in the order of the feeds, and keeps them as long as there is room."""
        for feed, known in feeds:
            outputs = next(computed) if known is None else known
            size = sum(array.nbytes for array in outputs.values())
            if keep and known is None and self.bytes + size <= self._most:
                self._outputs[id(feed)] = feed, outputs
                self.bytes += size
            yield outputs


class Reference:
    """Runs the float model.

    Args:
        model: The model, or its file. Not changed.
        custom_op_libraries: Libraries with custom operators to register.
        stays_open: Whether the session stays open; that of a large model is opened when it is needed again.
    """

    def __init__(self, model: Model, *, custom_op_libraries: Sequence[str] = (), stays_open: bool = True) -> None:
        self._run = _Run(model, _MOST_FLOAT_OUTPUTS)
        self._libraries, self._stays_open = tuple(custom_op_libraries), stays_open
        self._session: Session | None = None
        self._random: frozenset[str] | None = None

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the outputs.

        Raises:
            VerificationError: The runtime does not load the model.
        """
        with self._opened() as session:
            return session.outputs

    def outputs(self, feeds: Sequence[Feed]) -> list[dict[str, Array]]:
        """The outputs by name for each of some feeds; those of the same object are computed once.

        With the first ones it is found out which are random, while the model is open.

        Raises:
            CalibrationError: The model fails on a feed.
            VerificationError: The runtime does not load the model.
        """
        known = [outputs for outputs in map(self._run.known, feeds) if outputs is not None]
        if len(known) == len(feeds):
            return known
        asked, answers = itertools.tee((feed, self._run.known(feed)) for feed in feeds)
        repeated = feeds[:1] if self._random is None else ()
        with self._opened() as session:
            computed = session.runs(itertools.chain((feed for feed, known in asked if known is None), repeated))
            found = list(blamed(self._run.joined(answers, computed, keep=True)))
            if self._random is None:
                first, again = found[0], next(computed)
                self._random = frozenset(name for name in first if not repeats(first[name], again[name]))
        return found

    def stream(self, feeds: Iterable[Feed]) -> Iterator[dict[str, Array]]:
        """Yields the outputs by name for each feed, and keeps none; raises as `outputs`."""
        known = ((feed, self._run.known(feed)) for feed in feeds)
        with self._opened() as session:
            yield from blamed(session.answer(feed) if outputs is None else outputs for feed, outputs in known)

    def run(self, feed: Feed) -> list[Array]:
        """The outputs for one feed in the order of the model, computed anew.

        Raises:
            VerificationError: The runtime does not load the model, or refuses the feed.
        """
        with self._opened() as session:
            return list(session.answer(feed).values())

    def random(self, feed: Feed) -> frozenset[str]:
        """The names of outputs that are others on each run of the same feed; found out once.

        Raises:
            CalibrationError: The model fails on the feed.
        """
        if self._random is None:
            self.outputs([feed])
        return self._random or frozenset()

    @contextmanager
    def _opened(self) -> Iterator[Session]:
        session = self._session or open_session(self._run.model, threads=0, custom_op_libraries=self._libraries)
        self._session = session if self._stays_open else None
        yield session


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
            run = _Run(model, _MOST_OUTPUTS)
            if isinstance(model, onnx.ModelProto) and weight_bytes(model) <= _MOST_WEIGHTS:
                self._let_go()
                self._latest.append(run)
        asked, answers = itertools.tee((feed, run.known(feed)) for feed in feeds)
        if run.runner is None and run.bytes and all(run.known(feed) is not None for feed in feeds):
            return run.joined(answers, iter(()), keep=keep)
        if run.runner is None:
            run.runner = self._executor.open(model, threads=0, custom_op_libraries=self._libraries)
        computed = run.runner.runs(feed for feed, known in asked if known is None)
        return run.joined(answers, computed, keep=keep)

    def _let_go(self) -> None:
        """Closes the sessions of all but the latest candidates, of which one more is to come."""
        for run in list(self._latest)[: 1 - _CACHED]:
            run.runner = None
            if not 0 < run.bytes <= _FEW_OUTPUTS:
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


def blamed(outputs: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields outputs, one entry a sample; where that raises, the sample is named."""
    index = 0
    try:
        for each in outputs:
            yield each
            index += 1
    except VerificationError as error:
        raise failed(error, index) from error


def failed(error: VerificationError, sample: int) -> CalibrationError:
    """The error for a sample that a model fails on."""
    return CalibrationError(error.what, where=f"held-out sample {sample}", fix=error.fix)
