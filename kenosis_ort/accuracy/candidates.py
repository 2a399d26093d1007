"""Candidates run on samples: the latest few keep their sessions and outputs, so that none is run on a sample twice."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy.typing as npt
import onnx

from kenosis_ort.graph.external_data import weight_bytes
from kenosis_ort.graph.runner import Runner

Array = npt.NDArray[Any]
Feed = Mapping[str, Any]
Model = Path | onnx.ModelProto

_MOST_WEIGHTS: Final = 2**26
"""Bytes of weights of a candidate whose session is kept."""
_MOST_OUTPUTS: Final = 2**26
"""Bytes of a candidate's outputs that are kept."""
_KEPT: Final = 2  # what stood before a change, and what it led to


@dataclass
class _Run:
    """One candidate that was run.

    Attributes:
        model: It; held, so that no other object takes its identity.
        runner: Its session.
        found: Outputs by the identity of the feed, which is held too.
        held: Their bytes.
    """

    model: Model
    runner: Runner
    found: dict[int, tuple[Feed, dict[str, Array]]] = field(default_factory=dict)
    held: int = 0


class Candidates:
    """Runs candidates. They must not be changed while they are compared.

    Args:
        custom_op_libraries: Libraries with custom operators to register.
    """

    def __init__(self, custom_op_libraries: Sequence[str] = ()) -> None:
        self._libraries = tuple(custom_op_libraries)
        self._latest: deque[_Run] = deque(maxlen=_KEPT)

    def outputs(self, model: Model, feeds: Iterable[Feed], *, keep: bool = True) -> Iterator[dict[str, Array]]:
        """Yields the outputs by name for each feed.

        Args:
            model: The candidate, told by its identity.
            feeds: Samples, told by theirs.
            keep: Whether the outputs may be asked for again.

        Raises:
            VerificationError: The runtime refuses the candidate or a feed.
        """
        run = next((run for run in self._latest if run.model is model), None)
        if run is None:
            run = _Run(model, Runner(model, threads=0, custom_op_libraries=self._libraries))
            if isinstance(model, onnx.ModelProto) and weight_bytes(model) <= _MOST_WEIGHTS:
                self._latest.append(run)
        for feed in feeds:
            known = run.found.get(id(feed))
            outputs = run.runner.run(feed) if known is None else known[1]
            size = sum(array.nbytes for array in outputs.values())
            if keep and known is None and run.held + size <= _MOST_OUTPUTS:
                run.found[id(feed)] = feed, outputs
                run.held += size
            yield outputs
