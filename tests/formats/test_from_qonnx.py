"""QONNX is read to the bit, or refused with the clause that QuantizeLinear cannot express."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from kenosis_ort.errors import KenosisError, ModelLoadError, UnsupportedModelError
from kenosis_ort.formats.qonnx_nodes import spell_out
from kenosis_ort.formats.tensors import quantizers_of
from kenosis_ort.interop import read_model
from tests.formats.qonnx import DOMAIN, Net, conv_net, execute


def run(model: onnx.ModelProto, x: Any) -> list[Any]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options).run(None, {"x": x})


def draw(shape: tuple[int, ...] = (2, 3, 6, 6), seed: int = 1) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) * 2


@settings(deadline=None)
@given(
    bits=st.integers(2, 8),
    signed=st.booleans(),
    narrow=st.booleans(),
    by_channel=st.booleans(),
    shift=st.floats(0, 1),
    constant=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_a_quantizer_is_read_to_the_bit(bits, signed, narrow, by_channel, shift, constant, seed):
    rng = np.random.default_rng(seed)
    scale = rng.uniform(0.01, 0.5, size=(3, 1, 1) if by_channel else ()).astype(np.float32)
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    zero = np.float32(round(low + shift * (high - low)))
    net = Net()
    value = net.constant(draw(seed=seed)) if constant else "x"
    y = net.quant(value, scale, zero, bits, signed=signed, narrow=narrow)
    model = net.model(net.add("Add", y, "x") if constant else y)
    x = draw(seed=seed + 1)
    (expected,) = execute(model, {"x": x})
    found = read_model(model)
    (actual,) = run(found.canonical, x)
    ties = np.abs((x / scale) % 1 - 0.5) < 1e-4  # where ONNX adds an odd zero point behind the rounding
    np.testing.assert_array_equal(
        actual[~ties] if not constant else actual, expected[~ties] if not constant else expected
    )
    (tensor,) = quantizers_of(found.canonical)
    assert tensor.quantizer.bits == bits
    assert tensor.quantizer.signed == signed
    assert (tensor.quantizer.axis is not None) == by_channel


@pytest.mark.parametrize("domain", [DOMAIN, "onnx.brevitas", "finn.custom_op.general"])
@pytest.mark.parametrize("kind", [{}, {"signed": True}, {"norm": True}, {"bits": 2}, {"bits": 8}])
def test_nets_are_read_to_the_bit(kind, domain):
    model = conv_net(domain=domain, **kind)
    found = read_model(model)
    assert found.format == "qonnx"
    assert {node.domain for node in found.canonical.graph.node} == {""}
    np.testing.assert_array_equal(run(found.canonical, draw())[0], run(found.reference, draw())[0])


@pytest.mark.parametrize("rounding_mode", ["ROUND", "CEIL", "FLOOR"])
def test_what_is_spelled_out_computes_what_numpy_does(rounding_mode):
    net = Net()
    y = net.quant("x", 0.25, 3.0, 5, signed=0, rounding_mode=rounding_mode)
    z = net.add("BipolarQuant", y, net.constant(np.float32(0.5)), domain=DOMAIN)
    parameters = [net.constant(np.float32(p)) for p in (0.25, 0, 8, 4)]
    t = net.add("Trunc", y, *parameters, domain=DOMAIN, rounding_mode="FLOOR")
    model = net.model(y, z, t)
    for a, b in zip(execute(model, {"x": draw()}), run(spell_out(model), draw()), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("rounding_mode", ["CEIL", "FLOOR"])
def test_constants_may_be_rounded_in_any_way(rounding_mode):
    net = Net()
    w = net.quant(net.constant(draw()), 0.3, bits=4, rounding_mode=rounding_mode)
    model = net.model(net.add("Add", "x", w))
    np.testing.assert_array_equal(run(read_model(model).canonical, draw())[0], execute(model, {"x": draw()})[0])


def test_biases_of_many_bits_are_read():
    net = Net()
    bias = net.quant(net.constant(np.array([[[1000.0]], [[-1.5]], [[0.0]]], np.float32)), 0.001, bits=32)
    model = net.model(net.add("Add", "x", bias))
    np.testing.assert_array_equal(run(read_model(model).canonical, draw())[0], execute(model, {"x": draw()})[0])


def test_bipolar_weights_and_data_are_signs():
    net = Net((2, 8))
    data = net.add("BipolarQuant", "x", net.constant(np.ones(1, np.float32)), domain=DOMAIN)
    w = net.add("BipolarQuant", net.constant(draw((8, 4))), net.constant(np.float32(0.5)), domain=DOMAIN)
    model = net.model(net.add("MatMul", data, w))
    x = draw((2, 8))
    x[0, 0] = 0.0
    found = read_model(model)
    np.testing.assert_array_equal(run(found.canonical, x)[0], execute(model, {"x": x})[0])
    assert [t.quantizer.bits for t in quantizers_of(found.canonical)] == [2, 2]


@pytest.mark.parametrize("to_bits", [4, 8])
def test_trunc_behind_a_pool_is_read(to_bits):
    net = Net()
    y = net.add("AveragePool", net.quant("x", 0.25, bits=4, signed=0), kernel_shape=[2, 2], strides=[2, 2])
    y = net.add("Mul", y, net.constant(np.float32(4)))
    parameters = [net.constant(np.float32(p)) for p in (0.25, 0, to_bits + 2, to_bits)]
    model = net.model(net.add("Trunc", y, *parameters, domain=DOMAIN, rounding_mode="FLOOR"))
    found = read_model(model)
    np.testing.assert_array_equal(run(found.canonical, draw())[0], execute(model, {"x": draw()})[0])
    assert len(quantizers_of(found.canonical)) == (2 if to_bits == 4 else 1)


def test_a_quantizer_with_several_readers_and_scales_of_one_element():
    net = Net()
    y = net.quant("x", [0.25], [1.0], [4.0], signed=0)
    model = net.model(net.add("Add", net.add("Relu", y), net.add("Mul", y, y)))
    np.testing.assert_array_equal(run(read_model(model).canonical, draw())[0], execute(model, {"x": draw()})[0])


def test_scales_of_constant_nodes_and_of_constants_that_are_computed():
    net = Net()
    raw = net.constant(np.array([[[-0.5]], [[0.1]], [[0.2]]], np.float32))
    scale = net.add("Abs", raw)
    zero = helper.make_node("Constant", [], ["zero"], value_float=0.0)
    bits = helper.make_node("Constant", [], ["bits"], value=numpy_helper.from_array(np.float32(4)))
    net.nodes += [zero, bits]
    y = net.add("Quant", "x", scale, "zero", "bits", domain=DOMAIN, signed=1, narrow=0, rounding_mode="ROUND")
    model = net.model(y)
    np.testing.assert_array_equal(run(read_model(model).canonical, draw())[0], execute(model, {"x": draw()})[0])


def test_initializers_that_are_listed_as_inputs_are_constants():
    model = conv_net()
    listed = [helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in model.graph.initializer]
    model.graph.input.extend(listed)
    assert [v.name for v in read_model(model).canonical.graph.input] == ["x"]


def channels_last_net() -> onnx.ModelProto:
    rng = np.random.default_rng(5)
    net = Net((1, 6, 6, 3))
    w = net.quant(net.constant(rng.normal(size=(4, 3, 3, 3)).astype(np.float32)), np.full((4, 1, 1, 1), 0.1), bits=4)
    last = "qonnx.custom_op.channels_last"
    sizes = {"kernel_shape": [3, 3], "strides": [1, 1], "pads": [1, 1, 1, 1]}
    y = net.add("Conv", net.quant("x", 0.1, bits=6), w, domain=last, dilations=[1, 1], group=1, **sizes)
    y = net.add("MaxPool", net.quant(y, 0.2, bits=4), domain=last, **sizes)
    parameters = [net.constant(rng.uniform(0.5, 1, 4).astype(np.float32)) for _ in range(4)]
    y = net.add("BatchNormalization", y, *parameters, domain=last, epsilon=1e-5, momentum=0.9)
    model = net.model(y)
    model.opset_import.add(domain=last, version=17)
    model.graph.value_info.append(helper.make_tensor_value_info(net.nodes[-2].output[0], 1, [1, 6, 6, 4]))
    return model


def test_channels_last_operators_stand_between_transposes():
    model = channels_last_net()
    x = draw((1, 6, 6, 3))
    first = onnx.ModelProto()
    first.CopyFrom(model)
    found = read_model(model)
    np.testing.assert_array_equal(run(found.canonical, x)[0], run(found.reference, x)[0])
    # By hand: the same net channels first, its weights (O, H, W, I) turned.
    weights = numpy_helper.to_array(next(t for t in model.graph.initializer if len(t.dims) == 4 and t.dims[0] == 4))
    (conv,) = (node for node in found.canonical.graph.node if node.op_type == "Conv")
    made = {node.output[0]: node for node in found.canonical.graph.node}
    stored = {t.name: numpy_helper.to_array(t) for t in found.canonical.graph.initializer}
    integers = stored[made[conv.input[1]].input[0]]
    expected = np.clip(np.rint(weights / np.float32(0.1)), -8, 7).transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(integers, expected)


def one(**said: Any) -> onnx.ModelProto:
    net = Net()
    return net.model(net.quant("x", **{"scale": 0.1, "output": "y", **said}))


def without(position: int) -> onnx.ModelProto:
    model = one()
    model.graph.node[0].input[position] = ""
    return model


def shorter() -> onnx.ModelProto:
    model = one()
    del model.graph.node[0].input[3]
    return model


def lacking(name: str) -> onnx.ModelProto:
    model = one()
    kept = [a for a in model.graph.node[0].attribute if a.name != name]
    del model.graph.node[0].attribute[:]
    model.graph.node[0].attribute.extend(kept)
    return model


def computed() -> onnx.ModelProto:
    net = Net()
    scale = net.add("ReduceMax", "x", keepdims=1)
    zero, bits = (net.constant(np.float32(p)) for p in (0, 4))
    return net.model(net.add("Quant", "x", scale, zero, bits, domain=DOMAIN, signed=1, narrow=0, rounding_mode="ROUND"))


def renamed(op_type: str) -> onnx.ModelProto:
    model = one()
    model.graph.node[0].op_type = op_type
    return model


def in_a_body() -> onnx.ModelProto:
    model = one()
    body = onnx.GraphProto(name="body")
    body.node.append(model.graph.node[0])
    body.output.append(model.graph.output[0])
    condition = numpy_helper.from_array(np.asarray(True), "condition")
    model.graph.initializer.append(condition)
    branch = helper.make_node("If", ["condition"], ["y"], name="branch", then_branch=body, else_branch=body)
    del model.graph.node[:]
    model.graph.node.append(branch)
    return model


REFUSED = {
    "bit width 0": (one(bits=0), "bit width 0"),
    "bit width 300": (one(bits=300), "bit width 300"),
    "bit width nan": (one(bits=float("nan")), "bit width"),
    "fractional bit width": (one(bits=3.5), "no whole number"),
    "bit width by channel": (one(bits=[[[2.0]], [[3.0]], [[4.0]]]), "differs by channel"),
    "1 bit": (one(bits=1), "1 bit"),
    "16 bits": (one(bits=16), "16 bits"),
    "scale 0": (one(scale=0.0), "above zero"),
    "negative scale": (one(scale=-0.5), "above zero"),
    "scale inf": (one(scale=float("inf")), "finite"),
    "scale by group": (one(scale=np.full((3, 6, 1), 0.1)), "by group"),
    "scale of another channel count": (one(scale=np.full((5, 1, 1), 0.1)), ""),
    "scale of too many dimensions": (one(scale=np.full((1, 1, 1, 1, 1), 0.1)), "does not fit"),
    "zero point outside": (one(zero_point=300.0, bits=8, signed=0), "zero point 300"),
    "negative zero point of unsigned integers": (one(zero_point=-1.0, signed=0), "zero point -1"),
    "fractional zero point": (one(zero_point=0.5), "whole number"),
    "zero point nan": (one(zero_point=float("nan")), "not finite"),
    "rounding of data": (one(rounding_mode="FLOOR"), "FLOOR"),
    "unknown rounding": (one(rounding_mode="STOCHASTIC"), "STOCHASTIC"),
    "no zero point": (without(2), "3 inputs"),
    "no bit width": (shorter(), "3 inputs"),
    "no attribute signed": (lacking("signed"), "'signed'"),
    "signed is 2": (one(signed=2), "neither 0 nor 1"),
    "scale from data": (computed(), "computed from data"),
    "minifloats": (renamed("FloatQuant"), "FloatQuant"),
    "thresholds": (renamed("MultiThreshold"), "MultiThreshold"),
    "in a body": (in_a_body(), "body of control flow"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_expressed_is_refused_with_node_and_clause(case):
    model, clause = REFUSED[case]
    before = model.SerializeToString()
    with pytest.raises(KenosisError, match=clause or ".") as refused:
        read_model(model)
    assert isinstance(refused.value, (UnsupportedModelError, ModelLoadError))
    if clause:
        assert "node '" in str(refused.value)
    assert model.SerializeToString() == before


def test_a_constant_does_not_grow_by_its_scale():
    net = Net()
    w = net.quant(net.constant(np.ones((3, 1, 1), np.float32)), np.full((3, 1, 6), 0.1))
    with pytest.raises(KenosisError, match="does not fit"):
        read_model(net.model(net.add("Add", "x", w)))


def test_a_model_that_only_claims_to_be_qonnx_is_told_so():
    net = Net()
    model = net.model(net.add("Quant", "x", net.constant(np.float32(1)), output="y"))  # of the main domain
    with pytest.raises(ModelLoadError, match="Quant"):
        read_model(model)
