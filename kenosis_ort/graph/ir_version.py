"""The IR version: lowered to what the installed runtime reads, raised to what the operator sets need."""

from __future__ import annotations

import onnx
import onnx.helper

from kenosis_ort.graph.walk import MAIN_DOMAINS, opset_of

_DEFAULT_INPUTS_SINCE = 4
"""From this IR version on, initializers need not be graph inputs."""


def fit_ir_version(model: onnx.ModelProto, *, max_ir: int) -> str | None:
    """Sets the model's IR version in place.

    The IR version only says which fields a reader must know; lowering it is right as long as the model uses
    none that came later, and the runtime ignores the later ones (metadata, device configurations).

    Returns:
        A note where the version changed, else None.
    """
    before = model.ir_version
    needed = max(before, _DEFAULT_INPUTS_SINCE, _needed_for_opset(opset_of(model)))
    model.ir_version = min(needed, max_ir)
    if model.ir_version == before:
        return None
    if model.ir_version < before:
        return f"IR version lowered from {before} to {model.ir_version}, the newest that the installed runtime reads."
    return f"IR version raised from {before} to {model.ir_version}."


def _needed_for_opset(opset: int) -> int:
    """Returns the IR version that was current when a main operator set was published."""
    published = onnx.helper.OP_SET_ID_VERSION_MAP.items()
    known = {version: ir for (domain, version), ir in published if domain in MAIN_DOMAINS}
    if not known or not opset:
        return 0
    return known.get(opset, max(known.values()))
