"""Conformance: which Conv of a file is an instance of the patterns that a target's document defines."""

from __future__ import annotations

import os

import onnx

from kenosis_ort.errors import OptionError, last_gate
from kenosis_ort.graph.source import read_source
from kenosis_ort.targets import TARGETS, Target, get_target
from kenosis_ort.targets.pattern_report import PatternReport


@last_gate
def verify_patterns(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto, target: str | Target = "onednn"
) -> PatternReport:
    """Holds every Conv of a QDQ model, of any origin, against the quantized patterns that a target's document defines.

    Args:
        model: Path, serialized model or `ModelProto`; external data is not read. Not changed.
        target: Whose document: a name, or a `kenosis_ort.targets.Target`.

    Returns:
        One entry per Conv, in the model's order, those of ``If``, ``Loop`` and ``Scan`` bodies included.

    Raises:
        ModelLoadError: The file is missing or is not an ONNX model.
        OptionError: There is no document of that target.
    """
    asked = get_target(target)
    if asked.conform is None:
        raise OptionError(
            f"target '{asked.name}' has no documented patterns",
            where="target",
            fix=f"one of {sorted(name for name, known in TARGETS.items() if known.conform is not None)}",
        )
    source = read_source(model)
    return asked.conform(source.proto, source.folder, asked.name)
