"""The one runner: what it keeps, what it undoes, what it survives, and what it records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import onnx
import pytest

from kenosis_ort.flow.call import Call
from kenosis_ort.graph.load import LoadedModel
from kenosis_ort.passes.contract import Candidate, Context, Pass, Skipped, State, WeightPass
from kenosis_ort.passes.evaluator import Score
from kenosis_ort.passes.runner import PassRunner
from kenosis_ort.rewrite.prepare import PreparedModel
from tests import models

MODEL = models.bn_net()
ERRORS = {"start": 1.0, "better": 0.5, "slightly": 0.99, "worse": 2.0}


class Evaluator:
    """Knows the error of a state by the name of its graph."""

    measure = "error"

    def __init__(self, samples: int = 8) -> None:
        self.feeds = [{}] * samples
        self.asked: list[str] = []

    def score(self, model: onnx.ModelProto) -> Score:
        self.asked.append(model.graph.name)
        return Score(ERRORS[model.graph.name], (ERRORS[model.graph.name],) * len(self.feeds))

    def halved(self) -> tuple[list[Any], Evaluator]:
        return self.feeds[::2], Evaluator(len(self.feeds) // 2)


def named(name: str) -> State:
    model = onnx.ModelProto()
    model.graph.name = name
    return State(PreparedModel(model))


@dataclass(frozen=True)
class Rename(Pass):
    name: ClassVar[str] = "rename"
    title: ClassVar[str] = "Renaming"
    to: str = "better"

    @property
    def wanted(self) -> bool:
        return True

    def apply(self, state: State, statistics: Any, context: Context) -> Candidate | Skipped:
        return Candidate(named(self.to), f"named {self.to}")


class Careful(Rename, WeightPass):
    pass


class Raises(Rename):
    def apply(self, state: State, statistics: Any, context: Context) -> Candidate | Skipped:
        raise IndexError("out of names")


class Nothing(Rename):
    def apply(self, state: State, statistics: Any, context: Context) -> Candidate | Skipped:
        return Skipped("no better name")


class Decided(Rename):
    def apply(self, state: State, statistics: Any, context: Context) -> Candidate | Skipped:
        return Candidate(named(self.to), "as found", decided=True)


class Fits(Rename):
    fits_means: ClassVar[bool] = True
    given: ClassVar[list[tuple[int, int]]] = []

    def apply(self, state: State, statistics: Any, context: Context) -> Candidate | Skipped:
        self.given.append((len(context.fit), len(context.evaluator.feeds)))
        return super().apply(state, statistics, context)


def run(*passes: Pass, state: State | None = None, **given: Any) -> tuple[State, PassRunner, Call]:
    call = Call(loaded=LoadedModel(MODEL, None, "m"), request=None)  # type: ignore[arg-type]
    unused: Any = None
    context = Context(
        fit=given.pop("fit", [{}] * 8),
        evaluator=given.pop("evaluator", Evaluator()),
        build_of=lambda s: type("Build", (), {"quantized": s.prepared.proto})(),
        **dict.fromkeys(("quantize", "prove", "plan", "fitted_ranges"), unused),
        **given,
    )
    runner = PassRunner(context, call.attempt)
    return runner.run(passes, state or named("start")), runner, call


@pytest.mark.parametrize(
    ("each", "name", "kept"),
    [
        (Rename("better"), "better", True),
        (Rename("slightly"), "slightly", True),
        (Rename("worse"), "start", False),
        (Careful("better"), "better", True),
        (Careful("slightly"), "start", False),
        (Decided("worse"), "worse", True),
        (Nothing(), "start", False),
    ],
)
def test_what_is_better_is_kept(each: Pass, name: str, kept: bool) -> None:
    state, runner, _ = run(each)
    assert state.prepared.proto.graph.name == name
    (outcome,) = runner.outcomes
    assert outcome.kept is kept
    assert outcome.reason
    if not isinstance(each, Nothing):
        assert (outcome.error_before, outcome.error_after) == (1.0, ERRORS[each.to])  # type: ignore[attr-defined]


def test_what_raises_is_undone_told_and_recorded() -> None:
    state, runner, call = run(Raises(), Rename("better"))
    assert state.prepared.proto.graph.name == "better"
    assert [outcome.kept for outcome in runner.outcomes] == [False, True]
    assert "Renaming failed" in call.warnings[0]


def test_what_the_caller_insists_on_is_kept_unseen() -> None:
    evaluator = Evaluator(0)
    state, runner, _ = run(Careful("worse"), forced=frozenset({"rename"}), evaluator=evaluator)
    assert state.prepared.proto.graph.name == "worse"
    assert runner.outcomes[0].reason.endswith("as asked")
    assert not evaluator.asked


def test_too_few_samples_to_evaluate_on() -> None:
    state, runner, _ = run(Careful("better"), evaluator=Evaluator(3))
    assert state.prepared.proto.graph.name == "start"
    assert "3 held-out calibration samples are too few" in runner.outcomes[0].reason


def test_a_state_is_scored_once() -> None:
    evaluator = Evaluator()
    run(Rename("better"), Rename("worse"), Nothing(), evaluator=evaluator)
    assert evaluator.asked == ["start", "better", "worse"]


@pytest.mark.parametrize(("fit", "expected"), [(8, (12, 4)), (16, (16, 8))])
def test_means_are_fitted_to_more_of_few_samples(fit: int, expected: tuple[int, int]) -> None:
    Fits.given.clear()
    run(Fits(), fit=[{}] * fit)
    assert Fits.given == [expected]


def test_statistics_are_collected_where_a_pass_wants_them() -> None:
    value = next(node.output[0] for node in MODEL.graph.node if node.op_type == "Conv")

    class Counts(Rename):
        def points(self, state: State, context: Context) -> Mapping[str, int]:
            return {value: 1}

        def apply(self, state: State, statistics: Any, context: Context) -> Candidate | Skipped:
            return Skipped(f"{statistics[value].channels} channels")

    _, runner, _ = run(
        Counts(), state=State(PreparedModel(onnx.shape_inference.infer_shapes(MODEL))), fit=models.feeds(MODEL, 2)
    )
    assert runner.outcomes[0].reason == "8 channels"
