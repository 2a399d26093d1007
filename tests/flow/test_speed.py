"""The speed promise end to end: what is slower is decided by the clock of `tests.pace`."""

import contextlib
import re
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import QuantType

from kenosis_ort import KenosisWarning, Recipe, quantize_static
from kenosis_ort.flow import speed, timed_feeds
from kenosis_ort.report.facts import SpeedCandidate, SpeedSummary
from kenosis_ort.targets import get_target
from kenosis_ort.tuning import promise
from tests import models, planning
from tests.flow.support import QDQ, quantized, run

INT8_IS_SLOWER = {"int8": 0.09}
OVERRIDES = {"extra_options": {"TensorQuantOverrides": {"x": [{"quant_type": QuantType.QUInt8}]}}}


@pytest.mark.parametrize(("net", "times", "options", "taken", "warning"), [
    ("residual_block", {}, {}, "int8", ""),
    ("residual_block", {}, {"nodes_to_quantize": ["conv1"]}, "int8 as asked for", ""),  # no other form takes its place
    ("residual_block", INT8_IS_SLOWER, {}, "float", "INT8 does not pay here"),
    ("bn_net", INT8_IS_SLOWER, {"recipe": "fast"}, "float", "INT8 does not pay here"),  # not compared with moved biases
    ("residual_block", INT8_IS_SLOWER, {"promise": False}, None, ""),
    ("residual_block", INT8_IS_SLOWER, OVERRIDES, "int8 as asked for",
     r"TensorQuantOverrides'\] asks for does not pay here: only 0\.67x"),
    ("mlp", {**INT8_IS_SLOWER, "other": 0.03}, {}, "dynamic", "dynamic"),
])  # fmt: skip
def test_what_is_delivered(tmp_path, pace, net, times, options, taken, warning):
    for name, seconds in times.items():
        setattr(pace, name, seconds)
    model, out = models.ALL[net](), tmp_path / "out.onnx"
    with pytest.warns(KenosisWarning, match=warning) if warning else contextlib.nullcontext() as caught:
        report = quantize_static(model, out, models.reader(model, 16), **{"recipe": "plain", **options})
    assert not warning or caught[0].filename == __file__
    nodes, found = onnx.load(out).graph.node, report.speed
    assert any(n.op_type in QDQ for n in nodes) == (taken not in ("float", "dynamic"))
    assert any(n.domain == "com.microsoft" for n in nodes) == (taken == "dynamic")
    assert (found is None) == (taken is None)
    if found is not None:
        names = (found.taken.name, found.taken.description)
        assert taken in names
        assert found.basis == "measured"
        statuses = [form.status for form in found.candidates]
        assert taken != "int8" or found.taken.verdict == "faster"
        assert "as asked for" not in taken or len(statuses) == 1
    if taken == "float":
        assert (statuses[0], statuses[-1]) == ("slower", "taken")
        assert "the float model" in report.verdict()
        assert all(output.sqnr_db > 100 for output in report.outputs)
        assert not [note for note in report.notes if "folded" in note or "raised" in note], "not in the file"
        feeds = models.feeds(model, 1)
        assert np.array_equal(run(model, feeds)[0][0], run(out, feeds)[0][0])


@pytest.mark.parametrize(("estimated", "is_float", "basis"), [
    (2.0, False, "estimated"), (1.2, True, "undecided"), (0.5, True, "estimated"), (None, True, "undecided"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::kenosis_ort.KenosisWarning")
def test_small_nets_are_decided_by_the_cost_table(tmp_path, monkeypatch, estimated, is_float, basis):
    """INT8 only where the table says that it is faster by more than the table may be wrong."""
    found = estimated and promise.Estimate(estimated, 1.4)
    monkeypatch.setattr(speed, "_least_us", lambda *_: 5.0)
    monkeypatch.setattr(speed._Forms, "_estimate", lambda _: found)
    report = quantized(models.conv_relu_chain(2), tmp_path / "out.onnx", promise=True)
    assert report.is_float is is_float
    assert (report.speed.basis, report.speed.float_milliseconds) == (basis, None)


@pytest.mark.parametrize(("costs", "said"), [(True, r"estimated at 0\.\d\dx of the float model's"), (False, "nothing")])
@pytest.mark.filterwarnings("ignore::kenosis_ort.KenosisWarning")
def test_the_cost_table_is_asked_where_there_is_one(tmp_path, monkeypatch, costs, said):
    """A net so small that Q and DQ cost more than all else, by any profile."""
    monkeypatch.setattr(speed, "_least_us", lambda *_: 5.0)
    target = get_target("ort-cpu") if costs else replace(get_target("ort-cpu"), costs=None)
    report = quantized(models.mobile_block(), tmp_path / "out.onnx", promise=True, tune="model", target=target)
    assert re.search(said, report.speed.candidates[0].reason)
    assert report.is_float


# ---- what timing decided is in the report's recipe, which makes the same bytes without any timing --------------


def deciding(form):
    """A promise whose clock makes one form the first that is not slower."""

    def decided(_, candidates, *args, **kwargs):
        candidate = next(each for each in candidates if each.name == form)
        record = SpeedCandidate(form, candidate.description, "taken", "fast")
        return candidate.build(), SpeedSummary((record,), str(promise.Basis.MEASURED), 1.0)

    return decided


def never(*_, **__):
    raise AssertionError("timed")


@pytest.mark.filterwarnings("ignore::kenosis_ort.KenosisWarning")
@pytest.mark.parametrize("form", ["int8", "first node float", "weight-only", "dynamic", "float"])
def test_a_saved_recipe_repeats_what_timing_decided(form, tmp_path, monkeypatch):
    model = models.mlp(n_in=256, hidden=256, n_out=64)
    monkeypatch.setattr(promise, "keep_promise", deciding(form))
    report = quantized(model, tmp_path / "first.onnx", promise=True, tune="model")
    assert report.recipe.speed.form == form
    report.recipe.save(tmp_path / "saved.toml")
    assert Recipe.load(tmp_path / "saved.toml") == report.recipe
    monkeypatch.setattr(promise, "keep_promise", never)
    monkeypatch.setattr(speed, "_least_us", never)
    again = quantized(model, tmp_path / "again.onnx", recipe=tmp_path / "saved.toml", promise=True)
    assert again.recipe == report.recipe
    assert (tmp_path / "first.onnx").read_bytes() == (tmp_path / "again.onnx").read_bytes()
    assert "nothing was timed" in again.speed.taken.reason


@pytest.mark.filterwarnings("ignore::kenosis_ort.KenosisWarning")
def test_another_model_is_timed_anew(tmp_path, monkeypatch):
    found = ["plain"]
    for seed, form in ((0, "float"), (3, "int8")):
        monkeypatch.setattr(promise, "keep_promise", deciding(form))
        model = models.residual_block(seed=seed)
        found.append(quantized(model, tmp_path / "out.onnx", recipe=found[-1], promise=True).recipe)
    assert [each.speed.form for each in found[1:]] == ["float", "int8"]
    assert found[1].speed.model != found[2].speed.model


# ---- which lengths a model is timed at ------------------------------------------------------------------------

DECODER = """net (int64[B,T] input_ids, int64[B,M] attention_mask, float[B,2,P,4] past) => (float[B,T,32] y)
    <float[50,32] table, float[32,32] w> {  x = Gather (table, input_ids)  wide = MatMul (x, w)  y = Relu (wide) }"""
MASKED = """net (int64[B,T] ids, int64[B,T] mask) => (float[B,T,32] y) <float[50,32] table, float[32,32] w,
    int64[1] last = {-1}> {  x = Gather (table, ids)  numbers = Cast <to = 1> (mask)  wide = Unsqueeze (numbers, last)
    seen = Mul (x, wide)  y = MatMul (seen, w) }"""
FIXED = """net (int64[B,T] ids) => (float[B,4,8] y) <float[50,8] t, int64[3] s = {0, 4, 8}> {
    x = Gather (t, ids)\n y = Reshape (x, s) }"""


def decoder_feed(tokens, past, *, mask=True):
    feed = {"input_ids": np.ones((1, tokens), np.int64), "past": np.zeros((1, 2, past, 4), np.float32)}
    return {**feed, "attention_mask": np.ones((1, tokens + past), np.int64)} if mask else feed


def masked_feed(tokens):
    return {"ids": np.arange(tokens)[None] % 50, "mask": np.ones((1, tokens), np.int64)}


FAR, NEAR = [decoder_feed(20, 0), decoder_feed(1, 20), decoder_feed(9, 0)], [decoder_feed(20, 0), decoder_feed(9, 0)]


@pytest.mark.parametrize(("net", "feeds", "lengths", "found", "notes"), [
    (DECODER, FAR, (), [("input_ids of length 1", True, 1), ("input_ids of length 20", False, 1)], []),
    (DECODER, NEAR, (), [("", False, 2)], []),
    (DECODER.replace("int64[B,M] attention_mask, ", ""),  # the growth of a cache is no other situation
     [decoder_feed(1, n, mask=False) for n in (1, 40)], (), [("", True, 2)], []),
    (MASKED, [masked_feed(6)], (12, 1, 6),
     [("ids of length 1", True, 1), ("ids of length 6", True, 1), ("ids of length 12", False, 1)], []),
    (FIXED, [{"ids": np.ones((1, 4), np.int64)}], (1,), [("", False, 1)],
     ["no feed of length 1 could be made of the samples: not timed for it"]),
    ("(float[1,32] x) => (float[1,32] y) <float[32,32] w> { y = MatMul (x, w) }", [{"x": np.ones((1, 32), np.float32)}],
     (1,), [("", True, 1)], ["no input of the model is of open length: timed as the samples are"]),
    ("(float[1,3,8,8] x) => (float[1,4,8,8] y) <float[4,3,1,1] w> { y = Conv (x, w) }",
     [{"x": np.ones((1, 3, 8, 8), np.float32)}], (), [("", False, 1)], []),
])  # fmt: skip
def test_lengths_that_a_model_is_timed_at(net, feeds, lengths, found, notes):
    seen, told = timed_feeds.scenarios(planning.parse(net), feeds, lengths)
    assert [(s.name, s.few_rows, len(s.feeds)) for s in seen] == found
    assert told == notes


def test_lengths_that_are_asked_for_are_made_of_the_samples():
    found, _ = timed_feeds.scenarios(planning.parse(MASKED), [masked_feed(6)], (12, 1, 6))
    assert [s.feeds[0]["mask"].shape for s in found] == [(1, 1), (1, 6), (1, 12)]
    assert found[2].feeds[0]["ids"].tolist() == [[0, 1, 2, 3, 4, 5] * 2]
    (one,), _ = timed_feeds.scenarios(planning.parse(DECODER), [decoder_feed(8, 5)], (2,))
    shapes = {name: value.shape for name, value in one.feeds[0].items()}
    assert shapes == {"input_ids": (1, 2), "attention_mask": (1, 7), "past": (1, 2, 5, 4)}


def test_a_file_that_is_slower_for_single_tokens_is_not_delivered(pace, tmp_path):
    net = planning.parse(MASKED.replace("32]", "64]").replace("32,", "64,"))
    feeds = [masked_feed(n) for n in (1, 40, 1, 40)]

    def delivered(**options):
        return quantize_static(net, tmp_path / "out.onnx", models.FeedReader(feeds), recipe="plain", **options)

    pace.int8, pace.plain, pace.other = 3e-3, 6e-3, 9e-3
    assert delivered().speed.taken.name == "int8"
    pace.int8, pace.other = 9e-3, 2e-2
    with pytest.warns(KenosisWarning, match="for ids of length 1"):
        assert delivered().is_float
    pace.int8, pace.other = 3e-3, 1e-3
    report = delivered(sequence_lengths=(1, 8))
    assert report.speed.taken.name == "dynamic"
    assert "the fastest form here" in report.verdict()
    assert not report.is_float
    assert report.speed.candidates[0].status == "outrun"
