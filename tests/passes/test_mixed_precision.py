"""The search leaves the nodes around the bad tensor float, and they are float in the runtime's graph."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest

from kenosis_ort.accuracy.metric import Budget, Metric, check_metric
from kenosis_ort.errors import CalibrationError, OptionError, UnsupportedModelError
from kenosis_ort.passes.evaluator import Evaluator
from kenosis_ort.passes.float_search import default_cost, float_share, multiply_accumulates
from kenosis_ort.passes.leave_float import search_mixed_precision
from kenosis_ort.plan import Kind, PlacementPlan
from kenosis_ort.targets.proof import Status
from kenosis_ort.verify import verify_fusion
from tests import models, planning
from tests.passes.test_sensitivity import BAD, noise, spiky_chain


@dataclass
class Shop:
    """Builds models as the flow does, and counts them."""

    model: onnx.ModelProto
    feeds: Sequence[Any]
    built: list[Mapping[str, str]] = field(default_factory=list)

    def build(self, keep_float: Mapping[str, str]) -> tuple[onnx.ModelProto, PlacementPlan]:
        self.built.append(dict(keep_float))
        made = planning.quantize(self.model, feeds=self.feeds, keep_float=keep_float)
        return made.quantized, made.plan

    def replan(self, keep_float: Mapping[str, str]) -> PlacementPlan:
        return planning.plan_of(self.model, keep_float=keep_float)


@pytest.fixture(scope="module")
def shop() -> Shop:
    model = planning.prepared(spiky_chain()[0])
    return Shop(model, models.feeds(model, 6))


def _search(shop: Shop, *, metric: Metric | None = None, **options: Any) -> Any:
    shop.built.clear()
    evaluator = Evaluator(shop.model, shop.feeds[2:], metric=check_metric(metric or (lambda o, r: 1.0 - noise(o, r))))
    return search_mixed_precision(
        shop.model,
        shop.build,
        feeds=shop.feeds[:2],
        loss=partial(evaluator.loss, budget=0.005),
        **{"replan": shop.replan, "max_float_share": 0.5, "error": noise, **options},
    )


def _convs(model: onnx.ModelProto) -> list[str]:
    return [n.name for n in model.graph.node if n.op_type == "Conv"]


def test_the_two_nodes_around_the_bad_tensor_are_left_float(shop: Shop) -> None:
    found = _search(shop, budget=Budget(1e-3))
    assert found.met
    assert found.loss_before > 0.002 > found.loss >= 0.0
    convs = _convs(shop.model)
    assert set(found.left_float) & set(convs) == set(convs[BAD : BAD + 2])
    assert found.float_share == pytest.approx(2 / 8)
    assert spiky_chain()[1] in found.keep_float[found.left_float[0]]
    assert found.reachable is None
    assert len(shop.built) == found.builds <= 6


def test_nodes_said_to_be_float_are_float_in_the_runtime(shop: Shop) -> None:
    found = _search(shop, budget=Budget(1e-3))
    quantized, plan = shop.build(found.keep_float)
    proof = verify_fusion(quantized, plan=plan)
    for node in found.left_float:
        kernel = proof.by_node[node]
        assert not kernel.integer
        assert kernel.status in (Status.FLOAT, Status.ABSORBED, Status.REMOVED)
        assert not kernel.silently_quantized
    integer = {n.node for n in plan.nodes if n.kind is Kind.INTEGER}
    assert integer
    assert all(proof.by_node[name].integer for name in integer)


def test_nothing_is_searched_where_the_budget_holds(shop: Shop) -> None:
    found = _search(shop, budget=Budget(0.9))
    assert found.met
    assert found.left_float == ()
    assert found.builds == 1
    assert found.sets == 0


def test_a_budget_out_of_reach_keeps_the_best_and_says_what_is_reachable(shop: Shop) -> None:
    found = _search(shop, budget=Budget(1e-3), max_float_share=0.2)
    assert not found.met
    assert found.loss <= found.loss_before
    assert found.float_share <= 0.2
    assert "the budget holds with" in found.reachable
    hopeless = _search(shop, budget=Budget(0.0), max_float_share=0.5)
    assert not hopeless.met
    assert hopeless.loss < hopeless.loss_before
    assert "least found" in hopeless.reachable


def test_prices_decide(shop: Shop) -> None:
    """With the cheap way priced out of reach, other nodes or none are taken."""
    names = _convs(shop.model)
    dear = {**dict.fromkeys(names, 1.0), names[BAD]: 1e6}
    found = _search(shop, budget=Budget(1e-3), cost=dear)
    plain = _search(shop, budget=Budget(1e-3), cost=dict.fromkeys(names, 1.0))
    assert len(plain.left_float) <= len(found.left_float)
    assert plain.met


def test_the_callers_metric_decides(shop: Shop) -> None:
    seen = []

    def metric(outputs: Sequence[Mapping[str, Any]], reference: Sequence[Mapping[str, Any]]) -> float:
        """Larger is better: 1 where no value is off by more than a thousandth of the largest."""
        seen.append((len(outputs), set(outputs[0])))
        close = [
            np.abs(o[name] - r[name]).max() <= 0.02 * np.abs(r[name]).max()
            for o, r in zip(outputs, reference, strict=True)
            for name in r
        ]
        return float(np.mean(close))

    found = _search(shop, budget=Budget(0.01), metric=metric)
    assert seen
    assert all(count in (2, 4) and names == {o.name for o in shop.model.graph.output} for count, names in seen)
    assert found.loss <= found.loss_before


def test_a_broken_metric_stops_the_search(shop: Shop) -> None:
    with pytest.raises(OptionError, match="returned nan"):
        _search(shop, metric=lambda o, r: float("nan"))
    with pytest.raises(OptionError, match="raised KeyError"):
        _search(shop, metric=lambda o, r: o[0]["no such output"])


def test_without_samples_there_is_no_search(shop: Shop) -> None:
    with pytest.raises(CalibrationError, match="mixed precision needs"):
        search_mixed_precision(shop.model, shop.build, feeds=[], loss=lambda model: 0.0)


def test_the_same_result_without_a_planner(shop: Shop) -> None:
    with_planner = _search(shop, budget=Budget(1e-3))
    without = _search(shop, budget=Budget(1e-3), replan=None)
    assert with_planner.keep_float == without.keep_float


def test_multiply_accumulates() -> None:
    model = planning.prepared(
        planning.parse(
            "net (float[1,3,8,8] x, float[2,6] z) => (y, u, t) <float[4,3,3,3] w, float[4,2,2,2] v, float[6,5] g> "
            "{ y = Conv <kernel_shape=[3,3], strides=[2,2]> (x, w)  u = ConvTranspose <strides=[2,2]> (y, v) "
            "m = MatMul (z, g)  t = Relu (m) }"
        )
    )
    work = multiply_accumulates(model)
    assert sorted(work.values()) == [2 * 6 * 5, 9 * 4 * 2 * 4, 9 * 4 * 27]
    cost = default_cost(model)
    relu = next(n.name for n in model.graph.node if n.op_type == "Relu")
    assert cost[relu] == 16.0 * 10
    assert float_share(work, set(work)) == 1.0
    assert float_share({}, {"a"}) == 0.0


def test_placements_that_cannot_be_built_are_passed_by(shop: Shop) -> None:
    """What is left float may move a Q to a tensor without a range: that placement is none, and the search goes on."""
    tried = []

    def build(keep_float: Mapping[str, str]) -> tuple[onnx.ModelProto, PlacementPlan]:
        tried.append(keep_float)
        if len(tried) == 2:
            raise UnsupportedModelError("no calibrated range")
        return shop.build(keep_float)

    evaluator = Evaluator(shop.model, shop.feeds[2:])
    search = partial(search_mixed_precision, shop.model, feeds=shop.feeds[:2], replan=shop.replan, max_float_share=0.25)
    found = search(build, loss=partial(evaluator.loss, budget=1e-6), budget=Budget(1e-6))
    assert len(tried) > 2
    assert math.isfinite(found.loss)

    def never(keep_float: Mapping[str, str]) -> tuple[onnx.ModelProto, PlacementPlan]:
        raise UnsupportedModelError("no calibrated range")

    with pytest.raises(UnsupportedModelError):
        search(never, loss=lambda model: 0.0)
