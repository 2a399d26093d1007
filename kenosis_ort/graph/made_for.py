"""For which target and processors a file was made, in its metadata."""

from __future__ import annotations

from typing import Final

import onnx

_KEY: Final = "kenosis_ort.target"
_PROCESSORS: Final = "kenosis_ort.processors"


def mark(model: onnx.ModelProto, target: str, *, needs_vnni: bool = False) -> None:
    """Writes into a model, in place, for which target it was made.

    Args:
        model: The model.
        target: Name of the target.
        needs_vnni: Products of its weights clip on processors without VNNI.
    """
    kept = [entry for entry in model.metadata_props if entry.key not in (_KEY, _PROCESSORS)]
    said = {_KEY: target, **({_PROCESSORS: "with VNNI"} if needs_vnni else {})}
    del model.metadata_props[:]
    model.metadata_props.extend([*kept, *(onnx.StringStringEntryProto(key=k, value=v) for k, v in said.items())])


def made_for(model: onnx.ModelProto) -> str | None:
    """Returns the name of the target that a model was made for, None where it does not say."""
    return next((entry.value for entry in model.metadata_props if entry.key == _KEY), None)
