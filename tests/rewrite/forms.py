"""Support for the tests of collapsing rewrites: float equality on the runtime, and the kernels after quantization."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import kenosis_ort
from kenosis_ort.graph.opset import PreparedModel
from kenosis_ort.verify import verify_fusion
from tests.graph.build import assert_same, model, ready, run, value
from tests.graph.build import ops as plain_ops
from tests.models import FeedReader
from tests.planning import quantize
from tests.targets.qdq import kernels

RTOL = 1e-5


class Graph:
    """Writes one small graph; every call adds a node, named after its output, and returns that output's name."""

    def __init__(self, shape, *, opset=17, elem_type=onnx.TensorProto.FLOAT):
        self.nodes, self.weights, self.opset, self.shape, self.elem_type = [], {}, opset, list(shape), elem_type
        self.dtype = onnx.helper.tensor_dtype_to_np_dtype(elem_type)

    def const(self, content, dtype=None):
        name = f"k{len(self.weights)}"
        self.weights[name] = np.asarray(content, self.dtype if dtype is None else dtype)
        return name

    def op(self, op_type, *inputs, **attributes):
        names = [name if isinstance(name, str) else self.const(name) for name in inputs]
        out = f"{op_type.lower()}{len(self.nodes)}"
        self.nodes.append(onnx.helper.make_node(op_type, names, [out], name=out, **attributes))
        return out

    def model(self, *outputs):
        """Returns the model; an output that is written already is also needed inside if it is read there."""
        described = [value(name, None, self.elem_type) for name in outputs]
        return model(self.nodes, [value("x", self.shape, self.elem_type)], described, self.weights, opset=self.opset)


def formed(proto: onnx.ModelProto, rewrite, **options) -> PreparedModel:
    """Returns the model after preparation with one rewrite."""
    return ready(proto, rewrites=[rewrite], **options)


def ops(proto: onnx.ModelProto) -> list[str]:
    return [f"{node.domain}.{node.op_type}".lstrip(".") for node in proto.graph.node]


def assert_formed(proto, rewrite, expected: Sequence[str] | None, x, *, rtol=RTOL, **options) -> PreparedModel:
    """The rewrite gives these operators and the same outputs, relative to the largest of each; the model is sound.

    Args:
        proto: The model; not to be changed.
        rewrite: The rule.
        expected: Operators of the result, in order; None to leave them open.
        x: Content of the input ``x``.
        rtol: Bound.
        options: Options of `prepare`.
    """
    before = proto.SerializeToString(deterministic=True)
    result = formed(proto, rewrite, **options)
    assert proto.SerializeToString(deterministic=True) == before
    if expected is not None:
        assert ops(result.proto) == list(expected)
    onnx.checker.check_model(result.proto)
    unique = [node.name for node in result.proto.graph.node]
    assert len(set(unique)) == len(unique)
    assert all(name in unique for by in result.nodes.values() for name in by)
    assert [o.name for o in result.proto.graph.output] == [o.name for o in proto.graph.output]
    for expected_y, y in zip(run(proto, {"x": x}), run(result.proto, {"x": x}), strict=True):
        assert expected_y.dtype == y.dtype
        assert expected_y.shape == y.shape
        # Where the original cancels (1 + erf far below 0), float32 itself is no better than a part of the input.
        scale = max(
            float(np.abs(expected_y.astype(np.float64)).max(initial=0.0)), 1e-2 * float(np.abs(x).max(initial=0))
        )
        assert float(np.abs(expected_y.astype(np.float64) - y).max(initial=0.0)) <= rtol * max(scale, 1e-30)
    return result


def assert_refused(proto, rewrite, why: str | None, **options) -> None:
    """The rewrite leaves the model's nodes as they are; a note says why, or there is none (``why`` None)."""
    plain = ready(proto, **options)
    result = formed(proto, rewrite, **options)
    assert [n.SerializeToString() for n in result.proto.graph.node] == [
        n.SerializeToString() for n in plain.proto.graph.node
    ]
    added = [note for note in result.notes if note not in plain.notes]
    assert [why in note for note in added] == ([] if why is None else [True])


def quantized_kernels(proto: onnx.ModelProto, feeds, rewrites) -> list[str]:
    """Returns the kernels that the installed runtime runs after quantization with these rewrites only."""
    chosen = [rewrite.__name__ for rewrite in rewrites]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "q.onnx"
        kenosis_ort.quantize_static(proto, path, FeedReader(feeds), rewrites=chosen, tune="off")
        found = kernels(onnx.load(path))
    return [f"{k.domain}.{k.op_type}".lstrip(".") for k in found]


def rewritten(rule, proto: onnx.ModelProto, *nodes: str, **options: Any) -> PreparedModel:
    """Returns the prepared model after one rule for the named nodes, of all nodes if none is named."""
    names = nodes or tuple(node.name for node in proto.graph.node)
    return ready(proto, rewrites=[partial(rule, nodes=names)], **options)


def check(
    rule,
    proto: onnx.ModelProto,
    feeds: Mapping[str, np.ndarray],
    expected: Collection[str],
    *nodes: str,
    **options: Any,
) -> PreparedModel:
    """Applies the rule; the float outputs are the same and the operators the expected ones."""
    prepared = rewritten(rule, proto, *nodes, **options)
    onnx.checker.check_model(prepared.proto)
    assert plain_ops(prepared.proto) == list(expected)
    assert_same(proto, prepared.proto, feeds, rtol=RTOL)
    outer = [*proto.graph.input, *proto.graph.output]
    assert [v.name for v in (*prepared.proto.graph.input, *prepared.proto.graph.output)] == [v.name for v in outer]
    return prepared


def refused(rule, proto: onnx.ModelProto, reason: str, *nodes: str, **options: Any) -> PreparedModel:
    """Checks that the rule leaves the model as it is, and says why."""
    prepared = rewritten(rule, proto, *nodes, **options)
    assert plain_ops(prepared.proto) == plain_ops(proto)
    assert any(reason in note for note in prepared.notes), prepared.notes
    return prepared


def untouched(rule, proto: onnx.ModelProto, *nodes: str, **options: Any) -> None:
    """Checks that the rule leaves the model as it is, and has nothing to say about it."""
    prepared = rewritten(rule, proto, *nodes, **options)
    assert plain_ops(prepared.proto) == plain_ops(proto)
    assert prepared.notes == ready(proto, **options).notes


def kernels_by_node(proto: onnx.ModelProto) -> dict[str, str]:
    """Quantizes a float model; returns the kernel of each node on the installed runtime ("absorbed" for one gone)."""
    outcome = quantize(proto)
    report = verify_fusion(outcome.quantized, plan=outcome.plan)
    return {k.node: "absorbed" if k.absorbed_into else k.kernel for k in report.kernels}
