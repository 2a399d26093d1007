"""Models of other floating types become float32 inside and keep their interface."""

from string import Template

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st
from onnx import TensorProto

from kenosis_ort.graph.files import restore_interface
from kenosis_ort.graph.precision import compute_in_float32
from kenosis_ort.graph.walk import all_graphs, all_nodes
from tests.graph.build import assert_same, net, ready, run
from tests.models import normal

F16, F32, F64, BF16 = TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.BFLOAT16
NAMES = {F16: "float16", F32: "float", F64: "double", BF16: "bfloat16"}
TOLERANCE = {F16: 2e-2, F64: 1e-4}
X = np.ones((3, 4), np.float16)

STEPS = {
    "linear": "$o = MatMul($x, w)",
    "gemm": "$o = Gemm<alpha = 0.5>($x, w, b)",
    "tanh": "$o = Tanh($x)",
    # a float32 island in the middle; integers and back
    "island": "${o}c = Cast<to = 1>($x) ${o}s = Softmax<axis = -1>(${o}c) $o = Cast<to = $k>(${o}s)",
    "whole": "${o}m = Mul($x, nil) ${o}i = Cast<to = 7>(${o}m) ${o}f = Cast<to = $k>(${o}i) $o = Add($x, ${o}f)",
    "constants": """${o}n = Shape($x) ${o}h = ConstantOfShape<value = $t[1] {$half}>(${o}n)
        ${o}c = Constant<value = $t {$half}>() ${o}m = Mul(${o}h, ${o}c)
        ${o}s = Sub($x, ${o}c) $o = Add(${o}m, ${o}s)""",
    # of a constant: ONNX's shape inference dies of an EyeLike whose input has no type
    "eye": "${o}e = EyeLike<dtype = $k>(square) $o = Add($x, ${o}e)",
    "like": "${o}z = CastLike(zeros, $x) ${o}g = Greater($x, ${o}z) ${o}n = Neg($x) $o = Where(${o}g, $x, ${o}n)",
    "norm": "$o = LayerNormalization($x, b, b)",
    # a captured value, a weight and a constant of its own
    "branch": """${o}f = Cast<to = 1>($x) ${o}a = Abs(${o}f) ${o}r = ReduceSum<keepdims = 0>(${o}a)
        ${o}p = Greater(${o}r, limit) $o = If(${o}p) <
        then_branch = t () => ($t[N,4] ${o}q) <$t[4,4] ${o}w = {$halves}> { ${o}q = MatMul($x, ${o}w) },
        else_branch = e () => ($t[N,4] ${o}q) { ${o}c = Constant<value = $t {$half}>() ${o}q = Mul($x, ${o}c) }>""",
    "loop": """$o = Loop(three, "", $x) <body = b (int64 ${o}i, bool ${o}k, $t[N,4] ${o}s)
        => (bool ${o}g, $t[N,4] ${o}n) { ${o}n = Tanh(${o}s) ${o}g = Identity(${o}k) }>""",
    "sequence": "${o}e = SequenceEmpty<dtype = $k>() ${o}s = SequenceInsert(${o}e, $x) $o = SequenceAt(${o}s, first)",
    "optional": "${o}p = Optional<type = $t[N,4]>($x) $o = OptionalGetElement(${o}p)",
    "contrib": "$o = com.microsoft.QuickGelu<alpha = 1.0>($x)",
    # a function of the model whose caller names the type
    "function": "$o = local.Through<kind = $k>($x)",
}
"""What may come next: a value ``$o`` of ``$x``, both [N, 4] of type ``$t``, whose number is ``$k``."""

ONLY = {"contrib": F16, "eye": F64}
"""What the runtime computes in one of the types."""

_FUNCTION = """<domain: "local", opset_import: ["" : 18]> Through <kind> (s) => (u)
    { t = Cast<to = 1>(s) u = Cast<to: int = @kind>(t) }"""


def step(kind, name, out, x):
    half = {F16: 0x3800, F64: 0.5}[kind]
    return Template(STEPS[name]).substitute(
        o=out, x=x, t=NAMES[kind], k=kind, half=half, halves=", ".join([f"{half}"] * 16)
    )


def typed(kind, body, outputs="y", *, inputs="", seed=0, more=""):
    """A model of an input ``x``; outputs that have no type have that of ``x`` and its shape, [N, 4]."""
    t = NAMES[kind]
    outs = ", ".join(out if " " in out else f"{t}[N,4] {out}" for out in outputs.split(", "))
    held = f"{t}[4,4] w, {t}[4] b, {t} nil, float[4] zeros, int64[3,4] square, float limit, int64 three, int64 first"
    known = {"nil": 0, "zeros": np.zeros(4), "three": 3, "limit": 5 * (seed % 2), "w": normal((4, 4), seed) / 2}
    text = f"({t}[N,4] x{inputs}) => ({outs}) <{held}{more}> {{ {body} }} {_FUNCTION}"
    return net(text, known, opset=18, ir_version=9, seed=seed, domains=("com.microsoft", "local", "secret"))


def declared(model):
    return [(v.name, v.type.SerializeToString()) for v in (*model.graph.input, *model.graph.output)]


def inner_types(model):
    """Element types of what is stored, of what attributes name and of what bodies declare."""
    tensors = [t.data_type for g in all_graphs(model.graph) for t in g.initializer]
    attributes = [a for n in all_nodes(model) for a in n.attribute if not n.name.endswith("_Cast")]
    named = [a.i for a in attributes if a.name in ("to", "dtype", "kind")] + [a.t.data_type for a in attributes]
    named += [a.tp.tensor_type.elem_type for a in attributes]
    bodies = [v.type.tensor_type.elem_type for g in list(all_graphs(model.graph))[1:] for v in (*g.input, *g.output)]
    return {*tensors, *named, *bodies}


def converted(model):
    """The prepared model; the one given is not changed."""
    before = model.SerializeToString(deterministic=True)
    result = ready(model)
    assert (model.SerializeToString(deterministic=True), declared(result.proto)) == (before, declared(model))
    assert any("inside it is float32" in note for note in result.notes)
    onnx.checker.check_model(result.proto)
    return result.proto


def casts(model):
    """The operators, of casts with the type."""
    return " ".join(f"to {NAMES[n.attribute[0].i]}" if n.op_type == "Cast" else n.op_type for n in model.graph.node)


@given(
    kind=st.sampled_from([F16, F64]), steps=st.lists(st.sampled_from([*STEPS]), min_size=1, max_size=6),
    also=st.booleans(), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_any_mix_of_operators_computes_the_same(kind, steps, also, seed):
    steps = ["linear", *(name for name in steps if ONLY.get(name, kind) == kind)]
    values = ["x", *(f"v{at}" for at in range(len(steps)))]
    body = " ".join(step(kind, name, o, x) for name, x, o in zip(steps, values[:-1], values[1:], strict=True))
    outputs = [*(values[1:-1] if also else []), "y"]
    model = typed(kind, f"{body} y = Identity({values[-1]})", ", ".join(outputs), seed=seed)
    changed = converted(model)
    assert kind not in inner_types(changed)
    x = normal(X.shape, seed).astype({F16: np.float16, F64: np.float64}[kind])
    assert_same(model, changed, {"x": x}, rtol=TOLERANCE[kind], least=1.0)


# ---- edges --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "body", "outputs", "more", "expected"), [
    (F16, "m = MatMul(x, w) r = Relu(m) y = Add(r, stored)", "x, float16[3,4] stored, m, m, y",
     ", float16[3,4] stored", "to float MatMul Relu Add to float16 to float16"),
    (F16, step(F16, "branch", "y", "x"), "y", "", "to float Identity Abs ReduceSum Greater If to float16"),
    (F16, "l = MatMul(x, w) d = Cast<to = 11>(l) e = Exp(d) h = Cast<to = 10>(e) y = MatMul(h, w)", "y", "",
     "to float MatMul to double Exp to float MatMul to float16"),
    (F16, "l = MatMul(x, w) s = secret.Secret(l) y = MatMul(s, w)", "y", ", float16[N,4] s",
     "to float MatMul to float16 Secret to float MatMul to float16"),
    (BF16, "l = MatMul(x, w) y = Relu(l)", "y", "", "to float MatMul Relu to bfloat16"),
], ids=["inputs, constants and inner values as outputs, even twice", "an input that only a body reads",
        "double islands", "a custom operator", "bfloat16"])  # fmt: skip
def test_casts_stand_at_the_edges_and_where_a_node_keeps_its_type(kind, body, outputs, more, expected):
    model = typed(kind, body, outputs, more=more)
    changed = converted(model)
    assert casts(changed) == expected
    if "Secret" not in body and kind == F16:
        assert_same(model, changed, {"x": X}, rtol=TOLERANCE[F16], least=1.0)


def test_an_input_with_a_default_value_keeps_it():
    model = typed(F16, "y = MatMul(x, w)", inputs=", float16[4,4] v")
    model.graph.node[0].input[1] = "v"
    default = next(t for t in model.graph.initializer if t.name == "w")
    default.name = "v"
    result = ready(model, keep_inputs=["v"]).proto
    restore_interface(result, model)
    assert declared(result) == declared(model)
    for extra in ({}, {"v": np.eye(4, dtype=np.float16)}):
        np.testing.assert_allclose(run(result, {"x": X, **extra})[0], run(model, {"x": X, **extra})[0], rtol=1e-2)


def test_sequences_at_the_edges_keep_the_whole_model():
    body = "l = MatMul(x, w) z = SequenceAt(many, first) pair = SequenceConstruct(l, z)"
    result = ready(typed(F16, body, "x, seq(float16[]) pair", inputs=", seq(float16[]) many"))
    assert any("stays so: 'many' is no tensor" in note for note in result.notes)
    assert F16 in {t.data_type for t in result.proto.graph.initializer}


# ---- nodes that keep the type -------------------------------------------------------------------------------------


def test_numbers_become_text_in_their_own_type():
    body = "i = Identity(x) text = Cast<to = 8>(i) n = Cast<to = 10>(text) y = MatMul(n, w)"
    model = typed(F16, body, "y, string[N,4] text")
    tenth = np.full(X.shape, 0.1, np.float16)
    want, got = run(model, {"x": tenth}), run(converted(model), {"x": tenth})
    assert got[1].tolist() == want[1].tolist()
    np.testing.assert_allclose(got[0], want[0], rtol=1e-2)


def test_a_custom_operator_in_a_body_keeps_the_whole_model():
    branch = step(F16, "branch", "y", "l").replace(" MatMul(l, yw)", " secret.Secret(l)")
    result = ready(typed(F16, f"l = MatMul(x, w) {branch}"))
    assert any("stays so: 'Secret_" in note for note in result.notes)
    assert F16 in {t.data_type for t in result.proto.graph.initializer}


# ---- what is left alone, and other types --------------------------------------------------------------------------


def test_float32_models_with_double_in_between_are_left_alone():
    model = typed(F32, "l = MatMul(x, w) d = Cast<to = 11>(l) f = Floor(d) y = Cast<to = 1>(f)")
    assert compute_in_float32(model) == (None, None)
    assert casts(ready(model).proto) == "MatMul to double Floor to float"


def test_numbers_beyond_float32_become_the_largest():
    text = """(double[N,4] x) => (double[N,4] y) <double[4,4] w, double huge, double least>
    { l = MatMul(x, w) m = Min(l, huge) y = Max(m, least) }"""
    model = net(text, {"huge": 1.7e308, "least": -np.inf})
    assert_same(model, converted(model), {"x": np.ones((3, 4))}, rtol=TOLERANCE[F64])


@pytest.mark.parametrize("kind", ["float16", "double"])
def test_nothing_to_compute_is_nothing_to_convert(kind):
    assert compute_in_float32(net(f"({kind}[N,4] x) => ({kind}[N,4] y) {{ y = Relu(x) }}")) == (None, None)


@pytest.mark.parametrize(("declared", "body", "kind"), [
    ("<float16[1,1] h = {15360}>", "m = MatMul(h, h) o = Cast<to = 1>(m)", "float"),
    ("", "h = Constant<value = float16[1,1] {15360}>() m = MatMul(h, h) o = Cast<to = 1>(m)", "float"),
    ("", "h = Cast<to = 10>(x) m = MatMul(h, h) o = Cast<to = 1>(m)", "float"), ("", "o = secret.Secret(x)", "float16"),
], ids=["stored", "constant", "attribute", "declared"])  # fmt: skip
def test_what_only_a_body_says_of_the_type_counts(declared, body, kind):
    branch = f"() => ({kind}[4,4] o) {declared} {{ {body} }}"
    text = f"""(float[4,4] x, bool c) => (float[4,4] y)
    {{ p = If(c) <then_branch = t {branch}, else_branch = e {branch}> m = MatMul(p, p) y = Cast<to = 1>(m) }}"""
    model = onnx.shape_inference.infer_shapes(net(text, opset=18, domains=("secret",)))
    assert "computes in float16" in str(compute_in_float32(model)[1])
