"""Candidates run on samples: the latest few keep their sessions and outputs, so that none is run on a sample twice."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy.typing as npt
import onnx

from kenosis_ort.graph.outside import weight_bytes
from kenosis_ort.runtime.session import HERE, Executor, Running

Array = npt.NDArray[Any]
Feed = Mapping[str, Any]
Model = Path | onnx.ModelProto

_MOST_WEIGHTS: Final = 2**26
"""Bytes of weights of a candidate whose session is cached."""
_MOST_OUTPUTS: Final = 2**26
"""Bytes of a candidate's outputs that are kept."""
_CACHED: Final = 2  # what stood before a change, and what it led to
_REMEMBERED: Final = 8
"""Candidates whose outputs are kept longer than their sessions: what stands after a pass has tried some of its own."""
_FEW_OUTPUTS: Final = 2**23
"""Bytes of a candidate's outputs that are kept longer."""


@dataclass(eq=False)
class _Run:
    """One candidate that was run.

    Attributes:
        model: It; held, so that no other object takes its identity.
        runner: Its session, here or elsewhere; None where it was let go of.
        found: Outputs by the identity of the feed, which is held too.
        cached_bytes: Their bytes.
    """

    model: Model
    runner: Running | None
    found: dict[int, tuple[Feed, dict[str, Array]]] = field(default_factory=dict)
    cached_bytes: int = 0


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
        asked, answers = itertools.tee((feed, run.found.get(id(feed))) for feed in feeds)
        if run.runner is None and run.found and all(id(feed) in run.found for feed in feeds):
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
            if run.cached_bytes > _FEW_OUTPUTS or not run.found:
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
    feeds: Iterable[tuple[Feed, tuple[Feed, dict[str, Array]] | None]],
    computed: Iterator[dict[str, Array]],
    *,
    keep: bool,
) -> Iterator[dict[str, Array]]:
    """Yields cached and computed outputs in the order of the feeds, and caches some of them."""
    for feed, known in feeds:
        outputs = next(computed) if known is None else known[1]
        size = sum(array.nbytes for array in outputs.values())
        if keep and known is None and run.cached_bytes + size <= _MOST_OUTPUTS:
            run.found[id(feed)] = feed, outputs
            run.cached_bytes += size
        yield outputs
