"""The golden plans as text, and written anew: ``python -m tests.golden.regenerate``, from the repository's root.

Run it after a change of placement that is meant, read the diff, and commit the files with the change.
"""

import tempfile
from pathlib import Path

from kenosis_ort import preview, quantize_static
from kenosis_ort.runtime.machine import on
from kenosis_ort.targets import DEFAULT_TARGET, TARGETS
from tests import models
from tests.processor import USUAL

FOLDER = Path(__file__).parent / "plans"


def quantized(name):
    """Quantizes one of the shared models with seeded data, as a user would, and returns the report."""
    model = models.ALL[name]()
    with tempfile.TemporaryDirectory() as folder:
        return quantize_static(model, Path(folder) / "out.onnx", models.reader(model, 4), promise=False)


def plan_text(plan):
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


def main():
    """Writes one file a shared model and removes files of models that are gone.

    The plans for other targets than the default are those before calibration, in a folder each.
    """
    for stale in set(FOLDER.glob("*.txt")) - {FOLDER / f"{name}.txt" for name in models.ALL}:
        stale.unlink()
    for target in TARGETS:
        folder = FOLDER if target == DEFAULT_TARGET else FOLDER / target
        folder.mkdir(exist_ok=True)
        for name, build in models.ALL.items():
            with on(USUAL):
                plan = quantized(name).plan if folder == FOLDER else preview(build(), target=target)
            (folder / f"{name}.txt").write_text(plan_text(plan), encoding="utf-8")


if __name__ == "__main__":
    main()
