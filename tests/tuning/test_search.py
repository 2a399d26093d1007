"""Which moves are made: on a made-up clock."""

from __future__ import annotations

import json

import onnx
import pytest

from kenosis_ort.bench.noise import Verdict
from kenosis_ort.errors import VerificationError
from kenosis_ort.tuning.moves import Move, Moves, Stage, add_move, label, recall
from kenosis_ort.tuning.search import search
from tests.tuning.fakes import FakeStadium, net

A, B, C = (Move(name, "rewrite") for name in "ABC")
P1, P2 = (Move(f"prefix {n}", "prefix", data=("conv",) * n, group="prefix") for n in (1, 2))
W = Move("weights", "weight-only", alone=True)


class Costs(dict):
    """Time by name of a combination: the product of its moves' factors."""

    def __init__(self, base: float, factors: dict[Move, float]) -> None:
        super().__init__()
        self.base, self.factors = base, {move.name: factor for move, factor in factors.items()}

    def __missing__(self, name: str) -> float:
        seconds = self.base
        for part in name.split(" + "):
            seconds *= self.factors.get(part, 1.0)
        return seconds


def build(moves: Moves) -> onnx.ModelProto:
    return net(label(moves))


def run(factors: dict[Move, float], *, spread: float = 0.01, budget_s: float = 1000.0, seed: int = 0, make=build):
    stadium = FakeStadium(Costs(0.01, factors), spread=spread, seed=seed)
    return search(list(factors), make, stadium.track(seed=seed), budget_s=budget_s)


def names(result) -> list[str]:
    return [move.name for move in result.accepted]


def test_moves_that_pay_are_made_together():
    result = run({A: 0.8, B: 1.3, C: 0.9})
    assert names(result) == ["A", "C"]
    assert result.model.graph.name == "A + C"
    assert result.gain.verdict is Verdict.FASTER
    assert result.gain.ratio == pytest.approx(1 / 0.72, rel=0.05)
    assert result.complete
    assert not result.noisy
    assert {t.moves: t.stage for t in result.trials}["A",] is Stage.ACCEPTED
    assert {t.moves: t.stage for t in result.trials}["B",] is Stage.SCREENED


def test_of_a_group_only_one_is_made():
    result = run({P1: 0.9, P2: 0.7})
    assert names(result) == ["prefix 2"]


def test_a_move_that_goes_alone_replaces_the_others():
    assert names(run({A: 0.9, W: 0.5})) == ["weights"]
    assert names(run({A: 0.5, W: 0.9})) == ["A"]


@pytest.mark.parametrize("seed", range(8))
def test_noise_is_not_accepted(seed: int):
    result = run(dict.fromkeys((A, B, C, P1, P2), 1.0), spread=0.03, seed=seed)
    assert names(result) == []
    assert result.gain is None
    assert result.model.graph.name == "as planned"


@pytest.mark.parametrize("seed", range(3))
def test_a_noisy_machine_keeps_the_plan_and_it_is_said(seed: int):
    result = run({A: 0.9, B: 0.8}, spread=0.6, seed=seed)
    assert names(result) == []
    assert result.noisy


class Fading(Costs):
    """A move that gains while its first few sessions run, and nothing later."""

    lasts = 0

    def __getitem__(self, name: str) -> float:
        if name == "A":
            self.lasts -= 1
        return self.base if name != "A" or self.lasts < 0 else 0.7 * self.base


@pytest.mark.parametrize("lasts", [3, 6])  # sessions: of the screening, and of the race against the model so far
def test_a_gain_that_does_not_last_is_not_made(lasts: int):
    fading = Fading(0.01, {})
    fading.lasts = lasts
    result = search([A], build, FakeStadium(fading).track(), budget_s=1000)
    assert not result.accepted
    assert result.gain is None
    assert [t.stage for t in result.trials] == [Stage.REFUTED] if lasts == 3 else [Stage.ACCEPTED, Stage.REFUTED]
    assert result.model.graph.name == "as planned"


def test_a_candidate_that_fails_is_dropped_and_named():
    def make(moves: Moves) -> onnx.ModelProto | None:
        if A in moves:
            raise VerificationError("does not fit")
        return None if B in moves else build(moves)

    result = run({A: 0.1, B: 0.1, C: 0.8}, make=make)
    assert names(result) == ["C"]
    reasons = {t.moves: t.reason for t in result.trials if t.stage is Stage.DROPPED}
    assert reasons["A",] == "it cannot be built: does not fit"
    assert "no such form" in reasons["B",]


def test_a_candidate_that_does_not_run_is_dropped_with_the_message():
    stadium = FakeStadium({"as planned": 0.01, "A": RuntimeError("INVALID_GRAPH")})
    result = search([A], build, stadium.track(), budget_s=100)
    assert result.trials[0].stage is Stage.DROPPED
    assert "INVALID_GRAPH" in result.trials[0].reason


@pytest.mark.parametrize("budget_s", [0.0, 0.5, 2.0, 10.0])
def test_the_budget_is_kept(budget_s: float):
    result = run(dict.fromkeys((A, B, C, P1, P2), 0.9), budget_s=budget_s)
    assert result.seconds <= budget_s + 0.5
    if budget_s == 0:
        assert not result.complete


def test_without_moves_nothing_is_timed():
    result = run({})
    assert result.seconds == 0
    assert result.complete


def test_the_seed_decides():
    first, again = (run({A: 0.95, B: 0.97, C: 1.0}, spread=0.02, seed=3) for _ in range(2))
    assert first.to_dict() == again.to_dict()


def test_the_result_can_be_kept_and_recalled():
    result = run({A: 0.8, P1: 0.9, B: 1.2})
    data = json.loads(json.dumps(result.to_dict()))
    assert recall(data, [A, B, P1]) == result.accepted
    with pytest.raises(KeyError):
        recall(data, [B])
    with pytest.raises(TypeError):
        recall({"accepted": "A"}, [A])


def test_names_have_to_differ():
    with pytest.raises(ValueError, match="name"):
        search([A, Move("A", "prefix")], build, FakeStadium({}).track(), budget_s=1)


def test_a_plan_that_cannot_be_built_is_an_error():
    with pytest.raises(VerificationError, match="cannot be built"):
        run({A: 0.5}, make=lambda moves: None)


def test_combinations():
    assert add_move(frozenset({A, P1}), P2) == {A, P2}
    assert add_move(frozenset({A, P1}), W) == {W}
    assert add_move(frozenset({W}), A) == {A}
    assert label({B, A}) == "A + B"
