"""The placement plan: what is quantized, how, and why, decided before the graph is touched.

A plan holds one `Decision` per edge ``(value, consumer, input index)`` and one `NodeDecision` per compute node. It is
pure data, which goes to JSON, and what ``explain`` prints. `PlacementOptions` are the wishes that it follows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

from onnx import TensorProto

from kenosis_ort.errors import OptionError, did_you_mean, printable
from kenosis_ort.storage.data import to_data

SCHEMA_VERSION = 1


class How(str, Enum):
    """Way in which a consumer reads a value."""

    OWN = "own"  # through Q/DQ with parameters of the value's own range
    SHARED = "shared"  # through Q/DQ with the parameters of another value
    DERIVED = "derived"  # int32 bias: scale = input_scale * weight_scale, zero point 0
    DEQUANTIZED = "dequantized"  # a float consumer that reads the DQ output of a quantized value
    FLOAT = "float"  # the value as it is


class EdgeRole(str, Enum):
    """Role of the value at its consumer."""

    ACTIVATION = "activation"
    WEIGHT = "weight"
    BIAS = "bias"
    OUTPUT = "output"  # the consumer is the graph's output list


class Kind(str, Enum):
    """Kind of a node in the runtime's optimized graph, as planned."""

    INTEGER = "integer"  # an integer kernel
    PASS_THROUGH = "pass-through"  # moves quantized bytes, same scale in and out
    ABSORBED = "absorbed"  # gone: merged into the producer's requantization
    FLOAT = "float"


@dataclass(frozen=True, order=True)
class Edge:
    """``consumer`` is a node name, an empty string the graph's outputs; ``index`` -1 is a read inside a body."""

    value: str
    consumer: str
    index: int


@dataclass(frozen=True)
class Decision:
    """Decision about one edge.

    Attributes:
        edge: The edge.
        role: What the value is to the consumer.
        how: How the consumer reads it.
        rule: Identifier of the rule that decided.
        reason: Why, in one sentence.
        provider: The value whose parameters are used, where they are not the value's own.
        axis: For weights the channel axis, None for per-tensor.
        scale_from: For ``DERIVED`` the (input value, weight value) pair whose scales are multiplied.
        beta: For ``DERIVED`` a further factor of the bias scale (Gemm's beta).
        zero_point: For weights the zero point that they are stored with, which selects the runtime's kernel.
        dtype: Integer type, as ONNX calls it in lower case; empty for ``FLOAT``.
        symmetric: The zero point is that of no offset (0 for signed types) whatever the range; else it follows from
            the range so that 0.0 is exact.
        bits: Width of the integers, where the value is quantized.
    """

    edge: Edge
    role: EdgeRole
    how: How
    rule: str
    reason: str
    provider: str | None = None
    axis: int | None = None
    scale_from: tuple[str, str] | None = None
    beta: float = 1.0
    zero_point: int = 0
    bits: int = 8
    dtype: str = ""
    symmetric: bool = False

    @property
    def sentence(self) -> str:
        """The decision as one line of an explanation of its consumer."""
        return f"input {self.edge.index} '{self.edge.value}': {self.how.value} by {self.rule}: {self.reason}"

    @property
    def grid(self) -> str:
        """The integer type, its symmetry and axis, in words; empty where the value is read in float."""
        if not self.dtype:
            return ""
        channels = "" if self.axis is None else f" by axis {self.axis}"
        return f"{self.dtype} {'symmetric' if self.symmetric else 'asymmetric'}{channels}"


@dataclass(frozen=True)
class NodeDecision:
    """Decision about one node: its kind, the rule, and the reason."""

    node: str
    op_type: str
    kind: Kind
    rule: str
    reason: str


@dataclass(frozen=True)
class RangeLimit:
    """Bounds that the quantization range of a value must respect so that the runtime absorbs its activation.

    Source: the absorption condition measured on the installed runtime (``targets/ort_cpu/``).
    """

    value: str
    low: float | None
    high: float | None


@dataclass(frozen=True)
class PlacementPlan:
    """All decisions for one model and one target.

    Attributes:
        target: Name of the target table, e.g. ``"ort-cpu"``.
        decisions: One per edge that carries a float tensor.
        nodes: One per compute node.
        limits: Range limits of absorbed activations.
        saturations: Bounds beyond which all consumers of a value saturate; its range is clamped to them.
        grids: The range of values in 16 bits whose kernel knows no other grid, whatever was observed.
        barriers: Float nodes whose output needs a barrier in front of Q, so that the runtime's session
            optimizer does not quantize their float weights behind the plan's back.
        splits: Values each of whose readers gets a Q and DQ of its own, which the session cannot merge again; True
            where an integer kernel writes the value, so that they go behind a Q, a DQ and a barrier.
        quantile_lows: Values whose negative numbers no consumer sees, and which keep most of them: a kernel is slow
            where it clips many. The few that are farthest are cut off.
        largest_pair: What two neighbouring int8 weights of one sign may sum to where kernels of uint8 data read them,
            see `kenosis_ort.graph.qdq`; None where it does not matter.
        even_channels: As for `kenosis_ort.graph.product_pairs.pair_orders`.
        notes: What the target did to the plan as a whole, in sentences.
    """

    target: str
    decisions: tuple[Decision, ...] = ()
    nodes: tuple[NodeDecision, ...] = ()
    limits: tuple[RangeLimit, ...] = ()
    saturations: tuple[RangeLimit, ...] = ()
    grids: tuple[RangeLimit, ...] = ()
    barriers: tuple[str, ...] = ()
    splits: Mapping[str, bool] = field(default_factory=dict)
    quantile_lows: tuple[str, ...] = ()
    largest_pair: int | None = None
    even_channels: bool = False
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.decisions or self.nodes)

    @cached_property
    def by_node(self) -> dict[str, NodeDecision]:
        return {n.node: n for n in self.nodes}

    @cached_property
    def by_value(self) -> dict[str, tuple[Decision, ...]]:
        out: dict[str, list[Decision]] = {}
        for d in self.decisions:
            out.setdefault(d.edge.value, []).append(d)
        return {k: tuple(v) for k, v in out.items()}

    @cached_property
    def consumers(self) -> dict[str, set[str]]:
        """Names of the nodes that read each value."""
        return {value: {d.edge.consumer for d in decisions} for value, decisions in self.by_value.items()}

    def quantized_values(self) -> Iterator[tuple[str, Decision]]:
        """Yields each activation value that gets a Q/DQ pair, with a decision that tells its parameters."""
        for value, decisions in self.by_value.items():
            for d in decisions:
                if d.how in (How.OWN, How.SHARED, How.DEQUANTIZED) and d.role is not EdgeRole.WEIGHT:
                    yield value, d
                    break

    def quantizes(self) -> bool:
        """Whether anything is quantized, be it for float kernels."""
        return any(d.how in (How.OWN, How.SHARED) for d in self.decisions)

    def integer_nodes(self) -> tuple[str, ...]:
        return tuple(n.node for n in self.nodes if n.kind is Kind.INTEGER)

    def explain(self, node: str) -> str:
        """The decision about a node and all its input edges as text.

        Raises:
            OptionError: The plan has no such node.
        """
        n = self.by_node.get(node)
        if n is None:
            known = did_you_mean(node, self.by_node)
            raise OptionError(f"the plan has no node '{node}'.{known}", fix="a name from plan.by_node")
        lines = [f"{n.op_type} '{n.node}': {n.kind.value} by {n.rule}: {n.reason}"]
        lines += [f"  {d.sentence}" for d in self.decisions if d.edge.consumer == node]
        return printable("\n".join(lines))

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA_VERSION, **to_data(self)}, indent=1, sort_keys=True)


@dataclass(frozen=True)
class PlacementOptions:
    """The caller's options as the planner needs them.

    Attributes:
        op_types: Operator types the caller named, None if none were, or all of the model's.
        nodes: Names of the only nodes to quantize, None for all.
        nodes_to_exclude: Names of nodes that stay float.
        activation_type: ONNX element type of activations.
        weight_type: ONNX element type of weights.
        kernel_activations: Element types of activations that the target has integer kernels for.
        kernel_weights: Those of weights.
        mixes_types: Its kernels take each of them, as long as all that a node reads and writes agrees.
        splits_readers: The runtime has integer kernels for an activation of this type only where it has one reader.
        activation_symmetric: Activations have zero point 0: the caller asked for it, or the target takes no other.
        weight_symmetric: Weights likewise; None for what their type suggests.
        least_range: Least width of a range (``MinimumRealRange``).
        per_channel: Weight scales by channel.
        per_tensor: Operators whose weights have one scale all the same.
        matmul_axis: Channel axis of a MatMul's weight (``QDQOpTypePerChannelSupportToAxis``), None for the usual one.
        block_size: Weights with a scale a block of this many (``BlockSize``); 0 without.
        quantize_bias: Biases become int32 (``QuantizeBias``).
        overrides: The caller's own parameters by tensor (``TensorQuantOverrides``).
        float_outputs: Operator types whose outputs carry no Q (``OpTypesToExcludeOutputQuantization``).
        force_latent: Operators that move bytes are quantized behind float nodes too (``ForceQuantizeNoInputCheck``).
        protect_inputs: Stage 6.
        protect_outputs: Stage 7 with its policy; None if the stage is off.
        primary_inputs: Names of the inputs that carry the data proper; None to tell by shape and name.
        keep_float: Nodes that verification found not to run in integer, with the reason.
    """

    op_types: frozenset[str] | None = None
    nodes: frozenset[str] | None = None
    nodes_to_exclude: frozenset[str] = frozenset()
    activation_type: int = TensorProto.UINT8
    weight_type: int = TensorProto.INT8
    kernel_activations: tuple[int, ...] = (TensorProto.UINT8, TensorProto.INT8)
    kernel_weights: tuple[int, ...] = (TensorProto.UINT8, TensorProto.INT8)
    mixes_types: bool = False
    splits_readers: bool = False
    activation_symmetric: bool = False
    weight_symmetric: bool | None = None
    least_range: float = 0.0
    per_channel: bool = True
    per_tensor: frozenset[str] = frozenset()
    matmul_axis: int | None = None
    block_size: int = 0
    quantize_bias: bool = True
    overrides: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    float_outputs: frozenset[str] = frozenset()
    force_latent: bool = False
    protect_inputs: bool = True
    protect_outputs: str | None = "auto"
    primary_inputs: tuple[str, ...] | None = None
    keep_float: Mapping[str, str] = field(default_factory=dict)

    def closed(self, name: str, op_type: str) -> tuple[str, str] | None:
        """The rule and reason by which lists of nodes and operators leave a node float, None if they do not."""
        if name in self.nodes_to_exclude:
            return "caller-excluded", "excluded by the caller (nodes_to_exclude)"
        if self.nodes is not None and name not in self.nodes:
            return "caller-nodes", "not among the caller's nodes_to_quantize"
        if self.op_types is not None and op_type not in self.op_types:
            return "caller-op-types", f"{op_type} is not among the caller's op_types_to_quantize"
        return None
