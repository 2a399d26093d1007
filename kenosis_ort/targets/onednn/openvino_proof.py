"""OpenVINO's CPU plugin, whose kernels are oneDNN's: the runtime on which this target is proved and timed.

It is an extra of the package, imported when it is first asked.

The proof gives the kernel of every node of a model. Source: the plugin's own account of the compiled model
(``CompiledModel.get_runtime_model``): type, precision and implementation of each node that it executes, with the names
of the model's nodes that went into it.

The plugin's nodes carry the names of the model's nodes that went into them, but not all: of ``x * Sigmoid(x)`` the name
of the Mul alone, of a Clip that vanished into the requantization none, of a Conv whose output is multiplied by a
constant that of the Mul. A node without a name is where its readers are, or else where its operands come from.
"""

import importlib.util
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import onnx

from kenosis_ort.errors import VerificationError
from kenosis_ort.graph.load import tagged_file
from kenosis_ort.graph.qdq import DQ, Q, SourceGraph, SourceNode, token_of
from kenosis_ort.graph.walk import rename_all
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.runtime.child import child_for
from kenosis_ort.runtime.session import Runner
from kenosis_ort.storage.writing import Scratch
from kenosis_ort.targets import other_process, proof

_DATA: Final = frozenset({"Const", "Input", "Output", "Parameter", "Result"})
_MESSAGE_LIMIT: Final = 600


class Executed(NamedTuple):
    """One node of the graph that the plugin executes.

    Attributes:
        layer: Its type, ``Convolution`` for one.
        precision: What it computes on: ``u8`` and ``i8`` for quantized data.
        output: What it writes.
        primitive: The implementation that was chosen.
        names: Names of the model's nodes that it executes.
    """

    layer: str
    precision: str
    output: str
    primitive: str
    names: tuple[str, ...]


def missing() -> str:
    """Reason why the runtime cannot be asked here, empty where it can."""
    installed = importlib.util.find_spec("openvino") is not None
    return "" if installed else "OpenVINO is not installed (pip install 'kenosis-ort[openvino]')"


def runtime_version() -> str:
    """OpenVINO's version."""
    import openvino

    return str(openvino.__version__).split("-", 1)[0]


def executed(source: str | bytes | Path, *, threads: int = 1) -> list[Executed]:
    """Kernels that the plugin executes for a model, in order, without constants, inputs and outputs.

    A process of its own is asked: OpenVINO ends its process over some models.

    Args:
        source: A path or a serialized model.
        threads: Threads of a run.

    Raises:
        VerificationError: OpenVINO is not installed, refuses the model or ends its process over it.
    """
    why = missing()
    if why:
        raise VerificationError(why, fix="install it")
    with Scratch("openvino") as folder:
        path = folder / "model.onnx" if isinstance(source, bytes) else Path(source)
        if isinstance(source, bytes):
            path.write_bytes(source)
        child = child_for(other_process.command("openvino"), f"OpenVINO {runtime_version()}")
        answer = child.ask({"model": str(path.absolute()), "properties": _properties(threads)})
    if "failure" in answer:
        raise _refused(answer["failure"])
    return [
        Executed(
            one["layerType"],
            one["runtimePrecision"].lower(),
            one["outputPrecisions"].split(",")[0].lower(),
            one["primitiveType"],
            tuple(name for name in one["originalLayersNames"].split(",") if name),
        )
        for one in answer["nodes"]
        if one["layerType"] not in _DATA
    ]


def _properties(threads: int) -> dict[str, Any]:
    """Float operators in float32.

    Without the hint about precision the plugin runs float operators in bfloat16 where the processor has it, which is
    neither what the float model computes elsewhere nor a fair float to compare int8 with.
    """
    return {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}


def _refused(message: str) -> VerificationError:
    flat = " ".join(message.split())
    return VerificationError(
        f"OpenVINO {runtime_version()} does not load the model: {flat[-_MESSAGE_LIMIT:]}",
        fix="load the model in OpenVINO alone",
    )


class _CompiledRunner:
    """A compiled model with the ``run`` of an ``onnxruntime.InferenceSession``."""

    def __init__(self, compiled: Any) -> None:
        self._outputs = len(compiled.outputs)
        self._request = compiled.create_infer_request()

    def run(self, output_names: None, input_feed: Mapping[str, Any]) -> list[Any]:
        """Runs the model once; returns all its outputs."""
        assert output_names is None
        result = self._request.infer(dict(input_feed), share_inputs=True)
        return [result[index] for index in range(self._outputs)]


def open_runner(source: str | bytes, *, threads: int, custom_op_libraries: Sequence[str]) -> Runner:
    """Function that runs a model on OpenVINO.

    Raises:
        VerificationError: OpenVINO is not installed or refuses the model.
    """
    proof.refuse_libraries(custom_op_libraries, "OpenVINO")
    executed(source, threads=threads)  # whose process may end over the model, ours may not
    import openvino

    core = openvino.Core()
    try:
        return _CompiledRunner(core.compile_model(core.read_model(source), "CPU", _properties(threads)))
    except Exception as error:  # the runtime's exceptions share no base class but Exception
        raise _refused(str(error)) from error


HEAVY_LAYERS: Final[Mapping[str, tuple[str, ...]]] = {
    "Conv": ("Convolution",),
    "ConvTranspose": ("Deconvolution",),
    "Gemm": ("FullyConnected", "MatMul"),
    "MatMul": ("FullyConnected", "MatMul"),
}
_BYTE_OPS: Final = frozenset({"Identity", "Dropout", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Cast"})


class OpenVinoMap:
    """The assignment for one model.

    Args:
        graph: The model, its nodes named by tokens.
        plugin: What the plugin executes.
    """

    def __init__(self, graph: SourceGraph, plugin: Sequence[Executed]) -> None:
        self._graph = graph
        self._plugin = plugin
        self._of: dict[int, int] = {}  # index of the model's node to position of the plugin's
        self._named: set[int] = set()
        for position, item in enumerate(plugin):
            for name in item.names:
                token = token_of(name)
                if token is not None and token < len(graph.nodes):
                    self._claim(graph.nodes[token], position)
        for node in reversed(graph.nodes):
            self._settle(node, self._behind(node))
        for node in graph.nodes:
            self._settle(node, self._before(node))
        self.owner = self._owners()

    def executed(self, node: SourceNode) -> Executed | None:
        """Kernel that executes a node, None if none does."""
        position = self._of.get(node.index)
        return None if position is None else self._plugin[position]

    def owner_of(self, node: SourceNode) -> SourceNode | None:
        """The node that gives what executes a node its name: itself, or the heaviest or last one within."""
        position = self._of.get(node.index)
        return None if position is None else self.owner.get(position)

    def overhead(self) -> list[Executed]:
        """Kernels of the plugin that stand for no node of the model but Q and DQ: layout changes and conversions."""
        return [executed for position, executed in enumerate(self._plugin) if position not in self.owner]

    def _claim(self, node: SourceNode, position: int) -> None:
        known = self._of.get(node.index)
        layers = HEAVY_LAYERS.get(node.op_type, ())
        better = known is None or (self._plugin[position].layer in layers and self._plugin[known].layer not in layers)
        if better:
            self._of[node.index] = position
            self._named.add(node.index)

    def _settle(self, node: SourceNode, position: int | None) -> None:
        if position is None or node.index in self._of or not node.is_compute or node.graph:
            return
        layers = HEAVY_LAYERS.get(node.op_type)
        if layers is not None and self._plugin[position].layer not in layers:
            return
        if node.op_type not in _BYTE_OPS and not self._is_constant(node):
            self._of[node.index] = position

    def _behind(self, node: SourceNode) -> int | None:
        """Kernel that executes all readers of a node, None if no single one does."""
        readers = [r for v in node.proto.output if v for r in self._graph.consumers.get(v, ())]
        found = {self._of.get(r.index) for r in readers}
        return found.pop() if len(found) == 1 else None

    def _before(self, node: SourceNode) -> int | None:
        """Kernel that executes the producer of a node's data."""
        for value in node.proto.input:
            maker = self._graph.producer.get(value)
            if maker is not None and maker.index in self._of:
                return self._of[maker.index]
        return None

    def _is_constant(self, node: SourceNode) -> bool:
        values = [v for v in node.proto.input if v]
        return all(v in self._graph.initializers or self._graph.is_dq_constant(v) for v in values)

    def _owners(self) -> dict[int, SourceNode]:
        owners: dict[int, SourceNode] = {}
        for node in self._graph.nodes:
            position = self._of.get(node.index)
            if position is None or not node.is_compute:
                continue
            if position not in owners or self._rank(node, position) >= self._rank(owners[position], position):
                owners[position] = node
        return owners

    def _rank(self, node: SourceNode, position: int) -> tuple[bool, bool]:
        layer = self._plugin[position].layer
        return layer in HEAVY_LAYERS.get(node.op_type, ()), node.index in self._named


_log = logging.getLogger(__name__)

_BYTES: Final = frozenset({"u8", "i8"})
_READS: Final = (
    ("input", proof.Cause.FLOAT_INPUT, proof.Cause.TYPE_MISMATCH, ("uint8", "int8")),
    ("weights", proof.Cause.FLOAT_WEIGHT, proof.Cause.WEIGHT_TYPE, ("int8",)),
)
"""What a layer reads, why it is float where that is float or of another type, and the types that its kernels take."""
_UNSEEN: Final = "inside a body of control flow, of which OpenVINO gives no account"


def prove(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    *,
    plan: PlacementPlan | None = None,
    custom_op_libraries: Sequence[str] = (),
    threads: int = 1,
) -> proof.FusionReport:
    """Compiles a model with OpenVINO for the CPU and reports what executes each of its nodes.

    The model is not run, nothing is left on disk.

    Args:
        model: Path, serialized model or `ModelProto`. Not changed.
        plan: The plan behind the model; its reasons are reported for the nodes that it keeps in float.
        custom_op_libraries: Refused: OpenVINO does not load them.
        threads: Threads of a run.

    Returns:
        One entry per compute node, in the model's order.

    Raises:
        ModelLoadError: The file is missing or is not an ONNX model.
        VerificationError: OpenVINO is not installed or refuses the model.
    """
    proof.refuse_libraries(custom_op_libraries, "OpenVINO")
    with tagged_file(model, _name_outputs) as (source, tagged, path):
        found = executed(path, threads=threads)
    graph = SourceGraph(tagged.proto, labels=tagged.labels, paths=tagged.paths)
    report = report_of(graph, found, plan, runtime_version())
    _log.info("%s: %s", source.name, str(report).splitlines()[0])
    return report


def report_of(
    graph: SourceGraph, found: Sequence[Executed], plan: PlacementPlan | None, version: str
) -> proof.FusionReport:
    """The report.

    Args:
        graph: The model, its nodes named by tokens.
        found: What the plugin executes.
        plan: The plan behind the model, if there is one.
        version: OpenVINO's.
    """
    assignment = OpenVinoMap(graph, found)
    within: dict[int, list[str]] = {}
    for node in graph.nodes:
        owner = assignment.owner_of(node)
        if owner is not None and owner is not node and node.is_compute:
            within.setdefault(owner.index, []).append(node.label)
    return proof.FusionReport(
        kernels=tuple(
            _report(node, graph, assignment, plan, tuple(within.get(node.index, ())))
            for node in graph.nodes
            if node.is_compute
        ),
        runtime_version=version,
        overhead=dict(Counter(e.layer for e in assignment.overhead()).most_common()),
        runtime="OpenVINO",
    )


def _report(
    node: SourceNode,
    graph: SourceGraph,
    assignment: OpenVinoMap,
    plan: PlacementPlan | None,
    absorbed: tuple[str, ...],
) -> proof.KernelReport:
    kernel, owner = assignment.executed(node), assignment.owner_of(node)
    why, into = proof.UNEXPLAINED, None
    integer = kernel is not None and _is_integer(kernel)
    if not graph.computes_float(node):
        status, integer = proof.Status.OTHER, False
    elif kernel is None:
        status = proof.Status.OTHER if node.graph else proof.Status.REMOVED
        why = _UNSEEN if node.graph else "computed at load, or no operation left", proof.Cause.NONE
    elif owner is not None and owner is not node:
        status, into, why = proof.Status.ABSORBED, owner.label, (f"part of '{owner.label}'", proof.Cause.NONE)
    elif integer:
        status = proof.Status.INTEGER
    else:
        status, why = proof.Status.FLOAT, _why_float(node, graph, plan)
    name = "" if kernel is None else f"{kernel.layer} {kernel.primitive}"
    return proof.KernelReport.of(node, name, status, why, integer=integer, absorbed=absorbed, absorbed_into=into)


def _is_integer(kernel: Executed) -> bool:
    """Whether a kernel works on quantized data; a light one may, if it only writes such, compute in float."""
    heavy = any(kernel.layer in layers for layers in HEAVY_LAYERS.values())
    return kernel.precision in _BYTES or (not heavy and kernel.output in _BYTES)


def _why_float(node: SourceNode, graph: SourceGraph, plan: PlacementPlan | None) -> proof.Why:
    why = proof.why_planned_float(node, plan)
    if why is not None:
        return why
    if node.op_type not in HEAVY_LAYERS:
        return f"{node.op_type} has no kernel on quantized data here", proof.Cause.UNSUPPORTED_OP
    for value, (what, if_float, if_other, allowed) in zip(node.proto.input, _READS, strict=False):
        dq = graph.dq_of(value)
        if dq is None:
            return f"its {what} '{value}' is not dequantized from 8 bits", if_float
        kind = onnx.TensorProto.DataType.Name(graph.params(dq).elem_type or 0).lower()
        if kind not in allowed:
            return f"its {what} is {kind}; oneDNN takes {' or '.join(allowed)}", if_other
        before = graph.producer.get(dq.proto.input[0])
        if what == "weights" and before is not None and before.op_type not in (Q, DQ, "Constant"):
            return f"{before.op_type} stands between the weights and their DequantizeLinear", if_other
    return "OpenVINO gives no reason, and no known rule explains it", proof.Cause.UNKNOWN


def _name_outputs(model: onnx.ModelProto) -> None:
    """Renames the model's outputs after the nodes that make them, in place: OpenVINO names those nodes after them."""
    outputs, names = {o.name for o in model.graph.output}, {}
    for node in model.graph.node:
        names.update({v: f"{node.name}{i}" for i, v in enumerate(node.output) if v in outputs})
    rename_all(model.graph, names)
