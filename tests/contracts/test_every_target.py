"""Targets: one made outside the package, without a runtime to ask or time, and what holds of files for every one."""

import dataclasses
import importlib
import itertools

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import QuantType, quantize_static as stock

from kenosis_ort import KenosisWarning, OptionError, Stages, VerificationError, preview, quantize_static, verify_fusion
from kenosis_ort.plan import How, Kind
from kenosis_ort.runtime.session import configured, open_session
from kenosis_ort.targets import TARGETS, DataTypes, Hooks, get_target
from tests import models
from tests.flow.support import initializers, quality, run, sqnr_db
from tests.oracle.compare import differences
from tests.planning import parse
from tests.processor import SATURATES

# ---- one of the caller's own -----------------------------------------------------------------------------------------

ORT = get_target("ort-cpu")
ABSORBS = ("Relu", "Clip", "LeakyRelu", "HardSwish", "Sigmoid", "Tanh", "PRelu", "Elu")
OWN = dataclasses.replace(
    ORT, name="a-runtime-elsewhere", absorbs=ABSORBS, clamps=(), gates=("Sigmoid",), constant_steps=("Mul",),
    longest_epilogue=4, costs=None, kernel_forms=(),
    hooks=Hooks(data_types=ORT.hooks.data_types, writes_float=ORT.hooks.writes_float),
)  # fmt: skip


@pytest.fixture
def no_runtime(monkeypatch):
    """Whoever asks or times onnxruntime's CPU provider fails the test."""
    for name in ("targets.ort_cpu.cpu_proof.prove_by", "tuning.promise.keep_promise"):
        monkeypatch.setattr(f"kenosis_ort.{name}", lambda *_, **__: pytest.fail("another runtime was asked"))


def quantized(model, out, target=OWN, **options):
    return quantize_static(model, out, models.reader(model, 12), target=target, **options)


def behind(model, name):
    """Returns the operators that read what a node writes."""
    made = {v for n in model.graph.node if n.name == name for v in n.output}
    return [n.op_type for n in model.graph.node if made & set(n.input)]


def chain(*activations):
    """Convs with each of some activations between them."""
    net = models.Net()
    y = net.input("x", [1, 3, 8, 8])
    channels = 3
    for index, op_type in enumerate((*activations, "Relu")):
        y, channels = net.conv(y, channels, 8, name=f"c{index}"), 8
        y = net.op("Mul", [y, net.op("Sigmoid", [y])]) if op_type == "SiLU" else net.op(op_type, [y])
    return net.of(net.conv(y, 8, 4, name="last"))


@pytest.mark.usefixtures("no_runtime")
def test_the_default_call_with_a_target_from_outside(tmp_path):
    model, out = chain("HardSwish", "SiLU", "LeakyRelu"), tmp_path / "out.onnx"
    report = quantized(model, out)
    assert report.verdict() == f"Quantized; not proved: target '{OWN.name}' has no runtime here."
    assert f"Not timed: target '{OWN.name}' has no runtime here." in report.notes
    assert (report.fusion, report.warnings, report.speed) == (None, (), None)
    assert [n.node for n in report.plan.nodes if n.rule == "verified-float"] == []
    written = onnx.load(out)
    read = {n.name: sorted(behind(written, n.name)) for n in written.graph.node}
    assert [read[f"c{at}"] for at in range(4)] == [["HardSwish"], ["Mul", "Sigmoid"], ["LeakyRelu"], ["Relu"]]
    activations = [n.name for n in written.graph.node if n.op_type in ("HardSwish", "Mul", "LeakyRelu", "Relu")]
    assert [read[name] for name in activations] == [["QuantizeLinear"]] * 4
    assert quality(model, out, models.feeds(model, 4)) > 20


def test_the_same_net_on_two_targets_has_q_in_other_places(tmp_path):
    model = chain("HardSwish")
    here, there = tmp_path / "ort.onnx", tmp_path / "own.onnx"
    quantized(model, here, ORT, rewrites=False)
    quantized(model, there, rewrites=False)
    assert [behind(onnx.load(path), "c0") for path in (here, there)] == [["QuantizeLinear"], ["HardSwish"]]
    assert all(k.integer for k in verify_fusion(here).kernels if k.op_type == "Conv")
    with pytest.warns(KenosisWarning, match=f"made for target '{OWN.name}'"):
        proof = verify_fusion(there)
    assert not all(k.integer for k in proof.kernels if k.op_type == "Conv")


def text(body, last):
    """Convs of eight channels with nodes between them."""
    return parse(f"""(float[1,8,8,8] x) => (y) <float[8,8,1,1] w, float[8,8,1,1] v, float[8,8,1,1] u, float[4,16,1,1] t>
        {{ [c] c = Conv (x, w) {body} [last] y = Conv ({last}) }}""")


def test_epilogues_end_where_the_table_says():
    found = preview(text("""[a0] p = LeakyRelu (c) [a1] q = Tanh (p) [a2] r = Elu (q) [a3] s = HardSwish (r)
        [a4] z = Sigmoid (s)""", "z, u"), target=OWN)  # fmt: skip
    assert [found.by_node[f"a{i}"].kind for i in range(5)] == [Kind.ABSORBED] * 4 + [Kind.INTEGER]
    carried = {d.edge.value for d in found.decisions if d.dtype and d.edge.consumer.startswith("a")}
    assert carried == {next(d.edge.value for d in found.decisions if d.edge.consumer == "a4")}


def test_a_residual_add_keeps_q_on_both_inputs_or_on_the_shortcut_alone():
    model = models.residual_block()
    for target, kinds in ((OWN, ["uint8"] * 2), (dataclasses.replace(OWN, residual="shortcut"), ["", "uint8"])):
        plan = preview(model, target=target)
        assert sorted(d.dtype for d in plan.decisions if d.edge.consumer == "add") == kinds
        assert (plan.by_node["add"].kind is Kind.ABSORBED) == (target is not OWN)


def test_of_two_convs_in_a_residual_add_one_takes_it_in():
    net = text("""r = Relu (c) [main] m = Conv (r, v) [projection] p = Conv (r, u)
        [add] a = Add (m, p) [behind] b = Relu (a)""", "b, w")  # fmt: skip
    found = preview(net, target=dataclasses.replace(OWN, residual="shortcut"))
    assert {found.by_node[name].kind for name in ("add", "behind")} == {Kind.ABSORBED}
    assert found.by_node["add"].reason.endswith("'main'")
    read = {d.edge.value: d for d in found.decisions if d.edge.consumer == "add"}
    assert {value: (d.how, d.dtype) for value, d in read.items()} == {"m": (How.FLOAT, ""), "p": (How.OWN, "uint8")}
    assert read["p"].reason == "the shortcut that the kernel of 'main' adds"


@pytest.mark.parametrize(("model", "said"), [
    (text("d = Conv (x, v) j = Concat <axis = 1> (c, d) [act] a = HardSwish (j)", "a, t"), {}),
    (text("[act] a = HardSwish (c)", "a, u"), {"c": [{"rmin": -4.0, "rmax": 4.0}]}),
], ids=["a concat computes none", "the caller's own range"])  # fmt: skip
def test_what_ends_before_an_activation(model, said):
    plan = preview(model, target=OWN, extra_options={"TensorQuantOverrides": said}, rewrites=False)
    assert plan.by_node["act"].kind is not Kind.ABSORBED
    assert {d.edge.value for d in plan.decisions if d.dtype} >= {*said}


def test_symmetric_activations_and_float_biases(tmp_path):
    int8 = onnx.TensorProto.INT8
    types = DataTypes(activation=int8, activations=(int8,), weights=(int8,), only_these=True, symmetric=True,
                      weight_symmetric=True, why="a test says so")  # fmt: skip
    signed = dataclasses.replace(OWN, types=types, hooks=Hooks(writes_float=ORT.hooks.writes_float), bias="float")
    model, out = chain("HardSwish", "SiLU"), tmp_path / "out.onnx"
    report = quantized(model, out, signed)
    nodes, held = onnx.load(out).graph.node, initializers(out)
    zero_points = [held[n.input[2]] for n in nodes if n.op_type == "QuantizeLinear"]
    assert {(z.dtype.name, bool(z.any())) for z in zero_points} == {("int8", False)}
    assert {d.grid for d in report.plan.decisions if d.dtype and d.axis is None} == {"int8 symmetric"}
    assert {held[n.input[2]].dtype.name for n in nodes if n.op_type == "Conv" and len(n.input) > 2} == {"float32"}
    for said in ({"activation_type": 2}, {"weight_type": 2}, {"extra_options": {"ActivationSymmetric": False}}):
        with pytest.raises(OptionError, match="a-runtime-elsewhere"):
            quantized(model, out, signed, **said)
    with pytest.raises(OptionError, match="does not read files in format 'qop'"):
        quantized(model, out, dataclasses.replace(OWN, formats=("qdq",)), quant_format="QOperator")


def test_a_target_without_a_runtime_cannot_be_asked(tmp_path):
    with pytest.raises(OptionError, match="has no runtime here"):
        verify_fusion(chain("Relu"), target=OWN)
    with pytest.raises(OptionError, match=r"unknown target 'ort-cpv'.*Did you mean 'ort-cpu'"):
        quantized(chain("Relu"), tmp_path / "out.onnx", "ort-cpv")
    assert OWN.name not in TARGETS


# ---- those that come with the package, whatever their tables say -----------------------------------------------------


@pytest.mark.filterwarnings("ignore:.* not run on integers on target")
@pytest.mark.parametrize("target", [*TARGETS.values(), OWN], ids=lambda target: target.name)
@pytest.mark.parametrize("name", models.ALL)
def test_a_net_of_every_family(target, name, tmp_path):
    model, out = models.ALL[name](), tmp_path / "out.onnx"
    how = {"recipe": "plain", "promise": False, "verify": False}
    report = quantize_static(model, out, models.reader(model, 6), target=target, **how)
    assert report.target == report.plan.target == target.name
    assert report.plan.integer_nodes()
    types = {onnx.TensorProto.DataType.Name(t).lower() for t in target.data_types().activations}
    assert {d.dtype for d in report.plan.decisions} <= {"", "int32", "int8", *types}
    if not target.loads_in_ort:
        return
    feeds = models.feeds(model, 4)
    exact = target.types.largest_pair is not None or not SATURATES  # else its files are for other kernels than these
    with configured(target.session_entries):
        session = open_session(out, optimize=exact)
    ran = [session.run(None, feed) for feed in feeds]
    for want, got in zip(itertools.chain(*run(model, feeds)), itertools.chain(*ran), strict=True):
        if want.dtype.kind == "f":
            assert sqnr_db(want, got) > 8


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_without_stages_it_is_stock(target, tmp_path):
    model, (source, theirs, ours) = models.residual_block(), (tmp_path / f"{name}.onnx" for name in "fso")
    onnx.save(model, source)
    stock(source, theirs, models.reader(model, 4))
    quantize_static(source, ours, models.reader(model, 4), target=target, stages=Stages.none())
    assert differences(onnx.load(theirs), onnx.load(ours)) == []


UINT8 = {"quant_type": QuantType.QUInt8}
WIDE = {"quant_type": QuantType.QInt16}


OVERRIDE = "takes? .*'conv0_(out|w)'|not take .*'conv0_(out|w)'"


def entry(name, **said):
    return {"extra_options": {"TensorQuantOverrides": {name: [said]}}}


@pytest.mark.parametrize(("target", "said", "words"), [
    *((target, entry("conv0_w", **UINT8), OVERRIDE) for target in ("onednn", "tensorrt")),
    ("tensorrt", entry("conv0_out", **UINT8), OVERRIDE), ("tensorrt", entry("conv0_out", symmetric=False), OVERRIDE),
    ("tensorrt", entry("conv0_out", scale=np.float32(0.1), zero_point=np.int8(3)), OVERRIDE),
    ("qnn", entry("conv0_out", **WIDE), OVERRIDE),
    ("onednn", entry("conv0_out", **UINT8, convert={**WIDE, "recv_nodes": {"relu1"}}), OVERRIDE),
    ("onednn", {"weight_type": QuantType.QUInt8}, "weight_type"),
    ("qnn", {"activation_type": QuantType.QInt8}, "does not take"),
    ("qnn", {"weight_type": QuantType.QInt16}, "does not take"),
    ("tensorrt", {"activation_type": QuantType.QUInt8}, "int8 with zero point 0 alone"),
    ("tensorrt", {"weight_type": QuantType.QUInt8}, "int8 with zero point 0 alone"),
])  # fmt: skip
def test_types_without_kernels_are_refused_before_calibration(target, said, words):
    """The runtime would refuse the file, or compute something else; the reader is empty and would say so if asked."""
    with pytest.raises(OptionError, match=f"target '{target}'.* {words}|{words}"):
        quantize_static(models.conv_relu_chain(2), "never.onnx", models.FeedReader([]), target=target, **said)


@pytest.mark.parametrize("module", ["onednn.openvino_proof", "ort_web", "qnn.htp_proof"])
def test_libraries_of_operators_for_onnxruntime_are_refused_elsewhere(module):
    prove = importlib.import_module(f"kenosis_ort.targets.{module}").prove
    with pytest.raises(VerificationError, match="leave custom_op_libraries out"):
        prove(models.mlp(), custom_op_libraries=["lib.so"])


@pytest.mark.parametrize("target", ["ort-cpu", "arm", "ort-web"])
def test_an_override_is_kept_where_the_runtime_runs_it_in_float(target, tmp_path):
    model, said = models.conv_relu_chain(8), entry("conv0_out", **WIDE)
    settled = {"recipe": "plain", "promise": False, "verify": False, **said}
    report = quantize_static(model, tmp_path / "o.onnx", models.reader(model, 2), target=target, **settled)
    assert {d.dtype for d in report.plan.by_value["conv0_out"]} <= {"int16", ""}
