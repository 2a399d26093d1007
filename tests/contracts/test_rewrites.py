"""What every rewrite has to hold, on its own example and on what may surround it."""

import onnx
import onnx.compose
import onnx.parser
import pytest
from onnx import TensorProto, helper

from kenosis_ort.graph import outside, shapes
from kenosis_ort.rewrite.attention import ATTENTION_OPSET
from kenosis_ort.rewrite.rule import NotCollapsibleError, rule as rewrite
from tests import models, planning
from tests.contracts import rules
from tests.contracts.rules import EXAMPLES, KERNELS, NAMED, RULES, example, net, prepared
from tests.flow.support import typed
from tests.graph.build import assert_same, ops
from tests.targets.qdq import kernels

ATTENTION = pytest.mark.since("1.24")  # before, the runtime quantizes no operator set that has the operator
each_rule = pytest.mark.parametrize(
    "rule", [pytest.param(rule, marks=ATTENTION) if rule == "fuse_attention" else rule for rule in RULES]
)


def apply(rule, model, *, keep=(), nodes=None):
    """Applies a rule to a model, all nodes named where it wants names, and infers its shapes again."""
    given = {n.name for n in model.graph.node} if nodes is None and rule in NAMED else nodes
    result = RULES[rule](model, keep_values=keep, **({} if given is None else {"nodes": given}))
    shapes.infer_shapes(model)
    return result


def assert_computes_the_same(before, after):
    onnx.checker.check_model(after)
    assert_same(before, after, models.feeds(before, 1)[0], rtol=1e-4)


def inner(model):
    """Returns the float values between nodes."""
    floats = {v.name for v in model.graph.value_info if v.type.tensor_type.elem_type == TensorProto.FLOAT}
    return [name for node in model.graph.node for name in node.output if name in floats]


def with_output(model, value):
    """Returns a copy of a model with one more output."""
    copy = outside.copy_model(model)
    known = [v for v in copy.graph.value_info if v.name == value]
    copy.graph.output.append(known[0] if known else helper.make_tensor_value_info(value, TensorProto.FLOAT, None))
    return copy


def read_by(node, model, value):
    """Returns a copy of a model with a node ``also`` that reads a value."""
    copy = outside.copy_model(model)
    copy.graph.node.append(onnx.parser.parse_node(node.format(value)))
    if "open" in node:
        copy.graph.input.append(helper.make_tensor_value_info("open", TensorProto.BOOL, []))
    return with_output(copy, "also")


BODY = "() => (float[] in_body) {{ [in_body] in_body = Abs({0}) }}"
READERS = ("[also] also = Abs({0})", f"[also] also = If(open) <then_branch = t {BODY}, else_branch = e {BODY}>")


def surrounded(rule):
    """Yields forms of a rule's example in which something outside of the pattern needs a value or a constant of it."""
    plain = example(rule)
    constants = [t.name for t in plain.graph.initializer if t.data_type == TensorProto.FLOAT]
    yield from ((value, with_output(plain, value)) for value in inner(plain))
    for value in (*inner(plain), *constants):
        yield from ((value, read_by(reader, plain, value)) for reader in READERS)


@each_rule
def test_it_changes_its_example_and_a_second_time_finds_nothing(rule):
    before = example(rule)
    after = outside.copy_model(before)
    result = apply(rule, after)
    assert " ".join(ops(after)) == EXAMPLES[rule][0]
    assert_computes_the_same(before, after)
    assert list(after.graph.input) == list(before.graph.input)
    assert list(after.graph.output) == list(before.graph.output)
    left = [n.name for n in after.graph.node]
    assert len(set(left)) == len(left)
    assert {n.name for n in before.graph.node} - {*left} <= set(result.merged), "what is gone is accounted for"
    assert {by for by in result.merged.values() if by} <= {*left}
    assert result.notes, "what is changed is told"
    assert all(note.strip() == note and note for note in result.notes)
    stored = after.SerializeToString(deterministic=True)
    assert apply(rule, after).merged == {}
    assert after.SerializeToString(deterministic=True) == stored
    again = example(rule)
    apply(rule, again)
    assert again.SerializeToString(deterministic=True) == stored, "nothing is left between calls"


@each_rule
def test_what_is_needed_outside_of_the_pattern_stays_what_it_is(rule):
    for value, before in surrounded(rule):
        after = outside.copy_model(before)
        apply(rule, after)
        try:
            assert_computes_the_same(before, after)
        except Exception as error:
            raise AssertionError(f"{rule} does not respect who reads '{value}'") from error


@each_rule
def test_values_to_keep_stay_with_their_meaning(rule):
    before = example(rule)
    for value in inner(before):
        after = outside.copy_model(before)
        apply(rule, after, keep=[value])
        assert_computes_the_same(with_output(before, value), with_output(after, value))


def extend(model, rule, prefix, opset=0):
    """Adds the example of a rule to a model, beside what it has; returns what was added."""
    part = onnx.compose.add_prefix(example(rule, opset=opset), prefix)
    for field in ("node", "initializer", "input", "output", "value_info"):
        getattr(model.graph, field).extend(getattr(part.graph, field))
    return part


@each_rule
def test_only_named_nodes_change(rule):
    first, both = example(rule), example(rule)
    second = extend(both, rule, "second_")
    apply(rule, both, nodes={node.name for node in second.graph.node})
    assert list(both.graph.node)[: len(first.graph.node)] == list(first.graph.node)
    assert " ".join(ops(both)[len(first.graph.node) :]) == EXAMPLES[rule][0]


@each_rule
def test_other_types_stay(rule):
    before = typed(example(rule), TensorProto.DOUBLE)
    after = outside.copy_model(before)
    apply(rule, after)
    assert (after.graph.node == before.graph.node) == (rule not in rules.ANY_TYPE)


def assert_stays(rule, before, reason):
    after = outside.copy_model(before)
    notes = apply(rule, after).notes
    assert after.graph.node == before.graph.node
    assert [reason in note for note in notes] == ([True] if reason else []), notes


@pytest.mark.parametrize(("rule", "old", "new", "reason"), rules.NEAR_MISSES)
def test_a_near_match_stays_and_says_why(rule, old, new, reason):
    assert_stays(rule, example(rule, old, new), reason)


@pytest.mark.parametrize(("rule", "text", "reason"), rules.OTHER_NETS)
def test_another_net_stays_and_says_why(rule, text, reason):
    assert_stays(rule, prepared(net(text)), reason)


@pytest.mark.parametrize("rule", ["batch_norm_to_conv", "pool_from_mean", "space_to_depth_stem", "pad_stem_channels"])
def test_an_unknown_rank_stays(rule):
    before = example(rule)
    for value in (*before.graph.input, *before.graph.output, *before.graph.value_info):
        value.type.tensor_type.ClearField("shape")
    assert_stays(rule, before, "rank of")


def kernels_of(model):
    """Returns the kernels that the installed runtime has for a model once it is quantized."""
    found = [k.op_type for k in kernels(planning.quantize(model, protect_outputs=None).quantized)]
    return " ".join(kind for kind in found if kind not in ("QuantizeLinear", "DequantizeLinear", "Transpose"))


@pytest.mark.parametrize("rule", KERNELS)
def test_it_leads_to_the_kernels_that_it_is_for(rule):
    expected, text = KERNELS[rule]
    text = text if "=>" in text else rules.between_convs(text)
    model = prepared(net(text, rules.OPSETS.get(rule, 17)))
    assert kernels_of(model) != expected
    apply(rule, model)
    assert kernels_of(model) == expected


@ATTENTION
def test_all_of_them_in_a_row():
    before = prepared(net("(float[2] start) => (float[2] end) { end = Neg(start) }", opset=ATTENTION_OPSET))
    for rule in RULES:
        extend(before, rule, f"{rule}_", ATTENTION_OPSET)
    after = outside.copy_model(before)
    for rule in RULES:
        apply(rule, after)
    assert_same(before, after, models.feeds(before, 1)[0], rtol=1e-3)
    kinds = {n.op_type for n in after.graph.node}
    assert not kinds & {"Identity", "Dropout", "BatchNormalization", "Sum", "Sigmoid", "Erf", "Softmax", "If", "LRN"}
    assert {"Attention", "Gelu", "QuickGelu", "LayerNormalization", "RMSNormalization", "Gemm", "Conv"} <= kinds


@rewrite("Abs", "Neg", did="nodes became Relu", stays="nodes stay")
def to_relu(editor, node):
    """Turns what is not called odd into Relu."""
    if node.name == "odd":
        raise NotCollapsibleError("it is odd")
    editor.become(node, "Relu", list(node.inputs))


def test_one_that_stays_holds_up_no_other_and_says_why():
    graph = models.Net.over([2])
    odd = graph.op("Neg", [graph.op("Abs", ["x"])], name="odd")
    model = graph.of(graph.op("Abs", [odd]))
    result = to_relu(model)
    assert ops(model) == ["Relu", "Neg", "Relu"]
    assert result.notes == ("2 nodes became Relu.", "1 nodes stay ('odd': it is odd).")
