"""What the caller says is done to the letter; all else is as if nothing had been said, and as the machine decides."""

import copy
from collections import Counter
from dataclasses import replace

import numpy as np
import onnx
import onnx.version_converter
import pytest
from onnxruntime.quantization import CalibrationMethod, QuantType, quantize_static as stock_quantize_static

from kenosis_ort import KenosisWarning, OptionError, Stages, VerificationError, quantize_static, verify_fusion
from kenosis_ort.passes.evaluator import Score
from kenosis_ort.targets import DataTypes
from kenosis_ort.targets.ort_cpu.rules import for_this_machine, is_arm
from tests import models
from tests.flow.support import QDQ, Made, changed, chosen, good, make, own_warnings, pairs, proof, quality, quantized
from tests.planning import parse
from tests.processor import ARM, NO_VNNI, VNNI
from tests.quantizer.test_grids import clipping_layers

TYPES = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8, "per_channel": False}


def extra(**options):
    return {"extra_options": options}


def overridden(folder, overrides, model=None, **options):
    """A residual block, or another model, with TensorQuantOverrides."""
    return make(model or models.residual_block(), folder, **extra(TensorQuantOverrides=overrides), **options)


def stocks(tmp_path, model, **options):
    """The integer nodes and the quality of stock's file."""
    out = tmp_path / "stock.onnx"
    stock_quantize_static(changed(model), out, models.FeedReader(models.feeds(model)), **{**TYPES, **options})
    integer = {kernel.node for kernel in verify_fusion(out).kernels if kernel.integer}
    return integer, quality(model, out, models.feeds(model))


def as_good_as_plain(made):
    """The integer nodes are those of a call without the option, and so is the quality."""
    plain = make(made.model, made.out.with_name("plain.onnx"))
    assert (made.integer, made.db()) == (plain.integer, pytest.approx(plain.db(), abs=0.5))


# ---- tensors --------------------------------------------------------------------------------------------------


def test_tensor_overrides_are_exact(tmp_path):
    overrides = {
        "x": [{"scale": 0.05, "zero_point": 100}],  # plain numbers, as in JSON configurations
        "relu2_out": [{"rmin": 0, "rmax": 7.65}],
        "stem_relu_out": [{"rmin": np.array(0.0, np.float32), "rmax": np.array(5.1, np.float32)}],
        "conv1_w": [{"quant_type": QuantType.QInt8, "symmetric": True, "reduce_range": True}],
        "conv2_w": [{"axis": 0, "quant_type": QuantType.QInt8, "symmetric": True}],
    }
    before = copy.deepcopy(overrides)
    made = overridden(tmp_path, overrides, **TYPES)
    assert overrides == before
    scales = [float(made.grids[name][0]) for name in ("x", "stem_relu_out", "relu2_out")]
    assert scales == pytest.approx([0.05, 5.1 / 255, 7.65 / 255])
    assert (made.grids["x"][1], made.grids["x"][1].dtype) == (100, np.uint8)
    assert np.abs(made.held["conv1_w_quantized"]).max() == 64
    assert (made.held["conv2_w_scale"].shape, made.held["stem_w_scale"].shape) == ((8,), ())
    assert made.integer == make(made.model, tmp_path / "plain.onnx", **TYPES).integer
    assert any("TensorQuantOverrides" in note for note in made.report.notes)


@pytest.mark.parametrize("kind", [QuantType.QUInt16, QuantType.QInt8], ids=["another width", "another sign"])
def test_a_tensor_of_another_type(tmp_path, kind):
    """What touches it runs in float, the rest in integer as ever."""
    made = overridden(tmp_path, {"relu1_out": [{"quant_type": kind}]}, **TYPES)
    kinds = {name: zero_point.dtype for name, (_, zero_point) in made.grids.items()}
    assert kinds.pop("relu1_out") == (np.uint16 if kind is QuantType.QUInt16 else np.int8)
    assert {*kinds.values()} == {np.dtype(np.uint8)}
    assert made.integer & {"stem", "head", "conv2"} == {"stem", "head"}
    assert made.report.plan.by_node["conv2"].rule == "caller-tensor-types"
    assert made.db() > 40


def test_a_converted_tensor(tmp_path):
    """Written in 16 bits, read in 8 by one of its readers, and in 16 by the other."""
    convert = {"quant_type": QuantType.QUInt8, "recv_nodes": {"conv1"}}
    overrides = {"stem_relu_out": [{"quant_type": QuantType.QUInt16, "convert": convert}]}
    made = overridden(tmp_path, overrides, models.residual_block(opset=21), **TYPES)
    nodes = made.written.graph.node
    produced, by_name = {o: n for n in nodes for o in n.output}, {n.name: n for n in nodes}
    kinds = {n: made.held[produced[by_name[n].input[i]].input[2]].dtype for n, i in (("conv1", 0), ("add", 1))}
    assert kinds == {"conv1": np.uint8, "add": np.uint16}
    assert {"conv1", "head"} <= made.integer
    assert made.db() > 39


def test_parameters_around_a_relu_leave_its_conv_in_integers(tmp_path):
    behind = overridden(tmp_path / "behind.onnx", {"relu1_out": [{"scale": 0.05, "zero_point": 60}]})
    before = overridden(tmp_path / "before.onnx", {"conv1_out": [{"rmin": -4.0, "rmax": 4.0}]})
    assert {"conv1", "conv2"} <= behind.integer & before.integer
    assert {"conv1_out", "relu1_out"} <= behind.grids.keys()  # Q on both sides of it
    assert float(before.grids["conv1_out"][0]) == pytest.approx(8 / 255)


def test_a_shared_scale_is_the_callers(tmp_path):
    """A MaxPool hands its parameters on, from either side of it."""
    model = parse("""net (float[1,3,8,8] x) => (float[1,4,7,7] y) <float[4,3,3,3] w, float[4,4,3,3] v> {
        c = Conv <pads = [1,1,1,1]> (x, w)  p = MaxPool <kernel_shape = [2,2]> (c)  y = Conv <pads = [1,1,1,1]> (p, v)
        }""")
    for name in ("c", "p"):
        made = overridden(tmp_path, {name: [{"scale": 0.03, "zero_point": 120}]}, model)
        assert float(made.grids["c"][0]) == float(made.grids["p"][0]) == pytest.approx(0.03)
        assert {"Conv_c", "MaxPool_p", "Conv_y"} <= made.integer
    overrides = {"c": [{"scale": 0.03, "zero_point": 120}], "p": [{"scale": 0.04, "zero_point": 120}]}
    found = overridden(tmp_path, overrides, model).grids
    assert [float(found[k][0]) for k in "cp"] == pytest.approx([0.03, 0.04])


@pytest.mark.parametrize("entry", [
    [{"scale": 0.1}], [{"axis": 0, "quant_type": QuantType.QUInt8}], [{"convert": {"quant_type": QuantType.QUInt8}}],
    [{"quant_type": "QInt9"}], 5, [{"quant_type": QuantType.QFLOAT8E4M3FN}], [{"scale": 0, "zero_point": 0}],
    [{"scale": np.nan, "zero_point": 0}], [{"scale": 0.1, "zero_point": 256}], [{"scale": 0.1, "zero_point": np.nan}],
    [{"scale": [0.1, 0.2], "zero_point": 0}], [{"rmin": np.inf}], [{"rmax": "3"}], [{"rmin": 3.0, "rmax": -1.0}],
], ids=str)  # fmt: skip
def test_overrides_that_make_no_sense(tmp_path, entry):
    with pytest.raises(OptionError, match=r"TensorQuantOverrides.* Fix: "):
        overridden(tmp_path, {"x": entry}, **TYPES)


def test_overrides_of_what_nothing_reads_say_nothing(tmp_path):
    model = models.residual_block()
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(3, np.float32), "spare"))
    as_good_as_plain(overridden(tmp_path, {"spare": [{"symmetric": True}]}, model))


# ---- how Q and DQ are written ---------------------------------------------------------------------------------


def has_dedicated_pairs(made):
    """Each Q and DQ has one reader, and what two nodes read has two of them."""
    nodes = made.written.graph.node
    reads = Counter(name for node in nodes for name in node.input)
    quantized = [node.input[0] for node in nodes if node.op_type == "QuantizeLinear"]
    return {reads[n.output[0]] for n in nodes if n.op_type in QDQ} == {1} and quantized.count("stem_relu_out") == 2


FORMS = {
    "AddQDQPairToWeight": lambda made: {"conv1_w", "conv2_w", "head_w"} <= pairs(made.out) & made.held.keys(),
    "UseQDQContribOps": lambda m: {n.domain for n in m.written.graph.node if n.op_type in QDQ} == {"com.microsoft"},
    "DedicatedQDQPair": has_dedicated_pairs,
    "QDQKeepRemovableActivations": lambda made: {"stem_relu", "relu1"} <= {n.name for n in made.written.graph.node},
}
NOTHING = {"EnableSubgraph": 1, "DefaultTensorType": 1, "ForceQuantizeNoInputCheck": 1, "MinimumRealRange": 1e-4,
           "TensorQuantOverrides": {"conv1_out": []}}  # fmt: skip


@pytest.mark.parametrize("option", [*FORMS, *NOTHING])
def test_options_that_change_the_form_alone_or_say_nothing(tmp_path, option):
    made = make(models.residual_block(), tmp_path, **extra(**{option: NOTHING.get(option, True)}))
    assert FORMS.get(option, bool)(made)
    assert chosen(made.report)[f"extra_options.{option}"][1] == "caller"
    as_good_as_plain(made)


@pytest.mark.parametrize(("net", "option", "but"), [
    ("residual_block", "nodes_to_quantize", ()), ("mobile_block", "op_types_to_quantize", ()),
    ("silu_net", "op_types_to_quantize", ()), ("transformer_block", "op_types_to_quantize", ()),
    ("transformer_block", "op_types_to_quantize", ("Softmax", "Gelu")),  # which stay float
])  # fmt: skip
def test_lists_that_leave_out_nothing(tmp_path, net, option, but):
    model = models.ALL[net]()
    named = {n.name if option == "nodes_to_quantize" else n.op_type for n in model.graph.node}
    as_good_as_plain(made := make(model, tmp_path, **{option: sorted(named.difference(but))}))
    assert f"{option}: it leaves out nothing that would be quantized, so it says nothing." in made.report.notes


@pytest.mark.parametrize("net", ["residual_block", "mlp", "transformer_block"])
def test_float_biases(tmp_path, net):
    """Gemm and MatMul need a Q on their output then, which costs what the default does not."""
    made = make(models.ALL[net](), tmp_path, **extra(QuantizeBias=False))
    assert not any(a.dtype == np.int32 for a in made.held.values())
    heavy_nodes = {n.name for n in made.model.graph.node if n.op_type in ("Conv", "Gemm", "MatMul")}
    assert make(made.model, tmp_path / "plain.onnx").integer & heavy_nodes <= made.integer
    assert made.db() > stocks(tmp_path, made.model, **extra(QuantizeBias=False))[1]


def test_outputs_without_q(tmp_path):
    """No Q sits on the output of a Conv that no integer kernel reads; such a Conv runs in float."""
    model = parse("""(float[1,3,8,8] x) => (float[1,4,8,8] y) <float[4,3,3,3] u, float[4,4,3,3] v, float[4,4,3,3] w> {
        [c0] a = Conv <pads = [1,1,1,1]> (x, u)  [t] t = Tanh (a)  [c1] b = Conv <pads = [1,1,1,1]> (t, v)
        [c2] c = Conv <pads = [1,1,1,1]> (b, w)  [r] y = Relu (c) }""")
    assert {"a", "b"} <= make(model, tmp_path, protect_outputs="int8").grids.keys()
    options = extra(OpTypesToExcludeOutputQuantization=["Conv", "Gemm", "MatMul"])
    made = make(model, tmp_path, protect_outputs="int8", **options)
    assert made.grids.keys() & {"a", "b"} == {"b"}  # for its reader's sake, as in stock
    assert "OpTypesToExcludeOutputQuantization" in made.report.plan.by_node["c0"].reason
    assert made.integer & {"c0", "c1", "c2"} == {"c1", "c2"}
    assert made.integer >= stocks(tmp_path, made.model, **options)[0]
    gates = make(models.silu_net(), tmp_path, **options)
    assert {n for n in make(gates.model, tmp_path / "plain.onnx").integer if n.startswith("conv")} <= gates.integer


@pytest.mark.parametrize("axis", [1, -1, 0])
def test_the_axis_of_matmul_weights(tmp_path, axis):
    options = extra(QDQOpTypePerChannelSupportToAxis={"MatMul": axis})
    made = make(models.transformer_block(), tmp_path, per_channel=True, **options)
    assert made.held["up_w_scale"].shape == (made.held["up_w_quantized"].shape[axis],)
    assert ("up" in made.integer) == (axis != 0)
    assert made.db() > 38
    assert axis != 0 or "axis 0" in made.report.plan.by_node["up"].reason


# ---- types ----------------------------------------------------------------------------------------------------


@pytest.mark.since("1.27")
@pytest.mark.parametrize(("weight", "block"), [
    (QuantType.QInt4, 0), (QuantType.QInt4, 16), (QuantType.QUInt4, 0), (QuantType.QUInt4, 16), (QuantType.QInt8, 16),
])  # fmt: skip
def test_four_bits_and_blocks(tmp_path, weight, block):
    """Linear layers read float data then, for which MatMulNBits is made; stock quantizes it, and loses the kernel."""
    made = make(models.transformer_block(), tmp_path, weight_type=weight, **(extra(BlockSize=block) if block else {}))
    loaded = {i.name: i for i in made.written.graph.initializer}
    wanted = {"QInt4": "INT4", "QUInt4": "UINT4", "QInt8": "INT8"}[weight.name]
    assert loaded["up_w_quantized"].data_type == onnx.TensorProto.DataType.Value(wanted)
    if block:
        rows, columns = loaded["up_w_quantized"].dims
        assert tuple(loaded["up_w_scale"].dims) == (rows // block, columns)
    kernels = verify_fusion(made.out).by_node
    assert kernels["up"].kernel == kernels["q"].kernel == "com.microsoft.MatMulNBits"
    assert made.report.left_float() == ()
    assert any(("BlockSize" if block else "weight_type") in note for note in made.report.notes)
    assert made.db() > (16 if weight is not QuantType.QInt8 else 35)


def test_four_bits_that_no_kernel_takes(tmp_path):
    """The runtime makes a QLinearConv of it, which takes bytes alone."""
    types = {"activation_type": QuantType.QInt4, "weight_type": QuantType.QInt8}
    with pytest.raises(VerificationError, match="does not load"):
        make(models.residual_block(), tmp_path, **types)


@pytest.mark.parametrize(("options", "holds"), [
    ({"ActivationSymmetric": True}, lambda made: {int(z) for _, z in made.grids.values()} <= {127, 128}),
    ({"WeightSymmetric": False}, lambda made: any(made.held[n].any() for n in made.held if "w_zero_point" in n)),
    ({"MinimumRealRange": 20}, lambda made: all(float(s) * 255 >= 20 * (1 - 1e-6) for s, _ in made.grids.values())),
])  # fmt: skip
def test_symmetry_and_least_ranges(tmp_path, options, holds):
    assert holds(make(models.residual_block(), tmp_path, **extra(**options), **TYPES))


# ---- nodes and operators --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "integer"), [
    ({"nodes_to_quantize": ["conv1", "conv2"]}, {"conv1", "conv2"}),
    ({"nodes_to_quantize": ["conv1", "conv2"], "nodes_to_exclude": ["conv2"]}, {"conv1"}),
    ({"op_types_to_quantize": ["Conv"]}, {"stem", "conv1", "conv2"}),
    ({"nodes_to_exclude": ["stem", "add", "head"]}, {"conv1", "conv2"}),
])  # fmt: skip
def test_what_is_named_and_nothing_else(tmp_path, options, integer):
    made = good(models.residual_block(), tmp_path, **options)
    assert {name for name, runs in made.heavy.items() if runs} == integer
    assert "head_w" in made.held
    assert "add_out" not in made.grids
    told = "nodes_to_quantize: these nodes are quantized and no others."
    assert (told in made.report.notes) == ("nodes_to_quantize" in options)
    for name in options.get("nodes_to_exclude", ()):
        assert proof(made.report).by_node[name].absorbed_into is None
        assert "excluded" in made.report.plan.explain(name)


def test_what_would_stay_float_is_quantized_where_it_is_named(tmp_path):
    by_node = make(models.transformer_block(), tmp_path / "node.onnx", nodes_to_quantize=["softmax", "up"])
    by_type = make(models.transformer_block(), tmp_path / "type.onnx", op_types_to_quantize=["MatMul", "Softmax"])
    for made in (by_node, by_type):
        assert made.integer & {"softmax", "up", "qk"} == {"softmax", "up"}  # products of activations are no faster
    assert by_node.grids.keys() == {"masked_out", "softmax_out", "norm2_out"}
    assert by_node.report.plan.by_node["softmax"].rule == "caller-insists"
    assert "softmax_out" in by_type.grids
    assert "op_types_to_quantize: no other operators are quantized." in by_type.report.notes


def test_operators_that_move_bytes_are_forced(tmp_path):
    model = parse("""(float[8,4] x) => (float[4,8] y) <float[4,4] w> {
        f = Gemm (x, w)  s = Softmax (f)  t = Transpose <perm = [1, 0]> (s)  y = Tanh (t) }""")
    assert "Transpose_t" not in make(model, tmp_path).integer
    made = make(model, tmp_path, **extra(ForceQuantizeNoInputCheck=True))
    assert {"Transpose_t", "Gemm_f"} <= made.integer
    assert {"s", "t"} <= pairs(made.out)
    assert any("ForceQuantizeNoInputCheck" in note for note in made.report.notes)


def test_named_nodes_are_not_rewritten_away(tmp_path):
    made = make(models.bn_net(), tmp_path, nodes_to_exclude=["bn0"])
    assert {n.name for n in made.written.graph.node} & {"bn0", "bn1"} == {"bn0"}
    assert made.db() > 30


@pytest.mark.x86_only
@pytest.mark.parametrize("opset", [17, 21])
def test_int8_activations_of_a_transformer_are_integer_whatever_its_operator_set(tmp_path, opset):
    """From operator set 21 on the runtime refuses its own change of int8 activations to uint8."""
    model = onnx.version_converter.convert_version(models.transformer_block(tokens=6, width=32), opset)
    report = quantized(model, tmp_path / "q.onnx", recipe="fast", tune="model", activation_type=QuantType.QInt8)
    assert len(report.plan.integer_nodes()) == 6
    assert not [text for text in report.warnings if "stock" in text]


# ---- what the machine decides where the caller says nothing, and what happens where the caller insists --------------


INT8 = {"activation_type": QuantType.QInt8}
NAIVE = Stages(placement=False)
FLOAT8 = dict.fromkeys(("activation_type", "weight_type"), QuantType.QFLOAT8E4M3FN)
ONE, ZERO = np.array(1.0, np.float32), np.array(0.0, np.float32)
FLOAT8 |= {"calibrate_method": CalibrationMethod.Distribution}
FLOAT8_RUNS = pytest.mark.since("1.24")  # before, the runtime makes a QLinearConv of it, which takes no such type


def test_types_follow_the_host_and_not_the_probe(tmp_path, pretend):
    files = []
    for host in (VNNI, NO_VNNI, ARM):
        pretend(host)
        made, kind = make(models.mobile_block(), tmp_path), QuantType.QInt8 if host is ARM else QuantType.QUInt8
        usual = {"activation_type": kind, "weight_type": QuantType.QInt8, "per_channel": True, "reduce_range": False}
        assert chosen(made.report).items() >= {name: (value, "host default") for name, value in usual.items()}.items()
        weights = made.held["depthwise_w_quantized"]
        assert (weights.dtype, np.abs(weights).max()) == (np.int8, 127)  # depthwise: its kernel adds no pairs
        assert made.held["depthwise_w_scale"].shape == (weights.shape[0],)
        kinds = {zero_point.dtype for _, zero_point in made.grids.values()}
        assert kinds == {np.dtype(np.int8 if host is ARM else np.uint8)}
        files.append(made.out.read_bytes())
    assert files[0] == files[1]


@pytest.mark.parametrize(("options", "said"), [
    ({"weight_type": QuantType.QUInt8}, {"per_channel": (False, "host default")}),
    ({"activation_type": QuantType.QUInt8.tensor_type.real}, {"activation_type": (QuantType.QUInt8, "caller")}),
    ({"reduce_range": True}, {"reduce_range": (True, "caller"), "per_channel": (True, "host default")}),
    ({"stages": Stages.none()}, dict.fromkeys(("per_channel", "reduce_range"), (False, "stock default"))),
    ({"stages": Stages.none()}, {"activation_type": (QuantType.QInt8, "stock default")}),
    pytest.param(FLOAT8, {"reduce_range": (False, "host default")}, marks=FLOAT8_RUNS),
    pytest.param({**FLOAT8, **extra(TensorQuantOverrides={"relu1_out": [{"scale": ONE, "zero_point": ZERO}]})},
                 {"reduce_range": (False, "host default")}, marks=FLOAT8_RUNS),
    pytest.param({**FLOAT8, "stages": NAIVE}, {"reduce_range": (False, "host default")}, marks=FLOAT8_RUNS),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::kenosis_ort.KenosisWarning")  # accuracy is not the question
def test_other_defaults(tmp_path, pretend, options, said):
    pretend(NO_VNNI)
    assert chosen(quantized(models.residual_block(), tmp_path / "out.onnx", **options)).items() >= said.items()


@pytest.mark.parametrize("options", [{"stages": Stages(weights=False)}, {"extra_options": {"WeightSymmetric": False}}])
def test_weights_by_stocks_scales_get_seven_bits(tmp_path, options):
    made = make(models.residual_block(), tmp_path, **options)
    assert chosen(made.report)["reduce_range"] == (True, "host default")
    assert made.db() > 25
    wide = quantized(models.residual_block(), made.out, weight_type=QuantType.QUInt8, **options)
    assert not chosen(wide)["reduce_range"][0]


# ---- insisting on int8 ----------------------------------------------------------------------------------------


@pytest.mark.x86_only
@pytest.mark.parametrize("net", ["residual_block", "silu_net", "concat_net", "two_input_detector", "net_with_if"])
def test_int8_on_x64_with_branches_runs_in_integer(tmp_path, pretend, net):
    """Stock's file and a plain placement run Convs around such a value in float."""
    pretend(VNNI)
    unsigned = make(models.ALL[net](), tmp_path / "u8.onnx", activation_type=QuantType.QUInt8)
    signed = make(models.ALL[net](), tmp_path, **INT8)
    assert signed.report.warnings == unsigned.report.warnings == ()
    assert (signed.heavy, signed.db()) == (unsigned.heavy, pytest.approx(unsigned.db(), abs=0.5))
    assert {zero_point.dtype for _, zero_point in signed.grids.values()} == {np.dtype(np.int8)}


@pytest.mark.x86_only
def test_int8_on_x64_with_branches_warns_once_at_the_callers_line(tmp_path, pretend):
    pretend(VNNI)
    model, out = models.concat_net(), tmp_path / "out.onnx"
    with pytest.warns(KenosisWarning) as caught:
        report = quantize_static(model, out, models.reader(model), promise=False, stages=NAIVE, **INT8)
    (text,) = own_warnings(list(caught))
    assert caught[0].filename == __file__
    slow = [name for name, integer in Made(model, [], out, report).heavy.items() if not integer]
    assert slow
    assert all(part in text for part in (f"{len(slow)} Convs", f"'{slow[0]}'", "Fix: activation_type=QuantType.QUInt8"))
    assert report.warnings == (text,)
    assert chosen(report)["activation_type"] == (QuantType.QInt8, "caller")


@pytest.mark.parametrize(("build", "host", "options"), [
    (lambda: models.conv_relu_chain(4), VNNI, INT8), (models.concat_net, ARM, INT8), (models.concat_net, VNNI, {}),
    (lambda: models.conv_relu_chain(4), VNNI, {**INT8, "nodes_to_exclude": ["conv2"]}),
    (lambda: models.conv_relu_chain(4), VNNI, {**INT8, "protect_outputs": "float"}),
], ids=["no branch on x64", "branches on Arm", "nothing said", "kept float", "output kept float"])  # fmt: skip
def test_int8_without_harm_does_not_warn(tmp_path, pretend, build, host, options):
    pretend(host)
    made = make(build(), tmp_path, **options)
    assert not [w for w in made.report.warnings if "QInt8" in w]
    if len(options) > 1:
        assert made.heavy["conv2"] is False


# ---- the probe ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("host", "arm"), [(ARM, True), (VNNI, False), (NO_VNNI, False)])
def test_types_and_reasons_follow_the_family_and_the_probe(pretend, host, arm):
    families = "aarch64 arm64 ARM64" if arm else "x86_64 AMD64"
    for family in families.split():
        pretend(replace(host, family=family))
        found = for_this_machine(DataTypes())
        assert is_arm(family) == arm == (found.activation == onnx.TensorProto.INT8) == (not found.single_reader)
        assert found.saturates == ("clipped there" in found.why) == (host is NO_VNNI)


# ---- weights whose pairs may clip: for a machine that the caller names, and where held-out samples gain by them --


@pytest.mark.parametrize(("machine", "named", "gains"), [
    (VNNI, "vnni", True), (VNNI, "amx", True), (VNNI, None, True),  # not without the caller's word
    (NO_VNNI, "vnni", True), (VNNI, "vnni", False),  # the gain cannot be measured, there is none
])  # fmt: skip
def test_weights_that_may_clip(tmp_path, pretend, machine, named, gains):
    pretend(machine)
    model = models.residual_block()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Score, "beats", lambda *_: gains)
        made = make(model, tmp_path, models.feeds(model, 16), recipe="fast", **({"host": named} if named else {}))
        made.report.save_recipe(tmp_path / "kept.toml")
        again = make(model, tmp_path / "again.onnx", models.feeds(model, 16), recipe=tmp_path / "kept.toml")
    assert again.out.read_bytes() == made.out.read_bytes()
    taken = machine is VNNI and named is not None and gains
    notes = " ".join(made.report.notes)
    processors = [e.value for e in made.written.metadata_props if e.key == "kenosis_ort.processors"]
    assert bool(clipping_layers(made.written)) == taken
    assert not taken or processors == ["with VNNI"]
    assert (f"for processors with VNNI, as '{named}'" in notes) == taken
    assert ("cannot be measured" in notes) == (machine is NO_VNNI)
    assert named or not processors
