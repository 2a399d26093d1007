"""ONNX Runtime's QNN provider: the runtime on which this target is proved, on x86-64 Linux by its simulator of HTP.

It is an extra of the package. It is asked in a process of its own, since its log has to be read, it keeps the chip
that it was first opened for, and an operator that it cannot compile may end the process.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from kenosis_ort.errors import RuntimeEndedError, VerificationError
from kenosis_ort.runtime.child import Child

PROVIDER: Final = "QNNExecutionProvider"
CHIP_VARIABLE: Final = "KENOSIS_ORT_QNN_CHIP"
_USUAL_CHIP: Final = "60"
"""Qualcomm's number of the Snapdragon X Elite (HTP v73), the chip of most machines on which ONNX Runtime uses HTP."""
_SCRIPT: Final = Path(__file__).with_name("qnn_child.py")
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
    found: list[dict[str, Any]] = []
    with Child([sys.executable, str(_SCRIPT)], "the QNN provider") as child:
        try:
            child.ask({})
        except RuntimeEndedError as error:  # it did not come as far as the first model
            fix = "import onnxruntime_qnn in this environment, and see what it says"
            raise VerificationError(error.what, fix=fix) from error
        try:
            found.extend(child.ask({"model": str(model), "chip": chip()}) for model in models)
        except RuntimeEndedError as error:
            found.append({"failure": error.what})
    refused = tuple(dict.fromkeys(match["name"] for match in _REFUSED.finditer(child.log)))
    return [Answer(one.get("taken", {}), refused, one.get("failure", "")) for one in found]
