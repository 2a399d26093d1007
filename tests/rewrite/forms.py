"""Support for the tests of rewrites: a rule applied, float outputs compared, and the kernels after quantization."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import onnx

from kenosis_ort.graph import walk
from kenosis_ort.graph.view import PreparedModel
from tests import planning
from tests.graph.build import ready, run

RTOL = 1e-5


def parse(text: str, weights: Mapping[str, Any] | None = None, **options: Any) -> onnx.ModelProto:
    """Returns the model of a text, its nodes named after their first output."""
    proto = planning.parse(text, weights, **options)
    for node in proto.graph.node:
        node.name = node.output[0]
    return proto


def ops(proto: onnx.ModelProto) -> list[str]:
    return [f"{node.domain}.{node.op_type}".lstrip(".") for node in proto.graph.node]


def unread(proto: onnx.ModelProto) -> set[str]:
    """Names of constants that nothing reads."""
    read = {name for node in walk.all_nodes(proto) for name in node.input} | {v.name for v in proto.graph.output}
    return {tensor.name for tensor in proto.graph.initializer} - read


def rewritten(rule, proto: onnx.ModelProto, *nodes: str, **options: Any) -> PreparedModel:
    """Returns the prepared model after one rule for the named nodes, of all nodes if none is named."""

    def named(model: onnx.ModelProto, *, keep_values: Collection[str]):
        return rule(model, keep_values=keep_values, nodes=nodes or None)

    return ready(proto, rewrites=[named], **options)


def check(rule, proto, feeds, expected: Collection[str] | str | None = None, *nodes, rtol=RTOL, **options):
    """The rule gives these operators and the same outputs, relative to the largest of each; the model is sound.

    Args:
        rule: The rule.
        proto: The model; not to be changed.
        feeds: Inputs by name, or what ``x`` is.
        expected: Operators of the result, in order; None to leave them open.
        nodes: Nodes that may change; none for all.
        rtol: Bound.
        options: Options of `prepare`.
    """
    before = proto.SerializeToString(deterministic=True)
    result = rewritten(rule, proto, *nodes, **options)
    assert proto.SerializeToString(deterministic=True) == before
    if expected is not None:
        assert ops(result.proto) == (expected.split() if isinstance(expected, str) else [*expected])
    onnx.checker.check_model(result.proto)
    left = [node.name for node in result.proto.graph.node]
    assert len(set(left)) == len(left)
    assert {name for by in result.nodes.values() for name in by} <= {*left}
    assert {node.name for node in proto.graph.node} - {*left} <= {*result.nodes}, "what is gone is accounted for"
    assert unread(result.proto) <= unread(proto), "what nothing reads any more goes"
    if len(left) == 1:
        (maker,) = {node.name for node in proto.graph.node if node.output[0] == proto.graph.output[0].name}
        assert left == [maker] or maker in result.nodes, "what makes the result keeps its name"
    plain = ready(proto, **options).proto.graph
    assert (list(result.proto.graph.input), list(result.proto.graph.output)) == (list(plain.input), list(plain.output))
    feeds = feeds if isinstance(feeds, dict) else {"x": feeds}
    reach = max((float(np.abs(x.astype(np.float64)).max(initial=0)) for x in feeds.values()), default=0.0)
    for wanted, y in zip(run(proto, feeds), run(result.proto, feeds), strict=True):
        assert (wanted.dtype, wanted.shape) == (y.dtype, y.shape)
        # Where the original cancels (1 + erf far below 0), float32 itself is no better than a part of the input.
        scale = max(float(np.abs(wanted.astype(np.float64)).max(initial=0.0)), 1e-2 * reach, 1e-30)
        assert float(np.abs(wanted.astype(np.float64) - y).max(initial=0.0)) <= rtol * scale
    return result


def refused(rule, proto: onnx.ModelProto, why: str | None, *nodes: str, **options: Any) -> None:
    """The rule leaves the nodes as they are; a note says why, or there is none (``why`` None)."""
    plain, result = ready(proto, **options), rewritten(rule, proto, *nodes, **options)
    assert list(result.proto.graph.node) == list(plain.proto.graph.node)
    added = [note for note in result.notes if note not in plain.notes]
    assert [why in note for note in added] == ([] if why is None else [True]), added
