"""What the proof says of each node: its kernel, what that takes in and quantizes at load, and why it is float."""

import re

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from kenosis_ort.graph.qdq import SourceGraph
from kenosis_ort.plan import Kind, NodeDecision, PlacementPlan
from kenosis_ort.targets.ort_cpu.reasons import why_float
from kenosis_ort.verify import Cause, Status, verify_fusion
from tests.planning import parse
from tests.targets.qdq import MS, PRODUCERS, QdqGraph, build, produced
from tests.targets.test_precisions import _conv_int4_weight
from tests.verify.expect import one, report

CUSTOM = "com.microsoft."
NCHWC = "com.microsoft.nchwc.Conv"


def of(make):
    return report(build(make))


# ---- float kernels ------------------------------------------------------------------------------------------------

INPUTS = (
    "float[1,16,12,12] x, float[4,8,16] k, float[2,8] u, float[2,16] i, float[2,4,8] l, float[2,4,8] z, float[N,8] j"
)
CONV = "Conv <pads = [1,1,1,1]>"
KNOWN = {
    **{name: np.float32(v) for name, v in (("two", 2), ("twice", 2), ("half", 0.5), ("third", 0.3), ("one", 1))},
    **{name: np.float32(v) for name, v in (("zero", 0), ("six", 6), ("root", 2**0.5), ("tiny", 1e-5))},
    "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
    "first": np.array([0]),
    "rest": np.array([2, 4]),
    "s": np.linspace(0.5, 1.5, 16, dtype=np.float32),
}
FLOAT = {
    "a Conv takes in all that is behind it": (
        f"c = {CONV} (x, w, b) n = BatchNormalization (c, s, s, s, s) a = Add (n, add) y = Clip (a, zero, six)",
        f"c: {NCHWC}, n: in c, a: in c, y: in c"),
    "a sum goes to the Conv that adds it": (
        f"c = {CONV} (x, w, b) d = {CONV} (x, v, b) a = Add (c, d) y = Relu (a)",
        f"c: {NCHWC}, d: {NCHWC}, a: in ([cd]), y: in \\1"),
    "be it not the last one in the file": (
        (f"c = {CONV} (x, w, b) e = Relu (c) d = {CONV} (e, v, b) g = {CONV} (x, v, b) a = Add (d, g) r = Relu (a) "
         f"y = {CONV} (r, w, b)"),
        f"c: {NCHWC}, e: in c, d: {NCHWC}, g: {NCHWC}, a: in d, r: in d, y: {NCHWC}"),
    "a norm that is written in arithmetic": (
        ("m = ReduceMean <axes = [-1]> (k) d = Sub (k, m) p = Pow (d, two) q = ReduceMean <axes = [-1]> (p) a = Add "
         "(q, tiny) r = Sqrt (a) n = Div (d, r) f = Mul (n, b) y = Add (f, s)"),
        r"(\w: in f, ){7}f: LayerNormalization, y: in f"),
    "a Gelu that is, behind a bias": (
        ("p = MatMul (k, square) g = Add (p, b) d = Div (g, root) e = Erf (d) o = Add (e, one) m = Mul (g, o) "
         "y = Mul (m, half)"),
        rf"p: Gemm, g: in p, (\w: in y, ){{4}}y: {CUSTOM}Gelu"),
    "an operator that is a function keeps all kernels of its body": (
        "h = HardSwish (u) y = HardSwish (h)", r"h: HardSigmoid \+ Mul, y: HardSigmoid \+ Mul"),
    "a Pad goes into its Conv": (f"p = Pad (x, pads) y = {CONV} (p, w, b)", f"p: in y, y: {NCHWC}"),
    "identical nodes are computed once": (
        "e = Exp (u) f = Exp (u) a = Abs (f) y = Add (e, a)", "(e: Exp, f: as e|e: as f, f: Exp), a: Abs, y: Add"),
    "and chains of them, with constants of other names": (
        "e = Exp (u) f = Div (e, two) g = Exp (u) h = Div (g, twice) a = Abs (h) y = Sub (f, a)",
        "(e: Exp, f: Div, g: as e, h: as f|e: as g, f: as h, g: Exp, h: Div), a: Abs, y: Sub"),
    "a product takes in factors and a Transpose": (
        "m = Mul (l, half) t = Transpose <perm = [0,2,1]> (z) p = MatMul (m, t) y = Mul (p, third)",
        f"m: in p, t: removed, p: {CUSTOM}FusedMatMul, y: in p"),
    "what is constant is computed at load": (
        "m = Mul (s, two) n = Neg (m) y = Sub (i, n)", "m: once, n: once, y: Sub"),
    "arithmetic on shapes is not float": (
        "a = Shape (j) g = Gather (a, first) c = Concat <axis = 0> (g, rest) e = Exp (j) y = Reshape (e, c)",
        "a: other, g: other, c: other, e: Exp, y: Reshape"),
}  # fmt: skip
WEIGHTS = "float[16,16,3,3] w, float[16,16,3,3] v, float[16] b, float[1,16,1,1] add, float[16,16] square"


def named(body):
    """The model of some nodes, which are named after what they write."""
    model = parse(f"({INPUTS}) => (y) <{WEIGHTS}> {{ {body} }}", KNOWN)
    for node in model.graph.node:
        node.name = node.output[0]
    return model


def told(kernel):
    if kernel.absorbed_into is not None:
        return f"{'as' if 'identical' in kernel.reason else 'in'} {kernel.absorbed_into}"
    if kernel.status is Status.REMOVED and "computed once" in kernel.reason:
        return "once"
    return kernel.status.value if kernel.status in (Status.REMOVED, Status.OTHER) else kernel.kernel


@pytest.mark.parametrize("name", FLOAT)
def test_float_kernels(name):
    body, expected = FLOAT[name]
    said = ", ".join(f"{k.node}: {told(k)}" for k in report(named(body)).kernels)
    assert re.fullmatch(expected, said), said


def test_a_residual_chain_without_layout_changes_in_between():
    body = f"c = {CONV} (x, w, b) d = Relu (c) e = {CONV} (d, v, b) f = Add (e, d) g = Relu (f) y = {CONV} (g, w, b)"
    found = report(named(body))
    assert all(k.kernel == NCHWC for k in found.kernels)
    assert found.counts() == {"integer": 0, "float": 3, "absorbed": 3, "removed": 0, "other": 0}
    assert found.overhead == {"com.microsoft.nchwc.ReorderInput": 1, "com.microsoft.nchwc.ReorderOutput": 1}


def test_fused_conv_with_a_deferred_activation_dequantizes_its_weights_every_run():
    found = of(lambda g: g.q(g.op("LeakyRelu", g.conv(g.act_input()))))
    conv, activation = one(found, "Conv"), one(found, "LeakyRelu")
    assert (conv.kernel, conv.cause, conv.weights_per_run) == (f"{CUSTOM}FusedConv", Cause.FLOAT_OUTPUT, True)
    assert (activation.absorbed_into, activation.integer) == (conv.node, False)


def test_local_function():
    text = """(float[2,8] x) => (float[2,8] y) { e = Exp (x) y = local.Twice (e) }
        <domain: "local", opset_import: ["" : 17]> Twice (a) => (c) { [inner] b = Exp (a) [outer] c = Exp (b) }"""
    found = report(parse(text, domains=["local"]))
    assert ([k.kernel for k in found.kernels], found.overhead) == (["Exp", "Exp + Exp"], {})


def test_bodies_are_reported_with_their_path():
    branches = ", ".join(
        f"{kind}_branch = b () => (float[2,8] {op}_y) {{ [same_name] {op}_y = {op} (x) }}"
        for kind, op in (("then", "Exp"), ("else", "Abs"))
    )
    found = verify_fusion(parse(f"(float[2,8] x, bool flag) => (y) {{ [if] y = If (flag) <{branches}> }}"))
    assert found.by_node["if"].status is Status.OTHER
    kernels = {name: found.by_node[f"if.{name}_branch/same_name"].kernel for name in ("then", "else")}
    assert kernels == {"then": "Exp", "else": "Abs"}


@pytest.mark.parametrize(("op_type", "body"), [("HardSwish", "HardSigmoid + Mul"), ("Mish", "Softplus + Tanh + Mul")])
def test_a_function_operator_between_integer_convs_is_float(op_type, body):
    """The session writes out its body without names, up to the Q: that is no part of the Conv before it."""
    found = verify_fusion(build(lambda g: g.q(g.conv(g.q(g.op(op_type, g.q(g.conv(g.act_input())))))), opset=18))
    act = one(found, op_type)
    assert (act.kernel, act.status, act.integer) == (body, Status.FLOAT, False)
    assert (found.kernels[0].integer, found.kernels[0].absorbed) == (True, ())


# ---- integer kernels; `tests.targets.qdq` holds the graph of every rule so ----------------------------------------


@pytest.mark.parametrize("head", PRODUCERS)
@pytest.mark.parametrize("clamp", ["Relu", "Clip"])
def test_absorbed_activation(head, clamp):
    def make(g):
        y = produced(g, head)
        return g.relu_q(g.op("Relu", y) if clamp == "Relu" else g.clip(y, 0.0, 6.0))

    found = of(make)
    owner, taken = found.kernels[0], one(found, clamp)
    assert (owner.absorbed, taken.absorbed_into, taken.integer) == ((taken.node,), owner.node, True)
    assert found.integer_share() == 1.0


def test_one_value_with_several_dequantizers():
    found = of(lambda g: [g.q(g.conv(value := g.q(g.conv(g.act_input())))), g.q(g.op("Sigmoid", value))])
    assert all(k.integer for k in found.kernels)


@pytest.mark.parametrize(("make", "words"), [
    (lambda g: g.relu_q(g.op("Relu", g.q(g.input((4, 32))))), "a requantization (DQ, Q)"),
    (lambda g: g.relu_q(g.op("Relu", g.input((4, 8)))), "redundant: the Q behind it clips as well"),
])  # fmt: skip
def test_a_relu_that_the_q_behind_it_does_as_well_is_removed(make, words):
    relu = one(of(make), "Relu")
    assert (relu.status, relu.reason[-len(words) :]) == (Status.REMOVED, words)


# ---- float weights between DQ and Q: `tests.targets.test_layers` has the rules ------------------------------------


def silent(g, behind="", *, before=False, **how):
    """A Conv with float weights between DQ and Q, with an operator behind it and perhaps a barrier in front of it."""
    y = g.conv(g.op("Max", g.act_input()) if before else g.act_input(), weight="float", **how)
    return g.relu_q(g.op(behind, y, **({"alpha": 1.0} if behind == "LeakyRelu" else {})) if behind else y)


def stored(g, behind=""):
    """The runtime's own fused Conv as the file's operator."""
    weights = g.const(g.random(16, 16, 3, 3)), g.const(g.random(16))
    y = g.op("FusedConv", g.act_input(), *weights, domain=MS, pads=[1, 1, 1, 1])
    return g.relu_q(g.op(behind, y) if behind else y)


@pytest.mark.parametrize("behind", ["", "Relu"])
def test_a_conv_that_is_quantized_at_load_is_told(behind):
    found = one(of(lambda g: silent(g, behind)), "Conv")
    assert (found.silently_quantized, found.status, "at load" in found.reason) == (True, Status.INTEGER, True)


@pytest.mark.parametrize(("op_type", "make"), [
    ("Conv", lambda g: silent(g, before=True)), ("Conv", lambda g: silent(g, "Relu", before=True)),
    ("Conv", lambda g: silent(g, "LeakyRelu")),  # of slope 1 it is a barrier inside the kernel
    ("FusedConv", stored), ("FusedConv", lambda g: stored(g, "Relu")),
])  # fmt: skip
def test_what_keeps_its_weights(op_type, make):
    found = of(make)
    assert (one(found, op_type).kernel, one(found, op_type).status) == (NCHWC, Status.FLOAT)
    assert found.silently_quantized() == ()
    for other in found.kernels[1:]:  # the activation, but for the barrier in front
        assert other.op_type in ("Conv", "Max") or other.status in (Status.ABSORBED, Status.REMOVED)


@pytest.mark.since("1.25")  # before, Gemm and LeakyRelu stay two kernels
def test_a_gemm_with_leaky_relu_is_one_float_kernel():
    found = of(lambda g: g.q(g.op("LeakyRelu", g.gemm(g.q(g.input((4, 32))), weight="float"), alpha=1.0)))
    assert (one(found, "Gemm").kernel, found.silently_quantized()) == (f"{CUSTOM}FusedGemm", ())


def test_weights_may_be_quantized_at_load_and_dequantized_on_every_run_and_others_are_neither():
    found = of(lambda g: silent(g, transpose=True))
    node = one(found, "ConvTranspose")
    assert (found.silently_quantized(), node.silently_quantized, node.weights_per_run) == ((node,), True, True)
    assert "at load" in str(found)
    quantized = of(lambda g: g.q(g.conv(g.act_input())))
    assert (quantized.silently_quantized(), one(quantized, "Conv").weights_per_run) == ((), False)


def test_a_constant_node_in_place_of_an_initializer_is_seen():
    model = build(silent)
    (weight,) = (i for i in model.graph.initializer if len(i.dims) == 4)
    node = helper.make_node("Constant", [], [weight.name], value=numpy_helper.from_array(numpy_helper.to_array(weight)))
    model.graph.initializer.remove(weight)
    model.graph.node.insert(0, node)
    assert one(report(model), "Conv").silently_quantized


# ---- each cause of a float node, by a graph that shows it -----------------------------------------------------------


def _nchw(g):
    return g.act_input()


def _flat(g):
    return g.q(g.input((4, 32)))


def _conv(g):
    return g.conv(_nchw(g))


CAUSES = {
    "float-input": (lambda g: [g.q(g.conv(g.input((1, 16, 12, 12))))], "Conv", Cause.FLOAT_INPUT, "graph input"),
    "float-input-node": (lambda g: [g.q(g.conv(g.op("Exp", _nchw(g))))], "Conv", Cause.FLOAT_INPUT, "Exp"),
    "float-output": (lambda g: [g.q(g.op("Tanh", _conv(g)))], "Conv", Cause.FLOAT_OUTPUT, "Tanh"),
    "graph-output": (lambda g: [_conv(g)], "Conv", Cause.GRAPH_OUTPUT, "graph output"),
    "relu-graph-output": (lambda g: [g.op("Relu", _conv(g))], "Conv", Cause.GRAPH_OUTPUT, "Relu"),
    "second-consumer": (lambda g: [g.q(y := _conv(g)), g.op("Exp", y)], "Conv", Cause.SECOND_CONSUMER, "Exp"),
    "two-quantizers": (lambda g: [g.q(y := _conv(g)), g.q(y, 0.05)], "Conv", Cause.SECOND_CONSUMER, "2 different Q"),
    "relu-zero-point": (lambda g: [g.q(g.op("Relu", _conv(g)))], "Conv", Cause.ACTIVATION, "128"),
    "clip-range": (lambda g: [g.relu_q(g.clip(_conv(g), 0, 6), 6.2 / 255)], "Conv", Cause.ACTIVATION, "beyond"),
    "clip-rank": (lambda g: [g.q(g.clip(_conv(g), 0, 6), 6 / 255, 0, rank=1)], "Conv", Cause.ACTIVATION, "shape [1]"),
    "bias-scale": (lambda g: [g.q(g.conv(_nchw(g), bias_factor=1.5))], "Conv", Cause.BIAS_SCALE, "bias"),
    "gemm-float-bias": (lambda g: [g.gemm(_flat(g), bias="float")], "Gemm", Cause.BIAS_TYPE, "float"),
    "matmul-float-bias": (lambda g: [g.matmul(_flat(g), bias="float")], "MatMul", Cause.BIAS_TYPE, "float bias"),
    "gemm-alpha": (lambda g: [g.q(g.gemm(_flat(g), alpha=0.5))], "Gemm", Cause.UNSUPPORTED_ATTRIBUTE, "alpha"),
    "float-weight": (lambda g: [g.conv(_nchw(g), weight="float", bias="float")], "Conv", Cause.FLOAT_WEIGHT, "float"),
    "16-bit-input": (lambda g: [g.q(g.conv(g.q(g.input((1, 16, 12, 12)), act=np.uint16)))],
                     "Conv", Cause.SIXTEEN_BIT, "16 bit"),
    "16-bit-output": (lambda g: [g.q(_conv(g), act=np.uint16)], "Conv", Cause.SIXTEEN_BIT, "16 bit"),
    "4-bit-weight": (lambda g: [_conv_int4_weight(g, np.uint8)], "Conv", Cause.WEIGHT_TYPE, "4 bit"),
    "scale-mismatch": (lambda g: [g.q(g.op("MaxPool", _nchw(g), kernel_shape=[2, 2]), 0.05)],
                       "MaxPool", Cause.SCALE_MISMATCH, "differs"),
    "float-constant": (lambda g: [g.q(g.op("Mul", _nchw(g), g.const(g.random(1, 16, 1, 1))))],
                       "Mul", Cause.FLOAT_INPUT, "constant"),
    "signed-constant": (lambda g: [g.q(g.op("Mul", _nchw(g), g.dq_constant(g.random(1, 16, 1, 1), dtype=np.int8)))],
                        "Mul", Cause.TYPE_MISMATCH, "int8"),
    "linear-resize": (lambda g: [g.q(g.op("Resize", _nchw(g), "", g.floats(1, 1, 2, 2), mode="linear"))],
                      "Resize", Cause.UNSUPPORTED_ATTRIBUTE, "linear"),
    "unsupported": (lambda g: [g.q(g.op("Tanh", _flat(g)))], "Tanh", Cause.UNSUPPORTED_OP, "Tanh"),
    "conv-transpose": (lambda g: [g.q(g.conv(_nchw(g), transpose=True, axis=None))],
                       "ConvTranspose", Cause.UNSUPPORTED_OP, "ConvTranspose"),
    "clip-alone": (lambda g: [g.q(g.clip(_flat(g), -1, 1))], "Clip", Cause.ACTIVATION, "beyond"),
    "relu-without-q": (lambda g: [g.op("Relu", _flat(g))], "Relu", Cause.FLOAT_OUTPUT, "no Q"),
}  # fmt: skip


SINCE = {"bias-scale": "1.27", "gemm-alpha": "1.28", "linear-resize": "1.27"}  # integer before


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.since(SINCE[c])) if c in SINCE else c for c in CAUSES]
)
def test_cause(case):
    build, op_type, cause, words = CAUSES[case]
    graph = QdqGraph(opset=21)
    entry = one(report(graph.model(*build(graph))), op_type)
    assert (entry.status, entry.cause, words in entry.reason) == (Status.FLOAT, cause, True), entry


@pytest.mark.parametrize("moved", [False, True])
def test_signed_activation_with_a_branch(moved):
    """Behind an operator that moves data the Conv may be integer all the same; if not, the branch is why."""
    graph = QdqGraph(act=np.int8)
    x = graph.q(_conv(graph))
    x = graph.q(graph.op("Transpose", x, perm=[0, 2, 3, 1])) if moved else x
    model = graph.model(graph.q(graph.op("Mul", x, graph.q(graph.op("Sigmoid", x)))))
    source = SourceGraph(onnx.shape_inference.infer_shapes(model))
    assert [why_float(n, source, None)[1] for n in source.nodes if n.op_type == "Conv"] == [Cause.SIGNED_BRANCH]
    found = report(model)
    conv = one(found, "Conv")
    assert conv.integer if moved and conv.integer else conv.cause is Cause.SIGNED_BRANCH
    assert moved or {k.cause for k in found.float_nodes()} == {Cause.SIGNED_BRANCH}
    assert moved or conv.weights_per_run


def test_opset_too_old_for_an_integer_max_pool():
    graph = QdqGraph(opset=11)
    value = graph.q(graph.op("MaxPool", _nchw(graph), kernel_shape=[2, 2]))
    entry = one(report(graph.model(value)), "MaxPool")
    assert (entry.cause, "12" in entry.reason) == (Cause.OPSET, True)


def test_the_plan_s_reason_comes_first():
    graph = QdqGraph()
    model = graph.model(graph.op("Relu", graph.conv(graph.input())))
    name = next(n.name for n in model.graph.node if n.op_type == "Conv")
    decision = NodeDecision(name, "Conv", Kind.FLOAT, "user-excluded", "you excluded it by name")
    entry = one(verify_fusion(model, plan=PlacementPlan("ort-cpu", nodes=(decision,))), "Conv")
    assert (entry.cause, "user-excluded" in entry.reason, "by name" in entry.reason) == (Cause.PROTECTED, True, True)


def test_avoidable_lists_what_the_plan_calls_integer():
    graph = QdqGraph()
    model = graph.model(graph.q(graph.op("Tanh", graph.conv(graph.q(_conv(graph))))))
    first, second = (n.name for n in model.graph.node if n.op_type == "Conv")
    found = verify_fusion(model)
    for planned, avoidable in (((first, second), [second]), ((first,), []), ((), [])):
        nodes = tuple(NodeDecision(n, "Conv", Kind.INTEGER, "conv", "") for n in planned)
        assert [k.node for k in found.avoidable(PlacementPlan("ort-cpu", nodes=nodes))] == avoidable
