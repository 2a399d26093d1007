"""What a file is and does: kernels by node, and signal by layer.

Signal per layer: how close the intermediate values of a quantized model are to the float model's.

The fusion proof, with the kernel of every compute node, and conformance to a document's patterns.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx

from kenosis_ort.errors import OptionError, last_gate, warn_caller
from kenosis_ort.graph.qdq import DQ, QDQ_OPS, Q
from kenosis_ort.graph.save import made_for
from kenosis_ort.graph.shapes import value_types
from kenosis_ort.graph.source import read_source
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.runtime.session import as_array, open_session
from kenosis_ort.targets import DEFAULT_TARGET, TARGETS, Target, get_target
from kenosis_ort.targets.proof import FusionReport, PatternReport


@last_gate
def verify_fusion(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    *,
    plan: PlacementPlan | None = None,
    custom_op_libraries: Sequence[str] = (),
    threads: int = 1,
    target: str | Target | None = None,
) -> FusionReport:
    """Loads a model in a target's runtime at full optimization and reports what executes each of its nodes.

    A model of more than 3,000 nodes is loaded in onnxruntime in pieces, cut through quantized values, because the
    runtime's load time grows with the square of the depth. Nodes of ``If``, ``Loop`` and ``Scan`` bodies are reported
    as well. The model is not run, nothing is left on disk.

    Args:
        model: Path, serialized model or `ModelProto`; external data is read by the runtime only. Not changed.
        plan: The plan behind the model; its reasons are reported for the nodes that it keeps in float.
        custom_op_libraries: Shared libraries of custom operators to register.
        threads: Threads of the session.
        target: Whose runtime is asked: a name, or a `kenosis_ort.targets.Target`; None for the one that the file says
            it was made for, or ``ort-cpu`` where it says nothing.

    Returns:
        One entry per compute node, in the model's order.

    Warns:
        KenosisWarning: The file was made for another target than the one that is asked.

    Raises:
        ModelLoadError: The file is missing or is not an ONNX model.
        VerificationError: The runtime refuses the model.
        OptionError: The target has no runtime that can be asked here.
    """
    source = read_source(model)
    made = made_for(source.proto)
    asked = _asked(made) if target is None else get_target(target)
    if asked.hooks.prove is None:
        provers = sorted(name for name, known in TARGETS.items() if known.hooks.prove is not None)
        raise OptionError(
            f"{asked.unasked}, so that it cannot be asked which kernels it uses",
            where="target",
            fix=f"one of {provers}; the file itself can be compared with the float model by kenosis_ort.compare",
        )
    if made not in (None, asked.name):
        warn_caller(
            f"{source.name} was made for target '{made}', and the runtime of '{asked.name}' is asked, which may want "
            f"Q and DQ elsewhere. Fix: {_fix(str(made))}"
        )
    return asked.hooks.prove(model, plan=plan, custom_op_libraries=custom_op_libraries, threads=threads)


def _asked(made: str | None) -> Target:
    """The target to ask about a file where the caller names none."""
    known = TARGETS.get(made or DEFAULT_TARGET)
    return get_target(DEFAULT_TARGET) if known is None or known.hooks.prove is None else known


def _fix(made: str) -> str:
    known = TARGETS.get(made)
    if known is not None and known.hooks.prove is not None:
        return f"target='{made}'."
    return "nothing, if it runs there in the end; else quantize for the runtime that it runs on (target)."


@last_gate
def verify_patterns(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto, target: str | Target = "onednn"
) -> PatternReport:
    """Holds every Conv of a QDQ model, of any origin, against the quantized patterns that a target's document defines.

    Args:
        model: Path, serialized model or `ModelProto`; external data is not read. Not changed.
        target: Whose document: a name, or a `kenosis_ort.targets.Target`.

    Returns:
        One entry per Conv, in the model's order, those of ``If``, ``Loop`` and ``Scan`` bodies included.

    Raises:
        ModelLoadError: The file is missing or is not an ONNX model.
        OptionError: There is no document of that target.
    """
    asked = get_target(target)
    if asked.hooks.conform is None:
        raise OptionError(
            f"target '{asked.name}' has no documented patterns",
            where="target",
            fix=f"one of {sorted(name for name, known in TARGETS.items() if known.hooks.conform is not None)}",
        )
    source = read_source(model)
    return asked.hooks.conform(source.proto, source.folder, asked.name)


_BUDGET: Final = 256 * 2**20  # bytes of intermediate values that a run may hold
_UNKNOWN_ELEMENTS: Final = 1 << 16  # of a value whose shape is not known


@dataclass(frozen=True)
class LayerComparison:
    """One intermediate value of two models.

    Attributes:
        value: Its name in the float model.
        node: Name of the node that computes it, empty for a graph input.
        sqnr_db: Signal power over noise power in dB over all samples; inf if equal. The noise is that of the node
            and of all before it.
    """

    value: str
    node: str
    sqnr_db: float


def compare_layers(
    float_model: onnx.ModelProto,
    quantized: onnx.ModelProto,
    feeds: Sequence[Mapping[str, Any]],
    *,
    custom_op_libraries: Sequence[str] = (),
    threads: int = 1,
    budget: int = _BUDGET,
) -> tuple[LayerComparison, ...]:
    """Compares the values that exist in both models.

    Compared are quantized values, as their DQ gives them, and what float nodes compute. What lies inside a fused
    integer kernel (the value between a Conv and its Relu) exists nowhere and is left out.

    Args:
        float_model: The model that was quantized; not changed.
        quantized: What became of it; not changed.
        feeds: A few samples; all models run once a sample and part.
        custom_op_libraries: Libraries with custom operators to register.
        threads: Threads of the sessions.
        budget: Bytes of intermediate values that a run may hold; where they take more, the models are run in parts.

    Returns:
        One entry per value, in the float model's order.

    Raises:
        VerificationError: The runtime does not load a model.
    """
    if not feeds:
        return ()
    pairs = _comparable(float_model, quantized)
    makers = {name: node.name for node in float_model.graph.node for name in node.output if name}
    found: list[LayerComparison] = []
    for part in _parts(pairs, float_model, feeds[0], budget):
        sessions = [
            open_session(model, custom_op_libraries=custom_op_libraries, threads=threads, further=names)
            for model, names in ((float_model, part.keys()), (quantized, part.values()))
        ]
        totals = {name: _Total() for name in part}
        for feed in feeds:
            ours = [{k: v for k, v in feed.items() if k in s.inputs} for s in sessions]
            reference = sessions[0].run(list(part.keys()), ours[0])
            actual = sessions[1].run(list(part.values()), ours[1])
            for name, a, b in zip(part, reference, actual, strict=True):
                totals[name].add(as_array(a), as_array(b))
        found += [
            LayerComparison(name, makers.get(name, ""), total.sqnr_db) for name, total in totals.items() if total.fits
        ]
    return tuple(found)


class _Total:
    """Signal and noise power of one value, summed over samples."""

    def __init__(self) -> None:
        self._signal = self._noise = 0.0
        self.fits = True

    def add(self, reference: Any, actual: Any) -> None:
        if reference.shape != actual.shape or reference.dtype.kind != "f":
            self.fits = False
            return
        x, y = reference.astype(np.float64).ravel(), actual.astype(np.float64).ravel()
        if not np.array_equal(np.isfinite(x), np.isfinite(y)):
            self._noise = math.inf
            return
        finite = np.isfinite(x)
        x, y = x[finite], y[finite]
        self._signal += float(x @ x)
        self._noise += float((x - y) @ (x - y))

    @property
    def sqnr_db(self) -> float:
        if self._noise == 0:
            return math.inf
        return 10 * math.log10(self._signal / self._noise) if self._signal > 0 else -math.inf


def _comparable(float_model: onnx.ModelProto, quantized: onnx.ModelProto) -> dict[str, str]:
    """Name in the quantized model of each value of the float model, in the float model's order."""
    producers = {name: node for node in quantized.graph.node for name in node.output if name}
    constants = {tensor.name for tensor in float_model.graph.initializer}
    restored = _restored(quantized)
    outputs = {value.name for value in quantized.graph.output}
    types = value_types(float_model)
    pairs = {}
    for name in _values(float_model):
        if name in constants or name not in types or types[name].tensor_type.elem_type != onnx.TensorProto.FLOAT:
            continue
        if name in restored:
            pairs[name] = restored[name]
        elif name in producers and (name in outputs or not _reads_integers(producers[name], producers)):
            pairs[name] = name
    return pairs


def _values(model: onnx.ModelProto) -> Iterator[str]:
    yield from (value.name for value in model.graph.input)
    for node in model.graph.node:
        yield from (name for name in node.output if name)


def _restored(quantized: onnx.ModelProto) -> dict[str, str]:
    """Value behind the DQ by value in front of the Q."""
    integers = {node.output[0]: node.input[0] for node in quantized.graph.node if node.op_type == Q}
    found: dict[str, str] = {}
    for node in quantized.graph.node:
        if node.op_type == DQ and node.input[0] in integers:
            found.setdefault(integers[node.input[0]], node.output[0])
    return found


def _reads_integers(node: onnx.NodeProto, producers: Mapping[str, onnx.NodeProto]) -> bool:
    """Whether a node is, or may be merged into, an integer kernel: its value must not be looked at."""
    if node.op_type in QDQ_OPS:
        return node.op_type == Q
    makers = (producers.get(name) for name in node.input)
    return any(maker is not None and maker.op_type == DQ for maker in makers)


def _parts(
    pairs: Mapping[str, str], model: onnx.ModelProto, feed: Mapping[str, Any], budget: int
) -> Iterator[dict[str, str]]:
    """Yields the pairs in parts that take about ``budget`` bytes each."""
    types = value_types(model)
    batch = _batch(feed)
    part: dict[str, str] = {}
    size = 0
    for name, other in pairs.items():
        own = 4 * _elements(types[name], batch)
        if part and size + own > budget:
            yield part
            part, size = {}, 0
        part[name] = other
        size += own
    if part:
        yield part


def _batch(feed: Mapping[str, Any]) -> int:
    shapes = [np.shape(array) for array in feed.values()]
    return max((shape[0] for shape in shapes if shape), default=1)


def _elements(type_: onnx.TypeProto, batch: int) -> int:
    """Approximate number of elements of a value; a first dimension that is not known counts as the batch."""
    tensor = type_.tensor_type
    if not tensor.HasField("shape"):
        return _UNKNOWN_ELEMENTS
    sizes = [d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim]
    if None in sizes[1:]:
        return _UNKNOWN_ELEMENTS * batch
    return math.prod(batch if size is None else size for size in sizes)
