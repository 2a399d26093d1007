"""A calibration table takes the reader's place: shards, saved, loaded and merged, make the file of one call."""

from __future__ import annotations

import json
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from kenosis_ort import CalibrationError, CalibrationTable, KenosisError, calibrate, quantize_static
from kenosis_ort.calibration.table import _checksum
from kenosis_ort.demo.measurements import INPUT_NAME, load_digits
from kenosis_ort.errors import ArgumentTypeError, OptionError
from tests import models
from tests.flow.test_cache_passes import FEEDS, MODEL, kept, run
from tests.models import Feed, FeedReader


def digits() -> tuple[onnx.ModelProto, list[Feed]]:
    return models.narrow_digits(), [{INPUT_NAME: image[None]} for image in load_digits().calibration[:45]]


def depthwise() -> tuple[onnx.ModelProto, list[Feed]]:
    """Channels of very different size behind the expansion, with a Relu6 and a depthwise Conv between."""
    model = models.mobile_block()
    rng = np.random.default_rng(3)
    weights = {t.name: t for t in model.graph.initializer}
    sizes = np.exp(rng.normal(0, 2.5, 32)).astype(np.float32)
    for node in model.graph.node:
        if node.name in ("expand", "depthwise"):
            factors = sizes if node.name == "expand" else 1 / sizes
            for name in node.input[1 : 3 if node.name == "expand" else 2]:
                array = numpy_helper.to_array(weights[name])
                array = array * factors.reshape(-1, *[1] * (array.ndim - 1))
                weights[name].CopyFrom(numpy_helper.from_array(array, name))
    return model, models.feeds(model, 45)


def transformer() -> tuple[onnx.ModelProto, list[Feed]]:
    """Outlier channels behind the first norm, as SmoothQuant is made for."""
    model = models.transformer_block(tokens=8, width=32)
    weights = {t.name: t for t in model.graph.initializer}
    linear = {n.name: n.input[1] for n in model.graph.node if n.op_type == "MatMul" and n.input[1] in weights}
    behind = [name for node, name in linear.items() if node.split("_")[0] in ("q", "k", "v", "up")]
    assert len(behind) == 4, linear
    for name, factor in {"norm1_gamma": 60.0, "norm2_gamma": 60.0, **dict.fromkeys(behind, 1 / 60)}.items():
        array = numpy_helper.to_array(weights[name]).copy()
        array[[3, 11]] *= np.float32(factor)
        weights[name].CopyFrom(numpy_helper.from_array(array, name))
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 50, (1, 8)) for _ in range(45)]
    return model, [{"ids": i, "mask": np.zeros((1, 1, 8, 8), np.float32)} for i in ids]


NETS: dict[str, tuple[Any, dict[str, set[str]]]] = {
    "digits": (digits, {"fast": set()}),
    "depthwise": (depthwise, {"fast": {"equalize"}, "accurate": {"equalize"}}),
    "transformer": (transformer, {"fast": {"smooth"}, "accurate": {"smooth"}}),
}
CASES = [(net, recipe) for net, (_, recipes) in NETS.items() for recipe in recipes]


def merged_of(folder: Path, model: onnx.ModelProto, shards: list[list[Feed]], **options: Any) -> Path:
    paths = [folder / f"{place}.json" for place in range(len(shards))]
    for path, shard in zip(paths, shards, strict=True):
        calibrate(model, path, FeedReader(shard), **options)
    reduce(CalibrationTable.merge, map(CalibrationTable.load, paths)).save(folder / "merged.json")
    return folder / "merged.json"


@pytest.mark.parametrize(("net", "recipe"), CASES)
def test_shards_make_the_file_of_one_call(tmp_path: Path, net: str, recipe: str) -> None:
    model, feeds = NETS[net][0]()
    whole, sharded = tmp_path / "whole.onnx", tmp_path / "sharded.onnx"
    expected = run(whole, feeds, model, recipe=recipe)
    assert kept(expected) >= NETS[net][1][recipe]
    table = merged_of(tmp_path, model, [feeds[31:], feeds[:12], feeds[12:31]])
    report = run(sharded, None, model, recipe=recipe, calibration_cache_path=table)
    assert [(p.name, p.kept, p.error_after) for p in report.passes] == [
        (p.name, p.kept, p.error_after) for p in expected.passes
    ]
    assert whole.read_bytes() == sharded.read_bytes()
    assert not any("were not tried" in note for note in report.notes)


def test_under_the_promise_too(tmp_path: Path) -> None:
    model, feeds = digits()
    quantize_static(model, tmp_path / "whole.onnx", FeedReader(feeds))
    table = merged_of(tmp_path, model, [feeds[:20], feeds[20:]])
    report = quantize_static(model, tmp_path / "sharded.onnx", calibration_cache_path=table)
    assert report.speed is not None
    assert (tmp_path / "whole.onnx").read_bytes() == (tmp_path / "sharded.onnx").read_bytes()


def test_a_table_without_samples_says_so_and_the_reader_beside_it_serves(tmp_path: Path) -> None:
    """What is private stays where it is; with the reader at hand nothing is lost."""
    table = tmp_path / "table.json"
    calibrate(MODEL, table, FeedReader(FEEDS), keep_samples=False)
    assert "kenosis_samples" not in json.loads(table.read_text())
    report = run(tmp_path / "alone.onnx", None, calibration_cache_path=table)
    assert not kept(report)
    assert sum("were not tried: they need samples" in note for note in report.notes) == 2
    run(tmp_path / "whole.onnx")
    run(tmp_path / "both.onnx", calibration_cache_path=table)
    assert (tmp_path / "whole.onnx").read_bytes() == (tmp_path / "both.onnx").read_bytes()


def test_a_cache_tells_that_it_holds_samples(tmp_path: Path) -> None:
    report = run(tmp_path / "out.onnx", calibration_cache_path=tmp_path / "table.json")
    assert any("holds 24 of the samples" in note and "keep_samples=False" in note for note in report.notes)


def test_bodies_of_control_flow_are_calibrated_on_the_samples_of_the_table(tmp_path: Path) -> None:
    model = models.net_with_if()
    feeds = models.feeds(model, 8)
    whole, alone = tmp_path / "whole.onnx", tmp_path / "alone.onnx"
    run(whole, feeds, model)
    run(alone, None, model, calibration_cache_path=merged_of(tmp_path, model, [feeds[:3], feeds[3:]]))
    assert whole.read_bytes() == alone.read_bytes()


def by_labels(outputs: Any, reference: Any, indices: Any) -> float:
    return -float(np.mean(indices))


def test_labels_need_numbered_samples(tmp_path: Path) -> None:
    merged = merged_of(tmp_path, MODEL, [FEEDS[:12], FEEDS[12:]])
    with pytest.raises(OptionError, match="samples of a calibration table have none") as caught:
        run(tmp_path / "out.onnx", None, calibration_cache_path=merged, metric=by_labels)
    assert "eval_reader" in str(caught.value)
    options = {"metric": by_labels, "eval_reader": FeedReader(models.feeds(MODEL, 8, seed=4))}
    run(tmp_path / "out.onnx", None, calibration_cache_path=merged, **options)


def older(path: Path, **origin: Any) -> None:
    """Turns a table into one that an earlier version wrote."""
    raw = json.loads(path.read_text())
    raw.pop("kenosis_samples", None)
    ours = raw["kenosis"]
    for name in ("kept", "made_up", "checksum"):
        ours.pop(name, None)
    for tensor in ours["tensors"].values():
        tensor.pop("channels", None)
    said = {"model_fingerprint": "0" * 64, "changes": [], "settings": None, "biases": False, "made_up": False}
    ours |= {"schema": 1, "origin": {**said, **origin}}
    ours["checksum"] = _checksum(raw)
    path.write_text(json.dumps(raw))


def test_tables_of_an_earlier_version_load(tmp_path: Path) -> None:
    table, out, whole = tmp_path / "table.json", tmp_path / "out.onnx", tmp_path / "whole.onnx"
    calibrate(MODEL, table, FeedReader(FEEDS))
    older(table)
    assert CalibrationTable.load(table).samples == len(FEEDS)
    report = run(out, None, calibration_cache_path=table)
    assert any("were not tried" in note for note in report.notes)
    report = run(out, calibration_cache_path=table)  # no ranges by channel: they are observed again where needed
    assert "equalize" in kept(report)
    run(whole)
    older(table, biases=True)
    report = run(out, calibration_cache_path=table)
    assert any("Calibrated again" in note for note in report.notes)
    assert whole.read_bytes() == out.read_bytes()
    with pytest.raises(CalibrationError, match="of an earlier version"):
        run(out, None, calibration_cache_path=table)


@pytest.mark.parametrize("wrong", ["no", None])
def test_keep_samples_is_a_truth_value(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="keep_samples"):
        calibrate(MODEL, tmp_path / "table.json", FeedReader(FEEDS), keep_samples=wrong)


def edited(raw: dict[str, Any], what: str) -> None:
    value = raw["kenosis_samples"][0]["x"]
    if what == "content":
        value["base64"] = "AAAA" + value["base64"][4:]
    elif what == "shape":
        value["shape"] = [2**40]
    elif what == "type":
        value["dtype"] = "object"
    else:
        raw["kenosis_samples"].pop()


@pytest.mark.parametrize("what", ["content", "shape", "type", "one less"])
def test_samples_that_were_edited_are_refused(tmp_path: Path, what: str) -> None:
    table = tmp_path / "table.json"
    calibrate(MODEL, table, FeedReader(FEEDS))
    raw = json.loads(table.read_text())
    edited(raw, what)
    table.write_text(json.dumps(raw))
    with pytest.raises(KenosisError):
        CalibrationTable.load(table)
