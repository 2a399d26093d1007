"""Checks of the files of a call: none that is written is read as well, and the written one loads in a fresh session."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx

from kenosis_ort.calibration.readers import source_files
from kenosis_ort.errors import VerificationError
from kenosis_ort.flow.request import Request
from kenosis_ort.graph import files
from kenosis_ort.runtime.session import open_session
from kenosis_ort.verify import check_bias_alignment

_REPORT = "report this as a bug, if you can with the model; recipe='plain' may avoid it"


def check_biases(quantized: onnx.ModelProto, request: Request) -> None:
    """Checks the grids of all int32 biases.

    Raises:
        VerificationError: One is off.
    """
    problems = check_bias_alignment(quantized)
    if problems and request.stock_reason is None:
        what = f"{len(problems)} int32 biases are off their grid"
        raise VerificationError(what, where=str(problems[0]), fix=_REPORT)


def check_loads(path: Path, request: Request, *, pieces: int = 1) -> None:
    """Loads the written file in a fresh session; one that stock onnxruntime does not load is checked alone.

    The runtime's load time grows with the square of the depth: a huge model, which the fusion proof has loaded in
    pieces if at all, is loaded unoptimized.

    Args:
        path: The file.
        request: For the custom operators.
        pieces: Into how many pieces the fusion proof cut the model; 0 without a proof of a huge model.

    Raises:
        VerificationError: The runtime refuses it.
    """
    if request.target.loads_in_ort:
        open_session(path, custom_op_libraries=request.custom_op_libraries, optimize=pieces == 1)
        return
    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        raise VerificationError(f"the file is not consistent: {error}", where=str(path), fix=_REPORT) from error


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
    outputs, inputs = [*written], [*read, *(("the calibration data", file) for file in source_files(reader))]
    if cache is not None:
        (inputs if os.path.exists(cache) else outputs).append(("the calibration cache", cache))
    files.check_written(model, output, written=outputs, read=inputs, in_place=in_place)
