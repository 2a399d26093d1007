"""Mutated models through the public doors, by the thousand: counts by class, and the files of what went wrong.

Each case takes one of some twenty small models, changes its structure or its bytes, and gives it to a public call in a
process of its own with limits on memory and time. Right are: a written model that keeps its signal (or a report that
says what it loses), the float model delivered, or one sentence. Everything else is a defect: other exceptions, crashes,
hangs, wrong results, outputs replaced by a call that fails, files left behind.

    python benchmarks/fuzz.py --cases 3000 [--seed 1] [--jobs 2] [--keep FOLDER]

Exits with 1 if there is a defect. Cases are drawn from the strategy of `tests/fuzz`; the same seed draws the same, and
``--first`` leaves out those before one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed as seeded, settings

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.fuzz.case import ALLOWED, Case, cases  # noqa: E402
from tests.fuzz.isolated import isolated  # noqa: E402


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
    running: list[Future[dict[str, Any]]] = []
    drawn = 0

    def run(number: int, case: Case) -> dict[str, Any]:
        files = arguments.keep / f"{arguments.seed}-{number}"
        result = {"case": number, "what": repr(case), **isolated(case, keep_defects=files)}
        if files.exists():
            (files / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
        return result

    def take(result: dict[str, Any]) -> None:
        counts[result["class"]] += 1
        if result["class"] not in ALLOWED or result["class"] == "step failed":
            defects[result["class"], _last_line(result)].append(result)
        if counts.total() % 100 == 0:
            print(f"{counts.total()} of {arguments.cases}: {_told(counts)}", file=sys.stderr)

    with ThreadPoolExecutor(arguments.jobs) as pool:

        @seeded(arguments.seed)
        @settings(
            max_examples=arguments.first + arguments.cases, phases=[Phase.generate], database=None, deadline=None,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=cases())
        def draw(case: Case) -> None:
            nonlocal drawn
            drawn += 1
            if drawn > arguments.first:
                running.append(pool.submit(run, drawn - 1, case))
            if len(running) > 2 * arguments.jobs:
                take(running.pop(0).result())

        draw()
        for future in running:
            take(future.result())
    print(f"{counts.total()} cases of seed {arguments.seed}: {_told(counts)}")
    for (kind, line), results in sorted(defects.items(), key=lambda item: -len(item[1])):
        print(f"\n{len(results)} x {kind}: {line}\n  case {results[0]['case']}: {results[0]['what'][:600]}")
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
