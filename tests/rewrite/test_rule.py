"""A function that changes one node becomes a rewrite of all: what it is called, what it skips, what it says."""

from __future__ import annotations

import onnx

from kenosis_ort.graph.view import ir
from kenosis_ort.rewrite.rule import Editor, NotCollapsibleError, rule
from tests.models import Net


@rule("Abs", "Neg", did="nodes became Relu", stays="nodes stay", least_opset=13)
def to_relu(editor: Editor, node: ir.Node) -> None:
    """Turns what is not called odd into Relu."""
    if node.name == "odd":
        raise NotCollapsibleError("it is odd")
    editor.become(node, "Relu", list(node.inputs))


def net(opset: int = 17) -> onnx.ModelProto:
    graph = Net.over([2], opset=opset)
    odd = graph.op("Neg", [graph.op("Abs", ["x"], name="first")], name="odd")
    return graph.of(graph.op("Abs", [odd], name="last"))


def test_one_that_stays_holds_up_no_other_and_says_why():
    model = net()
    result = to_relu(model)
    assert [node.op_type for node in model.graph.node] == ["Relu", "Neg", "Relu"]
    assert result.notes == ("2 nodes became Relu.", "1 nodes stay ('odd': it is odd).")


def test_below_its_operator_set_nothing_is_done():
    model = net(opset=12)
    assert not to_relu(model).notes
    assert model == net(opset=12)
