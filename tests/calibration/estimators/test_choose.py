"""The choice between sets of ranges, by measured error."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kenosis_ort.calibration.estimators import choose_ranges
from kenosis_ort.errors import OptionError

Ranges = Mapping[str, tuple[float, float]]
NAMES = [f"t{i}" for i in range(6)]


def uniform(top: float) -> dict[str, tuple[float, float]]:
    return dict.fromkeys(NAMES, (0.0, top))


class Net:
    """Each tensor has a range it likes; the error is the sum of the distances."""

    def __init__(self, liked: Mapping[str, float]) -> None:
        self.liked = liked
        self.calls = 0

    def __call__(self, ranges: Ranges) -> float:
        self.calls += 1
        return 0.1 + sum(abs(ranges[name][1] - liked) for name, liked in self.liked.items())


def test_the_best_candidate() -> None:
    net = Net(dict.fromkeys(NAMES, 2.0))
    choice = choose_ranges({"a": uniform(5.0), "b": uniform(2.0), "c": uniform(3.0)}, net)
    assert (choice.method, choice.ranges, choice.error) == ("b", uniform(2.0), pytest.approx(0.1))
    assert choice.errors.keys() == {"a", "b", "c"}
    assert net.calls == choice.evaluations == 3


def test_the_first_is_kept_unless_another_is_clearly_better() -> None:
    choice = choose_ranges({"a": uniform(5.0), "b": uniform(2.0)}, lambda r: 1.0 if r["t0"][1] == 5.0 else 0.99)
    assert choice.method == "a"


def test_equal_candidates_are_evaluated_once() -> None:
    net = Net(dict.fromkeys(NAMES, 2.0))
    choose_ranges({"a": uniform(5.0), "b": uniform(5.0), "c": uniform(5.0)}, net)
    assert net.calls == 1


def test_tensors_of_different_taste() -> None:
    liked = {name: 5.0 if name in ("t0", "t1", "t2", "t4") else 2.0 for name in NAMES}
    choice = choose_ranges({"a": uniform(5.0), "b": uniform(2.0)}, Net(liked), evaluations=30)
    assert {name: top for name, (_, top) in choice.ranges.items()} == liked
    assert choice.exceptions == {"t3": "b", "t5": "b"}
    assert choice.error == pytest.approx(0.1)


@given(
    st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=6, max_size=6),
    st.integers(1, 25),
    st.permutations(["a", "b", "c"]),
)
@settings(max_examples=60, deadline=None)
def test_never_worse_than_the_best_candidate_tried(tops: list[float], budget: int, order: list[str]) -> None:
    net = Net(dict(zip(NAMES, tops, strict=True)))
    candidates = {"a": uniform(1.0), "b": uniform(2.0), "c": uniform(4.0)}
    choice = choose_ranges({name: candidates[name] for name in order}, net, evaluations=budget)
    assert net.calls <= budget
    assert choice.error <= min(choice.errors.values()) / 0.98
    assert choice.error == net(choice.ranges)
    for name, method in choice.exceptions.items():
        assert choice.ranges[name] == candidates[method][name]


def test_mixtures_need_a_second_opinion() -> None:
    liked = {name: 5.0 if name in ("t0", "t1", "t2", "t4") else 2.0 for name in NAMES}
    candidates = {"a": uniform(5.0), "b": uniform(2.0)}
    agreeing, other = Net(liked), Net({**liked, "t3": 5.0})
    assert choose_ranges(candidates, Net(liked), evaluations=30, confirm=agreeing).exceptions == {"t3": "b", "t5": "b"}
    choice = choose_ranges(candidates, Net(liked), evaluations=30, confirm=other)
    assert choice.exceptions == {"t5": "b"}
    assert other.calls > 0


def test_errors_that_are_no_numbers() -> None:
    choice = choose_ranges(
        {"a": uniform(5.0), "b": uniform(2.0)}, lambda r: math.nan if r["t0"][1] == 5.0 else 0.3, evaluations=2
    )
    assert (choice.method, choice.errors["a"]) == ("b", math.inf)
    assert choose_ranges({"a": uniform(5.0), "b": uniform(2.0)}, lambda r: math.nan).method == "a"


def test_no_candidates() -> None:
    with pytest.raises(OptionError, match="no candidate"):
        choose_ranges({}, lambda r: 0.0)
