"""The mapping does not depend on how nodes and values are called."""

from __future__ import annotations

import onnx
import pytest

from kenosis_ort.verify import FusionReport, verify_fusion
from tests.targets.qdq import QdqGraph
from tests.verify.expect import report


def _model() -> onnx.ModelProto:
    g = QdqGraph()
    x = g.relu_q(g.op("Relu", g.conv(g.q(g.input((1, 16, 12, 12))))))
    y = g.q(g.op("Add", g.q(g.conv(x)), x))
    z = g.op("LeakyRelu", g.conv(y, weight="float", bias="float"))
    return g.model(g.op("Sigmoid", z), g.q(g.gemm(g.q(g.op("Flatten", y)), 16 * 144, 4)))


def _facts(found: FusionReport) -> list[tuple[object, ...]]:
    position = {k.node: i for i, k in enumerate(found.kernels)}
    return [
        (k.op_type, k.kernel, k.integer, k.status, position.get(k.absorbed_into or ""), len(k.absorbed))
        for k in found.kernels
    ]


def _rename_nodes(model: onnx.ModelProto, pattern: str) -> onnx.ModelProto:
    for number, node in enumerate(model.graph.node):
        node.name = pattern.format(n=number, half=number // 2)
    return model


@pytest.mark.parametrize(
    "pattern", ["{n}", "a_token_{n}", "kv#{n}#", "Conv_{n}_nchwc", "a/MatMulAddFusion_{n}", "x" * 40 + "{n}", "n {n}/ü"]
)
def test_node_names_do_not_matter(pattern: str) -> None:
    found = report(_rename_nodes(_model(), pattern))
    assert _facts(found) == _facts(report(_model()))


def test_nodes_without_names() -> None:
    found = report(_rename_nodes(_model(), ""))
    assert [k[:4] for k in _facts(found)] == [k[:4] for k in _facts(report(_model()))]
    assert all(k.node.startswith(f"<{k.op_type} ") for k in found.kernels)
    assert len({k.node for k in found.kernels}) == len(found.kernels)


def test_value_names_like_the_runtime_s_own() -> None:
    model = _model()
    outputs = {o.name for o in model.graph.output}
    names = {v: f"v{i}_nchwc" for i, v in enumerate(v for n in model.graph.node for v in n.output) if v not in outputs}
    for node in model.graph.node:
        for values in (node.input, node.output):
            values[:] = [names.get(v, v) for v in values]
    assert _facts(report(model)) == _facts(report(_model()))


def test_dequantizers_duplicated_for_each_reader() -> None:
    model = _model()
    readers: dict[str, int] = {}
    makers = {n.output[0]: n for n in model.graph.node if n.op_type == "DequantizeLinear"}
    nodes = []
    for node in model.graph.node:
        for index, value in enumerate(node.input):
            readers[value] = readers.get(value, 0) + 1
            if value in makers and readers[value] > 1:
                copy = onnx.NodeProto()
                copy.CopyFrom(makers[value])
                copy.name = copy.output[0] = f"{value}_copy{readers[value]}"
                nodes.append(copy)
                node.input[index] = copy.output[0]
        nodes.append(node)
    assert len(nodes) > len(model.graph.node)
    fresh = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
    del model.graph.node[:]
    model.graph.node.extend(fresh)
    assert _facts(report(model)) == _facts(report(_model()))


def test_the_caller_s_model_is_not_changed() -> None:
    model = _model()
    before = model.SerializeToString(deterministic=True)
    verify_fusion(model)
    assert model.SerializeToString(deterministic=True) == before
