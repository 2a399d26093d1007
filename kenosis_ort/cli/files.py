"""Paths on the command line: what is missing is said before any work, with what was probably meant."""

from __future__ import annotations

from pathlib import Path

from kenosis_ort.errors import ModelLoadError, did_you_mean


def check_model(path: Path) -> None:
    """Checks that there is a model file at all.

    Raises:
        ModelLoadError: There is none; the message names the closest one in the folder.
    """
    if path.exists():
        return
    folder = path.parent
    models = [entry.name for entry in folder.glob("*.onnx")] if folder.is_dir() else []
    listed = f"{folder} holds {', '.join(sorted(models)[:5])}" if models else f"there is no .onnx file in {folder}"
    raise ModelLoadError(
        f"The model file does not exist.{did_you_mean(path.name, models)}",
        where=str(path),
        fix=f"Check the path; {listed}.",
    )
