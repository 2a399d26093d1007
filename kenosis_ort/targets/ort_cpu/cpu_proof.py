"""The fusion proof of ONNX Runtime's CPU provider: the kernel of the installed runtime for every node of a model.

Source: the optimized graph that onnxruntime itself writes (``SessionOptions.optimized_model_filepath``).
The model is loaded at full optimization, and the graph read back; `kernel_map` finds the kernel of each node in it.
"""

import logging
import os
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import onnx
import onnxruntime as ort

from kenosis_ort.errors import VerificationError
from kenosis_ort.graph.constants import Is, base_op, having
from kenosis_ort.graph.load import LoadedSource, mapped, read_source
from kenosis_ort.graph.product_pairs import can_clip, data_zero_point, pair_order, stored_weights
from kenosis_ort.graph.qdq import SourceGraph, SourceNode, tag, with_labels
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.runtime.session import WHOLE_LIMIT, open_session, session_options, write_optimized
from kenosis_ort.storage.writing import Scratch
from kenosis_ort.targets.ort_cpu.kernel_graph import KernelGraph
from kenosis_ort.targets.ort_cpu.kernel_map import KernelMap, NodeMapping
from kenosis_ort.targets.ort_cpu.pieces import cut
from kenosis_ort.targets.ort_cpu.reasons import why_float
from kenosis_ort.targets.ort_cpu.rules import is_arm
from kenosis_ort.targets.proof import Cause, FusionReport, KernelReport, Status, Why

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
