"""Attention as one operator: its masks and its heads as the operator takes them, and the rule.

Exporters split [B, S, N * H] into heads by Reshape and Transpose, and join them by Transpose and Reshape. A packed
layer of queries, keys and values [B, S, 3 * N * H] is transposed whole and then taken apart. The operator
``Attention`` of three-dimensional inputs needs none of that.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kenosis_ort.graph.opset import fit_opset
from kenosis_ort.graph.shapes import infer_shapes
from kenosis_ort.graph.view import ir
from kenosis_ort.graph.walk import fit_ir_version
from kenosis_ort.rewrite.attention_pattern import FoundAttention, MaskTerm, before_repeat, find_attention
from kenosis_ort.rewrite.rule import Editor, NotCollapsibleError, operand, refuse_if, rule
from kenosis_ort.runtime.machine import runtime_limits

_MASKED = np.float32(-1e30)
_LEAST = np.finfo(np.float32).min


def _rank(editor: Editor, found: FoundAttention) -> int | None:
    """The most dimensions of a mask, 0 without masks; None if they are not known."""
    stored = [(term, editor.constant(term.value)) for term in found.scores.masks]
    ranks = [4 if m.windows else editor.rank(m.value) if t is None else len(t.dims) for m, t in stored]
    known = [rank for rank in ranks if rank is not None]
    return max(known, default=0) if len(known) == len(ranks) else None


class Masks:
    """Writes the masks of one model; those that several layers share are made once."""

    def __init__(self, editor: Editor) -> None:
        self._editor = editor
        self._made: dict[tuple[object, ...], ir.Value] = {}

    def of(self, found: FoundAttention, split: tuple[ir.Value, ir.Value] | None) -> ir.Value:
        """One float mask of the scores' last two dimensions.

        Args:
            found: The attention.
            split: Queries [B, S, N, H] and keys [B, T, M, H] to ask for these, where they stay.
        """
        editor, scores, rank = self._editor, found.scores, found.rank
        dims: tuple[int | str | None, ...] | None = None
        mask = reduce(partial(self._once, found, "Add"), [self._float(term, found) for term in scores.masks])
        if len(scores.masks) == 1:
            value = scores.masks[0].value
            stored = editor.constant(value)
            dims = editor.symbols(value) if stored is None else tuple(stored.dims)
        if rank == 3 and _rank(editor, found) == 3:
            mask = self._once(found, "Unsqueeze", mask, self.constant(np.array([1], np.int64), "axes"))
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

    def _float(self, term: MaskTerm, found: FoundAttention) -> ir.Value:
        """Float mask to add to the scores for one mask."""
        if term.windows:
            return self._by_window(term, self._without_least(term.value, found), found)
        if term.keep_if is None:
            return self._without_least(term.value, found)
        filler = np.float32(term.filler) if found.guarded and np.isinf(term.filler) else _MASKED
        zero = self.constant(np.float32(0.0), "zero")
        masked = self.constant(filler, "masked")
        choices = [zero, masked] if term.keep_if else [masked, zero]
        return self._once(found, "Where", term.value, *choices)

    def _by_window(self, term: MaskTerm, mask: ir.Value, found: FoundAttention) -> ir.Value:
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

    def _without_least(self, mask: ir.Value, found: FoundAttention) -> ir.Value:
        """A mask whose least finite float32, which the kernel takes for -inf, is only very small."""
        stored = self._editor.array(mask)
        if stored is not None and not (stored == _LEAST).any():
            return mask
        masked = self.constant(_MASKED, "masked")
        if not found.guarded:
            return self._once(found, "Max", mask, masked)
        least = self._once(found, "Equal", mask, self.constant(_LEAST, "least"))
        return self._once(found, "Where", least, masked, mask)

    def constant(self, array: npt.NDArray[np.generic] | np.generic, what: str) -> ir.Value:
        array = np.asarray(array)
        key = (what, array.tobytes())
        if key not in self._made:
            self._made[key] = self._editor.add_constant(array, f"attention_{what}")
        return self._made[key]

    def _once(self, found: FoundAttention, op_type: str, *inputs: ir.Value) -> ir.Value:
        key = (op_type, *inputs)
        if key not in self._made:
            self._made[key] = self._editor.insert_before(found.last, op_type, inputs)
        return self._made[key]


_SPLIT = (0, 2, 1, 3)  # [B, S, N, H] to [B, N, S, H]
_SPLIT_PACKED = (2, 0, 3, 1, 4)  # [B, S, 3, N, H] to [3, B, N, S, H]


class FlatHeads(NamedTuple):
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

    q: ir.Value
    k: ir.Value
    v: ir.Value
    heads: int
    kv_heads: int
    width: int
    split: tuple[ir.Value, ir.Value]
    join: ir.Node


class Heads:
    """Finds and writes them; a packed layer is taken apart once."""

    def __init__(self, editor: Editor) -> None:
        self._editor = editor
        self._packed: dict[ir.Value, list[ir.Value]] = {}

    def flat(self, found: FoundAttention) -> FlatHeads | None:
        """The inputs with their heads side by side; None if other operators lie between."""
        editor, scores, last = self._editor, found.scores, found.last
        joins = editor.readers_of(last.outputs[0], "Transpose")
        if found.rank != 4 or scores.k_factors or len(joins) != 1 or not editor.is_private(last.outputs[0]):
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

    def _before_split(self, value: ir.Value, perm: tuple[int, ...] | None) -> _Split | None:
        """Value before the Transpose that splits heads."""
        editor = self._editor
        if perm is None:
            turn = editor.producer(value, "Transpose")
            if turn is None:
                return self._packed_part(value)
            value, perm = operand(turn, 0), _perm(turn)
        dims = editor.dims(value)
        if perm != _SPLIT or dims is None or not dims[2] or not dims[3]:
            return None
        return _Split(value, dims[2], dims[3])

    def _packed_part(self, value: ir.Value) -> _Split | None:
        """One of the three parts of a packed layer."""
        editor = self._editor
        take = editor.producer(value, "Gather")
        turn = None if take is None else editor.producer(take.inputs[0], "Transpose")
        if take is None or turn is None or take.attributes.get_int("axis", 0) != 0 or _perm(turn) != _SPLIT_PACKED:
            return None
        index, dims = editor.array(take.inputs[1]), editor.dims(turn.inputs[0])
        if index is None or index.ndim or dims is None or not all(dims[2:]):
            return None
        count, heads, width = (dim or 0 for dim in dims[2:])
        return _Split(operand(turn, 0), heads, width, (int(index) % count, count))

    def _joined(self, part: _Split, before: ir.Node) -> ir.Value:
        """The value with its heads side by side."""
        editor, size = self._editor, part.heads * part.width
        if part.packed is None:
            return self._flattened(part.value, size, before)
        position, count = part.packed
        if part.value not in self._packed:
            whole = self._flattened(part.value, count * size, before)
            self._packed[part.value] = editor.insert_split(before, whole, count)
        return self._packed[part.value][position]

    def _flattened(self, value: ir.Value, size: int, before: ir.Node) -> ir.Value:
        """A value with its last dimensions made one: what was reshaped to it, or a Reshape, which is free."""
        editor = self._editor
        reshape = editor.producer(value, "Reshape")
        source = None if reshape is None else reshape.inputs[0]
        was, now = editor.symbols(source), editor.symbols(value)
        if source and was and now and len(was) == 3 and was[-1] == size and was[:2] == now[:2] and None not in was[:2]:
            return source
        shape = editor.add_constant(np.array([0, 0, size], np.int64), f"{before.name}_joined")
        return editor.insert_before(before, "Reshape", [value, shape])


class _Split(NamedTuple):
    value: ir.Value  # [B, S, heads, width], or packed [B, S, count, heads, width]
    heads: int
    width: int
    packed: tuple[int, int] | None = None  # which part, of how many


def _perm(transpose: ir.Node) -> tuple[int, ...]:
    return tuple(transpose.attributes.get_ints("perm", ()))


ATTENTION_OPSET = 23
_ZERO_ROWS_SINCE = (1, 28)


@rule(
    "Softmax",
    did="attentions became one node each",
    stays="attentions stay as products and Softmax",
    whole=True,
    raises_to=ATTENTION_OPSET,
)
def fuse_attention(editor: Editor) -> None:
    """Attention written as products and Softmax becomes the operator ``Attention`` of operator set 23.

    By definition::

        Attention(Q, K, V, mask; scale) = softmax(scale * Q K^T + mask) V

    The operator's kernel computes one head at a time, so that scores never leave the cache, adds the mask while it
    multiplies, and reads keys as they are instead of transposed. Given three-dimensional inputs, heads side by side as
    linear layers write and read them, it also does without the four Transposes around it: 128 positions of 4 heads of
    64 numbers take 193 us for 248, one position 11 for 15 (Xeon with AMX, one thread). Four-dimensional ones are left
    where something stands between the Transpose and the product, such as caches and rotary embeddings; heads repeated
    for groups of queries are read once. Those of three dimensions, heads folded into the batch, are attention of a
    single head.

    Exactness: scores are masked by addition. A finite number that stands for a masked score, put there by Where,
    becomes -1e30, which no score changes; and the least finite float32 of a mask, which the kernel takes for -inf, does
    too, since a row of which all is masked by finite numbers is an average and not zero. Behind masks of -inf the guard
    against NaN stays, on the result, for runtimes that make NaN of such a row.

    The kernel wants masks of the scores' last two dimensions: one that is broadcast there is expanded, once for all
    layers that share it. Not fused: scores or weights that are needed elsewhere (but for their shape), other types than
    float32, unknown ranks, and models of operators that the runtime runs on 8-bit data in earlier operator sets only.
    """
    model = editor.proto
    if not _found(editor):
        return
    if editor.opset() < ATTENTION_OPSET:
        limits = runtime_limits()
        best = limits.best_opset({node.op_type for node in editor.graph})
        if best < ATTENTION_OPSET:
            reason = f"the runtime runs this model's operators on 8-bit data up to operator set {best} only"
            editor.notes.append(f"Attentions stay as products and Softmax: {reason}.")
            return
        note = fit_opset(editor.write(), min_opset=ATTENTION_OPSET, max_opset=best)
        editor.notes += [note] if note else []
        fit_ir_version(model, max_ir=limits.max_ir)
        infer_shapes(model, thorough=False)
        editor.reopen()
    writer = _Writer(editor)
    for found in _found(editor):
        writer.fuse(found)


def _found(editor: Editor) -> list[FoundAttention]:
    """The attentions that are closed, in the order of the nodes."""
    found = (_closed(editor, softmax) for softmax in filter(editor.may_change, editor.find("Softmax")))
    return [attention for attention in found if attention is not None]


def _closed(editor: Editor, softmax: ir.Node) -> FoundAttention | None:
    """The attention around a Softmax if there is one that can become one operator."""
    try:
        found = find_attention(editor, softmax)
        if found is not None:
            editor.require_closed(found.inner, found.last, save=_shape_readers(editor, found))
            _require_one_batch(editor, found)
            rank = _rank(editor, found)
            refuse_if(rank is None or rank > found.rank, "the dimensions of its mask are not known")
    except NotCollapsibleError as reason:
        editor.refuse(softmax, reason)
        return None
    return found


def _require_one_batch(editor: Editor, found: FoundAttention) -> None:
    """Raises where batches are broadcast, which products can and the operator cannot."""
    scores = found.scores
    k = editor.dims(scores.k)
    k = k if k is None or scores.k_perm is None else tuple(k[axis] for axis in scores.k_perm)
    shapes = [editor.dims(scores.q), k, editor.dims(found.v)]
    for axis in range(found.rank - 2):
        sizes = {shape[axis] for shape in shapes if shape is not None and shape[axis] is not None}
        refuse_if(len(sizes) > 1, "queries, keys and values are broadcast to each other")


def _shape_readers(editor: Editor, found: FoundAttention) -> list[ir.Node]:
    """The Shape nodes of scores or weights, to whose shape masks are expanded."""
    inner = [value for node in found.inner for value in node.outputs]
    return [r for value in inner for r in editor.readers_of(value, "Shape") if not r.attributes]


class _Writer:
    """Writes the operators of one model, with what several layers share made once."""

    def __init__(self, editor: Editor) -> None:
        self._editor = editor
        self._masks = Masks(editor)
        self._heads = Heads(editor)

    def fuse(self, found: FoundAttention) -> None:
        """Writes one attention."""
        editor, scores, last = self._editor, found.scores, found.last
        flat = self._heads.flat(found)
        if flat is None:
            k, v = self._unrepeated(found)
            if k == scores.k and scores.k_perm is not None:
                k = editor.insert_before(last, "Transpose", [k], perm=scores.k_perm)
            for factor in scores.k_factors:
                k = editor.insert_before(last, "Mul", [k, factor])
            inputs = [scores.q, k, v]
            heads = {"q_num_heads": 1, "kv_num_heads": 1} if found.rank == 3 else {}
        else:
            inputs = [flat.q, flat.k, flat.v]
            heads = {"q_num_heads": flat.heads, "kv_num_heads": flat.kv_heads}
        for reader in _shape_readers(editor, found):
            self._ask_others(reader, found, flat)
        if scores.masks:
            inputs.append(self._masks.of(found, None if flat is None else flat.split))
        before = [value for node in found.inner for value in node.inputs]
        editor.become(last, "Attention", inputs, {"scale": float(scores.scale), **heads}, inner=found.inner)
        is_open = found.guarded and any(np.isinf(term.filler) for term in scores.masks)
        if is_open and not runtime_limits().is_at_least(*_ZERO_ROWS_SINCE):
            self._guard(last)
        if flat is not None:
            editor.forget_shape(last.outputs[0])
            shape = editor.add_constant(np.array([0, 0, flat.heads, flat.width], np.int64), f"{last.name}_heads")
            editor.rewrite(flat.join, "Reshape", [flat.join.inputs[0], shape])  # all that is left of the Transpose
        editor.drop_unread([*before, scores.q, scores.k, found.v], last.name)

    def _unrepeated(self, found: FoundAttention) -> tuple[ir.Value, ir.Value]:
        """Keys and values, each head once where both are repeated for groups of queries."""
        scores = found.scores
        if found.rank == 4 and scores.k_perm is None:
            k, v = before_repeat(self._editor, scores.k), before_repeat(self._editor, found.v)
            if k is not None and v is not None:
                return k, v
        return scores.k, found.v

    def _ask_others(self, reader: ir.Node, found: FoundAttention, flat: FlatHeads | None) -> None:
        """Makes a Shape node of the scores read the shapes of the queries and the keys."""
        editor, scores, rank = self._editor, found.scores, found.rank
        if flat is None:
            asked = [(scores.q, 0, rank - 1), (scores.k, scores.key_axis(rank), scores.key_axis(rank) + 1)]
            parts = [editor.insert_before(reader, "Shape", [value], start=a, end=b) for value, a, b in asked]
        else:
            q, k = flat.split
            sizes = ((q, 0), (q, 1), (k, 1))
            batch, s, t = (editor.insert_before(reader, "Shape", [v], start=at, end=at + 1) for v, at in sizes)
            parts = [batch, self._masks.constant(np.array([flat.heads], np.int64), "heads"), s, t]
        editor.rewrite(reader, "Concat", parts, {"axis": 0})

    def _guard(self, attention: ir.Node) -> None:
        """Makes rows of which everything is masked zero, where the kernel makes them NaN."""
        editor, zero, value = self._editor, self._masks.constant(np.float32(0.0), "zero"), attention.outputs[0]
        output = editor.hand_over(value)
        test = editor.append_behind(attention, "IsNaN", [value])
        editor.append_behind(attention, "Where", [test, zero, value], output=output)
