"""Which layers get 8 bits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.weights.block_model import much_worse, output_errors, worth_their_bytes
from tests import models
from tests.flow.support import changed
from tests.planning import parse

LAYERS = st.dictionaries(
    st.sampled_from("abcdefgh"), st.tuples(st.floats(1e-9, 1.0), st.integers(16, 10_000)), min_size=1
)


@given(LAYERS)
def test_the_dearest_by_byte_get_more_and_no_more_than_a_tenth_of_all(layers: dict[str, tuple[float, int]]):
    errors, sizes = {n: e for n, (e, _) in layers.items()}, {n: s for n, (_, s) in layers.items()}
    chosen = worth_their_bytes(errors, sizes)
    assert sum(sizes[name] for name in chosen) <= 0.1 * sum(sizes.values())
    average = sum(errors.values()) / sum(sizes.values())
    assert all(errors[name] / sizes[name] > 1.5 * average for name in chosen)


def test_a_small_layer_that_costs_much_gets_more():
    errors, sizes = {"value": 0.2, "gate": 0.3, "up": 0.3}, {"value": 100, "gate": 1000, "up": 1000}
    assert worth_their_bytes(errors, sizes) == {"value"}
    assert worth_their_bytes({"a": 0.9, "b": 0.95, "c": 0.1}, {"a": 150, "b": 190, "c": 1660}) == {"a"}, "room for one"


def test_what_is_far_above_the_middle_is_much_worse():
    assert much_worse({"a": -20.0, "b": -21.0, "c": -10.0}) == {"c"}
    assert much_worse({"a": -20.0, "c": -10.0}) == frozenset()


def test_a_layer_alone_is_told_by_the_outputs_and_not_by_states():
    model = parse("""(float[2,16] x, float[2,16] past_0) => (float[2,16] y, float[2,16] present_0)
        <float[16,16] loud, float[16,16] quiet>
        { [loud] y = MatMul(x, loud) [quiet] present_0 = MatMul(past_0, quiet) }""")
    feeds = models.feeds(model, 3)
    found = output_errors(model, lambda name: changed(model, **{name: 1.5}), ["loud", "quiet"], feeds)
    assert found["loud"] == pytest.approx(0.25, rel=0.2)
    assert found["quiet"] == 0.0
