"""A function that changes one node becomes a rewrite of all: what it is called, what it skips, what it says."""

from __future__ import annotations

import onnx

from kenosis_ort.graph.view import ir
from kenosis_ort.rewrite import FLOAT_FORMS, PREPARATION
from kenosis_ort.rewrite.rule import Editor, NotCollapsibleError, rule
from tests.graph.build import ready, steps
from tests.models import Net
from tests.rewrite.forms import ops


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


def small_pieces(graph, y):
    """Conv and its norm, SiLU, GELU, hard swish, layer norm, one behind the other."""
    y = graph.batch_norm(graph.op("Identity", [graph.conv(y, 2, 2, k=1)]), 2)
    y = graph.op("Mul", [y, graph.op("Sigmoid", [y])])
    bend = graph.op("Erf", [graph.op("Div", [y, 2.0**0.5])])
    y = graph.op("Mul", [graph.op("Mul", [y, graph.op("Add", [bend, 1.0])]), 0.5])
    y = graph.op("Mul", [y, graph.op("Div", [graph.op("Clip", [graph.op("Add", [y, 3.0]), 0.0, 6.0]), 6.0])])
    d = graph.op("Sub", [y, graph.op("ReduceMean", [y], axes=[-1])])
    spread = graph.op("ReduceMean", [graph.op("Pow", [d, 2.0])], axes=[-1])
    return graph.op("Div", [d, graph.op("Sqrt", [graph.op("Add", [spread, 1e-5])])])


FORMS = ["Conv", "com.microsoft.QuickGelu", "com.microsoft.Gelu", "HardSwish", "LayerNormalization"]


def test_work_grows_with_the_number_of_nodes():
    def calls(blocks):
        graph = Net.over(["n", 2, 1, 8])
        y = "x"
        for _ in range(blocks):
            y = small_pieces(graph, y)
        found = []
        count = steps(lambda: found.append(ready(graph.of(y), rewrites=(*PREPARATION, *FLOAT_FORMS))))
        assert ops(found[0].proto) == FORMS * blocks
        return count

    assert calls(80) < 4.2 * calls(20)
