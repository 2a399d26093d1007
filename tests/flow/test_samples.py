"""Samples: which are kept and how batches are taken apart, what passes are fitted to, and what they are judged by.

In the order of their digests every fourth sample is held out, whatever their number and the pass. In tests of that
these samples show the channels in another order than the rest do, at a lower level: no range depends on it, but all
that is fitted to them would.
"""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kenosis_ort import ArrayReader, KenosisWarning, Recipe, errors, quantize_static
from kenosis_ort.calibration.cached_samples import feed_digest
from kenosis_ort.calibration.collector import collect
from kenosis_ort.calibration.feeds import InputSpec, Rows, some_of
from kenosis_ort.flow import builder, finish
from kenosis_ort.flow.samples import KeepingReader, Validation, find_division
from kenosis_ort.passes import leave_float
from kenosis_ort.runtime.counting import counted
from tests import models, planning
from tests.flow.support import Untouched, quantized, run

INPUTS = ([InputSpec("x", np.dtype("float32"), (4,))], [])


def numbered(at):
    return {"x": np.full(4, at, np.float32)}


def keeping(count, keep, **options):
    """A keeping reader of feeds 0, 1, 2, ..."""
    return KeepingReader(models.FeedReader([numbered(at) for at in range(count)]), INPUTS, keep=keep, **options)


def numbers(feeds):
    return [int(feed["x"][0]) for feed in feeds]


def drain(reader):
    return numbers(list(iter(reader.get_next, None)))


@given(st.integers(0, 200), st.integers(0, 30), st.integers(1, 30), st.integers(0, 12))
def test_all_feeds_pass_once_and_those_of_least_digest_are_kept(count, keep, wanted, ahead):
    reader = keeping(count, keep)
    assert numbers(reader.peek(ahead)) == list(range(min(ahead, count)))
    foreseen = reader.foreseen(wanted)
    assert reader.foreseen(wanted) == foreseen
    assert drain(reader) == list(range(count))
    assert numbers(reader.feeds) == sorted(range(count), key=lambda at: feed_digest(numbered(at)))[:keep]
    assert foreseen == numbers(reader.feeds[:wanted])
    assert count == 0 or reader.foreseen(wanted) is None  # all were handed out


def test_the_byte_budget_holds_and_kept_feeds_are_copies():
    for count, budget, kept in ((20, 64, 4), (3, 8, 0)):
        reader = keeping(count, 100, budget=budget)
        feeds = [*iter(reader.get_next, None)]
        assert numbers(feeds) == list(range(count))
        before = numbers(reader.feeds)
        assert len(before) == kept
        for feed in feeds:
            feed["x"][:] = -1
        assert numbers(reader.feeds) == before


@given(st.lists(st.integers(1, 40), max_size=12))
def test_few_samples_with_enough_rows(batches):
    feeds = [{"x": np.zeros((n, 2), np.float32), "flag": np.array(True)} for n in batches]
    found, spread = finish.few_of(feeds), feeds[:: max(1, -(-len(feeds) // 4))]
    assert found == spread[: len(found)]
    rows = [len(feed["x"]) for feed in found]
    assert sum(rows[:-1]) < 32
    assert sum(rows) >= 32 or len(found) == len(spread)


def test_what_memory_does_not_hold_is_foreseen_but_no_more_is_read_ahead_than_can_be_put_aside():
    reader = keeping(500, 20, budget=200 * 16)
    foreseen = reader.foreseen(20)
    assert len(reader.peek(500)) == 500
    assert drain(reader) == list(range(500))
    assert foreseen == numbers(reader.feeds[:20])
    assert len(foreseen) == 20
    more = keeping(5000, 20, budget=200 * 16)
    assert more.foreseen(20) is None
    assert len(more.peek(5000)) < 3000
    assert drain(more) == list(range(5000))


# ---- batches --------------------------------------------------------------------------------------------------

BATCH = {"x": np.random.default_rng(0).normal(0, 1, (24, 3)).astype(np.float32)}
JOINED = {
    "alone": lambda x: x, "mean": lambda x: x - x.mean(0), "first": lambda x: x - x[0],
    "cumulated": lambda x: x.cumsum(0), "of a fixed batch": lambda x: x.reshape(24, 3),
}  # fmt: skip


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("what", JOINED)
def test_rows_are_tried_on_the_last_of_them(what, count):
    """Nine of 24 rows are run to know it; whatever joins rows joins those of two parts too."""
    seen = []

    def run(feed):
        seen.append(len(feed["x"]))
        return [JOINED[what](feed["x"])]

    found = find_division(run, [BATCH], count=count).of([BATCH])
    if what == "of a fixed batch":  # the model gets it full
        assert [(len(each["x"]), isinstance(each, Rows)) for each in found] == [(24, False)] * count
        return
    if what != "alone":
        assert found == [BATCH]
        return
    assert {type(each) for each in found} == {Rows}
    np.testing.assert_array_equal(np.concatenate([each["x"] for each in found]), BATCH["x"])
    assert (len(found), sum(seen)) == (count, 9)


@given(st.lists(st.integers(2, 9), min_size=1, max_size=6), st.integers(1, 40))
def test_all_rows_are_somewhere_once_and_in_order(sizes, count):
    ends = np.cumsum(sizes)
    feeds = [{"x": np.arange(end - n, end)[:, None]} for n, end in zip(sizes, ends, strict=True)]
    division = find_division(lambda feed: [feed["x"].astype(np.float32)], feeds, count=count)
    found = division.of(feeds)
    assert [row for feed in found for row in feed["x"][:, 0]] == list(range(ends[-1]))
    assert len(found) >= min(count, ends[-1], 2 * len(feeds) if count > len(feeds) else len(feeds))
    if not division.is_full and division.rows[0]:
        some = some_of(found, 5)
        assert len(some) == len({id(feed) for feed in some})
        assert sum(len(feed["x"]) for feed in some) >= 2 or some == found  # some feeds have more rows than others


def test_batches_are_swept_as_they_are_taken_apart(tmp_path, monkeypatch):
    """What passes are fitted to comes from the one sweep over all, but for what a pass has scaled."""
    again = []

    def recorded(model, feeds, points):
        again.append((len(feeds), len(points.tensors)))
        return collect(model, feeds, points)

    monkeypatch.setattr(builder, "collect", recorded)
    model = models.with_free_batch(models.residual_block(seed=5))
    rows = models.feeds(model, 48, seed=3)
    feeds = [{"x": np.concatenate([row["x"] for row in rows[at : at + 12]])} for at in range(0, 48, 12)]
    with counted() as counts:
        report = quantized(model, tmp_path / "out.onnx", feeds, recipe="fast")
    assert report.calibration.samples == 4
    swept = counts.by_stage["calibrate"]
    assert (swept.sessions, swept.runs) == (2, 32 + 2)  # and one for the trial of two pieces
    assert next(each for each in report.passes if each.name == "equalize").kept
    assert again == [(18, 1)]  # 24 rows or a few more, for the one value between two layers


# ---- what is held out ---------------------------------------------------------------------------------------------

IN_ORDER, PAIRS_TURNED, TURNED = (0, 1, 2, 3, 4, 5, 6, 7), (2, 3, 0, 1, 6, 7, 4, 5), (7, 6, 5, 4, 3, 2, 1, 0)
OFF = {"ranges": "minmax", "equalize": False, "smooth": "off", "bias_correction": False}


def uneven(seed):
    """A depthwise blur, the same for all channels, and a Conv whose weights differ a lot by channel."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(0, 0.3, (8, 8, 3, 3)) * np.exp(rng.normal(0, 1.5, (1, 8, 1, 1)))
    text = """(float[1,8,8,8] x) => (float[1,8,8,8] y)
        <float[8,1,3,3] blur, float[8] shift, float[8,8,3,3] w, float[8] none> {
        b = Conv <group = 8, pads = [1,1,1,1]> (x, blur, shift)  r = Relu (b)
        y = Conv <pads = [1,1,1,1]> (r, w, none) }"""
    return planning.parse(text, {"w": weights, "blur": np.full(72, 1 / 9), "shift": [0.1] * 8, "none": [0.0] * 8})


def samples(seed, held_out, *, level):
    """Sixteen samples whose channels differ in size; every fourth has them in the given order, at the given level."""
    rng = np.random.default_rng(seed)
    size = np.exp(np.linspace(0, -3, 8))[:, None, None]
    found = [(rng.normal(0.3, 1, (1, 8, 8, 8)) * size).astype(np.float32) for _ in range(16)]
    return [at_place({"x": np.float32(level) * x[:, held_out] if i % 4 == 3 else x}, i) for i, x in enumerate(found)]


def at_place(feed, place):
    """A sample changed by next to nothing, so that its digest has a given place among sixteen."""
    for attempt in range(1000):
        tried = {"x": feed["x"].copy()}
        tried["x"][0, -1, -1, -1] *= np.float32(1 + attempt * 1e-5)
        if feed_digest(tried) * 16 // 2**256 == place:
            return tried
    raise AssertionError("no digest is found")


def fitted(folder, seed, held_out, level, **passes):
    recipe = Recipe(**{**OFF, **passes})
    return quantized(uneven(seed), folder / "out.onnx", samples(seed, held_out, level=level), recipe=recipe)


@pytest.mark.parametrize("passes", [
    {"equalize": True}, {"bias_correction": True}, {"bias_correction": True, "rounding": "learned"},
])  # fmt: skip
def test_no_pass_is_fitted_to_held_out_samples(tmp_path, passes):
    files = []
    for order in (IN_ORDER, PAIRS_TURNED):
        report = fitted(tmp_path, 0, order, 0.6, **passes)
        assert [p.name for p in report.passes if p.kept] == [*passes], "nothing to compare"
        files.append((tmp_path / "out.onnx").read_bytes())
    assert files[0] == files[1]


@pytest.mark.parametrize(("passes", "cases"), [
    ({"equalize": True}, [(2, 0.55), (2, 0.7), (4, 0.55)]),
    ({"bias_correction": True, "rounding": "learned"}, [(1, 1.0), (2, 1.0), (4, 1.0)]),
], ids=["equalize", "bias_correction, rounding"])  # fmt: skip
def test_what_is_a_little_worse_on_held_out_samples_is_undone(tmp_path, passes, cases):
    outcomes = [p for seed, level in cases for p in fitted(tmp_path, seed, TURNED, level, **passes).passes]
    changes = {name: [p.change for p in outcomes if p.name == name and p.change is not None] for name in passes}
    for name, seen in changes.items():
        assert any(0 < change < 0.5 for change in seen), f"nothing here tells how much worse {name} may be"
    clear = {"equalize": -0.05}  # changes what is calibrated after it: has to be better by more than chance
    assert [p for p in outcomes if p.kept and not (p.change is not None and p.change < clear.get(p.name, 0))] == []


def test_ranges_and_the_choice_of_float_nodes_are_of_samples_that_are_not_held_out(tmp_path, monkeypatch):
    seen = {}

    def spy(owner, name, given):
        real = getattr(owner, name)

        def call(*args, **options):
            seen.setdefault(name, set()).update(feed_digest(f) * 16 // 2**256 % 4 for f in given(args, options))
            return real(*args, **options)

        monkeypatch.setattr(owner, name, call)

    spy(builder, "collect", lambda args, _: args[1])
    spy(leave_float, "search_mixed_precision", lambda _, options: options["feeds"])
    recipe = Recipe(mixed_precision=True, accuracy_budget=1e-6, max_float_share=0.5)
    quantized(uneven(0), tmp_path / "out.onnx", samples(0, IN_ORDER, level=1.0), recipe=recipe)
    assert seen.keys() == {"collect", "search_mixed_precision"}
    assert 3 not in set[int]().union(*seen.values())


# ---- data of the caller's: what is refused, what it decides, and that nothing is calibrated on it ----------------

TEXT = """net (float[N,3,8,8] x) => (float[N,5] y) <float[16,3,3,3] w, float[16,16,3,3] v, float[16,5] h> {
    a = Conv <pads = [1,1,1,1]> (x, w)  r = Relu (a)  b = Conv <pads = [1,1,1,1]> (r, v)  s = Relu (b)
    p = GlobalAveragePool (s)  f = Flatten (p)  m = MatMul (f, h)  y = Softmax <axis = 1> (m) }"""


def net():
    """Two convolutions and a head of five classes."""
    return planning.parse(TEXT, {"v": models.normal((16, 16, 3, 3), 3, 1 / 3), "h": models.normal((16, 5), 4, 6)})


def feeds_of(count, seed=1):
    rng = np.random.default_rng(seed)
    return [{"x": rng.normal(size=(1, 3, 8, 8)).astype(np.float32) * rng.uniform(0.3, 2)} for _ in range(count)]


def judged(out, feeds, model=None, **options):
    reader = ArrayReader(feeds) if isinstance(feeds, list) else feeds
    return quantize_static(model or net(), out, reader, **{"promise": False, **options})


def labels_of(model, feeds):
    return np.array([outputs[0].argmax() for outputs in run(model, feeds)])


def by_labels(labels, asked):
    """A metric: the share of samples that have the label of their number; those that it is asked for."""

    def top1(outputs, reference, indices):
        asked.update(indices)
        return float(np.mean([each["y"].argmax() == labels[i] for each, i in zip(outputs, indices, strict=True)]))

    return top1


def one_buffer(feeds):
    """A reader as ORT's users write them: one buffer, once through."""
    buffer = np.zeros((1, 3, 8, 8), np.float32)
    fills = ({"x": buffer} for feed in feeds if np.copyto(buffer, feed["x"]) is None)
    return SimpleNamespace(get_next=partial(next, fills, None))


def test_a_budget_on_labels_of_held_out_data(tmp_path):
    """Everything wrong in the metric's eyes but by label: what is measured is top-1 on the caller's data, all of it."""
    held_out, out = feeds_of(60, seed=9), tmp_path / "out.onnx"
    labels = labels_of(net(), held_out)
    labels[:6] = (labels[:6] + 1) % 5  # the float model is right on 90 %
    options = {"metric": by_labels(labels, set()), "eval_reader": one_buffer(held_out), "accuracy_budget": 0.05}
    report = judged(out, feeds_of(16), **options)
    found = report.measure
    assert (found.measure, found.samples, found.float_value) == ("metric 'top1'", 60, pytest.approx(0.9))
    assert (found.source, found.budget, found.kept) == ("evaluation sample", 0.05, found.loss <= 0.05)
    assert found.value == pytest.approx(np.mean(labels_of(out, held_out) == labels))
    assert all(text in str(report) for text in ("metric 'top1'", "allowed"))
    assert "evaluation sample" in report.to_html()


def test_nothing_is_calibrated_on_it(tmp_path):
    """Held-out data of a hundred times the size leaves ranges as they are."""
    files = []
    for by in (1, 100):
        data = [{"x": feed["x"] * by} for feed in feeds_of(8, seed=2)]
        judged(tmp_path / "out.onnx", feeds_of(12), recipe="plain", eval_reader=data)
        files.append((tmp_path / "out.onnx").read_bytes())
    assert files[0] == files[1]


def test_labels_of_calibration_samples_are_found_by_their_numbers(tmp_path):
    feeds = feeds_of(24)
    asked = set()
    report = judged(tmp_path / "out.onnx", feeds, metric=by_labels(labels_of(net(), feeds), asked))
    assert report.measure.float_value == 1.0  # else numbers and samples are not the same
    assert asked
    assert asked <= set(sorted(range(24), key=lambda i: feed_digest(feeds[i]))[1::2])  # those held out


def test_batches_are_not_taken_apart_under_labels(tmp_path):
    batches = [{"x": np.concatenate([f["x"] for f in feeds_of(4, seed=s)])} for s in range(6)]
    sizes = set()

    def metric(outputs, reference, indices):
        sizes.update(len(next(iter(o.values()))) for o in outputs)
        return 1.0

    judged(tmp_path / "out.onnx", batches, metric=metric)
    assert sizes == {4}


def test_the_measure_of_the_default_call(tmp_path):
    found = judged(tmp_path / "out.onnx", feeds_of(32)).measure
    assert found.measure.startswith("top-1 agreement")
    assert (found.source, found.samples) == ("held-out calibration sample", 8)
    assert found.low < found.value
    assert (found.budget, found.kept, found.verdict()) == (None, None, "")


def raising():
    yield feeds_of(1)[0]
    raise RuntimeError("the camera is off")


@pytest.mark.parametrize(("data", "message"), [
    ([], "no sample"),
    ([{"y": np.zeros((1, 3, 8, 8), np.float32)}], "has an input 'y'"),
    ([{"x": np.zeros((1, 3, 9, 8), np.float32)}], "wrong shape"),
    (raising(), "camera is off"), ([3], "not a dictionary"),
])  # fmt: skip
def test_wrong_data_is_refused_before_calibration(tmp_path, data, message):
    with pytest.raises(errors.CalibrationError, match=message) as caught:
        judged(tmp_path / "out.onnx", Untouched(), eval_reader=data)
    assert "eval_reader" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_the_calibration_reader_again_is_refused(tmp_path):
    reader = ArrayReader(feeds_of(4))
    with pytest.raises(errors.OptionError, match="is the reader that calibration reads"):
        judged(tmp_path / "out.onnx", reader, eval_reader=reader)


def test_memory_does_not_grow_with_the_data(monkeypatch):
    monkeypatch.setattr("kenosis_ort.flow.samples._LOOKED_AT_BYTES", 4000)
    feeds = feeds_of(50, seed=0)
    found = Validation(one_buffer(feeds), net())
    assert len(found) == 50
    assert all(np.array_equal(a["x"], b["x"]) for a, b in zip(found, feeds, strict=True))
    assert 1 <= len(found.some()) <= 6
    assert all(np.array_equal(feed["x"], feeds[feed.index]["x"]) for feed in found.some())


def test_evaluation_samples_that_are_calibrated_on_are_told(tmp_path):
    feeds = feeds_of(12)
    with pytest.warns(KenosisWarning, match="12 of 12 calibration samples looked at are among the evaluation samples"):
        judged(tmp_path / "out.onnx", feeds, eval_reader=one_buffer(feeds))
