"""A large model is proved in pieces; the proof is that of the whole."""

from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from kenosis_ort.graph.constants import replace_nodes
from kenosis_ort.graph.qdq import SourceGraph
from kenosis_ort.targets.ort_cpu.pieces import cut
from kenosis_ort.verify import verify_fusion
from tests.targets.qdq import QdqGraph, random_feeds, run


def _residual_net(*, signed: bool = False, shapes: bool = True) -> onnx.ModelProto:
    g = QdqGraph(act=np.int8 if signed else np.uint8)
    known: list[str] = []
    x = g.act_input((1, 8, 6, 6))
    for _ in range(6):
        known += [first := g.op("Relu", g.conv(x, 8, 8)), second := g.conv(g.relu_q(first), 8, 8)]
        known.append(g.op("Relu", g.op("Add", g.q(second), x)))
        x = g.relu_q(known[-1])
    tail = g.op("LeakyRelu", g.conv(x, 8, 8))  # a float node, second reader of x
    model = g.model(g.op("Sigmoid", tail), x)
    if shapes:
        model.graph.value_info.extend(helper.make_tensor_value_info(v, TensorProto.FLOAT, (1, 8, 6, 6)) for v in known)
    return model


def _small_pieces(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    module = "kenosis_ort.targets.ort_cpu.cpu_proof"
    monkeypatch.setattr(f"{module}.WHOLE_LIMIT", 0)
    monkeypatch.setattr(f"{module}.cut", lambda model, graph: cut(model, graph, size=size))


@pytest.mark.parametrize("size", [1, 4, 11])
def test_the_proof_is_that_of_the_whole(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _residual_net()
    whole = verify_fusion(model)
    _small_pieces(monkeypatch, size)
    found = verify_fusion(model)
    assert (whole.pieces, found.pieces > 1) == (1, True)
    assert found.kernels == whole.kernels


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_every_node_is_in_one_piece_and_the_pieces_compute_the_whole(size: int) -> None:
    model = _residual_net()
    parts = cut(model, SourceGraph(model), size=size)
    movable = ("DequantizeLinear", "Constant")
    counts = Counter(n.name for part in parts for n in part.graph.node if n.op_type not in movable)
    assert counts == Counter(n.name for n in model.graph.node if n.op_type not in movable)
    values = random_feeds(model)
    expected = run(model, values, optimize=False)
    for part in parts:
        made = run(part, {i.name: values[i.name] for i in part.graph.input}, optimize=False)
        values.update(zip([o.name for o in part.graph.output], made, strict=True))
    for output, array in zip(model.graph.output, expected, strict=True):
        np.testing.assert_array_equal(values[output.name], array)


def test_no_cut_through_int8_or_values_of_unknown_rank() -> None:
    signed, unknown = _residual_net(signed=True), _residual_net(shapes=False)
    assert len(cut(signed, SourceGraph(signed), size=1)) == 1
    first, rest = cut(unknown, SourceGraph(unknown), size=1)  # only the graph input has a rank
    assert [n.op_type for n in first.graph.node] == ["QuantizeLinear"]
    assert len(rest.graph.node) == len(unknown.graph.node) - 1


def test_no_cut_where_the_order_is_not_topological() -> None:
    model = _residual_net()
    replace_nodes(model.graph, list(model.graph.node)[::-1])
    assert len(cut(model, SourceGraph(model), size=1)) == 1


def test_a_body_keeps_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _residual_net()
    graph = model.graph
    captured = next(n.output[0] for n in graph.node if n.op_type == "DequantizeLinear" and "quantize" in n.input[0])
    graph.input.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, ()))
    branches = ", ".join(
        f"{kind}_branch = {op} () => (float[] {op}_y) {{ [{op}] {op}_y = {op} ({captured}) }}"
        for kind, op in (("then", "Exp"), ("else", "Abs"))
    )
    graph.node.append(onnx.parser.parse_node(f"[if] chosen = If (flag) <{branches}>"))
    graph.output.append(helper.make_tensor_value_info("chosen", TensorProto.FLOAT, None))
    whole = verify_fusion(model)
    _small_pieces(monkeypatch, 3)
    found = verify_fusion(model)
    assert found.pieces > 1
    assert found.kernels == whole.kernels
