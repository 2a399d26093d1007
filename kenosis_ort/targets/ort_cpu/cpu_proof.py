"""The fusion proof of ONNX Runtime's CPU provider: the kernel of the installed runtime for every node of a model.

Source: the optimized graph that onnxruntime itself writes (``SessionOptions.optimized_model_filepath``).
The model is loaded at full optimization, and the graph read back; `kernel_map` finds the kernel of each node in it.

A large model is cut into pieces that the runtime is asked about one by one: the time that onnxruntime takes to load a
graph grows with the square of its depth: 1,000 quantized Convs in a row take seconds, 4,000 a minute. What it fuses
depends on the neighbourhood of a node only, so the proof of a large model is the sum of the proofs of its pieces. A cut
runs through quantized uint8 values of known rank and nowhere else: on both sides the same Q/DQ pairs stand around each
node as before. A DequantizeLinear goes with its readers.
"""

import logging
import os
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from kenosis_ort.errors import VerificationError
from kenosis_ort.graph import walk
from kenosis_ort.graph.constants import Is, base_op, having
from kenosis_ort.graph.load import LoadedSource, mapped, read_source
from kenosis_ort.graph.product_pairs import can_clip, data_zero_point, pair_order, stored_weights
from kenosis_ort.graph.qdq import DQ, Q, SourceGraph, SourceNode, tag, with_labels
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.runtime.session import WHOLE_LIMIT, open_session, session_options, write_optimized
from kenosis_ort.storage.writing import Scratch
from kenosis_ort.targets.ort_cpu.kernel_graph import KernelGraph
from kenosis_ort.targets.ort_cpu.kernel_map import KernelMap, NodeMapping
from kenosis_ort.targets.ort_cpu.reasons import why_float
from kenosis_ort.targets.ort_cpu.rules import is_arm
from kenosis_ort.targets.proof import Cause, FusionReport, KernelReport, Status, Why

PIECE_NODES: Final = 150  # nodes of one piece; constants and DequantizeLinear come on top


def cut(model: onnx.ModelProto, graph: SourceGraph, *, size: int = PIECE_NODES) -> list[onnx.ModelProto]:
    """Cuts a model into pieces of at least ``size`` nodes each, but for the last.

    Args:
        model: The model, nodes in topological order. Not changed.
        graph: Its index.
        size: Nodes of a piece before the next possible cut.

    Returns:
        The pieces in order, at least one; their nodes keep their names, a DequantizeLinear may stand in several.
    """
    groups = _groups(graph, size)
    if len(groups) == 1 or model.graph.sparse_initializer:
        return [model]
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    inputs = {info.name: info for info in model.graph.input}
    outputs = {info.name: info for info in model.graph.output}
    types = {info.name: info for info in model.graph.value_info if info.name not in outputs}
    pieces: list[onnx.ModelProto] = []
    later: set[str] = set()  # what pieces behind read
    for group in reversed(groups):
        nodes = _with_free(group, graph)
        made = {value for node in nodes for value in node.output if value}
        read = [value for value in dict.fromkeys(v for n in nodes for v in walk.read_names(n)) if value not in made]
        handed = made & later
        later.update(read)
        piece = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
        piece.graph.name = model.graph.name or "piece"
        piece.graph.node.extend(nodes)
        piece.graph.initializer.extend(constants[v] for v in read if v in constants)
        piece.graph.input.extend(inputs[v] if v in inputs else _quantized(v, graph) for v in read if v not in constants)
        piece.graph.output.extend(_quantized(v, graph) for v in sorted(handed) if v not in outputs)
        piece.graph.output.extend(info for name, info in outputs.items() if name in made)
        inner = (v for n in nodes for v in n.output if v in types and v not in handed)
        piece.graph.value_info.extend(types[v] for v in inner)
        pieces.insert(0, piece)
    return pieces


def _with_free(group: Sequence[SourceNode], graph: SourceGraph) -> list[onnx.NodeProto]:
    """Nodes, each behind the constants and DequantizeLinear nodes that it reads."""
    nodes: dict[int, onnx.NodeProto] = {}

    def bring(node: SourceNode) -> None:
        for value in walk.read_names(node.proto):
            maker = graph.producer.get(value)
            if maker is not None and maker.index not in nodes and not maker.graph and _is_free(maker, graph):
                bring(maker)
        nodes[node.index] = node.proto

    for node in group:
        bring(node)
    return list(nodes.values())


def _groups(graph: SourceGraph, size: int) -> list[list[SourceNode]]:
    """Cuts the nodes of the main graph where all that crosses is quantized; free DequantizeLinear nodes left out."""
    main = [n for n in graph.nodes if not n.graph and not _is_free(n, graph)]
    reads = [_needs(n, graph) for n in main]
    made = {value: position for position, node in enumerate(main) for value in node.proto.output}
    if any(made.get(value, -1) >= position for position, values in enumerate(reads) for value in values):
        return [main]  # not in topological order
    order = _depth_first([[made[value] for value in values if value in made] for values in reads])
    main, reads = [main[at] for at in order], [reads[at] for at in order]
    last = {value: position for position, values in enumerate(reads) for value in values}
    groups: list[list[SourceNode]] = [[]]
    read_until = 0  # where the last of the float values so far is read for the last time
    for position, node in enumerate(main):
        groups[-1].append(node)
        floats = (value for value in node.proto.output if value in last and not _may_cross(value, graph))
        read_until = max([read_until, *(last[value] for value in floats)])
        if len(groups[-1]) >= size and read_until <= position and position + 1 < len(main):
            groups.append([])
    return groups


def _depth_first(above: Sequence[Sequence[int]]) -> list[int]:
    """Positions in an order in which a branch comes in one go, so that little is alive between two nodes.

    Args:
        above: By position, what a node reads; all of it lies before.
    """
    read = set().union(*above)
    order: dict[int, None] = {}
    opened: set[int] = set()
    for end in (position for position in range(len(above)) if position not in read):
        stack = [end]
        while stack:
            position = stack[-1]
            left = [] if position in opened else [other for other in above[position] if other not in order]
            opened.add(position)
            if left:
                stack += reversed(left)
            else:
                order.setdefault(stack.pop())
    return list(order)


def _is_free(node: SourceNode, graph: SourceGraph) -> bool:
    """A constant or a DequantizeLinear moves to its readers unless it makes a graph output."""
    return node.op_type in (DQ, "Constant") and node.proto.output[0] not in graph.outputs


def _needs(node: SourceNode, graph: SourceGraph) -> list[str]:
    """The values that a node and its bodies read, with those behind a free DequantizeLinear in its place."""
    needed = []
    for value in walk.read_names(node.proto):
        maker = graph.producer.get(value)
        while maker is not None and _is_free(maker, graph):
            value = maker.proto.input[0] if maker.op_type == DQ else ""
            maker = graph.producer.get(value)
        if maker is not None and not maker.graph:
            needed.append(value)
    return needed


def _may_cross(value: str, graph: SourceGraph) -> bool:
    maker = graph.producer.get(value)
    if maker is None or maker.op_type != Q or graph.types.get(value) != TensorProto.UINT8:
        return False
    return _shape_source(value, graph) is not None


def _shape_source(value: str, graph: SourceGraph) -> onnx.TensorShapeProto | None:
    """The shape of a Q output: its own, its input's, or that of a DQ behind it."""
    maker = graph.producer[value]
    around = [value, maker.proto.input[0], *(r.proto.output[0] for r in graph.consumers.get(value, []))]
    return next((graph.shapes[v] for v in around if v in graph.shapes), None)


def _quantized(value: str, graph: SourceGraph) -> onnx.ValueInfoProto:
    info = helper.make_tensor_value_info(value, TensorProto.UINT8, None)
    shape = _shape_source(value, graph)
    if shape is not None:
        info.type.tensor_type.shape.CopyFrom(shape)
    return info


_log = logging.getLogger(__name__)

_MOST_WEIGHTS = 1 << 30
_WEIGHTED = having(Is.LAYER) - having(Is.INTEGER)


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
            options = session_options(threads=threads)
            write_optimized(options, target, 4096)
            try:
                open_session(
                    model,
                    options=options,
                    custom_op_libraries=custom_op_libraries,
                    folder=source.folder,
                    name=source.name,
                )
            except VerificationError as error:
                raise VerificationError(with_labels(error.what, labels), where=error.where, fix=error.fix) from error
            graphs.append(onnx.load(target, load_external_data=False).graph)
    return graphs


def prove(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    *,
    plan: PlacementPlan | None = None,
    custom_op_libraries: Sequence[str] = (),
    threads: int = 1,
) -> FusionReport:
    """Loads a model in onnxruntime at full optimization and reports what executes each of its nodes.

    A model of more than 3,000 nodes is loaded in pieces, cut through quantized values, because the runtime's load time
    grows with the square of the depth. Nodes of ``If``, ``Loop`` and ``Scan`` bodies are reported as well. The model is
    not run, nothing is left on disk.

    Args:
        model: Path, serialized model or `ModelProto`; external data is read by the runtime only. Not changed.
        plan: The plan behind the model; its reasons are reported for the nodes that it keeps in float.
        custom_op_libraries: Shared libraries of custom operators to register.
        threads: Threads of the session.

    Returns:
        One entry per compute node, in the model's order.

    Raises:
        ModelLoadError: The file is missing or is not an ONNX model.
        VerificationError: The runtime refuses the model.
    """
    how = partial(optimize, custom_op_libraries=custom_op_libraries, threads=threads)
    with Scratch("verify") as folder:
        return prove_by(how, mapped(read_source(model), folder), plan, is_native=not is_arm(platform.machine()))


Optimize = Callable[[Sequence[onnx.ModelProto], LoadedSource, Sequence[str]], list[onnx.GraphProto]]
"""Function that optimizes pieces of a model with a build of ONNX Runtime; the labels of nodes are for messages."""


def prove_by(
    optimize: Optimize,
    source: LoadedSource,
    plan: PlacementPlan | None,
    *,
    version: str = ort.__version__,
    runtime: str = FusionReport.runtime,
    is_native: bool = False,
) -> FusionReport:
    """Reports what executes each node of a model in a build of ONNX Runtime.

    Args:
        optimize: Asks the build.
        source: The model.
        plan: The plan behind the model.
        version: Of the build.
        runtime: Its name.
        is_native: It runs on x86-64 as it is, so that the kernels of its Convs are known.
    """
    tagged = tag(source.proto)
    graph = SourceGraph(tagged.proto, source.folder, labels=tagged.labels, paths=tagged.paths)
    pieces = cut(tagged.proto, graph) if len(graph.nodes) > WHOLE_LIMIT else [tagged.proto]
    optimized = optimize(pieces, source, tagged.labels)
    kernels = KernelGraph(optimized, graph.names())
    mapping = KernelMap(graph, kernels)
    report = FusionReport(
        kernels=tuple(_report(entry, mapping, graph, kernels, plan, is_native) for entry in mapping.entries.values()),
        runtime_version=version,
        overhead=dict(Counter(k.label for k in mapping.overhead()).most_common()),
        pieces=len(pieces),
        runtime=runtime,
    )
    _log.info("%s: %s", source.name, str(report).splitlines()[0])
    return report


def _report(
    entry: NodeMapping,
    mapping: KernelMap,
    graph: SourceGraph,
    kernels: KernelGraph,
    plan: PlacementPlan | None,
    is_native: bool,
) -> KernelReport:
    node = entry.node
    kernel = entry.kernel
    # Status by kernel, and the reason where it is float.
    why: Why = entry.note, Cause.NONE
    if kernel is None and entry.into is not None:
        kernel = mapping.entries[entry.into.index].kernel
        status = Status.ABSORBED
        why = entry.note or f"part of '{entry.into.label}'", Cause.NONE
    elif kernel is None:
        status = Status.REMOVED
    elif not graph.computes_float(node):
        status = Status.OTHER
    elif kernel.integer:
        status = Status.INTEGER
    else:
        status = Status.FLOAT
        why = why_float(node, graph, plan, fused=_fused_type(entry))
    if status is Status.REMOVED and not graph.computes_float(node):
        status = Status.OTHER
    # Weights that the runtime quantizes, or dequantizes on every run.
    integer = kernel is not None and kernel.integer and status in (Status.INTEGER, Status.ABSORBED)
    own = entry.kernel
    float_weight = _has_float_weight(entry, graph)
    weights_per_run = own is not None and not integer and node.op_type in _WEIGHTED and kernels.weight_dq(own)
    silent = float_weight and status in (Status.INTEGER, Status.FLOAT) and (integer or weights_per_run)
    if silent and status is Status.INTEGER:
        why = "the runtime quantized its float weights at load, per-tensor and asymmetric", why[1]
    return KernelReport.of(
        node,
        " + ".join(k.label for k in (*entry.inlined, kernel)) if kernel is not None else "",
        status,
        why,
        integer=integer,
        absorbed=tuple(n.label for n in entry.absorbed),
        absorbed_into=entry.into.label if entry.into is not None else None,
        silently_quantized=silent,
        weights_per_run=weights_per_run,
        path=kernels.conv_kernel(own) if own is not None and is_native else "",
        clipping=_clipping_channels(node, graph) if integer and own is not None else 0,
    )


def _clipping_channels(node: SourceNode, graph: SourceGraph) -> int:
    """Output channels of which pairs of products can clip in int16, see `kenosis_ort.graph.qdq`."""
    at = stored_weights(node.proto)
    if at is None or at >= len(node.proto.input):
        return 0
    name = node.proto.input[at]
    dq = graph.dq_of(name)
    zero_point = data_zero_point(node.proto) if dq is None else ""  # int8 data behind Q become uint8 at load
    if zero_point and graph.types.get(zero_point) == onnx.TensorProto.INT8:
        return 0
    stored = graph.array(dq.proto.input[0] if dq is not None else name, most=_MOST_WEIGHTS)
    order = None if stored is None or stored.dtype != np.int8 else pair_order(node.proto, stored.shape)
    if stored is None or order is None:
        return 0
    return int(np.count_nonzero(can_clip(stored, order).any(axis=-1)))


def _fused_type(entry: NodeMapping) -> str | None:
    """The kernel's operator type where it is a pattern of several source operators (Gelu, QuickGelu, ...)."""
    if entry.kernel is None or entry.inlined or not entry.absorbed or entry.node.op_type in _WEIGHTED:
        return None
    return entry.kernel.op_type if entry.kernel.base != base_op(entry.node.op_type) else None


def _has_float_weight(entry: NodeMapping, graph: SourceGraph) -> bool:
    weight = "".join(entry.node.proto.input[1:2])
    return entry.node.op_type in _WEIGHTED and weight in graph.initializers and graph.is_float(weight)
