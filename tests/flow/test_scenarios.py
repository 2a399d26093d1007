"""Which lengths a model is timed at."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kenosis_ort import KenosisWarning, OptionError, Speed, quantize_static
from kenosis_ort.flow.speed import scenarios
from tests.models import FeedReader
from tests.pace import Pace
from tests.planning import parse

DECODER = """net (int64[B,T] input_ids, int64[B,M] attention_mask, float[B,2,P,4] past) => (float[B,T,32] y)
    <float[50,32] table, float[32,32] w> {
    x = Gather (table, input_ids)
    wide = MatMul (x, w)
    y = Relu (wide) }"""
MASKED = """net (int64[B,T] ids, int64[B,T] mask) => (float[B,T,32] y) <float[50,32] table, float[32,32] w,
    int64[1] last = {-1}> {
    x = Gather (table, ids)
    numbers = Cast <to = 1> (mask)
    wide = Unsqueeze (numbers, last)
    seen = Mul (x, wide)
    y = MatMul (seen, w) }"""


def decoder_feed(tokens: int, past: int) -> dict[str, Any]:
    ids, mask = np.ones((1, tokens), np.int64), np.ones((1, tokens + past), np.int64)
    return {"input_ids": ids, "attention_mask": mask, "past": np.zeros((1, 2, past, 4), np.float32)}


def masked_feed(tokens: int) -> dict[str, Any]:
    return {"ids": np.arange(tokens)[None] % 50, "mask": np.ones((1, tokens), np.int64)}


def test_the_shortest_and_the_longest_feed_are_situations_where_they_are_far_apart() -> None:
    feeds = [decoder_feed(20, 0), decoder_feed(1, 20), decoder_feed(9, 0)]
    found, notes = scenarios(parse(DECODER), feeds)
    assert [(s.name, s.few_rows, len(s.feeds)) for s in found] == [
        ("input_ids of length 1", True, 1), ("input_ids of length 20", False, 1),
    ]  # fmt: skip
    assert found[0].feeds[0] is feeds[1]
    assert notes == []
    alike, _ = scenarios(parse(DECODER), [decoder_feed(20, 0), decoder_feed(9, 0)])
    assert [(s.name, s.few_rows, len(s.feeds)) for s in alike] == [("", False, 2)]


def test_the_growth_of_a_cache_is_no_other_situation() -> None:
    found, _ = scenarios(parse(DECODER.replace("int64[B,M] attention_mask, ", "")), [
        {k: v for k, v in decoder_feed(1, n).items() if k != "attention_mask"} for n in (1, 40)
    ])  # fmt: skip
    assert [(s.name, s.few_rows) for s in found] == [("", True)]


def test_lengths_that_are_asked_for_are_made_of_the_samples() -> None:
    found, notes = scenarios(parse(MASKED), [masked_feed(6)], (12, 1, 6))
    assert [s.name for s in found] == ["ids of length 1", "ids of length 6", "ids of length 12"]
    assert [s.feeds[0]["mask"].shape for s in found] == [(1, 1), (1, 6), (1, 12)]
    assert found[2].feeds[0]["ids"].tolist() == [[0, 1, 2, 3, 4, 5] * 2]
    assert [s.few_rows for s in found] == [True, True, False]
    assert notes == []
    (one,), _ = scenarios(parse(DECODER), [decoder_feed(8, 5)], (2,))
    assert {name: value.shape for name, value in one.feeds[0].items()} == {
        "input_ids": (1, 2), "attention_mask": (1, 7), "past": (1, 2, 5, 4),
    }  # fmt: skip


def test_lengths_that_cannot_be_made_are_told() -> None:
    fixed = parse("net (int64[B,T] ids) => (float[B,4,8] y) <float[50,8] t, int64[3] s = {0, 4, 8}> {"
                  " x = Gather (t, ids)\n y = Reshape (x, s) }")  # fmt: skip
    found, notes = scenarios(fixed, [{"ids": np.ones((1, 4), np.int64)}], (1,))
    assert (found[0].name, notes) == ("", ["no feed of length 1 could be made of the samples: not timed for it"])
    closed = parse("net (float[1,32] x) => (float[1,32] y) <float[32,32] w> { y = MatMul (x, w) }")
    found, notes = scenarios(closed, [{"x": np.ones((1, 32), np.float32)}], (1,))
    assert (len(found), found[0].few_rows, notes) == (
        1,
        True,
        ["no input of the model is of open length: timed as the samples are"],
    )


def test_images_have_no_few_rows() -> None:
    net = parse("net (float[1,3,8,8] x) => (float[1,4,8,8] y) <float[4,3,1,1] w> { y = Conv (x, w) }")
    (one,), _ = scenarios(net, [{"x": np.ones((1, 3, 8, 8), np.float32)}])
    assert not one.few_rows


def test_a_file_that_is_slower_for_single_tokens_is_not_delivered(pace: Pace, tmp_path: Any) -> None:
    net = parse(MASKED.replace("32]", "64]").replace("32,", "64,"))
    feeds = [masked_feed(n) for n in (1, 40, 1, 40)]

    def quantized(**options: Any) -> Any:
        return quantize_static(net, tmp_path / "out.onnx", FeedReader(feeds), recipe="plain", **options)

    pace.int8, pace.plain, pace.other = 3e-3, 6e-3, 9e-3
    assert quantized().speed.taken.name == "int8"
    pace.int8, pace.other = 9e-3, 2e-2
    with pytest.warns(KenosisWarning, match="for ids of length 1"):
        assert quantized().is_float
    pace.int8, pace.other = 3e-3, 1e-3
    report = quantized(sequence_lengths=(1, 8))
    assert report.speed.taken.name == "dynamic"
    assert "the fastest form here" in report.verdict()
    assert not report.is_float
    assert report.speed.candidates[0].status == "outrun"


def test_wrong_lengths() -> None:
    for lengths in ([0], "1", [1.5], 3):
        with pytest.raises(OptionError):
            Speed(sequence_lengths=lengths)  # type: ignore[arg-type]
