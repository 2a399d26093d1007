"""The vocabulary of placement: what a runtime does with quantized operators, as data. Every rule names its proof."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal

from onnx import TensorProto

if TYPE_CHECKING:
    import onnx_ir as ir

Bias = Literal["int32", "float"]
Residual = Literal["both", "shortcut"]


class Role(str, Enum):
    """Role of an operator for quantized data."""

    ANCHOR = "anchor"  # heavy operator with constant weights; the reason to quantize at all
    BINARY = "binary"  # elementwise of two quantized inputs, rescales internally
    UNARY = "unary"  # integer kernel, input and output scales independent
    CONCAT = "concat"
    PASS_THROUGH = "pass-through"  # moves bytes; scale and zero point must be the same in and out
    ACTIVATION = "activation"  # may vanish into the producer's requantization
    ISLAND = "island"  # float, cheap, fine between quantized neighbours
    FLOAT = "float"  # float, and quantizing around it does not pay


class Requirement(str, Enum):
    """The closed set of conditions that a rule may put on a node."""

    CONSTANT_WEIGHT = "constant-weight"
    CONSTANT_OR_NO_BIAS = "constant-or-no-bias"
    UNIT_ALPHA = "unit-alpha"  # Gemm: alpha == 1
    NO_TRANS_A = "no-trans-a"
    WEIGHT_RANK_2 = "weight-rank-2"
    RESIZE_NEAREST = "resize-nearest"
    ONE_OUTPUT = "one-output"  # only the first output is used
    WHOLE_POOL = "whole-pool"  # a pool over all of the picture, without dilations
    SCALAR_CONSTANT = "scalar-constant"  # a constant operand holds one value
    EXACT_CONSTANT = "exact-constant"  # the values of a constant operand are multiples of one step, at most 255 of them
    NO_CONSTANT = "no-constant"  # all operands are computed
    CLIP_AT_ZERO = "clip-at-zero"  # Clip: its bounds are constants, the lower one 0


@dataclass(frozen=True)
class FusionRule:
    """One fact about the runtime.

    Attributes:
        id: Stable identifier; its proof is ``test_rule_<id with underscores>`` or an entry of ``EXAMPLES`` in
            ``tests/targets/``.
        op_types: Operators of the default domain it speaks about.
        role: What they do.
        data_inputs: Input positions that carry data to quantize; None for all of them.
        why: The fact in one sentence.
        requires: Conditions on the node; where one fails, the node stays float.
        min_opset: Least opset of the default domain at which it holds.
        own_grid: Its kernel writes on a grid of its own choice, and on that of another value something else: no Concat
            puts what it writes on one.
        wide_output: Least and largest value of what it writes in 16 bits, where the kernel knows no other grid.
        source: The clause of the document it was taken from, where it was not measured.
    """

    id: str
    op_types: tuple[str, ...]
    role: Role
    why: str
    data_inputs: tuple[int, ...] | None = (0,)
    requires: tuple[Requirement, ...] = ()
    min_opset: int = 0
    own_grid: bool = False
    wide_output: tuple[float, float] | None = None
    source: str = ""


WEIGHTED: Final = (Requirement.CONSTANT_WEIGHT, Requirement.CONSTANT_OR_NO_BIAS)
"""What a layer asks of its weights and its bias."""


def rule(identifier: str, operators: str | Iterable[str], role: Role, why: str, **more: Any) -> FusionRule:
    """A row of a target's table.

    Args:
        identifier: The rule's.
        operators: Their types, apart by spaces or each by itself.
        role: What they do.
        why: The fact in one sentence.
        more: Further attributes of a `FusionRule`.
    """
    names = operators.split() if isinstance(operators, str) else operators
    return FusionRule(identifier, tuple(names), role, why, **more)


@dataclass(frozen=True)
class NodeClass:
    """Role of a node under a target's rules, with the reason.

    Attributes:
        node: The node.
        role: Its role in the target; `Role.FLOAT` or `Role.ISLAND` if something forbids the integer kernel.
        rule: The rule that decided.
        reason: Why.
        data: The values that carry activations, by input position (float32, not constant).
    """

    node: ir.Node
    role: Role
    rule: str
    reason: str
    data: tuple[ir.Value, ...]


@dataclass(frozen=True)
class DataTypes:
    """The types that a runtime's integer kernels take, as ONNX element types.

    Attributes:
        activation: Of activations, where the caller says nothing.
        weight: Of weights likewise.
        activations: Those with integer kernels.
        weights: Likewise.
        mixed: Kernels take each of these activation types, whatever that of others is.
        only_these: Others are refused; without, a caller may ask for them and gets Q and DQ around float kernels.
        symmetric: Activations have zero point 0 and nothing else.
        weight_symmetric: Weights likewise.
        per_channel: Weights have a scale a channel by default.
        per_tensor: Operators whose weights have one scale whatever the options.
        saturates: 8-bit products saturate on the machine at hand.
        single_reader: Activation types with integer kernels only for values of one reader: each reader of such a
            value gets a Q and DQ of its own.
        largest_pair: What the sum of two products of uint8 and int8 may be on every machine that its files may run on;
            None where it does not matter.
        even_channels: As for `kenosis_ort.graph.product_pairs.pair_orders`.
        why: The reason in one sentence, for the report.
    """

    activation: int = TensorProto.UINT8
    weight: int = TensorProto.INT8
    activations: tuple[int, ...] = (TensorProto.UINT8, TensorProto.INT8)
    weights: tuple[int, ...] = (TensorProto.UINT8, TensorProto.INT8)
    mixed: bool = False
    only_these: bool = False
    symmetric: bool = False
    weight_symmetric: bool = False
    per_channel: bool = True
    per_tensor: tuple[str, ...] = ()
    saturates: bool = False
    single_reader: tuple[int, ...] = ()
    largest_pair: int | None = None
    even_channels: bool = False
    why: str = ""

    def takes_anywhere(self, elem_type: int) -> bool:
        """Whether there are integer kernels for activations of a type, however many nodes read them."""
        return elem_type in self.activations and elem_type not in self.single_reader


@dataclass(frozen=True)
class Table:
    """Table of a runtime's quantized operators: types, rules and limits.

    Attributes:
        name: Public name, e.g. ``"ort-cpu"``.
        rules: One rule an operator, or several, of which the first counts whose requirements a node meets; an operator
            without a rule is float.
        absorbs: Activations that a kernel takes in behind its sum: no Q stands between.
        clamps: Those of them that vanish into the requantization only where the quantized range keeps within their
            bounds; all others the kernel computes whatever the range.
        gates: Functions f such that ``x * f(x)``, two nodes, is taken in as one.
        constant_steps: Elementwise operators with a constant operand that are taken in too.
        longest_epilogue: Most operations that one kernel takes in.
        residual: Where an Add joins two branches: ``both`` of its inputs carry Q; or only the ``shortcut`` does, and
            the anchor of the other branch takes the Add in.
        float_output: Anchors whose integer kernel may write float; that of all others needs a Q on the output.
        float_where: Where they do: ``mixed``, wherever anything but integer anchors reads the output; ``unread``, only
            where no integer kernel does.
        bias: ``int32`` at input scale x weight scale, or ``float``.
        matmul_bias: An Add behind a MatMul becomes its bias.
        whole: Every operator with a rule reads and writes integers, from the inputs to the outputs of the graph: the
            runtime takes nothing else between quantized values. A Concat and all it reads are on one grid.
        eager: Light operators that run in integer right behind an integer kernel whoever reads them.
        clips_slowly: Its integer kernels requantize slowly where many values are clipped: their range is not narrowed
            to what a Relu or Clip behind it lets pass.
        keeps_grid: No Q stands behind an operator that moves bytes: its readers see the Q before it.
        concat_share_limit: Largest ratio by which sharing a Concat's scale may coarsen a value that has
            other consumers too.
        head_float_share: Under the ``auto`` output policy, a Conv head stays float if the heads hold at most
            this share of the multiply-accumulates.
        types: Data types.
        facts: Further facts that the code relies on: rule id to sentence.
    """

    name: str
    rules: tuple[FusionRule, ...]
    absorbs: tuple[str, ...] = ()
    float_output: tuple[str, ...] = ()
    concat_share_limit: float = 1.5
    head_float_share: float = 0.02
    clamps: tuple[str, ...] = ()
    gates: tuple[str, ...] = ()
    constant_steps: tuple[str, ...] = ()
    longest_epilogue: int = 1
    residual: Residual = "both"
    float_where: Literal["mixed", "unread"] = "mixed"
    bias: Bias = "int32"
    matmul_bias: bool = False
    whole: bool = False
    eager: tuple[str, ...] = ()
    clips_slowly: bool = False
    keeps_grid: bool = False
    types: DataTypes = DataTypes()
    facts: tuple[tuple[str, str], ...] = ()

    def rule(self, op_type: str) -> FusionRule | None:
        """The rule about an operator, the first of several; None if there is none."""
        return next(iter(self.rules_of(op_type)), None)

    def rules_of(self, op_type: str) -> tuple[FusionRule, ...]:
        """The rules about an operator, in order."""
        return tuple(rule for rule in self.rules if op_type in rule.op_types)
