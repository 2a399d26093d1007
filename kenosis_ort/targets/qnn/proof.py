"""The proof on HTP: which nodes of a model the QNN provider takes, and which run on integers there.

Source: the session's own account of which provider took each node (``session.record_ep_graph_assignment_info``).
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import onnx

from kenosis_ort.errors import VerificationError
from kenosis_ort.graph.external_data import read_external_data
from kenosis_ort.graph.qdq import Q, SourceGraph, SourceNode
from kenosis_ort.graph.save import store_model
from kenosis_ort.graph.source import read_source
from kenosis_ort.graph.tokens import tag, token_of, told
from kenosis_ort.plan import Kind, PlacementPlan
from kenosis_ort.storage.scratch import Scratch
from kenosis_ort.targets.proof import Cause, FusionReport, KernelReport, Status
from kenosis_ort.targets.qnn.alone import not_compiled
from kenosis_ort.targets.qnn.runtime import PROVIDER, Answer, ask, chip, runtime_version

_log = logging.getLogger(__name__)

_MESSAGE_LIMIT: Final = 400


def prove(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    *,
    plan: PlacementPlan | None = None,
    custom_op_libraries: Sequence[str] = (),
    threads: int = 1,  # noqa: ARG001 - of the protocol
) -> FusionReport:
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
    if custom_op_libraries:
        raise VerificationError("HTP has no operators beside its own", fix="leave custom_op_libraries out")
    source = read_source(model)
    tagged = tag(source.proto)
    with Scratch("verify") as folder:
        if source.folder is not None:
            read_external_data(tagged.proto, source.folder / "model.onnx")
        path = Path(folder) / "model.onnx"
        store_model(tagged.proto, path, external_data=False)
        (said,) = ask([path])
    if said.failure and not _refused(said):
        names, tried = not_compiled(tagged.proto)
        if not names:
            raise VerificationError(
                f"the QNN provider {runtime_version()} does not load the model, though each of {tried} nodes tried "
                f"loads in a model of its own: {_told(said, tagged.labels)}",
                where=source.name,
                fix="an operator that the chip lacks or the size of the net is the usual reason: leave nodes out "
                "(nodes_to_exclude), or cut the net in two",
            )
        said = replace(said, refused=names)
    graph = SourceGraph(tagged.proto, labels=tagged.labels, paths=tagged.paths)
    report = report_of(graph, said, plan, runtime_version())
    _log.info("%s: %s", source.name, str(report).splitlines()[0])
    return report


def _told(said: Answer, labels: Sequence[str]) -> str:
    return told(" ".join(said.failure.split())[-_MESSAGE_LIMIT:], labels)


def _refused(said: Answer) -> set[int]:
    """Returns the tokens of the nodes that keep a model from loading: layouts were changed for their sake."""
    return {token for text in (*said.refused, said.failure) if (token := token_of(text)) is not None}


def report_of(graph: SourceGraph, said: Answer, plan: PlacementPlan | None, version: str) -> FusionReport:
    """Returns the report.

    Args:
        graph: The model, its nodes named by tokens.
        said: What the provider says of it.
        plan: The plan behind the model, if there is one.
        version: The provider's.
    """
    if said.failure:
        return _of_unloaded(graph, said, plan, version)
    taker: dict[int, str] = {}
    overhead: Counter[str] = Counter()
    for provider, names in said.taken.items():
        for name in names:
            token = token_of(name)
            if token is not None and token < len(graph.nodes) and graph.nodes[token].is_compute:
                taker[token] = provider
            elif token is not None and token < len(graph.nodes):
                overhead[graph.nodes[token].op_type if provider == PROVIDER else f"{provider} Q, DQ"] += 1
            else:
                overhead[f"{provider} layout"] += 1
    kernels = tuple(_report(node, graph, taker.get(node.index), plan) for node in graph.nodes if node.is_compute)
    return _fusion_report(kernels, version, dict(overhead.most_common()))


def _fusion_report(kernels: tuple[KernelReport, ...], version: str, overhead: Mapping[str, int]) -> FusionReport:
    return FusionReport(kernels, f"{version}, chip {chip()}", overhead, runtime="QNN HTP")


def _of_unloaded(graph: SourceGraph, said: Answer, plan: PlacementPlan | None, version: str) -> FusionReport:
    """Returns the report of a model that does not load: the nodes that are refused, of the others nothing."""
    refused, kernels = _refused(said), []
    for node in graph.nodes:
        if node.is_compute:
            is_refused = node.index in refused
            reason, cause = "not known: with a node that HTP refuses the model does not load", Cause.NONE
            if is_refused:
                why, cause = _why_refused(node, graph, plan)
                reason = f"with it the model does not load: {why}"
            status = Status.FLOAT if is_refused else Status.OTHER
            kernels.append(
                KernelReport(
                    node.label,
                    node.op_type,
                    "",
                    integer=False,
                    reason=reason,
                    status=status,
                    cause=cause,
                    graph=node.graph,
                )
            )
    return _fusion_report(tuple(kernels), version, {})


def _report(node: SourceNode, graph: SourceGraph, taker: str | None, plan: PlacementPlan | None) -> KernelReport:
    integer, reason, cause = False, "", Cause.NONE
    absorber = _absorber(node, graph)
    if node.graph:
        status, reason = Status.OTHER, "inside a body of control flow, which HTP does not run"
    elif taker is None:
        status, reason = Status.REMOVED, "computed at load, or no operation left"
    elif not graph.computes_float(node):
        status = Status.OTHER
    elif taker != PROVIDER:
        status, (reason, cause) = Status.FLOAT, _why_refused(node, graph, plan)
    elif absorber is not None and _is_quantized(absorber, graph):
        status, integer, reason = Status.ABSORBED, True, f"part of '{absorber.label}'"
    elif _is_quantized(node, graph):
        status, integer = Status.INTEGER, True
    else:
        status, (reason, cause) = Status.FLOAT, _why_float(node, plan)
    return KernelReport(
        node=node.label,
        op_type=node.op_type,
        kernel="" if taker is None else f"{'HTP' if taker == PROVIDER else taker} {node.op_type}",
        integer=integer,
        absorbed_into=absorber.label if status is Status.ABSORBED and absorber is not None else None,
        reason=reason,
        status=status,
        cause=cause,
        graph=node.graph,
    )


def _absorber(node: SourceNode, graph: SourceGraph) -> SourceNode | None:
    """Returns the node of whose kernel a Relu or Clip without Q before it is part."""
    if node.op_type not in ("Relu", "Clip"):
        return None
    producer = graph.producer.get(node.proto.input[0])
    return producer if producer is not None and producer.is_compute else None


def _is_quantized(node: SourceNode, graph: SourceGraph) -> bool:
    """Tells whether a node reads integers through DQ and writes them through Q, perhaps behind Relu or Clip."""
    computed = [v for v in node.proto.input if v and graph.is_float(v) and not graph.is_initializer(v)]
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


def _why_refused(node: SourceNode, graph: SourceGraph, plan: PlacementPlan | None) -> tuple[str, Cause]:
    """Returns why HTP does not take a node, and its class."""
    opened = [name for name, shape in graph.shapes.items() if any(not dim.dim_value for dim in shape.dim)]
    inputs = [name for name in opened if name not in graph.producer and not graph.is_initializer(name)]
    if inputs:
        return f"input '{inputs[0]}' has symbolic dimensions; HTP takes static shapes alone", Cause.UNSUPPORTED_OP
    if _is_quantized(node, graph):
        return f"HTP has no {node.op_type} of these types and attributes", Cause.UNSUPPORTED_OP
    reason, cause = _why_float(node, plan)
    return f"{reason}; HTP refuses that", cause if cause is not Cause.NONE else Cause.UNSUPPORTED_OP


def _why_float(node: SourceNode, plan: PlacementPlan | None) -> tuple[str, Cause]:
    decision = plan.by_node.get(node.label) if plan is not None else None
    if decision is not None and decision.kind is Kind.FLOAT:
        return f"kept in float by {decision.rule}: {decision.reason}", Cause.PROTECTED
    return "it reads or writes float, without Q and DQ on both sides", Cause.FLOAT_OUTPUT
