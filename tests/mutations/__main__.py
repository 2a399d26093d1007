"""Breaks the package in small ways, one after the other, and looks whether the tests notice: by hand or nightly.

    python -m tests.mutations [NUMBER...]

works on a copy of the tree and prints a table, a line a break, of all or of those with these numbers; it ends with 1
where one is not noticed. Tests that do not end in time have noticed nothing: what hangs has to fail by itself.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutations.breaks import BREAKS

ROOT = Path(__file__).resolve().parents[2]
LONGEST_S = 300.0
_PYTEST = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--hypothesis-profile=mutations")
_ROW = "| {:>2} | {:28} | {:50} | {} | {:>4} |"


def verdict(tree, each, longest_s=LONGEST_S):
    """What came of a break: ``caught by`` a test, or what is wrong with the break or its tests."""
    path = tree / "kenosis_ort" / each.file
    source = path.read_text(encoding="utf-8")
    if source.count(each.old) != 1:
        return f"NOT CAUGHT: stands there {source.count(each.old)} times"
    path.write_text(source.replace(each.old, each.new), encoding="utf-8")
    command = [sys.executable, *_PYTEST, *(f"tests/{name}" for name in each.tests.split())]
    environment = {**os.environ, "PYTHONPATH": str(tree), "CI": "1"}
    how = {"cwd": tree, "env": environment, "capture_output": True, "text": True, "check": False, "timeout": longest_s}
    try:
        done = subprocess.run(command, **how)
    except subprocess.TimeoutExpired:
        return f"NOT CAUGHT: the tests do not end within {longest_s:g} s"
    finally:
        path.write_text(source, encoding="utf-8")
    failed = [line.split(" - ")[0] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    found = {0: "NOT CAUGHT", 1: "caught"}.get(done.returncode, f"NOT CAUGHT: pytest ended with {done.returncode}")
    return " ".join([found, *(line.split("/", 1)[-1] for line in failed)])


def main():
    """Prints the table."""
    caught, chosen = 0, [int(number) for number in sys.argv[1:]] or range(1, len(BREAKS) + 1)
    print(_ROW.format("", "file", "what is broken", "what the tests say", "s"))
    print(_ROW.format("--", "-" * 28, "-" * 50, "---", "----"))
    with tempfile.TemporaryDirectory(prefix="kenosis-mutations-") as folder:
        tree = Path(folder, "tree")
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "__pycache__", "site"))
        for number in chosen:
            each, start = BREAKS[number - 1], time.monotonic()
            said = verdict(tree, each)
            caught += said.startswith("caught")
            change = " ".join(each.old.split())[:50].replace("|", "\\|")
            print(_ROW.format(number, each.file, change, said, f"{time.monotonic() - start:.0f}"), flush=True)
    print(f"{caught} of {len(chosen)} are caught")
    return caught < len(chosen)


if __name__ == "__main__":
    sys.exit(main())
