"""The caller's held-out data: read once, checked like calibration data, on disk where it is large."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, overload

import onnx

from kenosis_ort.calibration.feeds import Sample, check_feed, input_specs, sample_feeds
from kenosis_ort.calibration.fingerprint import feed_digest
from kenosis_ort.calibration.readers import for_model
from kenosis_ort.errors import CalibrationError
from kenosis_ort.graph.constants import meant_as_defaults
from kenosis_ort.storage.spool import Spool

_LOOKED_AT = 32  # feeds that candidates are compared on
_LOOKED_AT_BYTES = 2**26


class Validation(Sequence[Sample]):
    """Feeds with their numbers in the reader.

    Args:
        reader: The caller's reader, or another source of feeds; it is read to its end.
        model: The float model, whose inputs the feeds are checked against.

    Raises:
        CalibrationError: The reader fails, yields nothing, or a feed does not fit the model.
        OutputError: There is no room for temporary files.
    """

    def __init__(self, reader: Any, model: onnx.ModelProto) -> None:
        self._spool = Spool()
        self._digests: set[int] = set()
        inputs, defaults = input_specs(model), meant_as_defaults(model)
        try:
            for number, feed in enumerate(sample_feeds(for_model(reader, chain(*inputs)))):
                checked = {**defaults, **check_feed(feed, *inputs, number)}
                self._digests.add(feed_digest(checked))
                self._spool.append(checked)
        except CalibrationError as error:
            where = "eval_reader" if error.where is None else f"eval_reader, {error.where}"
            raise CalibrationError(error.what, where=where, fix=error.fix) from error
        if not len(self._spool):
            raise CalibrationError(
                "the reader of evaluation data yields no sample",
                where="eval_reader",
                fix="pass a reader at its beginning, and not the one that calibration reads",
            )

    def __len__(self) -> int:
        return len(self._spool)

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...

    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        places = range(len(self))[index]
        return [self[place] for place in places] if isinstance(places, range) else Sample(self._spool[places], places)

    def shared(self, feeds: Iterable[Mapping[str, Any]]) -> int:
        """Returns how many of some feeds are among these."""
        return sum(feed_digest(feed) in self._digests for feed in feeds)

    def some(self) -> list[Sample]:
        """Returns a few, spread over all of them, that fit in memory."""
        found: list[Sample] = []
        size = 0
        for place in range(0, len(self), -(-len(self) // _LOOKED_AT)):
            feed = self[place]
            size += sum(int(getattr(value, "nbytes", 0)) for value in feed.values())
            if found and size > _LOOKED_AT_BYTES:
                break
            found.append(feed)
        return found
