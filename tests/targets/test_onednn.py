"""The rules of target onednn on the installed OpenVINO, and what its files look like, for which none is needed."""

import importlib.util
import sys
from functools import partial
from typing import NamedTuple

import numpy as np
import onnx
import pytest

from kenosis_ort import OptionError, VerificationError, preview, quantize_static, verify_patterns
from kenosis_ort.graph.product_pairs import can_clip, pair_orders
from kenosis_ort.graph.qdq import SourceGraph, tag
from kenosis_ort.plan import Kind
from kenosis_ort.targets import onednn as rules, other_process
from kenosis_ort.targets.onednn import EPILOGUE, openvino_proof as runtime, share_subsampling
from kenosis_ort.targets.onednn.openvino_proof import Executed, prove, report_of
from kenosis_ort.targets.proof import Cause, Status
from tests import models
from tests.flow.support import run
from tests.processor import with_flags
from tests.targets.files import DQ, Written, net_of, quantized_net
from tests.targets.qdq import each_case

PADS = "pads = [1,1,1,1]"
openvino = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="OpenVINO is not installed")
written = partial(Written, target="onednn", verify=False)


def is_part(report, op_type):
    """Tells whether all nodes of an operator are part of the first Conv's kernel."""
    found = [k for k in report.kernels if k.op_type == op_type]
    return bool(found) and all(k.absorbed_into == "conv" for k in found)


# ---- rules ------------------------------------------------------------------------------------------------------

FIRST = f"a = Q (x) [conv] c = Conv <{PADS}> (a, q4_4_3_3, zeros4)"
JOINED = "d = Q (c) b = Concat <axis = 1> (d, a)"
POOLED = "d = Q (c) b = MaxPool <kernel_shape = [2,2]> (d)"
RESIZED = """d = Q (c) b = Resize <mode = "nearest", coordinate_transformation_mode = "asymmetric",
    nearest_mode = "floor"> (d, , twice)"""
LINEAR = """a = Q (x) [first] m = MatMul (a, q16_16) n = Add (m, zeros16) g = Gelu (n) b = Q (g)
    [last] p = MatMul (b, q16_16b) y = Add (p, zeros16)"""


def net(between):
    """A quantized Conv of ``a`` to ``c``, and from there what leads to ``y``, or to ``b`` and a Conv of it."""
    second = f"[second] y = Conv <{PADS}> (b, {'q4_8_3_3' if 'Concat' in between else 'q4_4_3_3b'})"
    return quantized_net(f"{FIRST} {between} {'' if 'y = ' in between else second}")


class Case(NamedTuple):
    """A graph and what OpenVINO makes of it.

    Attributes:
        graph: The graph, or what stands between two Convs.
        integer: Operators whose nodes run on integers, apart by spaces.
        floats: Those that do not.
        part: Those that are part of the first Conv's kernel.
        apart: Those that are not.
        share: Of Conv and linear layers on integers.
    """

    graph: str | onnx.ModelProto
    integer: str = ""
    floats: str = ""
    part: str = ""
    apart: str = ""
    share: float | None = None


IN_KERNEL = [op for op in EPILOGUE if op != "PRelu"]
FLOATS = ("Exp (c)", "Log (c)", "Erf (c)", "Selu (c)", "Softsign (c)", "Max (c, half)", "Min (c, half)")
EXAMPLES = {
    "onednn-conv": [Case("b = Q (c)", share=1.0)], "onednn-linear": [Case(quantized_net(LINEAR, "1,8,16"), share=1.0)],
    "onednn-residual": [
        Case(f"{text} f = Relu (e) b = Q (f)", "Add Relu") for text in ("d = Q (c) e = Add (d, a)", "e = Add (c, a)")],
    "onednn-mul": [Case("d = Q (c) e = Mul (d, a) b = Q (e)", "Mul")],
    "onednn-concat": [Case(JOINED, "Concat", share=1.0)],
    "onednn-average-pool": [
        Case("d = Q (c) e = GlobalAveragePool (d) b = Q (e)", share=1.0),
        Case("d = Q (c) b = GlobalAveragePool (d)", share=0.5),
    ],
    "onednn-moves": [Case(POOLED, "MaxPool", share=1.0)], "onednn-resize": [Case(RESIZED, "Resize", share=1.0)],
    "onednn-epilogue": [
        *(Case(f"d = {op} (c) b = Q (d)", part=op, share=1.0) for op in IN_KERNEL),
        # the session takes Relu and Clip out of the way of a Q all the same
        *(Case(f"d = Q (c) e = {op} (d) b = Q (e)", apart=op) for op in IN_KERNEL if op not in ("Relu", "Clip")),
    ],
    "onednn-deferred-q": [
        Case("d = Sigmoid (c) e = Mul (c, d) b = Q (e)", part="Sigmoid Mul"),
        Case("d = Q (c) e = Sigmoid (d) f = Mul (d, e) b = Q (f)", apart="Mul"),
        Case("d = Relu (c) e = Mul (d, half) f = Tanh (e) g = Abs (f) b = Q (g)", part="Relu Mul Tanh Abs"),
    ],
    "onednn-float-activations": [Case(f"d = {call} b = Q (d)", apart=call.split()[0]) for call in FLOATS],
    "onednn-hard-sigmoid-slow": [Case("d = HardSigmoid (c) b = Q (d)", apart="HardSigmoid")],
    "onednn-float-passes": [Case(quantized_net("a = Q (x) y = ConvTranspose (a, q4_4_3_3)"), floats="ConvTranspose")],
    "onednn-float": [Case("d = Q (c) e = Softmax <axis = 1> (d) b = Q (e)", floats="Softmax")],
    "onednn-tiles-slow-exponential": [
        Case("d = Max (c, least) e = Sigmoid (d) f = Mul (d, e) b = Q (f)", apart="Mul", share=1.0)],
}  # fmt: skip


@openvino
@each_case(EXAMPLES)
def test_rule(case):
    report = prove(net(case.graph) if isinstance(case.graph, str) else case.graph)
    assert report.runtime == "OpenVINO"
    assert case.share is None or report.integer_share() == case.share
    for operators, is_integer in ((case.integer, True), (case.floats, False)):
        for op in operators.split():
            assert {k.integer for k in report.kernels if k.op_type == op} == {is_integer}, op
    assert [op for op in case.part.split() if not is_part(report, op)] == []
    assert [op for op in case.apart.split() if is_part(report, op)] == []


@openvino
@pytest.mark.parametrize("between", [POOLED, JOINED])
def test_rule_moves_keep_grid(between):
    """A Q behind what moves bytes is a pass of its own."""
    without, with_q = (prove(net(text)) for text in (between, f"{between.replace('b =', 'e =')} b = Q (e)"))
    assert with_q.overhead.get("Subgraph", 0) > without.overhead.get("Subgraph", 0)


UINT8 = quantized_net(f"a = Q (x) [conv] c = Conv <{PADS}> (a, u4_4_3_3, zeros4) y = Q (c)")
CLIPPED = quantized_net(
    f"a = Q (x) k = Clip (held, low, high) w = DequantizeLinear (k, step, nought) [conv] y = Conv <{PADS}> (a, w)",
    held=np.arange(144, dtype=np.int8).reshape(4, 4, 3, 3) % 100,
    low=np.int8(-7),
    high=np.int8(7),
)


@openvino
@pytest.mark.parametrize(("model", "words"), [(UINT8, "uint8"), (CLIPPED, "Clip")])
def test_rule_onednn_uint8_weights_float(model, words):
    kernel = prove(model).by_node["conv"]
    assert (kernel.integer, kernel.cause, words in kernel.reason) == (False, Cause.WEIGHT_TYPE, True)


test_rule_onednn_clip_on_weights_float = test_rule_onednn_uint8_weights_float


def test_rule_onednn_qoperator_per_channel_wrong(tmp_path):
    """QLinearConv with scales by channel does not import, or computes something else: such files are not made."""
    model, reader = models.residual_block(), models.reader(models.residual_block(), 2)
    with pytest.raises(OptionError, match="per_channel"):
        quantize_static(model, tmp_path / "o.onnx", reader, target="onednn", quant_format="QOperator", per_channel=True)
    assert reader.handed_out == 0


STEM = f"""[stem] a = Conv <{PADS}> (x, w16_3_3_3) b = Relu (a)
    [depthwise] c = Conv <group = 16, {PADS}> (b, w16_1_3_3) d = Relu (c) [project] e = Conv (d, w8_16_1_1)
    f = Relu (e) [last] g = Conv <{PADS}> (f, w16_8_3_3) y = Relu (g)"""
"""A stem as of a mobile net, and a dense Conv behind it."""


@openvino
def test_rule_onednn_float_stem():
    """OpenVINO runs such a stem on int8: it stays float for accuracy, and the plan says nothing else."""
    body = f"""a = Q (x) [stem] b = Conv <{PADS}> (a, q16_3_3_3) c = Q (b)
        [depthwise] d = Conv <group = 16, {PADS}> (c, q16_1_3_3) e = Q (d)
        [project] f = Conv (e, q8_16_1_1) y = Q (f)"""
    assert prove(quantized_net(body, "1,3,16,16")).integer_share() == 1.0
    chosen = {node.node: node for node in preview(net_of(STEM, "1,3,16,16"), target="onednn").nodes}
    kinds = {"stem": Kind.FLOAT, "depthwise": Kind.FLOAT, "project": Kind.FLOAT, "last": Kind.INTEGER}
    assert {name: chosen[name].kind for name in kinds} == kinds
    assert ("accuracy" in chosen["stem"].reason, "slower" in chosen["stem"].reason) == (True, False)


# ---- how the account of a compiled model is read ------------------------------------------------------------------


def told(model, *kernels):
    """Returns the report where the plugin says it executes these: layer, precision, names of nodes."""
    tagged = tag(model)
    tokens = {label: f"kv#{index}#" for index, label in enumerate(tagged.labels)}
    found = [
        Executed(layer, kind, kind, "jit", tuple(map(tokens.get, names.split()))) for layer, kind, names in kernels
    ]
    return report_of(SourceGraph(tagged.proto, labels=tagged.labels, paths=tagged.paths), found, None, "0")


@pytest.mark.parametrize(("between", "said", "parts"), [
    # a node without a name is where its readers are
    ("[Sigmoid] d = Sigmoid (c) [Mul] e = Mul (c, d) y = Q (e)", "conv Mul", "Sigmoid Mul"),
    # a Clip that vanished is where its Quantize is
    ("[Clip] d = Clip (c) y = Q (d)", "conv y_Q", "Clip"),
    # a Conv without a name is the one that its reader names
    ("[Mul] d = Mul (c, half) y = Q (d)", "Mul", "Mul"),
])  # fmt: skip
def test_what_has_no_name_is_part_of_the_conv(between, said, parts):
    report = told(net(between), ("Convolution", "u8", said))
    assert (report.by_node["conv"].status, {*report.by_node["conv"].absorbed}) == (Status.INTEGER, {*parts.split()})
    for part in map(report.by_node.__getitem__, parts.split()):
        assert (part.status, part.absorbed_into, part.integer) == (Status.ABSORBED, "conv", True)


def test_a_float_conv_says_why():
    kernel = told(UINT8, ("Convolution", "f32", "conv")).by_node["conv"]
    assert (kernel.status, kernel.cause, "uint8" in kernel.reason) == (Status.FLOAT, Cause.WEIGHT_TYPE, True)


def test_what_executes_no_node_is_overhead():
    report = told(net("y = Q (c)"), ("Subgraph", "f32", "a_Q"), ("Reorder", "u8", ""), ("Convolution", "u8", "conv"))
    assert report.overhead == {"Subgraph": 1, "Reorder": 1}


# ---- files ------------------------------------------------------------------------------------------------------


def block(op):
    """Returns a float net: two Convs, each with an activation, a residual Add and Relu, and a head."""
    act = "{0}s = Sigmoid ({0}) {0}a = Mul ({0}, {0}s)" if op == "SiLU" else f"{{0}}a = {op} ({{0}})"
    body = f"""[first] c = Conv <{PADS}> (x, w8_8_3_3, zeros8) {act.format("c")}
        [second] d = Conv <{PADS}> (ca, w8_8_3_3b, zeros8) {act.format("d")} [add] s = Add (da, ca) [relu] r = Relu (s)
        p = GlobalAveragePool (r) f = Flatten (p) [head] y = Gemm <transB = 1> (f, w4_8, ones4)"""
    return net_of(body, "1,8,10,10")


def odd_channels():
    """Returns a float net of weights of one sign, dense Convs of 3 and 5 channels and a grouped one of 3 a group."""
    draws = np.random.default_rng(0)
    shapes = {"d": (5, 3, 3, 3), "w": (24, 5, 3, 3), "g": (24, 3, 3, 3), "p": (16, 24, 1, 1)}
    weights = {name: np.float32(draws.uniform(0.8, 1.0, shape) / np.prod(shape[1:])) for name, shape in shapes.items()}
    body = f"""[dense] a = Conv <{PADS}> (x, d) b = Relu (a) [wider] c = Conv <{PADS}> (b, w) e = Relu (c)
        [grouped] i = Conv <group = 8, {PADS}> (e, g) j = Relu (i) [pointwise] k = Conv (j, p) l = Relu (k)
        m = GlobalAveragePool (l) n = Flatten (m) [head] y = Gemm (n, w16_4, ones4)"""
    return net_of(body, "1,3,12,12", **weights)


def bright(count):
    """Returns samples whose activations are large."""
    draws = np.random.default_rng(5)
    return [{"x": draws.uniform(0.7, 1.0, (1, 3, 12, 12)).astype(np.float32)} for _ in range(count)]


@pytest.mark.parametrize("per_channel", [True, False])
def test_no_pair_of_products_of_any_kernel_can_clip(tmp_path, per_channel):
    made = written(odd_channels(), tmp_path, feeds=bright(4), per_channel=per_channel)
    layers = [node for node in made.model.graph.node if node.op_type in ("Conv", "Gemm", "MatMul")]
    assert len(layers) == 5
    for node in layers:
        weight = made.constants[made.makers[node.input[1]].input[0]]
        assert weight.dtype == np.int8
        orders = pair_orders(node, weight.shape, even_channels=True)
        assert len(orders) == (2 if node.op_type == "Conv" and weight.shape[1] % 2 else 1)
        assert not any(can_clip(weight, order).any() for order in orders)


@openvino
def test_openvino_computes_the_file_exactly_on_every_processor(tmp_path):
    out = written(odd_channels(), tmp_path, feeds=bright(4)).path
    exact = models.session(out, optimize=False)
    runner = runtime.open_runner(str(out), threads=1, custom_op_libraries=())
    for feed in bright(3):
        ours, theirs = runner.run(None, feed)[0], exact.run(None, feed)[0]
        noise = float(np.square(ours - theirs).sum() / np.square(theirs).sum())
        assert noise < 1e-4  # a step of 8 bits at most; clipped sums are wrong by a third


@pytest.mark.parametrize("op", [*(op for op in EPILOGUE if op not in ("Neg", "Sqrt", "PRelu")), "SiLU"])
def test_q_stands_behind_the_whole_epilogue(op, tmp_path):
    made = written(block(op), tmp_path)
    report = verify_patterns(made.model)
    assert report.conforms, str(report)
    want = 2 if op == "SiLU" else 1
    found = {(len(c.epilogue), c.src, c.weights, c.bias, c.dst) for c in report.convs}
    assert (len(report.convs), found) == (2, {(want, "u8", "s8", "f32", "u8")})
    assert (made.before("add"), made.before("relu")) == ([DQ, DQ], ["Add"])


def test_weights_are_int8_by_channel_and_symmetric(tmp_path):
    made = written(block("Relu"), tmp_path)
    for node in (n for n in made.model.graph.node if n.op_type in ("Conv", "Gemm")):
        weight, scale, zero = (made.constants[v] for v in made.makers[node.input[1]].input)
        assert (weight.dtype, made.constants[node.input[2]].dtype) == (np.int8, np.float32)
        assert (scale.size, zero.tolist()) == (len(weight), [0] * len(weight))
    assert "Clip" not in made.operators


def test_activations_with_an_exponential_are_held_apart_from_kernels_of_tiles(tmp_path, monkeypatch, pretend):
    pretend(with_flags("amx_int8"))
    report = verify_patterns(written(block("SiLU"), tmp_path).model)
    assert [c.epilogue for c in report.convs] == [("Maximum", "Sigmoid", "Multiply")] * 2
    assert all(c.dst == "u8" for c in report.convs)
    monkeypatch.setattr(rules, "_MOST_ELEMENTS", 799)  # the sums have 800
    large = verify_patterns(written(block("SiLU"), tmp_path).model)
    assert [c.epilogue for c in large.convs] == [("Sigmoid", "Multiply")] * 2
    monkeypatch.undo()
    assert "Max" not in written(block("SiLU"), tmp_path, rewrites=False).operators
    assert "Max" not in written(block("Relu"), tmp_path).operators


def strided(pads="0,0,0,0", strides="2,2"):
    """Returns a net in which two pointwise Convs with strides alone read a value."""
    body = f"""[first] c = Conv <{PADS}> (x, w8_8_3_3) [relu] r = Relu (c)
        [one] y = Conv <kernel_shape = [1,1], strides = [2,2], pads = [{pads}]> (r, w8_8_1_1)
        [two] z = Conv <kernel_shape = [1,1], strides = [{strides}], pads = [{pads}]> (r, w8_8_1_1b)"""
    return net_of(body, "1,8,10,10", "y, z")


def test_pointwise_convs_share_a_subsampling_to_the_bit():
    model, rewritten = strided(), strided()
    done = share_subsampling(rewritten, nodes={n.name for n in rewritten.graph.node})
    onnx.checker.check_model(rewritten)
    assert (bool(done.notes), [n.op_type for n in rewritten.graph.node].count("MaxPool")) == (True, 1)
    feeds = models.feeds(model, 2)
    for want, got in zip(run(model, feeds), run(rewritten, feeds), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("model", [strided(strides="1,1"), strided(strides="2,1"), strided("1,1,1,1")])
def test_other_strides_and_padded_convs_stay(model):
    before = model.SerializeToString()
    assert not share_subsampling(model, nodes={n.name for n in model.graph.node}).notes
    assert model.SerializeToString() == before
    assert not share_subsampling(strided(), nodes={"one"}).notes


@openvino
def test_rule_onednn_strides_behind_dequantize_float():
    """OpenVINO moves the strides of pointwise Convs before them, and runs those then in float."""
    pointwise = "Conv <strides = [2,2], kernel_shape = [1,1]>"
    heads = f"""{FIRST} d = Relu (c) b = Q (d) [one] y = {pointwise} (b, q4_4_1_1)
        [two] z = {pointwise} (b, q4_4_1_1b)"""
    assert not prove(quantized_net(heads, outputs="y, z")).by_node["one"].integer
    pool = "d = Relu (c) e = Q (d) b = MaxPool <kernel_shape = [1,1], strides = [2,2]> (e)"
    assert prove(net(pool)).integer_share() == 1.0


def test_gates_and_sums_in_between_become_integer(tmp_path):
    body = f"""a = Conv <{PADS}> (x, w8_8_3_3, ones8) r = Relu (a) p = GlobalAveragePool (r)
        c = Conv (p, w8_8_1_1, ones8) h = HardSigmoid (c) m = Mul (r, h) d = Conv <{PADS}> (r, w8_8_3_3, ones8)
        s = Sum (m, d) y = Conv <{PADS}> (s, w8_8_3_3, ones8)"""
    made = written(net_of(body, "1,8,10,10"), tmp_path)
    assert {"Clip", "HardSigmoid", "Sum"} & set(made.operators) == {"Clip"}
    assert {d.dtype for d in made.report.plan.decisions if d.edge.consumer.startswith(("Mul", "Sum"))} == {"uint8"}


def test_what_leads_to_a_batch_normalization_that_becomes_a_conv_is_integer(tmp_path):
    body = """c = Conv (x, w16_16_3_3) [pool] p = MaxPool <kernel_shape = [2,2]> (c)
        n = BatchNormalization (p, some, some, some, some) r = Relu (n) y = Conv (r, w16_16_3_3)"""
    model = net_of(body, "1,16,10,10", some=np.linspace(0.5, 1.5, 16, dtype=np.float32))
    assert written(model, tmp_path).before("pool") == [DQ]


# ---- end to end ---------------------------------------------------------------------------------------------------


@openvino
def test_the_default_call_is_proved_on_openvino(tmp_path, monkeypatch):
    monkeypatch.setattr("kenosis_ort.flow.speed._LEAST_TIMING_S", 20.0)  # rounds enough however busy the machine is
    model = block("SiLU")
    report = quantize_static(model, tmp_path / "out.onnx", models.reader(model, 8), target="onednn")
    assert report.fusion.runtime == "OpenVINO"
    assert report.speed is not None


@openvino
def test_a_runtime_that_ends_its_process_ends_no_call(tmp_path, monkeypatch):
    """OpenVINO does over some files; what is asked then is told so, and later it is asked anew."""
    script = tmp_path / "ask.py"
    script.write_text("import os, signal, sys\nsys.stdin.readline()\nos.kill(os.getpid(), signal.SIGABRT)\n")
    with monkeypatch.context() as patch:
        patch.setattr(other_process, "command", lambda _: [sys.executable, str(script)])
        with pytest.raises(VerificationError, match=r"OpenVINO .* ended its process, with code -6"):
            prove(UINT8)
    assert prove(UINT8).kernels
