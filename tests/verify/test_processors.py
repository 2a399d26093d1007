"""Clipped products: which files have them, and the simulation against the runtime's kernels, bit for bit."""

import json

import numpy as np
import onnx
import pytest
from hypothesis import given, settings, strategies as st
from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic, quantize_static

from kenosis_ort import CalibrationError, Stages, UnsupportedModelError, convert, verify_fusion
from kenosis_ort.cli.main import main
from kenosis_ort.clipping import ClippingSimulation, clipping_loss
from kenosis_ort.graph.outside import copy_model
from tests import models
from tests.flow.support import quantized, run
from tests.planning import parse
from tests.processor import SATURATES


def by_stock(model, folder, **options):
    options = {"activation_type": QuantType.QUInt8, "per_channel": True, **options}
    quantize_static(copy_model(model), str(folder / "stock.onnx"), models.reader(model), **options)
    return folder / "stock.onnx"


PICTURES = """(float[2,3,11,9] x) => (y)
    <float[8,3,3,3] a, float[8] bias, float[8,4,3,3] b, float[8,8,2,2] c, float[8,8,2,2] d, float[4,8,1,1] e> {
    m = Conv <pads = [1,1,1,1], strides = [2,1]> (x, a, bias) n = Relu (m)
    o = Conv <group = 2, pads = [2,1,1,2]> (n, b) p = Relu (o) q = Conv <dilations = [2,2], pads = [1,1,1,1]> (p, c)
    r = Relu (q) s = Conv <auto_pad = "SAME_LOWER"> (r, d) t = Relu (s) y = Conv (t, e) }"""
"""Convs with strides, dilations, groups and uneven padding over two pictures."""
LINES = """(float[1,5,40] x) => (y) <float[16,5,5] a, float[6,16,3] b> {
    m = Conv <auto_pad = "SAME_UPPER"> (x, a) n = Relu (m) y = Conv <strides = [3]> (n, b) }"""


NETS = {
    "residual": models.residual_block, "pictures": lambda: parse(PICTURES, {"bias": np.linspace(-1, 1, 8)}),
    "lines": lambda: parse(LINES), "chain": lambda: models.conv_relu_chain(3), "mlp": models.mlp,
    "matmul": lambda: models.mlp(gemm=False), "concat": models.concat_net,
}  # fmt: skip


@pytest.mark.parametrize("form", [QuantFormat.QDQ, QuantFormat.QOperator], ids=lambda f: f.name)
@pytest.mark.parametrize("net", NETS)
def test_the_simulation_is_what_the_processor_at_hand_computes(net, form, tmp_path):
    model = NETS[net]()
    file = by_stock(model, tmp_path, quant_format=form)
    simulation, feeds = ClippingSimulation(file), models.feeds(model, 3)
    assert simulation.layers
    for feed, native in zip(feeds, run(file, feeds), strict=True):
        for a, b in zip(simulation.run(feed, clips=SATURATES).values(), native, strict=True):
            np.testing.assert_array_equal(a, b)
        other = list(simulation.run(feed, clips=not SATURATES).values())
        assert not all(np.array_equal(a, b) for a, b in zip(other, native, strict=True))


def test_dynamic_files(tmp_path):
    model, file = models.mlp(n_in=48, hidden=64, n_out=32), tmp_path / "stock.onnx"
    quantize_dynamic(model, str(file), weight_type=QuantType.QInt8)
    simulation, feeds = ClippingSimulation(file), models.feeds(model, 3)
    assert simulation.layers
    for feed, (native,) in zip(feeds, run(file, feeds), strict=True):
        (found,) = simulation.run(feed, clips=SATURATES).values()
        np.testing.assert_allclose(found, native, rtol=1e-5, atol=1e-6)


@settings(max_examples=20)
@given(
    m=st.integers(1, 5), k=st.integers(2, 33), n=st.integers(1, 20), zero=st.integers(0, 255), seed=st.integers(0, 999)
)
def test_products_of_integers(m, k, n, zero, seed):
    rng = np.random.default_rng(seed)
    weight = rng.integers(-128, 128, (k, n)).astype(np.int8)
    weight[:2, 0] = 127
    text = f"(uint8[{m},{k}] x) => (int32[{m},{n}] y) {{ [layer] y = MatMulInteger (x, w, z) }}"
    model = parse(text, {"w": weight, "z": np.uint8(zero)})
    feed = {"x": rng.integers(150, 256, (m, k)).astype(np.uint8)}
    found = ClippingSimulation(model).run(feed, clips=SATURATES)["y"]
    np.testing.assert_array_equal(found, run(model, [feed])[0][0])


# ---- what is told -----------------------------------------------------------------------------------------------


def test_a_file_of_stocks_is_told_of_and_stores_its_weights_as_uint8_when_it_is_converted(tmp_path):
    model = models.residual_block()
    file = by_stock(model, tmp_path)
    fusion = verify_fusion(file)
    assert len(fusion.clipping()) == len(ClippingSimulation(file).layers) > 0
    assert {p.name: p.exact for p in fusion.processors} == {
        "SSE 4.2": True, "AVX2": False, "AVX-512": False, "VNNI": True, "AMX": True,
    }  # fmt: skip
    (loss,) = clipping_loss(file, models.FeedReader(models.feeds(model, 4)))
    assert loss.sqnr_db < 60
    converted = convert(file, tmp_path / "qdq.onnx", to="qdq")
    assert all(a.sqnr_db > 30 for a in converted.agreement)
    (note,) = converted.notes
    assert ("stored as uint8" in note, f"'{fusion.clipping()[0].node}'" in note) == (True, True)
    assert verify_fusion(tmp_path / "qdq.onnx").clipping() == ()


@pytest.mark.parametrize("options", [
    {"weight_type": QuantType.QUInt8}, {"reduce_range": True},
    {"activation_type": QuantType.QInt8, "quant_format": QuantFormat.QOperator},
], ids=str)  # fmt: skip
def test_files_of_stocks_that_are_exact(options, tmp_path):
    model = models.residual_block()
    file = by_stock(model, tmp_path, **options)
    assert (verify_fusion(file).clipping(), {p.exact for p in verify_fusion(file).processors}) == ((), {True})
    assert [loss.sqnr_db for loss in clipping_loss(file, models.feeds(model, 2))] == [float("inf")]


def test_the_report_of_a_file_that_clips_has_the_loss(tmp_path):
    model = models.residual_block()
    report = quantized(model, tmp_path / "out.onnx", stages=Stages.none(), reduce_range=False)
    assert report.clipping == clipping_loss(tmp_path / "out.onnx", models.feeds(model))
    (loss,) = report.clipping
    assert 0 < loss.sqnr_db < 60
    assert f"without VNNI: {loss.sqnr_db:.1f} dB" in str(report).replace("\n", " ")
    assert f"without VNNI: {loss.sqnr_db:.1f} dB" in report.to_html()


def test_the_number_of_channels(tmp_path):
    """Of one layer, those with a pair of large weights of one sign that lie beside each other along K."""
    weight = np.full((8, 4), 0.01)
    weight[0:2, 1] = 1.0  # neighbours
    weight[1:3, 2] = 1.0  # in two pairs
    weight[[4, 5], 3] = 1.0, -1.0  # of two signs
    model = parse("(float[3,8] x) => (y) <float[8,4] w> { [layer] y = MatMul (x, w) }", {"w": weight})
    (layer,) = verify_fusion(by_stock(model, tmp_path, per_channel=False)).clipping()
    assert (layer.node, layer.clipping) == ("layer", 1)


def test_a_weight_that_is_an_output_too(tmp_path):
    model = onnx.load(by_stock(models.mlp(), tmp_path))
    tensor = model.graph.initializer[0]
    model.graph.output.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    assert tensor.name in {loss.output for loss in clipping_loss(model, models.feeds(models.mlp(), 2))}


@pytest.mark.since("1.24")  # before, the runtime has no ConvInteger of int8 weights
def test_without_samples_or_of_a_form_that_is_not_simulated(tmp_path):
    with pytest.raises(CalibrationError, match="no samples"):
        clipping_loss(by_stock(models.mlp(), tmp_path), [])
    text = "(uint8[1,4,5,5] x) => (int32[1,4,3,3] y) { [layer] y = ConvInteger (x, w) }"
    model = parse(text, {"w": np.full((4, 4, 3, 3), 127, np.int8)})
    with pytest.raises(UnsupportedModelError, match="ConvInteger"):
        ClippingSimulation(model)


def test_the_command_line(tmp_path, capsys):
    model = models.residual_block()
    file = by_stock(model, tmp_path)
    np.savez(tmp_path / "data.npz", x=np.concatenate([feed["x"] for feed in models.feeds(model, 4)]))
    assert main(["verify", str(file), "--data", str(tmp_path / "data.npz"), "--strict"]) == 1
    said = capsys.readouterr().out
    assert ("clip on AVX2, AVX-512" in said, "without VNNI" in said) == (True, True)
    quantized(model, tmp_path / "ours.onnx", protect_outputs="int8")
    assert main(["verify", str(tmp_path / "ours.onnx"), "--data", str(tmp_path / "data.npz"), "--strict"]) == 0
    assert "the same integers on every processor" in capsys.readouterr().out
    assert main(["verify", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {p["name"]: p["exact"] for p in found["processors"]}["AVX2"] is False
