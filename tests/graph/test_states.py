"""Which outputs are the next values of which inputs, by their names."""

import pytest

from kenosis_ort.graph.bodies import state_pairs, state_stem
from tests.graph.build import net


@pytest.mark.parametrize(("past", "present"), [
    ("past_key", "present_key"), ("past_value", "present_value"), ("past_key_values.0.key", "present.0.key"),
    ("past_key_values.11.value", "present.11.value"), ("past_0_k", "present_0_k"), ("state", "stateN"),
    ("h_in", "h_out"), ("past_key_values", "present_key_values"), ("cache_3", "new_cache_3"),
    ("past.0.key", "present.0.key"), ("hidden_in", "hidden_out"),
])  # fmt: skip
def test_names_that_differ_in_time_alone_belong_together(past: str, present: str):
    assert state_stem(past) == state_stem(present) != ""


@pytest.mark.parametrize(("one", "other"), [
    ("past_key", "present_value"), ("past_key_values.0.key", "present.0.value"), ("past.1.key", "present.0.key"),
    ("logits", "past_key"), ("h0", "hn"), ("image", "boxes"), ("state", "output"),
])  # fmt: skip
def test_others_do_not(one: str, other: str):
    assert state_stem(one) != state_stem(other)


@pytest.mark.parametrize(("inputs", "outputs", "body", "pairs"), [
    ("past_key past_value", "present_key present_value", "",
     {"present_key": "past_key", "present_value": "past_value"}),
    ("input state", "output stateN", "", {"stateN": "state"}),
    ("past_h prev_h", "next_h", "", {}),
    ("state", "state_out new_state", "", {}),
    ("state more", "cat_1 stateN", "new = Neg(more) cat_1 = Concat<axis = 2>(state, new)", {"cat_1": "state"}),
    ("past_0 past_1 a b c", "cat_8 cat_9 both one other",
     """cat_9 = Concat<axis = 2>(past_0, new_0) cat_8 = Concat<axis = 2>(past_1, new_1)
     both = Concat<axis = 2>(a, b) one = Concat<axis = 2>(c, d) other = Concat<axis = 2>(c, d)""",
     {"cat_9": "past_0", "cat_8": "past_1"}),  # of two inputs it is no one's, nor of one twice
], ids=["of one layer", "nothing left of a name", "of two", "to two", "concatenated already",
        "concatenated, whatever they are called"])  # fmt: skip
def test_pairs_by_names(inputs: str, outputs: str, body: str, pairs: dict[str, str]):
    ins, outs = (", ".join(f"float[1,2,n,8] {name}" for name in names.split()) for names in (inputs, outputs))
    assert state_pairs(net(f"({ins}) => ({outs}) {{ {body} }}")) == pairs


def test_values_of_other_types_ranks_or_sizes_are_no_pair():
    for present in ("float16[1,2,n,8]", "float[2,n,8]", "float[1,2,n,4]"):
        assert not state_pairs(net(f"(float[1,2,n,8] past_key) => ({present} present_key) {{ }}"))
