"""Masks of attention as the operator ``Attention`` takes them, see `fuse_attention`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kenosis_ort.rewrite.attention_pattern import FoundAttention, MaskTerm
from kenosis_ort.rewrite.matching import Editor, NotCollapsibleError

_MASKED = np.float32(-1e30)
_LEAST = np.finfo(np.float32).min


def require_known_ranks(editor: Editor, found: FoundAttention) -> None:
    """Raises where it is not known how many dimensions a mask has, or where it has more than the scores."""
    rank = _rank(editor, found)
    if rank is None or rank > found.rank:
        raise NotCollapsibleError("the dimensions of its mask are not known")


def _rank(editor: Editor, found: FoundAttention) -> int | None:
    """The most dimensions of a mask, 0 without masks; None if they are not known."""
    constants = editor.index.constants
    entries = [(term.value, editor.rank(term.value), term.windows) for term in found.scores.masks]
    ranks = [4 if w else len(constants[value].dims) if value in constants else rank for value, rank, w in entries]
    known = [rank for rank in ranks if rank is not None]
    return max(known, default=0) if len(known) == len(ranks) else None


class Masks:
    """Writes the masks of one model; those that several layers share are made once."""

    def __init__(self, editor: Editor) -> None:
        self._editor = editor
        self._made: dict[tuple[object, ...], str] = {}

    def of(self, found: FoundAttention, split: tuple[str, str] | None) -> str:
        """One float mask of the scores' last two dimensions.

        Args:
            found: The attention.
            split: Queries [B, S, N, H] and keys [B, T, M, H] to ask for these, where they stay.
        """
        editor, scores = self._editor, found.scores
        rank, dims = _rank(editor, found), None
        parts = [self._float(term, found) for term in scores.masks]
        mask = parts[0]
        for part in parts[1:]:
            mask = self._once(found, "Add", [mask, part], (mask, part))
        if len(scores.masks) == 1:
            value = scores.masks[0].value
            stored = editor.index.constant(value)
            dims = editor.symbols(value) if stored is None else tuple(stored.dims)
        if found.rank == 3 and rank == 3:
            mask = self._once(
                found, "Unsqueeze", [mask, self.constant(np.array([1], np.int64), "axes")], (mask, "heads")
            )
        return self._expanded(found, mask, dims, split)

    def _expanded(
        self,
        found: FoundAttention,
        mask: str,
        dims: tuple[int | str | None, ...] | None,
        split: tuple[str, str] | None,
    ) -> str:
        editor, scores, rank = self._editor, found.scores, found.rank
        asked = [(scores.q, rank - 2), (scores.k, scores.key_axis(rank))] if split is None else [(x, 1) for x in split]
        shapes = [(editor.symbols(value), axis) for value, axis in asked]
        wanted = tuple(None if shape is None else shape[axis] for shape, axis in shapes)
        if dims is not None and len(dims) >= 2 and None not in wanted and dims[-2:] == wanted:
            return mask
        key = (mask, *wanted) if None not in wanted else (mask, *asked)
        if key not in self._made:
            sizes = [size for size in wanted if isinstance(size, int)]
            if len(sizes) == len(wanted):
                shape = self.constant(np.array(sizes, np.int64), "shape")
            else:
                parts = [editor.insert_before(found.last, "Shape", [v], start=a, end=a + 1) for v, a in asked]
                shape = editor.insert_before(found.last, "Concat", parts, axis=0)
            self._made[key] = editor.insert_before(found.last, "Expand", [mask, shape])
        return self._made[key]

    def _float(self, term: MaskTerm, found: FoundAttention) -> str:
        """Float mask to add to the scores for one mask."""
        if term.windows:
            return self._by_window(term, self._without_least(term.value, found), found)
        if term.keep_if is None:
            return self._without_least(term.value, found)
        filler = np.float32(term.filler) if found.guarded and np.isinf(term.filler) else _MASKED
        zero = self.constant(np.float32(0.0), "zero")
        masked = self.constant(filler, "masked")
        choices = [zero, masked] if term.keep_if else [masked, zero]
        return self._once(found, "Where", [term.value, *choices], (term.value, term.keep_if, float(filler)))

    def _by_window(self, term: MaskTerm, mask: str, found: FoundAttention) -> str:
        """A mask [1, W, 1, S, T] as one of the whole batch, [pictures * W, 1, S, T]."""
        key = ("windows", mask, found.scores.q)
        if key not in self._made:
            put, last = self._editor.insert_before, found.last
            batch = put(last, "Shape", [found.scores.q], start=0, end=1)
            windows = put(last, "Shape", [mask], start=1, end=2)
            if isinstance(term.windows, int):
                windows = self.constant(np.array([term.windows], np.int64), "windows")
            pictures = put(last, "Div", [batch, windows])
            ones = self.constant(np.ones(4, np.int64), "ones")
            wide = put(last, "Expand", [mask, put(last, "Concat", [pictures, ones], axis=0)])
            size = put(last, "Shape", [mask], start=3, end=5)
            shape = put(last, "Concat", [batch, self.constant(np.array([1], np.int64), "one"), size], axis=0)
            self._made[key] = put(last, "Reshape", [wide, shape])
        return self._made[key]

    def _without_least(self, mask: str, found: FoundAttention) -> str:
        """A mask whose least finite float32, which the kernel takes for -inf, is only very small."""
        stored = self._editor.array(mask)
        if stored is not None and not (stored == _LEAST).any():
            return mask
        masked = self.constant(_MASKED, "masked")
        if not found.guarded:
            return self._once(found, "Max", [mask, masked], (mask, "max"))
        least = self._once(found, "Equal", [mask, self.constant(_LEAST, "least")], (mask, "least"))
        return self._once(found, "Where", [least, masked, mask], (mask, "finite"))

    def constant(self, array: npt.NDArray[np.generic] | np.generic, what: str) -> str:
        array = np.asarray(array)
        key = (what, array.tobytes())
        if key not in self._made:
            self._made[key] = self._editor.add_constant(array, f"attention_{what}")
        return self._made[key]

    def _once(self, found: FoundAttention, op_type: str, inputs: list[str], key: tuple[object, ...]) -> str:
        key = (op_type, *key)
        if key not in self._made:
            self._made[key] = self._editor.insert_before(found.last, op_type, inputs)
        return self._made[key]
