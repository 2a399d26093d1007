"""Reads a quantized model of any of the formats into the canonical form."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import onnx

from kenosis_ort.formats.channels_last import to_channels_first
from kenosis_ort.formats.constant_layouts import fold_layouts
from kenosis_ort.formats.from_qcdq import from_qcdq
from kenosis_ort.formats.from_qdq import from_qdq, is_dequantize
from kenosis_ort.formats.from_qonnx import Reader
from kenosis_ort.formats.from_qop import from_qop, holds_quantized_operators
from kenosis_ort.formats.qonnx_nodes import DOMAINS, check_nodes, drop_imports, is_qonnx, spell_out
from kenosis_ort.formats.signedness import to_signed
from kenosis_ort.formats.to_float import FloatReader, to_float
from kenosis_ort.graph.canonical import make_canonical
from kenosis_ort.graph.constants import constants_to_initializers, detach_initializers, meant_as_defaults
from kenosis_ort.graph.gate import check_runtime_loads
from kenosis_ort.graph.load import LoadedModel, load_model
from kenosis_ort.graph.names import name_nodes
from kenosis_ort.graph.opset import fit_ir_version, fit_opset
from kenosis_ort.graph.shapes import infer_shapes, value_types
from kenosis_ort.rewrite.fold_constants import fold_constants
from kenosis_ort.runtime.limits import runtime_limits

_LEAST_OPSET = 13
"""From here on Q and DQ take a scale for each channel, and Clip takes integers."""


@dataclass(frozen=True)
class ReadModel:
    """A model that was read.

    Attributes:
        canonical: In the canonical form; a float model where that was asked for.
        reference: The model as it came, with QONNX' operators in those of ONNX: what the runtime computes for it is
            what the file says.
        loaded: The file's own content and names; of QONNX with its operators.
        format: ``"qonnx"``, ``"qop"``, ``"qcdq"`` or ``"qdq"``.
    """

    canonical: onnx.ModelProto
    reference: onnx.ModelProto
    loaded: LoadedModel
    format: str


def read_model(
    source: str | os.PathLike[str] | onnx.ModelProto,
    *,
    as_float: bool = False,
    custom_op_libraries: Sequence[str] = (),
) -> ReadModel:
    """Loads a quantized model and brings it into the canonical form.

    The runtime looks at the model before anything else that is written in C++ does: at one of QONNX in the spelling of
    ONNX' own operators.

    Args:
        source: Path of an ONNX file, or a model (not changed).
        as_float: Return the float model behind the quantized one instead, see `kenosis_ort.formats.to_float`.
        custom_op_libraries: Libraries with custom operators to register with the runtime.

    Raises:
        ModelLoadError: There is no model, or the runtime refuses it.
        UnsupportedModelError: Something in it that the canonical form cannot express.
    """
    loaded = load_model(source, ask_runtime=False)
    model = onnx.ModelProto()
    model.CopyFrom(loaded.proto)
    kind = "qdq"
    if any(is_qonnx(node) for node in model.graph.node):
        kind = "qonnx"
        check_nodes(model)
        to_channels_first(model)
        reference = spell_out(model)
        check_runtime_loads(reference, None, loaded.name, custom_op_libraries=custom_op_libraries)
    else:
        check_nodes(model)  # none in bodies either
        drop_imports(model, DOMAINS)
        reference = loaded.proto
        check_runtime_loads(
            reference, loaded.path, loaded.name, is_split=loaded.is_split, custom_op_libraries=custom_op_libraries
        )
    _prepare(model, keep_defaults=kind != "qonnx")
    if kind == "qonnx":
        types = value_types(spell_out(model))
        model = (FloatReader if as_float else Reader)(model, types).read()
    limits = runtime_limits()
    fit_opset(model, min_opset=_LEAST_OPSET, max_opset=limits.max_opset)
    fit_ir_version(model, max_ir=limits.max_ir)
    infer_shapes(model, custom_op_libraries=custom_op_libraries)
    if holds_quantized_operators(model):
        kind = "qop"
    elif kind == "qdq" and _has_integer_clip(model):
        kind = "qcdq"
    model = from_qop(model, {v.name: v.type for v in (*model.graph.value_info, *model.graph.input)})
    model = to_signed(fold_layouts(from_qdq(from_qcdq(model))))
    if as_float:
        model = to_float(model)
    infer_again(model)
    return ReadModel(model, reference, loaded, kind)


def _prepare(model: onnx.ModelProto, *, keep_defaults: bool) -> None:
    """Names nodes, puts them in order, and makes initializers of all that is constant."""
    name_nodes(model)
    make_canonical(model)
    # Brevitas lists weights as inputs out of habit; elsewhere an input with a default may be meant as one.
    detach_initializers(model, keep=tuple(meant_as_defaults(model)) if keep_defaults else ())
    constants_to_initializers(model)
    infer_shapes(model, thorough=False)
    clips = {node.output[0] for node in model.graph.node if node.op_type == "Clip"}
    fold_constants(model, keep_values=clips)  # they say how many bits a constant has


def _has_integer_clip(model: onnx.ModelProto) -> bool:
    clips = {node.output[0] for node in model.graph.node if node.op_type == "Clip"}
    return any(is_dequantize(node) and node.input[0] in clips for node in model.graph.node)


def infer_again(model: onnx.ModelProto) -> None:
    """Infers types anew, in place, by ONNX alone.

    Those of rewritten values are not what the file declares, and what is guessed for reading (the rank of an If whose
    branches differ in theirs) is not to be declared in a file.
    """
    del model.graph.value_info[:]
    infer_shapes(model, thorough=False)
