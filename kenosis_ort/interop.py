"""Conversion of quantized models between formats, by way of the canonical form, checked at each step."""

import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

from kenosis_ort.accuracy.outputs import OutputComparison, compare_pairs
from kenosis_ort.calibration.synthetic.reader import SyntheticReader
from kenosis_ort.checks import choice, path, several
from kenosis_ort.errors import KenosisError, UnsupportedModelError, VerificationError, printable
from kenosis_ort.formats.conventions import to_qcdq, to_qonnx
from kenosis_ort.formats.from_qdq import fold_layouts, from_qcdq, from_qdq, is_dequantize, to_signed
from kenosis_ort.formats.from_qonnx import FloatReader, Reader, to_float
from kenosis_ort.formats.from_qop import from_qop, holds_quantized_operators
from kenosis_ort.formats.qonnx_nodes import check_nodes, drop_imports, is_qonnx, spell_out, to_channels_first
from kenosis_ort.formats.runtime_form import to_runtime_form
from kenosis_ort.formats.tensors import Edits, QuantizedTensor, quantizers_of
from kenosis_ort.formats.to_qop import to_qop
from kenosis_ort.graph.canonical import make_canonical
from kenosis_ort.graph.constants import QONNX_DOMAINS, constants_to_initializers, detach_initializers, meant_as_defaults
from kenosis_ort.graph.files import check_destination, check_written, restore_interface, write_model
from kenosis_ort.graph.load import LoadedModel, check_runtime_loads, load_model
from kenosis_ort.graph.opset import fit_opset
from kenosis_ort.graph.outside import copy_model
from kenosis_ort.graph.product_pairs import store_exactly
from kenosis_ort.graph.shapes import infer_shapes, value_types
from kenosis_ort.graph.walk import fit_ir_version, name_nodes
from kenosis_ort.rewrite.constant_nodes import fold_constants
from kenosis_ort.runtime.machine import runtime_limits
from kenosis_ort.runtime.session import open_session, repeats
from kenosis_ort.storage.writing import absolute
from kenosis_ort.targets import DEFAULT_TARGET, get_target
from kenosis_ort.targets.proof import FusionReport
from kenosis_ort.verify import verify_fusion


@dataclass(frozen=True)
class Conversion:
    """Result of `kenosis_ort.convert`.

    Attributes:
        source: What the model is called, its path if it has one.
        output: The file written.
        read_as: The format that was found: ``"qonnx"``, ``"qop"``, ``"qcdq"`` or ``"qdq"``.
        written_as: The format that was asked for.
        tensors: How many activations and constants have how many bits, as ``"4-bit unsigned activations"``.
        agreement: The outputs beside those of the model as it came; empty where no inputs could be made up.
        notes: Sentences on what was done.
        fusion: The proof of what the runtime executes, of ``"qdq"`` and ``"qop"``.
        size: Bytes written.
    """

    source: str
    output: str
    read_as: str
    written_as: str
    tensors: dict[str, int]
    agreement: tuple[OutputComparison, ...]
    notes: tuple[str, ...]
    fusion: FusionReport | None
    size: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            **vars(self),
            "notes": list(self.notes),
            "agreement": [asdict(entry) for entry in self.agreement],
            "fusion": None if self.fusion is None else self.fusion.to_dict(),
        }

    def __str__(self) -> str:
        counted = ", ".join(f"{count} {what}" for what, count in self.tensors.items()) or "nothing quantized"
        lines = [f"{self.source} ({self.read_as}) -> {self.output} ({self.written_as}): {counted}"]
        for entry in self.agreement:
            same = "equal" if entry.equal == 1.0 else f"{100 * entry.equal:.2f} % equal, {entry.sqnr_db:.1f} dB"
            lines.append(f"  output '{entry.name}' beside the model as it came: {same}")
        lines += [f"  {note}" for note in self.notes]
        if self.fusion is not None:
            lines.append(f"  {self.fusion}")
        return printable("\n".join(lines))


def _kind(tensor: QuantizedTensor) -> str:
    """What a tensor is counted as."""
    what = "activations" if tensor.constant is None else "constants"
    return f"{tensor.quantizer.bits}-bit {'signed' if tensor.quantizer.signed else 'unsigned'} {what}"


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
        as_float: Return the float model behind the quantized one instead, see `kenosis_ort.formats.from_qonnx`.
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
        check_runtime_loads(LoadedModel(reference, None, loaded.name), custom_op_libraries)
    else:
        check_nodes(model)  # none in bodies either
        drop_imports(model, QONNX_DOMAINS)
        reference = loaded.proto
        check_runtime_loads(loaded, custom_op_libraries)
    _prepare(model, keep_defaults=kind != "qonnx")
    if kind == "qonnx":
        types = value_types(spell_out(model))
        model = (FloatReader if as_float else Reader)(model, types).run()
    limits = runtime_limits()
    fit_opset(model, min_opset=_LEAST_OPSET, max_opset=limits.max_opset)
    fit_ir_version(model, max_ir=limits.max_ir)
    infer_shapes(model, custom_op_libraries=custom_op_libraries)
    if holds_quantized_operators(model):
        kind = "qop"
    elif kind == "qdq" and _has_integer_clip(model):
        kind = "qcdq"
    model = to_signed(fold_layouts(from_qdq(from_qcdq(from_qop(Edits(model, copied=False)))))).finish()
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


_log = logging.getLogger(__name__)

_SHOWN: Final = 3
_FEEDS: Final = 2
_READ_DB: Final = 30.0
"""Below it the canonical form is not what the file says: it differs in rare ties and in kernels that round twice."""
_WRITTEN_DB: Final = 6.0
"""Below it the result is not what the canonical form says. A step in a first layer of two bits goes far."""

_BELOW_NOISE_DB: Final = 6.0
"""A result may be so much further off than the runtime's own rounding carries the model as it came."""
_NUDGE: Final = 2.0**-16
"""Of a value: more than is lost where a zero point of 8 bits is added to it, less than a step of any quantizer."""
_LARGEST_INPUT: Final = 2**24
"""Elements of an input above which nothing is run: a file may declare any size."""

_MOST_OPEN: Final = 2
"""Sizes of an input, but for the first, that may be open: to find more of them takes long."""

Feeds = Sequence[Mapping[str, Any]]


_WRITERS: Final[Mapping[str, Callable[[onnx.ModelProto], onnx.ModelProto]]] = {
    "qdq": lambda model: model,  # the canonical form is one
    "qop": lambda model: to_qop(model, clip=True),
    "qcdq": to_qcdq,
    "qonnx": to_qonnx,
}
_RUN: Final = frozenset({"qdq", "qop"})
"""Formats that the runtime executes in integers, for which layers are brought into the form that it takes."""

FORMATS: Final = (*_WRITERS, "float")
"""What a model can be converted to."""


def convert_model(
    model: str | os.PathLike[str] | onnx.ModelProto,
    out: str | os.PathLike[str],
    to: str = "qdq",
    *,
    custom_op_libraries: Sequence[str] = (),
) -> Conversion:
    """Converts a quantized model; see `kenosis_ort.convert`."""
    to = choice("to", to, among=FORMATS)
    libraries = several("custom_op_libraries", custom_op_libraries)
    destination = absolute(path("out", out))
    check_destination(destination)
    if isinstance(model, (str, os.PathLike)):
        check_written(Path(model), destination, called="the model", in_place=False)
    found = read_model(model, as_float=to == "float", custom_op_libraries=libraries)
    feeds = _made_up(found, libraries)
    stored_anew: tuple[str, ...] = ()
    # The result, compared with the model as it came.
    if to == "float":
        tensors: dict[str, int] = {}
        result = found.canonical
        agreement = _compare(found.reference, result, feeds, libraries, optimize=False)
    else:
        result, tensors, agreement, stored_anew = _written(found, to, feeds, libraries)
    restore_interface(result, found.loaded.proto)
    # Notes, and the file.
    notes = [] if feeds else ["No inputs could be made up for it, so that outputs were not compared."]
    if stored_anew:
        named = ", ".join(f"'{name}'" for name in stored_anew[:_SHOWN])
        more = f" and {len(stored_anew) - _SHOWN} more" if len(stored_anew) > _SHOWN else ""
        notes.append(
            f"Weights are stored as uint8, which computes the same on every processor: int8 products of {named}{more} "
            "clip without VNNI."
        )

    def loads(file: Path) -> None:
        open_session(spell_out(load_model(file, ask_runtime=False).proto), custom_op_libraries=libraries)

    size = write_model(result, destination, external_data=found.loaded.is_split, check=loads)
    return Conversion(
        source=found.loaded.name,
        output=str(destination),
        read_as=found.format,
        written_as=to,
        tensors=tensors,
        agreement=agreement,
        notes=tuple(notes),
        fusion=verify_fusion(destination, custom_op_libraries=libraries) if to in _RUN else None,
        size=size,
    )


def _written(
    found: ReadModel, to: str, feeds: Feeds, libraries: Sequence[str]
) -> tuple[onnx.ModelProto, dict[str, int], tuple[OutputComparison, ...], tuple[str, ...]]:
    """The result, its tensors by bits, how it agrees with the model as it came, and layers of weights now uint8."""
    canonical = form = found.canonical
    stored_anew: tuple[str, ...] = ()
    quantized = quantizers_of(canonical)
    if not quantized:
        raise UnsupportedModelError(
            "Nothing in the model is quantized.", where=found.loaded.name, fix="quantize it with quantize_static"
        )
    check = partial(_check, found=found, noise=lambda: _noise(found, feeds, libraries))
    check(_compare(found.reference, canonical, feeds, libraries, optimize=False), _READ_DB, "what was read")
    tensors = dict(Counter(map(_kind, quantized)).most_common())
    if to in _RUN:
        types = get_target(DEFAULT_TARGET).data_types()
        form = to_runtime_form(copy_model(canonical), types)
        if types.largest_pair is not None:
            stored_anew = store_exactly(form.graph)
        infer_again(form)
    result = _WRITERS[to](form)
    runnable = spell_out(result)
    agreement = _compare(found.reference, runnable, feeds, libraries, optimize=to in _RUN)
    check(agreement, _WRITTEN_DB, "the result")
    return result, tensors, agreement, stored_anew


def _made_up(found: ReadModel, libraries: Sequence[str]) -> Feeds:
    """Feeds that the model takes, none where the kind of an input is not known."""
    if not found.reference.graph.input:
        return [{}]
    shapes = [[dim.dim_value for dim in v.type.tensor_type.shape.dim] for v in found.reference.graph.input]
    if any(math.prod(max(size, 1) for size in shape) > _LARGEST_INPUT for shape in shapes):
        return []
    if any(sum(size < 1 for size in shape[1:]) > _MOST_OPEN for shape in shapes):
        return []
    try:
        reader = SyntheticReader(found.reference, samples=_FEEDS, custom_op_libraries=libraries)
        return [reader.feed(at) for at in range(len(reader))]
    except KenosisError as error:
        _log.info("no inputs could be made up: %s", error)
        return []


def _compare(
    reference: onnx.ModelProto,
    result: onnx.ModelProto,
    feeds: Feeds,
    libraries: Sequence[str],
    *,
    optimize: bool,
    nudged: bool = False,
) -> tuple[OutputComparison, ...]:
    """Runs two models on the same feeds; the reference as the file says it, without any rewriting at load."""
    if not feeds:
        return ()
    try:
        first = open_session(reference, custom_op_libraries=libraries, optimize=False)
    except VerificationError as error:  # it loads after small repairs only, see `graph.canonical`
        _log.info("the model as it came is not run: %s", error)
        return ()
    second = open_session(result, custom_op_libraries=libraries, optimize=optimize)
    own = [{k: v for k, v in feed.items() if k in first.inputs} for feed in feeds]
    try:
        expected, again = ([first.answer(feed) for feed in own] for _ in range(2))
    except VerificationError as error:
        _log.info("the model does not run on made-up inputs: %s", error)
        return ()
    random = {n for n in first.outputs if not all(repeats(a[n], b[n]) for a, b in zip(expected, again, strict=True))}
    taken = ({k: v for k, v in feed.items() if k in second.inputs} for feed in feeds)
    actual = (second.answer(_nudged(feed) if nudged else feed) for feed in taken)
    compared = compare_pairs(first.outputs, zip(expected, actual, strict=True), random)
    return tuple(
        replace(o, sqnr_db=-np.inf, equal=0.0, max_abs=np.inf) if o.skipped else o for o in compared if not o.random
    )


def _nudged(feed: Mapping[str, Any]) -> dict[str, Any]:
    """A feed whose floats are larger by so little that only ties are rounded otherwise."""
    return {k: v * v.dtype.type(1 + _NUDGE) if np.asarray(v).dtype.kind == "f" else v for k, v in feed.items()}


def _noise(found: ReadModel, feeds: Feeds, libraries: Sequence[str]) -> dict[str, float]:
    """SQNR in dB by output of a model against itself with other roundings in kernels and other ties.

    A step more or less in the first layers of a deep net of random inputs may go far, in the model as it came too. And
    a picture's values lie on a grid: where that of the first quantizer is a multiple of it, a good part of them are
    ties, which QONNX rounds to even behind the zero point's addition and QuantizeLinear before it.
    """
    rounded = _compare(found.canonical, found.canonical, feeds, libraries, optimize=True)
    nudged = _compare(found.reference, found.reference, feeds, libraries, optimize=False, nudged=True)
    least: dict[str, float] = {}
    for entry in (*rounded, *nudged):
        least[entry.name] = min(entry.sqnr_db, least.get(entry.name, np.inf))
    return least


def _check(
    agreement: Sequence[OutputComparison],
    least_db: float,
    what: str,
    *,
    found: ReadModel,
    noise: Callable[[], Mapping[str, float]],
) -> None:
    """Raises where a float output differs from that of the model as it came."""
    for entry in agreement:
        off = entry.sqnr_db < least_db and entry.max_abs > 0 and entry.name in _float_outputs(found.reference)
        if off and entry.sqnr_db < noise().get(entry.name, np.inf) - _BELOW_NOISE_DB:
            raise VerificationError(
                f"output '{entry.name}' of {what} is off by up to {entry.max_abs:.3g} from the model as it came "
                f"({entry.sqnr_db:.1f} dB, {100 * entry.equal:.1f} % equal); nothing was written",
                where=found.loaded.name,
                fix="please report this, if you can with the model",
            )


def _float_outputs(model: onnx.ModelProto) -> set[str]:
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE, onnx.TensorProto.UNDEFINED)
    return {v.name for v in model.graph.output if v.type.tensor_type.elem_type in floats}
