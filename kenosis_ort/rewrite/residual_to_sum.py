"""The Add of a residual in front of a LayerNormalization as Sum.

``Add(a, b) = a + b`` is ``Sum(a, b)``, to the bit. The runtime joins an Add and the LayerNormalization behind it into
one kernel of its own, ``SkipLayerNormalization``, which is slower than the two: 175 for 20 microseconds over
``[128, 256]``, 1380 for 56 over ``[128, 768]`` (one AVX512 thread). It does not join a Sum. A BERT-like encoder of
256 units ran at 1.17x of its own float speed, and at 2.7x for 1.9x once its linear layers were integer.

The runtime joins what this rule changes: three dimensions, both operands of the same shape, the sum read by the norm
alone. Dimensions that are not known count as possibly the same. Where one operand is an Add itself (a bias), only the
last one changes. Two integer kernels in front of such a Sum want it as an Add again, which is a rule of its own
(`sum_to_add`).

Not changed: sums with a further reader, which the runtime leaves alone; types other than float32.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx

from kenosis_ort.graph.prepare import RewriteResult
from kenosis_ort.rewrite.collapse_layer_norm import norm_around
from kenosis_ort.rewrite.matching import Matcher, NotCollapsibleError

_RANK = 3


def residual_to_sum(model: onnx.ModelProto, *, keep_values: Collection[str] = ()) -> RewriteResult:
    """Turns every Add of the main graph that only a LayerNormalization reads into a Sum, in place.

    Args:
        model: The model to change, its types and shapes inferred.
        keep_values: Values that must keep existing with their meaning; all of them do.
    """
    if not any(node.op_type in ("LayerNormalization", "Sqrt") for node in model.graph.node):
        return RewriteResult()
    matcher = Matcher(model, keep_values)
    for value, readers in _normalized(matcher):
        residual = matcher.producer(value, "Add")
        if residual is None or not _is_joined(matcher, residual, readers):
            continue
        try:
            matcher.require_float32(residual.output[0])
        except NotCollapsibleError as reason:
            matcher.refuse(residual, reason)
            continue
        matcher.collapse((), residual, "Sum", list(residual.input))
    return matcher.finish(
        "residuals in front of a LayerNormalization are added by Sum, which the runtime does not join with it",
        "residuals in front of a LayerNormalization stay",
    )


def _normalized(matcher: Matcher) -> list[tuple[str, Collection[onnx.NodeProto]]]:
    """Returns the inputs of the norms, with the nodes that read them there.

    Before operator set 17 the norms are still arithmetic, of which the runtime makes the operator at load.
    """
    found: list[tuple[str, Collection[onnx.NodeProto]]] = [
        (node.input[0], (node,)) for node in matcher.nodes("LayerNormalization")
    ]
    for root in matcher.nodes("Sqrt"):
        norm = norm_around(matcher, root)
        if norm is not None and norm.centred:
            found.append((norm.x, norm.inner))
    return found


def _is_joined(matcher: Matcher, residual: onnx.NodeProto, readers: Collection[onnx.NodeProto]) -> bool:
    """Tells whether the runtime may join the Add with the only norm that reads it."""
    output = residual.output[0]
    members = {id(node) for node in readers}
    elsewhere = any(id(node) not in members for node in matcher.index.readers[output])
    if elsewhere or output in matcher.index.outputs or output in matcher.index.captured:
        return False
    left, right = (_shape(matcher, name) for name in residual.input)
    if left is None or right is None:
        return all(shape is None or len(shape) == _RANK for shape in (left, right))
    same = all(a == b or a is None or b is None for a, b in zip(left, right, strict=False))
    return len(left) == len(right) == _RANK and same


def _shape(matcher: Matcher, value: str) -> tuple[int | None, ...] | None:
    constant = matcher.index.constant(value)
    return matcher.dims(value) if constant is None else tuple(constant.dims)
