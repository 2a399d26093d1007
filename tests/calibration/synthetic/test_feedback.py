"""Recurrent states and past keys and values come from the model's own outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from kenosis_ort.calibration.synthetic import SyntheticReader
from kenosis_ort.calibration.synthetic.reader import SAMPLES_A_SEQUENCE, STEPS_A_SAMPLE
from kenosis_ort.errors import CalibrationError
from tests.calibration.synthetic.support import model_of

F, I64 = TensorProto.FLOAT, TensorProto.INT64


def counter(state: str = "state", new: str = "stateN", step: float = 1.0) -> onnx.ModelProto:
    """A net whose state counts the steps."""
    nodes = [
        helper.make_node("Add" if step < 2 else "Mul", [state, "one"], [new]),
        helper.make_node("Identity", ["x"], ["out"]),
    ]
    inputs = [("x", F, [1, 8]), (state, F, [1, 2])]
    outputs = [("out", F, [1, 8]), (new, F, [1, 2])]
    return model_of(*inputs, nodes=nodes, constants=[("one", np.full((1, 2), step, np.float32))], outputs=outputs)


@pytest.mark.parametrize(("state", "new"), [("state", "stateN"), ("h0", "hn"), ("hidden_in", "result")])
def test_states_are_fed_back(state: str, new: str) -> None:
    reader = SyntheticReader(counter(state, new), samples=40)
    counts = [float(reader.feed(i)[state][0, 0]) for i in range(40)]
    assert counts == [(i % SAMPLES_A_SEQUENCE) * STEPS_A_SAMPLE for i in range(40)]
    assert [float(reader.feed(i)[state][0, 0]) for i in (9, 2, 33)] == [counts[i] for i in (9, 2, 33)]
    assert "its own" in reader.assumptions[1] or "model's own" in reader.assumptions[1]


def test_a_state_without_an_output_is_zero_and_a_guess() -> None:
    model = counter()
    del model.graph.output[1]
    reader = SyntheticReader(model, samples=20)
    assert not reader.feed(15)["state"].any()
    assert reader.provenance.known["state"].value == "a guess"


def test_a_given_range_overrides_feedback() -> None:
    reader = SyntheticReader(counter(), samples=20, input_ranges={"state": (5, 6)})
    assert 5 <= reader.feed(3)["state"].min() <= reader.feed(3)["state"].max() <= 6


def test_states_that_explode_are_an_error() -> None:
    model = counter(step=1e30)
    model.graph.node[0].CopyFrom(helper.make_node("Exp", ["state"], ["stateN"]))
    with pytest.raises(CalibrationError, match="grow beyond all bounds"):
        SyntheticReader(model, samples=20).feed(15)


def decoder() -> onnx.ModelProto:
    """Keys of the tokens' embeddings, appended to the past ones."""
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["rows"]),
        helper.make_node("Unsqueeze", ["rows", "one"], ["new"]),
        helper.make_node("Concat", ["past_key_values.0.key", "new"], ["present.0.key"], axis=2),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=F),
        helper.make_node("ReduceSum", ["present.0.key"], ["sums"], keepdims=0, axes=None),
        helper.make_node("ReduceSum", ["mask"], ["seen"], keepdims=0),
        helper.make_node("Add", ["sums", "seen"], ["out"]),
    ]
    inputs: list[Any] = [
        ("input_ids", I64, ["batch", "sequence"]),
        ("attention_mask", I64, ["batch", "past_sequence + sequence"]),
        ("position_ids", I64, ["batch", "sequence"]),
        ("past_key_values.0.key", F, ["batch", 1, "past_sequence", 4]),
    ]
    outputs = [("out", F, []), ("present.0.key", F, ["batch", 1, "total", 4])]
    table = np.arange(400, dtype=np.float32).reshape(100, 4) + 1
    return model_of(*inputs, nodes=nodes, constants=[("table", table), ("one", np.array([1]))], outputs=outputs)


def test_past_keys_are_those_of_tokens() -> None:
    model = decoder()
    del model.graph.node[4].attribute[:]
    reader = SyntheticReader(model, samples=8)
    feed = reader.feed(0)
    steps, past = feed["input_ids"].shape[1], feed["past_key_values.0.key"].shape[2]
    assert feed["attention_mask"].shape == (1, past + steps)
    assert feed["position_ids"][0].tolist() == list(range(past, past + steps))
    assert (feed["past_key_values.0.key"] >= 1).all()
    assert not np.array_equal(feed["input_ids"], reader.feed(1)["input_ids"])
