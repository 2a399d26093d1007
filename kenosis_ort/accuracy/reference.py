"""The float model that everything is compared with: one session for a whole call, each sample run once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy.typing as npt
import onnx

from kenosis_ort.errors import CalibrationError, VerificationError
from kenosis_ort.graph.session import FeedRunner, repeats

Array = npt.NDArray[Any]
Feed = Mapping[str, Any]

_MOST_OUTPUTS: Final = 2**28
"""Bytes of outputs that are kept."""


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
        self._runner: FeedRunner | None = None
        self._found: dict[int, tuple[Feed, dict[str, Array]]] = {}  # by identity; the feed is held so that it stays one
        self._bytes = 0
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
            known = self._found.get(id(feed))
            try:
                outputs = opened.run(feed) if known is None else known[1]
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
            return list(self._opened().run(feed).values())
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

    def _outputs(self, opened: FeedRunner, feed: Feed) -> dict[str, Array]:
        known = self._found.get(id(feed))
        if known is not None:
            return known[1]
        outputs = opened.run(feed)
        size = sum(array.nbytes for array in outputs.values())
        if self._bytes + size <= _MOST_OUTPUTS:
            self._found[id(feed)] = feed, outputs
            self._bytes += size
        return outputs

    def _opened(self) -> FeedRunner:
        if self._runner is None:
            self._runner = FeedRunner(self._model, threads=0, custom_op_libraries=self._libraries)
        return self._runner

    def _rest(self) -> None:
        if not self._stays_open:
            self._runner = None
