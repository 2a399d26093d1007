"""ONNX Runtime's QNN provider: the runtime on which this target is proved, on x86-64 Linux by its simulator of HTP.

It is an extra of the package. It is asked in a process of its own, since its log has to be read, it keeps the chip
that it was first opened for, and an operator that it cannot compile may end the process.

The proof says which nodes the provider takes, and which run on integers there. Source: the session's own account of
which provider took each node (``session.record_ep_graph_assignment_info``).

The provider validates nodes one by one and names those it refuses. What the compiler of the chip refuses afterwards it
does not name: ``Failed to finalize QNN graph``. So each node is loaded alone, between the DQ before and the Q behind
it; one of each kind first, then the others of the kinds that fail, or of all where none does.
"""

import importlib.util
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import onnx
from onnx import helper

from kenosis_ort.errors import RuntimeEndedError, VerificationError
from kenosis_ort.graph.files import store_model
from kenosis_ort.graph.load import tagged_file
from kenosis_ort.graph.qdq import DQ, Q, SourceGraph, SourceNode, token_of, with_labels
from kenosis_ort.graph.shapes import infer_shapes, value_types
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.runtime.child import Child
from kenosis_ort.storage.writing import Scratch
from kenosis_ort.targets import other_process, proof
from kenosis_ort.targets.other_process import PROVIDER

CHIP_VARIABLE: Final = "KENOSIS_ORT_QNN_CHIP"
_USUAL_CHIP: Final = "60"
"""Qualcomm's number of the Snapdragon X Elite (HTP v73), the chip of most machines on which ONNX Runtime uses HTP."""
_REFUSED: Final = re.compile(r"\{ name: (?P<name>[^,}]*), type: (?P<type>[^,}]*) \}")


@dataclass(frozen=True)
class Answer:
    """Answer of the provider for a model.

    Attributes:
        taken: Names of the nodes that each provider takes, by provider.
        refused: Names of the nodes that QNN refuses.
        failure: Why the model does not load; empty where it does.
    """

    taken: Mapping[str, Sequence[str]] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    failure: str = ""


def missing() -> str:
    """Reason why the runtime cannot be asked here, empty where it can."""
    installed = importlib.util.find_spec("onnxruntime_qnn") is not None
    return "" if installed else "onnxruntime-qnn is not installed (pip install 'kenosis-ort[qnn]')"


def runtime_version() -> str:
    """The provider's version."""
    return version("onnxruntime-qnn")


def chip() -> str:
    """Qualcomm's number of the chip to ask about.

    Raises:
        VerificationError: The environment variable holds something else.
    """
    answers = os.environ.get(CHIP_VARIABLE, "") or _USUAL_CHIP
    if not answers.isdecimal():
        raise VerificationError(
            f"the environment variable {CHIP_VARIABLE} is {answers!r}",
            fix="Qualcomm's number of the chip, as the provider's option soc_model takes it: 60 is Snapdragon X Elite",
        )
    return answers


def ask(models: Sequence[Path]) -> list[Answer]:
    """The provider's answer for each model; one that ends its process does not load.

    Raises:
        VerificationError: It is not installed, or its process ended before it answered anything.
    """
    why = missing()
    if why:
        raise VerificationError(why, fix="install it")
    answers: list[Answer] = []
    while len(answers) < len(models):
        answers += _asked(models[len(answers) :])
    return answers


def _asked(models: Sequence[Path]) -> list[Answer]:
    """Answers of one process for models, up to the one that ended it."""
    found: list[dict[str, Any]] = []
    with Child(other_process.command("onnxruntime_qnn"), "the QNN provider") as child:
        try:
            child.ask({})
        except RuntimeEndedError as error:  # it did not come as far as the first model
            fix = "import onnxruntime_qnn in this environment, and see what it says"
            raise VerificationError(error.what, fix=fix) from error
        try:
            found.extend(child.ask({"model": str(model), "chip": chip()}) for model in models)
        except RuntimeEndedError as error:
            found.append({"failure": error.what})
    refused = tuple(dict.fromkeys(match["name"] for match in _REFUSED.finditer(child.log)))
    return [Answer(one.get("taken", {}), refused, one.get("failure", "")) for one in found]


_MOST: Final = 60
"""Nodes tried at most; each takes the simulator about two seconds."""
_INNER: Final = ("Relu", "Clip")


def not_compiled(model: onnx.ModelProto) -> tuple[tuple[str, ...], int]:
    """Finds the nodes that the provider cannot compile.

    Args:
        model: A quantized model that does not load, its weights inside. Its value_info is completed in place.

    Returns:
        The names of the nodes that do not load alone either, and how many were tried.

    Raises:
        VerificationError: The provider is not installed.
    """
    infer_shapes(model)
    graph, types = SourceGraph(model), value_types(model)
    nodes = [n for n in graph.nodes if n.is_compute and not n.graph and not _is_inner(n, graph)]
    kinds: dict[str, list[SourceNode]] = {}
    for node in nodes:
        kinds.setdefault(_kind(node, graph), []).append(node)
    first = [of_kind[0] for of_kind in kinds.values()][:_MOST]
    refused = _try(first, model, graph, types)
    rest = [n for of_kind in kinds.values() if not refused or of_kind[0] in refused for n in of_kind[1:]]
    rest = rest[: _MOST - len(first)]
    refused += _try(rest, model, graph, types)
    return tuple(node.proto.name for node in refused), len(first) + len(rest)


def _try(
    nodes: list[SourceNode], model: onnx.ModelProto, graph: SourceGraph, types: dict[str, onnx.TypeProto]
) -> list[SourceNode]:
    """Nodes, of some, that do not load alone."""
    with Scratch("qnn") as folder:
        paths, asked = [], []
        for node in nodes:
            piece = alone(node, model, graph, types)
            if piece is not None:
                paths.append(Path(folder) / f"{node.index}.onnx")
                store_model(piece, paths[-1], external_data=False)
                asked.append(node)
        return [node for node, answer in zip(asked, ask(paths), strict=True) if answer.failure]


def alone(
    node: SourceNode, model: onnx.ModelProto, graph: SourceGraph, types: dict[str, onnx.TypeProto]
) -> onnx.ModelProto | None:
    """A model of one node with the DQ before and the Q behind it; None where a type is not known."""
    piece = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    piece.graph.name = "alone"
    inner = list(_chain(node, graph))
    makers = (graph.producer.get(value) for n in inner for value in n.proto.input)
    before = {maker.index: maker for maker in makers if maker is not None and maker.op_type in (DQ, "Constant")}
    behind = [r for v in inner[-1].proto.output for r in graph.consumers.get(v, []) if r.op_type == Q]
    piece.graph.node.extend(member.proto for member in (*before.values(), *inner, *behind))
    made = {value for member in piece.graph.node for value in member.output}
    read = dict.fromkeys(v for member in piece.graph.node for v in member.input if v and v not in made)
    for value in read:
        if value in graph.initializers:
            piece.graph.initializer.append(graph.initializers[value])
        elif value in types:
            piece.graph.input.append(helper.make_value_info(value, types[value]))
        else:
            return None
    ends = behind or [inner[-1]]
    for value in (v for end in ends for v in end.proto.output if v):
        if value not in types and value not in {o.name for o in model.graph.output}:
            return None
        piece.graph.output.append(helper.make_value_info(value, types[value]))
    return piece


def _chain(node: SourceNode, graph: SourceGraph) -> Iterator[SourceNode]:
    """Yields a node and the Relu or Clip that is part of its kernel."""
    yield node
    readers = [r for v in node.proto.output if v for r in graph.consumers.get(v, [])]
    if len(readers) == 1 and _is_inner(readers[0], graph):
        yield from _chain(readers[0], graph)


def _is_inner(node: SourceNode, graph: SourceGraph) -> bool:
    """Whether a node is part of the kernel before it, and the only one that reads what that computes."""
    return _absorber(node, graph) is not None and len(graph.consumers[node.proto.input[0]]) == 1


def _kind(node: SourceNode, graph: SourceGraph) -> str:
    """The operator with its attributes and the types that it reads and writes, behind DQ and Q."""
    attributes = sorted(helper.printable_attribute(a) for a in node.proto.attribute if a.type != a.GRAPH)
    data = [dq.proto.input[0] if (dq := graph.dq_of(value)) else value for value in node.proto.input]
    *_, last = _chain(node, graph)
    readers = [r for value in last.proto.output for r in graph.consumers.get(value, []) if r.op_type == Q]
    reads, writes = [graph.types.get(v) for v in data], [graph.types.get(r.proto.output[0]) for r in readers]
    return f"{node.op_type} {attributes} {reads} {writes}"


_log = logging.getLogger(__name__)

_MESSAGE_LIMIT: Final = 400
_UNKNOWN: Final[proof.Why] = "not known: with a node that HTP refuses the model does not load", proof.Cause.NONE


def prove(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    *,
    plan: PlacementPlan | None = None,
    custom_op_libraries: Sequence[str] = (),
    threads: int = 1,  # noqa: ARG001 - of the protocol
) -> proof.FusionReport:
    """Loads a model with the QNN provider and reports which nodes HTP takes.

    The model is not run, nothing is left on disk.

    Args:
        model: Path, serialized model or `ModelProto`. Not changed.
        plan: The plan behind the model; its reasons are reported for the nodes that it keeps in float.
        custom_op_libraries: Refused: HTP has no operators beside its own.
        threads: Without effect: HTP has its own.

    Returns:
        One entry per compute node, in the model's order.

    Raises:
        ModelLoadError: The file is missing or is not an ONNX model.
        VerificationError: The provider is not installed, or the model does not load with it.
    """
    proof.refuse_libraries(custom_op_libraries, "HTP")
    with tagged_file(model) as (source, tagged, path):
        (answer,) = ask([path])
    if answer.failure and not _refused(answer):
        names, tried = not_compiled(tagged.proto)
        if not names:
            message = with_labels(" ".join(answer.failure.split())[-_MESSAGE_LIMIT:], tagged.labels)
            raise VerificationError(
                f"the QNN provider {runtime_version()} does not load the model, though each of {tried} nodes tried "
                f"loads in a model of its own: {message}",
                where=source.name,
                fix="an operator that the chip lacks or the size of the net is the usual reason: leave nodes out "
                "(nodes_to_exclude), or cut the net in two",
            )
        answer = replace(answer, refused=names)
    graph = SourceGraph(tagged.proto, labels=tagged.labels, paths=tagged.paths)
    report = report_of(graph, answer, plan, runtime_version())
    _log.info("%s: %s", source.name, str(report).splitlines()[0])
    return report


def _refused(answer: Answer) -> set[int]:
    """The tokens of the nodes that keep a model from loading: layouts were changed for their sake."""
    return {token for text in (*answer.refused, answer.failure) if (token := token_of(text)) is not None}


def report_of(graph: SourceGraph, answer: Answer, plan: PlacementPlan | None, version: str) -> proof.FusionReport:
    """The report.

    Args:
        graph: The model, its nodes named by tokens.
        answer: What the provider says of it.
        plan: The plan behind the model, if there is one.
        version: The provider's.
    """
    taker: dict[int, str] = {}
    overhead: Counter[str] = Counter()
    for provider, names in answer.taken.items():
        for name in names:
            token = token_of(name)
            node = None if token is None or token >= len(graph.nodes) else graph.nodes[token]
            if node is None:
                overhead[f"{provider} layout"] += 1
            elif node.is_compute:
                taker[node.index] = provider
            else:
                overhead[node.op_type if provider == PROVIDER else f"{provider} Q, DQ"] += 1
    refused = _refused(answer)
    kernels = tuple(
        _of_unloaded(node, graph, refused, plan)
        if answer.failure
        else _report(node, graph, taker.get(node.index), plan)
        for node in graph.nodes
        if node.is_compute
    )
    found = dict(overhead.most_common())
    return proof.FusionReport(kernels, f"{version}, chip {chip()}", found, runtime="QNN HTP")


def _of_unloaded(
    node: SourceNode, graph: SourceGraph, refused: set[int], plan: PlacementPlan | None
) -> proof.KernelReport:
    """The report on a node of a model that does not load: where it is refused why, else nothing."""
    if node.index not in refused:
        return proof.KernelReport.of(node, "", proof.Status.OTHER, _UNKNOWN)
    reason, cause = _why_refused(node, graph, plan)
    return proof.KernelReport.of(node, "", proof.Status.FLOAT, (f"with it the model does not load: {reason}", cause))


def _report(node: SourceNode, graph: SourceGraph, taker: str | None, plan: PlacementPlan | None) -> proof.KernelReport:
    kernel = "" if taker is None else f"{'HTP' if taker == PROVIDER else taker} {node.op_type}"
    found = partial(proof.KernelReport.of, node, kernel)
    absorber = _absorber(node, graph)
    if node.graph:
        return found(proof.Status.OTHER, ("inside a body of control flow, which HTP does not run", proof.Cause.NONE))
    if taker is None:
        return found(proof.Status.REMOVED, ("computed at load, or no operation left", proof.Cause.NONE))
    if not graph.computes_float(node):
        return found(proof.Status.OTHER)
    if taker != PROVIDER:
        return found(proof.Status.FLOAT, _why_refused(node, graph, plan))
    if absorber is not None and _is_quantized(absorber, graph):
        part = f"part of '{absorber.label}'", proof.Cause.NONE
        return found(proof.Status.ABSORBED, part, integer=True, absorbed_into=absorber.label)
    if _is_quantized(node, graph):
        return found(proof.Status.INTEGER)
    return found(proof.Status.FLOAT, _why_float(node, plan))


def _absorber(node: SourceNode, graph: SourceGraph) -> SourceNode | None:
    """The node of whose kernel a Relu or Clip without Q before it is part."""
    producer = graph.producer.get(node.proto.input[0]) if node.op_type in _INNER else None
    return producer if producer is not None and producer.is_compute else None


def _is_quantized(node: SourceNode, graph: SourceGraph) -> bool:
    """Whether a node reads integers through DQ and writes them through Q, perhaps behind Relu or Clip."""
    computed = [v for v in node.proto.input if v and graph.is_float(v) and v not in graph.initializers]
    return bool(computed) and all(graph.dq_of(v) for v in computed) and _is_written(node, graph)


def _is_written(node: SourceNode, graph: SourceGraph) -> bool:
    for value in node.proto.output:
        if not value or not graph.is_float(value):
            continue
        readers = graph.consumers.get(value, [])
        taken_in = len(readers) == 1 and _absorber(readers[0], graph) is node and _is_written(readers[0], graph)
        if value in graph.outputs or not (taken_in or all(reader.op_type == Q for reader in readers)):
            return False
    return True


def _why_refused(node: SourceNode, graph: SourceGraph, plan: PlacementPlan | None) -> proof.Why:
    """Reason why HTP does not take a node, and its class."""
    opened = [name for name, shape in graph.shapes.items() if any(not dim.dim_value for dim in shape.dim)]
    inputs = [name for name in opened if name not in graph.producer and name not in graph.initializers]
    if inputs:
        return f"input '{inputs[0]}' has symbolic dimensions; HTP takes static shapes alone", proof.Cause.UNSUPPORTED_OP
    if _is_quantized(node, graph):
        return f"HTP has no {node.op_type} of these types and attributes", proof.Cause.UNSUPPORTED_OP
    reason, cause = _why_float(node, plan)
    return f"{reason}; HTP refuses that", cause if cause is not proof.Cause.NONE else proof.Cause.UNSUPPORTED_OP


def _why_float(node: SourceNode, plan: PlacementPlan | None) -> proof.Why:
    return proof.why_planned_float(node, plan) or (
        "it reads or writes float, without Q and DQ on both sides",
        proof.Cause.FLOAT_OUTPUT,
    )
