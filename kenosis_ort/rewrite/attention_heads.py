"""Heads side by side: attention's inputs as linear layers write them, and its result as they read it.

Exporters split [B, S, N * H] into heads by Reshape and Transpose, and join them by Transpose and Reshape. A packed
layer of queries, keys and values [B, S, 3 * N * H] is transposed whole and then taken apart. The operator
``Attention`` of three-dimensional inputs needs none of that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

from kenosis_ort.graph.attributes import attribute, attribute_int
from kenosis_ort.rewrite.attention_pattern import FoundAttention
from kenosis_ort.rewrite.editing import Editor

_SPLIT = (0, 2, 1, 3)  # [B, S, N, H] to [B, N, S, H]
_SPLIT_PACKED = (2, 0, 3, 1, 4)  # [B, S, 3, N, H] to [3, B, N, S, H]


@dataclass(frozen=True)
class FlatHeads:
    """Inputs of three dimensions.

    Attributes:
        q: Queries, [B, S, N * H].
        k: Keys, [B, T, M * H].
        v: Values, [B, T, M * V].
        heads: N.
        kv_heads: M.
        width: V.
        split: Queries and keys where they are split into heads, [B, S, N, H] and [B, T, M, H].
        join: The Transpose behind the attention.
    """

    q: str
    k: str
    v: str
    heads: int
    kv_heads: int
    width: int
    split: tuple[str, str]
    join: onnx.NodeProto


class Heads:
    """Finds and writes them; a packed layer is taken apart once."""

    def __init__(self, editor: Editor) -> None:
        self._editor = editor
        self._packed: dict[str, list[str]] = {}

    def flat(self, found: FoundAttention) -> FlatHeads | None:
        """Returns the inputs with their heads side by side; None if something stands between."""
        editor, scores, last = self._editor, found.scores, found.last
        joins = editor.readers(last.output[0], "Transpose")
        if found.rank != 4 or scores.k_factors or len(joins) != 1 or not editor.index.is_private(last.output[0]):
            return None
        if _perm(joins[0]) != _SPLIT:
            return None
        values = [(scores.q, None), (scores.k, scores.k_perm), (found.v, None)]
        parts = [self._before_split(value, perm) for value, perm in values]
        if None in parts:
            return None
        q, k, v = (part for part in parts if part is not None)
        if k.heads != v.heads or q.width != k.width or q.heads % k.heads:
            return None
        q_joined, k_joined, v_joined = (self._joined(part, last) for part in (q, k, v))
        return FlatHeads(q_joined, k_joined, v_joined, q.heads, k.heads, v.width, (q.value, k.value), joins[0])

    def unfold(self, attention: onnx.NodeProto, flat: FlatHeads) -> None:
        """Makes the Transpose behind an attention of flat heads the Reshape that is all that is left of it."""
        shape = self._editor.add_constant(np.array([0, 0, flat.heads, flat.width], np.int64), f"{attention.name}_heads")
        self._editor.rewrite(flat.join, "Reshape", [flat.join.input[0], shape])

    def _before_split(self, value: str, perm: tuple[int, ...] | None) -> _Split | None:
        """Returns what a value of split heads was before its Transpose."""
        editor = self._editor
        if perm is None:
            turn = editor.producer(value, "Transpose")
            if turn is None:
                return self._packed_part(value)
            value, perm = turn.input[0], _perm(turn)
        dims = editor.dims(value)
        if perm != _SPLIT or dims is None or not dims[2] or not dims[3]:
            return None
        return _Split(value, dims[2], dims[3])

    def _packed_part(self, value: str) -> _Split | None:
        """Returns one of the three parts of a packed layer."""
        editor = self._editor
        take = editor.producer(value, "Gather")
        turn = None if take is None else editor.producer(take.input[0], "Transpose")
        if take is None or turn is None or attribute_int(take, "axis", 0) != 0 or _perm(turn) != _SPLIT_PACKED:
            return None
        index, dims = editor.array(take.input[1]), editor.dims(turn.input[0])
        if index is None or index.ndim or dims is None or not all(dims[2:]):
            return None
        count, heads, width = (dim or 0 for dim in dims[2:])
        return _Split(turn.input[0], heads, width, (int(index) % count, count))

    def _joined(self, part: _Split, before: onnx.NodeProto) -> str:
        """Returns the value with its heads side by side."""
        editor, size = self._editor, part.heads * part.width
        if part.packed is None:
            return self._flattened(part.value, size, before)
        position, count = part.packed
        if part.value not in self._packed:
            whole = self._flattened(part.value, count * size, before)
            self._packed[part.value] = editor.insert_split(before, whole, count)
        return self._packed[part.value][position]

    def _flattened(self, value: str, size: int, before: onnx.NodeProto) -> str:
        """Returns a value with its last dimensions made one: what was reshaped to it, or a Reshape, which is free."""
        editor = self._editor
        reshape = editor.producer(value, "Reshape")
        source = "" if reshape is None else reshape.input[0]
        was, now = editor.symbols(source), editor.symbols(value)
        if was and now and len(was) == 3 and was[-1] == size and was[:2] == now[:2] and None not in was[:2]:
            return source
        shape = editor.add_constant(np.array([0, 0, size], np.int64), f"{before.name}_joined")
        return editor.insert_before(before, "Reshape", [value, shape])


@dataclass(frozen=True)
class _Split:
    value: str  # [B, S, heads, width], or packed [B, S, count, heads, width]
    heads: int
    width: int
    packed: tuple[int, int] | None = None  # which part, of how many


def _perm(transpose: onnx.NodeProto) -> tuple[int, ...]:
    stored = attribute(transpose, "perm")
    return () if stored is None else tuple(stored.ints)
