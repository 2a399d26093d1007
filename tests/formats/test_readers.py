"""QOperator, QCDQ and QDQ of other exporters: read to the bit into the one spelling."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort.errors import KenosisError
from kenosis_ort.formats.runtime_form import to_runtime_form
from kenosis_ort.formats.tensors import quantizers_of
from kenosis_ort.formats.to_qop import to_qop
from kenosis_ort.interop import read_model
from tests.formats.qonnx import X86, Net, conv_net

QUANTIZED = ("QuantizeLinear", "DequantizeLinear")


def run(model: onnx.ModelProto, x: Any, *, optimize: bool = False) -> list[Any]:
    options = ort.SessionOptions()
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options).run(None, {"x": x})


def draw(shape: tuple[int, ...] = (2, 3, 6, 6)) -> Any:
    return np.random.default_rng(1).normal(size=shape).astype(np.float32) * 2


def plain(*nodes: onnx.NodeProto, outputs: dict[str, int], constants: dict[str, Any], opset: int = 17, **types: Any):
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, types.get("shape", [2, 3, 6, 6]))],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()],
        [
            numpy_helper.from_array(np.asarray(a), n) if not isinstance(a, TensorProto) else a
            for n, a in constants.items()
        ],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


# ---- quantized operators --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [{}, {"bits": 8}, {"bits": 8, "bias": False}])
def test_quantized_operators_are_read_as_what_they_were_written_from(kind):
    canonical = to_runtime_form(read_model(conv_net(**kind)).canonical, X86)
    written = to_qop(canonical, clip=True)
    assert sum(node.op_type == "QLinearConv" for node in written.graph.node) == 2
    found = read_model(written)
    assert found.format == "qop"
    assert not any(node.op_type.startswith("QLinear") for node in found.canonical.graph.node)
    written_then = to_qop(to_runtime_form(found.canonical, X86), clip=True)
    np.testing.assert_array_equal(run(written, draw())[0], run(written_then, draw())[0])
    kept = {(t.quantizer.bits, float(t.quantizer.scale.max())) for t in quantizers_of(canonical) if t.constant is None}
    assert kept == {
        (t.quantizer.bits, float(t.quantizer.scale.max())) for t in quantizers_of(found.canonical) if t.quantize
    }


OPERATORS = {
    "QLinearAdd": (["q", "s", "z", "q", "s", "z", "s2", "z2"], {}, "com.microsoft"),
    "QLinearMul": (["q", "s", "z", "q", "s", "z", "s2", "z2"], {}, "com.microsoft"),
    "QLinearSigmoid": (["q", "s", "z", "s3", "z3"], {}, "com.microsoft"),
    "QLinearLeakyRelu": (["q", "s", "z", "s2", "z2"], {"alpha": 0.1}, "com.microsoft"),
    "QLinearSoftmax": (["q", "s", "z", "s3", "z3"], {"axis": -1, "opset": 17}, "com.microsoft"),
    "QLinearGlobalAveragePool": (["q", "s", "z", "s2", "z2"], {"channels_last": 0}, "com.microsoft"),
    "QLinearAveragePool": (["q", "s", "z", "s2", "z2"], {"kernel_shape": [2, 2]}, "com.microsoft"),
    "QLinearConcat": (["s2", "z2", "q", "s", "z", "q", "s", "z"], {"axis": 1}, "com.microsoft"),
    "QLinearMatMul": (["q", "s", "z", "w", "ws", "wz", "s2", "z2"], {}, ""),
    "MaxPool": (["q"], {"kernel_shape": [2, 2]}, ""),
    "Transpose": (["q"], {"perm": [0, 2, 3, 1]}, ""),
    "Flatten": (["q"], {}, ""),
}


@pytest.mark.parametrize("op_type", OPERATORS)
def test_an_operator_of_integers_is_its_float_one_between_dq_and_q(op_type):
    inputs, attributes, domain = OPERATORS[op_type]
    rng = np.random.default_rng(0)
    constants = {
        "s": np.float32(0.05),
        "z": np.uint8(120),
        "s2": np.float32(0.1),
        "z2": np.uint8(100),
        "s3": np.float32(1 / 256),
        "z3": np.uint8(0),
        "w": rng.integers(-90, 90, (6, 4)).astype(np.int8),
        "ws": rng.uniform(0.01, 0.02, 4).astype(np.float32),
        "wz": np.zeros(4, np.int8),
    }
    last = (
        ("s", "z")
        if domain == "" and op_type != "QLinearMatMul"
        else tuple(n for n in inputs if n in ("s2", "z2", "s3", "z3"))
    )
    model = plain(
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node(op_type, inputs, ["p"], domain=domain, name="node", **attributes),
        helper.make_node("DequantizeLinear", ["p", *last], ["y"]),
        outputs={"y": TensorProto.FLOAT},
        constants=constants,
    )
    found = read_model(model)
    (made,) = (n for n in found.canonical.graph.node if n.op_type not in QUANTIZED)
    assert made.name == "node"
    assert not made.domain
    step = 0.1 if "s2" in last else 0.05 if "s" in last else 1 / 256
    difference = np.abs(run(found.canonical, draw())[0] - run(model, draw())[0])
    assert difference.max() < 1.01 * step
    assert (difference > step / 2).mean() < (0.35 if op_type in ("QLinearAveragePool", "QLinearAdd") else 0.02)


def test_a_pool_of_integers_that_feeds_others_stands_between_dq_and_q():
    constants = {"s": np.float32(0.05), "z": np.uint8(120)}
    model = plain(
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("MaxPool", ["q"], ["p"], kernel_shape=[2, 2]),
        helper.make_node("DequantizeLinear", ["p", "s", "z"], ["y"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y2"]),
        outputs={"y": TensorProto.FLOAT, "y2": TensorProto.FLOAT},
        constants=constants,
    )
    found = read_model(model)
    for a, b in zip(run(found.canonical, draw()), run(model, draw()), strict=True):
        np.testing.assert_array_equal(a, b)
    assert [t.quantize is not None for t in quantizers_of(found.canonical)] == [True] * 3


@pytest.mark.parametrize("op_type", ["MatMulInteger", "DynamicQuantizeLinear"])
def test_operators_with_scales_from_data_are_refused_by_name(op_type):
    if op_type == "MatMulInteger":
        nodes = [
            helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
            helper.make_node(op_type, ["q", "w"], ["y"]),
        ]
    else:
        nodes = [helper.make_node(op_type, ["x"], ["y", "ys", "yz"])]
    constants = {"s": np.float32(0.05), "z": np.uint8(120), "w": np.ones((6, 4), np.uint8)}
    kind = TensorProto.INT32 if op_type == "MatMulInteger" else TensorProto.UINT8
    with pytest.raises(KenosisError, match=f"scales computed from data.*{op_type}"):
        read_model(plain(*nodes, outputs={"y": kind}, constants=constants))


# ---- Q, Clip and DQ -------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(stored=st.booleans(), by_channel=st.booleans(), bits=st.integers(2, 8), seed=st.integers(0, 2**16))
def test_weights_of_qcdq_become_integers_in_range(stored, by_channel, bits, seed):
    rng = np.random.default_rng(seed)
    most = 2 ** (bits - 1) - 1
    scale = rng.uniform(0.01, 0.1, 4).astype(np.float32) if by_channel else np.float32(0.05)
    real = rng.normal(size=(4, 3, 3, 3)).astype(np.float32)
    constants = {
        "w": rng.integers(-128, 128, real.shape).astype(np.int8) if stored else real,
        "ws": scale,
        "wz": np.zeros(np.shape(scale), np.int8),
        "lo": np.int8(-most),
        "hi": np.int8(most),
    }
    axis = {"axis": 0} if by_channel else {}
    model = plain(
        *([] if stored else [helper.make_node("QuantizeLinear", ["w", "ws", "wz"], ["wq"], **axis)]),
        helper.make_node("Clip", ["w" if stored else "wq", "lo", "hi"], ["wc"]),
        helper.make_node("DequantizeLinear", ["wc", "ws", "wz"], ["wd"], **axis),
        helper.make_node("Conv", ["x", "wd"], ["y"]),
        outputs={"y": TensorProto.FLOAT},
        constants=constants,
    )
    found = read_model(model)
    np.testing.assert_array_equal(run(found.canonical, draw())[0], run(model, draw())[0])
    (tensor,) = quantizers_of(found.canonical)
    assert tensor.constant is not None
    assert tensor.quantizer.bits == bits
    assert [n.op_type for n in found.canonical.graph.node] == ["DequantizeLinear", "Conv"]


def test_several_dq_of_one_q_are_one():
    """Others' converter gives the second DQ floats without a word."""
    constants = {"s": np.float32(0.05), "z": np.uint8(7), "lo": np.uint8(0), "hi": np.uint8(15)}
    model = plain(
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("Clip", ["q", "lo", "hi"], ["c"]),
        helper.make_node("DequantizeLinear", ["c", "s", "z"], ["a"]),
        helper.make_node("DequantizeLinear", ["c", "s", "z"], ["b"]),
        helper.make_node("Mul", ["a", "b"], ["y"]),
        outputs={"y": TensorProto.FLOAT},
        constants=constants,
    )
    found = read_model(model)
    assert [n.op_type for n in found.canonical.graph.node] == ["QuantizeLinear", "Clip", "DequantizeLinear", "Mul"]
    np.testing.assert_array_equal(run(found.canonical, draw())[0], run(model, draw())[0])


def test_zero_points_left_out_and_scales_of_one_element_are_spelled_out():
    constants = {"s": np.array([0.05], np.float32), "w": np.ones((3, 1, 1), np.int8)}
    model = plain(
        helper.make_node("QuantizeLinear", ["x", "s"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s"], ["d"]),
        helper.make_node("DequantizeLinear", ["w", "s"], ["wd"]),
        helper.make_node("Add", ["d", "wd"], ["y"]),
        outputs={"y": TensorProto.FLOAT},
        constants=constants,
        opset=13,
    )
    found = read_model(model)
    assert all(len(n.input) == 3 for n in found.canonical.graph.node if n.op_type in QUANTIZED)
    assert all(t.quantizer.scale.ndim == 0 for t in quantizers_of(found.canonical))
    np.testing.assert_array_equal(run(found.canonical, draw())[0], run(model, draw())[0])


def test_integers_of_four_bits_get_eight_and_a_clip():
    weights = helper.make_tensor("w", TensorProto.INT4, [3, 1, 1], [-8, 0, 7])
    zero = helper.make_tensor("z", TensorProto.UINT4, [], [3])
    model = plain(
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("DequantizeLinear", ["w", "s"], ["wd"]),
        helper.make_node("Add", ["d", "wd"], ["y"]),
        outputs={"y": TensorProto.FLOAT},
        constants={"s": np.float32(0.2), "z": zero, "w": weights},
        opset=21,
    )
    found = read_model(model)
    np.testing.assert_array_equal(run(found.canonical, draw())[0], run(model, draw())[0])
    assert {(t.elem_type, t.quantizer.bits) for t in quantizers_of(found.canonical)} == {
        (TensorProto.UINT8, 4),
        (TensorProto.INT8, 4),
    }


@pytest.mark.parametrize("layout", ["Transpose", "Reshape", "Unsqueeze"])
def test_layout_operators_behind_a_weight_are_performed_on_its_integers(layout):
    rng = np.random.default_rng(3)
    constants = {
        "w": rng.integers(-8, 8, (3, 3, 3, 4)).astype(np.int8),
        "ws": rng.uniform(0.1, 0.2, 4).astype(np.float32),
        "wz": np.zeros(4, np.int8),
        "to": np.array([-1, 4]),
        "axes": np.array([0]),
    }
    node, reader = {
        "Transpose": (helper.make_node("Transpose", ["wd"], ["v"], perm=[3, 2, 0, 1]), ("Conv", ["x", "v"])),
        "Reshape": (helper.make_node("Reshape", ["wd", "to"], ["v"]), ("Identity", ["v"])),
        "Unsqueeze": (helper.make_node("Unsqueeze", ["wd", "axes"], ["v"]), ("Identity", ["v"])),
    }[layout]
    model = plain(
        helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wd"], axis=3),
        node,
        helper.make_node(reader[0], reader[1], ["y"]),
        outputs={"y": TensorProto.FLOAT},
        constants=constants,
    )
    found = read_model(model)
    assert layout not in [n.op_type for n in found.canonical.graph.node]
    np.testing.assert_array_equal(run(found.canonical, draw())[0], run(model, draw())[0])


def test_unsigned_integers_around_128_are_signed_ones_around_zero():
    constants = {"s": np.float32(0.05), "z": np.uint8(128)}
    model = plain(
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
        outputs={"y": TensorProto.FLOAT},
        constants=constants,
    )
    (tensor,) = quantizers_of(read_model(model).canonical)
    assert tensor.quantizer.signed
    assert int(tensor.quantizer.zero_point) == 0
    np.testing.assert_array_equal(run(read_model(model).canonical, draw() * 4)[0], run(model, draw() * 4)[0])


# ---- float ----------------------------------------------------------------------------------------------------------


def test_the_float_model_keeps_ranges_and_drops_grids():
    net = Net()
    w = net.constant(draw((4, 3, 1, 1)))
    y = net.add("Conv", net.quant("x", 0.5, bits=4), net.quant(w, 0.3, bits=3, narrow=1), kernel_shape=[1, 1])
    model = net.model(net.quant(y, 0.25, 2.0, bits=16, signed=0, rounding_mode="FLOOR"))
    found = read_model(model, as_float=True).canonical
    assert [n.op_type for n in found.graph.node] == ["Clip", "Conv", "Clip"]
    weights = np.clip(np.rint(draw((4, 3, 1, 1)) / np.float32(0.3)), -3, 3)[:, :, 0, 0] * np.float32(0.3)
    x = draw()
    expected = np.einsum("oc,nchw->nohw", weights, np.clip(x, -4, 3.5))
    np.testing.assert_allclose(run(found, x)[0], np.clip(expected, -0.5, (65535 - 2) * 0.25), atol=1e-5)


def test_the_float_model_behind_quantized_operators_keeps_the_relu_that_only_a_range_says():
    canonical = to_runtime_form(read_model(conv_net(bits=8)).canonical, X86)
    for at in range(len(canonical.graph.node) - 1, -1, -1):  # as stock writes it: the range is the Relu
        node = canonical.graph.node[at]
        if node.op_type == "Relu":
            for reader in canonical.graph.node:
                for position, name in enumerate(reader.input):
                    if name == node.output[0]:
                        reader.input[position] = node.input[0]
            del canonical.graph.node[at]
    found = read_model(to_qop(canonical), as_float=True)
    assert not any("Q" in node.op_type for node in found.canonical.graph.node)
    expected, actual = run(found.reference, draw())[0], run(found.canonical, draw())[0]
    assert np.corrcoef(expected.ravel(), actual.ravel())[0, 1] > 0.99
