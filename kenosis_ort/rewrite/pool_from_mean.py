"""ReduceMean over height and width as GlobalAveragePool.

For ``x`` of shape ``[N, C, H, W]``::

    GlobalAveragePool(x)[n, c, 0, 0] = 1 / (H * W) * sum over h, w of x[n, c, h, w]
                                     = ReduceMean(x; axes = 2, 3; keepdims = 1)[n, c, 0, 0]

Without ``keepdims`` the result has shape ``[N, C]``, which is ``Flatten(axis = 1)`` of the above. ReduceMean has no
integer kernel and would be a float island; GlobalAveragePool has one (a squeeze-and-excitation net 2.7x of FP32
for 2.1x), and in a float model it runs in the runtime's blocked layout.

Not changed: axes that are computed or are not exactly the last two, a rank other than 4, a type other than float32.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx
import onnx.helper

from kenosis_ort.graph.attributes import attribute, attribute_int
from kenosis_ort.graph.constants import replace_nodes
from kenosis_ort.graph.prepare import RewriteResult
from kenosis_ort.rewrite.matching import Matcher, NotCollapsibleError

_PICTURE_RANK = 4
_LAST_TWO = ({2, 3}, {-2, -1}, {2, -1}, {-2, 3})


def pool_from_mean(model: onnx.ModelProto, *, keep_values: Collection[str] = ()) -> RewriteResult:
    """Turns every ReduceMean over the last two of four dimensions into GlobalAveragePool, in place.

    The node keeps its name. Without ``keepdims`` a Flatten behind it writes the value that it wrote.

    Args:
        model: The model to change, its types and shapes inferred.
        keep_values: Values that must keep existing with their meaning; all of them do.
    """
    if not any(node.op_type == "ReduceMean" for node in model.graph.node):
        return RewriteResult()
    matcher = Matcher(model, keep_values)
    taken = {node.name for node in matcher.index.nodes}
    flattened: dict[str, onnx.NodeProto] = {}
    for mean in matcher.nodes("ReduceMean"):
        try:
            if not _is_over_picture(matcher, mean):
                continue
        except NotCollapsibleError as reason:
            matcher.refuse(mean, reason)
            continue
        keepdims = attribute_int(mean, "keepdims", 1)
        matcher.collapse((), mean, "GlobalAveragePool", [mean.input[0]])
        if not keepdims:
            flattened[mean.name] = _flatten(matcher, mean, taken)
    result = matcher.finish(
        "ReduceMean nodes over height and width became GlobalAveragePool",
        "ReduceMean nodes over the last two dimensions stay",
    )
    if flattened:
        nodes = list(model.graph.node)
        behind = ((node, flattened.get(node.name)) for node in nodes)
        replace_nodes(model.graph, [n for pair in behind for n in pair if n is not None])
    return result


def _is_over_picture(matcher: Matcher, mean: onnx.NodeProto) -> bool:
    """Tells whether the mean is over height and width; raises where it may be, and cannot be changed."""
    axes = _axes(matcher, mean)
    if axes not in _LAST_TWO:
        return False
    x = mean.input[0]
    rank = matcher.rank(x)
    if rank is None:
        raise NotCollapsibleError(f"the rank of '{x}' is not known")
    if rank != _PICTURE_RANK:
        return False
    matcher.require_float32(x)
    if 0 in (matcher.dims(x) or ())[2:]:
        raise NotCollapsibleError(f"'{x}' is empty")
    return True


def _axes(matcher: Matcher, mean: onnx.NodeProto) -> set[int] | None:
    """Returns the axes, an input from operator set 18 and an attribute before; None if there are none."""
    if len(mean.input) > 1 and mean.input[1]:
        axes = matcher.array(mean.input[1])
        if axes is None and matcher.rank(mean.input[0]) == _PICTURE_RANK:
            raise NotCollapsibleError(f"its axes '{mean.input[1]}' are computed")
        return None if axes is None else {int(axis) for axis in axes.reshape(-1)}
    stored = attribute(mean, "axes")
    return None if stored is None else set(stored.ints)


def _flatten(matcher: Matcher, pool: onnx.NodeProto, taken: set[str]) -> onnx.NodeProto:
    """Gives the pool's output to a new Flatten, the pool a new value to write, and returns the Flatten."""
    output = pool.output[0]
    pool.output[0] = matcher.index.fresh_name(f"{output}_pooled")
    name, number = f"{pool.name}_flatten", 0
    while name in taken:
        number += 1
        name = f"{pool.name}_flatten_{number}"
    taken.add(name)
    return onnx.helper.make_node("Flatten", [pool.output[0]], [output], name=name, axis=1)
