"""Pictures of the terminal for the documentation: what commands print, as SVG.

    python docs/terminal.py

The commands run as a user runs them, on the shipped digits net; their output is taken with its colours.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from kenosis_ort.demo import load_digits, model_path

COLUMNS = 104
COMMANDS = {
    "quantize": "quantize model.onnx --data samples.npz",
    "compare": "compare model.onnx model.int8.onnx --data test.npz",
}
_WEB_FONTS = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)


def main(argv: list[str] | None = None) -> int:
    """Takes the pictures; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images", help="folder of the pictures")
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        _prepare(Path(folder))
        for name, command in COMMANDS.items():
            picture = to_svg(command, _output(command, Path(folder)))
            (arguments.out / f"terminal-{name}.svg").write_text(picture, encoding="utf-8")
    return 0


def to_svg(command: str, output: str) -> str:
    """Returns a command and what it printed as a picture that loads nothing from the network."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print(Text.assemble(("$ ", "bold green"), (f"kenosis-ort {command}", "bold")))
        console.print(Text.from_ansi(output.rstrip()))
        return _WEB_FONTS.sub("", console.export_svg(title="kenosis-ort"))


def _prepare(folder: Path) -> None:
    digits = load_digits()
    with model_path() as model:
        shutil.copy(model, folder / "model.onnx")
    np.savez(folder / "samples.npz", image=digits.calibration)
    np.savez(folder / "test.npz", image=digits.images)


def _output(command: str, folder: Path) -> str:
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS), "PYTHONWARNINGS": "ignore"}
    environment.pop("NO_COLOR", None)
    call = [sys.executable, "-m", "kenosis_ort", *command.split()]
    done = subprocess.run(call, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
