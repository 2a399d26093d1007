"""For which target a file was made, in its metadata."""

from __future__ import annotations

from typing import Final

import onnx

_KEY: Final = "kenosis_ort.target"


def mark(model: onnx.ModelProto, target: str) -> None:
    """Writes into a model, in place, for which target it was made."""
    kept = [entry for entry in model.metadata_props if entry.key != _KEY]
    del model.metadata_props[:]
    model.metadata_props.extend([*kept, onnx.StringStringEntryProto(key=_KEY, value=target)])


def made_for(model: onnx.ModelProto) -> str | None:
    """Returns the name of the target that a model was made for, None where it does not say."""
    return next((entry.value for entry in model.metadata_props if entry.key == _KEY), None)
