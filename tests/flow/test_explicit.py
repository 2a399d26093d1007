"""What the caller says is done to the letter, and everything else is placed as if nothing had been said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.version_converter
import pytest
from onnxruntime.quantization import QuantType
from onnxruntime.quantization import quantize_static as stock_quantize_static

from kenosis_ort import OptionError, quantize_static, verify_fusion
from tests import models
from tests.flow.support import chosen, heavy, initializers, pairs, parameters, quality, quantized
from tests.models import FeedReader, Net

TYPES: dict[str, Any] = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8, "per_channel": False}


def base(name: str) -> str:
    """Returns the value's own name where the quantizer renamed it in front of Q."""
    return name.removesuffix("_barrier").removesuffix("_QuantizeLinear_Input")


def integer(out: Path) -> set[str]:
    """Returns the names of the nodes that run on integer kernels."""
    return {kernel.node for kernel in verify_fusion(out).kernels if kernel.integer}


def readers(out: Path, value: str) -> list[onnx.NodeProto]:
    return [node for node in onnx.load(out).graph.node if value in node.input]


def plain(tmp_path: Path, model: onnx.ModelProto, **options: Any) -> tuple[set[str], float]:
    """Returns the integer nodes and the quality of a call without the option under test."""
    out = tmp_path / "plain.onnx"
    quantized(model, out, **options)
    return integer(out), quality(model, out, models.feeds(model))


def stocks(tmp_path: Path, model: onnx.ModelProto, **options: Any) -> tuple[set[str], float]:
    """Returns the integer nodes and the quality of stock's file."""
    out, copy = tmp_path / "stock.onnx", onnx.ModelProto()
    copy.CopyFrom(model)
    stock_quantize_static(copy, out, FeedReader(models.feeds(model)), **{**TYPES, **options})
    return integer(out), quality(model, out, models.feeds(model))


# ---- tensors --------------------------------------------------------------------------------------------------


def test_tensor_overrides_are_exact(tmp_path: Path) -> None:
    model, out = models.residual_block(), tmp_path / "out.onnx"
    overrides: dict[str, Any] = {
        "x": [{"scale": np.array(0.05, np.float32), "zero_point": np.array(100, np.uint8)}],
        "stem_relu_out": [{"rmin": np.array(0.0, np.float32), "rmax": np.array(5.1, np.float32)}],
        "conv1_w": [{"quant_type": QuantType.QInt8, "symmetric": True, "reduce_range": True}],
        "conv2_w": [{"axis": 0, "quant_type": QuantType.QInt8, "symmetric": True}],
    }
    before = {k: [dict(d) for d in v] for k, v in overrides.items()}
    report = quantized(model, out, extra_options={"TensorQuantOverrides": overrides}, **TYPES)
    assert overrides == before
    found, held = parameters(out), initializers(out)
    assert (float(found["x"][0]), int(found["x"][1])) == (pytest.approx(0.05), 100)
    assert float(found["stem_relu_out"][0]) == pytest.approx(5.1 / 255)
    assert np.abs(held["conv1_w_quantized"]).max() == 64
    assert held["conv2_w_scale"].shape == (8,)
    assert held["stem_w_scale"].shape == ()
    assert integer(out) == plain(tmp_path, model, **TYPES)[0]
    assert any("TensorQuantOverrides" in note for note in report.notes)


def test_overrides_of_one_number_an_entry(tmp_path: Path) -> None:
    """Plain Python numbers do, as in JSON configurations."""
    out = tmp_path / "out.onnx"
    overrides = {"x": [{"scale": 0.05, "zero_point": 100}], "add_out": [{"rmin": -3, "rmax": 4.65}]}
    quantized(models.residual_block(), out, extra_options={"TensorQuantOverrides": overrides})
    found = {base(name): p for name, p in parameters(out).items()}
    assert (float(found["x"][0]), int(found["x"][1]), found["x"][1].dtype) == (pytest.approx(0.05), 100, np.uint8)
    assert float(found["add_out"][0]) == pytest.approx(7.65 / 255)


@pytest.mark.parametrize("kind", [QuantType.QUInt16, QuantType.QInt8], ids=["another width", "another sign"])
def test_a_tensor_of_another_type(tmp_path: Path, kind: QuantType) -> None:
    """What touches it runs in float, the rest in integer as ever."""
    model, out = models.residual_block(opset=17), tmp_path / "out.onnx"
    overrides = {"relu1_out": [{"quant_type": kind}]}
    report = quantized(model, out, extra_options={"TensorQuantOverrides": overrides}, **TYPES)
    kinds = {base(k): zero_point.dtype for k, (_, zero_point) in parameters(out).items()}
    assert kinds["relu1_out"] == (np.uint16 if kind is QuantType.QUInt16 else np.int8)
    assert {d for v, d in kinds.items() if v != "relu1_out"} == {np.dtype(np.uint8)}
    assert {"stem", "head"} <= integer(out)
    assert "conv2" not in integer(out)
    assert report.plan.by_node["conv2"].rule == "caller-tensor-types"
    assert quality(model, out, models.feeds(model)) > 40


def test_a_converted_tensor(tmp_path: Path) -> None:
    """Written in 16 bits, read in 8 by one of its readers, and in 16 by the other."""
    model, out = models.residual_block(opset=21), tmp_path / "out.onnx"
    convert = {"quant_type": QuantType.QUInt8, "recv_nodes": {"conv1"}}
    overrides = {"stem_relu_out": [{"quant_type": QuantType.QUInt16, "convert": convert}]}
    quantized(model, out, extra_options={"TensorQuantOverrides": overrides}, **TYPES)
    held, produced = initializers(out), {o: n for n in onnx.load(out).graph.node for o in n.output}
    by_name = {n.name: n for n in onnx.load(out).graph.node}
    kinds = {n: held[produced[by_name[n].input[i]].input[2]].dtype for n, i in (("conv1", 0), ("add", 1))}
    assert kinds == {"conv1": np.uint8, "add": np.uint16}
    assert {"conv1", "head"} <= integer(out)
    assert quality(model, out, models.feeds(model)) > 39


def test_parameters_that_do_not_absorb_the_relu(tmp_path: Path) -> None:
    """Q on both sides of it then: the Conv before it stays on its integer kernel."""
    model, out = models.residual_block(), tmp_path / "out.onnx"
    overrides = {"relu1_out": [{"scale": 0.05, "zero_point": 60}]}
    quantized(model, out, extra_options={"TensorQuantOverrides": overrides})
    assert {"conv1", "conv2"} <= integer(out)
    assert {"conv1_out", "relu1_out"} <= {base(name) for name in pairs(out)}


def test_an_override_in_front_of_a_relu(tmp_path: Path) -> None:
    model, out = models.residual_block(), tmp_path / "out.onnx"
    quantized(model, out, extra_options={"TensorQuantOverrides": {"conv1_out": [{"rmin": -4.0, "rmax": 4.0}]}})
    found = {base(name): p for name, p in parameters(out).items()}
    assert float(found["conv1_out"][0]) == pytest.approx(8 / 255)
    assert {"conv1", "conv2"} <= integer(out)


def test_a_shared_scale_is_the_callers(tmp_path: Path) -> None:
    """A MaxPool hands its parameters on, from either side of it."""
    net = Net()
    pooled = net.op(
        "MaxPool", [net.conv(net.input("x", [1, 3, 8, 8]), 3, 4, name="c0")], name="pool", kernel_shape=[2, 2]
    )
    net.output(net.conv(pooled, 4, 4, name="c1"), [1, 4, 7, 7])
    model, out = net.model(), tmp_path / "out.onnx"
    for name in ("c0_out", "pool_out"):
        quantized(model, out, extra_options={"TensorQuantOverrides": {name: [{"scale": 0.03, "zero_point": 120}]}})
        found = {base(k): p for k, p in parameters(out).items()}
        assert float(found["c0_out"][0]) == float(found["pool_out"][0]) == pytest.approx(0.03)
        assert {"c0", "pool", "c1"} <= integer(out)
    overrides = {"c0_out": [{"scale": 0.03, "zero_point": 120}], "pool_out": [{"scale": 0.04, "zero_point": 120}]}
    quantized(model, out, extra_options={"TensorQuantOverrides": overrides})
    found = {base(k): p for k, p in parameters(out).items()}
    assert [float(found[k][0]) for k in ("c0_out", "pool_out")] == pytest.approx([0.03, 0.04])


@pytest.mark.parametrize(
    "overrides",
    [
        {"x": [{"scale": 0.1}]},
        {"x": [{"axis": 0, "quant_type": QuantType.QUInt8}]},
        {"x": [{"convert": {"quant_type": QuantType.QUInt8}}]},
        {"x": [{"quant_type": "QInt9"}]},
        {"x": 5},
    ],
    ids=["half a grid", "channels of an activation", "no conversion", "no type", "no list"],
)
def test_overrides_that_make_no_sense(tmp_path: Path, overrides: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="TensorQuantOverrides"):
        quantized(
            models.residual_block(), tmp_path / "out.onnx", extra_options={"TensorQuantOverrides": overrides}, **TYPES
        )


# ---- how Q and DQ are written ---------------------------------------------------------------------------------


def test_pairs_on_weights(tmp_path: Path) -> None:
    model, out = models.residual_block(), tmp_path / "out.onnx"
    quantized(model, out, extra_options={"AddQDQPairToWeight": True})
    weights = pairs(out) & set(initializers(out))
    assert {"conv1_w", "conv2_w", "head_w"} <= weights
    assert len(weights) == 4  # a rewrite gives the stem's another shape, and so another name
    assert all(initializers(out)[name].dtype == np.float32 for name in weights)
    assert_as_good_as_plain(tmp_path, model, out)


def test_dedicated_pairs(tmp_path: Path) -> None:
    model, out = models.residual_block(), tmp_path / "out.onnx"
    quantized(model, out, extra_options={"DedicatedQDQPair": True})
    for value in pairs(out):
        for q in (n for n in readers(out, value) if n.op_type == "QuantizeLinear"):
            (dq,) = readers(out, q.output[0])
            assert len(readers(out, dq.output[0])) <= 1
    assert sum(n.op_type == "QuantizeLinear" for n in readers(out, "stem_relu_out")) == 2
    assert_as_good_as_plain(tmp_path, model, out)


def test_contrib_operators(tmp_path: Path) -> None:
    model, out = models.residual_block(), tmp_path / "out.onnx"
    quantized(model, out, extra_options={"UseQDQContribOps": True})
    assert {n.domain for n in onnx.load(out).graph.node if n.op_type.endswith("eLinear")} == {"com.microsoft"}
    assert_as_good_as_plain(tmp_path, model, out)


def test_kept_activations(tmp_path: Path) -> None:
    model, out = models.residual_block(), tmp_path / "out.onnx"
    quantized(model, out, extra_options={"QDQKeepRemovableActivations": True})
    assert {"stem_relu", "relu1", "relu2"} <= {n.name for n in onnx.load(out).graph.node}
    assert_as_good_as_plain(tmp_path, model, out)


@pytest.mark.parametrize(
    "options", [{"EnableSubgraph": True}, {"DefaultTensorType": 1}, {"ForceQuantizeNoInputCheck": True}]
)
def test_options_that_change_nothing_here(tmp_path: Path, options: dict[str, Any]) -> None:
    model, out = models.residual_block(), tmp_path / "out.onnx"
    report = quantized(model, out, extra_options=options)
    assert chosen(report)[f"extra_options.{next(iter(options))}"][1] == "caller"
    assert_as_good_as_plain(tmp_path, model, out)


@pytest.mark.parametrize("net", ["residual_block", "mlp", "transformer_block"])
def test_float_biases(tmp_path: Path, net: str) -> None:
    """Gemm and MatMul need a Q on their output then, which costs what the default does not."""
    model, out = models.ALL[net](), tmp_path / "out.onnx"
    quantized(model, out, extra_options={"QuantizeBias": False})
    assert not any(a.dtype == np.int32 for a in initializers(out).values())
    before, _ = plain(tmp_path, model)
    heavy_nodes = {n.name for n in model.graph.node if n.op_type in ("Conv", "Gemm", "MatMul")}
    assert before & heavy_nodes <= integer(out)
    assert quality(model, out, models.feeds(model)) > stocks(tmp_path, model, extra_options={"QuantizeBias": False})[1]


def test_outputs_without_q(tmp_path: Path) -> None:
    """No Q sits on the output of a Conv that no integer kernel reads; such a Conv runs in float."""
    net = Net()
    first = net.op("Tanh", [net.conv(net.input("x", [1, 3, 8, 8]), 3, 4, name="c0")], name="tanh")
    net.output(net.op("Relu", [net.conv(net.conv(first, 4, 4, name="c1"), 4, 4, name="c2")], name="relu"), [1, 4, 8, 8])
    model, out = net.model(), tmp_path / "out.onnx"
    quantized(model, out, protect_outputs="int8")
    assert {"c0_out", "c1_out"} <= {base(name) for name in pairs(out)}
    report = quantized(
        model, out, extra_options={"OpTypesToExcludeOutputQuantization": ["Conv"]}, protect_outputs="int8"
    )
    assert "c0_out" not in pairs(out)
    assert "c1_out" in pairs(out)  # for its reader's sake, as in stock
    assert "OpTypesToExcludeOutputQuantization" in report.plan.by_node["c0"].reason
    assert integer(out) & {"c0", "c1", "c2"} == {"c1", "c2"}
    assert integer(out) >= stocks(tmp_path, model, extra_options={"OpTypesToExcludeOutputQuantization": ["Conv"]})[0]


def test_outputs_without_q_in_front_of_gates(tmp_path: Path) -> None:
    model, out = models.silu_net(), tmp_path / "out.onnx"
    quantized(model, out, extra_options={"OpTypesToExcludeOutputQuantization": ["Conv", "Gemm", "MatMul"]})
    assert {n for n in plain(tmp_path, model)[0] if n.startswith("conv")} <= integer(out)


def test_the_axis_of_matmul_weights(tmp_path: Path) -> None:
    model, out = models.transformer_block(), tmp_path / "out.onnx"
    for axis in (1, -1, 0):
        options = {"QDQOpTypePerChannelSupportToAxis": {"MatMul": axis}}
        report = quantized(model, out, extra_options=options, per_channel=True)
        held = initializers(out)
        assert held["up_w_scale"].shape == (held["up_w_quantized"].shape[axis],)
        assert ("up" in integer(out)) == (axis != 0)
        assert quality(model, out, models.feeds(model)) > 38
        if axis == 0:
            assert "axis 0" in report.plan.by_node["up"].reason


def assert_as_good_as_plain(tmp_path: Path, model: onnx.ModelProto, out: Path) -> None:
    """The integer nodes are those of a call without the option, and so is the quality; stock's is worse."""
    nodes, decibels = plain(tmp_path, model)
    assert integer(out) == nodes
    assert quality(model, out, models.feeds(model)) == pytest.approx(decibels, abs=0.5)


# ---- types ----------------------------------------------------------------------------------------------------


@pytest.mark.until("1.32")
@pytest.mark.parametrize("kinds", [("QUInt16", "QInt8"), ("QInt16", "QInt16"), ("QUInt8", "QInt16")])
@pytest.mark.parametrize("net", ["residual_block", "transformer_block"])
def test_sixteen_bits(tmp_path: Path, net: str, kinds: tuple[str, str]) -> None:
    """Q and DQ where 8 bits have them: fewer than stock's, so better. The runtime computes in float."""
    model, out = models.ALL[net](), tmp_path / "out.onnx"
    activation, weight = (QuantType[kind] for kind in kinds)
    report = quantized(model, out, activation_type=activation, weight_type=weight, per_channel=False)
    found = {zero_point.dtype for _, zero_point in parameters(out).values()}
    assert found == {np.dtype(kinds[0][1:].lower())}
    assert {a.dtype for n, a in initializers(out).items() if n.endswith("_w_quantized")} == {
        np.dtype(kinds[1][1:].lower())
    }
    assert not any(heavy(report).values())
    assert "runs in float" in " ".join(report.notes) or "run in float" in " ".join(report.notes)
    theirs = stocks(tmp_path, model, activation_type=activation, weight_type=weight)[1]
    assert quality(model, out, models.feeds(model)) > min(theirs, 80.0) - 1.5


@pytest.mark.since("1.27")
@pytest.mark.parametrize("block", [0, 16])
@pytest.mark.parametrize("weight", [QuantType.QInt4, QuantType.QUInt4, QuantType.QInt8])
def test_four_bits_and_blocks(tmp_path: Path, weight: QuantType, block: int) -> None:
    """Linear layers read float data then, for which MatMulNBits is made; stock quantizes it, and loses the kernel."""
    if weight is QuantType.QInt8 and not block:
        return
    model, out = models.transformer_block(), tmp_path / "out.onnx"
    options = {"extra_options": {"BlockSize": block}} if block else {}
    report = quantized(model, out, weight_type=weight, **options)
    loaded = {i.name: i for i in onnx.load(out).graph.initializer}
    wanted = {"QInt4": "INT4", "QUInt4": "UINT4", "QInt8": "INT8"}[weight.name]
    assert loaded["up_w_quantized"].data_type == onnx.TensorProto.DataType.Value(wanted)
    if block:
        rows, columns = loaded["up_w_quantized"].dims
        assert tuple(loaded["up_w_scale"].dims) == (rows // block, columns)
    kernels = {k.node: k.kernel for k in verify_fusion(out).kernels}
    assert kernels["up"] == kernels["q"] == "com.microsoft.MatMulNBits"
    assert report.left_float() == ()
    assert any(("BlockSize" if block else "weight_type") in note for note in report.notes)
    assert quality(model, out, models.feeds(model)) > (16 if weight is not QuantType.QInt8 else 35)


@pytest.mark.since("1.27")
def test_four_bit_weights_of_a_conv(tmp_path: Path) -> None:
    model, out = models.residual_block(), tmp_path / "out.onnx"
    report = quantized(model, out, weight_type=QuantType.QInt4)
    loaded = {i.name: i.data_type for i in onnx.load(out).graph.initializer}
    assert {loaded[f"{n}_w_quantized"] for n in ("conv1", "conv2", "head")} == {onnx.TensorProto.INT4}
    assert report.plan.by_node["conv1"].rule == "caller-types"
    assert quality(model, out, models.feeds(model)) > stocks(tmp_path, model, weight_type=QuantType.QInt4)[1]


@pytest.mark.parametrize("options", [{"ActivationSymmetric": True}, {"WeightSymmetric": False}])
def test_symmetry(tmp_path: Path, options: dict[str, Any]) -> None:
    model, out = models.residual_block(), tmp_path / "out.onnx"
    quantized(model, out, extra_options=options, **TYPES)
    assert quality(model, out, models.feeds(model)) > 25
    if "ActivationSymmetric" in options:
        assert {int(z) for _, z in parameters(out).values()} <= {127, 128}
    else:
        assert {int(z.reshape(-1)[0]) for n, z in initializers(out).items() if n.endswith("w_zero_point")} != {0}


def test_a_small_minimum_real_range_changes_nothing(tmp_path: Path) -> None:
    """As `get_qnn_qdq_config` sets it."""
    model, out = models.mobile_block(), tmp_path / "out.onnx"
    quantized(model, out, extra_options={"MinimumRealRange": 0.0001})
    assert_as_good_as_plain(tmp_path, model, out)


def test_minimum_real_range(tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    quantized(models.residual_block(), out, extra_options={"MinimumRealRange": 20.0}, **TYPES)
    assert all(float(scale) * 255 >= 20.0 * (1 - 1e-6) for scale, _ in parameters(out).values())


# ---- nodes and operators --------------------------------------------------------------------------------------


def test_nodes_to_quantize(tmp_path: Path) -> None:
    model, out = models.residual_block(), tmp_path / "out.onnx"
    report = quantized(model, out, nodes_to_quantize=["conv1", "conv2"])
    held = initializers(out)
    assert {"conv1_w_quantized", "conv2_w_quantized"} <= set(held)
    assert {"stem_w", "head_w"} <= set(held)
    assert {name for name, runs in heavy(report).items() if runs} == {"conv1", "conv2"}
    assert any("nodes_to_quantize" in note for note in report.notes)
    assert quality(model, out, models.feeds(model)) > 30


def test_all_nodes_named_says_nothing(tmp_path: Path) -> None:
    model, out = models.residual_block(), tmp_path / "out.onnx"
    quantized(model, out, nodes_to_quantize=[node.name for node in model.graph.node])
    assert_as_good_as_plain(tmp_path, model, out)


def test_a_named_node_that_would_stay_float(tmp_path: Path) -> None:
    """The stem of a mobile net, and a Softmax."""
    model, out = models.transformer_block(), tmp_path / "out.onnx"
    report = quantized(model, out, nodes_to_quantize=["softmax", "up"])
    assert {base(name) for name in pairs(out)} == {"masked_out", "softmax_out", "norm2_out"}
    assert {"softmax", "up"} <= integer(out)
    assert report.plan.by_node["softmax"].rule == "caller-insists"


def test_named_nodes_keep_their_promise(tmp_path: Path) -> None:
    """Nothing that the caller names is left float for speed."""
    report = quantized(models.residual_block(), tmp_path / "out.onnx", nodes_to_quantize=["conv1"], promise=True)
    assert report.speed is not None
    assert [form.description for form in report.speed.candidates] == ["int8 as asked for"]
    assert report.speed.basis == "measured"
    assert heavy(report)["conv1"]


def test_nodes_to_quantize_and_exclude(tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    quantized(models.residual_block(), out, nodes_to_quantize=["conv1", "conv2"], nodes_to_exclude=["conv2"])
    assert "conv1_w_quantized" in initializers(out)
    assert "conv2_w" in initializers(out)


def test_op_types_to_quantize(tmp_path: Path) -> None:
    model, out = models.residual_block(), tmp_path / "out.onnx"
    report = quantized(model, out, op_types_to_quantize=["Conv"])
    assert heavy(report) == {"stem": True, "conv1": True, "conv2": True, "head": False}
    assert "head_w" in initializers(out)
    assert not any(n.startswith("add_out") for n in pairs(out))
    assert quality(model, out, models.feeds(model)) > 30


def test_op_types_that_the_target_would_leave_float(tmp_path: Path) -> None:
    model, out = models.transformer_block(), tmp_path / "out.onnx"
    report = quantized(model, out, op_types_to_quantize=["MatMul", "Softmax"])
    assert any("op_types_to_quantize" in note for note in report.notes)
    assert any(base(n) == "softmax_out" for n in pairs(out))
    assert {"softmax", "up"} <= integer(out)
    assert "qk" not in integer(out)  # products of two activations are no faster


@pytest.mark.parametrize("net", ["residual_block", "mobile_block", "silu_net", "transformer_block"])
def test_all_op_types_named_says_nothing(tmp_path: Path, net: str) -> None:
    model, out = models.ALL[net](), tmp_path / "out.onnx"
    types = sorted({node.op_type for node in model.graph.node})
    quantized(model, out, op_types_to_quantize=types)
    assert_as_good_as_plain(tmp_path, model, out)
    quantized(model, out, op_types_to_quantize=[t for t in types if t not in ("Softmax", "Gelu")])
    assert_as_good_as_plain(tmp_path, model, out)


def test_operators_that_move_bytes_are_forced(tmp_path: Path) -> None:
    net = Net()
    x = net.op("Softmax", [net.op("Gemm", [net.input("x", [8, 4]), net.weight([4, 4], name="w")], name="fc")])
    net.output(net.op("Tanh", [net.op("Transpose", [x], name="turn", perm=[1, 0])]), [4, 8])
    model, out = net.model(), tmp_path / "out.onnx"
    quantized(model, out)
    assert "turn" not in integer(out)
    report = quantized(model, out, extra_options={"ForceQuantizeNoInputCheck": True})
    assert {"turn", "fc"} <= integer(out)
    assert {x, "turn_out"} <= pairs(out)
    assert any("ForceQuantizeNoInputCheck" in note for note in report.notes)


def test_exclusion_of_what_preparation_moves(tmp_path: Path) -> None:
    """Named nodes are not rewritten away: Identity and Dropout stay where they are excluded."""
    net = models.Net()
    x = net.op("Identity", [net.conv(net.input("x", [1, 3, 8, 8]), 3, 4, name="conv0")], name="same")
    net.output(net.conv(net.op("Relu", [x], name="relu"), 4, 4, name="conv1"), [1, 4, 8, 8])
    model, out = net.model(), tmp_path / "out.onnx"
    quantized(model, out, nodes_to_exclude=["same"])
    assert quality(model, out, models.feeds(model)) > 30


@pytest.mark.x86_only
@pytest.mark.parametrize("opset", [17, 21])
def test_int8_activations_of_a_transformer_are_integer_whatever_its_operator_set(tmp_path: Path, opset: int):
    """From operator set 21 on the runtime refuses its own change of int8 activations to uint8."""
    model = onnx.version_converter.convert_version(models.transformer_block(tokens=6, width=32), opset)
    kinds = {"activation_type": QuantType.QInt8, "promise": False}
    report = quantize_static(model, tmp_path / "q.onnx", models.reader(model, 4), **kinds)
    assert len(report.plan.integer_nodes()) == 6
    assert not [text for text in report.warnings if "stock" in text]
