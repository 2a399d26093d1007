"""Which outputs are the next values of which inputs, by their names."""

from __future__ import annotations

import pytest
from onnx import TensorProto, helper

from kenosis_ort.graph.bodies import state_pairs, state_stem


@pytest.mark.parametrize(("past", "present"), [
    ("past_key", "present_key"), ("past_value", "present_value"), ("past_key_values.0.key", "present.0.key"),
    ("past_key_values.11.value", "present.11.value"), ("past_0_k", "present_0_k"), ("state", "stateN"),
    ("h_in", "h_out"), ("past_key_values", "present_key_values"), ("cache_3", "new_cache_3"),
])  # fmt: skip
def test_names_that_differ_in_time_alone_belong_together(past: str, present: str):
    assert state_stem(past) == state_stem(present) != ""


@pytest.mark.parametrize(("one", "other"), [
    ("past_key", "present_value"), ("past_key_values.0.key", "present.0.value"), ("past.1.key", "present.0.key"),
    ("logits", "past_key"),
])  # fmt: skip
def test_others_do_not(one: str, other: str):
    assert state_stem(one) != state_stem(other)


def test_a_key_and_a_value_of_one_layer_are_paired():
    def values(names: list[str], size: str) -> list:
        return [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2, size, 8]) for name in names]

    pasts, presents = ["past_key", "past_value"], ["present_key", "present_value"]
    graph = helper.make_graph([], "g", values(pasts, "past"), values(presents, "all"))
    assert state_pairs(helper.make_model(graph)) == dict(zip(presents, pasts, strict=True))


def test_what_an_input_is_concatenated_to_is_its_next_value_whatever_it_is_called():
    def values(names: list[str], size: str) -> list:
        return [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2, size, 8]) for name in names]

    nodes = [helper.make_node("Concat", [f"past_{i}", f"new_{i}"], [f"cat_{9 - i}"], axis=2) for i in range(2)]
    nodes.append(helper.make_node("Concat", ["a", "b"], ["both"], axis=2))  # of two inputs it is no one's
    nodes += [helper.make_node("Concat", ["c", "d"], [name], axis=2) for name in ("one", "other")]  # nor one of two
    pasts = values(["past_0", "past_1", "a", "b", "c"], "past")
    graph = helper.make_graph(nodes, "g", pasts, values(["cat_8", "cat_9", "both", "one", "other"], "all"))
    assert state_pairs(helper.make_model(graph)) == {"cat_9": "past_0", "cat_8": "past_1"}
