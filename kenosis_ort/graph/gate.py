"""The runtime looks at a model before anything else does that is written in C++.

ONNX's shape inference, checker and version converter crash or never end on some models that the runtime refuses in one
sentence. So every model from outside is loaded by the runtime first: without optimization, without custom operators
nobody asked for. What it refuses is refused here; what it loads has sound types, attributes and references.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import onnx

from kenosis_ort.errors import ModelLoadError
from kenosis_ort.graph.copying import copy_model
from kenosis_ort.graph.names import name_nodes
from kenosis_ort.graph.session import create_session
from kenosis_ort.graph.walk import MAIN_DOMAINS, opset_of
from kenosis_ort.runtime.limits import runtime_limits
from kenosis_ort.runtime.session import session_options

_log = logging.getLogger(__name__)

_MESSAGE_LIMIT = 400
_OLDEST_OPSET = 7
"""The runtime has no kernels for some operators of older sets, which preparation converts."""


def check_runtime_loads(
    proto: onnx.ModelProto,
    path: Path | None,
    name: str,
    *,
    is_split: bool = False,
    custom_op_libraries: Sequence[str] = (),
) -> None:
    """Has the runtime load a model.

    What preparation mends by itself is no reason for a refusal: node names used twice, an IR version or operator set
    newer than the runtime's, operators of sets so old that it has no kernels for them, shapes in external data.

    Args:
        proto: The model with all data in memory; not changed.
        path: Its file, None if there is none.
        name: What messages call it.
        is_split: Whether the file refers to external data.
        custom_op_libraries: Libraries with custom operators to register.

    Raises:
        ModelLoadError: The runtime refuses the model.
    """
    refusal = _refusal(path or proto, custom_op_libraries)
    if refusal is None or _lacks_kernels_only(refusal, proto):
        return
    mended = _mended(proto, is_split=is_split)
    if mended is not None and _refusal(mended, custom_op_libraries) is None:
        _log.info("%s: the runtime loads it after small repairs only (%s)", name, refusal)
        return
    raise ModelLoadError(
        f"The runtime refuses the model: {' '.join(str(refusal).split())[:_MESSAGE_LIMIT]}",
        where=name,
        fix="Check that the model runs in onnxruntime; for custom operators give custom_op_libraries.",
    ) from refusal


def _refusal(source: onnx.ModelProto | Path, libraries: Sequence[str]) -> Exception | None:
    """Returns what the runtime raises at load, None where it loads the model."""
    try:
        options = session_options(optimize=False, custom_op_libraries=libraries)
        options.add_session_config_entry("session.disable_prepacking", "1")  # nothing is run: no second copy of weights
        create_session(source, options)
    except Exception as error:  # the binding raises its own classes, all of them direct children of Exception
        return error
    return None


def _lacks_kernels_only(refusal: Exception, proto: onnx.ModelProto) -> bool:
    return type(refusal).__name__ == "NotImplemented" and 0 < opset_of(proto) < _OLDEST_OPSET


def _mended(proto: onnx.ModelProto, *, is_split: bool) -> onnx.ModelProto | None:
    """Returns a copy with unique node names and a header that the runtime reads; None where nothing would differ."""
    limits = runtime_limits()
    copy = copy_model(proto)
    changed = bool(name_nodes(copy).duplicates) or copy.ir_version > limits.max_ir
    copy.ir_version = min(copy.ir_version, limits.max_ir)
    for entry in copy.opset_import:
        if entry.domain in MAIN_DOMAINS and entry.version > limits.max_opset:
            entry.version, changed = limits.max_opset, True
    return copy if changed or is_split else None
