"""Preparation of an exported model for calibration, placement and quantization.

The steps, in order, each in a module of its own: names, one spelling, constants, operator set, IR version, types and
shapes, float32 for other floating types, then the float rewrites that the caller passes in. What the model computes
stays the same throughout.
"""

from collections.abc import Collection, Sequence

import onnx

from kenosis_ort.graph.canonical import make_canonical
from kenosis_ort.graph.constants import constants_to_initializers, detach_initializers, drop_stale_value_info
from kenosis_ort.graph.live import RewriteResult
from kenosis_ort.graph.opset import fit_opset
from kenosis_ort.graph.outside import copy_model
from kenosis_ort.graph.precision import compute_in_float32
from kenosis_ort.graph.shapes import infer_shapes
from kenosis_ort.graph.view import PreparedModel
from kenosis_ort.graph.walk import fit_ir_version, name_nodes
from kenosis_ort.rewrite.rule import Editor, Rule
from kenosis_ort.runtime.machine import runtime_limits

PRE_PROCESSED_KEY, PRE_PROCESSED_VALUE = "onnx.quant.pre_process", "onnxruntime.quant"
"""The metadata that stock ``quant_pre_process`` writes and stock quantization looks for."""


class RewriteError(Exception):
    """A rewrite failed; the model it was at is spoilt, a copy without it is not.

    Attributes:
        name: Of the rewrite.
        cause: What it raised.
    """

    def __init__(self, name: str, cause: Exception) -> None:
        super().__init__(f"{name}: {cause}")
        self.name = name
        self.cause = cause


def is_marked_preprocessed(proto: onnx.ModelProto) -> bool:
    """Whether the model's metadata say that it went through ``quant_pre_process``."""
    mark = (PRE_PROCESSED_KEY, PRE_PROCESSED_VALUE)
    return any((entry.key, entry.value) == mark for entry in proto.metadata_props)


def prepare(
    proto: onnx.ModelProto,
    *,
    preprocessed: bool | None = None,
    min_opset: int,
    max_opset: int | None = None,
    keep_values: Collection[str] = (),
    keep_inputs: Collection[str] = (),
    keep_types: bool = False,
    rewrites: Sequence[Rule] = (),
    custom_op_libraries: Sequence[str] = (),
) -> PreparedModel:
    """Prepares a model for quantization.

    Graph inputs and outputs keep their names, nodes keep theirs.

    Args:
        proto: The model, complete in memory; not changed.
        preprocessed: Whether the model went through pre-processing already and is not to be rewritten; None
            reads it from the model's metadata.
        min_opset: Lowest main operator set of the result.
        max_opset: Highest main operator set of the result; None for the highest that the runtime reads.
        keep_values: Values that must keep existing under their names.
        keep_inputs: Inputs with a default value that callers really feed, and that so stay inputs.
        keep_types: Whether other floating types than float32 stay what they are.
        rewrites: Float rewrites to apply, in order; skipped for pre-processed models.
        custom_op_libraries: Libraries whose operators take part in shape inference.

    Raises:
        UnsupportedModelError: The model has a node that the needed operator set does not know.
        RewriteError: One of the rewrites raised.
    """
    model = copy_model(proto)
    notes: list[str | None] = []
    nodes: dict[str, tuple[str, ...]] = {}
    if preprocessed is None:
        preprocessed = is_marked_preprocessed(model)

    # Names and a canonical graph.
    naming = name_nodes(model)
    nodes.update(naming.duplicates)
    if naming.unnamed:
        notes.append(f"{naming.unnamed} nodes without a name were named after their first output.")
    if naming.duplicates:
        notes.append(f"{len(naming.duplicates)} names were shared by several nodes; all but the first got a suffix.")
    respelled, inlined = make_canonical(model, keep_values=keep_values)
    notes += respelled
    nodes.update(inlined)

    # Constants as initializers.
    detached = detach_initializers(model, keep=keep_inputs)
    if detached:
        notes.append(f"{len(detached)} initializers were also graph inputs and are constants now.")
    constants = constants_to_initializers(model)
    nodes.update(dict.fromkeys(constants, ()))
    if constants:
        notes.append(f"{len(constants)} Constant nodes became initializers.")
    # Operator set, IR version and shapes.
    limits = runtime_limits()
    notes.append(fit_opset(model, min_opset=min_opset, max_opset=max_opset or limits.max_opset))
    notes.append(fit_ir_version(model, max_ir=limits.max_ir))
    unknown = infer_shapes(model, custom_op_libraries=custom_op_libraries)
    inside, note = (None, None) if keep_types else compute_in_float32(model)
    notes.append(note)
    model = inside or model
    rewritten, editor = inside is not None, None
    if rewrites and not preprocessed:
        editor = Editor(model)
        for rewrite in rewrites:
            result = applied(rewrite, editor, keep_values=keep_values)
            rewritten |= bool(result.notes)
            notes.extend(result.notes)
            nodes.update({gone: (by,) if by else () for gone, by in result.merged.items()})
        editor.write()
    if rewritten:
        drop_stale_value_info(model)
        unknown = infer_shapes(model, thorough=False)
    if editor is not None:
        editor.read_types()
    notes.append(unknown)
    return PreparedModel(model, tuple(note for note in notes if note), nodes, editor)


def applied(
    rewrite: Rule, editor: Editor, *, keep_values: Collection[str] = (), **named: Collection[str]
) -> RewriteResult:
    """Applies one rewrite of a row to a model that an editor holds.

    Args:
        rewrite: The rule.
        editor: The editor, whose protobuf is up to date behind `LiveGraph.write`.
        keep_values: Values that must keep existing with their meaning.
        named: ``nodes``, the names of the nodes that may change, where not all may.

    Raises:
        RewriteError: It raised.
    """
    try:
        return rewrite(editor, keep_values=keep_values, **named)
    except Exception as error:
        raise RewriteError(rewrite.__name__, error) from error
