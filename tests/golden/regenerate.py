"""Writes the golden plans anew: ``python -m tests.golden.regenerate``, from the repository's root.

Run it after a change of placement that is meant, read the diff, and commit the files with the change.
"""

from __future__ import annotations

from tests import models
from tests.golden.plan_text import FOLDER, plan_text, quantized


def main() -> None:
    """Writes one file a shared model and removes files of models that are gone."""
    FOLDER.mkdir(exist_ok=True)
    for stale in set(FOLDER.glob("*.txt")) - {FOLDER / f"{name}.txt" for name in models.ALL}:
        stale.unlink()
    for name in models.ALL:
        (FOLDER / f"{name}.txt").write_text(plan_text(quantized(name).plan), encoding="utf-8")


if __name__ == "__main__":
    main()
