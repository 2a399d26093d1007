"""The float model in the forms that suit quantization: of static shapes, prepared, rewritten for integer kernels."""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

import onnx

from kenosis_ort.errors import OptionError, UnsupportedModelError
from kenosis_ort.flow.request import Request
from kenosis_ort.graph import constants, outside, shapes, walk
from kenosis_ort.graph.load import LoadedModel
from kenosis_ort.graph.opset import fit_opset
from kenosis_ort.graph.view import PreparedModel
from kenosis_ort.passes.journal import Journal
from kenosis_ort.placement.cost import NetCosts
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.quantizer.stock import stock_model
from kenosis_ort.rewrite.norms import norm_around
from kenosis_ort.rewrite.prepare import RewriteError, applied, prepare
from kenosis_ort.rewrite.rule import Editor
from kenosis_ort.runtime.machine import runtime_limits
from kenosis_ort.targets.profile import CostTable

_TOOL: Final = "python -m onnxruntime.tools.make_dynamic_shape_fixed"


def with_static_shapes(loaded: LoadedModel, target: str) -> tuple[LoadedModel, tuple[str, ...]]:
    """A model without symbolic dimensions, and what was done, in sentences.

    The first dimension of an input is taken for the batch and becomes 1.

    Args:
        loaded: The model; not changed.
        target: Name of the target, for messages.

    Raises:
        UnsupportedModelError: Another dimension is symbolic, or an input's number of dimensions is not known.
    """
    given = {tensor.name for tensor in loaded.proto.graph.initializer}
    inputs = [info for info in loaded.proto.graph.input if info.name not in given]
    opened = [info for info in inputs if not _is_static(info)]
    for info in opened:
        dims = info.type.tensor_type.shape.dim
        if not info.type.tensor_type.HasField("shape") or any(not d.dim_value for d in dims[1:]):
            example = ",".join(str(d.dim_value or ("1" if i == 0 else "N")) for i, d in enumerate(dims)) or "1,3,N,N"
            raise UnsupportedModelError(
                f"target '{target}' takes static shapes alone, and input '{info.name}' is {_text(info)}",
                where=loaded.name,
                fix=f"{_TOOL} --input_name {info.name} --input_shape {example} (numbers for N) model.onnx fixed.onnx, "
                "and samples of that shape",
            )
    if not opened:
        return loaded, ()
    proto = outside.copy_model(loaded.proto)
    names = {info.name for info in opened}
    symbols = {info.type.tensor_type.shape.dim[0].dim_param for info in opened} - {""}
    for info in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for at, dim in enumerate(info.type.tensor_type.shape.dim):
            if dim.dim_param in symbols or (at == 0 and info.name in names):
                dim.dim_value = 1
    shown = ", ".join(f"'{info.name}' {_text(info)}" for info in opened)
    note = f"Target '{target}' takes static shapes alone: the batch is 1 in the file (inputs were {shown})."
    return replace(loaded, proto=proto), (note,)


def _is_static(info: onnx.ValueInfoProto) -> bool:
    tensor = info.type.tensor_type
    return tensor.HasField("shape") and all(dim.dim_value for dim in tensor.shape.dim)


def _text(info: onnx.ValueInfoProto) -> str:
    """A shape in words."""
    if not info.type.tensor_type.HasField("shape"):
        return "of unknown shape"
    return f"[{', '.join(d.dim_param or str(d.dim_value or '?') for d in info.type.tensor_type.shape.dim)}]"


_log = logging.getLogger(__name__)
T = TypeVar("T")
_MIN_OPSET = 13  # per-channel DequantizeLinear
_NORM_OPSET = 17  # LayerNormalization
_RELABELLED_OPSET = 20
"""The last in which the runtime makes uint8 of int8 activations in all of its own Qs: later ones say their type, and it
forgets to change that ("output_dtype INT8 does not match y_zero_point type UINT8" at load, onnxruntime 1.31.1)."""
_WIDE_OPSET = 21  # QuantizeLinear of 16 and 4 bits, scales by block
_WORTH_AN_OPSET = 1.05
"""Estimated speed over the model at its own operator set from which on a higher one is taken: older runtimes, to which
a file may be meant to go, refuse it."""
_NORM_PARTS = frozenset({"ReduceMean", "LayerNormalization", "SkipLayerNormalization"})


def _without_what_fails(
    rewrite: Callable[[frozenset[str]], T], journal: Journal, skipped: frozenset[str] = frozenset()
) -> T:
    """Model after a step of rewrites; a rewrite that raises is left out, and the step begins anew."""
    try:
        return rewrite(skipped)
    except RewriteError as error:
        journal.tell(f"The rewrite '{error.name}'", error.cause)
        skipped |= {error.name}
    return _without_what_fails(rewrite, journal, skipped)


def highest_opset(request: Request) -> int:
    """The highest main operator set of the result.

    Raises:
        OptionError: Something else that the caller asks for needs a higher one than the caller allows.
    """
    highest = runtime_limits().max_opset if request.max_opset is None else request.max_opset
    needs = {"weights alone, in blocks,": _WIDE_OPSET} if request.recipe.weight_only else {}
    if request.needs_wide_types:
        needs["a data type of 16 or 4 bits"] = _WIDE_OPSET
    for what, least in needs.items():
        if request.max_opset is not None and highest < least:
            raise OptionError(
                f"{what} needs operator set {least}, and max_opset is {highest}",
                where="max_opset",
                fix=f"max_opset={least} or more, or leave out what needs it",
            )
    return min(highest, runtime_limits().max_opset)


def with_lowered_opset(loaded: LoadedModel, highest: int) -> tuple[LoadedModel, tuple[str, ...]]:
    """The model at no higher operator set than the caller allows, and what was done, in sentences.

    Args:
        loaded: The model; not changed.
        highest: The highest main operator set.

    Raises:
        UnsupportedModelError: A node has no equivalent in it.
    """
    if walk.opset_of(loaded.proto) <= highest:
        return loaded, (f"The operator set is {highest} at most, as asked for: what needs a later one was left out.",)
    proto = outside.copy_model(loaded.proto)
    note = fit_opset(proto, min_opset=_MIN_OPSET, max_opset=highest)
    return replace(loaded, proto=proto), (f"{note} It is {highest} at most, as asked for.",)


def prepare_model(proto: onnx.ModelProto, request: Request, journal: Journal) -> PreparedModel:
    """The model that everything after works on; for stock's placement prepared as stock does.

    Args:
        proto: The model as it came. Not changed.
        request: What the caller wants.
        journal: Is told of a rewrite that failed and was left out.
    """
    return _without_what_fails(partial(_prepare_model, proto, request), journal)


def _prepare_model(proto: onnx.ModelProto, request: Request, skipped: frozenset[str]) -> PreparedModel:
    if request.is_stock:
        return PreparedModel(_stock_model(proto, request))
    limits, highest = runtime_limits(), highest_opset(request)
    plannable = request.stock_reason is None
    relabels = request.activation_type.tensor_type in request.types.single_reader
    forms = (f for f in request.float_forms if f.raises_to <= (0 if relabels else highest))
    wanted = (*request.preparation, *forms) if plannable else ()
    prepare_at = partial(
        prepare,
        proto,
        keep_values=_values_of_the_caller(proto, request),
        keep_inputs=request.open_defaults,
        rewrites=tuple(f for f in wanted if f.__name__ not in skipped),
        custom_op_libraries=request.custom_op_libraries,
    )
    if plannable:
        operators = {node.op_type for node in proto.graph.node}
        best = min(limits.best_opset(operators), highest)
        least = _NORM_OPSET if operators & _NORM_PARTS and best >= _NORM_OPSET else _MIN_OPSET
        if best >= request.target.min_opset:
            least = max(least, request.target.min_opset)
        bounds = [(least, best), (_MIN_OPSET, best), (_MIN_OPSET, highest)]
        if relabels:
            bounds.insert(0, (min(least, _RELABELLED_OPSET), min(best, _RELABELLED_OPSET)))
        if request.needs_wide_types and highest >= _WIDE_OPSET:
            bounds.insert(0, (_WIDE_OPSET, max(best, _WIDE_OPSET)))
        prepared = _prepared_at_first(prepare_at, bounds)
        own = max(walk.opset_of(proto), _MIN_OPSET)
        is_chosen = request.max_opset is not None or request.needs_wide_types
        costs, table = request.target.costs, request.target
        if walk.opset_of(prepared.proto) <= own or is_chosen or (costs is None and table.min_opset > own):
            return prepared
        staying = tuple(f for f in prepare_at.keywords["rewrites"] if not f.raises_to)
        as_it_came = _prepared_at_first(partial(prepare_at, rewrites=staying), [(_MIN_OPSET, min(own, best)), *bounds])
        return as_it_came if costs is None else _raised_if_faster(as_it_came, prepared, costs)
    prepared = prepare_at(min_opset=_MIN_OPSET if request.per_channel else 0, max_opset=highest)
    return PreparedModel(_stock_model(prepared.proto, request), prepared.notes, prepared.nodes)


def _raised_if_faster(as_it_came: PreparedModel, raised: PreparedModel, costs: CostTable) -> PreparedModel:
    """The model at a higher operator set where the cost table says that it is worth it, else as it came.

    Args:
        as_it_came: At the operator set that the caller's model has.
        raised: At a higher one.
        costs: Of the target's kernels.
    """
    gain = _least_us(as_it_came.proto, costs) / _least_us(raised.proto, costs)
    before, after = walk.opset_of(as_it_came.proto), walk.opset_of(raised.proto)
    if gain < _WORTH_AN_OPSET:
        _log.info("operator set %d stays: %d would be %.2fx as fast by estimate", before, after, gain)
        return as_it_came
    note = f"By estimate operator set {after} makes the model {gain:.2f}x as fast; max_opset={before} keeps {before}."
    return replace(raised, notes=(*raised.notes, note))


_USUAL_SIZE: Final = 128


def _least_us(model: onnx.ModelProto, costs: CostTable) -> float:
    """Microseconds of a float model if each node ran on the faster of its kernels, conversions left out.

    Norms written as arithmetic count as the one kernel that the runtime makes of them at load.

    Args:
        model: The model; a free first dimension of an input counts as 1, others as 128.
        costs: The runtime's table.
    """
    if any(not dim.dim_value for value in model.graph.input for dim in value.type.tensor_type.shape.dim):
        model = outside.copy_model(model)
        for value in model.graph.input:
            for axis, dim in enumerate(value.type.tensor_type.shape.dim):
                dim.dim_value = dim.dim_value or (_USUAL_SIZE if axis else 1)
        del model.graph.value_info[:]
        shapes.infer_shapes(model, thorough=False)
    editor = Editor(model)
    found = NetCosts(editor, costs).estimate(PlacementPlan(""))
    norms = [norm for node in editor.find("Sqrt") if (norm := norm_around(editor, node))]
    parts = {node.name for norm in norms for node in norm.inner}
    return found.run_us + sum(min(c.float_us, c.integer_us or c.float_us) for c in found.nodes if c.node not in parts)


def _stock_model(proto: onnx.ModelProto, request: Request) -> onnx.ModelProto:
    """The model as stock prepares it.

    Raises:
        UnsupportedModelError: Stock's preparation fails on it.
    """
    try:
        prepared: onnx.ModelProto = stock_model(
            outside.complete(proto), request.weight_type, request.activation_type, request.extra_options
        )
    except Exception as error:  # ONNX's inference, checker and converter raise classes of their own
        raise UnsupportedModelError(
            f"stock's preparation of the model fails: {' '.join(str(error).split())[:300]}",
            fix="export the model at operator set 13 or later, or leave its placement to kenosis-ort",
        ) from error
    return prepared


def _values_of_the_caller(proto: onnx.ModelProto, request: Request) -> list[str]:
    """The values that rewrites leave alone: the ends of nodes and the tensors that the caller speaks about."""
    options = request.placement_options()
    constants = {i.name for i in proto.graph.initializer}
    own = set(options.overrides)
    constrained = {
        value
        for node in proto.graph.node
        if node.name in options.nodes_to_exclude or request.is_requested(node) or own & set(node.input) & constants
        for value in (*node.input, *node.output)
        if value
    }
    return sorted(own | (constrained - constants))


def _prepared_at_first(prepare_at: Callable[..., PreparedModel], opsets: Sequence[tuple[int, int]]) -> PreparedModel:
    """The model prepared within the first bounds of the operator set in which all of its nodes exist."""
    (low, high), *others = opsets
    try:
        return prepare_at(min_opset=low, max_opset=high)
    except UnsupportedModelError as error:
        left = [bounds for bounds in others if bounds != (low, high)]
        if not left:
            raise
        _log.info("not at operator sets %d to %d: %s", low, high, error)
        return _prepared_at_first(prepare_at, left)


def rewrite_for_integers(
    prepared: PreparedModel, nodes: Collection[str], request: Request, journal: Journal
) -> PreparedModel | None:
    """The model in forms that suit integer kernels better, None if there is nothing to rewrite.

    Args:
        prepared: The model.
        nodes: Names of the nodes that may change.
        request: What the caller wants.
        journal: Is told of a rewrite that failed and was left out.
    """
    return _without_what_fails(partial(_rewrite_for_integers, prepared, nodes, request), journal)


def _rewrite_for_integers(
    prepared: PreparedModel, nodes: Collection[str], request: Request, skipped: frozenset[str]
) -> PreparedModel | None:
    editor = Editor(outside.copy_model(prepared.proto))
    notes: list[str] = []
    merged = dict(prepared.nodes)
    before, changed = _outline(editor.proto), False
    for form in request.integer_forms:
        unwanted = request.restricts_types and form.writes and form.writes not in request.op_types
        if not unwanted and form.__name__ not in skipped:
            result = applied(form, editor, nodes=nodes)
            notes += result.notes
            merged.update({gone: (by,) if by else () for gone, by in result.merged.items()})
            after = _outline(editor.write()) if editor.has_edits else before
            if after != before:
                constants.drop_stale_value_info(editor.proto)
                shapes.infer_shapes(editor.proto, custom_op_libraries=request.custom_op_libraries, thorough=False)
                editor.read_types()
                before, changed = after, True
    if not changed:
        return None
    return PreparedModel(editor.proto, (*prepared.notes, *notes), merged, editor)


def _outline(model: onnx.ModelProto) -> object:
    """Nodes with their inputs, and shapes of weights: equal as long as no rewrite changes the graph."""
    nodes = [(node.name, node.op_type, tuple(node.input)) for node in model.graph.node]
    return nodes, [(tensor.name, tuple(tensor.dims)) for tensor in model.graph.initializer]
