"""QONNX is read to the bit; what is refused stands in tests/contracts/test_formats.py."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from kenosis_ort.errors import ModelLoadError
from kenosis_ort.formats.qonnx_nodes import spell_out
from kenosis_ort.formats.tensors import quantizers_of
from kenosis_ort.interop import read_model
from tests.formats.qonnx import DOMAIN, Net, conv_net, draw, execute, run, same

FOUR = numpy_helper.from_array(np.float32(4))


def truncated(net: Net, x: str, *parameters: float, rounding_mode: str = "FLOOR") -> str:
    return net.op("Trunc", [x, *map(np.float32, parameters)], domain=DOMAIN, rounding_mode=rounding_mode)


@given(
    bits=st.integers(2, 8), signed=st.booleans(), narrow=st.booleans(), by_channel=st.booleans(), shift=st.floats(0, 1),
    constant=st.booleans(), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_a_quantizer_is_read_to_the_bit(bits, signed, narrow, by_channel, shift, constant, seed):
    rng = np.random.default_rng(seed)
    scale = rng.uniform(0.01, 0.5, size=(3, 1, 1) if by_channel else ()).astype(np.float32)
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    zero = np.float32(round(low + shift * (high - low)))
    net = Net()
    y = net.quant(draw(seed=seed) if constant else "x", scale, zero, bits, signed=int(signed), narrow=int(narrow))
    model = net.of(net.op("Add", [y, "x"]) if constant else y)
    x = draw(seed=seed + 1)
    found = read_model(model).canonical
    (expected,), (actual,) = execute(model, {"x": x}), run(found, x)
    ties = np.abs((x / scale) % 1 - 0.5) < 1e-4  # where ONNX adds an odd zero point behind the rounding
    np.testing.assert_array_equal(actual[~ties | constant], expected[~ties | constant])
    (tensor,) = quantizers_of(found)
    assert (tensor.quantizer.bits, tensor.quantizer.signed) == (bits, signed)
    assert (tensor.quantizer.axis is not None) == by_channel


@pytest.mark.parametrize("domain", ["onnx.brevitas", "finn.custom_op.general"])
def test_earlier_domains_are_read_alike_and_initializers_that_are_listed_as_inputs_are_constants(domain):
    model = conv_net(domain=domain)
    listed = [helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in model.graph.initializer]
    model.graph.input.extend(listed)
    found = read_model(model)
    assert (found.format, {node.domain for node in found.canonical.graph.node}) == ("qonnx", {""})
    assert [v.name for v in found.canonical.graph.input] == ["x"]
    same(found.canonical, found.reference)


@pytest.mark.parametrize("rounding_mode", ["ROUND", "CEIL", "FLOOR"])
def test_what_is_spelled_out_computes_what_numpy_does(rounding_mode):
    net = Net()
    y = net.quant("x", 0.25, 3.0, 5, signed=0, rounding_mode=rounding_mode)
    z = net.op("BipolarQuant", [y, np.float32(0.5)], domain=DOMAIN)
    model = net.of(y, z, truncated(net, y, 0.25, 0, 8, 4))
    same(spell_out(model), model)


@pytest.mark.parametrize("build", [
    lambda net: net.op("Add", ["x", net.quant(draw(), 0.3, rounding_mode="CEIL")]),
    lambda net: net.op("Add", ["x", net.quant(draw(), 0.3, rounding_mode="FLOOR")]),
    lambda net: net.op("Add", ["x", net.quant([[[1000.0]], [[-1.5]], [[0.0]]], 0.001, bits=32)]),
    lambda net: net.op("Mul", [y := net.quant("x", [0.25], [1.0], [4.0], signed=0), net.op("Relu", [y])]),
    lambda net: net.quant("x", net.op("Abs", [np.array([[[-0.5]], [[0.1]], [[0.2]]])]),
                          net.op("Constant", [], value_float=0.0), net.op("Constant", [], value=FOUR)),
], ids=["rounded up", "rounded down", "a bias of many bits", "one element, several readers", "nodes"])  # fmt: skip
def test_spellings_of_parameters_and_constants_are_read_to_the_bit(build):
    net = Net()
    model = net.of(build(net))
    same(read_model(model).canonical, model)


def test_bipolar_weights_and_data_are_signs():
    net = Net((2, 8))
    data = net.op("BipolarQuant", ["x", np.ones(1)], domain=DOMAIN)
    model = net.of(net.op("MatMul", [data, net.op("BipolarQuant", [draw((8, 4)), np.float32(0.5)], domain=DOMAIN)]))
    x = draw((2, 8))
    x[0, 0] = 0.0
    found = read_model(model).canonical
    same(found, model, x)
    assert [t.quantizer.bits for t in quantizers_of(found)] == [2, 2]


@pytest.mark.parametrize(("to_bits", "quantizers"), [(4, 2), (8, 1)])
def test_trunc_behind_a_pool_is_read(to_bits, quantizers):
    net = Net()
    y = net.op("AveragePool", [net.quant("x", 0.25, signed=0)], kernel_shape=[2, 2], strides=[2, 2])
    model = net.of(truncated(net, net.op("Mul", [y, np.float32(4)]), 0.25, 0, to_bits + 2, to_bits))
    found = read_model(model).canonical
    same(found, model)
    assert len(quantizers_of(found)) == quantizers


def test_channels_last_operators_stand_between_transposes():
    rng, last = np.random.default_rng(5), "qonnx.custom_op.channels_last"
    net, weights = Net((1, 6, 6, 3)), rng.normal(size=(4, 3, 3, 3)).astype(np.float32)
    w = net.quant(weights, np.full((4, 1, 1, 1), 0.1))
    sizes = {"kernel_shape": [3, 3], "strides": [1, 1], "pads": [1, 1, 1, 1]}
    y = net.op("Conv", [net.quant("x", 0.1, bits=6), w], domain=last, dilations=[1, 1], group=1, **sizes)
    y = net.op("MaxPool", [net.quant(y, 0.2)], domain=last, **sizes)
    parameters = [rng.uniform(0.5, 1, 4) for _ in range(4)]
    model = net.of(net.op("BatchNormalization", [y, *parameters], domain=last, epsilon=1e-5, momentum=0.9))
    model.graph.value_info.append(helper.make_tensor_value_info(y, 1, [1, 6, 6, 4]))
    found = read_model(model)
    same(found.canonical, found.reference, draw((1, 6, 6, 3)))
    # By hand: the same net channels first, its weights (O, H, W, I) turned.
    (conv,) = (node for node in found.canonical.graph.node if node.op_type == "Conv")
    made = {node.output[0]: node for node in found.canonical.graph.node}
    stored = {t.name: numpy_helper.to_array(t) for t in found.canonical.graph.initializer}
    expected = np.clip(np.rint(weights / np.float32(0.1)), -8, 7).transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(stored[made[conv.input[1]].input[0]], expected)


def test_the_float_model_keeps_ranges_and_drops_grids():
    net = Net()
    y = net.op("Conv", [net.quant("x", 0.5), net.quant(draw((4, 3, 1, 1)), 0.3, bits=3, narrow=1)], kernel_shape=[1, 1])
    model = net.of(net.quant(y, 0.25, 2.0, bits=16, signed=0, rounding_mode="FLOOR"))
    found = read_model(model, as_float=True).canonical
    assert [n.op_type for n in found.graph.node] == ["Clip", "Conv", "Clip"]
    weights = np.clip(np.rint(draw((4, 3, 1, 1)) / np.float32(0.3)), -3, 3)[:, :, 0, 0] * np.float32(0.3)
    expected = np.einsum("oc,nchw->nohw", weights, np.clip(draw(), -4, 3.5))
    np.testing.assert_allclose(run(found, draw())[0], np.clip(expected, -0.5, (65535 - 2) * 0.25), atol=1e-5)


def test_a_model_that_only_claims_to_be_qonnx_is_told_so():
    net = Net()
    model = net.of(net.op("Quant", ["x", np.float32(1)]))  # of the main domain
    with pytest.raises(ModelLoadError, match="Quant"):
        read_model(model)
