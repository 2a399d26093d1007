"""What is gathered from two models, what matches, where the error jumps, and what is advised."""

import json
import math

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st
from onnxruntime import quantization as stock
from onnxruntime.quantization.qdq_loss_debug import create_weight_matching

from kenosis_ort import CalibrationError, ModelLoadError, VerificationError, quantize_static
from kenosis_ort.accuracy.outputs import OutputComparison
from kenosis_ort.accuracy.side_by_side import ChannelSums, compare_layers
from kenosis_ort.accuracy.value_grids import ValueGrid, read_grids
from kenosis_ort.calibration.collector import Points, collect
from kenosis_ort.calibration.methods import CalibrationConfig
from kenosis_ort.report.comparison import Comparison, TensorComparison, advise, compare
from kenosis_ort.report.gathering import BINS, profile_tensors, sketch_graph
from tests import models, planning
from tests.flow.support import changed, make
from tests.models import FeedReader, feeds
from tests.passes.test_leave_float import BAD, spiky_chain
from tests.processor import SATURATES


@pytest.mark.parametrize("name", sorted(models.ALL.keys() - {"bn_net", "two_input_detector", "mlp_matmul"}))
def test_every_quantized_tensor_has_a_match(name):
    made = planning.quantize(models.ALL[name]())
    found = compare(made.model, made.quantized, made.feeds, threads=1)
    quantized = {value for value, _ in made.plan.quantized_values()} - {i.name for i in made.model.graph.initializer}
    assert ({t.name for t in found.tensors}, found.unmatched) == (quantized, 0)
    assert min(t.sqnr_db for t in found.tensors) > 15
    assert min(w.sqnr_db for w in found.weights) > 25
    assert [o.name for o in found.outputs] == [o.name for o in made.model.graph.output]
    assert found.samples == len(made.feeds)
    parts = compare(made.model, made.quantized, made.feeds, memory=1, threads=1)
    for a, b in zip((*found.tensors, *found.outputs), (*parts.tensors, *parts.outputs), strict=True):
        assert (a.name, a.sqnr_db) == (b.name, pytest.approx(b.sqnr_db, abs=0.1)), "kernels differ by what they fuse"
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert (data["samples"], {t["name"] for t in data["tensors"]}) == (found.samples, quantized)


@pytest.mark.parametrize("name", ["conv_relu_chain", "residual_block", "mobile_block", "mlp"])
def test_stock_models_match_too(name, tmp_path):
    model, paths = models.ALL[name](), (str(tmp_path / "f.onnx"), str(tmp_path / "q.onnx"))
    onnx.save(model, paths[0])
    types = {"activation_type": stock.QuantType.QUInt8, "per_channel": True, "reduce_range": SATURATES}
    stock.quantize_static(*paths, models.reader(model, 3), **types)
    found = compare(*paths, models.reader(model, 3), threads=1)
    assert (found.unmatched, len(found.tensors) > 2) == (0, True)
    assert all(t.sqnr_db > 15 for t in found.tensors), found
    assert create_weight_matching(*paths).keys() <= {w.name for w in found.weights}


def test_the_jump_is_found_and_named():
    model, bad = spiky_chain()
    made = planning.quantize(model)
    found = compare(made.model, made.quantized, made.feeds, threads=1)
    # the large channel hides the noise in its own tensor; the next one, which does not read it, shows it
    jumped = found.by_name[found.jump or ""]
    assert jumped.node == [n.name for n in made.model.graph.node if n.op_type == "Conv"][BAD + 1]
    assert jumped.drop_db > 6
    assert (jumped.node in found.advice, "first jump" in str(found), bad in found.by_name) == (True, True, True)


def test_clipping_is_counted_and_blamed():
    text = """net (float[1,3,8,8] x) => (y) <float[4,3,3,3] w, float[2,4,3,3] v> {
      c = Conv <kernel_shape=[3,3], pads=[1,1,1,1]> (x, w)  l = LeakyRelu (c)
      y = Conv <kernel_shape=[3,3], pads=[1,1,1,1]> (l, v) }"""
    made = planning.quantize(text, protect_outputs="int8")
    loud = [{k: 8 * v for k, v in feed.items()} for feed in made.feeds]
    found = compare(made.model, made.quantized, loud, threads=1)
    assert (found.by_name["x"].clipping > 0.2, found.by_name["x"].high > 4, "cuts off" in found.advice) == (True,) * 3


def test_rewritten_weights_are_left_out(tmp_path):
    """Against the original with its BatchNormalization the folded weights are other weights, activations match."""
    model = models.bn_net()
    quantize_static(model, tmp_path / "q.onnx", models.reader(model))
    found = compare(model, tmp_path / "q.onnx", models.feeds(model, 3), threads=1)
    assert min(t.sqnr_db for t in found.tensors) > 15
    assert all(w.sqnr_db > 25 for w in found.weights)
    assert len(found.weights) < len([t for t in model.graph.initializer if len(t.dims) == 4])


def test_equal_models_have_nothing_to_do():
    model = planning.prepared(models.conv_relu_chain(2))
    found = compare(model, model, models.feeds(model, 2), threads=1)
    assert (found.tensors, found.outputs[0].sqnr_db, "nothing to do" in found.advice) == ((), float("inf"), True)
    assert {*compare_layers(model, model, feeds(model, 1)).values()} == {float("inf")}
    assert compare_layers(model, model, []) == {}


def test_bad_input(tmp_path):
    made, other = planning.quantize(models.conv_relu_chain(2)), planning.prepared(models.mlp())
    for reference, samples, error, said in (
        (made.model, [], CalibrationError, "no samples"),
        (tmp_path / "no.onnx", made.feeds, ModelLoadError, "no.onnx"),
        (other, models.feeds(other, 1), VerificationError, "no output"),
        (made.model, [{"x": np.zeros((1, 1), np.float32)}], CalibrationError, "wrong shape"),
    ):
        with pytest.raises(error, match=said):
            compare(reference, made.quantized, samples)


# ---- sums -----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**16), st.integers(1, 5), st.floats(1e-3, 0.3))
def test_sums_are_those_of_all_samples_together(seed, samples, noise):
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(samples, 3, 4)).astype(np.float32)
    b = (a + noise * rng.normal(size=a.shape)).astype(np.float32)
    grid = ValueGrid(np.array([0.1]), np.zeros(1, np.int64), 1, onnx.TensorProto.INT8, bounds=(-10, 10))
    sums = ChannelSums(grid)
    for x, y in zip(a, b, strict=True):
        assert sums.add(x[None], y[None])
    x, y = a.astype(np.float64), b.astype(np.float64)
    sqnr, cosine, _ = sums.result()
    assert sqnr == pytest.approx(10 * np.log10(np.square(x).sum() / np.square(x - y).sum()), abs=1e-6)
    assert cosine == pytest.approx((x * y).sum() / np.sqrt(np.square(x).sum() * np.square(y).sum()), abs=1e-9)
    assert sums.clipping == pytest.approx(np.mean((x < -1.05) | (x > 1.05)))
    assert (sums.least, sums.largest) == (x.min(), x.max())


def test_equalized_channels_are_recognized():
    rng = np.random.default_rng(0)
    a = rng.normal(size=(4, 6, 50))
    factors = np.array([0.1, 0.5, 1.0, 2.0, 3.0, 8.0])[:, None]
    sums = ChannelSums()
    sums.add(a, a * factors + 0.01 * factors * rng.normal(size=a.shape))
    sqnr, cosine, rescaled = sums.result()
    assert (sqnr, cosine, rescaled) == (pytest.approx(40, abs=0.5), pytest.approx(1, abs=0.001), True)
    same = ChannelSums()
    same.add(a, a + 0.3 * rng.normal(size=a.shape))
    assert not same.result()[2]


@given(st.integers(0, 2**16), st.floats(-0.5, 0.5))
def test_a_channel_that_is_constant_is_lost_beside_rescaled_ones(seed, constant):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(2, 4, 6, 50))
    b = 6.0 * (a + 0.01 * b)
    b[:, 0] = constant
    sums = ChannelSums()
    sums.add(a, b)
    sqnr, cosine, rescaled = sums.result()
    signal, lost = np.square(a - a.mean((0, 2), keepdims=True)).sum(), np.square(a[:, 0] - constant).sum()
    assert (sqnr, rescaled) == (pytest.approx(10 * np.log10(signal / lost), abs=0.1), True)
    assert cosine == pytest.approx(np.sqrt(1 - lost / signal), abs=0.01)


def test_shapes_that_differ_are_not_added():
    sums = ChannelSums()
    assert (sums.add(np.zeros((1, 2)), np.zeros((1, 3))), np.isnan(sums.result()[0])) == (False, True)


# ---- advice ---------------------------------------------------------------------------------------------------------


def _tensor(**changes):
    usual = {"name": "t", "node": "n", "sqnr_db": 9.0, "cosine": 0.9, "low": 0.0, "high": 1.0}
    return TensorComparison(**usual | changes)


@pytest.mark.parametrize(("jump", "weights", "options", "words"), [
    (None, (), {}, "evenly"), (None, (_tensor(sqnr_db=20.0),), {}, "per_channel=True"),
    (_tensor(clipping=0.01), (), {}, "cuts off 1 %"),
    (_tensor(clipping=0.01), (), {"saturating": True}, "nodes_to_exclude"),
    (_tensor(), (_tensor(sqnr_db=20.0, per_channel=True),), {}, "equalization"),
    (_tensor(), (), {"last": True}, "protect_outputs='float'"),
    (_tensor(), (), {"first": True}, "nodes_to_exclude=['n']"),
    (_tensor(peak_to_rms=100.0), (), {}, "Percentile"), (_tensor(), (), {}, "recipe='strict'"),
])  # fmt: skip
def test_advice(jump, weights, options, words):
    for agreement, said in ((None, words), (0.999, "nothing to do")):
        outputs = (OutputComparison("y", 9.0, 0.9, 1.0, agreement, 0.0, 4, samples=1),)
        assert said in advise(outputs, jump, weights, **{"first": False, "last": False, **options})


def test_short_table_of_long_names():
    tensors = tuple(_tensor(name=f"{'very' * 30}{i}", drop_db=float(i)) for i in range(20))
    text = str(Comparison((), tensors, (), 3, 2, None, "Do this."))
    assert max(map(len, text.splitlines())) < 130
    assert ("The 8 layers" in text, f"very{19}" in text.replace("\n", ""), "y11" in text) == (True, True, False)
    assert text.endswith("Do this.\n")


def test_the_value_inside_a_fused_kernel_is_left_out(tmp_path):
    model = models.conv_relu_chain(3)
    layers = compare_layers(model, make(model, tmp_path, rewrites=False).written, feeds(model, 1))
    assert layers.keys() == {"x", "relu1_out", "conv2_out"}, "without the output of the Conv that a Relu reads"


# ---- what is gathered agrees with the models ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    model = models.residual_block()
    return model, make(model, tmp_path_factory.mktemp("pair"), rewrites=False).written


def test_sketch_holds_every_node_and_edge_but_no_constants(pair):
    model, _ = pair
    nodes, constants = sketch_graph(model).nodes, {t.name for t in model.graph.initializer}
    read = [[name for name in node.input if name not in constants] for node in model.graph.node]
    found = [(node.name, [*node.inputs], [*node.outputs]) for node in nodes]
    assert found == [(node.name, values, [*node.output]) for node, values in zip(model.graph.node, read, strict=True)]
    assert (nodes[0].weight, nodes[0].shape) == ("8x3x3x3", "1x8x8x8")
    body = next(node for node in sketch_graph(models.net_with_if()).nodes if node.op_type == "If")
    assert len(body.inputs) > 1, "what a body reads counts"


def test_profiles_count_every_value_and_know_the_noise(pair):
    model, made = pair
    config = CalibrationConfig(method="percentile")
    tensors = [n.output[0] for n in model.graph.node if n.op_type in ("Conv", "Relu", "Add")]
    table = collect(model, FeedReader(feeds(model, 4)), Points(tensors, config=config))
    profiles = profile_tensors(model, made, table)
    activations, weights = ([p for p in profiles if p.kind == kind] for kind in ("activation", "weight"))
    assert {p.name for p in activations} == set(tensors)
    assert len(weights) == sum(n.op_type in ("Conv", "Gemm") for n in model.graph.node)
    for profile in activations:
        counts = json.loads(json.dumps(profile.bars.counts))
        assert (len(counts), sum(counts)) == (BINS, table.tensors[profile.name].count)
    assert all(30 < profile.sqnr_db < math.inf and profile.bits == 8 for profile in weights)
    assert {p.kind for p in profile_tensors(model, made)} == {"weight"}, "without a table"


@pytest.mark.x86_only
@pytest.mark.parametrize(
    ("options", "caption", "largest"), [({}, "8 bits, pairs within int16", 127), ({"reduce_range": True}, "7 bit", 64)]
)
def test_weights_have_the_range_that_their_integers_span(tmp_path, options, caption, largest):
    model = models.residual_block()
    made = make(model, tmp_path, rewrites=False, **options).written
    grids, profiles = read_grids(model, made), {p.name: p for p in profile_tensors(model, made)}
    for name in (node.input[1] for node in model.graph.node if node.op_type == "Conv"):
        grid, profile = grids[name], profiles[name]
        integers = onnx.numpy_helper.to_array(grid.stored).astype(np.int64)
        assert np.abs(integers).max() == largest
        values = integers.reshape(len(integers), -1) * grid.scale[:, None]
        assert (profile.chosen, profile.precision) == ((values.min(), values.max()), caption)


def test_free_8_bits_claim_no_pairs(pair):
    model, made = pair
    convs = {node.input[1] for node in model.graph.node if node.op_type == "Conv"}
    free = changed(made, **{f"{name}_quantized": lambda w: np.full_like(w, 127) for name in convs})
    assert {p.precision for p in profile_tensors(model, free) if p.name in convs} == {"8 bit"}
