"""Which outputs of a model are the next values of which inputs: recurrent states and caches."""

from __future__ import annotations

import re

import onnx

_WHEN = "past|present|prev|previous|next|new|old|in|out|input|output|initial|final|last|cur|current|updated|tm1|t"
_MARKS, _BARE_MARKS = (re.compile(rf"(?<![a-z])({words})(?![a-z])") for words in (f"{_WHEN}|key|values", _WHEN))


def state_pairs(model: onnx.ModelProto) -> dict[str, str]:
    """Returns which outputs are the next values of which inputs, as their names, types and ranks tell.

    Two names belong together if they are equal once words such as past, present, in, out, new or next, and a last
    letter N, are taken off (``past_0_k`` and ``present_0_k``, ``state`` and ``stateN``).

    Args:
        model: The model.

    Returns:
        Input name by output name; without those that are not clear.
    """
    constants = {t.name for t in model.graph.initializer}
    inputs = [v for v in model.graph.input if v.name not in constants]
    found: dict[str, str] = {}
    for output in model.graph.output:
        same = [v for v in inputs if v.name != output.name and alike(v, output)]
        exact = [v.name for v in same if state_stem(v.name) == state_stem(output.name) != ""]
        if len(exact) == 1:
            found[output.name] = exact[0]
    taken = list(found.values())
    return {o: i for o, i in found.items() if taken.count(i) == 1}


def state_stem(name: str) -> str:
    """Returns what is left of a name without words such as past and present; "" if nothing is.

    ``key`` and ``values`` go too, for ``past_key_values.0.key`` is what ``present.0.key`` was, unless they are all that
    there is: ``past_key``.
    """
    lowered = re.sub(r"(?<=[a-z])N$", "", name).lower().replace("_", " ")
    stems = (re.sub(r"[^a-z0-9]+", "", marks.sub("", lowered)) for marks in (_MARKS, _BARE_MARKS))
    return next(filter(None, stems), "")


def alike(a: onnx.ValueInfoProto, b: onnx.ValueInfoProto) -> bool:
    """Tells whether two values have one element type and shapes that can be equal but for symbolic sizes."""
    left, right = a.type.tensor_type, b.type.tensor_type
    if left.elem_type != right.elem_type or len(left.shape.dim) != len(right.shape.dim) or not left.shape.dim:
        return left.elem_type == right.elem_type and not right.HasField("shape")
    pairs = zip(left.shape.dim, right.shape.dim, strict=True)
    return all(not (x.dim_value and y.dim_value) or x.dim_value == y.dim_value for x, y in pairs)
