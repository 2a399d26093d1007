"""The calibration table: JSON, stock's cache files, fingerprints, merging, and the samples that it keeps."""

import itertools
import json
import pickle
from dataclasses import replace
from functools import partial, reduce

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st
from onnx import helper, numpy_helper
from onnxruntime.quantization import CalibrationMethod, calibrate as stock_calibrate

from kenosis_ort.calibration import CalibrationConfig, CalibrationTable, feeds, model_fingerprint
from kenosis_ort.calibration.cached_samples import CachedSamples, feed_digest, pack_samples, unpack_samples
from kenosis_ort.errors import CalibrationError, OptionError
from tests import models
from tests.calibration.support import one_node_model, random_feeds, stock, swept
from tests.flow.support import changed

PERCENTILE = partial(CalibrationConfig, "percentile")
CONFIGS = [CalibrationConfig(method) for method in ("minmax", "entropy", "distribution")]
CONFIGS += [PERCENTILE(percentile=99.9), CalibrationConfig(sketch=True)]
CONFIGS += [CalibrationConfig(symmetric=True, moving_average=True)]


def of_one_node(samples=None, tensors=("y",), op="Identity", **options):
    return swept(one_node_model(op), random_feeds(4) if samples is None else samples, tensors, **options)


@pytest.mark.since("1.27")  # stock's cache files
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_we_and_stock_read_our_file(config, tmp_path):
    table = of_one_node(tensors=(), config=config)
    path = tmp_path / "sub" / "cache.json"
    table.save(path)
    assert [p.name for p in path.parent.iterdir()] == ["cache.json"]
    again = CalibrationTable.load(path)
    assert (again, again.to_json()) == (table, table.to_json())
    theirs = stock_calibrate.load_tensors_data(path)
    assert theirs.calibration_method.name.lower() == config.method
    for name, data in theirs.items():
        assert (float(data.lowest.item()), float(data.highest.item())) == table.range_of(name)


@pytest.mark.since("1.27")  # stock's cache files
@pytest.mark.parametrize("method", ["MinMax", "Percentile", "Entropy", "Distribution"])
def test_we_read_stock_file(method, tmp_path):
    model = models.residual_block()
    theirs = stock(model, models.feeds(model, 3), method)
    stock_calibrate.save_tensors_data(theirs, tmp_path / "cache.json")
    table = CalibrationTable.load(tmp_path / "cache.json")
    assert (table.method, table.tensors.keys()) == (method.lower(), theirs.keys())
    for name, data in theirs.items():
        assert table.range_of(name) == (float(data.lowest.item()), float(data.highest.item()))
    table.check_matches("anything", CalibrationConfig(method=method.lower(), symmetric=True))
    assert CalibrationTable.from_json(table.to_json()) == table


@pytest.mark.parametrize("kind", ["FLOAT16", "BOOL", "INT8", "INT4", "UINT4"])
def test_fingerprint_is_that_of_the_content_however_it_is_stored(kind):
    typed = helper.make_tensor("w", onnx.TensorProto.DataType.Value(kind), [3], [1, 0, 1])
    raw = numpy_helper.from_array(numpy_helper.to_array(typed), "w")
    assert (typed.HasField("raw_data"), raw.HasField("raw_data")) == (False, True)
    found = [onnx.ModelProto(graph=onnx.GraphProto(initializer=[tensor])) for tensor in (typed, raw)]
    assert model_fingerprint(found[0]) == model_fingerprint(found[1])


def test_fingerprint_sees_weights_and_graph_and_nothing_else():
    model = models.residual_block()
    base, weights = model_fingerprint(model), model.graph.initializer
    assert model_fingerprint(changed(model, conv1_w=1 + 1e-6)) != base
    turned = [helper.make_tensor(t.name, t.data_type, t.dims, numpy_helper.to_array(t)) for t in weights[::-1]]
    assert not any(tensor.HasField("raw_data") for tensor in turned)
    del weights[:]
    weights.extend(turned)
    model.doc_string, model.producer_name = "something", "else"
    model = onnx.shape_inference.infer_shapes(model)
    assert model_fingerprint(model) == base
    attribute = next(a for a in model.graph.node[0].attribute if a.ints)
    attribute.ints[0] += 1
    assert model_fingerprint(model) != base
    attribute.ints[0] -= 1
    model.graph.node[-1].input[0] = "elsewhere"
    assert model_fingerprint(model) != base


@pytest.mark.parametrize("method", ["minmax", "percentile", "entropy", "distribution"])
def test_merging_equals_one_run(method):
    model = models.residual_block()
    samples = models.feeds(model, 5)
    whole, a, b = (swept(model, part, method=method) for part in (samples, samples[:2], samples[2:]))
    assert a.merge(b) == b.merge(a) == whole
    for one, other in itertools.product((True, False), repeat=2):
        assert replace(a, made_up=one).merge(replace(b, made_up=other)).made_up == (one and other)


def test_merging_a_moving_average_weighs_by_samples():
    samples = random_feeds(5)
    whole, a, b = (of_one_node(part, moving_average=True) for part in (samples, samples[:1], samples[1:]))
    assert a.merge(b).range_of("y") == pytest.approx(whole.range_of("y"), rel=1e-6)


ORDERED = CalibrationConfig(moving_average=True, strided=2)
REFUSED = (
    ("different models", lambda table: table.merge(of_one_node(op="Abs"))),
    ("different settings", lambda table: table.merge(of_one_node(symmetric=True))),
    ("different tensors", lambda table: table.merge(of_one_node(tensors=["y", "x"]))),
    ("by hand", lambda table: table.merge(table.with_ranges({"y": (0, 1)}))),
    ("order of the samples", lambda table: reduce(CalibrationTable.merge, [replace(table, config=ORDERED)] * 2)),
    ("tensor 'yy'", lambda table: table.range_of("yy")),
    ("Did you mean 'y'", lambda table: table.with_ranges({"yy": (0.0, 1.0)})),
    ("histograms", lambda table: table.check_matches(None, CalibrationConfig(sketch=True))),
    ("another model", lambda table: table.check_matches("0" * 64, table.config)),
    ("method 'minmax', not 'percentile'", lambda table: table.check_matches(None, PERCENTILE())),
)


@pytest.mark.parametrize(("says", "call"), REFUSED)
def test_what_does_not_go_together_is_refused(says, call):
    with pytest.raises(CalibrationError, match=says):
        call(of_one_node())


def test_only_settings_of_the_method_count():
    table = of_one_node(config=PERCENTILE(percentile=99.0))
    table.check_matches(table.model_fingerprint, PERCENTILE(percentile=99.0, moving_average=True))
    with pytest.raises(CalibrationError, match=r"percentile is 99\.0 there and 99\.9 here"):
        table.check_matches(table.model_fingerprint, PERCENTILE(percentile=99.9))


def test_empty_shards_do_not_widen_the_range():
    full = of_one_node([{"x": np.full((1, 2), 5, np.float32)}])
    empty = of_one_node([{"x": np.zeros((0, 2), np.float32)}])
    assert full.merge(empty).range_of("y") == empty.merge(full).range_of("y") == (5.0, 5.0)


def test_ranges_set_by_hand_and_tables_are_frozen():
    table = of_one_node(tensors=["y", "z"])
    fixed = table.with_ranges({"y": (-1.0, 2.0)})
    assert fixed.range_of("y") == (-1.0, 2.0) != table.range_of("y")
    assert fixed.range_of("z") == table.range_of("z")
    assert CalibrationTable.from_json(fixed.to_json()) == fixed == pickle.loads(pickle.dumps(fixed))
    with pytest.raises(TypeError):
        table.tensors["x"] = None


@pytest.mark.parametrize(("text", "match"), [
    *(("not json", "not valid JSON"), ("[]", "not a calibration table"), ('{"a": 1}', "not a calibration table")),
    ('{"CLS": "TensorsData", "kenosis": {"schema": 99}}', "schema 99"),
    ('{"CLS": "TensorsData", "kenosis": {"schema": 1}}', "schema 1, and this version reads 2"),
    ('{"CLS": "TensorsData", "kenosis": {"schema": 2, "tensors": [], "config": {}}}', "damaged"),
    ('{"CLS": "TensorsData", "data": {}}', "damaged"),
    ('{"CLS": "TensorsData", "data": {"a": {}}, "calibration_method": {"value": "X.MinMax"}}', "damaged"),
])  # fmt: skip
def test_bad_files_are_named_errors(text, match, tmp_path):
    path = tmp_path / "cache.json"
    path.write_text(text)
    with pytest.raises(CalibrationError, match=match) as caught:
        CalibrationTable.load(path)
    assert caught.value.where == str(path)


def test_missing_and_unwritable_files(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(CalibrationError, match="cannot be read"):
            CalibrationTable.load(path)
    (tmp_path / "file").write_text("kept")
    with pytest.raises(CalibrationError, match="cannot be written"):
        of_one_node(random_feeds(1)).save(tmp_path / "file" / "cache.json")
    assert (tmp_path / "file").read_text() == "kept"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_config_takes_stock_names_and_extra_options():
    assert CalibrationConfig(method="MinMax").method == "minmax"
    assert CalibrationConfig.from_extra_options(CalibrationMethod.Percentile, {}).percentile == 99.999
    off = {"CalibMaxIntermediateOutputs": 0, "CalibStridedMinMax": None, "ActivationSymmetric": True}
    on = {"CalibTensorRangeSymmetric": True, "CalibMovingAverage": True, "CalibMovingAverageConstant": 0.5}
    config = CalibrationConfig.from_extra_options(CalibrationMethod.MinMax, {**on, **off})
    assert config == CalibrationConfig(symmetric=True, moving_average=True, averaging_constant=0.5)
    in_chunks = CalibrationConfig.from_extra_options(
        "MinMax", {"CalibMaxIntermediateOutputs": 1, "CalibStridedMinMax": 2}
    )
    assert (in_chunks.max_intermediate_outputs, in_chunks.strided) == (1, 2), "stock does not read the first"
    assert (CalibrationConfig(method="entropy").bins, PERCENTILE().bins) == (128, 2048)
    assert (PERCENTILE().is_symmetric, CalibrationConfig().is_symmetric) == (True, False)


UNKNOWN = (
    *(("Did you mean 'minmax'", {"method": "minmix"}), ("Unknown calibration method", {"method": 3})),
    *(("averaging_constant", {"averaging_constant": 1.5}), ("percentile", {"percentile": 101})),
    *(("num_bins", {"method": "distribution", "num_bins": 100}), ("scenario", {"scenario": "p4"})),
    ("max_intermediate_outputs", {"max_intermediate_outputs": -1}),
)


@pytest.mark.parametrize(("match", "options"), UNKNOWN)
def test_config_refuses(match, options):
    with pytest.raises(OptionError, match=match):
        CalibrationConfig(**options)


# ---- samples that are kept -------------------------------------------------------------------------------------------


def kept_of(samples, most, budget):
    kept = CachedSamples(most, budget)
    for each in samples:
        kept.add(each)
    return kept


SAMPLES = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 30)), max_size=24).map(
    lambda each: [feeds.Sample({"x": np.full(size, number, np.uint8)}, number) for size, number in each]
)


@given(SAMPLES, st.integers(1, 8), st.integers(1, 40), st.data())
def test_shards_in_any_order_keep_what_one_reader_keeps(samples, most, budget, data):
    whole = kept_of(samples, most, budget)
    shards = [[], [], []]
    for each in samples:
        shards[data.draw(st.integers(0, 2))].append(each)
    order = data.draw(st.permutations(shards))
    merged = reduce(CachedSamples.merge, [kept_of(shard, most, budget) for shard in order])
    assert merged == whole
    assert merged.bytes == whole.bytes <= budget
    digests, different = [feed_digest(s) for s in whole.samples], {feed_digest(s) for s in samples}
    assert digests == sorted(set(digests))
    assert len(whole) in (most, len(different)) or budget < sum(s["x"].size for s in samples)


@given(SAMPLES, st.integers(1, 8), st.integers(1, 8))
def test_who_keeps_more_keeps_the_same_first(samples, few, more):
    """So a table that serves every recipe gives each what its own reader would have."""
    many, some = (kept_of(samples, most, 60).samples for most in (few + more, few))
    assert [s.index for s in many[:few]] == [s.index for s in some]


VALUES = {
    "float32": np.arange(6, dtype=np.float32).reshape(2, 3), "int64": np.array([[1, -2]]),
    "bool": np.array([True, False]), "nothing": np.zeros((0, 3), np.float16), "scalar": np.float32(3) * np.ones(()),
    "texts": np.array([["a", "bc"]]), "objects": np.array(["a", "bcd"], object),
    "sequence": [np.ones(2, np.float32), np.zeros((1, 1), np.float32)],
}  # fmt: skip


@pytest.mark.parametrize("kind", VALUES)
def test_a_file_holds_them_to_the_bit(kind):
    kept = kept_of([feeds.Sample({"x": VALUES[kind]}, 7)], 3, 1000)
    head, packed = json.loads(json.dumps(pack_samples(kept)))
    found = unpack_samples(head, packed)
    assert (found, feed_digest(found.samples[0])) == (kept, feed_digest(kept.samples[0]))


def test_what_no_file_holds_is_left_out():
    assert pack_samples(kept_of([feeds.Sample({"x": np.array([{}], object)}, 0)], 3, 1000)) == (None, [])


DAMAGED = [{"shape": [2**40]}, {"shape": [-2, -3]}, {"dtype": "object"}, {"base64": "AAAA"}, {"base64": "x" * 32}]
BOMB = {"width": 2**28, "shape": [1], "text": ["a"]}
TOO_LARGE = (("24 bytes", {"budget": 20}, {}), ("bytes", {"budget": 2**40}, BOMB))


@pytest.mark.parametrize(("says", "head", "change"), [*((".", {}, change) for change in DAMAGED), *TOO_LARGE])
def test_sizes_are_checked_before_memory_is_taken(says, head, change):
    of_all, packed = pack_samples(kept_of([feeds.Sample({"x": VALUES["float32"]}, 0)], 3, 1000))
    packed[0]["x"] = change if "text" in change else packed[0]["x"] | change
    with pytest.raises((ValueError, KeyError), match=says):
        unpack_samples(of_all | head, packed)
