"""Asks the installed runtime what it makes of a model: loads it at full optimization and reads the graph back.

Before loading, every node of a private copy is renamed to a token, so that a name in the optimized graph
(``kv#17#/MatMulAddFusion``, ``kv#17#_token_2``) tells its source node without doubt.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnx
import onnxruntime as ort
from onnx import TensorProto

from kenosis_ort.errors import ModelLoadError, VerificationError
from kenosis_ort.graph.external_data import weight_bytes, write_external_data
from kenosis_ort.graph.load import parse_model
from kenosis_ort.graph.session import MAPPED_FROM, create_session
from kenosis_ort.storage.scratch import Scratch
from kenosis_ort.verify.source import label_of, walk

_log = logging.getLogger(__name__)

_TOKEN: Final = re.compile(r"kv#(\d+)#")
_MESSAGE_LIMIT: Final = 600


@dataclass(frozen=True)
class LoadedSource:
    """The model under proof.

    Attributes:
        proto: The model, external data not read. For a `ModelProto` argument the caller's object: not changed.
        folder: Folder of external data, None if there is none.
        name: For messages.
    """

    proto: onnx.ModelProto
    folder: Path | None
    name: str


@dataclass(frozen=True)
class Tagged:
    """A copy of a model whose nodes are named by tokens.

    Attributes:
        proto: The copy.
        labels: What the nodes are called in messages, in the order of `walk`.
        paths: The path of each node's body with the nodes' own names, in the same order.
    """

    proto: onnx.ModelProto
    labels: tuple[str, ...]
    paths: tuple[str, ...]


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
    else:
        path = Path(os.fspath(model))
        name, folder = str(path), path.resolve().parent
        proto = parse_model(path)
    if not proto.graph.node:
        raise ModelLoadError("the model has no nodes", where=name, fix="give an ONNX model")
    return LoadedSource(proto, folder if _has_external_data(proto) else None, name)


def mapped(source: LoadedSource, folder: Path) -> LoadedSource:
    """Returns the source with its weights in a file, so that copies of the model do not copy them; small ones as is.

    Args:
        source: The model.
        folder: An existing folder; to be kept as long as the result is in use.
    """
    if source.folder is not None or weight_bytes(source.proto) < MAPPED_FROM:
        return source
    return LoadedSource(write_external_data(source.proto, folder / "weights.bin"), folder, source.name)


def token_of(text: str) -> int | None:
    """Returns the index of the source node that a name of the optimized graph comes from."""
    match = _TOKEN.search(text)
    return int(match.group(1)) if match else None


def tag(model: onnx.ModelProto) -> Tagged:
    """Copies a model and names its nodes by tokens."""
    proto = onnx.ModelProto()
    proto.CopyFrom(model)
    found = [(label_of(node), path, node) for _, path, node in walk(proto.graph) if node is not None]
    for index, (_, _, node) in enumerate(found):
        node.name = f"kv#{index}#"
    return Tagged(proto, tuple(label for label, _, _ in found), tuple(path for _, path, _ in found))


def optimize(
    models: Sequence[onnx.ModelProto],
    source: LoadedSource,
    labels: Sequence[str],
    *,
    custom_op_libraries: Sequence[str] = (),
    threads: int = 1,
) -> list[onnx.GraphProto]:
    """Loads models at ORT_ENABLE_ALL on the CPU provider and returns the optimized graphs, large initializers left out.

    Nothing is left on disk.

    Args:
        models: The tagged model, or its pieces.
        source: The model they come from.
        labels: What its nodes are called in messages.
        custom_op_libraries: Shared libraries of custom operators to register.
        threads: Threads of the sessions.

    Raises:
        VerificationError: The runtime refuses a model.
    """
    graphs = []
    with Scratch("verify") as folder:
        for number, model in enumerate(models):
            target = folder / f"{number}.onnx"
            options = _session_options(source.folder, threads)
            options.optimized_model_filepath = str(target)
            options.add_session_config_entry(
                "session.optimized_model_external_initializers_file_name", f"{number}.data"
            )
            options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "4096")
            _open(model, options, custom_op_libraries, source.name, labels)
            graphs.append(onnx.load(target, load_external_data=False).graph)
    return graphs


def open_session(
    source: LoadedSource, *, custom_op_libraries: Sequence[str] = (), threads: int = 1
) -> ort.InferenceSession:
    """Opens a session at ORT_ENABLE_ALL on the CPU provider.

    Raises:
        VerificationError: The runtime refuses the model.
    """
    options = _session_options(source.folder, threads)
    return _open(source.proto, options, custom_op_libraries, source.name, [])


def _open(
    model: onnx.ModelProto,
    options: ort.SessionOptions,
    libraries: Sequence[str],
    name: str,
    labels: Sequence[str],
) -> ort.InferenceSession:
    try:
        for library in libraries:
            options.register_custom_ops_library(library)
        return create_session(model, options)
    except Exception as error:  # the runtime's exceptions share no base class but Exception
        raise VerificationError(
            f"onnxruntime {ort.__version__} does not load the model: {_shorten(str(error), labels)}",
            where=name,
            fix="load the model in onnxruntime alone; if it uses custom operators give custom_op_libraries",
        ) from error


def _session_options(folder: Path | None, threads: int) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    if folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return options


def _has_external_data(model: onnx.ModelProto) -> bool:
    for graph, _, node in walk(model.graph):
        tensors = graph.initializer if node is None else [a.t for a in node.attribute if a.HasField("t")]
        if any(t.data_location == TensorProto.EXTERNAL for t in tensors):
            return True
    return False


def _shorten(message: str, labels: Sequence[str]) -> str:
    named = _TOKEN.sub(lambda m: labels[int(m.group(1))], message)
    flat = " ".join(named.split())
    return flat if len(flat) <= _MESSAGE_LIMIT else flat[: _MESSAGE_LIMIT - 4] + " ..."
