"""Other tools' files beside ours: each made in an environment of its own, all run in the same interleaved rounds.

python -m venv nncf && nncf/bin/pip install nncf openvino onnx
python -m venv quark && quark/bin/pip install amd-quark onnxruntime torch
python benchmarks/architectures.py --peers nncf=nncf/bin/python quark=quark/bin/python
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

FORMS = {"nncf": ("nncf", ".onnx"), "nncf-openvino": ("nncf", ".xml"), "quark": ("quark", ".onnx")}
"""By column the tool, and what its file ends with: OpenVINO runs what ends with ``.xml``, ONNX Runtime the others."""
TRANSFORMERS = frozenset({"deit_tiny", "bert_mini"})
VERSIONS: dict[str, dict[str, str]] = {}
"""What the environments hold, by tool."""
_MOST_FEEDS = 128  # what a tool is given to calibrate on
_SECONDS = 900


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Adds ``--peers``."""
    tools = sorted({tool for tool, _ in FORMS.values()})
    parser.add_argument(
        "--peers", nargs="+", default=[], type=_named, metavar="TOOL=PYTHON",
        help=f"also files of {', '.join(tools)}, made by the Python of an environment that holds the tool",
    )  # fmt: skip


def _named(text: str) -> tuple[str, str]:
    tool, equals, python = text.partition("=")
    if not equals or tool not in {tool for tool, _ in FORMS.values()}:
        raise argparse.ArgumentTypeError(f"TOOL=PYTHON with a tool of {sorted({t for t, _ in FORMS.values()})}")
    return tool, str(Path(python).absolute())


def columns(peers: Iterable[tuple[str, str]]) -> list[str]:
    """Returns the columns of the tools that were asked for."""
    tools = {tool for tool, _ in peers}
    return [column for column, (tool, _) in FORMS.items() if tool in tools]


def save_feeds(path: Path, feeds: Iterable[Mapping[str, Any]]) -> None:
    """Writes feeds as one archive of arrays named ``SAMPLE/INPUT``, for a Python that knows nothing of ours."""
    np.savez(path, **{f"{at}/{name}": array for at, feed in enumerate(feeds) for name, array in feed.items()})


def make(column: str, peers: Iterable[tuple[str, str]], source: Path, feeds: list[Any], out: Path, name: str) -> Path:
    """Writes a tool's file; returns where it is.

    Args:
        column: Of `FORMS`.
        peers: Pythons by tool.
        source: The float model.
        feeds: What the tool calibrates on.
        out: The file, but for its suffix.
        name: Of the net, which tells whether it is a transformer.

    Raises:
        RuntimeError: The tool fails.
    """
    tool, suffix = FORMS[column]
    out = out.with_name(out.name + suffix).absolute()
    kind = "TRANSFORMER" if name in TRANSFORMERS else "DEFAULT"
    with tempfile.TemporaryDirectory(prefix="kenosis-peer-") as folder:
        data = Path(folder) / "feeds.npz"
        save_feeds(data, feeds[:_MOST_FEEDS])
        command = [dict(peers)[tool], str(Path(__file__).with_name("_peer.py")), tool, str(source.absolute())]
        done = subprocess.run([*command, str(data), str(out), kind], cwd=folder, capture_output=True, text=True,
                              check=False, timeout=_SECONDS)  # fmt: skip
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    VERSIONS[tool] = json.loads(done.stdout.strip().splitlines()[-1])
    return out


def versions() -> str:
    """Returns the versions of the tools that made files."""
    said = (f"{package} {number}" for held in VERSIONS.values() for package, number in held.items())
    return ", ".join(dict.fromkeys(said))
