"""Formats that are written: the public call with formats and bits, QOperator, and QCDQ and QONNX for others' tools."""

from collections import Counter
from dataclasses import replace

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, seed, settings, strategies as st

from kenosis_ort import RECIPES, InternalError, KenosisWarning, OptionError, Recipe, quantize_static, verify_fusion
from kenosis_ort.accuracy import side_by_side, value_grids
from kenosis_ort.formats import from_qonnx, qonnx_nodes, to_qop
from kenosis_ort.formats.conventions import to_qcdq, to_qonnx
from kenosis_ort.formats.tensors import quantizers_of
from kenosis_ort.graph import outside, shapes, walk
from kenosis_ort.options import Widths
from kenosis_ort.placement.eligibility import with_widths
from tests import models, planning
from tests.contracts.test_formats import grids
from tests.flow.support import Untouched, changed
from tests.formats.qonnx import model_of, operators, run
from tests.quantizer.random_nets import nets

net = models.mobile_block  # of everything that bits have a say in
pytestmark = pytest.mark.filterwarnings("ignore:output .* keeps only:kenosis_ort.errors.KenosisWarning")


def written(tmp_path, **options):
    model = net()
    out = tmp_path / "out.onnx"
    report = quantize_static(model, out, models.FeedReader(models.feeds(model, 24)), **options)
    assert not report.is_float
    return onnx.load(out)


@pytest.mark.parametrize("bits", [2, 3, 4, 5])
def test_values_keep_to_their_bits_and_run_on_the_integer_kernels(tmp_path, bits):
    made = written(tmp_path, format="qcdq", weight_bits=bits, activation_bits=bits, recipe="plain")
    weights = [t for t in quantizers_of(made) if t.constant is not None and t.quantizer.bits <= 8]
    assert {t.quantizer.bits for t in weights} == {bits}
    for tensor in weights:
        integers = onnx.numpy_helper.to_array(tensor.constant)
        assert integers.dtype == np.int8
        assert tensor.quantizer.bounds[0] <= integers.min()
        assert integers.max() <= tensor.quantizer.bounds[1]
    entering, *inner = (t.quantizer.bits for t in quantizers_of(made) if t.quantize is not None)
    assert (entering, set(inner)) == (8, {bits})
    assert all(k.integer for k in verify_fusion(tmp_path / "out.onnx").kernels if k.op_type in ("Conv", "Gemm"))


def test_bits_by_node(tmp_path):
    by_node = {"expand": {"weights": 8}, "project": {"activations": 6}}
    recipe = replace(RECIPES["plain"], weight_bits=4, activation_bits=4, bits=by_node)
    tensors = quantizers_of(written(tmp_path, format="qcdq", recipe=recipe))
    found = {t.real or t.integers: t.quantizer.bits for t in tensors if t.quantizer.bits <= 8}
    assert sorted(b for name, b in found.items() if name.endswith("_quantized")) == [4, 4, 4, 4, 8]
    assert (found["project_out"], found["stem_act_out"]) == (6, 4)


@pytest.mark.parametrize("bits", [8, 4])
def test_all_formats_are_of_one_state(tmp_path, bits):
    narrow = {"weight_bits": bits, "activation_bits": bits, "recipe": "plain", "promise": False, "tune": "off"}
    first = written(tmp_path, format="qcdq", **narrow)
    check_same(first, written(tmp_path, format="qop-clip", **narrow), models.feeds(net(), 3))
    check_same(first, written(tmp_path, format="qcdq-qonnx", **narrow), models.feeds(net(), 3))
    exported = written(tmp_path, format="qonnx", **narrow)
    assert {n.domain for n in exported.graph.node} == {"", "qonnx.custom_op.general"}
    assert not {"QuantizeLinear", "DequantizeLinear"} & operators(exported).keys()


def test_eight_bits_as_operators_are_the_default_s_results(tmp_path):
    plain, operated = (written(tmp_path, format=f, promise=False) for f in ("qdq", "qop"))
    check_same(plain, operated, models.feeds(net(), 3))
    assert operators(operated)["QLinearConv"] == 4
    proof = verify_fusion(tmp_path / "out.onnx")
    assert "5 of 5 Conv/Gemm/MatMul on integer kernels" in str(proof)
    assert (proof.integer_share(), proof.silently_quantized()) == (1.0, ())


@pytest.mark.parametrize(("options", "text"), [
    ({"weight_bits": 0}, "weight_bits=0.*from 2 to 8"),
    ({"activation_bits": 300, "format": "qonnx"}, "activation_bits=300.*from 2 to 8"),
    ({"format": "onnxq"}, "format='onnxq'"),
    ({"activation_bits": 4}, "format='qdq' has activations of 8 bits.*qcdq"),
    ({"activation_bits": 4, "quant_format": "QOperator"}, "format='qop' has activations of 8 bits"),
    ({"format": "qcdq", "quant_format": "QOperator"}, "contradicts"),
    ({"weight_bits": 4, "extra_options": {"WeightSymmetric": False}}, "WeightSymmetric.*contradicts"),
    ({"recipe": Recipe(activation_bits=3)}, "asks for 3"),
])  # fmt: skip
def test_what_cannot_be_said_is_refused_before_a_sample_is_read(tmp_path, options, text):
    with pytest.raises(OptionError, match=text):
        quantize_static(net(), tmp_path / "out.onnx", Untouched(), **options)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_computes_something_else_is_not_written(tmp_path, monkeypatch):
    def broken(model):
        made = to_qonnx(model)
        return changed(made, **{t.name: 60 for t in made.graph.initializer if t.name.endswith("quant_scale")})

    monkeypatch.setattr("kenosis_ort.formats.conventions.to_qonnx", broken)
    reader = models.FeedReader(models.feeds(net(), 4))
    with pytest.raises(InternalError, match="in format 'qonnx' is off by"):
        quantize_static(net(), tmp_path / "out.onnx", reader, format="qonnx", recipe="plain")
    assert not list(tmp_path.iterdir())


def test_comparison_and_report_see_the_bits(tmp_path):
    made = written(tmp_path, format="qcdq", weight_bits=4, activation_bits=3, recipe="plain")
    pair = next(p for p in side_by_side.Pairing(net(), made).activations() if p.name == "stem_act_out")
    assert pair.grid.range == (0.0, pytest.approx(7 * pair.grid.scale.item()))
    grids = value_grids.read_grids(net(), made)
    assert (grids["stem_act_out"].bits, grids["stem_act_out"].bounds) == (3, (0, 7))
    assert {grid.bits for grid in grids.values() if grid.stored is not None} == {4}


def test_bits_of_no_node_are_told(tmp_path):
    recipe = replace(RECIPES["plain"], bits={"expandd": {"weights": 4}})
    with pytest.warns(KenosisWarning, match=r"recipe\.bits names 'expandd', which is no node.*'expand'"):
        written(tmp_path, format="qcdq", recipe=recipe, promise=False)


def test_exports_hold_no_rewrite_for_one_runtime_s_kernels(tmp_path):
    assert "Pad" in operators(written(tmp_path, format="qcdq", recipe="plain", promise=False, tune="off"))
    assert "Pad" not in operators(written(tmp_path, format="qonnx", recipe="plain"))


# ---- QOperator: the same kernels and results, with the runtime's optimizations off too -------------------------------


def check_same(qdq, qop, feeds):
    """The runtime fuses the QDQ model to what the other one says, whether or not it optimizes that."""
    step = max((float(t.quantizer.scale.max()) for t in quantizers_of(qdq) if t.constant is None), default=0.0)
    for feed in feeds:
        expected = run(qdq, feed, optimize=True)
        for found in (run(qop, feed, optimize=True), run(qop, feed)):
            for a, b in zip(expected, found, strict=True):
                assert np.abs(a.astype(np.float64) - b).max(initial=0.0) <= 1.01 * step


@seed(11)  # of which a clamp is an output too
@settings(suppress_health_check=list(HealthCheck))
@given(nets())
def test_any_net_computes_the_same(model):
    done = planning.quantize(model, protect_outputs="int8")
    qop = to_qop.to_qop(done.quantized)
    check_same(done.quantized, qop, done.feeds[:1])
    floating = [k for k in verify_fusion(done.quantized).kernels if k.op_type == "Conv" and not k.integer]
    assert floating or "Conv" not in operators(qop)


def test_every_operator_of_a_net_is_one_of_integers():
    text = """(float[1,3,8,8] x) => (y) <float[8,3,3,3] w, float[8] b, float[8,8,1,1] u> {
        c = Conv (x, w, b) r = Relu (c) p = MaxPool <kernel_shape = [2,2], strides = [2,2]> (r) d = Conv (p, u)
        a = Add (d, p) s = Sigmoid (a) g = GlobalAveragePool (s) h = Conv (g, u) y = Relu (h) }"""
    done = planning.quantize(text, protect_outputs="int8")
    qop = to_qop.to_qop(done.quantized)
    expected = dict.fromkeys(("QuantizeLinear", "DequantizeLinear", "MaxPool", "QLinearAdd", "QLinearSigmoid"), 1)
    assert operators(qop) == {**expected, "QLinearGlobalAveragePool": 1, "QLinearConv": 3}
    onnx.checker.check_model(qop)
    check_same(done.quantized, qop, done.feeds)


def test_a_softmax_of_integers_has_its_axis():
    text = """(float[2,3,4] x) => (y) { q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z)
        p = Softmax <axis = 1> (d) r = QuantizeLinear (p, t, z) y = DequantizeLinear (r, t, z) }"""
    qdq = planning.parse(text, {"s": np.float32(0.02), "z": np.uint8(0), "t": np.float32(1 / 256)})
    qop = to_qop.to_qop(qdq)
    assert operators(qop)["QLinearSoftmax"] == 1
    check_same(qdq, qop, models.feeds(qdq, 2))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rank", [2, 3])
def test_products_with_quantized_and_float_output(rank, bias):
    net = models.Net.over([4, 16] if rank == 2 else [1, 4, 16], seed=3)
    hidden = net.op("Relu", [net.linear("x", 16, 16, bias=bias)])
    done = planning.quantize(net.of(net.linear(hidden, 16, 8, bias=bias)))
    qop = to_qop.to_qop(done.quantized)
    check_same(done.quantized, qop, done.feeds)
    found = operators(qop)
    if rank == 2 and bias:
        assert found["QGemm"] == 2
    elif not bias:
        assert (found["QLinearMatMul"], found["MatMulIntegerToFloat"]) == (1, 1)


def test_a_relu_that_the_integers_do_not_keep_stays_with_its_conv():
    text = """(float[1,3,6,6] x) => (y) <float[4,3,1,1] w, float[4] b, float[2,4,1,1] v>
        { c = Conv (x, w, b) relu = Relu (c) y = Conv (relu, v) }"""
    done = planning.quantize(text, protect_outputs="int8")
    grid = next(t.quantize for t in quantizers_of(done.quantized) if t.real == "relu")
    quantized = changed(done.quantized, **{grid.input[2]: lambda _: 7})
    qop = to_qop.to_qop(quantized)
    assert (operators(qop)["Relu"], operators(qop)["Conv"]) == (1, 1)
    check_same(quantized, qop, done.feeds)


@pytest.mark.parametrize("behind", [10, 20])
def test_integers_are_moved_only_where_scale_and_zero_point_stay(behind):
    text = """(float[1,1,4,4] x) => (float[1,1,3,3] y) { q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z)
        p = MaxPool <kernel_shape = [2,2]> (d) r = QuantizeLinear (p, s, v) y = DequantizeLinear (r, s, v) }"""
    qdq = planning.parse(text, {"s": np.float32(0.1), "z": np.uint8(10), "v": np.uint8(behind)})
    qop = to_qop.to_qop(qdq)
    assert operators(qop)["QuantizeLinear"] == (1 if behind == 10 else 2)
    check_same(qdq, qop, models.feeds(qdq, 2))


# ---- exports: the traps of QONNX' tools, and any net there and back --------------------------------------------------


def canonical(model, bits=8):
    """A quantized model of so many bits."""
    widths = Widths(bits, bits)
    return planning.quantize(model, protect_outputs="int8", revise=lambda plan, view: with_widths(plan, view, widths))


def check_traps(model):
    """What QONNX' tools stumble over is not there: the package `qonnx` 1.0.0 is silently wrong about it, or raises."""
    graph = model.graph
    constants = {t.name: t for t in graph.initializer}
    quantized = {n.output[0] for n in graph.node if n.op_type == "QuantizeLinear"}
    named = Counter(v.name for v in (*graph.value_info, *graph.output, *graph.input))
    assert max(named.values()) == 1, "cleanup asserts one entry a value"
    assert not named.keys() & constants.keys()
    readers = Counter(n.input[0] for n in graph.node if n.op_type == "DequantizeLinear")
    assert set(readers.values()) <= {1}, "of several DQs behind one Q all but the first are computed wrong"
    for node in graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            assert len(node.input) == 3, "a missing zero point is a ValueError"
            assert node.input[2]
            scale = constants[node.input[1]]
            has_axis = walk.attribute(node, "axis") is not None
            assert has_axis == (len(scale.dims) == 1), "an axis beside one scale is an error"
        if node.op_type == "DequantizeLinear":
            assert node.input[0] not in constants, "integer weights with a scale a channel are a ValueError"
        if node.op_type in ("Conv", "MaxPool", "AveragePool"):
            assert walk.attribute(node, "kernel_shape") is not None, "the cost of a model is read off it"
        if node.op_type == "Clip" and node.input[0] in quantized:
            low, high = (int(onnx.numpy_helper.to_array(constants[name])) for name in node.input[1:])
            unsigned = constants[node.input[1]].data_type == onnx.TensorProto.UINT8
            assert low <= 0 < high, "bounds without 0 are an AssertionError"
            assert not unsigned or (high + 1) & high == 0, "that unsigned ranges are narrow is lost"
        assert node.op_type != "Max" or len(node.input) > 1, "what keeps one runtime from fusing is no part of the net"
    assert model.ir_version <= 10


@seed(0)  # of which nets have barriers
@settings(suppress_health_check=list(HealthCheck))
@given(nets(), st.sampled_from([2, 3, 4, 8]))
def test_any_net_is_the_same_in_every_export_and_comes_back_from_qonnx(model, bits):
    done = canonical(model, bits)
    expected = run(done.quantized, done.feeds[0])
    for made in (to_qcdq(done.quantized), to_qonnx(done.quantized)):
        check_traps(made)
        for a, b in zip(expected, run(qonnx_nodes.spell_out(made), done.feeds[0]), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
    assert grids(done.quantized) == grids(from_qonnx.Reader(outside.copy_model(made), shapes.value_types(made)).run())


@pytest.mark.parametrize(("between", "expected"), [("Add (m, b)", 1), ("Clip (m, low, high)", 0)])
def test_a_bias_between_two_layers_is_no_bound_of_few_bits_and_a_clip_is_one(between, expected):
    weights = {name: np.eye(4, dtype=np.float32) for name in "wv"} | {"b": np.ones(4, np.float32)}
    weights |= {"low": np.float32(-1), "high": np.float32(1)}
    text = f"(float[1,4] x) => (float[1,4] y) {{ m = MatMul (x, w) h = {between} y = MatMul (h, v) }}"
    quantized = canonical(planning.parse(text, weights), 2).quantized
    assert (operators(quantized)["Clip"], operators(quantized)["QuantizeLinear"]) == (2, 3)
    np.testing.assert_allclose(
        run(quantized, {"x": np.zeros((1, 4), np.float32)})[0], np.full((1, 4), expected), atol=0.5
    )


def test_weights_of_one_step_are_bipolar():
    model = changed(model_of(0, 15, weight="INT2"), w=lambda w: np.where(w > 0, 1, -1))
    feed = {"x": np.random.default_rng(0).normal(size=(1, 3, 4, 4)).astype(np.float32)}
    made = to_qonnx(model)
    assert [n.op_type for n in made.graph.node] == ["Quant", "BipolarQuant", "Conv"]
    np.testing.assert_allclose(run(qonnx_nodes.spell_out(made), feed)[0], run(model, feed)[0], atol=1e-5)
