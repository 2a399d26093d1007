"""Models as files, loaded to a private and complete copy or a clear error.

A model from outside is loaded by the runtime before any other library written in C++ reads it. ONNX's shape inference,
checker and version converter crash or never end on some models that the runtime refuses in one sentence. So it loads
every one first: without optimization, without custom operators nobody asked for. What it refuses is refused here; what
it loads has sound types, attributes and references.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

import onnx

from kenosis_ort.errors import AlreadyQuantizedError, ArgumentTypeError, ModelLoadError, VerificationError
from kenosis_ort.graph import outside
from kenosis_ort.graph.constants import LAYERS, QONNX_DOMAINS, constants_to_initializers
from kenosis_ort.graph.external_data import read_external_data
from kenosis_ort.graph.files import store_model, uses_external_data
from kenosis_ort.graph.qdq import Tagged, tag
from kenosis_ort.graph.structure import check_depth, check_structure
from kenosis_ort.graph.walk import MAIN_DOMAINS, all_nodes, fit_ir_version, name_nodes, opset_of
from kenosis_ort.runtime.machine import runtime_limits
from kenosis_ort.runtime.session import MAPPED_FROM, open_session, session_options
from kenosis_ort.storage.writing import Scratch, absolute, real, regular

_log = logging.getLogger(__name__)

PROTOBUF_LIMIT = 2**31 - 1

_SIGNATURES: tuple[tuple[int, bytes, str, str], ...] = (
    (0, b"version https://git-lfs", "a Git LFS pointer, not the model itself", "Run 'git lfs pull' and try again."),
    (0, b"PK\3\4", "a zip archive (a PyTorch checkpoint or a packed model)", "Export the model to ONNX, or unpack it."),
    (0, b"<!DOCTYPE", "an HTML page", "Download the model file itself, not the page about it."),
    (0, b"<html", "an HTML page", "Download the model file itself, not the page about it."),
    (4, b"ORTM", "in ORT format", "Quantize the .onnx model and convert the result to ORT format afterwards."),
    (4, b"TFL3", "a TensorFlow Lite model", "Convert the model to ONNX first, for example with tf2onnx."),
    (0, b"\x89HDF", "an HDF5 file (a Keras checkpoint)", "Convert the model to ONNX first, for example with tf2onnx."),
    (0, b"GGUF", "a GGUF file", "Export the model to ONNX first."),
)


@dataclass(frozen=True)
class LoadedModel:
    """A complete model in memory.

    Attributes:
        proto: A private copy, complete: external data are read in, or large ones checked and referred to.
        path: Where it came from, absolute; None if the caller passed a ModelProto.
        name: What messages call the model.
        is_split: Whether the file refers to external data.
        notes: What differs from the file, so that the runtime reads it.
    """

    proto: onnx.ModelProto
    path: Path | None
    name: str
    is_split: bool = False
    notes: tuple[str, ...] = ()

    @property
    def as_it_came(self) -> Path | onnx.ModelProto:
        """The file; the model in memory where there is none, or where the runtime does not read it as it is."""
        return self.proto if self.path is None or self.notes else self.path

    @property
    def file_bytes(self) -> int:
        """Bytes of the model, weights in files beside it included; in memory, of the model as a file."""
        if self.path is None:
            return int(self.proto.ByteSize())
        beside = outside.weight_bytes(self.proto) if self.is_split else 0
        return self.path.stat().st_size + beside


def load_model(
    source: str | os.PathLike[str] | onnx.ModelProto | LoadedModel,
    *,
    custom_op_libraries: Sequence[str] = (),
    ask_runtime: bool = True,
    lazily: bool = False,
) -> LoadedModel:
    """Loads a model completely and checks that it is one.

    Args:
        source: Path of an ONNX file, or a ModelProto, which is copied and never changed; what is loaded already is
            returned as it is.
        custom_op_libraries: Libraries with custom operators to register with the runtime; none is loaded unasked.
        ask_runtime: Whether the runtime has to load the model too. Without, nothing of ONNX that is written in C++
            may be given the model.
        lazily: Leave large weights of a large model on disk, to be read when they are needed
            (`kenosis_ort.graph.outside`).

    Raises:
        ModelLoadError: The file is missing, a folder, empty, truncated, not ONNX or over 2 GiB, external
            data is missing, too short, or lies outside the model's folder, or the runtime refuses the model.
        ArgumentTypeError: ``source`` is neither a path nor a ModelProto.
    """
    if isinstance(source, LoadedModel):
        return source
    loaded = _loaded(source, lazily=lazily)
    if ask_runtime:
        check_runtime_loads(loaded, custom_op_libraries)
        limits = runtime_limits()
        if loaded.proto.ir_version > limits.max_ir:  # newer releases of onnx write it unasked
            note = fit_ir_version(loaded.proto, max_ir=limits.max_ir)
            return replace(loaded, notes=(note,) if note else ())
    return loaded


def _loaded(source: str | os.PathLike[str] | onnx.ModelProto, *, lazily: bool) -> LoadedModel:
    if isinstance(source, onnx.ModelProto):
        name = f"model '{source.graph.name}'" if source.graph.name else "the given ModelProto"
        check_depth(source, name)
        source = outside.copy_model(source)
        check_structure(source, name)
        if uses_external_data(source):
            what = "The ModelProto refers to external data that was not loaded, and it has no folder to find it in."
            fix = "Pass the path of the model, or call onnx.load_external_data_for_model(model, folder) first."
            raise ModelLoadError(what, where=name, fix=fix)
        _list_as_defaults(source)
        return LoadedModel(proto=source, path=None, name=name)
    if not isinstance(source, (str, os.PathLike)):
        raise _no_model(source)
    path = Path(source)
    proto = parse_model(path)
    is_split = uses_external_data(proto)
    if is_split:
        read_external_data(proto, path, lazily=lazily)
    _list_as_defaults(proto)
    _log.debug("loaded %s: IR %d, %d nodes", path, proto.ir_version, len(proto.graph.node))
    return LoadedModel(proto=proto, path=absolute(path), name=str(path), is_split=is_split)


def _list_as_defaults(proto: onnx.ModelProto) -> None:
    """Makes initializers of Constant nodes whose output is listed as an input: the runtime takes that for a default."""
    listed = {value.name for value in proto.graph.input}
    if any(node.op_type == "Constant" and not listed.isdisjoint(node.output) for node in proto.graph.node):
        constants_to_initializers(proto)


def check_not_quantized(proto: onnx.ModelProto) -> None:
    """Refuses a model that is quantized already, and not in part only: it has no layer with float weights left.

    Weights stored as ``initializer -> DequantizeLinear`` (also by way of Reshape or Transpose) and integer
    inputs that the graph dequantizes are accepted, as stock quantization accepts them.

    Raises:
        AlreadyQuantizedError: The main graph quantizes activations or calls integer kernels.
    """
    made = {n.output[0] for n in proto.graph.node if n.op_type == "Constant" and n.output}
    floats = made | {t.name for t in proto.graph.initializer if t.data_type in _FLOATS}
    if any(n.op_type in LAYERS and not floats.isdisjoint(n.input[1:2]) for n in proto.graph.node):
        return
    constants = made | {t.name for t in proto.graph.initializer}
    for node in proto.graph.node:
        quantizes = node.op_type in _QUANTIZERS and bool(node.input) and node.input[0] not in constants
        if quantizes or node.op_type in INTEGER_KERNELS or node.op_type.startswith("QLinear"):
            what = f"The model is already quantized: it holds a {node.op_type} node."
            fix = "Quantize the original float model."
            raise AlreadyQuantizedError(what, where=f"node '{node.name or node.output[0]}'", fix=fix)


_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE)
_QUANTIZERS = ("QuantizeLinear", "DynamicQuantizeLinear")
INTEGER_KERNELS = frozenset(
    {"ConvInteger", "MatMulInteger", "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "DynamicQuantizeLSTM", "QGemm",
     "QAttention", "QEmbedLayerNormalization", "QOrderedMatMul"}
)  # fmt: skip


def parse_model(source: Path | bytes) -> onnx.ModelProto:
    """A model from a file or its content, checked for structure; external data is not read.

    Raises:
        ModelLoadError: The file is missing, a folder, empty, truncated, not ONNX or over 2 GiB.
    """
    where = "<bytes>" if isinstance(source, bytes) else str(source)
    head = source[:_HEAD] if isinstance(source, bytes) else _head(source)
    for offset, magic, kind, fix in _SIGNATURES:
        if head[offset : offset + len(magic)].lower() == magic.lower():
            raise ModelLoadError(f"The file is not an ONNX model: it is {kind}.", where=where, fix=fix)
    try:
        if isinstance(source, bytes):
            proto = onnx.load_model_from_string(source)
        else:
            proto = onnx.load_model(source, format="protobuf", load_external_data=False)
    except Exception as error:  # the decoder raises classes of its own
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        fix = "The file is truncated or of another format: export or download it again."
        raise ModelLoadError(f"The file is not a complete ONNX model ({reason}).", where=where, fix=fix) from error
    check_structure(proto, where)
    return proto


_HEAD = 64


def _head(path: Path) -> bytes:
    """The first bytes of a file that can be read."""
    where = str(path)
    try:
        if path.is_dir():
            fix = f"Give the model file, for example '{path / 'model.onnx'}'."
            raise ModelLoadError("The model path is a folder.", where=where, fix=fix)
        size = regular(path).stat().st_size
        if size > PROTOBUF_LIMIT:
            what = f"The file holds {size / 2**30:.1f} GiB; an ONNX file cannot be larger than 2 GiB."
            fix = "Save the model with external data (onnx.save_model(..., save_as_external_data=True))."
            raise ModelLoadError(what, where=where, fix=fix)
        if size == 0:
            raise ModelLoadError("The model file is empty.", where=where, fix="Export or download the model again.")
        with path.open("rb") as file:
            return file.read(_HEAD)
    except FileNotFoundError:
        absolute(path)  # a relative one in a folder that was deleted is told as such
        raise ModelLoadError("The model file does not exist.", where=where, fix="Check the path.") from None
    except ModelLoadError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        fix = "Check its permissions."
        raise ModelLoadError(f"The model file cannot be read: {reason}.", where=where, fix=fix) from error


class LoadedSource(NamedTuple):
    """The model under proof.

    Attributes:
        proto: The model, external data not read. For a `ModelProto` argument the caller's object: not changed.
        folder: Folder of external data, None if there is none.
        name: For messages.
    """

    proto: onnx.ModelProto
    folder: Path | None
    name: str


def _no_model(given: object) -> ArgumentTypeError:
    kind = type(given).__name__
    return ArgumentTypeError(f"the model must be a path or an onnx.ModelProto, not {kind}", fix="pass one of them")


def read_source(model: str | os.PathLike[str] | bytes | onnx.ModelProto) -> LoadedSource:
    """Reads a model without its external data.

    Raises:
        ModelLoadError: Missing file, or not an ONNX model.
    """
    if isinstance(model, onnx.ModelProto):
        return LoadedSource(model, None, "the model")
    name, folder = "the model", None
    if isinstance(model, bytes):
        proto = parse_model(model)
    elif isinstance(model, (str, os.PathLike)):
        path = Path(os.fspath(model))
        name, folder = str(path), real(path).parent
        proto = parse_model(path)
    else:
        raise _no_model(model)
    if not proto.graph.node:
        raise ModelLoadError("the model has no nodes", where=name, fix="give an ONNX model")
    return LoadedSource(proto, folder if uses_external_data(proto) else None, name)


@contextmanager
def tagged_file(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto, change: Callable[[onnx.ModelProto], None] | None = None
) -> Iterator[tuple[LoadedSource, Tagged, Path]]:
    """A model, its copy named by tokens, and that copy as one file with its weights inside, for as long as it is asked.

    Args:
        model: Path, serialized model or `ModelProto`. Not changed.
        change: What is done to the copy before it is written, in place.

    Raises:
        ModelLoadError: Missing file, or not an ONNX model.
    """
    source = read_source(model)
    tagged = tag(source.proto)
    if change is not None:
        change(tagged.proto)
    if source.folder is not None:
        read_external_data(tagged.proto, source.folder / "model.onnx")
    with Scratch("verify") as folder:
        store_model(tagged.proto, folder / "model.onnx", external_data=False)
        yield source, tagged, folder / "model.onnx"


def mapped(source: LoadedSource, folder: Path) -> LoadedSource:
    """The source with its weights in a file, so that copies of the model do not copy them; small ones as is.

    Args:
        source: The model.
        folder: An existing folder; to be kept as long as the result is in use.
    """
    if source.folder is not None or outside.weight_bytes(source.proto) < MAPPED_FROM:
        return source
    if outside.refers_outside(source.proto):
        return LoadedSource(outside.with_weights_on_disk(source.proto, folder / "weights.bin"), None, source.name)
    return LoadedSource(outside.write_external_data(source.proto, folder / "weights.bin"), folder, source.name)


# ---- what the runtime refuses ----

_REFUSAL_LIMIT: Final = 400
_OLDEST_KERNELS: Final = 7
"""The runtime has no kernels for some operators of older sets, which preparation converts."""


def check_runtime_loads(loaded: LoadedModel, custom_op_libraries: Sequence[str] = ()) -> None:
    """Has the runtime load a model.

    What preparation mends by itself is no reason for a refusal: node names used twice, an IR version or operator set
    newer than the runtime's, operators of sets so old that it has no kernels for them, shapes in external data.

    Args:
        loaded: The model; not changed.
        custom_op_libraries: Libraries with custom operators to register.

    Raises:
        ModelLoadError: The runtime refuses the model.
    """
    refusal = _refusal(loaded.path or loaded.proto, custom_op_libraries)
    if refusal is None or _lacks_kernels_only(refusal, loaded.proto):
        return
    mended = _mended(loaded)
    if mended is not None and _refusal(mended, custom_op_libraries) is None:
        _log.info("%s: the runtime loads it after small repairs only (%s)", loaded.name, refusal)
        return
    what = f"The runtime refuses the model: {' '.join(str(refusal).split())[:_REFUSAL_LIMIT]}"
    fix = "Check that the model runs in onnxruntime; for custom operators give custom_op_libraries."
    if any(node.domain in QONNX_DOMAINS for node in all_nodes(loaded.proto)):
        fix = "It is quantized, in QONNX: quantize the float model it was made from, or have convert spell it in ONNX."
    raise ModelLoadError(what, where=loaded.name, fix=fix) from refusal


def _refusal(source: onnx.ModelProto | Path, libraries: Sequence[str]) -> BaseException | None:
    """The runtime's error at load, None where it loads the model."""
    try:
        options = session_options(optimize=False)
        options.add_session_config_entry("session.disable_prepacking", "1")  # nothing is run: no second copy of weights
        open_session(source, options=options, custom_op_libraries=libraries)
    except VerificationError as error:
        return error.__cause__
    return None


def _lacks_kernels_only(refusal: BaseException, proto: onnx.ModelProto) -> bool:
    return type(refusal).__name__ == "NotImplemented" and 0 < opset_of(proto) < _OLDEST_KERNELS


def _mended(loaded: LoadedModel) -> onnx.ModelProto | None:
    """A copy with unique node names and a header that the runtime reads; None where nothing would differ."""
    limits = runtime_limits()
    copy = outside.copy_model(loaded.proto)
    changed = bool(name_nodes(copy).duplicates) or copy.ir_version > limits.max_ir
    copy.ir_version = min(copy.ir_version, limits.max_ir)
    for entry in copy.opset_import:
        if entry.domain in MAIN_DOMAINS and entry.version > limits.max_opset:
            entry.version, changed = limits.max_opset, True
    return copy if changed or loaded.path is not None else None  # a file may hold what loading has dropped
