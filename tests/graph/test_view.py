"""A net as it is looked at: readers, bodies, operators, which outputs are the next states, a file at a glance."""

import numpy as np
import onnx
import pytest

from kenosis_ort import quantize_static
from kenosis_ort.graph.bodies import state_pairs, state_stem
from kenosis_ort.graph.constants import BOUNDS, OPERATORS, Is, having, what
from kenosis_ort.graph.summary import TensorSummary, summarize
from kenosis_ort.graph.view import CAPTURED, GraphView
from kenosis_ort.graph.walk import known_as
from kenosis_ort.quantizer.stock import QuantFormat
from tests import models
from tests.graph.build import net, run
from tests.planning import parse, view_of


def test_consumers_and_the_sole_one():
    v = view_of("net (float[1,3] x) => (y, z, o) { a = Neg (x) o = Abs (x) y = Relu (a) b = Abs (o) z = Add (b, b) }")
    a, o, b = (v.node(n).outputs[0] for n in ("Neg_a", "Abs_o", "Abs_b"))
    assert [(c.node.name, c.index) for c in v.consumers(v.inputs[0])] == [("Neg_a", 0), ("Abs_o", 0)]
    assert v.sole_consumer(a).node.name == "Relu_y"
    assert v.sole_consumer(o) is None, "an output of the graph"
    assert v.sole_consumer(b) is None, "read twice by one node"
    assert (v.is_output(o), v.is_output(a), v.node("no such node")) == (True, False, None)


def test_shapes_constants_and_operator_sets():
    v = view_of("net (float[N,3] x) => (float[N,3] y) <float[3,2] w> { y = MatMul (x, w) }")
    (x,), w = v.inputs, v.nodes[0].inputs[1]
    assert (v.dims(x), v.rank(x), v.content(w).shape) == ((None, 3), 2, (3, 2))
    assert ([v.is_constant(value) for value in (x, w, None)], v.opset()) == ([False, True, False], 17)


def test_what_a_body_reads_is_consumed_by_its_owner():
    v = view_of(models.net_with_if())
    conv, relu = v.node("conv0").outputs[0], v.node("relu0").outputs[0]
    assert ("if", CAPTURED) in [(c.node.name, c.index) for c in v.consumers(conv)]
    assert [x.name for x in v.captured_by(v.node("if"))] == ["conv0_out"]
    assert v.sole_consumer(relu).node.name == "add"
    alone = view_of(models.net_with_if(capture_conv=False))
    assert alone.sole_consumer(alone.node("relu0").outputs[0]) is None


def test_what_a_nested_body_reads_is_consumed_by_the_outermost_owner():
    inner = "(float[1,3] q) { q = Abs (a) }"
    branch = f"r () => (float[1,3] p) {{ p = If (f) <then_branch = t () => {inner}, else_branch = e () => {inner}> }}"
    chosen = f"If (f) <then_branch = {branch}, else_branch = {branch}>"
    v = view_of(f"net (float[1,3] x, bool f) => (y) {{ a = Neg (x) y = {chosen} }}")
    a = v.nodes[0].outputs[0]
    assert [(c.node, c.index) for c in v.consumers(a)] == [(v.nodes[1], CAPTURED)]
    assert (v.is_pinned(a), v.sole_consumer(a), v.is_output(a)) == (True, None, False)
    assert {value.name for value in v.captured_by(v.nodes[1])} == {"f", "a"}


def test_operators_of_other_domains_go_by_their_full_names():
    """A rule about Relu must not take a custom Relu for one, and bound its range from below by 0."""
    names = {("own", "Relu"): "own.Relu", ("com.microsoft", "Pad"): "com.microsoft.Pad"}
    names |= {("com.microsoft", "Gelu"): "Gelu", ("com.microsoft", "BiasGelu"): "BiasGelu", ("", "Relu"): "Relu"}
    assert {(domain, op): known_as(domain, op) for domain, op in names} == names
    model = parse("net (float[1,3] x) => (y) { y = Relu (x) }")
    model.graph.node[0].domain = "own"
    model.opset_import.add(domain="own", version=1)
    assert (GraphView(model).nodes[0].op_type, model.graph.node[0].op_type) == ("own.Relu", "Relu")


def test_types_of_maps_are_read_past_and_kept():
    model = parse("net (float[1,3] x) => (y) { y = Relu (x) }")
    scalar = onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, [])
    described = onnx.helper.make_sequence_type_proto(onnx.helper.make_map_type_proto(onnx.TensorProto.INT64, scalar))
    model.graph.output.append(onnx.helper.make_value_info("z", described))
    model.graph.node.add(op_type="ZipMap", domain="ai.onnx.ml", input=["y"], output=["z"], name="zip")
    before = model.SerializeToString(deterministic=True)
    assert [o.name for o in GraphView(model).graph.outputs] == ["y", "z"]
    assert model.SerializeToString(deterministic=True) == before


# ---- what an operator is: the schema's word against the runtime's ----------------------------------------------------


CALLS = {
    "Reshape": "(x, to)", "Squeeze": "(x, first)", "Unsqueeze": "(x, first)", "Slice": "(x, one, four, two)",
    "Gather": "<axis = 1>(x, some)", "Expand": "(x, wide)", "Split": "<axis = 3, num_outputs = 2>(x)",
    "Tile": "(x, twice)", "PRelu": "(x, slope)", "Clip": "(x, low, high)", "DepthToSpace": "<blocksize = 2>(x)",
    "SpaceToDepth": "<blocksize = 2>(x)", "MaxPool": "<kernel_shape = [2, 2]>(x)",
    "AveragePool": "<kernel_shape = [2, 2]>(x)",
}  # fmt: skip
"""Calls that are more than ``(x)``."""

CONSTANTS = {
    "to": [1, 4, -1], "first": [0], "one": [1], "two": [2], "four": [4], "some": [1, 3, 1], "wide": [2, 4, 6, 6],
    "twice": [1, 2, 1, 1], "slope": np.float32([0.3]), "low": np.float32(-1), "high": np.float32(2),
}  # fmt: skip
OWN = {"FastGelu", "QuickGelu"}
BINARY = {"Add", "Sub", "Mul", "Div", "Max", "Min", "Mean", "Sum", "Pow"}
UNKNOWN = {"Swish"}  # younger than the operator set here
KINDS = (Is.ELEMENTWISE, Is.HOMOGENEOUS, Is.MOVE, Is.PICK)
ONE_INPUT = sorted({*BOUNDS}.union(*map(having, KINDS)) - BINARY - UNKNOWN)


def compute(op_type, x):
    outputs = "y, z" if op_type == "Split" else "y"
    call = ("com.microsoft." if op_type in OWN else "") + op_type + CALLS.get(op_type, "(x)")
    proto = net(f"(float[1,4,6,6] x) => (float[] y) {{ {outputs} = {call} }}", CONSTANTS, opset=20)
    assert what(proto.graph.node[0]) is OPERATORS.get(op_type, Is(0))
    return run(proto, {"x": x})[0]


@pytest.mark.parametrize("op_type", ONE_INPUT)
def test_what_the_table_says_holds(op_type):
    x = models.normal((1, 4, 6, 6), 1, 2)
    x = np.abs(x) if op_type == "Sqrt" else x
    y, is_ = compute(op_type, x), OPERATORS.get(op_type, Is(0))
    assert np.allclose(compute(op_type, 3 * x), 3 * y, rtol=1e-4, atol=1e-6) == (Is.HOMOGENEOUS in is_)
    if Is.ELEMENTWISE in is_:
        changed = x.copy()
        changed[0, 0, 0, 0] += 1
        assert (compute(op_type, changed) != y).sum() <= 1
    if Is.MOVE in is_:
        assert np.array_equal(np.sort(y, axis=None), np.sort(x, axis=None))
    if Is.FREE in is_:
        assert np.array_equal(y.ravel(), x.ravel())
    if Is.PICK in is_:
        assert x.min() <= y.min() <= y.max() <= x.max()
    if op_type in BOUNDS:
        low, high = BOUNDS[op_type]
        assert low <= y.min() <= y.max() <= high


def test_an_operator_of_another_domain_is_nothing():
    assert not what(onnx.NodeProto(op_type="Relu", domain="mine"))
    assert Is.ACTIVATION in what(onnx.NodeProto(op_type="Gelu", domain="com.microsoft"))


# ---- which outputs are the next values of which inputs, by their names -----------------------------------------------


@pytest.mark.parametrize(("past", "present"), [
    ("past_key", "present_key"), ("past_value", "present_value"), ("past_key_values.0.key", "present.0.key"),
    ("past_key_values.11.value", "present.11.value"), ("past_0_k", "present_0_k"), ("state", "stateN"),
    ("h_in", "h_out"), ("past_key_values", "present_key_values"), ("cache_3", "new_cache_3"),
    ("past.0.key", "present.0.key"), ("hidden_in", "hidden_out"),
])  # fmt: skip
def test_names_that_differ_in_time_alone_belong_together(past, present):
    assert state_stem(past) == state_stem(present) != ""


@pytest.mark.parametrize(("one", "other"), [
    ("past_key", "present_value"), ("past_key_values.0.key", "present.0.value"), ("past.1.key", "present.0.key"),
    ("logits", "past_key"), ("h0", "hn"), ("image", "boxes"), ("state", "output"),
])  # fmt: skip
def test_others_do_not(one, other):
    assert state_stem(one) != state_stem(other)


@pytest.mark.parametrize(("inputs", "outputs", "body", "pairs"), [
    ("past_key past_value", "present_key present_value", "",
     {"present_key": "past_key", "present_value": "past_value"}),
    ("input state", "output stateN", "", {"stateN": "state"}), ("past_h prev_h", "next_h", "", {}),
    ("state", "state_out new_state", "", {}),
    ("state more", "cat_1 stateN", "new = Neg(more) cat_1 = Concat<axis = 2>(state, new)", {"cat_1": "state"}),
    ("past_0 past_1 a b c", "cat_8 cat_9 both one other",
     """cat_9 = Concat<axis = 2>(past_0, new_0) cat_8 = Concat<axis = 2>(past_1, new_1)
     both = Concat<axis = 2>(a, b) one = Concat<axis = 2>(c, d) other = Concat<axis = 2>(c, d)""",
     {"cat_9": "past_0", "cat_8": "past_1"}),  # of two inputs it is no one's, nor of one twice
], ids=["of one layer", "nothing left of a name", "of two", "to two", "concatenated already",
        "concatenated, whatever they are called"])  # fmt: skip
def test_pairs_by_names(inputs, outputs, body, pairs):
    ins, outs = (", ".join(f"float[1,2,n,8] {name}" for name in names.split()) for names in (inputs, outputs))
    assert state_pairs(net(f"({ins}) => ({outs}) {{ {body} }}")) == pairs


def test_values_of_other_types_ranks_or_sizes_are_no_pair():
    for present in ("float16[1,2,n,8]", "float[2,n,8]", "float[1,2,n,4]"):
        assert not state_pairs(net(f"(float[1,2,n,8] past_key) => ({present} present_key) {{ }}"))


# ---- what a file holds, at a glance ----------------------------------------------------------------------------------


def small(weight, kind="float"):
    dims = ",".join(map(str, weight.shape))
    text = f"({kind}[batch,?,3] x, {kind}[{dims}] w) => ({kind}[] z) {{ y = MatMul(x, w) z = my.Foo(y) }}"
    model = net(text, {"w": weight}, domains=("my",))
    model.producer_name, model.producer_version = "me", "3"
    return model


def test_facts_of_a_small_model():
    found = summarize(small(np.zeros((3, 5), np.float32)))
    assert found.inputs == (TensorSummary("x", "float", ("batch", "?", 3)),)
    assert found.outputs == (TensorSummary("z", "float", None),)
    assert (found.operators, found.opsets) == ({"MatMul": 1, "my.Foo": 1}, {"ai.onnx": 17, "my": 1})
    assert (found.parameters, found.weight_bytes, found.weight_types) == (15, 60, {"float": 60})
    assert (found.producer, found.ir_version, found.quantization) == ("me 3", 8, "float")
    assert (found.is_float, found.path, found.to_dict()["inputs"][0]["name"]) == (True, "model 'net'", "x")


def test_bodies_and_external_weights_count(tmp_path):
    body = summarize(models.net_with_if())
    assert body.nodes == sum(body.operators.values()) > len(models.net_with_if().graph.node)
    model, path = small(np.zeros((300, 50), np.float32)), tmp_path / "m.onnx"
    onnx.save_model(model, path, save_as_external_data=True, size_threshold=0)
    found = summarize(path)
    assert (found.parameters, found.file_bytes) == (15_000, path.stat().st_size + 60_000)


@pytest.mark.parametrize(("how", "expected"), [({}, "QDQ"), ({"quant_format": QuantFormat.QOperator}, "QOperator")])
def test_what_was_quantized_is_told(how, expected, tmp_path):
    model, out = models.conv_relu_chain(2), tmp_path / "o.onnx"
    quantize_static(model, out, models.reader(model), recipe="plain", promise=False, **how)
    found = summarize(out)
    assert (found.quantization, found.is_float, found.file_bytes) == (expected, False, out.stat().st_size)


@pytest.mark.parametrize(("model", "expected", "types"), [
    (small(np.zeros((3, 5), np.float16), "float16"), "float16", {"float16": 30}),
    (net("(float[1,3] x) => (float[1,5] y) <int8[3,5] w, float s> { f = DequantizeLinear(w, s) y = MatMul(x, f) }"),
     "weights only", {"int8": 15, "float": 4}),
    (net("(uint8[2,3] x) => (int32[2,5] y) <int8[3,5] w> { y = MatMulInteger(x, w) }"),
     "dynamic or integer kernels", {"int8": 15}),
    (net("(float[1,3] x) => (float[1,3] y) <float s, float z, float b> { y = onnx.brevitas.Quant(x, s, z, b) }",
         domains=("onnx.brevitas",)), "QONNX", {"float": 12}),
])  # fmt: skip
def test_types_and_kernels_tell_it(model, expected, types):
    found = summarize(model)
    assert (found.quantization, found.weight_types, found.is_float) == (expected, types, expected == "float16")
