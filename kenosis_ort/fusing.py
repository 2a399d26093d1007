"""Attention as one operator in a float model, for those who do not want it quantized."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import onnx

from kenosis_ort.checks import path as check_path
from kenosis_ort.errors import last_gate
from kenosis_ort.graph.constants import meant_as_defaults
from kenosis_ort.graph.files import check_written, write_model
from kenosis_ort.graph.load import load_model
from kenosis_ort.graph.walk import MAIN_DOMAINS, opset_of
from kenosis_ort.option_types import check_model
from kenosis_ort.rewrite import PREPARATION
from kenosis_ort.rewrite.attention import fuse_attention
from kenosis_ort.rewrite.prepare import prepare
from kenosis_ort.runtime.session import open_session
from kenosis_ort.storage.writing import absolute


@dataclass(frozen=True)
class FusedModel:
    """A float model whose attention layers are one operator each, where they can be.

    Attributes:
        model: The model.
        attentions: Names of the nodes that are attention layers now, those that the model came with included.
        notes: What was done, and why what looks like attention stays as it is, in sentences.
    """

    model: onnx.ModelProto
    attentions: tuple[str, ...]
    notes: tuple[str, ...]


@last_gate
def fuse(
    model_input: str | os.PathLike[str] | onnx.ModelProto,
    model_output: str | os.PathLike[str] | None = None,
    *,
    custom_op_libraries: Sequence[str] = (),
) -> FusedModel:
    """Turns the attention layers of a float model into one operator each; what it computes stays the same.

    They are found by what flows into and out of a Softmax, not by the names or lists of nodes of one exporter, see
    `kenosis_ort.rewrite.attention`. `quantize_static` does this as well.

    Args:
        model_input: The float model; not changed.
        model_output: Where to write it; None writes nothing.
        custom_op_libraries: Libraries with custom operators to register; none is loaded unasked.

    Returns:
        The model, the layers found, and what was done.

    Raises:
        KenosisError: One of its subclasses; nothing was written.
    """
    check_model(model_input)
    output = None if model_output is None else absolute(check_path("model_output", model_output))
    if output is not None:
        source = Path(model_input) if isinstance(model_input, (str, os.PathLike)) else None
        check_written(source, output)
    loaded = load_model(model_input, custom_op_libraries=custom_op_libraries)
    prepared = prepare(
        loaded.proto,
        preprocessed=False,
        min_opset=opset_of(loaded.proto),
        keep_inputs=meant_as_defaults(loaded.proto),
        keep_types=True,
        rewrites=(*PREPARATION, fuse_attention),
        custom_op_libraries=custom_op_libraries,
    )
    if output is not None:
        write_model(
            prepared.proto,
            output,
            external_data=loaded.is_split,
            check=partial(open_session, custom_op_libraries=custom_op_libraries),
        )
    found = tuple(n.name for n in prepared.proto.graph.node if n.op_type == "Attention" and n.domain in MAIN_DOMAINS)
    return FusedModel(prepared.proto, found, prepared.notes)
