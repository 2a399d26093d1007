"""Writes the golden plans anew: ``python -m tests.golden.regenerate``, from the repository's root.

Run it after a change of placement that is meant, read the diff, and commit the files with the change.
"""

from kenosis_ort import preview
from kenosis_ort.runtime.limits import on
from kenosis_ort.targets import DEFAULT_TARGET, TARGETS
from tests import models
from tests.golden.plan_text import FOLDER, plan_text, quantized
from tests.processor import USUAL


def main() -> None:
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
