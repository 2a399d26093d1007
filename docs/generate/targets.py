"""The targets that come with the package, from their tables."""

from __future__ import annotations

from kenosis_ort.cli.machine_commands import summary
from kenosis_ort.targets import TARGETS
from kenosis_ort.targets.tensorrt import TENSORRT

from .markdown import code, table


def target_table() -> str:
    """Returns what each target wants."""
    headings = ["Target", "Activations", "Weights", "Bias", "A kernel takes in", "Residual Add"]
    return table(headings, [_row(summary(target)) for target in TARGETS.values()])


def tensorrt_table() -> str:
    """Returns TensorRT's rules with the clauses that they rest on."""
    rules = [[code(r.id), ", ".join(r.op_types), r.why, r.source] for r in TENSORRT.rules]
    facts = [[code(name), "", why, ""] for name, why in TENSORRT.facts]
    return table(["Rule", "Operators", "What is done", "Rests on"], [*rules, *facts])


def _row(said: dict[str, object]) -> list[str]:
    taken = said["taken_in"]
    assert isinstance(taken, list)
    return [
        code(str(said["target"])),
        str(said["activations"]),
        str(said["weights"]),
        str(said["bias"]),
        ", ".join(taken) or "nothing",
        str(said["residual"]),
    ]
