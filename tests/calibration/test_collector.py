"""MinMax ranges are stock's, bit for bit; what stock gets wrong is right; some samples have statistics of their own."""

import numpy as np
import onnx
import pytest

from kenosis_ort import CalibrationError
from kenosis_ort.calibration import CalibrationConfig, cached_samples, parts
from kenosis_ort.calibration.feeds import Cut
from kenosis_ort.runtime.counting import counted
from tests import models, planning
from tests.calibration.support import ListReader, node_outputs, one_node_model, random_feeds, same_as_stock, swept

NETS = ["residual_block", "mobile_block", "silu_net", "bn_net", "two_input_detector", "mlp", "concat_net"]
METHODS = (CalibrationConfig(), CalibrationConfig(moving_average=True), CalibrationConfig("percentile"))


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("stride", [None, 3])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("average", [{}, {"moving_average": True}, {"moving_average": True, "averaging_constant": 0.3}])
def test_equals_stock_bit_for_bit(net, average, symmetric, stride):
    model = models.ALL[net]()
    same_as_stock(model, models.feeds(model, 6), stride=stride, symmetric=symmetric, **average)


@pytest.mark.parametrize("net", NETS)
def test_optimized_session_differs_by_rounding_only(net):
    same_as_stock(models.ALL[net](), models.feeds(models.ALL[net](), 3), error=1e-5, bit_exact=False)


@pytest.mark.parametrize("count", [1, 7, 40, 300])
def test_mean_of_many_samples_is_summed_as_stock_sums_it(count):
    same_as_stock(one_node_model(), random_feeds(count), moving_average=True, threads=0)


def test_float16_is_stock_in_type_and_value():
    samples = [{"x": f["x"].astype(np.float16)} for f in random_feeds(5)]
    for average in (False, True):
        same_as_stock(one_node_model(element="float16"), samples, moving_average=average)


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_max_intermediate_outputs_loses_no_data(limit):
    """Stock drops every full chunk; here the range is that of all samples."""
    samples = random_feeds(5)[::-1]  # the largest come first, and would be lost
    everything = np.concatenate([s["x"].ravel() for s in samples])
    table = swept(one_node_model(), samples, ["y"], max_intermediate_outputs=limit)
    assert table.range_of("y") == (everything.min(), everything.max())


def test_max_intermediate_outputs_chunks_the_moving_average_like_a_stride():
    model, samples = one_node_model(), random_feeds(6)
    average = {"moving_average": True, "averaging_constant": 0.25}
    by_limit = swept(model, samples, ["y"], max_intermediate_outputs=2, **average)
    assert by_limit.range_of("y") == swept(model, ListReader(samples), ["y"], strided=2, **average).range_of("y")


def test_scalars():
    table = swept(one_node_model("ReduceSum <keepdims = 0>"), random_feeds(3), ["y", "z"])
    sums = [float(f["x"].sum()) for f in random_feeds(3)]
    assert table.range_of("y") == pytest.approx((min(sums), max(sums)), rel=1e-5)
    assert table.tensors["y"].count == 3


@pytest.mark.parametrize("config", METHODS)
def test_shapes_differ_from_sample_to_sample_and_no_elements_count_for_nothing(config):
    rng = np.random.default_rng(0)
    samples = [{"x": rng.standard_normal((n, 4)).astype(np.float32)} for n in (0, 1, 9, 0, 3)]
    everything = np.concatenate([s["x"] for s in samples])
    found, full, nothing = (
        swept(one_node_model(), feeds, ["x", "y"], config=config)
        for feeds in (samples, [feed for feed in samples if feed["x"].size], samples[:1])
    )
    assert (found.samples, full.samples, nothing.samples) == (5, 3, 1)
    for name, tensor in found.tensors.items():
        assert (tensor.low, tensor.high, tensor.count) == (everything.min(), everything.max(), everything.size)
        assert found.range_of(name) == full.range_of(name)
    assert (nothing.range_of("y"), nothing.tensors["y"].count) == ((0.0, 0.0), 0)


def test_inputs_outputs_and_constants_can_be_observed():
    model = models.residual_block()
    weight, head = model.graph.initializer[0], model.graph.output[0].name
    samples = models.feeds(model, 2)
    table = swept(model, samples, [weight.name, "x", head])
    assert list(table.tensors) == [weight.name, "x", head]
    for name, values in ((weight.name, onnx.numpy_helper.to_array(weight)), ("x", np.stack([s["x"] for s in samples]))):
        assert table.range_of(name) == (values.min(), values.max())


def test_integer_tensors_are_left_out():
    model = models.transformer_block()
    table = swept(model, models.feeds(model, 2))
    assert "ids" not in table
    assert all(s.dtype == "float32" for s in table.tensors.values())


@pytest.mark.parametrize("method", ["minmax", "percentile"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("tensors", [["x"], ["y", "z"], ["z", "x"]])
def test_not_finite_is_an_error_that_names_tensor_and_sample(method, bad, tensors):
    samples = random_feeds(4, (30, 40))
    samples[2]["x"][7, 7] = bad
    with pytest.raises(CalibrationError, match=r"tensor 'x', sample 2"):  # the input itself, whatever is observed
        swept(one_node_model(), samples, tensors, method=method)


def test_the_first_tensor_in_graph_order_is_named():
    model = planning.parse("g (float[N] x) => (float[N] exp) { log = Log (x)  exp = Exp (log) }")
    with pytest.raises(CalibrationError, match="tensor 'log'"):
        swept(model, [{"x": np.array([1.0, -1.0], np.float32)}], ["exp", "log"])


def test_a_mean_that_overflows_is_no_error():
    table = swept(one_node_model(), [{"x": np.full((4, 64), 3e38, np.float32)}], ["y"])
    assert table.range_of("y") == (np.float32(3e38), np.float32(3e38))


def test_model_without_inputs_runs_once():
    model = planning.parse("g () => (float[2] y) { c = Constant <value_floats = [1.0, 5.0]> ()  y = Neg (c) }")
    table = swept(model, ListReader([]), ["y"])
    assert (table.samples, table.range_of("y")) == (1, (-5.0, -1.0))


# ---- parts of the samples -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"sketch": True}, {"method": "percentile"}], ids=str)
def test_a_part_is_what_a_sweep_over_it_alone_finds(options):
    model = planning.prepared(models.residual_block(channels=6))  # too few for blocks, which take a session
    feeds, numbers = models.feeds(model, 7, seed=3), (0, 2, 5)
    with counted() as counts:
        table = swept(model, feeds, part=dict.fromkeys(numbers, ()), **options)
    assert (counts.total.sessions, counts.total.runs) == (1, 7)
    assert table == swept(model, feeds, **options)
    assert table.part == swept(model, [feeds[n] for n in numbers], **options) != table
    assert "part" not in table.to_json()
    assert swept(model, feeds, part={1: ()}, moving_average=True).part is None


@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("sketch", [False, True])
def test_a_batch_may_be_of_the_part_by_its_rows(sketch, heavy, monkeypatch):
    monkeypatch.setattr(parts, "_MOST_WEIGHTS", 600 if heavy else 2**32)
    model = planning.prepared(models.with_free_batch(models.residual_block()))
    rows = [feed["x"] for feed in models.feeds(model, 12, seed=3)]
    feeds = [{"x": np.concatenate(rows[at : at + 4])} for at in (0, 4, 8)]
    part = {0: [Cut(0, 3, True), Cut(3, 4, False)], 2: (), 1: [Cut(0, 1, False), Cut(1, 4, True)]}
    pieces = [{"x": feeds[0]["x"][:3]}, {"x": feeds[1]["x"][1:]}, feeds[2]]
    table = swept(model, feeds, part=part, keep=3, sketch=sketch)
    whole = swept(model, feeds, keep=3, sketch=sketch)
    assert table.part.to_json() == swept(model, pieces, sketch=sketch).to_json()
    assert (table.samples, table.data_fingerprint, table.cached) == (3, whole.data_fingerprint, whole.cached)
    assert table.tensors.keys() == whole.tensors.keys()
    for name in node_outputs(model):
        assert table.range_of(name) == pytest.approx(whole.range_of(name), rel=1e-6)
    assert table.part.data_fingerprint == f"{sum(map(cached_samples.feed_digest, pieces)) % 2**256:064x}"
    feeds[1]["x"][2] = np.nan
    with pytest.raises(CalibrationError, match="sample 1"):
        swept(model, feeds[:2], part=part, sketch=sketch)
