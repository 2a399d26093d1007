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

import onnx

from kenosis_ort.graph.attributes import attribute, attribute_int
from kenosis_ort.rewrite.editing import Editor
from kenosis_ort.rewrite.matching import Matcher, NotCollapsibleError
from kenosis_ort.rewrite.rule import float_rule

_PICTURE_RANK = 4
_LAST_TWO = ({2, 3}, {-2, -1}, {2, -1}, {-2, 3})


@float_rule(
    "ReduceMean",
    did="ReduceMean nodes over height and width became GlobalAveragePool",
    stays="ReduceMean nodes over the last two dimensions stay",
)
def pool_from_mean(editor: Editor, mean: onnx.NodeProto) -> None:
    """Turns every ReduceMean over the last two of four dimensions into GlobalAveragePool, in place.

    The node keeps its name. Without ``keepdims`` a Flatten behind it writes the value that it wrote.
    """
    if not _is_over_picture(editor, mean):
        return
    keepdims = attribute_int(mean, "keepdims", 1)
    editor.become(mean, "GlobalAveragePool", [mean.input[0]])
    if not keepdims:
        value, output = editor.take_output(mean)
        editor.append_behind(mean, "Flatten", [value], output=output)


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
