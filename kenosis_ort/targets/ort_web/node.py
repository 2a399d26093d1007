"""ONNX Runtime Web in Node: the runtime on which this target is proved and timed.

It is found from the folder that the environment variable ``KENOSIS_ORT_WEB`` names, in which ``npm install
onnxruntime-web`` was run; nothing is downloaded, and no other folder is looked into, since what is found is executed.
One process of Node serves a Python process for each number of threads: to compile the runtime takes seconds. Runs of
one thread are timed by the processor time of that process.

The proof in ONNX Runtime Web: which kernel of the WASM build runs each node of a model.

Source: the optimized graph of the very build, as that of stock ONNX Runtime is read. The build has no file system to
write it to; it is taken at the system call (``bridge.mjs``).
"""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.errors import VerificationError
from kenosis_ort.graph.load import LoadedSource, read_source
from kenosis_ort.graph.outside import read_external_data
from kenosis_ort.graph.save import store_model
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.runtime.child import Child
from kenosis_ort.storage.scratch import Scratch
from kenosis_ort.targets.model import Runner
from kenosis_ort.targets.ort_cpu.cpu_proof import prove_by
from kenosis_ort.targets.proof import FusionReport

VARIABLE: Final = "KENOSIS_ORT_WEB"
_PACKAGE: Final = "onnxruntime-web"
_BRIDGE: Final = Path(__file__).with_name("bridge.mjs")
_MESSAGE_LIMIT: Final = 600
_TYPES: Final = {
    "float32": np.float32, "float64": np.float64, "uint8": np.uint8, "int8": np.int8, "uint16": np.uint16,
    "int16": np.int16, "uint32": np.uint32, "int32": np.int32, "uint64": np.uint64, "int64": np.int64, "bool": np.bool_,
}  # fmt: skip


def missing() -> str:
    """Reason why the runtime cannot be asked here, empty where it can."""
    folder_name = os.environ.get(VARIABLE)
    if not folder_name:
        return f"{VARIABLE} does not name a folder in which onnxruntime-web is installed (npm install onnxruntime-web)"
    if shutil.which("node") is None:
        return "Node.js ('node') is not on the path"
    folder = Path(folder_name).expanduser()
    if not (folder / "node_modules" / _PACKAGE / "package.json").is_file():
        return (
            f"{VARIABLE} names '{folder_name}', which has no node_modules/{_PACKAGE}: run npm install {_PACKAGE} there"
        )
    return ""


class Node:
    """A process of Node that runs models in ONNX Runtime Web.

    Args:
        threads: Threads of a run; 0 for the runtime's own choice.

    Raises:
        VerificationError: Node or the runtime is not there, or does not start.
    """

    def __init__(self, threads: int) -> None:
        why = missing()
        if why:
            raise VerificationError(why, fix=f"install both, and set {VARIABLE} to the folder")
        self.seconds = 0.0
        self.gone: list[int] = []  # sessions that are no longer in use: a finalizer may run in the midst of a command
        self._ids = count()
        self._scratch = Scratch("web")
        self.folder = self._scratch.path
        folder = str(Path(os.environ[VARIABLE]).expanduser())
        self.child = Child([str(shutil.which("node")), str(_BRIDGE), folder, str(threads)], "Node.js")
        self.version = str(self.ask("version")["version"])

    def ask(self, what: str, **fields: Any) -> dict[str, Any]:
        """Sends a command; returns the reply.

        Raises:
            VerificationError: The runtime refuses it, or the process has ended.
        """
        gone = [self.gone.pop() for _ in range(len(self.gone))]
        reply = self.child.ask({"do": what, "gone": gone, **fields})
        if not reply["ok"]:
            text = " ".join(reply["error"].split())[-_MESSAGE_LIMIT:]
            raise VerificationError(f"onnxruntime-web refuses the model: {text}")
        return reply

    def new_id(self) -> int:
        """A number for a session or a file."""
        return next(self._ids)


_NODES: Final[dict[int, Node]] = {}


def node(threads: int = 1) -> Node:
    """The process for a number of threads, started where it does not run.

    Raises:
        VerificationError: It does not start.
    """
    known = _NODES.get(threads)
    if known is None or not known.child.runs:
        known = _NODES[threads] = Node(threads)
    return known


def clock() -> float:
    """The seconds that all runs so far took, by the processor time of Node's process."""
    return sum(process.seconds for process in _NODES.values())


class WebRunner:
    """A session of ONNX Runtime Web with the ``run`` of an ``onnxruntime.InferenceSession``.

    Args:
        source: A path or a serialized model.
        threads: Threads of a run.

    Raises:
        VerificationError: The runtime is not there or refuses the model.
    """

    def __init__(self, source: str | bytes | Path, *, threads: int = 1) -> None:
        self._node = node(threads)
        self._feed: Mapping[str, Any] | None = None
        self._id = self._node.new_id()
        with WholeFile(self._node, source) as file:
            self._node.ask("open", id=self._id, file=str(file))
        self.seconds = 0.0
        weakref.finalize(self, self._node.gone.append, self._id)

    def run(self, output_names: None, input_feed: Mapping[str, Any]) -> list[npt.NDArray[Any]]:
        """Runs the model once; returns all its outputs. `seconds` then says how long it took."""
        assert output_names is None
        if self._feed is not input_feed:
            fields = stored(self._node, input_feed)
            self._node.ask("feed", id=self._id, **fields)
            Path(fields["file"]).unlink()
            self._feed = input_feed
        to = self._node.folder / f"{self._id}.out"
        reply = self._node.ask("run", id=self._id, file=str(to))
        self.seconds = float(reply["seconds"])
        self._node.seconds += self.seconds
        data = to.read_bytes()
        return [
            np.frombuffer(data[o["begin"] : o["end"]], _TYPES[o["type"]]).reshape(o["dims"]) for o in reply["outputs"]
        ]


def open_runner(source: str | bytes, *, threads: int, custom_op_libraries: Sequence[str]) -> Runner:
    """Function that runs a model in ONNX Runtime Web.

    Raises:
        VerificationError: It is not there or refuses the model.
    """
    refuse_libraries(custom_op_libraries)
    return WebRunner(source, threads=threads)


def refuse_libraries(libraries: Sequence[str]) -> None:
    """Raises where a model needs libraries of operators.

    Raises:
        VerificationError: It does.
    """
    if libraries:
        raise VerificationError("onnxruntime-web loads no libraries of operators", fix="leave custom_op_libraries out")


def stored(process: Node, feed: Mapping[str, Any]) -> dict[str, Any]:
    """Writes a feed into a file; returns what the process has to know of it.

    Raises:
        VerificationError: A type that the runtime's tensors do not have.
    """
    names = {np.dtype(kind): name for name, kind in _TYPES.items()}
    inputs, parts, at = [], [], 0
    for name, given in feed.items():
        value = np.ascontiguousarray(given)
        if value.dtype not in names:
            raise VerificationError(f"onnxruntime-web is not fed {value.dtype} here", where=name)
        inputs.append(
            {"name": name, "type": names[value.dtype], "dims": np.shape(given), "begin": at, "end": at + value.nbytes}
        )
        parts.append(value.tobytes())
        at += value.nbytes
    path = process.folder / f"{process.new_id()}.feed"
    path.write_bytes(b"".join(parts))
    return {"inputs": inputs, "file": str(path)}


class WholeFile:
    """A model as one file, its external data inside: the runtime has no file system.

    Args:
        process: In whose folder it is written, where it is no such file yet.
        source: A path, a serialized model or a `ModelProto`.
    """

    def __init__(self, process: Node, source: str | bytes | Path | onnx.ModelProto) -> None:
        self._source, self._own = source, process.folder / f"{process.new_id()}.onnx"

    def __enter__(self) -> Path:
        source = self._source
        if isinstance(source, bytes):
            self._own.write_bytes(source)
            return self._own
        read = read_source(source)
        if read.folder is None and not isinstance(source, onnx.ModelProto):
            return Path(source)
        whole = onnx.ModelProto()
        whole.CopyFrom(read.proto)
        if read.folder is not None:
            read_external_data(whole, read.folder / "model.onnx")
        store_model(whole, self._own, external_data=False)
        return self._own

    def __exit__(self, *_: object) -> None:
        self._own.unlink(missing_ok=True)


def prove(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    *,
    plan: PlacementPlan | None = None,
    custom_op_libraries: Sequence[str] = (),
    threads: int = 1,
) -> FusionReport:
    """Loads a model in ONNX Runtime Web at full optimization and reports what executes each of its nodes.

    Args:
        model: Path, serialized model or `ModelProto`. Not changed.
        plan: The plan behind the model; its reasons are reported for the nodes that it keeps in float.
        custom_op_libraries: Refused: the runtime does not load them.
        threads: Threads of a run.

    Returns:
        One entry per compute node, in the model's order.

    Raises:
        ModelLoadError: The file is missing or is not an ONNX model.
        VerificationError: Node or onnxruntime-web is not there, does not tell, or refuses the model.
    """
    refuse_libraries(custom_op_libraries)
    process = node(threads)

    def optimize(models: Sequence[onnx.ModelProto], source: LoadedSource, _: Sequence[str]) -> list[onnx.GraphProto]:
        graphs = []
        for piece in models:
            if source.folder is not None:
                read_external_data(piece, source.folder / "model.onnx")
            with WholeFile(process, piece) as file:
                to = file.with_suffix(".optimized")
                try:
                    process.ask("optimized", file=str(file), to=str(to))
                except VerificationError as error:
                    raise VerificationError(error.what, where=source.name, fix=error.fix) from error
                graphs.append(onnx.load_model_from_string(to.read_bytes()).graph)
                to.unlink()
        return graphs

    return prove_by(optimize, read_source(model), plan, version=process.version, runtime="ONNX Runtime Web")
