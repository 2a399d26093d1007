"""The calibration table: JSON, stock's cache files, fingerprints, merging, and the samples that it keeps."""

import copy
import itertools
import json
import pickle
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper
from onnxruntime.quantization import CalibrationMethod, QuantType
from onnxruntime.quantization import calibrate as stock_calibrate
from onnxruntime.quantization.qdq_quantizer import QDQQuantizer

from kenosis_ort.calibration import CalibrationConfig, CalibrationTable, model_fingerprint
from kenosis_ort.calibration.cached_samples import CachedSamples, feed_digest, pack_samples, unpack_samples
from kenosis_ort.calibration.feeds import Sample
from kenosis_ort.errors import CalibrationError, OptionError
from tests import models
from tests.calibration.support import ListReader, one_node_model, random_feeds, stock, swept

CONFIGS = [
    CalibrationConfig(),
    CalibrationConfig(symmetric=True, moving_average=True),
    CalibrationConfig(method="percentile", percentile=99.9),
    CalibrationConfig(method="entropy"),
    CalibrationConfig(method="distribution"),
]
BY_METHOD = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.method + "_average" * c.moving_average)


def make(config: CalibrationConfig, count: int = 3) -> CalibrationTable:
    model = models.residual_block()
    return swept(model, models.feeds(model, count), config=config)


@BY_METHOD
def test_json_round_trip(config: CalibrationConfig) -> None:
    table = make(config)
    again = CalibrationTable.from_json(table.to_json())
    assert again == table
    assert again.to_json() == table.to_json()
    assert {n: again.range_of(n) for n in again.tensors} == {n: table.range_of(n) for n in table.tensors}


@pytest.mark.since("1.27")  # stock's cache files
@BY_METHOD
def test_stock_reads_our_file(config: CalibrationConfig, tmp_path: Path) -> None:
    table = make(config)
    path = tmp_path / "sub" / "cache.json"
    table.save(path)
    theirs = stock_calibrate.load_tensors_data(path)
    assert theirs.calibration_method.name.lower() == config.method
    for name, data in theirs.items():
        assert (float(data.lowest.item()), float(data.highest.item())) == table.range_of(name)
    assert [p.name for p in path.parent.iterdir()] == ["cache.json"]


@pytest.mark.since("1.27")  # stock's cache files
@pytest.mark.parametrize("method", ["MinMax", "Percentile", "Entropy", "Distribution"])
def test_we_read_stock_file(method: str, tmp_path: Path) -> None:
    model = models.residual_block()
    theirs = stock(model, models.feeds(model, 3), method)
    stock_calibrate.save_tensors_data(theirs, tmp_path / "cache.json")
    table = CalibrationTable.load(tmp_path / "cache.json")
    assert table.method == method.lower()
    assert table.tensors.keys() == theirs.keys()
    for name, data in theirs.items():
        assert table.range_of(name) == (float(data.lowest.item()), float(data.highest.item()))
    table.check_matches("anything", CalibrationConfig(method=method.lower(), symmetric=True))
    other = "Entropy" if method != "Entropy" else "MinMax"
    with pytest.raises(CalibrationError, match="method"):
        table.check_matches(None, CalibrationConfig(method=other))
    again = CalibrationTable.from_json(table.to_json())
    assert again == table


@BY_METHOD
def test_stock_quantizer_takes_our_ranges(config: CalibrationConfig) -> None:
    model = models.residual_block()
    ranges = make(config).to_tensors_data()
    quantizer = QDQQuantizer(
        copy.deepcopy(model), True, False, QuantType.QInt8, QuantType.QUInt8, ranges, [], [], ["Conv", "Gemm"], {}
    )
    quantized = quantizer.quantize_model()
    assert any(node.op_type == "QuantizeLinear" for node in quantized.graph.node)


def test_check_matches_names_what_differs() -> None:
    model = models.residual_block()
    config = CalibrationConfig(method="percentile", percentile=99.0)
    table = swept(model, models.feeds(model, 2), ["x"], config=config)
    fingerprint = model_fingerprint(model)
    table.check_matches(fingerprint, config)
    with pytest.raises(CalibrationError, match=r"percentile is 99\.0 there and 99\.9 here"):
        table.check_matches(fingerprint, CalibrationConfig(method="percentile", percentile=99.9))
    with pytest.raises(CalibrationError, match="another model"):
        table.check_matches("0" * 64, config)
    with pytest.raises(CalibrationError, match="'percentile', not 'minmax'"):
        table.check_matches(fingerprint, CalibrationConfig())
    table.check_matches(fingerprint, CalibrationConfig(method="percentile", percentile=99.0, moving_average=True))


def test_fingerprint_sees_weights_and_graph_and_nothing_else() -> None:
    model = models.residual_block()
    base = model_fingerprint(model)
    assert base == model_fingerprint(copy.deepcopy(model))

    shuffled = copy.deepcopy(model)
    initializers = list(shuffled.graph.initializer)[::-1]
    del shuffled.graph.initializer[:]
    shuffled.graph.initializer.extend(initializers)
    shuffled.doc_string, shuffled.producer_name = "something", "else"
    del shuffled.graph.value_info[:]
    assert model_fingerprint(shuffled) == base

    typed = copy.deepcopy(model)
    for tensor in typed.graph.initializer:
        if tensor.data_type == tensor.FLOAT and tensor.HasField("raw_data"):
            values = numpy_helper.to_array(tensor).ravel().tolist()
            tensor.ClearField("raw_data")
            tensor.float_data.extend(values)
    assert model_fingerprint(typed) == base

    for change in ("weight", "attribute", "wiring"):
        changed = copy.deepcopy(model)
        if change == "weight":
            tensor = next(t for t in changed.graph.initializer if t.data_type == t.FLOAT)
            array = numpy_helper.to_array(tensor).copy()
            array.flat[0] += 1e-6
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
        elif change == "attribute":
            next(a for a in changed.graph.node[0].attribute if a.ints).ints[0] += 1
        else:
            changed.graph.node[-1].input[0] = "elsewhere"
        assert model_fingerprint(changed) != base, change


@pytest.mark.parametrize("method", ["minmax", "percentile", "entropy", "distribution"])
def test_merging_equals_one_run(method: str) -> None:
    model = models.residual_block()
    samples = models.feeds(model, 5)
    whole, a, b = (swept(model, part, method=method) for part in (samples, samples[:2], samples[2:]))
    assert a.merge(b) == b.merge(a) == whole
    for one, other in itertools.product((True, False), repeat=2):
        assert replace(a, made_up=one).merge(replace(b, made_up=other)).made_up == (one and other)


def of_one_node(samples: Any, tensors: Any = ("y",), op: str = "Identity", **options: Any) -> CalibrationTable:
    return swept(one_node_model(op), samples, tensors, **options)


def test_merging_a_moving_average_weighs_by_samples() -> None:
    samples = random_feeds(5)
    whole, a, b = (of_one_node(part, moving_average=True) for part in (samples, samples[:1], samples[1:]))
    assert a.merge(b).range_of("y") == pytest.approx(whole.range_of("y"), rel=1e-6)


def test_what_cannot_be_merged_is_refused() -> None:
    samples = random_feeds(4)
    table = of_one_node(samples)
    ordered = of_one_node(ListReader(samples), moving_average=True, strided=2)
    for one, other, match in (
        (table, of_one_node(samples, op="Abs"), "different models"),
        (table, of_one_node(samples, symmetric=True), "different settings"),
        (table, of_one_node(samples, ["y", "x"]), "different tensors"),
        (table, table.with_ranges({"y": (0, 1)}), "by hand"),
        (ordered, ordered, "order of the samples"),
        (table, replace(table, outdated=True), "weights that were changed"),
    ):
        with pytest.raises(CalibrationError, match=match):
            one.merge(other)


def test_empty_shards_do_not_widen_the_range() -> None:
    full = of_one_node([{"x": np.full((1, 2), 5, np.float32)}])
    empty = of_one_node([{"x": np.zeros((0, 2), np.float32)}])
    assert full.merge(empty).range_of("y") == empty.merge(full).range_of("y") == (5.0, 5.0)


def test_ranges_set_by_hand() -> None:
    table = of_one_node(random_feeds(1), ["y", "z"])
    fixed = table.with_ranges({"y": (-1.0, 2.0)})
    assert fixed.range_of("y") == (-1.0, 2.0) != table.range_of("y")
    assert fixed.range_of("z") == table.range_of("z")
    assert CalibrationTable.from_json(fixed.to_json()) == fixed
    with pytest.raises(CalibrationError, match="tensor 'yy'"):
        table.range_of("yy")
    with pytest.raises(CalibrationError, match="Did you mean 'y'"):
        table.with_ranges({"yy": (0.0, 1.0)})


def test_the_table_is_frozen_and_pickles() -> None:
    table = make(CalibrationConfig(method="percentile"))
    with pytest.raises(TypeError):
        table.tensors["x"] = None  # type: ignore[index]
    assert pickle.loads(pickle.dumps(table)) == table


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("not json", "not valid JSON"),
        ("[]", "not a calibration table"),
        ('{"a": 1}', "not a calibration table"),
        ('{"CLS": "TensorsData", "kenosis": {"schema": 99}}', "schema 99"),
        ('{"CLS": "TensorsData", "kenosis": {"schema": 1}}', "damaged"),
        ('{"CLS": "TensorsData", "kenosis": {"schema": 1, "tensors": [], "config": {}}}', "damaged"),
        ('{"CLS": "TensorsData", "data": {}}', "damaged"),
        ('{"CLS": "TensorsData", "data": {"a": {}}, "calibration_method": {"value": "X.MinMax"}}', "damaged"),
    ],
)
def test_bad_files_are_named_errors(text: str, match: str, tmp_path: Path) -> None:
    path = tmp_path / "cache.json"
    path.write_text(text)
    with pytest.raises(CalibrationError, match=match) as caught:
        CalibrationTable.load(path)
    assert caught.value.where == str(path)


def test_missing_and_unwritable_files(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(CalibrationError, match="cannot be read"):
            CalibrationTable.load(path)
    (tmp_path / "file").write_text("kept")
    with pytest.raises(CalibrationError, match="cannot be written"):
        of_one_node(random_feeds(1)).save(tmp_path / "file" / "cache.json")
    assert (tmp_path / "file").read_text() == "kept"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_damaged_option_in_a_file_is_a_calibration_error() -> None:
    raw: Any = json.loads(of_one_node(random_feeds(1)).to_json())
    raw["kenosis"]["config"]["method"] = "minmex"
    with pytest.raises(CalibrationError, match="damaged"):
        CalibrationTable.from_json(json.dumps(raw))


def test_config_takes_stock_names_and_extra_options() -> None:
    assert CalibrationConfig(method="MinMax").method == "minmax"
    assert CalibrationConfig.from_extra_options(CalibrationMethod.Percentile, {}).percentile == 99.999
    config = CalibrationConfig.from_extra_options(
        CalibrationMethod.MinMax,
        {
            "CalibTensorRangeSymmetric": True,
            "CalibMovingAverage": True,
            "CalibMovingAverageConstant": 0.5,
            "CalibMaxIntermediateOutputs": 0,
            "CalibStridedMinMax": None,
            "ActivationSymmetric": True,
        },
    )
    assert config == CalibrationConfig(symmetric=True, moving_average=True, averaging_constant=0.5)
    assert (CalibrationConfig(method="entropy").bins, CalibrationConfig(method="percentile").bins) == (128, 2048)
    assert CalibrationConfig(method="percentile").is_symmetric
    assert not CalibrationConfig().is_symmetric


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"method": "minmix"}, "Did you mean 'minmax'"),
        ({"method": 3}, "Unknown calibration method"),
        ({"averaging_constant": 1.5}, "averaging_constant"),
        ({"percentile": 101}, "percentile"),
        ({"method": "distribution", "num_bins": 100}, "num_bins"),
        ({"max_intermediate_outputs": -1}, "max_intermediate_outputs"),
        ({"scenario": "p4"}, "scenario"),
    ],
)
def test_config_refuses(options: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        CalibrationConfig(**options)


# ---- samples that are kept -------------------------------------------------------------------------------------------


def sample(number: int, size: int) -> Sample:
    return Sample({"x": np.full(size, number, np.uint8)}, number)


def kept_of(samples: list[Sample], most: int, budget: int) -> CachedSamples:
    kept = CachedSamples(most, budget)
    for each in samples:
        kept.add(each)
    return kept


SAMPLES = st.lists(st.builds(sample, st.integers(0, 30), st.integers(1, 12)), max_size=24)


@given(SAMPLES, st.integers(1, 8), st.integers(1, 40), st.data())
def test_shards_in_any_order_keep_what_one_reader_keeps(
    samples: list[Sample], most: int, budget: int, data: st.DataObject
) -> None:
    whole = kept_of(samples, most, budget)
    owners = data.draw(st.lists(st.integers(0, 2), min_size=len(samples), max_size=len(samples)))
    shards = [[s for s, owner in zip(samples, owners, strict=True) if owner == which] for which in range(3)]
    order = data.draw(st.permutations(range(3)))
    merged = reduce(CachedSamples.merge, [kept_of(shards[which], most, budget) for which in order])
    assert merged == whole
    assert merged.bytes == whole.bytes <= budget
    digests = [feed_digest(s) for s in whole.samples]
    assert digests == sorted(set(digests))
    assert (
        len(whole) == most
        or budget < sum(s["x"].size for s in samples)
        or len(whole) == len({feed_digest(s) for s in samples})
    )


@given(SAMPLES, st.integers(1, 8), st.integers(1, 8))
def test_who_keeps_more_keeps_the_same_first(samples: list[Sample], few: int, more: int) -> None:
    """So a table that serves every recipe gives each what its own reader would have."""
    many, some = (kept_of(samples, most, 60).samples for most in (few + more, few))
    assert [s.index for s in many[:few]] == [s.index for s in some]


VALUES: dict[str, Any] = {
    "float32": np.arange(6, dtype=np.float32).reshape(2, 3),
    "int64": np.array([[1, -2]]),
    "bool": np.array([True, False]),
    "nothing": np.zeros((0, 3), np.float16),
    "scalar": np.float32(3) * np.ones(()),
    "texts": np.array([["a", "bc"]]),
    "objects": np.array(["a", "bcd"], object),
    "sequence": [np.ones(2, np.float32), np.zeros((1, 1), np.float32)],
}


@pytest.mark.parametrize("kind", VALUES)
def test_a_file_holds_them_to_the_bit(kind: str) -> None:
    kept = kept_of([Sample({"x": VALUES[kind]}, 7)], 3, 1000)
    head, packed = json.loads(json.dumps(pack_samples(kept)))
    found = unpack_samples(head, packed)
    assert found == kept
    assert feed_digest(found.samples[0]) == feed_digest(kept.samples[0])


def test_what_no_file_holds_is_left_out() -> None:
    assert pack_samples(kept_of([Sample({"x": np.array([{}], object)}, 0)], 3, 1000)) == (None, [])


@pytest.mark.parametrize(
    "change", [{"shape": [2**40]}, {"shape": [-2, -3]}, {"dtype": "object"}, {"base64": "AAAA"}, {"base64": "x" * 32}]
)
def test_sizes_are_checked_before_memory_is_taken(change: dict[str, Any]) -> None:
    head, packed = pack_samples(kept_of([Sample({"x": VALUES["float32"]}, 0)], 3, 1000))
    packed[0]["x"] |= change
    with pytest.raises((ValueError, KeyError)):
        unpack_samples(head, packed)


def test_more_than_the_budget_is_refused() -> None:
    head, packed = pack_samples(kept_of([Sample({"x": VALUES["float32"]}, 0)], 3, 1000))
    assert head is not None
    with pytest.raises(CalibrationError, match="24 bytes"):
        unpack_samples({**head, "budget": 20}, packed)
    huge = {"width": 2**28, "shape": [1], "text": ["a"]}
    with pytest.raises(CalibrationError, match="bytes"):
        unpack_samples({**head, "budget": 2**40}, [{"x": huge}])
