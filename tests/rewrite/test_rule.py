"""A function that changes one node becomes a rewrite of all: what it is called, what it skips, what it says."""

from kenosis_ort.graph.view import ir
from kenosis_ort.rewrite.rule import Editor, NotCollapsibleError, rule
from tests.graph.build import ops
from tests.models import Net


@rule("Abs", "Neg", did="nodes became Relu", stays="nodes stay")
def to_relu(editor: Editor, node: ir.Node) -> None:
    """Turns what is not called odd into Relu."""
    if node.name == "odd":
        raise NotCollapsibleError("it is odd")
    editor.become(node, "Relu", list(node.inputs))


def test_one_that_stays_holds_up_no_other_and_says_why():
    graph = Net.over([2])
    odd = graph.op("Neg", [graph.op("Abs", ["x"])], name="odd")
    model = graph.of(graph.op("Abs", [odd]))
    result = to_relu(model)
    assert ops(model) == ["Relu", "Neg", "Relu"]
    assert result.notes == ("2 nodes became Relu.", "1 nodes stay ('odd': it is odd).")
