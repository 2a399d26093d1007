"""A plan as a few lines of text, one a node and one a quantized value, so that a changed placement shows in a diff."""

import tempfile
from pathlib import Path

from kenosis_ort import QuantizationReport, quantize_static
from kenosis_ort.plan import PlacementPlan
from tests import models

FOLDER = Path(__file__).parent / "plans"


def quantized(name: str) -> QuantizationReport:
    """Quantizes one of the shared models with seeded data, as a user would, and returns the report."""
    model = models.ALL[name]()
    with tempfile.TemporaryDirectory() as folder:
        return quantize_static(model, Path(folder) / "out.onnx", models.reader(model, 4), promise=False)


def plan_text(plan: PlacementPlan) -> str:
    """Returns the plan's text.

    Nodes are ``name op kind rule``, values ``name how provider`` (the provider only where it is another value),
    limits and saturations ``name low high``.
    """
    sections = {
        "nodes": [f"{n.node} {n.op_type} {n.kind.value} {n.rule}" for n in plan.nodes],
        "values": [" ".join(filter(None, (v, d.how.value, d.provider))) for v, d in plan.quantized_values()],
        "limits": [f"{r.value} {r.low} {r.high}" for r in plan.limits],
        "saturations": [f"{r.value} {r.low} {r.high}" for r in plan.saturations],
        "barriers": list(plan.barriers),
    }
    blocks = [f"[{title}]\n" + "".join(f"{line}\n" for line in lines) for title, lines in sections.items() if lines]
    return "\n".join([f"target {plan.target}\n", *blocks])
