"""Evidence of a report beyond the decisions: the graph, ranges, histograms, signal per layer, time per operator.

Pure data, kept small: some hundred bytes a node. `collect` gathers what the models and the calibration table hold.

What runs each layer and how long: kernel, path inside it, time by the host profile and, on request, as measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

from kenosis_ort.storage.data import Data
from kenosis_ort.targets.proof import FusionReport

_RUNNING = ("integer", "float")


@dataclass(frozen=True)
class LayerTime:
    """One layer of the delivered model.

    Attributes:
        node: Its name; empty for all that is between layers: Q, DQ, changes of layout.
        op_type: Its operator.
        kernel: What runs it, e.g. ``com.microsoft.QLinearConv``; empty where the runtime was not asked.
        path: Which way inside the kernel the stored weights select; empty where there is one only.
        estimated_us: Microseconds by the profile of the machine that the file is laid out for; None where not known.
        measured_us: Microseconds by the runtime's profiler, here; None where nothing was measured.
    """

    node: str
    op_type: str
    kernel: str = ""
    path: str = ""
    estimated_us: float | None = None
    measured_us: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `LayerTime(**data)` reads it."""
        return asdict(self)


def layer_times(
    fusion: FusionReport | None,
    estimated: Mapping[str, tuple[str, float]],
    between_us: float | None,
    times: OpTimes | None,
) -> tuple[LayerTime, ...]:
    """The layers that have a kernel of their own, in the model's order, and what is between them.

    Args:
        fusion: What the runtime made of the model; None where it was not asked.
        estimated: Operator and microseconds by node; empty without an estimate.
        between_us: Estimated microseconds of what is between layers; None without an estimate.
        times: Measured times; None where nothing was measured.
    """
    running = [] if fusion is None else [k for k in fusion.kernels if k.status in _RUNNING]
    layers = [LayerTime(k.node, k.op_type, k.kernel, k.path) for k in running]
    layers = layers or [LayerTime(name, op_type) for name, (op_type, us) in estimated.items() if us]
    names = {layer.node for layer in layers}
    measured: dict[str, float] = {}
    for kernel in () if times is None else times.after:
        name = kernel.node if kernel.node in names else ""
        measured[name] = measured.get(name, 0.0) + 1e3 * kernel.milliseconds
    found = [
        LayerTime(x.node, x.op_type, x.kernel, x.path, _us(estimated, x.node), measured.get(x.node)) for x in layers
    ]
    rest = measured.get("")
    return (*found, LayerTime("", "between layers", "", "", between_us, rest)) if between_us or rest else tuple(found)


def _us(estimated: Mapping[str, tuple[str, float]], node: str) -> float | None:
    return estimated[node][1] if node in estimated else None


def kernels_in_words(layers: Iterable[LayerTime]) -> str:
    """Number of Convs by path, and the time of a run by estimate and as measured; empty without."""
    layers = tuple(layers)
    paths = Counter(layer.path for layer in layers if layer.path)
    parts = [f"{count} on the {path} kernel" for path, count in paths.most_common()]
    for how, times in (
        ("estimated", [x.estimated_us for x in layers]),
        ("measured", [x.measured_us for x in layers]),
    ):
        known = [us for us in times if us is not None]
        parts += [f"{how} {sum(known):,.0f} us a run"] if known else []
    return f"{'Convs: ' if paths else ''}{', '.join(parts)}"


TensorKind = Literal["activation", "weight"]


@dataclass(frozen=True)
class SketchNode:
    """One node of the float model that was quantized.

    Attributes:
        name: Of the node, as in the plan.
        op_type: Operator type, with its domain unless that is the default one.
        inputs: Names of the values it reads that are computed or fed, without constants.
        outputs: Names of the values it writes.
        shape: Shape of the first output as text, e.g. ``1x64x56x56``; empty where it is not known.
        weight: Shape of its weights as text; empty without weights.
    """

    name: str
    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    shape: str = ""
    weight: str = ""


@dataclass(frozen=True)
class GraphSketch:
    """The main graph of the float model that was quantized, without its constants.

    Attributes:
        nodes: In topological order.
        inputs: Names of the graph inputs.
        outputs: Names of the graph outputs.
    """

    nodes: tuple[SketchNode, ...]
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bars:
    """A small histogram: ``counts`` in bins of equal width from ``low`` to ``high``."""

    low: float
    high: float
    counts: tuple[int, ...]


@dataclass(frozen=True)
class TensorProfile:
    """Values of one tensor, and the range that was chosen for it.

    Attributes:
        name: Of the value in the float model.
        kind: ``activation`` or ``weight``.
        low: Smallest value seen.
        high: Largest value seen.
        chosen: The range that the quantized model represents; for weights what their integers span, by channel the
            widest channel's; None where it is not quantized.
        scales: Number of scales: 1, or the number of channels.
        bits: Bits of the integers that are used; 0 where it is not quantized.
        sqnr_db: For weights signal power over rounding noise power in dB; None where it is not known.
        bars: Histogram; None where the calibration kept none.
        pairs_fit: Of weights: all 8 bits are used, and no two neighbouring products clip in int16.
    """

    name: str
    kind: TensorKind
    low: float
    high: float
    chosen: tuple[float, float] | None = None
    scales: int = 1
    bits: int = 0
    sqnr_db: float | None = None
    bars: Bars | None = None
    pairs_fit: bool = False

    @property
    def precision(self) -> str:
        """Bits in words, empty where it is not quantized."""
        if self.pairs_fit:
            return f"{self.bits} bits, pairs within int16"
        return f"{self.bits} bit" if self.bits else ""


@dataclass(frozen=True)
class LayerSignal:
    """Signal of one intermediate value of the quantized model against the float model's.

    Attributes:
        value: Name of the value in the float model.
        node: Name of the node that computes it; empty for a graph input.
        sqnr_db: Signal power over noise power in dB, with all the noise that layers before it made.
    """

    value: str
    node: str
    sqnr_db: float


@dataclass(frozen=True)
class OpTime:
    """Time of one kernel.

    Attributes:
        node: Name of the source node; the runtime's own name for a kernel without one.
        op_type: Operator type of the source node; the kernel's for a kernel without one.
        kernel: What ran, e.g. ``QLinearConv``.
        milliseconds: Median over the runs.
    """

    node: str
    op_type: str
    kernel: str
    milliseconds: float


@dataclass(frozen=True)
class OpTimes:
    """Times by operator of the float and of the quantized model.

    Attributes:
        before: Of the float model.
        after: Of the quantized model.
        threads: Threads of the sessions; 0 for the runtime's own choice.
        runs: Runs that the medians are over.
    """

    before: tuple[OpTime, ...]
    after: tuple[OpTime, ...]
    threads: int = 1
    runs: int = 0


@dataclass(frozen=True)
class ReportEvidence(Data):
    """Everything that was gathered; any part may be missing.

    Attributes:
        graph: The graph that was quantized.
        tensors: Ranges and histograms of activations and weights.
        layers: Signal-to-noise ratio by intermediate value, in the order they are computed.
        times: Time by operator.
    """

    graph: GraphSketch | None = None
    tensors: tuple[TensorProfile, ...] = ()
    layers: tuple[LayerSignal, ...] = ()
    times: OpTimes | None = None

    def __bool__(self) -> bool:
        return bool(self.graph or self.tensors or self.layers or self.times)

    @cached_property
    def signal_by_node(self) -> Mapping[str, float]:
        """Lowest signal-to-noise ratio of what a node computes, by node name."""
        found: dict[str, float] = {}
        for layer in self.layers:
            found[layer.node] = min(layer.sqnr_db, found.get(layer.node, float("inf")))
        return found
