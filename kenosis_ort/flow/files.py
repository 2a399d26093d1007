"""Files that a quantization reads and writes, checked against each other before any work."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kenosis_ort.calibration.reader_base import source_files
from kenosis_ort.graph.external_data import external_files
from kenosis_ort.graph.save import data_file
from kenosis_ort.storage.paths import check_apart, same_file

OUTPUT = "the output"
MODEL = "the float model"


def check_files(
    model: Path | None,
    output: Path,
    *,
    cache: Path | None = None,
    written: Sequence[tuple[str, Path]] = (),
    read: Sequence[tuple[str, Path]] = (),
    reader: Any = None,
    in_place: bool = True,
) -> None:
    """Checks that no file to be written is one that is read, or written as something else.

    Args:
        model: The float model's file; None for a model in memory.
        output: The quantized model.
        cache: The calibration cache, which is read if it exists and written if not.
        written: What else is written: what it is, and where.
        read: What else is read.
        reader: The calibration data reader; files that it is known to read are not written over.
        in_place: Whether the output may take the float model's place, as stock's may.

    Raises:
        OutputError: Two are the same file.
    """
    outputs = [(OUTPUT, output), ("the output's external data", data_file(output)), *written]
    inputs = [*read, *(("the calibration data", file) for file in source_files(reader))]
    if cache is not None:
        (inputs if os.path.exists(cache) else outputs).append(("the calibration cache", cache))
    if model is not None:
        data = external_files(model) if any(os.path.exists(path) for _, path in outputs) else []
        if in_place and same_file(model, output):
            data = [file for file in data if not same_file(file, data_file(output))]
            check_apart(outputs[1:], [(MODEL, model)])
        else:
            inputs.append((MODEL, model))
        inputs += [("the float model's external data", file) for file in data]
    check_apart(outputs, inputs)
