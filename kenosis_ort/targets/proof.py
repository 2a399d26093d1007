"""Reports on a quantized model: the kernel that executes each node, and how each Conv conforms to a document.

Pure data. Renderers only format it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from kenosis_ort.errors import VerificationError, printable
from kenosis_ort.graph.constants import Is, having
from kenosis_ort.plan import Kind, PlacementPlan
from kenosis_ort.storage.data import to_data

if TYPE_CHECKING:
    from kenosis_ort.graph.qdq import SourceNode

SCHEMA_VERSION: Final = 1
_SHOWN: Final = 10  # nodes listed by name in the short text
# A model may hold a Conv or Gemm as the runtime's own float operator, which keeps it float for sure.
HEAVY_OPS: Final = having(Is.HEAVY)


class Status(str, Enum):
    """Status of a source node in the runtime's optimized graph."""

    INTEGER = "integer"  # its own kernel, on quantized data
    FLOAT = "float"  # its own kernel, on float data
    ABSORBED = "absorbed"  # part of another node's kernel
    REMOVED = "removed"  # computed once at load, a no-op, or merged with layout operations
    OTHER = "other"  # computes no float tensor: shapes, indices, booleans, control flow


class Cause(str, Enum):
    """Why a node runs in float."""

    NONE = ""
    PROTECTED = "protected"
    UNSUPPORTED_OP = "unsupported-op"
    UNSUPPORTED_ATTRIBUTE = "unsupported-attribute"
    OPSET = "opset"
    FLOAT_INPUT = "no-q-on-input"
    FLOAT_OUTPUT = "no-q-on-output"
    SECOND_CONSUMER = "second-consumer"
    GRAPH_OUTPUT = "graph-output"
    ACTIVATION = "non-absorbable-activation"
    SIXTEEN_BIT = "16-bit"
    TYPE_MISMATCH = "type-mismatch"
    SIGNED_BRANCH = "signed-branch"
    SCALE_MISMATCH = "scale-mismatch"
    BIAS_SCALE = "bias-scale"
    BIAS_TYPE = "bias-not-int32"
    FLOAT_WEIGHT = "float-weight"
    WEIGHT_TYPE = "weight-type"
    UNKNOWN = "unknown"


Why = tuple[str, Cause]
"""A reason, one sentence, and its class."""
UNEXPLAINED: Final[Why] = "", Cause.NONE


@dataclass(frozen=True)
class KernelReport:
    """One source node.

    Attributes:
        node: Name of the source node, or ``<OpType value>`` after its first output where it has none.
        op_type: Operator type in the model.
        kernel: Kernel that executes it, with its domain, e.g. ``com.microsoft.QLinearConv``; empty where
            nothing is executed.
        integer: The kernel works on quantized data.
        absorbed: Names of the nodes that this node's kernel executes as well.
        absorbed_into: Name of the node whose kernel executes this one, None for a kernel of its own.
        reason: For a float node why it is float, else what happened to it; one sentence.
        status: What became of the node.
        cause: For a float node the class of the reason.
        graph: Empty for the main graph, else the path of the ``If``/``Loop`` body that holds the node.
        silently_quantized: The model holds float weights, and the runtime quantized them at load.
        weights_per_run: The weights are dequantized again on every run.
        path: Which way inside the kernel the stored weights select, where there are several; empty elsewhere.
        clipping: Output channels of which pairs of products clip for some activations on x86-64 processors that add
            them in 16 bits, see `ProcessorClass`.
    """

    node: str
    op_type: str
    kernel: str
    integer: bool
    absorbed: tuple[str, ...] = ()
    absorbed_into: str | None = None
    reason: str = ""
    status: Status = Status.FLOAT
    cause: Cause = Cause.NONE
    graph: str = ""
    silently_quantized: bool = False
    weights_per_run: bool = False
    path: str = ""
    clipping: int = 0

    @classmethod
    def of(cls, node: SourceNode, kernel: str, status: Status, why: Why = UNEXPLAINED, **more: Any) -> KernelReport:
        """The report of a node of an indexed model; where ``integer`` is not among ``more``, the status says it."""
        more = {"integer": status is Status.INTEGER, "reason": why[0], "cause": why[1], **more}
        return cls(node.label, node.op_type, kernel, status=status, graph=node.graph, **more)


def refuse_libraries(libraries: Sequence[str], runtime: str) -> None:
    """Raises where a model needs libraries of operators made for onnxruntime, which another runtime does not load.

    Raises:
        VerificationError: It does.
    """
    if libraries:
        raise VerificationError(
            f"{runtime} does not load libraries of operators made for onnxruntime", fix="leave custom_op_libraries out"
        )


def why_planned_float(node: SourceNode, plan: PlacementPlan | None) -> Why | None:
    """The plan's reason to keep a node in float; None where it does not, or there is no plan."""
    decision = None if plan is None else plan.by_node.get(node.label)
    if decision is None or decision.kind is not Kind.FLOAT:
        return None
    return f"kept in float by {decision.rule}: {decision.reason}", Cause.PROTECTED


@dataclass(frozen=True)
class ProcessorClass:
    """Results of a file on x86-64 processors of one class.

    Attributes:
        name: The class.
        adds_in: Bits in which kernels add two products of uint8 and int8.
        exact: No product clips there, so that the integers are those of every other class.
    """

    name: str
    adds_in: int
    exact: bool


@dataclass(frozen=True)
class ClippingLoss:
    """Loss of one output by clipped products, on x86-64 processors without VNNI.

    Attributes:
        output: Name of the output.
        sqnr_db: Of what is computed there against exact sums; infinity for the same bits.
        agreement: Share of equal largest elements along the last axis; None for outputs of one element.
    """

    output: str
    sqnr_db: float
    agreement: float | None

    def __str__(self) -> str:
        if self.sqnr_db == math.inf:
            return f"output '{self.output}' without VNNI: the same on these samples"
        same = "" if self.agreement is None else f", {self.agreement:.1%} of the largest elements the same"
        return f"output '{self.output}' without VNNI: {self.sqnr_db:.1f} dB of exact sums{same}"


_ADDS_IN: Final = {"SSE 4.2": 32, "AVX2": 16, "AVX-512": 16, "VNNI": 32, "AMX": 32}


@dataclass(frozen=True)
class FusionReport:
    """Kernels of the runtime for one model.

    Attributes:
        kernels: One entry per source compute node (all but Q, DQ and Constant), in the model's order.
        runtime_version: Version of the runtime that was asked.
        overhead: Kernels without a source node, by type: layout changes, Q, DQ, counted.
        pieces: Into how many pieces the model was cut to ask about it; 1 for a model loaded as it is.
        runtime: The runtime that was asked.
    """

    kernels: tuple[KernelReport, ...]
    runtime_version: str
    overhead: Mapping[str, int] = field(default_factory=dict)
    pieces: int = 1
    runtime: str = "onnxruntime"

    @cached_property
    def by_node(self) -> dict[str, KernelReport]:
        """Main-graph nodes by name; nodes of bodies by ``<body path>/<name>``."""
        return {(f"{k.graph}/{k.node}" if k.graph else k.node): k for k in self.kernels}

    def counts(self) -> dict[str, int]:
        """Number of nodes by status."""
        found = Counter(k.status.value for k in self.kernels)
        return {status.value: found.get(status.value, 0) for status in Status}

    def kernel_counts(self) -> dict[str, int]:
        """Number of kernels by type that execute source nodes, most frequent first."""
        return dict(Counter(k.kernel for k in self.kernels if k.kernel and k.absorbed_into is None).most_common())

    def heavy(self) -> tuple[KernelReport, ...]:
        """The nodes that carry the arithmetic, Conv, Gemm and MatMul, unless computed at load."""
        return tuple(k for k in self.kernels if k.op_type in HEAVY_OPS and k.status is not Status.REMOVED)

    def integer_share(self) -> float:
        """The share of Conv, Gemm and MatMul that run on integer kernels, 0..1; 1.0 if there are none."""
        heavy = self.heavy()
        return sum(k.integer for k in heavy) / len(heavy) if heavy else 1.0

    def float_nodes(self) -> tuple[KernelReport, ...]:
        """The nodes that run on a float kernel of their own."""
        return tuple(k for k in self.kernels if k.status is Status.FLOAT)

    def clipping(self) -> tuple[KernelReport, ...]:
        """Nodes that compute other integers on x86-64 processors without VNNI."""
        return tuple(k for k in self.kernels if k.clipping)

    @property
    def processors(self) -> tuple[ProcessorClass, ...]:
        """Results of the file on each class of x86-64 processors; empty for other runtimes."""
        if self.runtime != FusionReport.runtime:
            return ()
        exact = not self.clipping()
        return tuple(ProcessorClass(name, bits, exact or bits > 16) for name, bits in _ADDS_IN.items())

    def silently_quantized(self) -> tuple[KernelReport, ...]:
        """The nodes whose float weights the runtime quantizes behind the model's back."""
        return tuple(k for k in self.kernels if k.silently_quantized)

    def avoidable(self, plan: PlacementPlan) -> tuple[KernelReport, ...]:
        """The nodes that the plan calls integer and that run in float (empty is the goal)."""
        planned, running = set(plan.integer_nodes()), (Status.FLOAT, Status.ABSORBED)
        return tuple(k for k in self.kernels if k.node in planned and not k.integer and k.status in running)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"schema": SCHEMA_VERSION, **to_data(self)}

    def __str__(self) -> str:
        heavy = self.heavy()
        share = f"{sum(k.integer for k in heavy)} of {len(heavy)} Conv/Gemm/MatMul on integer kernels"
        counts = ", ".join(f"{n} {status}" for status, n in self.counts().items())
        lines = [f"{self.runtime} {self.runtime_version}: {share}; nodes: {counts}"]
        shown = [k for k in self.float_nodes() if k.op_type in HEAVY_OPS]
        lines += [f"  float {k.op_type} '{k.node}': {k.reason}" for k in shown[:_SHOWN]]
        if len(shown) > _SHOWN:
            lines.append(f"  and {len(shown) - _SHOWN} more")
        silent = self.silently_quantized()
        if silent:
            names = ", ".join(f"'{k.node}'" for k in silent[:_SHOWN])
            lines.append(f"  float in the file, quantized by the runtime at load: {len(silent)}, e.g. {names}")
        return printable("\n".join(lines))


class Clause(str, Enum):
    """The clauses of oneDNN's text on quantized Convolutions."""

    CONVOLUTION = "convolution"  # a Convolution with conversions around it, each a node
    SRC_CONVERSION = "src-conversion"  # Q2F: Dequantize, perhaps with TypeCast
    SRC_TYPE = "src-type"
    WEIGHTS_CONVERSION = "weights-conversion"  # Q2F: the same, perhaps with Quantize of float weights before it
    WEIGHTS_TYPE = "weights-type"
    BIAS_CONVERSION = "bias-conversion"  # F2F: nothing, or TypeCast
    BIAS_TYPE = "bias-type"
    EPILOGUE = "epilogue"  # BiasAdd first and once, then 0 to 4 binary or unary operations
    DST_CONVERSION = "dst-conversion"  # F2F or F2Q: TypeCast, Quantize
    DST_TYPE = "dst-type"


@dataclass(frozen=True)
class BrokenClause:
    """A clause that a Conv breaks, and by what, in one sentence."""

    clause: Clause
    why: str


@dataclass(frozen=True)
class ConvPattern:
    """One Conv, as the document sees it.

    Attributes:
        node: Name of the Conv, or ``<Conv value>`` after its output where it has none.
        graph: Empty for the main graph, else the path of the ``If``/``Loop`` body that holds it.
        src: Data type of the source as it enters the pattern, ``u8`` for one.
        weights: The same of the weights.
        bias: The same of the bias; empty without one.
        epilogue: The document's names of the operations that belong to the pattern, in order.
        dst: Data type of what the pattern writes.
        ends: Why the epilogue ends before a conversion; empty where one ends it, or the graph does.
        broken: The clauses that it breaks.
    """

    node: str
    graph: str
    src: str = ""
    weights: str = ""
    bias: str = ""
    epilogue: tuple[str, ...] = ()
    dst: str = ""
    ends: str = ""
    broken: tuple[BrokenClause, ...] = ()

    @property
    def matches(self) -> bool:
        """Whether the Conv is an instance of the pattern."""
        return not self.broken

    @property
    def pattern(self) -> str:
        """The instance in one line: ``u8 * s8 + f32 -> Sigmoid, Multiply -> u8``."""
        bias = f" + {self.bias}" if self.bias else ""
        epilogue = f"{', '.join(self.epilogue)} -> " if self.epilogue else ""
        return f"{self.src} * {self.weights}{bias} -> {epilogue}{self.dst}"

    def __str__(self) -> str:
        where = f"{self.graph}/{self.node}" if self.graph else self.node
        found = f"Conv '{where}': {self.pattern}" if self.src else f"Conv '{where}'"
        broken = "; ".join(f"{b.clause.value}: {b.why}" for b in self.broken)
        return printable(f"{found}{f' ({self.ends})' if self.ends else ''}{f' breaks {broken}' if broken else ''}")


@dataclass(frozen=True)
class PatternReport:
    """All Convs of a model against a document.

    Attributes:
        target: Whose document.
        document: Its title.
        convs: One entry per Conv, in the model's order.
    """

    target: str
    document: str
    convs: tuple[ConvPattern, ...]

    @property
    def conforms(self) -> bool:
        """Whether every Conv is an instance of the pattern."""
        return all(c.matches for c in self.convs)

    def verdict(self) -> str:
        """The result in one sentence."""
        matching = sum(c.matches for c in self.convs)
        found = Counter(b.clause.value for c in self.convs for b in c.broken)
        broken = f"; broken: {', '.join(f'{name} {n}x' for name, n in found.most_common())}" if found else ""
        return f"{matching} of {len(self.convs)} Convs match '{self.document}'{broken}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        data = to_data(self)
        convs = [{**each, "matches": conv.matches} for each, conv in zip(data["convs"], self.convs, strict=True)]
        return {"schema": SCHEMA_VERSION, **data, "verdict": self.verdict(), "convs": convs}

    def __str__(self) -> str:
        return "\n".join([self.verdict(), *(f"  {c}" for c in self.convs)])
