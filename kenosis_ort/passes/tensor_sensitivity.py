"""Sensitivity of the outputs to single tensors: the error of quantizing one, all others float.

Quantization noise from different tensors adds up nearly independently, so that what a set of tensors costs is close to
the sum of what its members cost. Where only the worst are wanted, sets are halved as long as they matter: k bad
tensors among n are found in about ``2 k log2(n / k)`` runs instead of n. Source: single-tensor quantization as in HAWQ
and in ONNX Runtime's debugging guide; the halving is adaptive group testing (Dorfman 1943).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kenosis_ort.accuracy.metric import OutputError
from kenosis_ort.passes.gates import Gate, GatedModel, GateKind

_SURELY = 4.0  # a set that is expected to cost this many times the limit is halved without a run


Errors = Callable[[Sequence[frozenset[int]]], Sequence[float]]
"""Errors at the outputs with the gates of each set on, all others off."""


class TensorSensitivity(NamedTuple):
    """Error that quantizing one tensor causes.

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


def errors_of(gated: GatedModel, feeds: Sequence[Mapping[str, Any]], error: OutputError) -> Errors:
    """The measure of sets of gates.

    Args:
        gated: The gated model.
        feeds: Calibration feeds; a handful is enough to rank.
        error: The error at the outputs.
    """
    (reference,) = gated.outputs(feeds, [()])
    return lambda sets: [float(error(outputs, reference)) for outputs in gated.outputs(feeds, sets)]


def tensor_sensitivity(
    gates: Sequence[Gate], errors: Errors, *, on: frozenset[int], cutoff: float
) -> tuple[TensorSensitivity, ...]:
    """Measures the worst tensors by halving sets.

    Args:
        gates: Of the gated model.
        errors: Measures sets of them.
        on: Gates to look at.
        cutoff: Sets that cost at most this share of the whole error are not taken apart.

    Returns:
        One entry per group of gates, the worst first.
    """
    units, known = _units(gates, on), dict[frozenset[int], float]()
    if not units:
        return ()
    known[on] = whole = errors([on])[0]
    floor = cutoff * whole
    found: dict[frozenset[int], TensorSensitivity] = {}
    parts = [(units, whole)]  # with the error that is expected of all of them together
    while parts:  # what a round asks for may be measured at the same time; sets that surely cost a lot are not
        asked = [_together(part) for part, expected in parts if len(part) == 1 or expected <= _SURELY * floor]
        asked = [gates for gates in asked if gates not in known]
        known |= zip(asked, errors(asked), strict=True)
        smaller = []
        for part, expected in parts:
            count, error = len(part), known.get(_together(part), expected)
            if count == 1 or error <= floor:
                found |= {unit.gates: unit._replace(error=error / count, exact=count == 1) for unit in part}
            else:
                halves = part[: count // 2], part[count // 2 :]
                smaller += [(half, error * len(half) / count) for half in halves]
        parts = smaller
    return tuple(sorted((found[unit.gates] for unit in units), key=lambda t: -t.error))


def _together(units: Sequence[TensorSensitivity]) -> frozenset[int]:
    return frozenset().union(*(unit.gates for unit in units))


def _units(gates: Sequence[Gate], on: frozenset[int]) -> list[TensorSensitivity]:
    """The groups of gates that are measured together, in graph order."""
    groups: dict[str, list[Gate]] = {}
    for gate in gates:
        if gate.index in on:
            groups.setdefault(gate.group, []).append(gate)
    units = []
    for members in groups.values():
        first = next((g for g in members if g.kind is not GateKind.BIAS), members[0])
        consumers = tuple(dict.fromkeys(name for g in members for name in g.consumers))
        units.append(TensorSensitivity(first.value, first.kind, frozenset(g.index for g in members), consumers, 0.0))
    return units
