"""What the runtime's integer kernels do not fuse goes into weights and biases; what the model computes stays."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from onnx import TensorProto

from kenosis_ort.formats import runtime_form, tensors
from kenosis_ort.formats.integer_bias import IntegerLayer, Outputs, carry_pairs, fit
from kenosis_ort.formats.tensors import Edits
from kenosis_ort.graph.outside import copy_model
from kenosis_ort.interop import read_model
from kenosis_ort.targets.vocabulary import DataTypes
from kenosis_ort.verify import check_bias_alignment, verify_fusion
from tests.formats.qonnx import X86, Net, conv_net, draw, operators, run, same


def rewritten(model, *, off=0.0, optimize=False, types=X86):
    """The form of a net of QONNX, which computes what the canonical one does, off by so much at most."""
    canonical = read_model(model).canonical
    x = draw([d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim])
    made = runtime_form.to_runtime_form(copy_model(canonical), types)
    np.testing.assert_allclose(run(made, x, optimize=optimize)[0], run(canonical, x)[0], rtol=0, atol=off)
    return made


@given(
    layer=st.sampled_from(["Conv", "Gemm", "MatMul"]),
    kinds=st.lists(st.sampled_from(["BatchNormalization", "Mul", "Add", "Div", "Sub"]), max_size=3),
    by_channel=st.booleans(), biased=st.booleans(), narrow=st.booleans(), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_constants_behind_a_layer_go_into_it(layer, kinds, by_channel, biased, narrow, seed):
    rng = np.random.default_rng(seed)
    net = Net((2, 3, 6, 6) if layer == "Conv" else (4, 6))
    size = {"Conv": (5, 3, 3, 3), "Gemm": (5, 6), "MatMul": (6, 5)}[layer]
    at = 1 if layer == "MatMul" else 0
    scale = rng.uniform(0.05, 0.1, 5).reshape([-1 if a == at else 1 for a in range(len(size))])
    weights = rng.normal(size=size)
    weights[(slice(None), 2) if layer == "MatMul" else 2] = 0.0
    inputs = [net.quant("x", 1 / 64, bits=8), net.quant(weights, scale if by_channel else 0.1, narrow=int(narrow))]
    inputs += [rng.normal(size=5)] if biased and layer != "MatMul" else []
    y = net.op(layer, inputs, **({"transB": 1} if layer == "Gemm" else {}))
    for kind in kinds:
        numbers = rng.normal(size=5)
        if kind == "BatchNormalization":
            numbers[0] = 0.0
            y = net.op(kind, [y, numbers, *rng.normal(size=(2, 5)), rng.uniform(0.5, 2, 5)])
        else:
            y = net.op(kind, [y, 0.3 if kind == "Sub" else numbers.reshape((5, 1, 1) if layer == "Conv" else (5,))])
    # The bias is rounded to steps of the sums, so that some outputs differ by the steps that these make.
    made = rewritten(net.of(net.quant(y, 1 / 512, bits=8)), off=0.06)
    assert not check_bias_alignment(made)
    assert not operators(made).keys() & {"BatchNormalization", "Mul", "Div", "Sub"}


def test_a_norm_that_others_read_around_stays():
    net = Net()
    y = net.op("Conv", [net.quant("x", 0.1), net.quant(draw((4, 3, 1, 1)), 0.1)])
    z = net.op("BatchNormalization", [y, *np.ones((4, 4))])
    made = rewritten(net.of(net.op("Add", [net.quant(y, 0.1), net.quant(z, 0.1)])))
    assert operators(made)["BatchNormalization"] == 1


@pytest.mark.parametrize(("bias", "factors"), [
    ((5,), {}),  # of its own scale: the runtime adds a Gemm's int32 bias as it is, whatever scale it has
    ((1, 5), {}),
    (None, {"alpha": -0.7, "beta": 0.5}),  # the runtime quantizes a float bias and forgets what it is multiplied by
])  # fmt: skip
def test_bias_and_factors_of_a_gemm_do_not_mislead_the_runtime(bias, factors):
    net, numbers = Net((4, 6)), np.arange(-2, 3, dtype=np.float32)
    added = numbers if bias is None else net.quant(numbers.reshape(bias), 0.25, bits=32)
    y = net.op("Gemm", [net.quant("x", 0.05, bits=8), net.quant(draw((5, 6)), 0.1), added], transB=1, **factors)
    made = rewritten(net.of(net.quant(y, 0.05, bits=8)), off=0.051, optimize=True)
    assert not check_bias_alignment(made)
    assert verify_fusion(made).integer_share() == 1.0


@pytest.mark.parametrize("kind", [{"bits": 2}, {"bits": 4}, {"bits": 8}, {"norm": True}], ids=str)
def test_signed_branches_and_norms_run_in_integer(kind):
    made = rewritten(conv_net(signed="bits" in kind, **kind), off=0.41)
    assert all(t.elem_type == TensorProto.UINT8 for t in tensors.quantizers_of(made) if t.constant is None)
    fusion = verify_fusion(made)
    assert fusion.integer_share() == 1.0, str(fusion)
    assert all(k.integer for k in fusion.kernels if k.op_type == "Add"), str(fusion)


def test_signed_activations_stay_where_kernels_take_them():
    made = rewritten(conv_net(4, signed=True), off=0.41, types=DataTypes())
    assert TensorProto.INT8 in {t.elem_type for t in tensors.quantizers_of(made) if t.constant is None}


@pytest.mark.parametrize(("largest_pair", "largest"), [(2**15 - 1, 32), (2**31 - 1, 64), (0, 1)])
def test_few_bits_take_no_more_of_int8_than_sums_of_two_products_hold(largest_pair, largest):
    ones, whole = np.ones(2), np.ones((2, 3), np.int64)
    layer = IntegerLayer(whole.astype(np.int8), 0, whole, np.zeros(2, np.int64), ones, ones, ones, 1.0, 255)
    assert layer.headroom(np.full(2, 765), largest_pair) == largest


# ---- pairs on both sides of operators that move values

MOVES = {
    "MaxPool": {"kernel_shape": [2, 2], "strides": [2, 2]}, "DepthToSpace": {"blocksize": 2},
    "Transpose": {"perm": [0, 2, 3, 1]}, "Flatten": {},
}  # fmt: skip


def convolution(net):
    rng = np.random.default_rng(3)
    w = net.quant(rng.normal(size=(8, 3, 3, 3)) * 0.3, 0.1, narrow=1)
    inputs = [net.quant("x", 0.1, bits=8), w, rng.normal(size=8)]
    return net.op("Conv", inputs, kernel_shape=[3, 3], pads=[1, 1, 1, 1])


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("op_type", MOVES)
def test_a_quantizer_behind_moved_values_also_stands_in_front(op_type, relu):
    net = Net()
    y = net.op(op_type, [convolution(net)], **MOVES[op_type])
    y = net.op("Relu", [y]) if relu else y
    model = net.of(net.quant(y, 0.2, signed=int(not relu)))
    for optimize in (False, True):
        fusion = verify_fusion(rewritten(model, optimize=optimize))
    assert fusion.integer_share() == 1.0, str(fusion)
    assert not fusion.float_nodes(), str(fusion)


def test_a_layer_behind_moved_values_reads_integers():
    net = Net()
    y = net.quant(net.op("Relu", [convolution(net)]), 0.2, signed=0)
    y = net.op("Flatten", [net.op("MaxPool", [y], **MOVES["MaxPool"])])
    model = net.of(net.quant(net.op("MatMul", [y, net.quant(draw((72, 5)), 0.3)]), 0.5, bits=8))
    fusion = verify_fusion(rewritten(model, optimize=True))
    assert not fusion.float_nodes(), str(fusion)


def test_a_relu_whose_quantizer_reaches_below_zero_stays():
    net = Net()
    model = net.of(net.quant(net.op("Relu", [net.op("Flatten", [convolution(net)])]), 0.2))
    canonical = read_model(model).canonical
    carried = carry_pairs(Edits(canonical)).finish()
    assert operators(carried)["Relu"] == 1
    same(carried, canonical)


# ---- whole biases under which every sum of products gives the output that the unrounded bias gives -------------------


def integers(sums, step, shift, outputs):
    whole = np.rint((sums + shift) * step / outputs.scale) + outputs.zero_point
    return np.clip(whole, outputs.low, outputs.high)


@given(
    coarse=st.floats(0.001, 2.0), bits=st.integers(2, 4), signed=st.booleans(), factor=st.sampled_from([1, 16]),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_what_is_called_exact_is_so_for_every_sum(coarse, bits, signed, factor, seed):
    rng = np.random.default_rng(seed)
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    outputs = Outputs(0.1, int(rng.integers(low, high)), low, high)
    step = coarse * 0.1 * rng.uniform(0.5, 1.5, 6)
    bias = rng.normal(size=6) * 0.3
    reach = rng.integers(1, 400, 6)
    found = fit(step, bias, reach, factor, outputs)
    for channel in np.nonzero(found.exact)[0]:
        sums = np.arange(-reach[channel], reach[channel] + 1)
        expected = integers(sums, step[channel], bias[channel] / step[channel], outputs)
        actual = integers(sums, found.step[channel], found.bias[channel] / factor, outputs)
        np.testing.assert_array_equal(actual, expected)


def test_few_bits_are_nearly_always_exact():
    rng = np.random.default_rng(0)
    step, bias = rng.uniform(0.001, 0.08, 200), rng.normal(size=200) * 0.3
    found = fit(step, bias, np.full(200, 3000), 16, Outputs(0.1, 0, 0, 15))
    assert found.exact.mean() > 0.97
    assert np.abs(np.log(found.step / step)).max() < 0.1


@pytest.mark.parametrize(("bias", "factor", "outputs", "whole"), [
    ([3.0, -2.0], 1, Outputs(0.1, 0, 0, 15), [6, -8]), ([0.3, -0.3], 4, None, [2, -5]),
], ids=["on the grid it stays", "rounded without quantized outputs"])  # fmt: skip
def test_a_bias_becomes_whole(bias, factor, outputs, whole):
    found = fit(np.array([0.5, 0.25]), np.array(bias), np.array([10, 10]), factor, outputs)
    np.testing.assert_array_equal(found.bias, whole)
    np.testing.assert_array_equal(found.step, [0.5, 0.25])
    assert found.exact.tolist() == [outputs is not None] * 2
