"""Evidence of a report beyond the decisions: the graph, ranges, histograms, signal per layer, time per operator.

Pure data, kept small: some hundred bytes a node. `collect` gathers what the models and the calibration table hold.

What runs each layer and how long: kernel, path inside it, time by the host profile and, on request, as measured.

Why a node is integer or float, and what would change it: one table of remedies by rule and by cause.

What the report says of the fusion proof.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

from kenosis_ort.errors import printable
from kenosis_ort.graph.constants import HEAVY, Is, having
from kenosis_ort.plan import Kind, PlacementPlan

if TYPE_CHECKING:
    from kenosis_ort.targets.proof import ClippingLoss, FusionReport, KernelReport

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
    known = [op if op.node in names else replace(op, node="") for op in (() if times is None else times.after)]
    measured = {node: 1e3 * milliseconds for node, milliseconds in by_key(known, "node").items()}
    found = [
        replace(x, estimated_us=estimated.get(x.node, ("", None))[1], measured_us=measured.get(x.node)) for x in layers
    ]
    rest = measured.get("")
    return (*found, LayerTime("", "between layers", "", "", between_us, rest)) if between_us or rest else tuple(found)


def kernels_in_words(layers: Iterable[LayerTime]) -> str:
    """Number of Convs by path, and the time of a run by estimate and as measured; empty without."""
    layers = tuple(layers)
    paths = Counter(layer.path for layer in layers if layer.path)
    parts = [f"{count} on the {path} kernel" for path, count in paths.most_common()]
    for how, times in (("estimated", [x.estimated_us for x in layers]), ("measured", [x.measured_us for x in layers])):
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


def by_key(times: Iterable[OpTime], key: Literal["node", "op_type"]) -> dict[str, float]:
    """Milliseconds by node or by operator; 0 of others."""
    found: defaultdict[str, float] = defaultdict(float)
    for entry in times:
        found[getattr(entry, key)] += entry.milliseconds
    return found


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
class ReportEvidence:
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


_NAMED = 3
_IN_BLOCKS: Final = frozenset({"MatMulNBits", "GatherBlockQuantized"})


def fusion_verdict(fusion: FusionReport, plan: PlacementPlan | None = None) -> str:
    """The outcome of a fusion proof in one sentence, compared with the plan if there is one."""
    heavy = fusion.heavy()
    blocks = sum(k.op_type in _IN_BLOCKS for k in fusion.kernels)
    weights = f"{blocks} layers and embeddings have weights in blocks, with float data" if blocks else ""
    recurrent = Counter(k.op_type for k in fusion.kernels if k.op_type in having(Is.RECURRENT) and not k.integer)
    floats = "".join(f"; {count} {op_type} in float" for op_type, count in sorted(recurrent.items()))
    if not heavy:
        return f"{weights or 'There is no Conv, Gemm or MatMul to run'}{floats}."
    integer = sum(k.integer for k in heavy)
    text = f"{integer} of {len(heavy)} Conv/Gemm/MatMul run on integer kernels{floats}"
    text += f"; {weights}" if weights else ""
    broken = 0 if plan is None else len(fusion.avoidable(plan))
    if broken:
        return f"{text}; {broken} planned as integer run in float, see the table."
    if plan and integer < len(heavy):
        return f"{text}; the others stay float as planned."
    return f"{text}."


def processors_line(fusion: FusionReport, losses: Sequence[ClippingLoss] = ()) -> str:
    """Note on the file's results on other x86-64 processors, in one sentence; "" where nothing runs on integers."""
    if not fusion.processors or not any(k.integer for k in fusion.kernels):
        return ""
    clipping = fusion.clipping()
    if not clipping:
        return f"the same integers on every processor: {', '.join(p.name for p in fusion.processors)}"
    named = ", ".join(f"'{k.node}' ({k.clipping})" for k in clipping[:_NAMED])
    more = f" and {len(clipping) - _NAMED} more" if len(clipping) > _NAMED else ""
    others = ", ".join(p.name for p in fusion.processors if not p.exact)
    what = f"products of 8-bit weights clip on {others}: layers (channels) {named}{more}"
    return "; ".join([what, *map(str, losses)])


# What the caller can do about a float node, by the plan's rule. A rule that is not here has no remedy but another net.
_BY_RULE: Final[Mapping[str, str]] = {
    "caller-excluded": "take the node out of nodes_to_exclude",
    "caller-op-types": "add its operator to op_types_to_quantize, or leave that option out",
    "output-protection": "protect_outputs='int8' quantizes it; compare accuracy before and after",
    "protected-input": "if this input carries the data proper, name it in primary_inputs",
    "float-prefix": "nodes_to_quantize quantizes it all the same, placed as stock does; compare accuracy and speed",
    "verified-float": "see the reason: the runtime refused the integer kernel",
    "matmul-activations": "attention products stay float on purpose: in int8 they gain 1 % and lose accuracy",
    "not-float32": "convert the model to float32 first; integer kernels read float32 tensors",
    "reduce-mean-float": "write the mean over height and width as GlobalAveragePool",
    "bn-unfolded-float": "place the BatchNormalization right behind a Conv without other readers, so that it folds",
    "conv-transpose-float": "the runtime has no integer ConvTranspose; Resize and Conv would run in integer",
}
# The same for a node that misses what its rule asks for, by words of the reason.
_BY_REASON: Final[Mapping[str, str]] = {
    "needs opset": "export the model with that operator set or a later one",
    "is not a constant": "keep the value in the model as an initializer",
    "not float32": "convert the model to float32 first; integer kernels read float32 tensors",
    "is not a vector of one value a channel": "give the bias one value a channel",
    "alpha is not 1": "multiply alpha into the weight",
    "operand is transposed": "transpose the operand where it is made",
    "interpolation runs in float": "mode='nearest' runs in integer; compare accuracy before and after",
    "one scale would blur": "multiply the constant into the weights of a neighbouring Conv, Gemm or MatMul",
    "8 bits would blur": "multiply the constant into the weights of a neighbouring Conv, Gemm or MatMul",
}
# The same, by why the runtime runs a node of a finished model in float.
_BY_CAUSE: Final[Mapping[str, str]] = {
    "no-q-on-input": "quantize the float model anew: something before the node stayed float",
    "no-q-on-output": "quantize the float model anew: Q is missing behind the node",
    "second-consumer": "quantize the float model with kenosis_ort: the Q has to sit on the branching value",
    "graph-output": "protect_outputs='int8'",
    "non-absorbable-activation": "quantize the float model with kenosis_ort: this activation needs Q on both sides",
    "16-bit": "use 8-bit activations: no 16-bit type has integer kernels in this runtime",
    "type-mismatch": "give all of its inputs the same 8-bit type",
    "signed-branch": "activation_type=QuantType.QUInt8, or leave it out on x86-64",
    "scale-mismatch": "quantize the float model with kenosis_ort: both sides have to share scale and zero point",
    "bias-scale": "quantize the float model with kenosis_ort: the bias has to be at input_scale * weight_scale",
    "bias-not-int32": "quantize the float model with kenosis_ort: the bias has to be int32",
    "float-weight": "its weights are float: quantize the float model anew",
    "weight-type": "weight_type=QuantType.QInt8",
    "opset": "raise the operator set of the model",
}


@dataclass(frozen=True)
class Explanation:
    """One node explained.

    Attributes:
        node: Its name.
        op_type: Its operator.
        kind: ``integer``, ``float``, ``absorbed``, ``pass-through``, or what else the runtime made of it.
        rule: The rule or cause.
        reason: One sentence.
        remedy: What would change it; empty where there is nothing to change or no way.
        inputs: One line per input edge, for a planned node.
    """

    node: str
    op_type: str
    kind: str
    rule: str
    reason: str
    remedy: str = ""
    inputs: tuple[str, ...] = ()

    @property
    def is_heavy(self) -> bool:
        """Whether the node carries arithmetic worth an integer kernel."""
        return self.op_type in HEAVY or self.op_type == "ConvTranspose"

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.op_type} '{self.node}': {self.kind}" + (f", by {self.rule}" if self.rule else "")]
        lines += [f"  {self.reason}"] if self.reason else []
        lines += [f"  what would change it: {self.remedy}"] if self.remedy else []
        return printable("\n".join([*lines, *(f"  {line}" for line in self.inputs)]))


def explain_plan(plan: PlacementPlan) -> list[Explanation]:
    """An explanation of every planned node."""
    inputs: dict[str, list[str]] = {}
    for d in plan.decisions:
        inputs.setdefault(d.edge.consumer, []).append(d.sentence)
    return [
        Explanation(
            n.node,
            n.op_type,
            n.kind.value,
            n.rule,
            n.reason,
            _remedy(n.rule, n.reason) if n.kind is Kind.FLOAT else "",
            tuple(inputs.get(n.node, ())),
        )
        for n in plan.nodes
    ]


def _remedy(rule: str, reason: str) -> str:
    by_reason = (remedy for words, remedy in _BY_REASON.items() if words in reason)
    return _BY_RULE.get(rule) or next(by_reason, "")


def explain_kernel(kernel: KernelReport) -> Explanation:
    """Explanation of the kernel that the runtime chose for a node."""
    status, cause = kernel.status.value, kernel.cause.value
    if status == "float":
        return Explanation(kernel.node, kernel.op_type, status, cause, kernel.reason, _BY_CAUSE.get(cause, ""))
    executed = f"runs as {kernel.kernel}" + (f" with {', '.join(kernel.absorbed)}" if kernel.absorbed else "")
    return Explanation(kernel.node, kernel.op_type, status, "", executed if kernel.kernel else kernel.reason)
