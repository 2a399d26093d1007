"""Mutated models through the public doors, by the thousand: counts by class, and the files of what went wrong.

Each case takes one of some twenty small models, changes its structure or its bytes, and gives it to a public call in a
process of its own with limits on memory and time. Right are: a written model that keeps its signal (or a report that
says what it loses), the float model delivered, or one sentence. Everything else is a defect: other exceptions, crashes,
hangs, wrong results, outputs replaced by a call that fails, files left behind.

    python benchmarks/fuzz.py --cases 3000 [--seed 1] [--jobs 2] [--keep FOLDER]

Exits with 1 if there is a defect. A case is made again by its seed and number, see `tests/fuzz`.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.fuzz.case import ALLOWED  # noqa: E402
from tests.fuzz.farm import run_all  # noqa: E402


def main() -> int:
    """Prints counts by class; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--keep", type=Path, default=Path("fuzz-defects"), help="folder for the files of defects")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    defects: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    numbers = range(arguments.first, arguments.first + arguments.cases)
    for done, result in enumerate(run_all(numbers, arguments.seed, jobs=arguments.jobs, keep=arguments.keep), 1):
        counts[result["class"]] += 1
        if result["class"] not in ALLOWED or result["class"] == "step failed":
            defects[result["class"], _last_line(result)].append(result)
        if done % 100 == 0:
            print(f"{done} of {len(numbers)}: {_told(counts)}", file=sys.stderr)
    print(f"{len(numbers)} cases of seed {arguments.seed}: {_told(counts)}")
    for (kind, line), results in sorted(defects.items(), key=lambda item: -len(item[1])):
        first = results[0]
        print(f"\n{len(results)} x {kind}: {line}\n  {first['case']}: {first.get('door')}, {first.get('net')}")
        print("".join(f"  - {change[:160]}\n" for change in first.get("changes", [])), end="")
    wrong = sum(count for kind, count in counts.items() if kind not in ALLOWED)
    if wrong:
        print(f"\nfiles of the {wrong} defects: {arguments.keep}")
    return int(bool(wrong))


def _told(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.most_common())


def _last_line(result: dict[str, Any]) -> str:
    lines = str(result["detail"]).strip().splitlines()
    return lines[-1][:200] if lines else ""


if __name__ == "__main__":
    sys.exit(main())
