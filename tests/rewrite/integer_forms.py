"""What the tests of the integer forms share: apply one to named nodes, compare, and look at the kernels it leads to."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import numpy as np
import onnx

from kenosis_ort.graph.opset import PreparedModel
from kenosis_ort.verify import verify_fusion
from tests.graph.build import assert_same, ops, ready
from tests.planning import quantize

RELATIVE = 1e-5


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
    assert ops(prepared.proto) == list(expected)
    assert_same(proto, prepared.proto, feeds, rtol=RELATIVE)
    outer = [*proto.graph.input, *proto.graph.output]
    assert [v.name for v in (*prepared.proto.graph.input, *prepared.proto.graph.output)] == [v.name for v in outer]
    return prepared


def refused(rule, proto: onnx.ModelProto, reason: str, *nodes: str, **options: Any) -> PreparedModel:
    """Checks that the rule leaves the model as it is, and says why."""
    prepared = rewritten(rule, proto, *nodes, **options)
    assert ops(prepared.proto) == ops(proto)
    assert any(reason in note for note in prepared.notes), prepared.notes
    return prepared


def untouched(rule, proto: onnx.ModelProto, *nodes: str, **options: Any) -> None:
    """Checks that the rule leaves the model as it is, and has nothing to say about it."""
    prepared = rewritten(rule, proto, *nodes, **options)
    assert ops(prepared.proto) == ops(proto)
    assert prepared.notes == ready(proto, **options).notes


def kernels(proto: onnx.ModelProto) -> dict[str, str]:
    """Quantizes a float model; returns the kernel of each node on the installed runtime ("absorbed" for one gone)."""
    outcome = quantize(proto)
    report = verify_fusion(outcome.quantized, plan=outcome.plan)
    return {k.node: "absorbed" if k.absorbed_into else k.kernel for k in report.kernels}
