"""Pairs of outputs and the inputs whose next values they are: recurrent states and caches."""

from __future__ import annotations

import re
from collections.abc import Sequence

import onnx

_WHEN = "past|present|prev|previous|next|new|old|in|out|input|output|initial|final|last|cur|current|updated|tm1|t"
_MARKS, _BARE_MARKS = (re.compile(rf"(?<![a-z])({words})(?![a-z])") for words in (f"{_WHEN}|key|values", _WHEN))


def state_pairs(model: onnx.ModelProto) -> dict[str, str]:
    """Pairs of outputs and the inputs whose next values they are, by the graph, or by names, types and ranks.

    What a Concat makes of an input alone and of something computed is that input grown, whatever it is called: a cache.
    Elsewhere two names belong together if they are equal once words such as past, present, in, out, new or next, and a
    last letter N, are taken off (``past_0_k`` and ``present_0_k``, ``state`` and ``stateN``).

    Args:
        model: The model.

    Returns:
        Input name by output name; without those that are not clear.
    """
    constants = {t.name for t in model.graph.initializer}
    inputs = [v for v in model.graph.input if v.name not in constants]
    found = _grown(model.graph, inputs)
    for output in model.graph.output:
        if output.name in found:
            continue
        same = [v for v in inputs if v.name != output.name and alike(v, output)]
        exact = [
            v.name for v in same if v.name not in found.values() and state_stem(v.name) == state_stem(output.name) != ""
        ]
        if len(exact) == 1:
            found[output.name] = exact[0]
    taken = list(found.values())
    return {o: i for o, i in found.items() if taken.count(i) == 1}


def _grown(graph: onnx.GraphProto, inputs: Sequence[onnx.ValueInfoProto]) -> dict[str, str]:
    """The inputs by the outputs that they are concatenated to, with nothing else that enters."""
    entering = {value.name: value for value in inputs}
    leaving = {value.name: value for value in graph.output}
    found: dict[str, str] = {}
    for node in graph.node:
        if node.op_type != "Concat" or node.output[0] not in leaving:
            continue
        read = [name for name in node.input if name in entering and alike(entering[name], leaving[node.output[0]])]
        if len(read) == 1:
            found[node.output[0]] = read[0]
    return found


def state_stem(name: str) -> str:
    """Rest of a name without words such as past and present; "" if nothing is left.

    ``key`` and ``values`` go too, for ``past_key_values.0.key`` is what ``present.0.key`` was, unless they are all that
    there is: ``past_key``.
    """
    lowered = re.sub(r"(?<=[a-z])N$", "", name).lower().replace("_", " ")
    stems = (re.sub(r"[^a-z0-9]+", "", marks.sub("", lowered)) for marks in (_MARKS, _BARE_MARKS))
    return next(filter(None, stems), "")


def alike(a: onnx.ValueInfoProto, b: onnx.ValueInfoProto) -> bool:
    """Whether two values have one element type and shapes that can be equal but for symbolic sizes."""
    left, right = a.type.tensor_type, b.type.tensor_type
    if left.elem_type != right.elem_type or len(left.shape.dim) != len(right.shape.dim) or not left.shape.dim:
        return left.elem_type == right.elem_type and not right.HasField("shape")
    pairs = zip(left.shape.dim, right.shape.dim, strict=True)
    return all(not (x.dim_value and y.dim_value) or x.dim_value == y.dim_value for x, y in pairs)
