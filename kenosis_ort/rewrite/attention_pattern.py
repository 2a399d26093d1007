"""Finds attention in a graph by following data from its Softmax, whatever spelling the exporter chose.

Attention is ``Y = softmax(scale * Q K^T + mask) V`` over the last two of three or four dimensions. Exporters write
the scale as Mul or Div before the product, on one side or on both, or behind it; the mask as Add of a float mask, or as
Where with a condition; ``K^T`` by one Transpose, or by Reshape, Transpose and Reshape; and a guard behind the Softmax
that makes rows of which everything is masked zero instead of NaN. Lists of paths of operators, one for each exporter,
fit one version of one exporter. Here a value is asked what it is: a product, a scaled value, a masked one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kenosis_ort.graph.view import ir
from kenosis_ort.rewrite.rule import Editor, NotCollapsibleError, known, operand, refuse_if

_RANKS = (3, 4)
_MASKED = -1e9
"""A finite number that stands for a masked score at most: a score added to it vanishes in its rounding."""
_DEEPEST = 12


class MaskTerm(NamedTuple):
    """One of the masks of an attention.

    Attributes:
        value: What is added to the scores; or a condition, True where the score is `keep_if`.
        keep_if: None for a value that is added; else which truth of the condition keeps the score.
        filler: What masked scores become; -inf or a number of at most -1e9.
        windows: Number of windows W of a value [1, W, 1, S, T] that is added to scores whose batch is cut into
            pictures and windows, as Swin does, or its symbol; 0 for a mask of the scores as they are.
    """

    value: ir.Value
    keep_if: bool | None = None
    filler: float = -np.inf
    windows: int | str = 0


@dataclass
class Scores:
    """Attention scores that a Softmax reads.

    Attributes:
        q: Queries, [B, N, S, H] or [B, S, H]; factors that are not constant are still in it.
        k: The value that keys, [B, N, T, H] or [B, T, H], are made of.
        k_perm: By which permutation; None where they are that value.
        k_factors: Factors of one number that are not constant and are still to be multiplied to the keys.
        scale: Product of all constant factors.
        masks: What is added to the scores.
        inner: The nodes from the product to the Softmax.
    """

    q: ir.Value
    k: ir.Value
    k_perm: tuple[int, ...] | None = None
    k_factors: list[ir.Value] = field(default_factory=list)
    scale: float = 1.0
    masks: list[MaskTerm] = field(default_factory=list)
    inner: list[ir.Node] = field(default_factory=list)

    def key_axis(self, rank: int) -> int:
        """The dimension of `k` that counts keys."""
        return rank - 2 if self.k_perm is None else self.k_perm[-2]


class FoundAttention(NamedTuple):
    """An attention and its parts.

    Attributes:
        scores: What goes into its Softmax.
        v: Values, [B, N, T, V] or [B, T, V].
        inner: All nodes but the last.
        last: The product with the values.
        guarded: Rows of which everything is masked by -inf are zero instead of NaN.
        rank: Dimensions of Q, K and V.
    """

    scores: Scores
    v: ir.Value
    inner: tuple[ir.Node, ...]
    last: ir.Node
    guarded: bool
    rank: int


def find_attention(editor: Editor, softmax: ir.Node) -> FoundAttention | None:
    """The attention around a Softmax, None if there is none.

    Args:
        editor: The rule's view of the model.
        softmax: The Softmax.

    Raises:
        NotCollapsibleError: There is one, and it cannot be one operator; with the reason.
    """
    weighted = _behind(editor, softmax)
    if weighted is None:
        return None
    guard, product = weighted
    scores, v = _scores(editor, operand(softmax, 0), 0), operand(product, 1)
    if scores is None:
        return None
    rank = editor.rank(scores.q)
    if rank not in _RANKS or any(editor.rank(x) != rank for x in (scores.k, v)):
        raise NotCollapsibleError("queries, keys and values are not known to have three or four dimensions each")
    if softmax.attributes.get_int("axis", -1) not in (-1, rank - 1):
        raise NotCollapsibleError("its Softmax is not over the last dimension")
    refuse_if(not (np.isfinite(scores.scale) and scores.scale > 0), f"its scale is {scores.scale}")
    for value in (scores.q, scores.k, v):
        editor.require_float32(value)
    return FoundAttention(scores, v, (*scores.inner, softmax, *guard), product, bool(guard), rank)


def _behind(editor: Editor, softmax: ir.Node) -> tuple[tuple[ir.Node, ...], ir.Node] | None:
    """The guard against NaN, if there is one, and the product with the values."""
    value = softmax.outputs[0]
    guard: tuple[ir.Node, ...] = ()
    for where in editor.readers_of(value, "Where"):
        test = editor.producer(where.inputs[0], "IsNaN")
        is_guard = test is not None and test.inputs[0] is value is where.inputs[2]
        if test is None or not is_guard or editor.scalar(where.inputs[1]) != 0.0:
            return None
        value, guard = where.outputs[0], (test, where)
    products = [p for p in editor.readers_of(value, "MatMul") if p.inputs[0] is value is not p.inputs[1]]
    return (guard, products[0]) if len(products) == 1 else None


def _scores(editor: Editor, value: ir.Value, depth: int) -> Scores | None:
    """Attention scores that a value holds; None if it does not come from a product of two values."""
    node = editor.producer(value, "MatMul", "FusedMatMul", "Add", "Where", "Mul", "Div", "Reshape")
    if node is not None and node.op_type == "FusedMatMul":
        return _fused_product(editor, node)
    if node is None or depth > _DEEPEST:
        return None
    if node.op_type == "MatMul":
        return _product(editor, node)
    if node.op_type == "Reshape":
        return _windowed(editor, node, depth)
    if node.op_type == "Add":
        for position in (0, 1):
            value, other = operand(node, position), operand(node, 1 - position)
            found = None if editor.constant(value) else _scores(editor, value, depth + 1)
            if found is not None:
                found.masks.append(MaskTerm(other))
                found.inner.append(node)
                return found
        return None
    if node.op_type == "Where":
        return _selected(editor, node, depth)
    return _scaled(editor, node, depth)


def _selected(editor: Editor, node: ir.Node, depth: int) -> Scores | None:
    condition, yes, no = (operand(node, position) for position in range(3))
    for position, (chosen, filled) in enumerate(((yes, no), (no, yes))):
        filler = _number(editor, filled)
        found = None if filler is None else _scores(editor, chosen, depth + 1)
        if found is None or filler is None:
            continue
        refuse_if(filler > _MASKED, f"masked scores become {filler:g}, which is not small enough to vanish")
        found.masks.append(MaskTerm(condition, position == 0, filler))
        found.inner.append(node)
        return found
    return None


def _windowed(editor: Editor, join: ir.Node, depth: int) -> Scores | None:
    """Scores that are cut into windows, masked by window, and joined again."""
    add = editor.producer(join.inputs[0], "Add")
    if add is None:
        return None
    left, right = operand(add, 0), operand(add, 1)
    for cut_value, mask in ((left, right), (right, left)):
        cut = editor.producer(cut_value, "Reshape")
        whole, inside, masked = (editor.symbols(v) for v in (join.outputs[0], cut_value, mask))
        tensor = editor.constant(mask)
        masked = masked if tensor is None else tuple(tensor.dims)
        if cut is None or not whole or not inside or not masked or (len(whole), len(inside), len(masked)) != (4, 5, 5):
            continue
        before = editor.symbols(cut.inputs[0])
        windows, tail = masked[1], inside[2:]
        counted = inside[1] == windows or (isinstance(windows, int) and not isinstance(inside[1], int))
        fits = windows and masked == (1, windows, 1, *inside[3:]) and counted
        is_cut = before is not None and before[1:] == whole[1:] == tail and all(isinstance(size, int) for size in tail)
        if not (fits and is_cut):
            continue
        found = _scores(editor, operand(cut, 0), depth + 1)
        if found is not None:
            found.masks.append(MaskTerm(mask, windows=windows or 0))
            found.inner += [cut, add, join]
        return found
    return None


def _scaled(editor: Editor, node: ir.Node, depth: int) -> Scores | None:
    for value, other in _factors(node):
        factor = editor.scalar(other)
        if factor is None:
            continue
        found = _scores(editor, value, depth + 1)
        if found is None:
            return None
        refuse_if(found.masks, "its mask is scaled as well")
        found.scale *= factor if node.op_type == "Mul" else 1.0 / factor if factor else np.inf
        found.inner.append(node)
        return found
    return None


def _product(editor: Editor, node: ir.Node) -> Scores | None:
    left, right = operand(node, 0), operand(node, 1)
    if any(editor.constant(value) is not None for value in (left, right)):
        return None  # a linear layer
    q, q_scale = _unscaled(editor, left)
    k_transposed, k_scale, factors = right, 1.0, list[ir.Value]()
    while (stripped := _one_factor(editor, k_transposed)) is not None:
        k_transposed, factor, variable = stripped
        k_scale *= factor
        factors += [] if variable is None else [variable]
    unknown = f"the dimensions of its keys '{k_transposed.name}' are not known"
    k, perm, inner_scale = known(_keys(editor, k_transposed), unknown)
    return Scores(q, k, perm, factors, q_scale * k_scale * inner_scale, inner=[node])


def _fused_product(editor: Editor, node: ir.Node) -> Scores | None:
    """The scores of the runtime's own product, which has a factor and transposes."""
    flags = {name: node.attributes.get_int(name, 0) for name in ("transA", "transB", "transBatchA", "transBatchB")}
    if flags.pop("transB") != 1:
        return None
    refuse_if(any(flags.values()), "its FusedMatMul transposes more than the keys")
    q, q_scale = _unscaled(editor, operand(node, 0))
    k, k_scale = _unscaled(editor, operand(node, 1))
    return Scores(q, k, scale=q_scale * k_scale * node.attributes.get_float("alpha", 1.0), inner=[node])


def _keys(editor: Editor, transposed: ir.Value) -> tuple[ir.Value, tuple[int, ...] | None, float] | None:
    """Source of keys, its permutation, and a factor taken off; None if their rank is not known."""
    rank = editor.rank(transposed)
    if rank is None:
        return None
    swap = (*range(rank - 2), rank - 1, rank - 2)
    node = editor.producer(transposed, "Transpose")
    if node is not None:
        order = tuple(node.attributes.get_ints("perm", range(rank)[::-1]))
        perm = tuple(order[axis] for axis in swap)
        value, scale = _unscaled(editor, operand(node, 0))
        return value, None if perm == tuple(range(rank)) else perm, scale
    before = _before_folded_turn(editor, transposed)
    if before is not None:
        value, scale = _unscaled(editor, before)
        return value, None, scale
    return transposed, swap, 1.0


def _before_folded_turn(editor: Editor, transposed: ir.Value) -> ir.Value | None:
    """Value that was folded to three dimensions, transposed, and unfolded; None if there is none."""
    outer = editor.producer(transposed, "Reshape")
    turn = None if outer is None else editor.producer(outer.inputs[0], "Transpose")
    inner = None if turn is None else editor.producer(turn.inputs[0], "Reshape")
    if inner is None or turn is None or list(turn.attributes.get_ints("perm", ())) != [0, 2, 1]:
        return None
    keys = operand(inner, 0)
    dims, turned = editor.symbols(keys), editor.symbols(transposed)
    if not dims or not turned or None in dims or dims != (*turned[:-2], turned[-1], turned[-2]):
        return None
    return keys


def _unscaled(editor: Editor, value: ir.Value) -> tuple[ir.Value, float]:
    """A value without the constant factors at its end, and their product."""
    scale = 1.0
    while (stripped := _one_factor(editor, value)) is not None and stripped[2] is None:
        value, factor, _ = stripped
        scale *= factor
    return value, scale


def _one_factor(editor: Editor, value: ir.Value) -> tuple[ir.Value, float, ir.Value | None] | None:
    """A value without its last factor of one number, the factor, and what holds it where it is not constant."""
    node = editor.producer(value, "Mul", "Div")
    if node is None:
        return None
    for left, other in _factors(node):
        factor = editor.scalar(other)
        if factor is not None:
            return left, factor if node.op_type == "Mul" else 1.0 / factor if factor else np.inf, None
        if node.op_type == "Mul" and editor.dims(other) in ((), (1,)):
            return left, 1.0, other
    return None


def before_repeat(editor: Editor, value: ir.Value) -> ir.Value | None:
    """Keys or values [B, M, T, H] of which each head is repeated to [B, N, T, H]; None if none are."""
    fold = editor.producer(value, "Reshape")
    expand = None if fold is None else editor.producer(fold.inputs[0], "Expand")
    lift = None if expand is None else editor.producer(expand.inputs[0], "Unsqueeze")
    if fold is None or lift is None:
        return None
    axes, wide, lifted = editor.array(lift.inputs[1]), editor.dims(fold.inputs[0]), editor.dims(lift.outputs[0])
    repeated = editor.dims(value)
    if axes is None or axes.tolist() != [2] or not wide or not lifted or not repeated:
        return None
    if (len(wide), len(lifted), len(repeated)) != (5, 5, 4) or not wide[1] or not wide[2]:
        return None
    others = all(lifted[axis] in (wide[axis], None) for axis in (0, 3, 4))  # nothing else is repeated
    same = repeated[1] == wide[1] * wide[2] and repeated[3] == wide[4] is not None and lifted[1] in (wide[1], None)
    return lift.inputs[0] if others and same else None


def _factors(node: ir.Node) -> Iterator[tuple[ir.Value, ir.Value]]:
    left, right = operand(node, 0), operand(node, 1)
    yield left, right
    if node.op_type == "Mul":
        yield right, left


def _number(editor: Editor, value: ir.Value) -> float | None:
    """The one number of a constant, infinite or not."""
    array = editor.array(value)
    return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None
