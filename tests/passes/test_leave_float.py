"""Sensitivity and mixed precision: gates switch tensors, the bad one is found, nodes around it are left float."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import DEFAULT, Mock

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st

from kenosis_ort import UnsupportedModelError, VerificationError, verify_fusion
from kenosis_ort.accuracy.metric import check_metric
from kenosis_ort.passes import leave_float
from kenosis_ort.passes.gates import Gate, GatedModel, GateKind, errors_of, tensor_sensitivity
from kenosis_ort.passes.leave_float import search_mixed_precision
from kenosis_ort.plan import Kind
from kenosis_ort.targets.proof import Status
from tests import models, planning
from tests.graph.build import run
from tests.passes.support import BAD, evaluator_of, everything, spiky_chain


def noise(outputs, reference):
    """Noise power over signal power."""
    pairs = [(o[name], r[name]) for o, r in zip(outputs, reference, strict=True) for name in r]
    return float(sum(np.square(a - b).sum() for a, b in pairs) / sum(np.square(b).sum() for _, b in pairs))


# ---- sensitivity ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made():
    return planning.quantize(spiky_chain()[0])


@pytest.fixture(scope="module")
def gated(made):
    with GatedModel(made.model, made.quantized) as gated:
        yield gated


def test_the_worst_tensor_is_found_and_halving_finds_it_with_fewer_runs(made, gated):
    errors, on = errors_of(gated, made.feeds[:2], noise), everything(gated)
    asked = []

    def counted(sets):
        asked[-1] += len(sets)
        return errors(sets)

    found, halved = (
        asked.append(0) or tensor_sensitivity(gated.gates, counted, on=on, cutoff=cutoff) for cutoff in (0.0, 0.1)
    )
    assert (found[0].value, found[0].kind) == (spiky_chain()[1], GateKind.ACTIVATION)
    assert [t.error for t in found] == sorted((t.error for t in found), reverse=True)
    assert found[0].error > 3 * found[1].error
    assert (halved[0].value, halved[0].exact) == (found[0].value, True)
    assert halved[0].error == pytest.approx(found[0].error)
    assert asked[1] < asked[0]
    for units in (found, halved):
        assert frozenset().union(*(t.gates for t in units)) == on
    none, together = errors([frozenset(), on])  # errors are close to additive
    assert (none, sum(t.error for t in found)) == (0.0, pytest.approx(together, rel=1.0))


@given(st.lists(st.floats(0, 10), max_size=20), st.sampled_from([0.01, 0.1, 0.3]))
def test_halving_measures_what_matters_alone_and_asks_for_a_round_of_sets_together(costs, cutoff):
    rounds = []

    def errors(sets):
        """A set costs the sum of what its gates cost."""
        rounds.append(sets)
        return [float(sum(costs[i] for i in sorted(on))) for on in sets]

    floor, on = cutoff * sum(costs), frozenset(range(len(costs)))
    gates = [Gate(i, GateKind.ACTIVATION, f"v{i}", (), f"g{i}") for i in range(len(costs))]
    units = tensor_sensitivity(gates, errors, on=on, cutoff=cutoff)
    assert sorted(i for unit in units for i in unit.gates) == list(range(len(costs)))
    assert [unit.error for unit in units] == sorted((unit.error for unit in units), reverse=True)
    asked = set().union(*rounds)
    assert len(asked) == sum(map(len, rounds)), "nothing is measured twice"
    for unit in units:
        (at,) = unit.gates
        shared = min((on for on in asked if at in on), key=len)  # what it was measured with
        assert unit.exact == (len(shared) == 1)
        assert unit.error == pytest.approx(sum(costs[i] for i in shared) / len(shared))
        assert unit.exact or unit.error * len(shared) <= floor * (1 + 1e-9)
        assert unit.exact or len(shared) == len(costs) or unit.error <= 4 * floor
    assert len(rounds) <= 7  # the whole, and the depth of halving 20


def test_errors_that_do_not_add_up_rank_nothing_and_cost_few_runs():
    """Parts that cost far more apart than together, as where each of them drowns the output."""
    gates = [Gate(i, GateKind.ACTIVATION, f"v{i}", (), f"g{i}") for i in range(64)]
    asked = []
    errors = lambda sets: asked.extend(sets) or [1.0 if len(on) == 64 else 50.0 for on in sets]  # noqa: E731
    units = tensor_sensitivity(gates, errors, on=frozenset(range(64)), cutoff=0.03)
    assert not any(unit.exact for unit in units)
    assert (len(units), len(asked) < 64) == (64, True)


# ---- mixed precision ------------------------------------------------------------------------------------------


@dataclass
class Shop:
    """Builds models as the flow does, and counts them."""

    model: onnx.ModelProto
    feeds: Sequence[Any]
    built: list[Mapping[str, str]] = field(default_factory=list)

    def build(self, keep_float):
        self.built.append(dict(keep_float))
        made = planning.quantize(self.model, feeds=self.feeds, keep_float=keep_float)
        return made.quantized, made.plan

    def search(self, *, metric=None, build=None, limit=0.005, **options):
        self.built.clear()
        metric = metric or (lambda o, r: 1.0 - noise(o, r))
        evaluator = evaluator_of(self.model, self.feeds[2:], metric=check_metric(metric))
        replan = lambda keep_float: planning.plan_of(self.model, keep_float=keep_float)  # noqa: E731
        usual = {"replan": replan, "max_float_share": 0.5, "error": noise, "budget": 0.005, "keep_float": {}}
        usual |= {"feeds": self.feeds[:2], "loss": partial(evaluator.loss, budget=limit)}
        return search_mixed_precision(self.model, build or self.build, **{**usual, **options})


@pytest.fixture(scope="module")
def shop():
    model = planning.prepared(spiky_chain()[0])
    return Shop(model, models.feeds(model, 6))


def convs_of(model):
    return [n.name for n in model.graph.node if n.op_type == "Conv"]


def test_the_two_nodes_around_the_bad_tensor_are_left_float_in_the_runtime_too(shop):
    found, reachable = shop.search(budget=1e-3)
    assert (len(shop.built) <= 6, 0.0 <= found.loss <= 1e-3) == (True, True)
    assert shop.search(budget=0.9)[0].loss > 0.002
    convs = convs_of(shop.model)
    assert set(found.floats) & set(convs) == set(convs[BAD : BAD + 2])
    assert found.share == pytest.approx(2 / 8)
    assert spiky_chain()[1] in found.keep_float[found.floats[0]]
    assert reachable == ""
    quantized, plan = shop.build(found.keep_float)
    proof = verify_fusion(quantized, plan=plan).by_node
    for node in (proof[name] for name in found.floats):
        assert (node.integer, node.silently_quantized) == (False, False)
        assert node.status in (Status.FLOAT, Status.ABSORBED, Status.REMOVED)
    assert {proof[n.node].integer for n in plan.nodes if n.kind is Kind.INTEGER} == {True}


def test_a_budget_out_of_reach_keeps_the_best_and_says_what_is_reachable(shop):
    found, reachable = shop.search(budget=1e-3, max_float_share=0.2)
    assert 1e-3 < found.loss <= shop.search(budget=0.9)[0].loss
    assert found.share <= 0.2
    assert "the budget holds with" in reachable
    found, reachable = shop.search(budget=0.5, loss=lambda model: 0.75)
    assert (found.loss, "least found is 0.75" in reachable) == (0.75, True)


def test_what_the_worst_tensor_hides_is_ranked_once_that_is_float():
    """Beside a tensor of a range a thousand times too large no other one makes 3 % of the error."""
    model, hidden = planning.prepared(spiky_chain({BAD: 3e4, 6: 12.0})[0]), (6, 7)
    found, reachable = Shop(model, models.feeds(model, 6)).search(budget=1e-3)
    assert (reachable, found.loss <= 1e-3) == ("", True)
    assert {convs_of(model)[at] for at in (BAD, BAD + 1, *hidden)} <= set(found.floats)


def test_prices_and_the_budget_decide(shop, monkeypatch):
    """With the cheap way priced out of reach other nodes are taken; where the budget holds nothing is searched."""
    even, bad = dict.fromkeys(convs_of(shop.model), 1.0), convs_of(shop.model)[BAD]

    def priced(price):
        monkeypatch.setattr(leave_float, "default_cost", lambda model: {**even, bad: price})
        return shop.search(budget=1e-3)[0]

    plain, dear = priced(1.0), priced(1e6)
    assert [bad in found.floats for found in (plain, dear)] == [True, False]
    assert plain.loss <= 1e-3
    held, reachable = shop.search(budget=0.9)
    assert (held.floats, reachable, len(shop.built)) == ((), "", 1)


def test_placements_that_cannot_be_built_are_passed_by(shop):
    """What is left float may move a Q to a tensor without a range: that placement is none, and the search goes on."""
    lacking = UnsupportedModelError("no calibrated range")
    build = Mock(wraps=shop.build, side_effect=[DEFAULT, lacking, *[DEFAULT] * 99])
    found, _ = shop.search(build=build, budget=1e-6, limit=1e-6, max_float_share=0.25)
    assert build.call_count > 2
    assert math.isfinite(found.loss)
    with pytest.raises(UnsupportedModelError):
        shop.search(build=Mock(side_effect=lacking), budget=1e-6)


def test_multiply_accumulates():
    model = planning.prepared(planning.parse(
        """(float[1,3,8,8] x, float[2,6] z) => (y, u, t) <float[4,3,3,3] w, float[4,2,2,2] v, float[6,5] g>
        { y = Conv <kernel_shape=[3,3], strides=[2,2]> (x, w) u = ConvTranspose <strides=[2,2]> (y, v)
        m = MatMul (z, g) t = Relu (m) }"""
    ))  # fmt: skip
    work = leave_float.multiply_accumulates(model)
    assert work == {"MatMul_m": 2 * 6 * 5, "ConvTranspose_u": 9 * 4 * 2 * 4, "Conv_y": 9 * 4 * 27}
    assert leave_float.default_cost(model) == {**work, "Relu_t": 16.0 * 10}
    assert (leave_float.float_share(work, set(work)), leave_float.float_share({}, {"a"})) == (1.0, 0.0)


# ---- the gated model: all gates on is the quantized model, all off the float one, and single gates are single tensors


@pytest.mark.parametrize("name", models.ALL)
def test_all_on_is_the_quantized_model_and_all_off_the_float_one(name):
    made = planning.quantize(models.ALL[name]())
    before = made.quantized.SerializeToString(), made.model.SerializeToString()
    with GatedModel(made.model, made.quantized) as gated:
        assert gated.on_in(made.plan) == everything(gated)
        groups = {kind: {g.group for g in gated.gates if g.kind is kind} for kind in GateKind}
        assert groups[GateKind.BIAS] <= groups[GateKind.WEIGHT], "weight and bias of a node are one group"
        outputs = {o.name for o in made.model.graph.output}
        assert all(("" in g.consumers) == (g.value in outputs) for g in gated.gates), "who reads beside the nodes"
        for feed in made.feeds[:2]:
            (on,), (off,) = gated.outputs([feed], [everything(gated), ()])
            for a, b in zip(on.values(), run(made.quantized, feed), strict=True):
                # the float kernels differ in the last digits, which moves a rounding now and then
                np.testing.assert_allclose(a, b, atol=0.03 * np.abs(b).max(initial=1e-6))
                assert np.mean(np.abs(a - b)) <= 1e-3 * np.abs(b).max(initial=1e-6)
            for a, b in zip(off.values(), run(made.model, feed), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert before == (made.quantized.SerializeToString(), made.model.SerializeToString())


def test_gemm_beta_is_part_of_the_float_bias():
    made = planning.quantize(
        "net (float[2,8] x) => (y) <float[8,4] w, float[4] b> { y = Gemm <beta=0.5> (x, w, b) }", protect_outputs="int8"
    )
    with GatedModel(made.model, made.quantized) as gated:
        ((off,),) = gated.outputs(made.feeds[:1], [()])
        np.testing.assert_allclose(off["y"], run(made.model, made.feeds[0])[0], rtol=1e-5, atol=1e-6)


def test_models_that_do_not_belong_together_are_refused():
    made, other = planning.quantize(models.conv_relu_chain(2)), planning.quantize(models.mlp())
    with pytest.raises(UnsupportedModelError, match="very model"):
        GatedModel(other.model, made.quantized)
    with pytest.raises(UnsupportedModelError, match="nothing can be switched"):
        GatedModel(made.model, made.model)
    with GatedModel(made.model, made.quantized) as gated, pytest.raises(VerificationError, match="does not run"):
        next(gated.outputs([{"nonsense": np.zeros(1, np.float32)}], [()]))
