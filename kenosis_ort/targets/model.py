"""The vocabulary of a target: what a runtime does with quantized operators, as data.

A target is one file that builds one `Target`. Planning reads nothing else about the runtime, so that a new
target is a new file and no code. Every rule names the test that proves it on the installed runtime.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kenosis_ort.targets.costs import CostTable


class Role(str, Enum):
    """What an operator does with quantized data."""

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


@dataclass(frozen=True)
class FusionRule:
    """One measured fact about the runtime.

    Attributes:
        id: Stable identifier; its proof is ``tests/targets/ test_rule_<id with underscores>``.
        op_types: Operators of the default domain it speaks about.
        role: What they do.
        data_inputs: Input positions that carry data to quantize; None for all of them.
        why: The fact in one sentence.
        requires: Conditions on the node; where one fails, the node stays float.
        min_opset: Least opset of the default domain at which it holds.
        versions: Range of runtime versions it was measured on.
        evidence: Name of the test that proves it on the installed runtime.
    """

    id: str
    op_types: tuple[str, ...]
    role: Role
    why: str
    data_inputs: tuple[int, ...] | None = (0,)
    requires: tuple[Requirement, ...] = ()
    min_opset: int = 0
    versions: str = ">=1.23"

    @property
    def evidence(self) -> str:
        return f"test_rule_{self.id.replace('-', '_')}"


@dataclass(frozen=True)
class Target:
    """A runtime as a table.

    Attributes:
        name: Public name, e.g. ``"ort-cpu"``.
        rules: One rule an operator; an operator without a rule is float.
        absorbs: Activations that vanish into the producer's requantization where their bounds allow it.
        output_q_needed: Anchors whose integer kernel needs a Q on the output.
        float_output: Anchors whose integer kernel may write float.
        concat_share_limit: Largest ratio by which sharing a Concat's scale may coarsen a value that has
            other consumers too.
        head_float_share: Under the ``auto`` output policy, a Conv head stays float if the heads hold at most
            this share of the multiply-accumulates.
        stem_channels: Most input channels of a Conv that counts as a stem; 0 switches the float prefix off.
        channels_last: Operators behind an integer Conv that the runtime runs in its channels-last layout.
        matrix_product: Pairs of products an output and output channels; a Conv that reaches both of a pair is faster by
            the 8-bit matrix product, on machines with matrix tiles, which weights of zero point -1 select.
        facts: Further measured facts that the code relies on: rule id to sentence.
        costs: What its kernels cost; None where that was not measured.
    """

    name: str
    rules: tuple[FusionRule, ...]
    absorbs: tuple[str, ...]
    output_q_needed: tuple[str, ...]
    float_output: tuple[str, ...]
    concat_share_limit: float
    head_float_share: float
    stem_channels: int = 0
    channels_last: tuple[str, ...] = ()
    matrix_product: tuple[tuple[int, int], ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    costs: CostTable | None = None

    def rule(self, op_type: str) -> FusionRule | None:
        for rule in self.rules:
            if op_type in rule.op_types:
                return rule
        return None
