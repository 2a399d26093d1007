"""A calibration table in the reader's place makes the file of one call; ranges follow changed weights."""

import json
import tempfile
from dataclasses import replace
from functools import cache as once, reduce
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from onnxruntime.quantization import CalibrationMethod, QuantFormat

from kenosis_ort import CalibrationTable, Recipe, SyntheticReader, calibrate, errors, quantize_static
from kenosis_ort.accuracy.channel_statistics import channel_statistics
from kenosis_ort.calibration.collector import Points, collect
from kenosis_ort.calibration.statistics import ChannelRange, Rescaling, TensorStatistics
from kenosis_ort.flow.builder import Builder
from kenosis_ort.flow.reused_tables import RewrittenNet, following_table
from kenosis_ort.graph.live import LiveGraph
from kenosis_ort.passes import State, equalize_layers, smooth
from tests import models, planning
from tests.flow.support import changed, initializers, quality, quantized

EXACT = "exact"
EXACTLY = Recipe(EXACT, ranges="minmax", bias_correction=False)  # nothing that needs samples after the ranges


def unbalanced(seed=0):
    """Two Convs that equalization gains much in: channels of very different size between them."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.normal(0, 2.0, 8))
    weights = {"w1": rng.normal(0, 0.3, (8, 3, 3, 3)) * sizes[:, None, None, None]}
    weights |= {"w2": rng.normal(0, 0.3, (4, 8, 3, 3)) / sizes[:, None, None], "b1": np.zeros(8), "b2": np.zeros(4)}
    text = """(float[1,3,8,8] x) => (float[1,4,8,8] y) <float[8,3,3,3] w1, float[8] b1, float[4,8,3,3] w2, float[4] b2>
        { c = Conv <pads = [1,1,1,1]> (x, w1, b1)  r = Relu (c)  y = Conv <pads = [1,1,1,1]> (r, w2, b2) }"""
    return planning.parse(text, weights)


MODEL = unbalanced()
FEEDS = models.feeds(MODEL, 24)


def run(out, feeds=FEEDS, model=MODEL, **options):
    reader = models.FeedReader(feeds) if isinstance(feeds, list) else feeds
    if options.get("recipe") == EXACT:
        options["recipe"] = EXACTLY
    return quantize_static(model, out, reader, **{"promise": False, "evidence": "none", **options})


@once
def made(recipe="fast", *, cached=True, **options):
    """The file of a call, the cache that it wrote, and the passes that it kept."""
    with tempfile.TemporaryDirectory() as folder:
        out, cache = Path(folder, "out.onnx"), Path(folder, "ranges.json")
        report = run(out, recipe=recipe, **options, **({"calibration_cache_path": cache} if cached else {}))
        return out.read_bytes(), cache.read_text() if cached else "", kept(report)


def cache_of(folder, recipe="fast"):
    path = folder / "ranges.json"
    path.write_text(made(recipe)[1])
    return path


def kept(report):
    return {p.name for p in report.passes if p.kept}


# ---- a cache switches no pass off -----------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [EXACT, "fast", "plain"])
def test_a_run_with_a_cache_one_without_and_the_cache_alone_make_one_file(tmp_path, recipe):
    cache, content, kept_then = cache_of(tmp_path, recipe), made(recipe)[0], made(recipe)[2]
    assert content == made(recipe, cached=False)[0]
    assert kept_then >= {"fast": {"equalize", "bias_correction"}, EXACT: {"equalize"}, "plain": set()}[recipe]
    for data in (FEEDS, FEEDS[::-1], None):
        report = run(tmp_path / "again.onnx", data, recipe=recipe, calibration_cache_path=str(cache))
        assert (report.calibration.samples, kept(report)) == (0, kept_then)
        assert content == (tmp_path / "again.onnx").read_bytes()
        assert not any("were not tried" in note for note in report.notes)
    assert (cache.read_text(), CalibrationTable.load(cache).samples) == (made(recipe)[1], len(FEEDS))


@pytest.mark.filterwarnings("ignore::kenosis_ort.KenosisWarning")
def test_made_up_samples(tmp_path):
    files = []
    for options in ({}, *[{"calibration_cache_path": tmp_path / "c"}] * 2):
        run(tmp_path / "out.onnx", SyntheticReader(MODEL, samples=16), **options)
        files.append((tmp_path / "out.onnx").read_bytes())
    assert files[0] == files[1] == files[2]


@pytest.mark.parametrize("options", [
    {"recipe": "plain"}, {"per_channel": False}, {"recipe": EXACT},
    {"recipe": "plain", "quant_format": QuantFormat.QOperator},
])  # fmt: skip
def test_one_cache_serves_other_recipes_types_and_formats(tmp_path, options):
    """It is of the weights as they came, whatever was done to them then."""
    run(out := tmp_path / "out.onnx", None, calibration_cache_path=cache_of(tmp_path), **options)
    assert made(cached=False, **options)[0] == out.read_bytes()


# ---- caches that are refused ----------------------------------------------------------------------------------


OTHERS = [(unbalanced(1), {}), (models.residual_block(), {}), (MODEL, {"calibrate_method": CalibrationMethod.Entropy})]
OTHERS.append((MODEL, {"extra_options": {"CalibMovingAverage": True}}))
REFUSED = [
    *((recipe, MODEL, data, {}, "produced from other data") for recipe in (EXACT, "plain", "fast")
      for data in (models.feeds(MODEL, 24, seed=9), FEEDS[:-1], [*FEEDS, FEEDS[0]])),
    *(("fast", model, data, options, "produced") for model, options in OTHERS
      for data in (models.feeds(model, 24), None)),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "model", "data", "options", "text"), REFUSED)
def test_other_data_models_and_options_are_refused(tmp_path, recipe, model, data, options, text):
    cache = cache_of(tmp_path, recipe)
    with pytest.raises(errors.CalibrationError, match=text) as caught:
        run(tmp_path / "out.onnx", data, model, recipe=recipe, calibration_cache_path=cache, **options)
    assert str(cache) in caught.value.where
    assert caught.value.fix
    assert not (tmp_path / "out.onnx").exists()
    assert cache.read_text() == made(recipe)[1]


def test_wider_placement_asks_for_what_is_missing(tmp_path):
    """A cache made without the head lacks its tensors."""
    model, options = models.residual_block(), {"recipe": "plain", "calibration_cache_path": tmp_path / "ranges.json"}
    names = [n.name for n in model.graph.node if n.name != "stem"]
    run(tmp_path / "few.onnx", models.feeds(model), model, nodes_to_exclude=names[3:], **options)
    with pytest.raises(errors.CalibrationError, match="lacks") as caught:
        run(tmp_path / "all.onnx", models.feeds(model), model, **options)
    assert "ranges.json" in str(caught.value)
    assert caught.value.fix


def sample(raw):
    return raw["kenosis_samples"][0]["x"]


DAMAGES = {
    "a range": lambda raw: next(iter(raw["kenosis"]["tensors"].values())).update(high=9.0),
    "a range for stock": lambda raw: next(iter(raw["data"].values()))["highest"].update(data=[9.0]),
    "a sample": lambda raw: sample(raw).update(base64="AAAA" + sample(raw)["base64"][4:]),
    "a shape": lambda raw: sample(raw).update(shape=[2**40]), "a type": lambda raw: sample(raw).update(dtype="object"),
    "one less": lambda raw: raw["kenosis_samples"].pop(),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_or_edited_file_is_refused(tmp_path, what):
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


def test_nothing_is_cached_that_fails_and_what_cannot_be_is_refused_before_data_are_read(tmp_path):
    with pytest.raises(errors.CalibrationError):
        run(tmp_path / "out.onnx", [], calibration_cache_path=tmp_path / "c")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("no folder")
    reader = models.FeedReader(FEEDS)
    with pytest.raises(errors.CalibrationError, match="cannot be written"):
        run(tmp_path / "out.onnx", reader, calibration_cache_path=tmp_path / "file" / "ranges.json")
    assert reader.handed_out == 0


# ---- shards ---------------------------------------------------------------------------------------------------


def depthwise():
    """Channels of very different size behind the expansion, with a Relu6 and a depthwise Conv between."""
    sizes = np.exp(np.random.default_rng(3).normal(0, 2.5, 32)).astype(np.float32)
    wide = sizes[:, None, None, None]
    model = changed(models.mobile_block(), expand_w=wide, expand_b=sizes, depthwise_w=1 / wide)
    return model, models.feeds(model, 45)


def transformer():
    """Outlier channels behind the first norm, as SmoothQuant is made for."""
    gains = np.ones(32, np.float32)
    gains[[3, 11]] = 60.0
    names = {"norm1_gamma": gains, "norm2_gamma": gains}
    names |= dict.fromkeys(("q_w", "k_w", "v_w", "up_w"), 1 / gains[:, None])
    model = changed(models.transformer_block(tokens=8, width=32), **names)
    rng = np.random.default_rng(0)
    mask = np.zeros((1, 1, 8, 8), np.float32)
    return model, [{"ids": rng.integers(0, 50, (1, 8)), "mask": mask} for _ in range(45)]


def if_net():
    """Bodies of control flow are calibrated on the samples of the table."""
    return models.net_with_if(), models.feeds(models.net_with_if(), 45)


CASES = [
    (depthwise, "fast", {"equalize"}), (depthwise, "accurate", {"equalize"}), (transformer, "fast", {"smooth"}),
    (transformer, "accurate", {"smooth"}), (if_net, "fast", set()),
]  # fmt: skip


def merged_of(folder, model, shards):
    tables = (calibrate(model, models.FeedReader(shard)) for shard in shards)
    reduce(CalibrationTable.merge, tables).save(folder / "merged.json")
    return folder / "merged.json"


@pytest.mark.parametrize(("net", "recipe", "passes"), CASES)
def test_shards_make_the_file_of_one_call(tmp_path, net, recipe, passes):
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


def test_a_table_without_samples_says_so_and_the_reader_beside_it_serves(tmp_path):
    """What is private stays where it is; with the reader at hand nothing is lost."""
    table = tmp_path / "table.json"
    calibrate(MODEL, table, models.FeedReader(FEEDS), keep_samples=False)
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
            calibrate(MODEL, tmp_path / "t", models.FeedReader(FEEDS), keep_samples=wrong)


def by_labels(outputs, reference, indices):
    return -float(np.mean(indices))


def test_labels_need_numbered_samples(tmp_path):
    merged = merged_of(tmp_path, MODEL, [FEEDS[:12], FEEDS[12:]])
    with pytest.raises(errors.OptionError, match="samples of a calibration table have none") as caught:
        run(tmp_path / "out.onnx", None, calibration_cache_path=merged, metric=by_labels)
    assert "eval_reader" in str(caught.value)
    options = {"metric": by_labels, "eval_reader": models.FeedReader(models.feeds(MODEL, 8, seed=4))}
    run(tmp_path / "out.onnx", None, calibration_cache_path=merged, **options)


# ---- changed weights: ranges follow from those by channel, and candidates are patched -------------------------------


def pooled():
    """Conv, Relu, pool, Flatten, Gemm: channels become several features each."""
    rng = np.random.default_rng(2)
    weight = rng.normal(0, 0.3, (8, 3, 3, 3)) * np.exp(rng.normal(0, 1.5, 8))[:, None, None, None]
    text = """net (float[1,3,8,8] x) => (float[1,4] y) <float[8,3,3,3] w, float[128,4] g> {
        c = Conv <pads = [1,1,1,1]> (x, w)  a = LeakyRelu (c)
        p = MaxPool <kernel_shape = [2,2], strides = [2,2]> (a)  f = Flatten (p)  y = Gemm (f, g) }"""
    model = planning.parse(text, {"w": weight})
    return model, models.feeds(model, 30, seed=1)


EQUALIZE = equalize_layers.equalize, equalize_layers.values_for_equalization, equalize_layers.Equalization()
SMOOTH = smooth.smooth, smooth.values_for_smoothing, smooth.SmoothQuant()


@pytest.mark.parametrize(("net", "rule", "how"), [
    (lambda: (MODEL, FEEDS), EQUALIZE, {}), (pooled, EQUALIZE, {}), (depthwise, EQUALIZE, {}),
    *((transformer, SMOOTH, {"insert": insert}) for insert in (False, True)),
])  # fmt: skip
def test_ranges_that_follow_are_those_that_a_sweep_finds(net, rule, how):
    (model, feeds), (change, values, each) = net(), rule
    model = planning.prepared(model)
    found = change(model, peaks=channel_statistics(model, feeds, values(LiveGraph(model), **how)), **how)
    before, asked = ([name for node in m.graph.node for name in node.output] for m in (model, found.model))
    nodes, insert = {node.name for node in model.graph.node}, how.get("insert", False)
    channels = each.scaled(LiveGraph(model), nodes=nodes, insert=insert)
    table = collect(model, feeds, Points(before, channels=channels, threads=1))
    nets = RewrittenNet(model, model, before), RewrittenNet(found.model, found.model, asked)
    carried = following_table(table, *nets, found.rescaled, lambda *_: pytest.fail("all ranges follow"), None)
    seen = collect(found.model, feeds, Points(asked, threads=1))
    assert carried.tensors.keys() == seen.tensors.keys()
    for name in seen.tensors:
        assert carried.range_of(name) == pytest.approx(seen.range_of(name), rel=1e-4, abs=1e-5), name
    assert any(np.ptp(each.factors) > 0.1 for each in found.rescaled.values())
    moved = [n for n in table.tensors if table.range_of(n) != pytest.approx(seen.range_of(n), rel=1e-3, abs=1e-3)]
    assert set(moved) <= found.rescaled.keys()


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(0, 3), st.floats(0.1, 4)), min_size=1, max_size=6))
def test_a_range_by_channel(channels):
    low, width, factors = (np.array(column) for column in zip(*channels, strict=True))
    known = TensorStatistics(low.min(), (low + width).max(), 3, channels=ChannelRange(1, 4, low, low + width))
    found = Rescaling(-3, factors).of(known)
    assert (found.low, found.high) == ((low * factors).min(), ((low + width) * factors).max())
    cut = Rescaling(1, factors, low, low=0.0).of(known)
    assert (cut.low, cut.high) == (0.0, pytest.approx((width * factors).max()))
    assert Rescaling(2, factors).of(known) is None
    assert Rescaling(1, np.append(factors, 1.0)).of(known) is None
    padded = Rescaling(1, factors[:-1]).of(known)
    assert padded.channels.high[-1] == (low + width)[-1]


def test_a_pass_that_tells_nothing_of_values_is_not_believed(tmp_path, monkeypatch):
    """It scales channels, and does not say which."""
    told = State.with_weights
    monkeypatch.setattr(State, "with_weights", lambda state, model, notes, _: told(state, model, notes, {}))
    (model, feeds), out = transformer(), tmp_path / "out.onnx"
    report = run(out, feeds[:24], model, recipe=Recipe(ranges="minmax", bias_correction=False, row_scales=False))
    assert [p.name for p in report.passes if p.kept] == ["smooth"]
    assert quality(model, out, feeds[:8]) > 30


def test_layers_that_get_a_bias_for_correction_are_planned_with_it(tmp_path):
    text = """(float[1,16] x) => (float[1,4] y) {
        [first] a = Gemm <transB = 1> (x, w)  b = Tanh (a)  [second] y = Gemm <transB = 1> (b, v) }"""
    model = planning.parse(text, {"w": models.normal((8, 16), 0), "v": models.normal((4, 8), 1)})
    report = quantized(model, tmp_path / "out.onnx", models.feeds(model, 16), recipe="fast")
    assert report.plan.integer_nodes() == ("first", "second")
    assert {"w_bias_quantized", "v_bias_quantized"} <= initializers(tmp_path / "out.onnx").keys()


# ---- a candidate with other ranges or biases is a copy of the model made last, and equals one made anew ---------


def dead_channel():
    """A Conv whose first channel has weights so small that its bias widens their scale, by that of the input."""
    weight = np.random.default_rng(1).normal(0, 0.2, (4, 4, 3, 3))
    weight[0] = 1e-12
    text = """net (float[1,4,8,8] x) => (float[1,4,8,8] y) <float[4,4,3,3] w, float[4,4,3,3] dead, float[4] bias> {
        c = Conv <pads = [1,1,1,1]> (x, w)  r = Relu (c)  y = Conv <pads = [1,1,1,1]> (r, dead, bias) }"""
    return planning.parse(text, {"dead": weight, "bias": [3.0] * 4})


def shared_bias():
    """Two Convs with one weight and one bias, which are one bias in integers too where their inputs share a scale."""
    text = """net (float[1,4,8,8] x) => (float[1,4,8,8] y, float[1,4,8,8] z)
        <float[4,4,1,1] s, float[4] b, float[4,4,3,3] v, float[4,4,3,3] w> {
        c = Conv <pads = [1,1,1,1]> (x, v)  r = Relu (c)  d = Conv (r, s, b)  y = Relu (d)
        e = Conv <pads = [1,1,1,1]> (x, w)  t = Relu (e)  f = Conv (t, s, b)  z = Relu (f) }"""
    return planning.parse(text, {"b": [0.1, -0.2, 0.3, 0.05]})


PATCHED = {
    "dead_channel": dead_channel, "shared_bias": shared_bias,
    **{n: models.ALL[n] for n in ("residual_block", "concat_net", "mlp", "transformer_block", "net_with_if")},
}  # fmt: skip
WRITTEN_SO = {"AddQDQPairToWeight": True}, {"DedicatedQDQPair": True}, {"QuantizeBias": False}
PATCHES = [*((net, {}) for net in PATCHED), *((net, extra) for extra in WRITTEN_SO for net in [*PATCHED][:4])]


@pytest.mark.filterwarnings("ignore:output .* keeps only")  # of the dead channel
@pytest.mark.parametrize(("net", "extra"), PATCHES)
def test_a_patched_model_equals_one_made_anew(tmp_path, monkeypatch, net, extra):
    """By the ranges asked for and by others; ``counts`` tells how many were made anew, and patched."""
    counts = {"anew": 0, "patched": 0}
    quantize, rng = Builder.quantize, np.random.default_rng(0)

    def made(builder, table, *how):
        found = quantize(builder, table, *how)
        for number in range(4):
            wider = rng.uniform(0.3, 3.0, (len(table.tensors), 2)) if number else np.ones((len(table.tensors), 2))
            ranges = {n: tuple(map(float, table.range_of(n) * by)) for n, by in zip(table.tensors, wider, strict=True)}
            if number == 2:  # values that had scales of their own have the same one
                ranges = dict.fromkeys(ranges, (-1.0, 4.0))
            given = table.with_ranges(ranges)
            latest = builder._latest
            patched = quantize(builder, given, *how)
            counts["patched" if builder._latest is latest else "anew"] += 1
            anew = quantize(replace(builder), given, *how)
            assert patched.plan == anew.plan
            files = [each.quantized.SerializeToString(deterministic=True) for each in (patched, anew)]
            assert files[0] == files[1]
        return found

    monkeypatch.setattr(Builder, "quantize", made)
    model, recipe = PATCHED[net](), "plain" if net == "shared_bias" else "fast"  # which gives each layer its own bias
    quantized(model, tmp_path / "out.onnx", feeds=models.feeds(model, 16), recipe=recipe, extra_options=extra)
    assert counts["patched"], "none was made so"
    assert counts["anew"] or net in models.ALL or "QuantizeBias" in extra, "more than numbers follows the ranges"
