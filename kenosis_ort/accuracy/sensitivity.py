"""Which quantized tensors cost how much: each quantized alone, all others float, measured at the outputs.

Quantization noise from different tensors adds up nearly independently, so that what a set of tensors costs is close
to the sum of what its members cost. Where only the worst are wanted, sets are halved as long as they matter: k bad
tensors among n are found in about ``2 k log2(n / k)`` runs instead of n. Source: single-tensor quantization as in
HAWQ and in ONNX Runtime's debugging guide; the halving is adaptive group testing (Dorfman 1943).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kenosis_ort.accuracy.error import Outputs, find_uses, output_error
from kenosis_ort.accuracy.gates import GatedModel, GateKind
from kenosis_ort.accuracy.metric import OutputError
from kenosis_ort.errors import CalibrationError
from kenosis_ort.plan import PlacementPlan

_SURELY = 4.0  # a set that is expected to cost this many times the limit is halved without a run

Replan = Callable[[Mapping[str, str]], PlacementPlan]
"""Returns the plan that leaves further nodes float: node name to reason."""


@dataclass(frozen=True)
class TensorSensitivity:
    """What quantizing one tensor costs.

    Attributes:
        value: Name in the float model; of activations with shared parameters, the first.
        kind: What it is; a weight stands for its bias as well.
        gates: Indices of its gates: one, or those of a group that is quantized together.
        consumers: Nodes that read it quantized.
        error: Output error with only this quantized; 0 for none.
        exact: Whether it was measured alone; otherwise it is its share of a set that hardly matters.
    """

    value: str
    kind: GateKind
    gates: frozenset[int]
    consumers: tuple[str, ...]
    error: float
    exact: bool = True


class Probe:
    """Measures sets of gates on a few feeds; the same set is measured once.

    Args:
        gated: The gated model.
        feeds: Calibration feeds; a handful is enough to rank.
        error: What counts as error at the outputs; None judges each output by what it is for.

    Raises:
        CalibrationError: There are no feeds.
    """

    def __init__(
        self, gated: GatedModel, feeds: Sequence[Mapping[str, Any]], *, error: OutputError | None = None
    ) -> None:
        if not feeds:
            raise CalibrationError("no calibration feed to measure sensitivity on", fix="give at least one feed")
        self.gated = gated
        self.feeds = tuple(feeds)
        self.reference: list[Outputs] = [*next(iter(gated.outputs(self.feeds, [()])))]
        self._error = error or partial(output_error, uses=find_uses(self.reference))
        self._known: dict[frozenset[int], float] = {frozenset(): 0.0}

    @property
    def runs(self) -> int:
        """Sets measured so far."""
        return len(self._known) - 1

    def error(self, on: frozenset[int]) -> float:
        """Returns the output error with these gates on, all others off."""
        return self.errors([on])[0]

    def errors(self, sets: Sequence[frozenset[int]]) -> list[float]:
        """Returns `error` of several sets, which may be measured beside each other."""
        new = [on for on in dict.fromkeys(sets) if on not in self._known]
        for on, outputs in zip(new, self.gated.outputs(self.feeds, new), strict=True):
            self._known[on] = float(self._error(outputs, self.reference))
        return [self._known[on] for on in sets]


def tensor_sensitivity(
    probe: Probe, *, on: frozenset[int] | None = None, cutoff: float = 0.0
) -> tuple[TensorSensitivity, ...]:
    """Measures tensors one by one, or the worst of them by halving sets.

    Args:
        probe: The gated model with its feeds.
        on: Gates to look at; None for all.
        cutoff: Sets that cost at most this share of the whole error are not taken apart; 0 measures every tensor.

    Returns:
        One entry per group of gates, the worst first.
    """
    units = _units(probe.gated, probe.gated.everything if on is None else on)
    if cutoff <= 0:
        errors = probe.errors([unit.gates for unit in units])
        return _ranked([replace(unit, error=error) for unit, error in zip(units, errors, strict=True)])
    whole = probe.error(_together(units))
    floor = cutoff * whole
    found: dict[frozenset[int], TensorSensitivity] = {}
    parts = [_Part(units, whole)] if units else []
    while parts:  # what a round asks for may be measured at the same time; sets that surely cost a lot are not
        asked = [part for part in parts if len(part.units) == 1 or part.expected <= _SURELY * floor]
        for part, error in zip(asked, probe.errors([_together(part.units) for part in asked]), strict=True):
            part.expected = error
        smaller = []
        for part in parts:
            count = len(part.units)
            if count == 1 or part.expected <= floor:
                exact = count == 1
                found |= {u.gates: replace(u, error=part.expected / count, exact=exact) for u in part.units}
                continue
            halves = part.units[: count // 2], part.units[count // 2 :]
            smaller += [_Part(half, part.expected * len(half) / count) for half in halves]
        parts = smaller
    return _ranked([found[unit.gates] for unit in units])


@dataclass
class _Part:
    """Some tensors, and what they are expected to cost together; what they do where they were measured."""

    units: Sequence[TensorSensitivity]
    expected: float


def _together(units: Sequence[TensorSensitivity]) -> frozenset[int]:
    return frozenset().union(*(unit.gates for unit in units))


def _ranked(found: Sequence[TensorSensitivity]) -> tuple[TensorSensitivity, ...]:
    return tuple(sorted(found, key=lambda t: -t.error))


def _units(gated: GatedModel, on: frozenset[int]) -> list[TensorSensitivity]:
    """Returns the groups of gates that are measured together, in graph order."""
    groups: dict[str, list[int]] = {}
    for gate in gated.gates:
        if gate.index in on:
            groups.setdefault(gate.group, []).append(gate.index)
    units = []
    for members in groups.values():
        gates = [gated.gates[i] for i in members]
        first = next((g for g in gates if g.kind is not GateKind.BIAS), gates[0])
        consumers = tuple(dict.fromkeys(name for g in gates for name in g.consumers))
        units.append(TensorSensitivity(first.value, first.kind, frozenset(members), consumers, 0.0))
    return units
