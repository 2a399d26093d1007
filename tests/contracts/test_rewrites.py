"""What every rewrite has to hold, on its own example and on what may surround it."""

from collections.abc import Callable, Collection, Iterator

import numpy as np
import onnx
import onnx.compose
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort.graph.outside import copy_model
from kenosis_ort.graph.shapes import infer_shapes
from kenosis_ort.rewrite.attention import ATTENTION_OPSET
from kenosis_ort.rewrite.rule import RewriteResult
from tests import models
from tests.contracts import rules
from tests.contracts.rules import EXAMPLES, KERNELS, NAMED, RULES, example, net, prepared
from tests.graph.build import assert_same, ops
from tests.planning import quantize
from tests.targets.qdq import kernels

OTHERS: dict[str, tuple[str, ...]] = {
    "fold_batch_norm": ("bn_net",),
    "collapse_silu": ("silu_net",),
    "collapse_gelu": ("transformer_block",),
    "fuse_attention": ("transformer_block",),
    "fold_scale": ("two_input_detector",),
    "batch_norm_to_conv": ("bn_net",),
    "space_to_depth_stem": ("two_input_detector",),
    "pad_stem_channels": (
        "residual_block", "mobile_block", "silu_net", "bn_net", "two_input_detector", "net_with_if"
    ),
}  # fmt: skip
"""The shared nets in which a rewrite finds something to do."""
each_rule = pytest.mark.parametrize("rule", RULES)


def apply(
    rule: str, model: onnx.ModelProto, *, keep: Collection[str] = (), nodes: Collection[str] | None = None
) -> RewriteResult:
    """Applies a rule to a model, all nodes named where it wants names, and infers its shapes again."""
    given = {n.name for n in model.graph.node} if nodes is None and rule in NAMED else nodes
    result = RULES[rule](model, keep_values=keep, **({} if given is None else {"nodes": given}))
    infer_shapes(model)
    return result


def assert_computes_the_same(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    onnx.checker.check_model(after)
    assert_same(before, after, models.feeds(before, 1)[0], rtol=1e-4)


def inner(model: onnx.ModelProto) -> list[str]:
    """Returns the float values between nodes."""
    floats = {v.name for v in model.graph.value_info if v.type.tensor_type.elem_type == TensorProto.FLOAT}
    return [name for node in model.graph.node for name in node.output if name in floats]


def with_output(model: onnx.ModelProto, value: str) -> onnx.ModelProto:
    """Returns a copy of a model with one more output."""
    copy = copy_model(model)
    info = next((v for v in copy.graph.value_info if v.name == value), None)
    copy.graph.output.extend([helper.make_tensor_value_info(value, TensorProto.FLOAT, None) if info is None else info])
    return copy


def read_by_node(model: onnx.ModelProto, value: str) -> onnx.ModelProto:
    copy = copy_model(model)
    copy.graph.node.append(onnx.parser.parse_node(f"[also] also = Abs({value})"))
    return with_output(copy, "also")


def read_by_body(model: onnx.ModelProto, value: str) -> onnx.ModelProto:
    """Returns a copy of a model in which the body of an If reads a value."""
    copy = copy_model(model)
    body = f"() => (float[] in_body) {{ [in_body] in_body = Abs({value}) }}"
    copy.graph.input.append(helper.make_tensor_value_info("open", TensorProto.BOOL, []))
    copy.graph.node.append(
        onnx.parser.parse_node(f"[also] also = If(open) <then_branch = t {body}, else_branch = e {body}>")
    )
    return with_output(copy, "also")


def surrounded(rule: str) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Yields forms of a rule's example in which something outside of the pattern needs a value or a constant of it."""
    plain = example(rule)
    constants = [t.name for t in plain.graph.initializer if t.data_type == TensorProto.FLOAT]
    for value in inner(plain):
        yield value, with_output(plain, value)
    for value in (*inner(plain), *constants):
        yield value, read_by_node(plain, value)
        yield value, read_by_body(plain, value)


@each_rule
def test_it_changes_its_example_and_a_second_time_finds_nothing(rule: str) -> None:
    before = example(rule)
    after = copy_model(before)
    result = apply(rule, after)
    assert " ".join(ops(after)) == EXAMPLES[rule][0]
    assert_computes_the_same(before, after)
    assert [v.name for v in after.graph.input] == [v.name for v in before.graph.input]
    assert [v.name for v in after.graph.output] == [v.name for v in before.graph.output]
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
def test_what_is_needed_outside_of_the_pattern_stays_what_it_is(rule: str) -> None:
    for value, before in surrounded(rule):
        after = copy_model(before)
        apply(rule, after)
        try:
            assert_computes_the_same(before, after)
        except Exception as error:
            raise AssertionError(f"{rule} does not respect who reads '{value}'") from error


@each_rule
def test_values_to_keep_stay_with_their_meaning(rule: str) -> None:
    before = example(rule)
    for value in inner(before):
        after = copy_model(before)
        apply(rule, after, keep=[value])
        assert_computes_the_same(with_output(before, value), with_output(after, value))


@each_rule
def test_only_named_nodes_change(rule: str) -> None:
    first = example(rule)
    second = onnx.compose.add_prefix(first, "second_")
    both = copy_model(first)
    for field in ("node", "initializer", "input", "output", "value_info"):
        getattr(both.graph, field).extend(getattr(second.graph, field))
    apply(rule, both, nodes={node.name for node in second.graph.node})
    assert list(both.graph.node)[: len(first.graph.node)] == list(first.graph.node)
    assert " ".join(ops(both)[len(first.graph.node) :]) == EXAMPLES[rule][0]


@each_rule
def test_other_types_stay(rule: str) -> None:
    before = example(rule)
    for tensor in before.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            array = numpy_helper.to_array(tensor).astype(np.float64)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    for value in (*before.graph.input, *before.graph.output, *before.graph.value_info):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    after = copy_model(before)
    apply(rule, after)
    assert (after.graph.node == before.graph.node) == (rule not in rules.ANY_TYPE)


def assert_stays(rule: str, before: onnx.ModelProto, reason: str) -> None:
    after = copy_model(before)
    notes = apply(rule, after).notes
    assert after.graph.node == before.graph.node
    assert [reason in note for note in notes] == ([True] if reason else []), notes


@pytest.mark.parametrize(("rule", "old", "new", "reason"), rules.NEAR_MISSES)
def test_a_near_match_stays_and_says_why(rule: str, old: str, new: str, reason: str) -> None:
    assert_stays(rule, example(rule, old, new), reason)


@pytest.mark.parametrize(("rule", "text", "reason"), rules.OTHER_NETS)
def test_another_net_stays_and_says_why(rule: str, text: str, reason: str) -> None:
    assert_stays(rule, prepared(net(text)), reason)


@pytest.mark.parametrize("rule", ["batch_norm_to_conv", "pool_from_mean", "space_to_depth_stem", "pad_stem_channels"])
def test_an_unknown_rank_stays(rule: str) -> None:
    before = example(rule)
    for value in (*before.graph.input, *before.graph.output, *before.graph.value_info):
        value.type.tensor_type.ClearField("shape")
    assert_stays(rule, before, "rank of")


@each_rule
def test_a_model_without_its_pattern_stays_as_it_is(rule: str) -> None:
    for name in models.ALL.keys() - set(OTHERS.get(rule, ())):
        before = prepared(models.ALL[name]())
        after = copy_model(before)
        given = {"nodes": {n.name for n in after.graph.node}} if rule in NAMED else {}
        assert RULES[rule](after, keep_values=(), **given).merged == {}, name  # notes may say why not
        assert after == before, name


@pytest.mark.parametrize(("rule", "name"), [(rule, name) for rule, names in OTHERS.items() for name in names])
def test_the_shared_nets_compute_the_same(rule: str, name: str) -> None:
    builders: dict[str, Callable[[], onnx.ModelProto]] = models.ALL
    before = prepared(builders[name]())
    after = copy_model(before)
    assert apply(rule, after).notes
    assert before.graph.node != after.graph.node
    assert_computes_the_same(before, after)


def kernels_of(model: onnx.ModelProto) -> str:
    """Returns the kernels that the installed runtime has for a model once it is quantized."""
    found = [k.op_type for k in kernels(quantize(model, protect_outputs=None).quantized)]
    return " ".join(kind for kind in found if kind not in ("QuantizeLinear", "DequantizeLinear", "Transpose"))


@pytest.mark.parametrize("rule", KERNELS)
def test_it_leads_to_the_kernels_that_it_is_for(rule: str) -> None:
    expected, text = KERNELS[rule]
    model = prepared(net(text, rules.OPSETS.get(rule, 17)))
    assert kernels_of(model) != expected
    apply(rule, model)
    assert kernels_of(model) == expected


def test_all_of_them_in_a_row() -> None:
    before = prepared(net("(float[2] start) => (float[2] end) { end = Neg(start) }", opset=ATTENTION_OPSET))
    for rule in RULES:
        part = onnx.compose.add_prefix(example(rule, opset=ATTENTION_OPSET), f"{rule}_")
        for field in ("node", "initializer", "input", "output", "value_info"):
            getattr(before.graph, field).extend(getattr(part.graph, field))
    after = copy_model(before)
    for rule in RULES:
        apply(rule, after)
    assert_same(before, after, models.feeds(before, 1)[0], rtol=1e-3)
    kinds = {n.op_type for n in after.graph.node}
    assert not kinds & {"Identity", "Dropout", "BatchNormalization", "Sum", "Sigmoid", "Erf", "Softmax", "If", "LRN"}
    assert {"Attention", "Gelu", "QuickGelu", "LayerNormalization", "RMSNormalization", "Gemm", "Conv"} <= kinds
