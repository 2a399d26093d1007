"""ONNX Runtime's QNN provider: the runtime on which this target is proved, on x86-64 Linux by its simulator of HTP.

It is an extra of the package. It is asked in a process of its own, since its log has to be read, it keeps the chip
that it was first opened for, and an operator that it cannot compile may end the process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Final

from kenosis_ort.errors import VerificationError
from kenosis_ort.storage.scratch import Scratch

PROVIDER: Final = "QNNExecutionProvider"
CHIP_VARIABLE: Final = "KENOSIS_ORT_QNN_CHIP"
_USUAL_CHIP: Final = "60"
"""Qualcomm's number of the Snapdragon X Elite (HTP v73), the chip of most machines on which ONNX Runtime uses HTP."""
_MESSAGE_LIMIT: Final = 600
_REFUSED: Final = re.compile(r"\{ name: (?P<name>[^,}]*), type: (?P<type>[^,}]*) \}")


@dataclass(frozen=True)
class Answer:
    """Answer of the provider for a model.

    Attributes:
        taken: Names of the nodes that each provider takes, by provider.
        refused: Names of the nodes that QNN refuses.
        failure: Why the model does not load; empty where it does.
    """

    taken: Mapping[str, Sequence[str]] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    failure: str = ""


def missing() -> str:
    """Reason why the runtime cannot be asked here, empty where it can."""
    installed = importlib.util.find_spec("onnxruntime_qnn") is not None
    return "" if installed else "onnxruntime-qnn is not installed (pip install 'kenosis-ort[qnn]')"


def runtime_version() -> str:
    """The provider's version."""
    return version("onnxruntime-qnn")


def chip() -> str:
    """Qualcomm's number of the chip to ask about.

    Raises:
        VerificationError: The environment variable holds something else.
    """
    answers = os.environ.get(CHIP_VARIABLE, "") or _USUAL_CHIP
    if not answers.isdecimal():
        raise VerificationError(
            f"the environment variable {CHIP_VARIABLE} is {answers!r}",
            fix="Qualcomm's number of the chip, as the provider's option soc_model takes it: 60 is Snapdragon X Elite",
        )
    return answers


def ask(models: Sequence[Path]) -> list[Answer]:
    """The provider's answer for each model; one that ends its process does not load.

    Raises:
        VerificationError: It is not installed, or its process ended before it answered anything.
    """
    why = missing()
    if why:
        raise VerificationError(why, fix="install it")
    answers: list[Answer] = []
    while len(answers) < len(models):
        answers += _asked(models[len(answers) :])
    return answers


def _asked(models: Sequence[Path]) -> list[Answer]:
    """Answers of one process for models, up to the one that ended it."""
    with Scratch("qnn") as scratch:
        folder = Path(scratch)
        job = {"models": [str(model) for model in models], "chip": chip()}
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        script = Path(__file__).with_name("qnn_child.py")
        done = subprocess.run([sys.executable, str(script), str(folder)], capture_output=True, check=False)
        log = done.stderr.decode(errors="replace")
        written = folder / "answers.jsonl"
        begun = written.exists()
        lines = written.read_text(encoding="utf-8").splitlines() if begun else []
    refused = tuple(dict.fromkeys(match["name"] for match in _REFUSED.finditer(log)))
    answers = [Answer(one.get("taken", {}), refused, one.get("failure", "")) for one in map(json.loads, lines)]
    if len(answers) < len(models):
        last = (log.strip().splitlines() or [""])[-1][-_MESSAGE_LIMIT:]
        ended = f"the QNN provider's process ended with code {done.returncode}: {last}"
        if not begun:  # it did not come as far as the first model
            raise VerificationError(ended, fix="import onnxruntime_qnn in this environment, and see what it says")
        answers.append(Answer(refused=refused, failure=ended))
    return answers
