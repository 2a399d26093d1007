"""Sensitivity: the tensor that was made bad comes first, halving finds the same with fewer runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.errors import CalibrationError
from kenosis_ort.passes.float_search import SensitivityProbe, tensor_sensitivity
from kenosis_ort.passes.gates import Gate, GatedModel, GateKind
from tests import models, planning
from tests.passes.support import change

BAD = 3


def noise(outputs: Sequence[Mapping[str, Any]], reference: Sequence[Mapping[str, Any]]) -> float:
    """Noise power over signal power."""
    pairs = [(o[name], r[name]) for o, r in zip(outputs, reference, strict=True) for name in r]
    return float(sum(np.square(a - b).sum() for a, b in pairs) / sum(np.square(b).sum() for _, b in pairs))


def spiky_chain() -> tuple[onnx.ModelProto, str]:
    """Eight Convs; one channel behind the fourth is large, widens the range of its tensor, and is read by nobody."""
    model = models.conv_relu_chain(16, channels=8)
    convs = [n for n in model.graph.node if n.op_type == "Conv"]
    weights, bias = (convs[BAD + 1].input[1], convs[BAD].input[2])
    change(model.graph.initializer, bias, lambda b: np.where(np.arange(len(b)) == 0, 30.0, b))
    change(model.graph.initializer, weights, lambda w: w * (np.arange(w.shape[1]) > 0)[:, None, None])
    relu = next(n for n in model.graph.node if convs[BAD].output[0] in n.input)
    return model, relu.output[0]


@pytest.fixture(scope="module")
def made() -> planning.Outcome:
    return planning.quantize(spiky_chain()[0])


@pytest.fixture(scope="module")
def probe(made: planning.Outcome) -> Iterator[SensitivityProbe]:
    with GatedModel(made.model, made.quantized) as gated:
        yield SensitivityProbe(gated, made.feeds[:2], error=noise)


def test_the_worst_tensor_is_found(probe: SensitivityProbe) -> None:
    found = tensor_sensitivity(probe)
    assert found[0].value == spiky_chain()[1]
    assert found[0].kind is GateKind.ACTIVATION
    assert [t.error for t in found] == sorted((t.error for t in found), reverse=True)
    assert found[0].error > 3 * found[1].error
    assert frozenset().union(*(t.gates for t in found)) == probe.gated.everything


def test_halving_finds_the_same_worst_tensor_with_fewer_runs(made: planning.Outcome) -> None:
    with GatedModel(made.model, made.quantized) as gated:
        halving = SensitivityProbe(gated, made.feeds[:2], error=noise)
        found = tensor_sensitivity(halving, cutoff=0.1)
        one_by_one = SensitivityProbe(gated, made.feeds[:2], error=noise)
        everything = tensor_sensitivity(one_by_one)
    assert found[0].value == everything[0].value
    assert found[0].exact
    assert found[0].error == pytest.approx(everything[0].error)
    assert halving.runs < one_by_one.runs
    assert frozenset().union(*(t.gates for t in found)) == gated.everything


def test_errors_are_close_to_additive(probe: SensitivityProbe) -> None:
    together = probe.error(probe.gated.everything)
    assert sum(t.error for t in tensor_sensitivity(probe)) == pytest.approx(together, rel=1.0)


def test_the_float_model_has_no_error_and_nothing_is_measured_twice(made: planning.Outcome) -> None:
    calls = []

    def counted(outputs: Any, reference: Any) -> float:
        calls.append(1)
        return noise(outputs, reference)

    with GatedModel(made.model, made.quantized) as gated:
        probe = SensitivityProbe(gated, made.feeds[:1], error=counted)
        assert probe.error(frozenset()) == 0.0
        assert probe.error(frozenset({0})) == probe.error(frozenset({0}))
        assert probe.runs == len(calls) == 1
        with pytest.raises(CalibrationError, match="no calibration feed"):
            SensitivityProbe(gated, [])


class Sums(SensitivityProbe):
    """A set costs the sum of what its gates cost; keeps the sets asked for together."""

    def __init__(self, costs: Sequence[float]) -> None:
        gates = [Gate(i, GateKind.ACTIVATION, f"v{i}", (), f"g{i}") for i in range(len(costs))]
        self.gated: Any = SimpleNamespace(gates=gates, everything=frozenset(range(len(costs))))
        self.costs, self.rounds = costs, list[set[frozenset[int]]]()

    def errors(self, sets: Sequence[frozenset[int]]) -> list[float]:
        self.rounds.append(set(sets))
        return [float(sum(self.costs[i] for i in sorted(on))) for on in sets]


@given(st.lists(st.floats(0, 10), max_size=20), st.sampled_from([0.01, 0.1, 0.3]))
def test_halving_round_by_round_finds_what_halving_set_by_set_does(costs: list[float], cutoff: float) -> None:
    probe = Sums(costs)
    found: list[tuple[int, float, bool]] = []
    measured: set[frozenset[int]] = set()
    floor = cutoff * sum(costs)

    def divide(part: list[int], expected: float) -> None:
        error = expected
        if len(part) == 1 or expected <= 4 * floor:
            measured.add(frozenset(part))
            error = probe.error(frozenset(part))
        if len(part) == 1 or error <= floor:
            found.extend((i, error / len(part), len(part) == 1) for i in part)
            return
        middle = len(part) // 2
        divide(part[:middle], error * middle / len(part))
        divide(part[middle:], error * (len(part) - middle) / len(part))

    if costs:
        divide(list(range(len(costs))), float(sum(costs)))
    expected = sorted(found, key=lambda entry: -entry[1])
    probe.rounds.clear()
    units = tensor_sensitivity(probe, cutoff=cutoff)
    assert [(*unit.gates, unit.error, unit.exact) for unit in units] == expected
    assert set().union(*probe.rounds) == measured | {probe.gated.everything}
    assert len(probe.rounds) <= 7  # the whole, and the depth of halving 20
