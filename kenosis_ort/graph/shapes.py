"""Types and shapes of a model's values.

They come from three sources in turn:

1. ONNX's own shape inference, on a copy of the model without its weights (a weight is replaced by an input of its
   type and shape), so that the 2 GiB limit never matters and nothing large is serialised.
2. The runtime: a session on that copy without optimization says what it inferred. It knows the operators of
   ``com.microsoft`` and of registered custom-op libraries.
3. onnxruntime's symbolic shape inference, where it is installed with its dependency and still something is missing.
   Only types and ranks are taken from it: it guesses dimensions (a Split by computed sizes counts as equal parts).

Each source only fills what the ones before left open. A source that fails is logged and passed over: shapes
help quantization, they are not a condition of it. Nothing is written to disk.

Windows of a convolution are what its kernel is multiplied with at each place of its output.
"""

import importlib.util
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime

from kenosis_ort.errors import VerificationError
from kenosis_ort.graph.outside import copy_without_weights
from kenosis_ort.graph.walk import MAIN_DOMAINS, all_graphs, all_nodes
from kenosis_ort.runtime.session import TENSOR_TYPES, open_session

_log = logging.getLogger(__name__)

_MOST_ELEMENTS = 1024
"""Tensors up to this size are kept for inference: shapes, axes, slice bounds."""

_FATAL = frozenset(
    {("", "EyeLike"), ("", "RegexFullMatch"), ("ai.onnx.ml", "DictVectorizer"), ("ai.onnx.ml", "LabelEncoder")}
)
"""Operators whose inference in onnx 1.23 reads the type of an input that has none, as behind a contrib operator."""

_HIDDEN = "kenosis_ort.hidden"

_SYMBOLIC_NODES = 2000
"""Symbolic inference takes milliseconds a node; larger graphs do without it."""


def infer_shapes(
    model: onnx.ModelProto, *, custom_op_libraries: Sequence[str] = (), thorough: bool = True
) -> str | None:
    """Completes ``value_info`` of the main graph, and outputs declared without a shape, in place.

    Args:
        model: The model to change. What its value_info says is kept where ONNX leaves a value open.
        custom_op_libraries: Libraries to register with the runtime; none is loaded unasked.
        thorough: Whether to ask the runtime and the symbolic inference about what ONNX leaves open.

    Returns:
        A note if values are left without type or rank, else None.
    """
    skeleton = _skeleton(model)
    inferred = _infer_onnx(skeleton)
    known = _known_values(inferred if inferred is not None else skeleton)
    _complete_outputs(model, inferred)
    missing = _missing(model, known)
    if missing and thorough:
        found = _infer_runtime(skeleton, missing, custom_op_libraries)
        _complete(known, found)
        missing = _missing(model, known)
    if missing and thorough and len(model.graph.node) <= _SYMBOLIC_NODES:
        _complete(known, _infer_symbolic(skeleton))
        missing = _missing(model, known)
    produced = {name for node in model.graph.node for name in node.output if name}
    produced -= {value.name for value in model.graph.output}
    del model.graph.value_info[:]
    model.graph.value_info.extend(v for name, v in known.items() if name in produced and _has_type(v))
    if not missing:
        return None
    shown = ", ".join(f"'{name}'" for name in missing[:3]) + (", ..." if len(missing) > 3 else "")
    return f"Shape inference left {len(missing)} values without type or rank: {shown}."


def _has_type(value: onnx.ValueInfoProto) -> bool:
    """Whether the entry says a type at all; the runtime refuses one that does not."""
    kind = value.type.WhichOneof("value")
    return kind is not None and (kind != "tensor_type" or value.type.tensor_type.elem_type != 0)


def value_types(model: onnx.ModelProto) -> dict[str, onnx.TypeProto]:
    """Types and shapes that ONNX infers for the values of the main graph and its bodies, weights included.

    Where bodies reuse a name, the first one found stands for all.
    """
    skeleton = _skeleton(model)
    inferred = _infer_onnx(skeleton)
    types: dict[str, onnx.TypeProto] = {}
    for graph in all_graphs((inferred if inferred is not None else skeleton).graph):
        for value in (*graph.input, *graph.value_info, *graph.output):
            types.setdefault(value.name, value.type)
        for tensor in graph.initializer:
            types.setdefault(tensor.name, onnx.helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims)))
    return types


def shaped_by(model: onnx.ModelProto, feed: Mapping[str, Any]) -> onnx.ModelProto:
    """A copy without large weights, with the shapes that ONNX infers where inputs have those of a feed's arrays."""
    skeleton = _skeleton(model)
    del skeleton.graph.value_info[:]
    for value in skeleton.graph.input:
        if isinstance(given := feed.get(value.name), np.ndarray):
            for dim, size in zip(value.type.tensor_type.shape.dim, given.shape, strict=False):
                dim.dim_value = size
    return _infer_onnx(skeleton) or skeleton


def types_of(
    model: onnx.ModelProto, names: Sequence[str], custom_op_libraries: Sequence[str] = ()
) -> dict[str, onnx.TypeProto]:
    """Types of some values of the main graph, as declared or else as the runtime infers them, where it can."""
    graph = model.graph
    known = {v.name: v.type for v in (*graph.value_info, *graph.input, *graph.output) if v.type.WhichOneof("value")}
    computed = {name for node in graph.node for name in node.output}
    missing = [name for name in names if name not in known and name in computed]
    for value in _infer_runtime(_skeleton(model), missing, custom_op_libraries) if missing else ():
        known.setdefault(value.name, value.type)
    return {name: known[name] for name in names if name in known}


def has_rank(value: onnx.ValueInfoProto | None) -> bool:
    """Whether a value's element type and rank are known; sequences and the like need only a type."""
    if value is None:
        return False
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        return kind is not None
    return bool(value.type.tensor_type.elem_type) and value.type.tensor_type.HasField("shape")


def rank_in(types: Mapping[str, onnx.TypeProto], name: str) -> int | None:
    """The rank of a value by the types of `value_types`, None if it is not known."""
    kind = types.get(name)
    return None if kind is None or not kind.tensor_type.HasField("shape") else len(kind.tensor_type.shape.dim)


def _skeleton(model: onnx.ModelProto) -> onnx.ModelProto:
    large = {t.name: t for t in model.graph.initializer if math.prod(t.dims) > _MOST_ELEMENTS}
    skeleton = copy_without_weights(model, large)
    listed = {value.name for value in skeleton.graph.input}
    skeleton.graph.input.extend(
        onnx.helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims))
        for name, tensor in large.items()
        if name not in listed
    )
    return skeleton


def _without_fatal(skeleton: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the nodes hidden of which ONNX's inference dies where their input has no type."""
    if not any(_is_fatal(node) for node in all_nodes(skeleton)):
        return skeleton
    hidden = onnx.ModelProto()
    hidden.CopyFrom(skeleton)
    for node in all_nodes(hidden):
        if _is_fatal(node):
            node.domain = _HIDDEN
    hidden.opset_import.add(domain=_HIDDEN, version=1)
    return hidden


def _is_fatal(node: onnx.NodeProto) -> bool:
    return ("" if node.domain in MAIN_DOMAINS else node.domain, node.op_type) in _FATAL


def _infer_onnx(skeleton: onnx.ModelProto) -> onnx.ModelProto | None:
    """Infers from the graph alone; what the model declares counts only where that leaves a value open.

    The runtime goes by what it infers too, and a declaration may be wrong. The skeleton loses those not needed.
    """
    declared = onnx.GraphProto()
    declared.value_info.extend(skeleton.graph.value_info)
    del skeleton.graph.value_info[:]
    inferred = _run_onnx(skeleton)
    found = {} if inferred is None else _known_values(inferred)
    needed = [value for value in declared.value_info if not has_rank(found.get(value.name))]
    if not needed:
        return inferred
    skeleton.graph.value_info.extend(needed)
    return _run_onnx(skeleton) or inferred


def _run_onnx(skeleton: onnx.ModelProto, *, data_prop: bool = True) -> onnx.ModelProto | None:
    try:
        return onnx.shape_inference.infer_shapes(_without_fatal(skeleton), data_prop=data_prop)
    except Exception as error:  # the binding lets any C++ exception through
        _log.debug("onnx shape inference (data_prop=%s) failed: %s", data_prop, error)
    if data_prop:
        return _run_onnx(skeleton, data_prop=False)
    _log.info("ONNX shape inference failed on this model; the other sources are used")
    return None


def _infer_runtime(
    skeleton: onnx.ModelProto, missing: Iterable[str], custom_op_libraries: Sequence[str]
) -> list[onnx.ValueInfoProto]:
    """Asks the runtime about values by making them outputs, since it tells types of outputs only."""
    try:
        found = open_session(
            skeleton, optimize=False, custom_op_libraries=custom_op_libraries, further=missing
        ).get_outputs()
    except VerificationError as error:
        _log.info("the runtime could not infer shapes: %s", error.what)
        return []
    # An empty shape stands for a scalar and for an unknown rank alike: it says nothing.
    tensors = [(value.name, TENSOR_TYPES[value.type], value.shape) for value in found if value.type in TENSOR_TYPES]
    return [onnx.helper.make_tensor_value_info(name, kind, list(shape) or None) for name, kind, shape in tensors]


@cache
def _symbolic_inference() -> Any:
    """The runtime's module for it, loaded by itself: the package that it stands in imports torch."""
    file = Path(onnxruntime.__file__).parent / "tools" / "symbolic_shape_infer.py"
    spec = importlib.util.spec_from_file_location(f"{__package__}.symbolic_shape_infer", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _infer_symbolic(skeleton: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    try:
        # Its one-call form leaves a file in the working folder where it does not get through.
        inference = _symbolic_inference().SymbolicShapeInference(2**31 - 1, False, False, 0)
        inference._preprocess(skeleton)  # noqa: SLF001
        while inference.run_:
            inference._infer_impl()  # noqa: SLF001
        values = list(inference.out_mp_.graph.value_info)
    except Exception as error:  # third-party code on arbitrary graphs: asserts, KeyErrors, sympy errors, ImportError
        _log.info("symbolic shape inference failed: %s", error)
        return []
    for value in values:
        for dim in value.type.tensor_type.shape.dim:
            dim.Clear()
    return values


def _known_values(model: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    return {value.name: value for value in model.graph.value_info}


def _complete(known: dict[str, onnx.ValueInfoProto], found: Iterable[onnx.ValueInfoProto]) -> None:
    for value in found:
        present = known.get(value.name)
        if not has_rank(present) and (has_rank(value) or present is None):
            known[value.name] = value


def _complete_outputs(model: onnx.ModelProto, inferred: onnx.ModelProto | None) -> None:
    """Fills in types of graph outputs that were declared without type or rank."""
    known = [] if inferred is None else [*inferred.graph.input, *inferred.graph.output]
    found = {value.name: value for value in known if has_rank(value)}
    for tensor in model.graph.initializer:
        info = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        found.setdefault(tensor.name, info)
    named = {d.dim_param for v in model.graph.input for d in v.type.tensor_type.shape.dim} | {""}
    for value in model.graph.output:
        if not has_rank(value) and has_rank(found.get(value.name)):
            value.type.CopyFrom(found[value.name].type)
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param not in named:  # inference makes up names, the interface has those of the model
                    dim.Clear()


def _missing(model: onnx.ModelProto, known: dict[str, onnx.ValueInfoProto]) -> list[str]:
    declared = {value.name for value in model.graph.output} | {""}
    made = (name for node in model.graph.node for name in node.output if name not in declared)
    return [name for name in made if not has_rank(known.get(name))]


Array = npt.NDArray[Any]


def windows(
    data: Array,
    kernel: Sequence[int],
    *,
    strides: Sequence[int] = (),
    dilations: Sequence[int] = (),
    pads: Sequence[int] = (),
    auto_pad: str = "",
    filling: int = 0,
) -> Array:
    """A view of shape (batch, channels, *places, *taps) of padded data of shape (batch, channels, *sizes).

    Args:
        data: Input of the convolution.
        kernel: Sizes of its window, one an axis.
        strides: Its attribute of this name, empty for 1 along each axis; the others likewise.
        dilations: Steps between taps.
        pads: Elements added before each axis, then those behind each; empty for none.
        auto_pad: Takes the place of `pads` where it is ``SAME_UPPER`` or ``SAME_LOWER``.
        filling: What padding holds.

    Source: the ONNX operator specification, Conv.
    """
    rank = len(kernel)
    steps, apart, ends = strides or [1] * rank, dilations or [1] * rank, pads or [0] * (2 * rank)
    reach = [(taps - 1) * step + 1 for taps, step in zip(kernel, apart, strict=True)]
    around = list(zip(ends[:rank], ends[rank:], strict=True))
    if auto_pad.startswith("SAME"):
        sizes = zip(data.shape[2:], steps, reach, strict=True)
        total = [max((-(-size // step) - 1) * step + wide - size, 0) for size, step, wide in sizes]
        upper = [(each // 2, each - each // 2) for each in total]
        around = upper if auto_pad == "SAME_UPPER" else [(more, less) for less, more in upper]
    padded = np.pad(data, [(0, 0), (0, 0), *around], constant_values=filling)
    view = np.lib.stride_tricks.sliding_window_view(padded, reach, axis=tuple(range(2, 2 + rank)))
    every = tuple(slice(None, None, step) for step in (1, 1, *steps, *apart))
    return np.asarray(view[every])
