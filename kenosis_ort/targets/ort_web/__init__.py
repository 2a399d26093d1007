"""Target ``ort-web``: ONNX Runtime Web on WebAssembly, in the browser and in Node.

Measured on onnxruntime-web 1.30.0 in Node 20 and proved again on whatever is installed; ``bridge.mjs`` is what runs
there. Its graph optimizers are those of ``ort-cpu``, without the blocked layout of float Convs. Its kernels have SIMD
where 8-bit numbers are multiplied, and hardly anywhere else.

Relu and Clip become a table look-up. ``Relu(x) = max(x, 0)``, and ``LeakyRelu(x)`` of slope 0 is ``x`` where ``x >= 0``
and ``0 * x = 0`` elsewhere: the same for every finite number, and behind a DequantizeLinear there are no others.
``Clip(x, 0, b) = min(Relu(x), b)``, and the quantization behind it does the ``min`` where its largest value is no more
than half a step above ``b``. As part of the requantization before it, as in stock ONNX Runtime, a Relu is a branch for
each value, which goes either way where half of them are negative: 5 to 8 ns a value for 1, and 0.4 for the look-up
(pointwise Convs, 24 to 144 channels of 56x56: 0.66x of float for 0.23x). In float, outside of a kernel, it is such a
branch too (1.3 to 4 ns), so that the look-up stands in front of a float node as well.

Costs are of kernels with SIMD and one thread: begun with ``benchmarks/op_costs.py --target ort-web``, the least of 40
runs by the runtime's own profile; Convs, and Relu, Clip and LeakyRelu on values of either sign, are fitted to their
times within whole nets, which that command does not repeat. 8-bit products are three times as fast as float ones, and
whatever else integer kernels do is not vectorized (to requantize 1.4 ns a value, to add two 0.8, in float 0.1): Convs
that read many channels gain, those that read few or one by one lose. Work is counted as for ``ort-cpu``, but a Relu
apart from a Clip, which is slower in float, and as pieces what float Convs multiply in vain: they take 16 pixels at
once, so that 7x7 is computed as 64.

The runtime is found from the folder that the environment variable ``KENOSIS_ORT_WEB`` names, in which ``npm install
onnxruntime-web`` was run; nothing is downloaded, and no other folder is looked into, since what is found is executed.
One process of Node serves a Python process for each number of threads, since to compile the runtime takes seconds; runs
are timed by its processor time. The proof reads the optimized graph of the very build, as that of stock ONNX Runtime
is read; having no file system to write it to, the build is asked at the system call (``bridge.mjs``).
"""

import math
import os
import shutil
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.resources import files
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.errors import VerificationError
from kenosis_ort.graph.external_data import read_external_data
from kenosis_ort.graph.files import store_model
from kenosis_ort.graph.load import LoadedSource, read_source
from kenosis_ort.graph.outside import copy_model
from kenosis_ort.graph.qdq import Q, SourceGraph, SourceNode
from kenosis_ort.graph.view import GraphView, ir
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.rewrite import USUAL_FORMS
from kenosis_ort.runtime.child import Child
from kenosis_ort.runtime.session import Runner
from kenosis_ort.storage.writing import Scratch
from kenosis_ort.targets.model import Hooks, Target, TimedRuntime
from kenosis_ort.targets.ort_cpu import ORT_CPU
from kenosis_ort.targets.ort_cpu.cpu_proof import prove_by
from kenosis_ort.targets.ort_cpu.reasons import clip_bounds
from kenosis_ort.targets.ort_cpu.work import ORT_CPU_COSTS, work_of as cpu_work_of
from kenosis_ort.targets.profile import HostProfile, Work
from kenosis_ort.targets.proof import FusionReport, refuse_libraries
from kenosis_ort.targets.vocabulary import DataTypes, Requirement, Role, rule

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
        self.ids = count()  # numbers for sessions and files
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
            raise VerificationError(
                f"onnxruntime-web refuses the model: {text}",
                fix=f"leave what it names float with nodes_to_exclude, or install a newer {_PACKAGE}",
            )
        return reply


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
        self._id = next(self._node.ids)
        with whole_file(self._node, source) as file:
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
    refuse_libraries(custom_op_libraries, "onnxruntime-web")
    return WebRunner(source, threads=threads)


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
            raise VerificationError(
                f"onnxruntime-web is not fed {value.dtype} here", where=name, fix=f"one of {', '.join(_TYPES)}"
            )
        inputs.append(
            {"name": name, "type": names[value.dtype], "dims": np.shape(given), "begin": at, "end": at + value.nbytes}
        )
        parts.append(value.tobytes())
        at += value.nbytes
    path = process.folder / f"{next(process.ids)}.feed"
    path.write_bytes(b"".join(parts))
    return {"inputs": inputs, "file": str(path)}


@contextmanager
def whole_file(process: Node, source: str | bytes | Path | onnx.ModelProto) -> Iterator[Path]:
    """A model as one file, its external data inside: the runtime has no file system.

    Args:
        process: In whose folder it is written, where it is no such file yet.
        source: A path, a serialized model or a `ModelProto`.
    """
    own = process.folder / f"{next(process.ids)}.onnx"
    try:
        if isinstance(source, bytes):
            own.write_bytes(source)
            yield own
            return
        read = read_source(source)
        if read.folder is None and not isinstance(source, onnx.ModelProto):
            yield Path(source)
            return
        whole = copy_model(read.proto)
        if read.folder is not None:
            read_external_data(whole, read.folder / "model.onnx")
        store_model(whole, own, external_data=False)
        yield own
    finally:
        own.unlink(missing_ok=True)


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
    refuse_libraries(custom_op_libraries, "onnxruntime-web")
    process = node(threads)

    def optimize(models: Sequence[onnx.ModelProto], source: LoadedSource, _: Sequence[str]) -> list[onnx.GraphProto]:
        graphs = []
        for piece in models:
            if source.folder is not None:
                read_external_data(piece, source.folder / "model.onnx")
            with whole_file(process, piece) as file:
                to = file.with_suffix(".optimized")
                try:
                    process.ask("optimized", file=str(file), to=str(to))
                except VerificationError as error:
                    raise VerificationError(error.what, where=source.name, fix=error.fix) from error
                graphs.append(onnx.load_model_from_string(to.read_bytes()).graph)
                to.unlink()
        return graphs

    return prove_by(optimize, read_source(model), plan, version=process.version, runtime="ONNX Runtime Web")


_OTHER: Final = frozenset({"absorb-relu", "absorb-clip"})
_OF_X86_64: Final = frozenset(
    {"absorb-needs-single-consumer", "absorb-clip-needs-scalar-params", "no-absorb-symmetric",
     "residual-needs-q-on-conv", "int8-activation-branch-float", "int8-branches-behind-barrier", "conv-matrix-product",
     "float-prefix"}
)  # fmt: skip

RULES: Final = (
    *(each for each in ORT_CPU.rules if each.id not in _OTHER),
    rule("web-relu-as-table", "Relu", Role.UNARY,
        "Relu is a table look-up, QLinearLeakyRelu of slope 0; in the requantization it is a branch (2.6x for 1.9x)"),
    rule("web-clip-as-table", "Clip", Role.UNARY,
        "Clip from 0 is the same look-up, whose table ends at the upper bound; in float it is a branch too",
        requires=(Requirement.CLIP_AT_ZERO,)),
)  # fmt: skip

FACTS: Final = (
    *(fact for fact in ORT_CPU.facts if fact[0] not in _OF_X86_64),
    ("web-range-keeps-negatives", "in front of a Relu or Clip an integer kernel's range keeps what is negative"),
    ("web-depthwise-float", "depthwise integer Convs have no fast kernel (0.17x to 0.7x of float)"),
    ("web-attention-refused", "the operator Attention that other targets gain by is refused at load"),
)  # fmt: skip


_SPELLED: Final = ("Relu", "Clip")


def spell_relus(quantized: onnx.ModelProto, plan: PlacementPlan) -> None:
    """Turns each Relu and Clip from 0 that a plan calls integer into a LeakyRelu of slope 0, in place.

    A Clip stays where the quantization behind it reaches above its upper bound, as it may where it shares its scale.

    Args:
        quantized: The quantized model.
        plan: Its placement.
    """
    integer = set(plan.integer_nodes())
    if not any(node.op_type in _SPELLED and node.name in integer for node in quantized.graph.node):
        return
    graph = SourceGraph(quantized)
    for node in (n for n in graph.nodes if n.op_type in _SPELLED and n.proto.name in integer and not n.graph):
        if node.op_type == "Relu" or _ends_at_its_bound(node, graph):
            del node.proto.input[1:], node.proto.attribute[:]
            node.proto.op_type = "LeakyRelu"
            node.proto.attribute.append(onnx.helper.make_attribute("alpha", 0.0))


def _ends_at_its_bound(clip: SourceNode, graph: SourceGraph) -> bool:
    """Whether all that reads a Clip quantizes it up to its upper bound and no further."""
    bounds = clip_bounds(clip, graph)
    if bounds is None or bounds[1] == math.inf:
        return bounds is not None
    readers = graph.consumers.get(clip.proto.output[0], [])
    for reader in readers:
        grid = graph.params(reader) if reader.op_type == Q else None
        if grid is None or grid.scale is None or grid.zero_point is None or grid.elem_type is None:
            return False
        kind = onnx.helper.tensor_dtype_to_np_dtype(grid.elem_type)
        most = float(np.iinfo(kind).max) - float(grid.zero_point.reshape(-1)[0])
        step = float(grid.scale.reshape(-1)[0])
        if most * step > bounds[1] + 0.5 * step:
            return False
    return bool(readers)


_PIXELS: Final = 16
_BY_PIXELS: Final = frozenset({"conv-pointwise", "conv-dense", "conv-depthwise", "conv-depthwise-odd"})


def work_of(view: GraphView, node: ir.Node) -> Work | None:
    """Work of a node as for ``ort-cpu``, with what a Conv multiplies in vain as its pieces; None as there."""
    work = cpu_work_of(view, node)
    if work is not None and node.op_type == "Relu":
        return replace(work, shape_class="relu")
    out = view.shape_of_one(node.outputs[0]) if work is not None and work.shape_class in _BY_PIXELS else None
    pixels = 0 if out is None else out[0] * math.prod(out[2:])
    return work if work is None or not pixels else replace(work, pieces=-pixels % _PIXELS * work.macs // pixels)


ORT_WEB_COSTS: Final = replace(
    ORT_CPU_COSTS,
    profile=HostProfile.parse((files(__package__) / "costs.json").read_text("utf-8")),
    work=work_of,
    fused=frozenset({"relu", "clip", "leaky-relu", "hard-sigmoid"}),
    blocked=frozenset(),
    gates=frozenset(),
    anywhere=True,
)


_WHY_NOT: Final = missing()
_REFUSED: Final = ("fuse_attention",)

ORT_WEB: Final[Target] = replace(
    ORT_CPU,
    name="ort-web",
    rules=RULES,
    absorbs=(),
    clamps=(),
    clips_slowly=True,
    eager=("Relu", "Clip"),
    types=DataTypes(why="uint8 activations, int8 weights by channel: 8-bit products are exact in WebAssembly"),
    float_forms=tuple(f.__name__ for f in USUAL_FORMS if f.__name__ not in _REFUSED),
    kernel_forms=("sum_to_add", "linear_to_gemm"),
    own_forms=(),
    facts=FACTS,
    costs=ORT_WEB_COSTS,
    profiles=(),
    hooks=Hooks(
        prove=None if _WHY_NOT else prove,
        time=None if _WHY_NOT else TimedRuntime(open_runner, clock=clock, other_forms=("dynamic", "weight-only")),
        why_unasked=_WHY_NOT,
        reclass_integers=ORT_CPU.hooks.reclass_integers,
        writes_float=ORT_CPU.hooks.writes_float,
        spell=spell_relus,
        barriers=ORT_CPU.hooks.barriers,
    ),
)

__all__ = ["ORT_WEB"]
