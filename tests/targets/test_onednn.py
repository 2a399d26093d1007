"""The rules of target onednn on the installed OpenVINO, and what its files look like, for which none is needed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest

from kenosis_ort import ArrayReader, preview, quantize_static, verify_patterns
from kenosis_ort.errors import KenosisWarning, OptionError, VerificationError
from kenosis_ort.graph.load import tag
from kenosis_ort.graph.qdq import SourceGraph, can_clip, pair_orders
from kenosis_ort.plan import Kind
from kenosis_ort.targets import other_process
from kenosis_ort.targets.onednn import openvino_proof as runtime
from kenosis_ort.targets.onednn import openvino_rules as rules
from kenosis_ort.targets.onednn.openvino_proof import Executed, prove, report_of
from kenosis_ort.targets.onednn.openvino_rules import EPILOGUE, share_subsampling
from kenosis_ort.targets.proof import Cause, FusionReport, Status
from tests import models
from tests.flow.support import run
from tests.models import Net
from tests.planning import parse
from tests.processor import Pretend, with_flags
from tests.targets.files import DQ, Written
from tests.targets.onednn_nets import Quantized, chain, conv, silu

PADS = "pads = [1,1,1,1]"
openvino = pytest.mark.usefixtures("_openvino")
written = partial(Written, target="onednn")


@pytest.fixture
def _openvino() -> None:
    pytest.importorskip("openvino")


def second(net: Quantized, y: str, *, weight: type = np.int8) -> str:
    """Adds a quantized Conv, float behind it."""
    return net.op("Conv", [y, net.dq(net.int8_weight(weight), weight)], name="second", pads=[1, 1, 1, 1])


def is_part(report: FusionReport, op_type: str) -> bool:
    """Tells whether all nodes of an operator are part of the first Conv's kernel."""
    found = [k for k in report.kernels if k.op_type == op_type]
    return bool(found) and all(k.absorbed_into == "conv" for k in found)


STEM = f"""(float[1,3,16,16] x) => (y) <float[16,3,3,3] v, float[16,1,3,3] w, float[8,16,1,1] p, float[16,8,3,3] q> {{
    [stem] a = Conv <{PADS}> (x, v) b = Relu (a) [depthwise] c = Conv <group = 16, {PADS}> (b, w) d = Relu (c)
    [project] e = Conv (d, p) f = Relu (e) [last] g = Conv <{PADS}> (f, q) y = Relu (g) }}"""
"""A stem as of a mobile net, and a dense Conv behind it."""


# ---- rules ------------------------------------------------------------------------------------------------------

Build = Callable[[Quantized, str], str]


def linear_layers() -> onnx.ModelProto:
    net = Quantized(opset=20)
    x = net.pair(net.input("x", (1, 8, 16)))
    for name in ("first", "last"):
        weight = net.dq(net.const(net.rng.integers(-99, 99, (16, 16)), dtype=np.int8), np.int8)
        y = net.op("Add", [net.op("MatMul", [x, weight], name=name), net.const(np.zeros(16, np.float32))])
        x = net.pair(net.op("Gelu", [y])) if name == "first" else y
    return net.finished(x)


def joined(net: Quantized, y: str, *, behind: bool) -> str:
    """Adds a Concat of two quantized halves and a Conv behind it."""
    halves = net.op("Concat", [net.pair(y), net.pair("x")], name="concat", axis=1)
    weight = net.dq(net.const(net.rng.integers(0, 99, (4, 8, 1, 1)), dtype=np.int8), np.int8)
    return net.op("Conv", [net.pair(halves) if behind else halves, weight], name="second")


def pooled(net: Quantized, y: str) -> str:
    return net.op("MaxPool", [net.pair(y)], kernel_shape=[2, 2])


def resized(net: Quantized, y: str) -> str:
    scales = net.const(np.array([1, 1, 2, 2], np.float32))
    how = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return net.op("Resize", [net.pair(y), "", scales], **how)


def two(make: Build) -> Callable[[], onnx.ModelProto]:
    """Two quantized Convs with something in between."""
    return lambda: conv(dst=lambda net, y: second(net, make(net, y)))


def residual(net: Quantized, y: str, *, q: bool) -> str:
    return net.pair(net.op("Relu", [net.op("Add", [net.pair(y) if q else y, net.pair("x")])]))


def alone(op: str, *inputs: Any, **attributes: Any) -> Build:
    """An operator with a pair on both sides."""
    return lambda net, y: net.pair(net.op(op, [net.pair(y), *inputs], **attributes))


def transposed() -> onnx.ModelProto:
    net = Quantized(opset=20)
    x = net.pair(net.input("x", (1, 4, 6, 6)))
    return net.finished(net.op("ConvTranspose", [x, net.dq(net.int8_weight(), np.int8)], name="up"))


class Case(NamedTuple):
    """A graph and what OpenVINO makes of it.

    Attributes:
        make: Makes it.
        integer: Operators whose nodes run on integers, apart by spaces.
        floats: Those that do not.
        part: Those that are part of the first Conv's kernel.
        apart: Those that are not.
        share: Of Conv and linear layers on integers.
    """

    make: Callable[[], onnx.ModelProto]
    integer: str = ""
    floats: str = ""
    part: str = ""
    apart: str = ""
    share: float | None = None


EXAMPLES: dict[str, list[Case]] = {
    "onednn-conv": [Case(two(lambda net, y: net.pair(y)), share=1.0)],
    "onednn-linear": [Case(linear_layers, share=1.0)],
    "onednn-residual": [Case(two(partial(residual, q=q)), "Add Relu") for q in (True, False)],
    "onednn-mul": [Case(two(lambda net, y: net.pair(net.op("Mul", [net.pair(y), net.pair("x")]))), "Mul")],
    "onednn-concat": [Case(lambda: conv(dst=partial(joined, behind=False)), "Concat", share=1.0)],
    "onednn-average-pool": [
        Case(two(alone("GlobalAveragePool")), share=1.0),
        Case(two(lambda net, y: net.op("GlobalAveragePool", [net.pair(y)])), share=0.5),
    ],
    "onednn-moves": [Case(two(pooled), "MaxPool", share=1.0)],
    "onednn-resize": [Case(two(resized), "Resize", share=1.0)],
    "onednn-epilogue": [
        *(
            Case(two(lambda net, y, o=op: net.pair(chain(o)(net, y))), part=op, share=1.0)
            for op in EPILOGUE
            if op != "PRelu"
        ),
        *(  # the session takes Relu and Clip out of the way of a Q all the same
            Case(two(lambda net, y, o=op: net.pair(chain(o)(net, net.pair(y)))), apart=op)
            for op in EPILOGUE
            if op not in ("PRelu", "Relu", "Clip")
        ),
    ],
    "onednn-deferred-q": [
        Case(two(lambda net, y: net.pair(silu(net, y))), part="Sigmoid Mul"),
        Case(two(lambda net, y: net.pair(silu(net, net.pair(y)))), apart="Mul"),
        Case(two(lambda net, y: net.pair(chain("Relu", "Mul", "Tanh", "Abs")(net, y))), part="Relu Mul Tanh Abs"),
    ],
    "onednn-float-activations": [
        Case(two(lambda net, y, o=op: net.pair(chain(o)(net, y))), apart=op)
        for op in ("Exp", "Log", "Erf", "Selu", "Softsign", "Max", "Min")
    ],
    "onednn-hard-sigmoid-slow": [Case(two(lambda net, y: net.pair(chain("HardSigmoid")(net, y))), apart="HardSigmoid")],
    "onednn-float-passes": [Case(transposed, floats="ConvTranspose")],
    "onednn-float": [Case(two(alone("Softmax", axis=1)), floats="Softmax")],
    "onednn-tiles-slow-exponential": [
        Case(
            two(lambda net, y: net.pair(silu(net, net.op("Max", [y, net.const(np.float32(-3.4e38))])))),
            apart="Mul",
            share=1.0,
        )
    ],
}


@openvino
@pytest.mark.parametrize(
    "case", [pytest.param(c, id=f"{rule}-{n}") for rule, cases in EXAMPLES.items() for n, c in enumerate(cases)]
)
def test_rule(case: Case) -> None:
    report = prove(case.make())
    assert report.runtime == "OpenVINO"
    assert case.share is None or report.integer_share() == case.share
    for operators, is_integer in ((case.integer, True), (case.floats, False)):
        for op in operators.split():
            assert {k.integer for k in report.kernels if k.op_type == op} == {is_integer}, op
    assert [op for op in case.part.split() if not is_part(report, op)] == []
    assert [op for op in case.apart.split() if is_part(report, op)] == []


@openvino
@pytest.mark.parametrize(
    ("without", "with_q"),
    [
        (two(pooled), two(lambda net, y: net.pair(pooled(net, y)))),
        (lambda: conv(dst=partial(joined, behind=False)), lambda: conv(dst=partial(joined, behind=True))),
    ],
)
def test_rule_moves_keep_grid(without: Callable[[], onnx.ModelProto], with_q: Callable[[], onnx.ModelProto]) -> None:
    """A Q behind what moves bytes is a pass of its own."""
    assert prove(with_q()).overhead.get("Subgraph", 0) > prove(without()).overhead.get("Subgraph", 0)


def clipped(net: Quantized) -> str:
    bounds = (net.const(np.int8(-7), dtype=np.int8), net.const(np.int8(7), dtype=np.int8))
    return net.dq(net.op("Clip", [net.int8_weight(), *bounds]), np.int8)


@openvino
@pytest.mark.parametrize(
    ("weight", "words"), [(lambda net: net.dq(net.int8_weight(np.uint8)), "uint8"), (clipped, "Clip")]
)
def test_rule_onednn_uint8_weights_float(weight: Callable[[Quantized], str], words: str) -> None:
    kernel = prove(conv(weight=weight)).by_node["conv"]
    assert (kernel.integer, kernel.cause) == (False, Cause.WEIGHT_TYPE)
    assert words in kernel.reason


test_rule_onednn_clip_on_weights_float = test_rule_onednn_uint8_weights_float


def test_rule_onednn_qoperator_per_channel_wrong(tmp_path: Path) -> None:
    """QLinearConv with scales by channel does not import, or computes something else: such files are not made."""
    model, reader = models.residual_block(), models.reader(models.residual_block(), 2)
    with pytest.raises(OptionError, match="per_channel"):
        quantize_static(model, tmp_path / "o.onnx", reader, target="onednn", quant_format="QOperator", per_channel=True)
    assert reader.handed_out == 0


@openvino
def test_rule_onednn_float_stem() -> None:
    """OpenVINO runs such a stem on int8: it stays float for accuracy, and the plan says nothing else."""
    net = Quantized(opset=20)
    values = net.pair(net.input("x", (1, 3, 16, 16)))
    for name, (outputs, inputs, size, group) in {
        "stem": (16, 3, 3, 1), "depthwise": (16, 1, 3, 16), "project": (8, 16, 1, 1),
    }.items():  # fmt: skip
        weight = net.dq(net.const(net.rng.integers(-99, 99, (outputs, inputs, size, size)), dtype=np.int8), np.int8)
        values = net.pair(net.op("Conv", [values, weight], name=name, group=group, pads=[size // 2] * 4))
    proof = prove(net.finished(values))
    assert proof.integer_share() == 1.0
    report = preview(parse(STEM), target="onednn")
    chosen = {node.node: node for node in report.nodes if node.op_type == "Conv"}
    assert [name for name, node in chosen.items() if node.kind is Kind.FLOAT] == ["stem", "depthwise", "project"]
    assert chosen["last"].kind is Kind.INTEGER
    assert "accuracy" in chosen["stem"].reason
    assert "slower" not in chosen["stem"].reason


# ---- how the account of a compiled model is read ------------------------------------------------------------------


def told(model: onnx.ModelProto, *kernels: tuple[str, str, str]) -> FusionReport:
    """Returns the report where the plugin says it executes these: layer, precision, names of nodes."""
    tagged = tag(model)
    tokens = {label: f"kv#{index}#" for index, label in enumerate(tagged.labels)}
    found = [
        Executed(layer, kind, kind, "jit", tuple(tokens[n] for n in names.split())) for layer, kind, names in kernels
    ]
    graph = SourceGraph(tagged.proto, labels=tagged.labels, paths=tagged.paths)
    return report_of(graph, found, None, "0")


@pytest.mark.parametrize(
    ("epilogue", "said", "parts"),
    [
        (silu, "conv Mul", "Sigmoid Mul"),  # a node without a name is where its readers are
        (chain("Clip"), "conv QuantizeLinear", "Clip"),  # a Clip that vanished is where its Quantize is
        (chain("Mul"), "Mul", "Mul"),  # a Conv without a name is the one that its reader names
    ],
)
def test_what_has_no_name_is_part_of_the_conv(epilogue: Build, said: str, parts: str) -> None:
    model = conv(epilogue)
    labels = {n.op_type: n.name for n in model.graph.node}  # the last of each operator
    kernel = " ".join(labels.get(word, word) for word in said.split())
    report = told(model, ("Convolution", "u8", kernel))
    assert report.by_node["conv"].status is Status.INTEGER
    assert set(report.by_node["conv"].absorbed) == {labels[op] for op in parts.split()}
    for op in parts.split():
        part = report.by_node[labels[op]]
        assert (part.status, part.absorbed_into, part.integer) == (Status.ABSORBED, "conv", True)


def test_a_float_conv_says_why() -> None:
    model = conv(weight=lambda net: net.dq(net.int8_weight(np.uint8)))
    kernel = told(model, ("Convolution", "f32", "conv")).by_node["conv"]
    assert (kernel.status, kernel.cause) == (Status.FLOAT, Cause.WEIGHT_TYPE)
    assert "uint8" in kernel.reason


def test_what_executes_no_node_is_overhead() -> None:
    model = conv()
    first = next(n.name for n in model.graph.node if n.op_type == "QuantizeLinear")
    report = told(model, ("Subgraph", "f32", first), ("Reorder", "u8", ""), ("Convolution", "u8", "conv"))
    assert report.overhead == {"Subgraph": 1, "Reorder": 1}


# ---- files ------------------------------------------------------------------------------------------------------


def block(epilogue: Callable[[Net, str], str]) -> onnx.ModelProto:
    """Returns a float net: two Convs, each with an epilogue, a residual Add and Relu, and a head."""
    net = Net(opset=20)
    x = net.input("x", [1, 8, 10, 10])
    y = epilogue(net, net.conv(x, 8, 8, name="first"))
    z = epilogue(net, net.conv(y, 8, 8, name="second"))
    z = net.op("Relu", [net.op("Add", [z, y], name="add")], name="relu")
    net.output(net.gemm(net.op("Flatten", [net.op("GlobalAveragePool", [z])]), 8, 4, name="head"))
    return net.model()


def gated(net: Net, y: str) -> str:
    return net.op("Mul", [y, net.op("Sigmoid", [y])])


def odd_channels() -> onnx.ModelProto:
    """Returns a float net of weights of one sign, dense Convs of 3 and 5 channels and a grouped one of 3 a group."""
    draws, weights = np.random.default_rng(0), {}
    for name, shape in (("d", (5, 3, 3, 3)), ("w", (24, 5, 3, 3)), ("g", (24, 3, 3, 3)), ("p", (16, 24, 1, 1))):
        weights[name] = draws.uniform(0.8, 1.0, shape).astype(np.float32) / np.float32(np.prod(shape[1:]))
    text = f"""(float[1,3,12,12] x) => (y) <float[16,4] h, float[4] bias> {{
        [dense] a = Conv <{PADS}> (x, d) b = Relu (a) [wider] c = Conv <{PADS}> (b, w) e = Relu (c)
        [grouped] i = Conv <group = 8, {PADS}> (e, g) j = Relu (i) [pointwise] k = Conv (j, p) l = Relu (k)
        m = GlobalAveragePool (l) n = Flatten (m) [head] y = Gemm (n, h, bias) }}"""
    return parse(text, weights, opset=20)


def bright(count: int) -> list[dict[str, np.ndarray]]:
    """Returns samples whose activations are large."""
    draws = np.random.default_rng(5)
    return [{"x": draws.uniform(0.7, 1.0, (1, 3, 12, 12)).astype(np.float32)} for _ in range(count)]


@pytest.mark.parametrize("per_channel", [True, False])
def test_no_pair_of_products_of_any_kernel_can_clip(tmp_path: Path, per_channel: bool) -> None:
    made = written(odd_channels(), tmp_path, feeds=bright(4), verify=False, per_channel=per_channel)
    layers = [node for node in made.model.graph.node if node.op_type in ("Conv", "Gemm", "MatMul")]
    assert len(layers) == 5
    for node in layers:
        weight = made.constants[made.makers[node.input[1]].input[0]]
        assert weight.dtype == np.int8
        orders = pair_orders(node, weight.shape, even_channels=True)
        assert len(orders) == (2 if node.op_type == "Conv" and weight.shape[1] % 2 else 1)
        assert not any(can_clip(weight, order).any() for order in orders)


@openvino
def test_openvino_computes_the_file_exactly_on_every_processor(tmp_path: Path) -> None:
    out = written(odd_channels(), tmp_path, feeds=bright(4)).path
    exact = models.session(out, optimize=False)
    runner = runtime.open_runner(str(out), threads=1, custom_op_libraries=())
    for feed in bright(3):
        ours, theirs = runner.run(None, feed)[0], exact.run(None, feed)[0]
        noise = float(np.square(ours - theirs).sum() / np.square(theirs).sum())
        assert noise < 1e-4  # a step of 8 bits at most; clipped sums are wrong by a third


@pytest.mark.parametrize("op", [*(op for op in EPILOGUE if op not in ("Neg", "Sqrt", "PRelu")), "SiLU"])
def test_q_stands_behind_the_whole_epilogue(op: str, tmp_path: Path) -> None:
    made = written(block(gated if op == "SiLU" else lambda net, y: net.op(op, [y])), tmp_path, verify=False)
    report = verify_patterns(made.model)
    assert report.conforms, str(report)
    want = 2 if op == "SiLU" else 1
    found = {(len(c.epilogue), c.src, c.weights, c.bias, c.dst) for c in report.convs}
    assert (len(report.convs), found) == (2, {(want, "u8", "s8", "f32", "u8")})
    assert made.before("add") == [DQ, DQ]
    assert made.before("relu") == ["Add"]


def test_weights_are_int8_by_channel_and_symmetric(tmp_path: Path) -> None:
    made = written(block(lambda net, y: net.op("Relu", [y])), tmp_path, verify=False)
    for node in (n for n in made.model.graph.node if n.op_type in ("Conv", "Gemm")):
        weight, scale, zero = (made.constants[v] for v in made.makers[node.input[1]].input)
        assert weight.dtype == np.int8
        assert scale.size == weight.shape[0] == zero.size
        assert not zero.any()
        assert made.constants[node.input[2]].dtype == np.float32
    assert "Clip" not in made.operators


def test_activations_with_an_exponential_are_held_apart_from_kernels_of_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pretend: Pretend
) -> None:
    pretend(with_flags("amx_int8"))
    float_model = block(gated)
    report = verify_patterns(written(float_model, tmp_path, verify=False).model)
    assert [c.epilogue for c in report.convs] == [("Maximum", "Sigmoid", "Multiply")] * 2
    assert all(c.dst == "u8" for c in report.convs)
    monkeypatch.setattr(rules, "_MOST_ELEMENTS", 799)  # the sums have 800
    large = verify_patterns(written(float_model, tmp_path, verify=False).model)
    assert [c.epilogue for c in large.convs] == [("Sigmoid", "Multiply")] * 2
    monkeypatch.undo()
    assert "Max" not in written(float_model, tmp_path, verify=False, rewrites=False).operators
    calm = block(lambda net, y: net.op("Relu", [y]))
    assert "Max" not in written(calm, tmp_path, verify=False).operators


def strided(pads: str = "0,0,0,0", strides: str = "2,2") -> onnx.ModelProto:
    """Returns a net in which two pointwise Convs with strides alone read a value."""
    return parse(f"""(float[1,8,10,10] x) => (y, z) <float[8,8,3,3] v, float[8,8,1,1] w, float[8,8,1,1] u> {{
        [first] c = Conv <{PADS}> (x, v) [relu] r = Relu (c)
        [one] y = Conv <kernel_shape = [1,1], strides = [2,2], pads = [{pads}]> (r, w)
        [two] z = Conv <kernel_shape = [1,1], strides = [{strides}], pads = [{pads}]> (r, u) }}""")


def test_pointwise_convs_share_a_subsampling_to_the_bit() -> None:
    model, rewritten = strided(), strided()
    done = share_subsampling(rewritten, nodes={n.name for n in rewritten.graph.node})
    onnx.checker.check_model(rewritten)
    assert done.notes
    assert [n.op_type for n in rewritten.graph.node].count("MaxPool") == 1
    feeds = models.feeds(model, 2)
    for want, got in zip(run(model, feeds), run(rewritten, feeds), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("model", [strided(strides="1,1"), strided(strides="2,1"), strided("1,1,1,1")])
def test_other_strides_and_padded_convs_stay(model: onnx.ModelProto) -> None:
    before = model.SerializeToString()
    assert not share_subsampling(model, nodes={n.name for n in model.graph.node}).notes
    assert model.SerializeToString() == before
    assert not share_subsampling(strided(), nodes={"one"}).notes


@openvino
def test_rule_onednn_strides_behind_dequantize_float() -> None:
    """OpenVINO moves the strides of pointwise Convs before them, and runs those then in float."""

    def heads(net: Quantized, y: str) -> str:
        for name in ("one", "two"):
            weight = net.dq(net.const(net.rng.integers(0, 99, (4, 4, 1, 1)), dtype=np.int8), np.int8)
            last = net.op("Conv", [y, weight], name=name, strides=[2, 2], kernel_shape=[1, 1])
            net.output(last)
        return net.op("Identity", [last])

    def pool(net: Quantized, y: str) -> str:
        return second(net, net.op("MaxPool", [net.pair(y)], kernel_shape=[1, 1], strides=[2, 2]))

    assert not prove(conv(chain("Relu"), dst=lambda net, y: heads(net, net.pair(y)))).by_node["one"].integer
    assert prove(conv(chain("Relu"), dst=pool)).integer_share() == 1.0


def test_gates_and_sums_in_between_become_integer(tmp_path: Path) -> None:
    text = f"""(float[1,8,10,10] x) => (y) <float[8,8,3,3] u, float[8,8,1,1] v, float[8] b> {{
        a = Conv <{PADS}> (x, u, b) r = Relu (a) p = GlobalAveragePool (r) c = Conv (p, v, b) h = HardSigmoid (c)
        m = Mul (r, h) d = Conv <{PADS}> (r, u, b) s = Sum (m, d) y = Conv <{PADS}> (s, u, b) }}"""
    made = written(parse(text), tmp_path, verify=False)
    assert "Clip" in made.operators
    assert not {"HardSigmoid", "Sum"} & set(made.operators)
    assert {d.dtype for d in made.report.plan.decisions if d.edge.consumer.startswith(("Mul", "Sum"))} == {"uint8"}


def test_what_leads_to_a_batch_normalization_that_becomes_a_conv_is_integer(tmp_path: Path) -> None:
    text = """(float[1,16,10,10] x) => (y) <float[16,16,3,3] w, float[16] s> { c = Conv (x, w)
        [pool] p = MaxPool <kernel_shape = [2,2]> (c) n = BatchNormalization (p, s, s, s, s) r = Relu (n)
        y = Conv (r, w) }"""
    made = written(parse(text, {"s": np.linspace(0.5, 1.5, 16)}), tmp_path, verify=False)
    assert made.before("pool") == [DQ]


# ---- end to end ---------------------------------------------------------------------------------------------------


@openvino
def test_the_default_call_is_proved_on_openvino(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kenosis_ort.flow.speed._LEAST_TIMING_S", 20.0)  # rounds enough however busy the machine is
    model = block(gated)
    out = tmp_path / "out.onnx"
    report = quantize_static(model, out, models.reader(model, 8), target="onednn")
    assert report.fusion.runtime == "OpenVINO"
    assert report.speed is not None


@openvino
def test_a_runtime_that_ends_its_process_ends_no_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO does over some files; the call delivers without proof and timing, says so, and asks anew then."""
    script = tmp_path / "ask.py"
    script.write_text("import os, signal, sys\nsys.stdin.readline()\nos.kill(os.getpid(), signal.SIGABRT)\n")
    model, out = models.conv_relu_chain(2), tmp_path / "out.onnx"
    feeds = models.feeds(model, 4)
    with monkeypatch.context() as patch:
        patch.setattr(other_process, "command", lambda _: [sys.executable, str(script)])
        with pytest.warns(KenosisWarning, match="OpenVINO .* ended its process, with code -6"):
            report = quantize_static(model, out, ArrayReader(feeds), target="onednn")
        assert report.fusion is None
        assert "without a fusion proof" in report.verdict()
        with pytest.raises(VerificationError, match="code -6"):
            prove(model)
    assert prove(out).kernels
    run(out, feeds)
