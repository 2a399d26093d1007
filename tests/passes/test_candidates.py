from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.errors import CalibrationError, VerificationError
from kenosis_ort.passes.model_runs import Candidates, Reference
from kenosis_ort.runtime.session import Here, Running, counted
from tests import models
from tests.models import Net


def scaled(by: float):
    net = Net()
    net.output(net.op("Mul", [net.input("x", [1, 4]), net.const(by)], name="y"), [1, 4])
    return net.model()


def test_a_candidate_is_loaded_once_and_run_once_on_a_sample():
    a, b, c = scaled(1.0), scaled(2.0), scaled(3.0)
    feeds = models.feeds(a, 3)
    candidates = Candidates()
    with counted() as counts:
        first = list(candidates.outputs(a, feeds[:2]))
        list(candidates.outputs(b, feeds))
        again = list(candidates.outputs(a, feeds))
    assert (counts.total.sessions, counts.total.runs) == (2, 6)
    for feed, outputs in zip(feeds, again, strict=True):
        np.testing.assert_array_equal(next(iter(outputs.values())), feed["x"])
    assert all(x is y for x, y in zip(first, again, strict=False))
    with counted() as counts:
        list(candidates.outputs(c, feeds, keep=False))
        list(candidates.outputs(c, feeds, keep=False))
        for known, outputs in zip(again, candidates.outputs(a, feeds), strict=True):
            assert known is outputs  # not among the latest two any more, and remembered
    assert (counts.total.sessions, counts.total.runs) == (1, 6)
    with counted() as counts:
        list(candidates.outputs(a, models.feeds(a, 1, seed=9)))  # its session was let go of
    assert (counts.total.sessions, counts.total.runs) == (1, 1)


def test_outputs_beyond_the_bytes_that_are_kept_are_computed_again(monkeypatch: pytest.MonkeyPatch):
    model = scaled(1.0)
    feeds = models.feeds(model, 3)
    monkeypatch.setattr("kenosis_ort.passes.model_runs._MOST_OUTPUTS", 2 * 4 * 4)  # of two samples of four floats
    candidates = Candidates()
    with counted() as counts:
        list(candidates.outputs(model, feeds))
        list(candidates.outputs(model, feeds))
    assert counts.total.runs == 4


def test_equal_candidates_are_told_apart_by_identity():
    a, b = scaled(1.0), scaled(1.0)
    feeds = models.feeds(a, 1)
    candidates = Candidates()
    (one,), (other,) = candidates.outputs(a, feeds), candidates.outputs(b, feeds)
    assert one is not other


class Eager(Here):
    """Asks for some feeds before the first outputs are looked at, as a cluster does."""

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self.opened: list[str] = []

    @property
    def ahead(self) -> int:
        return self._ahead

    def open(self, model: Any, **_: Any) -> Running:
        self.opened.append(model)
        return EagerRunning(model, self._ahead)


class EagerRunning(Running):
    def __init__(self, model: str, ahead: int) -> None:
        self.model, self.ahead = model, ahead

    def close(self) -> None:
        pass

    def runs(self, feeds: Iterable[Mapping[str, Any]], names: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        feeds = iter(feeds)
        early = list(itertools.islice(feeds, self.ahead))
        return ({"y": np.array([float(self.model), feed["x"]])} for feed in itertools.chain(early, feeds))


@given(st.lists(st.integers(0, 3), max_size=9), st.lists(st.integers(0, 3), max_size=9), st.integers(0, 4))
def test_what_is_known_and_what_is_computed_ahead_come_in_the_order_of_the_feeds(
    first: list[int], second: list[int], ahead: int
) -> None:
    candidates: Any = Candidates(executor=Eager(ahead))
    feeds = [{"x": number} for number in range(4)]
    for numbers in (first, second):
        found = list(candidates.outputs("1", [feeds[n] for n in numbers]))
        assert [int(outputs["y"][1]) for outputs in found] == numbers


@given(st.integers(0, 5), st.integers(0, 6))
def test_candidates_come_in_their_order_and_no_more_are_made_than_there_is_room_for(count: int, ahead: int) -> None:
    executor = Eager(ahead)
    candidates: Any = Candidates(executor=executor)
    feeds = [{"x": 0}, {"x": 1}]
    for number, outputs in enumerate(candidates.each((str(n) for n in range(count)), feeds)):
        assert len(executor.opened) == min(count, number + 1 + ahead)
        assert [found["y"].tolist() for found in outputs] == [[number, 0], [number, 1]]


# ---- the float model -------------------------------------------------------------------------------------------------


def net(noise: bool = False):
    made = Net()
    x = made.input("x", [1, 4])
    made.output(made.op("Relu", [x]), [1, 4])
    if noise:
        made.output(made.op("RandomNormalLike", [x]), [1, 4])
    return made.model()


@pytest.mark.parametrize(("stays_open", "sessions"), [(True, 1), (False, 3)])
def test_each_sample_is_run_once(stays_open: bool, sessions: int):
    reference, feeds = Reference(net(), stays_open=stays_open), models.feeds(net(), 3)
    with counted() as counts:
        first = reference.outputs(feeds)
        again = reference.outputs(feeds[::-1])[::-1]
        (alone,) = reference.run(feeds[0])
    assert (counts.total.sessions, counts.total.runs) == (sessions, 4)
    for a, b, feed in zip(first, again, feeds, strict=True):
        (name,) = a
        np.testing.assert_array_equal(a[name], np.maximum(feed["x"], 0))
        assert a[name] is b[name]
    np.testing.assert_array_equal(alone, np.maximum(feeds[0]["x"], 0))


def test_random_outputs_are_found_out_once():
    model = net(noise=True)
    reference, feeds = Reference(model), models.feeds(model, 2)
    with counted() as counts:
        found = reference.random(feeds[0])
        assert reference.random(feeds[1]) == found
    assert found == {reference.names[1]}
    assert counts.total.runs == 2


def test_what_does_not_run_is_told():
    with pytest.raises(CalibrationError, match="does not run") as told:
        Reference(net()).outputs([*models.feeds(net(), 1), {"x": np.zeros((1, 5), np.float32)}])
    assert told.value.where == "held-out sample 1"
    broken = net()
    broken.graph.node[0].op_type = "Unheard"
    with pytest.raises(VerificationError):
        Reference(broken).outputs(models.feeds(net(), 1))
