"""A calibration table in the reader's place: caches and merged shards make the file of one call, whatever passes do."""

import json
import tempfile
from functools import cache as once
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import CalibrationMethod, QuantFormat

from kenosis_ort import CalibrationTable, Recipe, SyntheticReader, calibrate, errors, quantize_static
from tests import models
from tests.flow.support import changed
from tests.models import Feed, FeedReader
from tests.planning import parse

EXACT = "exact"
EXACTLY = Recipe(EXACT, ranges="minmax", bias_correction=False)  # nothing that needs samples after the ranges


def unbalanced(seed: int = 0) -> onnx.ModelProto:
    """Two Convs that equalization gains much in: channels of very different size between them."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.normal(0, 2.0, 8))
    weights = {"w1": rng.normal(0, 0.3, (8, 3, 3, 3)) * sizes[:, None, None, None]}
    weights |= {"w2": rng.normal(0, 0.3, (4, 8, 3, 3)) / sizes[:, None, None], "b1": np.zeros(8), "b2": np.zeros(4)}
    text = """(float[1,3,8,8] x) => (float[1,4,8,8] y) <float[8,3,3,3] w1, float[8] b1, float[4,8,3,3] w2, float[4] b2>
        { c = Conv <pads = [1,1,1,1]> (x, w1, b1)  r = Relu (c)  y = Conv <pads = [1,1,1,1]> (r, w2, b2) }"""
    return parse(text, weights)


MODEL = unbalanced()
FEEDS = models.feeds(MODEL, 24)


def run(out: Path, feeds: Any = FEEDS, model: onnx.ModelProto = MODEL, **options: Any) -> Any:
    reader = FeedReader(feeds) if isinstance(feeds, list) else feeds
    if options.get("recipe") == EXACT:
        options["recipe"] = EXACTLY
    return quantize_static(model, out, reader, **{"promise": False, "evidence": "none", **options})


@once
def made(recipe: str = "fast", *, cached: bool = True, **options: Any) -> tuple[bytes, str, set[str]]:
    """The file of a call, the cache that it wrote, and the passes that it kept."""
    with tempfile.TemporaryDirectory() as folder:
        out, cache = Path(folder, "out.onnx"), Path(folder, "ranges.json")
        report = run(out, recipe=recipe, **options, **({"calibration_cache_path": cache} if cached else {}))
        return out.read_bytes(), cache.read_text() if cached else "", kept(report)


def cache_of(folder: Path, recipe: str = "fast") -> Path:
    path = folder / "ranges.json"
    path.write_text(made(recipe)[1])
    return path


def kept(report: Any) -> set[str]:
    return {p.name for p in report.passes if p.kept}


# ---- a cache switches no pass off -----------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [EXACT, "fast", "plain"])
def test_a_run_with_a_cache_one_without_and_the_cache_alone_make_one_file(tmp_path: Path, recipe: str) -> None:
    cache, content, kept_then = cache_of(tmp_path, recipe), made(recipe)[0], made(recipe)[2]
    assert content == made(recipe, cached=False)[0]
    assert kept_then >= {"fast": {"equalize", "bias_correction"}, EXACT: {"equalize"}, "plain": set()}[recipe]
    for data in (FEEDS, FEEDS[::-1], None):
        report = run(tmp_path / "again.onnx", data, recipe=recipe, calibration_cache_path=str(cache))
        assert report.calibration.samples == 0
        assert kept(report) == kept_then
        assert content == (tmp_path / "again.onnx").read_bytes()
        assert not any("were not tried" in note for note in report.notes)
    assert cache.read_text() == made(recipe)[1]
    assert CalibrationTable.load(cache).samples == len(FEEDS)


@pytest.mark.filterwarnings("ignore::kenosis_ort.KenosisWarning")
def test_made_up_samples(tmp_path: Path) -> None:
    files = []
    for options in ({}, *[{"calibration_cache_path": tmp_path / "c"}] * 2):
        run(tmp_path / "out.onnx", SyntheticReader(MODEL, samples=16), **options)
        files.append((tmp_path / "out.onnx").read_bytes())
    assert files[0] == files[1] == files[2]


@pytest.mark.parametrize("options", [
    {"recipe": "plain"}, {"per_channel": False}, {"recipe": EXACT},
    {"recipe": "plain", "quant_format": QuantFormat.QOperator},
])  # fmt: skip
def test_one_cache_serves_other_recipes_types_and_formats(tmp_path: Path, options: dict[str, Any]) -> None:
    """It is of the weights as they came, whatever was done to them then."""
    run(out := tmp_path / "out.onnx", None, calibration_cache_path=cache_of(tmp_path), **options)
    assert made(cached=False, **options)[0] == out.read_bytes()


# ---- caches that are refused ----------------------------------------------------------------------------------


OTHERS = [(unbalanced(1), {}), (models.residual_block(), {}), (MODEL, {"calibrate_method": CalibrationMethod.Entropy})]
OTHERS.append((MODEL, {"extra_options": {"CalibMovingAverage": True}}))
REFUSED: list[tuple[str, onnx.ModelProto, list[Feed] | None, dict[str, Any], str]] = [
    *((recipe, MODEL, data, {}, "produced from other data") for recipe in (EXACT, "plain", "fast")
      for data in (models.feeds(MODEL, 24, seed=9), FEEDS[:-1], [*FEEDS, FEEDS[0]])),
    *(("fast", model, data, options, "produced") for model, options in OTHERS
      for data in (models.feeds(model, 24), None)),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "model", "data", "options", "text"), REFUSED)
def test_other_data_models_and_options_are_refused(tmp_path: Path, recipe, model, data, options, text) -> None:
    cache = cache_of(tmp_path, recipe)
    with pytest.raises(errors.CalibrationError, match=text) as caught:
        run(tmp_path / "out.onnx", data, model, recipe=recipe, calibration_cache_path=cache, **options)
    assert str(cache) in caught.value.where
    assert caught.value.fix
    assert not (tmp_path / "out.onnx").exists()
    assert cache.read_text() == made(recipe)[1]


def test_wider_placement_asks_for_what_is_missing(tmp_path: Path) -> None:
    """A cache made without the head lacks its tensors."""
    model, options = models.residual_block(), {"recipe": "plain", "calibration_cache_path": tmp_path / "ranges.json"}
    names = [n.name for n in model.graph.node if n.name != "stem"]
    run(tmp_path / "few.onnx", models.feeds(model), model, nodes_to_exclude=names[3:], **options)
    with pytest.raises(errors.CalibrationError, match="lacks") as caught:
        run(tmp_path / "all.onnx", models.feeds(model), model, **options)
    assert "ranges.json" in str(caught.value)
    assert caught.value.fix


def sample(raw: Any) -> Any:
    return raw["kenosis_samples"][0]["x"]


DAMAGES: dict[str, Any] = {
    "a range": lambda raw: next(iter(raw["kenosis"]["tensors"].values())).update(high=9.0),
    "a range for stock": lambda raw: next(iter(raw["data"].values()))["highest"].update(data=[9.0]),
    "a sample": lambda raw: sample(raw).update(base64="AAAA" + sample(raw)["base64"][4:]),
    "a shape": lambda raw: sample(raw).update(shape=[2**40]), "a type": lambda raw: sample(raw).update(dtype="object"),
    "one less": lambda raw: raw["kenosis_samples"].pop(),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_or_edited_file_is_refused(tmp_path: Path, what: str) -> None:
    cache = cache_of(tmp_path)
    raw = json.loads(cache.read_text())
    DAMAGES[what](raw)
    cache.write_text(damaged := json.dumps(raw))
    for feeds in (FEEDS, None):
        with pytest.raises(errors.CalibrationError) as caught:
            run(tmp_path / "out.onnx", feeds, calibration_cache_path=cache)
        assert caught.value.where == str(cache)
    assert cache.read_text() == damaged
    assert not (tmp_path / "out.onnx").exists()


def test_nothing_is_cached_that_fails_and_what_cannot_be_is_refused_before_data_are_read(tmp_path: Path) -> None:
    with pytest.raises(errors.CalibrationError):
        run(tmp_path / "out.onnx", [], calibration_cache_path=tmp_path / "c")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("no folder")
    reader = FeedReader(FEEDS)
    with pytest.raises(errors.CalibrationError, match="cannot be written"):
        run(tmp_path / "out.onnx", reader, calibration_cache_path=tmp_path / "file" / "ranges.json")
    assert reader.handed_out == 0


# ---- shards ---------------------------------------------------------------------------------------------------


def depthwise() -> tuple[onnx.ModelProto, list[Feed]]:
    """Channels of very different size behind the expansion, with a Relu6 and a depthwise Conv between."""
    sizes = np.exp(np.random.default_rng(3).normal(0, 2.5, 32)).astype(np.float32)
    wide = sizes[:, None, None, None]
    model = changed(models.mobile_block(), expand_w=wide, expand_b=sizes, depthwise_w=1 / wide)
    return model, models.feeds(model, 45)


def transformer() -> tuple[onnx.ModelProto, list[Feed]]:
    """Outlier channels behind the first norm, as SmoothQuant is made for."""
    gains = np.ones(32, np.float32)
    gains[[3, 11]] = 60.0
    names = {"norm1_gamma": gains, "norm2_gamma": gains}
    names |= dict.fromkeys(("q_w", "k_w", "v_w", "up_w"), 1 / gains[:, None])
    model = changed(models.transformer_block(tokens=8, width=32), **names)
    rng = np.random.default_rng(0)
    mask = np.zeros((1, 1, 8, 8), np.float32)
    return model, [{"ids": rng.integers(0, 50, (1, 8)), "mask": mask} for _ in range(45)]


def if_net() -> tuple[onnx.ModelProto, list[Feed]]:
    """Bodies of control flow are calibrated on the samples of the table."""
    return models.net_with_if(), models.feeds(models.net_with_if(), 45)


CASES: list[tuple[Any, str, set[str]]] = [
    (depthwise, "fast", {"equalize"}), (depthwise, "accurate", {"equalize"}), (transformer, "fast", {"smooth"}),
    (transformer, "accurate", {"smooth"}), (if_net, "fast", set()),
]  # fmt: skip


def merged_of(folder: Path, model: onnx.ModelProto, shards: list[list[Feed]]) -> Path:
    tables = (calibrate(model, FeedReader(shard)) for shard in shards)
    reduce(CalibrationTable.merge, tables).save(folder / "merged.json")
    return folder / "merged.json"


@pytest.mark.parametrize(("net", "recipe", "passes"), CASES)
def test_shards_make_the_file_of_one_call(tmp_path: Path, net: Any, recipe: str, passes: set[str]) -> None:
    model, feeds = net()
    promise = net is if_net  # under the promise too
    whole, sharded = tmp_path / "whole.onnx", tmp_path / "sharded.onnx"
    expected = run(whole, feeds, model, recipe=recipe, promise=promise)
    assert kept(expected) >= passes
    table = merged_of(tmp_path, model, [feeds[31:], feeds[:12], feeds[12:31]])
    report = run(sharded, None, model, recipe=recipe, promise=promise, calibration_cache_path=table)
    outcomes = [[(p.name, p.kept, p.error_after) for p in each.passes] for each in (report, expected)]
    assert outcomes[0] == outcomes[1]
    assert (report.speed is not None) == promise
    assert whole.read_bytes() == sharded.read_bytes()
    assert not any("were not tried" in note for note in report.notes)


# ---- samples in a table ---------------------------------------------------------------------------------------


def test_a_table_without_samples_says_so_and_the_reader_beside_it_serves(tmp_path: Path) -> None:
    """What is private stays where it is; with the reader at hand nothing is lost."""
    table = tmp_path / "table.json"
    calibrate(MODEL, table, FeedReader(FEEDS), keep_samples=False)
    assert "kenosis_samples" not in json.loads(table.read_text())
    report = run(tmp_path / "alone.onnx", None, calibration_cache_path=table)
    assert not kept(report)
    assert sum("were not tried: they need samples" in note for note in report.notes) == 2
    run(tmp_path / "both.onnx", calibration_cache_path=table)
    assert made(cached=False)[0] == (tmp_path / "both.onnx").read_bytes()
    report = run(tmp_path / "out.onnx", calibration_cache_path=tmp_path / "told.json")
    assert any("holds 24 of the samples" in note and "keep_samples=False" in note for note in report.notes)
    for wrong in ("no", None):
        with pytest.raises(errors.ArgumentTypeError, match="keep_samples"):
            calibrate(MODEL, tmp_path / "t", FeedReader(FEEDS), keep_samples=wrong)  # type: ignore[arg-type]


def by_labels(outputs: Any, reference: Any, indices: Any) -> float:
    return -float(np.mean(indices))


def test_labels_need_numbered_samples(tmp_path: Path) -> None:
    merged = merged_of(tmp_path, MODEL, [FEEDS[:12], FEEDS[12:]])
    with pytest.raises(errors.OptionError, match="samples of a calibration table have none") as caught:
        run(tmp_path / "out.onnx", None, calibration_cache_path=merged, metric=by_labels)
    assert "eval_reader" in str(caught.value)
    options = {"metric": by_labels, "eval_reader": FeedReader(models.feeds(MODEL, 8, seed=4))}
    run(tmp_path / "out.onnx", None, calibration_cache_path=merged, **options)
