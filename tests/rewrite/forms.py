"""Support for the tests of rewrites: a rule applied, float outputs compared, and the kernels after quantization."""

import re

import numpy as np
import onnx

from kenosis_ort.graph import walk
from tests import planning
from tests.graph.build import ready, run

RTOL = 1e-5


def parse(text, weights=None, **options):
    """Returns the model of a text, its nodes named after their first output."""
    proto = planning.parse(text, weights, **options)
    for node in proto.graph.node:
        node.name = node.output[0]
    return proto


def ops(proto):
    return [f"{node.domain}.{node.op_type}".lstrip(".") for node in proto.graph.node]


def unread(proto):
    """Names of constants that nothing reads."""
    read = {name for node in walk.all_nodes(proto) for name in node.input} | {v.name for v in proto.graph.output}
    return {tensor.name for tensor in proto.graph.initializer} - read


def rewritten(rule, proto, *nodes, **options):
    """Returns the prepared model after one rule for the named nodes, of all nodes if none is named."""

    def named(model, *, keep_values):
        return rule(model, keep_values=keep_values, nodes=nodes or None)

    return ready(proto, rewrites=[named], **options)


def check(rule, proto, feeds, expected=None, *nodes, rtol=RTOL, **options):
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


def refused(rule, proto, why, *nodes, **options):
    """The rule leaves the nodes as they are; a note says why, or there is none (``why`` None)."""
    plain, result = ready(proto, **options), rewritten(rule, proto, *nodes, **options)
    assert list(result.proto.graph.node) == list(plain.proto.graph.node)
    added = [note for note in result.notes if note not in plain.notes]
    assert [why in note for note in added] == ([] if why is None else [True]), added


def spelled(body, shape, *, seed=0, opset=17, **constants):
    """Returns the net of a body from ``x`` to its last value, sums and products in an order that the seed says.

    Args:
        body: Its nodes; ``Mean(v)`` is ReduceMean over the axes ``axes`` as the operator set has it.
        shape: Of ``x``.
        seed: Of random weights and of the order of operands.
        opset: Version of the ONNX operator set.
        constants: What the body names, floats as float32.
    """
    axes = constants.pop("axes", None)
    if axes is not None and opset < 18:
        body = re.sub(r"Mean\((\w+)\)", rf"ReduceMean<axes = {[*axes]}>(\1)", body)
    elif axes is not None:
        body, constants["axes"] = re.sub(r"Mean\((\w+)\)", r"ReduceMean(\1, axes)", body), np.array(axes)
    known = {name: np.asarray(value) for name, value in constants.items() if re.search(rf"\b{name}\b", body)}
    known = {name: array.astype(np.float32) if array.dtype.kind == "f" else array for name, array in known.items()}
    size = ",".join(map(str, shape))
    last = re.findall(r"(\w+) = ", body)[-1]
    proto = parse(f"(float[{size}] x) => (float {last}) {{ {body} }}", known, opset=opset, seed=seed)
    dice = np.random.default_rng(seed)
    for node in proto.graph.node:
        if node.op_type in ("Add", "Mul") and dice.random() < 0.5:
            node.input[:] = node.input[::-1]
    return proto
