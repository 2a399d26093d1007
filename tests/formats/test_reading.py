"""QOperator, QCDQ, QDQ of other exporters and QONNX: read to the bit into the one spelling."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort import errors, interop
from kenosis_ort.formats import from_qdq, qonnx_nodes, runtime_form, tensors, to_qop
from kenosis_ort.graph import qdq
from tests.formats.qonnx import DOMAIN, X86, Net, conv_net, draw, execute, model_of, operators, run, same
from tests.planning import parse


@given(st.integers(2, 16), st.booleans(), st.booleans())
def test_a_width_and_its_bounds_are_the_same_fact(bits, signed, narrow):
    low, high = qdq.integer_bounds(bits, signed=signed, narrow=narrow)
    assert high - low == 2**bits - 1 - narrow
    assert qdq.width_of(low, high, signed=signed) == (bits, narrow)
    assert {qdq.width_of(*ends, signed=ends[0] < 0) for ends in ((1, 14), (0, 200), (-3, 7), (0, 0))} == {None}


@pytest.mark.parametrize(("high", "word", "bits", "weight_bits"), [
    (15, "INT4", 4, 4), (None, "", 8, 8), *((None, word, 8, 8) for word in ("UINT4", "FLOAT32", "INT12")),
])  # fmt: skip
def test_bits_are_read_from_clip_and_an_annotation_that_fits(high, word, bits, weight_bits):
    """Else the container counts."""
    activation, weight = tensors.quantizers_of(model_of(high and 0, high, weight=word))
    a, w = activation.quantizer, weight.quantizer
    assert (a.bits, a.signed, a.narrow, a.axis, a.zero_point, activation.real) == (bits, False, False, None, 3, "x")
    assert (activation.clip is None) == (high is None)
    assert (w.bits, w.signed, w.narrow, w.axis, w.scale.tolist()) == (weight_bits, True, True, 0, [0.5, 0.25])
    assert weight.constant is not None
    assert w.bounds == (1 - 2 ** (weight_bits - 1), 2 ** (weight_bits - 1) - 1)


def test_a_second_word_replaces_the_first():
    model = model_of(None, None, weight="INT4")
    qdq.annotate(model.graph, "w", "INT5")
    assert qdq.declared_datatypes(model.graph) == {"w": "INT5"}


# ---- spellings of others ---------------------------------------------------------------------------------------------


GRIDS = {
    "s": np.float32(0.05), "z": np.uint8(120), "s2": np.float32(0.1), "z2": np.uint8(100),
    "s3": np.float32(1 / 256), "z3": np.uint8(0),
}  # fmt: skip
PAIR = "q = QuantizeLinear (x, s, z)\n d = DequantizeLinear (q, s, z)"


def net(nodes, outputs="y", opset=17, **constants):
    """A model of ``x`` with these nodes; scales and zero points of `GRIDS` unless others are given."""
    used = {name: array for name, array in {**GRIDS, **constants}.items() if name in nodes}
    return parse(f"net (float[2,3,6,6] x) => ({outputs}) {{ {nodes} }}", used, opset=opset, checked=False)


def read(model, x=None):
    """The canonical model, which computes the same to the bit."""
    found = interop.read_model(model).canonical
    same(found, model, x)
    return found


# ---- quantized operators --------------------------------------------------------------------------------------------

OPERATORS = {
    "QLinearAdd": ("com.microsoft.QLinearAdd (q, s, z, q, s, z, s2, z2)", "s2, z2"),
    "QLinearMul": ("com.microsoft.QLinearMul (q, s, z, q, s, z, s2, z2)", "s2, z2"),
    "QLinearSigmoid": ("com.microsoft.QLinearSigmoid (q, s, z, s3, z3)", "s3, z3"),
    "QLinearLeakyRelu": ("com.microsoft.QLinearLeakyRelu <alpha = 0.1> (q, s, z, s2, z2)", "s2, z2"),
    "QLinearSoftmax": ("com.microsoft.QLinearSoftmax <axis = -1, opset = 17> (q, s, z, s3, z3)", "s3, z3"),
    "QLinearGlobalAveragePool": ("com.microsoft.QLinearGlobalAveragePool <channels_last = 0> (q, s, z, s2, z2)",
                                 "s2, z2"),
    "QLinearAveragePool": ("com.microsoft.QLinearAveragePool <kernel_shape = [2, 2]> (q, s, z, s2, z2)", "s2, z2"),
    "QLinearConcat": ("com.microsoft.QLinearConcat <axis = 1> (s2, z2, q, s, z, q, s, z)", "s2, z2"),
    "QLinearMatMul": ("QLinearMatMul (q, s, z, w, ws, wz, s2, z2)", "s2, z2"),
    "MaxPool": ("MaxPool <kernel_shape = [2, 2]> (q)", "s, z"),
    "Transpose": ("Transpose <perm = [0, 2, 3, 1]> (q)", "s, z"),
    "Flatten": ("Flatten (q)", "s, z"),
}  # fmt: skip


@pytest.mark.parametrize("op_type", OPERATORS)
def test_an_operator_of_integers_is_its_float_one_between_dq_and_q(op_type):
    rng = np.random.default_rng(0)
    weights = {"w": rng.integers(-90, 90, (6, 4)).astype(np.int8), "ws": rng.uniform(0.01, 0.02, 4).astype(np.float32)}
    node, last = OPERATORS[op_type]
    text = f"q = QuantizeLinear (x, s, z)\n [node] p = {node}\n y = DequantizeLinear (p, {last})"
    model = net(text, **weights, wz=np.zeros(4, np.int8))
    found = interop.read_model(model).canonical
    (made,) = (n for n in found.graph.node if n.op_type not in ("QuantizeLinear", "DequantizeLinear"))
    assert (made.name, made.domain) == ("node", "")
    step = float(GRIDS[last.split(",")[0]])
    difference = np.abs(run(found, draw())[0] - run(model, draw())[0])
    assert difference.max() < 1.01 * step
    assert (difference > step / 2).mean() < (0.35 if op_type in ("QLinearAveragePool", "QLinearAdd") else 0.02)


def test_a_pool_of_integers_that_feeds_others_stands_between_dq_and_q():
    model = net(f"{PAIR}\n p = MaxPool <kernel_shape = [2, 2]> (q)\n y = DequantizeLinear (p, s, z)", "y, d")
    assert [t.quantize is not None for t in tensors.quantizers_of(read(model))] == [True] * 3


# ---- Q, Clip and DQ -------------------------------------------------------------------------------------------------


@given(stored=st.booleans(), by_channel=st.booleans(), bits=st.integers(2, 8), seed=st.integers(0, 2**16))
def test_weights_of_qcdq_become_integers_in_range(stored, by_channel, bits, seed):
    rng = np.random.default_rng(seed)
    most = 2 ** (bits - 1) - 1
    scale = rng.uniform(0.01, 0.1, 4).astype(np.float32) if by_channel else np.float32(0.05)
    real = rng.normal(size=(4, 3, 3, 3)).astype(np.float32)
    w = rng.integers(-128, 128, real.shape).astype(np.int8) if stored else real
    axis = "<axis = 0>" if by_channel else ""
    quantize = "" if stored else f"wq = QuantizeLinear {axis} (w, ws, wz)\n"
    model = net(
        f"{quantize} wc = Clip ({'w' if stored else 'wq'}, lo, hi)\n"
        f"wd = DequantizeLinear {axis} (wc, ws, wz)\n y = Conv (x, wd)",
        w=w, ws=scale, wz=np.zeros(np.shape(scale), np.int8), lo=np.int8(-most), hi=np.int8(most),
    )  # fmt: skip
    found = read(model)
    (tensor,) = tensors.quantizers_of(found)
    assert tensor.constant is not None
    assert tensor.quantizer.bits == bits
    assert [n.op_type for n in found.graph.node] == ["DequantizeLinear", "Conv"]


def test_several_dq_of_one_q_are_one():
    """Others' converter gives the second DQ floats without a word."""
    pairs = "a = DequantizeLinear (c, s, z) b = DequantizeLinear (c, s, z) y = Mul (a, b)"
    model = net(f"q = QuantizeLinear (x, s, z) c = Clip (q, z3, hi) {pairs}", z=np.uint8(7), hi=np.uint8(15))
    assert [n.op_type for n in read(model).graph.node] == ["QuantizeLinear", "Clip", "DequantizeLinear", "Mul"]


def test_zero_points_left_out_and_scales_of_one_element_are_spelled_out():
    model = net(
        "q = QuantizeLinear (x, s)\n d = DequantizeLinear (q, s)\n wd = DequantizeLinear (w, s)\n y = Add (d, wd)",
        opset=13, s=np.array([0.05], np.float32), w=np.ones((3, 1, 1), np.int8),
    )  # fmt: skip
    found = read(model)
    assert all(len(n.input) == 3 for n in found.graph.node if n.op_type != "Add")
    assert all(t.quantizer.scale.ndim == 0 for t in tensors.quantizers_of(found))


@pytest.mark.since("1.24")  # whose onnx has types of 4 bits for numpy
def test_integers_of_four_bits_get_eight_and_a_clip():
    four, unsigned = map(helper.tensor_dtype_to_np_dtype, (TensorProto.INT4, TensorProto.UINT4))
    model = net(
        f"{PAIR}\n wd = DequantizeLinear (w, s)\n y = Add (d, wd)",
        opset=21, s=np.float32(0.2), z=np.asarray(3, unsigned), w=np.asarray([-8, 0, 7], four).reshape(3, 1, 1),
    )  # fmt: skip
    kinds = {(t.elem_type, t.quantizer.bits) for t in tensors.quantizers_of(read(model))}
    assert kinds == {(TensorProto.UINT8, 4), (TensorProto.INT8, 4)}


@pytest.mark.parametrize(("layout", "reader"), [
    ("Transpose <perm = [3, 2, 0, 1]> (wd)", "Conv (x, v)"), ("Transpose (wd)", "Identity (v)"),
    ("Reshape (wd, to)", "Identity (v)"), ("Unsqueeze (wd, axes)", "Identity (v)"),
    ("Flatten <axis = 3> (wd)", "Identity (v)"),
])  # fmt: skip
def test_layout_operators_behind_a_weight_are_performed_on_its_integers(layout, reader):
    rng = np.random.default_rng(3)
    model = net(
        f"wd = DequantizeLinear <axis = 3> (w, ws, wz)\n v = {layout}\n y = {reader}",
        w=rng.integers(-8, 8, (3, 3, 3, 4)).astype(np.int8), ws=rng.uniform(0.1, 0.2, 4).astype(np.float32),
        wz=np.zeros(4, np.int8), to=np.array([-1, 4]), axes=np.array([0]),
    )  # fmt: skip
    assert layout.split()[0] not in operators(read(model))


def test_a_layout_that_mixes_channels_stays():
    model = net(
        "wd = DequantizeLinear <axis = 0> (w, ws, wz)\n v = Reshape (wd, to)\n y = Add (x, v)",
        w=np.arange(6, dtype=np.int8).reshape(2, 3), ws=np.float32([0.1, 0.2]), wz=np.int8([0, 0]), to=[6],
    )  # fmt: skip
    assert operators(read(model))["Reshape"] == 1


def test_unsigned_integers_around_128_are_signed_ones_around_zero():
    model = net("q = QuantizeLinear (x, s, z)\n y = DequantizeLinear (q, s, z)", z=np.uint8(128))
    (tensor,) = tensors.quantizers_of(read(model, draw() * 4))
    assert (tensor.quantizer.signed, int(tensor.quantizer.zero_point)) == (True, 0)


@pytest.mark.parametrize(("behind", "weight"), [("y = Add (d, wd)", "uint8"), ("y = MatMul (d, wd)", "int8")])
def test_a_constant_that_meets_data_takes_its_type_and_a_weight_keeps_its_own(behind, weight):
    model = net(
        f"{PAIR}\n wd = DequantizeLinear (w, s2, wz)\n {behind}",
        w=np.arange(-18, 18, dtype=np.int8).reshape(6, 6), z=np.int8(3), wz=np.int8(-2),
    )  # fmt: skip
    found = from_qdq.to_unsigned(tensors.Edits(model)).finish()
    types = {tensor.name: numpy_helper.to_array(tensor).dtype.name for tensor in found.graph.initializer}
    q, wd = (next(n for n in found.graph.node if n.output[0] == name) for name in ("q", "wd"))
    assert [types[name] for name in (q.input[2], wd.input[0], wd.input[2])] == ["uint8", weight, weight]
    same(found, model)


def test_integers_keep_their_type_where_the_caller_may_override_a_bound():
    text = "q = QuantizeLinear (x, s, z)\n c = Clip (q, lo, hi)\n y = DequantizeLinear (c, s, z)"
    model = net(text, z=np.uint8(128), lo=np.uint8(120), hi=np.uint8(135))
    model.graph.input.append(helper.make_tensor_value_info("lo", TensorProto.UINT8, []))
    before = list(model.graph.node)
    assert list(from_qdq.to_signed(tensors.Edits(model)).finish().graph.node) == before


def test_the_float_model_behind_quantized_operators_keeps_the_relu_that_only_a_range_says():
    canonical = runtime_form.to_runtime_form(interop.read_model(conv_net(bits=8)).canonical, X86)
    for relu in [n for n in canonical.graph.node if n.op_type == "Relu"]:  # as stock writes it: the range is the Relu
        for reader in canonical.graph.node:
            reader.input[:] = [relu.input[0] if name == relu.output[0] else name for name in reader.input]
        canonical.graph.node.remove(relu)
    found = interop.read_model(to_qop.to_qop(canonical), as_float=True)
    assert not any("Q" in node.op_type for node in found.canonical.graph.node)
    expected, actual = run(found.reference, draw())[0], run(found.canonical, draw())[0]
    assert np.corrcoef(expected.ravel(), actual.ravel())[0, 1] > 0.99


# ---- QONNX; what is refused: `tests/contracts/test_formats.py` -------------------------------------------------------


FOUR = numpy_helper.from_array(np.float32(4))


def truncated(net, x, *parameters, rounding_mode="FLOOR"):
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
    found = interop.read_model(model).canonical
    (expected,), (actual,) = execute(model, {"x": x}), run(found, x)
    ties = np.abs((x / scale) % 1 - 0.5) < 1e-4  # where ONNX adds an odd zero point behind the rounding
    np.testing.assert_array_equal(actual[~ties | constant], expected[~ties | constant])
    (tensor,) = tensors.quantizers_of(found)
    assert (tensor.quantizer.bits, tensor.quantizer.signed) == (bits, signed)
    assert (tensor.quantizer.axis is not None) == by_channel


@pytest.mark.parametrize("domain", ["onnx.brevitas", "finn.custom_op.general"])
def test_earlier_domains_are_read_alike_and_initializers_that_are_listed_as_inputs_are_constants(domain):
    model = conv_net(domain=domain)
    listed = [helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in model.graph.initializer]
    model.graph.input.extend(listed)
    found = interop.read_model(model)
    assert (found.format, {node.domain for node in found.canonical.graph.node}) == ("qonnx", {""})
    assert [v.name for v in found.canonical.graph.input] == ["x"]
    same(found.canonical, found.reference)


@pytest.mark.parametrize("rounding_mode", ["ROUND", "CEIL", "FLOOR"])
def test_what_is_spelled_out_computes_what_numpy_does(rounding_mode):
    net = Net()
    y = net.quant("x", 0.25, 3.0, 5, signed=0, rounding_mode=rounding_mode)
    z = net.op("BipolarQuant", [y, np.float32(0.5)], domain=DOMAIN)
    model = net.of(y, z, truncated(net, y, 0.25, 0, 8, 4))
    same(qonnx_nodes.spell_out(model), model)


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
    same(interop.read_model(model).canonical, model)


def test_bipolar_weights_and_data_are_signs():
    net = Net((2, 8))
    data = net.op("BipolarQuant", ["x", np.ones(1)], domain=DOMAIN)
    model = net.of(net.op("MatMul", [data, net.op("BipolarQuant", [draw((8, 4)), np.float32(0.5)], domain=DOMAIN)]))
    x = draw((2, 8))
    x[0, 0] = 0.0
    found = interop.read_model(model).canonical
    same(found, model, x)
    assert [t.quantizer.bits for t in tensors.quantizers_of(found)] == [2, 2]


@pytest.mark.parametrize(("to_bits", "quantizers"), [(4, 2), (8, 1)])
def test_trunc_behind_a_pool_is_read(to_bits, quantizers):
    net = Net()
    y = net.op("AveragePool", [net.quant("x", 0.25, signed=0)], kernel_shape=[2, 2], strides=[2, 2])
    model = net.of(truncated(net, net.op("Mul", [y, np.float32(4)]), 0.25, 0, to_bits + 2, to_bits))
    found = interop.read_model(model).canonical
    same(found, model)
    assert len(tensors.quantizers_of(found)) == quantizers


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
    found = interop.read_model(model)
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
    found = interop.read_model(model, as_float=True).canonical
    assert [n.op_type for n in found.graph.node] == ["Clip", "Conv", "Clip"]
    weights = np.clip(np.rint(draw((4, 3, 1, 1)) / np.float32(0.3)), -3, 3)[:, :, 0, 0] * np.float32(0.3)
    expected = np.einsum("oc,nchw->nohw", weights, np.clip(draw(), -4, 3.5))
    np.testing.assert_allclose(run(found, draw())[0], np.clip(expected, -0.5, (65535 - 2) * 0.25), atol=1e-5)


def test_a_model_that_only_claims_to_be_qonnx_is_told_so():
    net = Net()
    model = net.of(net.op("Quant", ["x", np.float32(1)]))  # of the main domain
    with pytest.raises(errors.ModelLoadError, match="Quant"):
        interop.read_model(model)
