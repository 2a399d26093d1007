"""Tokens and what goes with them: masks, positions, segments."""

from __future__ import annotations

import numpy as np

from kenosis_ort.calibration.provenance import Known
from kenosis_ort.calibration.synthetic.kinds import InputInfo
from kenosis_ort.calibration.synthetic.maker import Array, FixedMaker, Maker, SyntheticSample

_UNKNOWN_ROWS = 1000
_ZIPF_PERCENT = 75
_HIDDEN = -10_000.0  # what additive masks add where nothing may be seen; finite in float16

# Numbers of rows that only vocabularies of one family have: first token, last token, padding.
_BERT, _ROBERTA = (101, 102, 0), (0, 2, 1)
_FAMILIES = {
    **dict.fromkeys((30522, 28996, 119547, 105879, 21128, 30524, 31102), _BERT),
    **dict.fromkeys((50265, 250002, 32005, 64001, 52000), _ROBERTA),
}


class TokenMaker(Maker):
    """Token ids within the table: words of Zipf-like frequency between special tokens, padded to mixed lengths.

    Frequent words have small ids in most vocabularies; a quarter of the ids are spread evenly, so that rare rows are
    seen too.

    Args:
        info: The input; its rows bound the ids.
        shape: Its shape, the last axis that of the steps.
        padded: Whether the model is told by a mask or lengths where a sentence ends.
    """

    natural = False

    def __init__(self, info: InputInfo, shape: tuple[int, ...], *, padded: bool) -> None:
        super().__init__(info, shape)
        self._padded = padded
        self.known = Known.GRAPH if info.rows else Known.CONVENTION

    @property
    def says(self) -> str:
        return f"tokens, ids below {self._rows}" + (", padded to mixed lengths" if self._padded else "")

    @property
    def _rows(self) -> int:
        return self.info.rows or _UNKNOWN_ROWS

    def values(self, sample: SyntheticSample) -> Array:
        rows, steps = self._rows, self.shape[-1] if self.shape else 1
        sentences = int(np.prod(self.shape[:-1])) if self.shape else 1
        draws = sample.draws(self.info.name, sample.step)
        # Uniform within an octave drawn evenly: the probability of a rank falls like its inverse.
        octaves = draws.integers(0, (rows - 1).bit_length(), (sentences, steps))
        within = draws.fractions((sentences, steps))
        zipf = np.floor((1 + within) * (1 << octaves)).astype(np.int64) - 1
        even = draws.integers(0, rows - 1, (sentences, steps))
        ids = np.where(draws.integers(0, 99, even.shape) < _ZIPF_PERCENT, zipf % rows, even)
        family = _FAMILIES.get(rows)
        first, last, padding = family or (None, None, 0)
        lengths = sample.sentence_lengths(sentences, steps) if self._padded else [steps] * sentences
        for row, length in zip(ids, lengths, strict=True):
            if first is not None and last is not None and length > 2:
                row[0], row[length - 1] = first, last
            row[length:] = padding
        return ids.reshape(self.shape)


class MaskMaker(Maker):
    """Masks of the sentences' lengths: one for words and zero for padding, or what hides padding when added.

    Args:
        info: The input; the last axis is that of the steps.
        shape: Its shape.
        padded: Whether there are tokens of mixed lengths beside it.
    """

    def __init__(self, info: InputInfo, shape: tuple[int, ...], *, padded: bool) -> None:
        super().__init__(info, shape)
        self._padded = padded

    @property
    def says(self) -> str:
        kind = "a mask that is added" if self.info.additive else "a mask"
        return f"{kind}, {'padding of mixed lengths' if self._padded else 'nothing hidden'}"

    def values(self, sample: SyntheticSample) -> Array:
        if not self.shape:
            return np.zeros(()) if self.info.additive else np.ones(())
        steps, sentences = self.shape[-1], self.shape[0] if len(self.shape) > 1 else 1
        lengths = sample.sentence_lengths(sentences, steps) if self._padded else [steps] * sentences
        seen = np.arange(steps)[None, :] < np.array(lengths)[:, None]
        shown = seen.reshape(sentences, *[1] * max(len(self.shape) - 2, 0), steps)
        if len(self.shape) == 1:
            shown = shown[0]
        return np.where(shown, 0.0, _HIDDEN) if self.info.additive else shown.astype(np.int64)


class PositionMaker(FixedMaker):
    """Positions that count up.

    Args:
        info: The input.
        shape: Its shape.
        start: First position, the number of steps that past keys and values hold.
    """

    def __init__(self, info: InputInfo, shape: tuple[int, ...], *, start: int) -> None:
        super().__init__(info, shape)
        self._start = start

    @property
    def says(self) -> str:
        return f"positions from {self._start}"

    @property
    def constant(self) -> Array:
        steps = self.shape[-1] if self.shape else 1
        positions: Array = (self._start + np.arange(steps)) % (self.info.rows or self._start + steps)
        return positions if self.shape else positions[0]


class SegmentMaker(Maker):
    """Segment ids: in every second sample the latter half of a sentence belongs to segment 1."""

    @property
    def says(self) -> str:
        return "segments 0 and 1"

    def values(self, sample: SyntheticSample) -> Array:
        steps, sentences = self.shape[-1] if self.shape else 1, self.shape[0] if len(self.shape) > 1 else 1
        segments = np.zeros((sentences, steps), np.int64)
        if sample.index % 2 and self.info.rows != 1:
            for row, length in zip(segments, sample.sentence_lengths(sentences, steps), strict=True):
                row[length // 2 : length] = 1
        return segments.reshape(self.shape) if segments.size == np.prod(self.shape) else segments[0, 0]
