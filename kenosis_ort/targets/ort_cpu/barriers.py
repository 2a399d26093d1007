"""Quantized values that need a barrier before their Q, so that the session does not change the float node before it.

Where float is better than the table says: pools that are slow beside channels-last, and what a MatMul writes.

An integer Conv works channels-last, and the runtime lays out what follows it the same way, as far as the operators
let it; everything else stays channels-first. A MaxPool on bytes has a fast kernel channels-last only. Channels-first
it is 30 times as slow as in float (192 channels of 56x56, window 3, stride 2: 3.2 ms for 0.1), so such a pool stays
float, and its output is quantized behind it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from kenosis_ort.graph.view import GraphView, ir
from kenosis_ort.options import PlacementOptions
from kenosis_ort.plan import Decision, How
from kenosis_ort.targets.model import Placed
from kenosis_ort.targets.table import NodeClass, Role

_RULE: Final = "maxpool-channels-first-slow"
CHANNELS_LAST: Final = frozenset(
    {"Add", "Mul", "Concat", "Sigmoid", "LeakyRelu", "Relu", "Clip", "MaxPool",
     "Sub", "Div", "Pow", "Sum", "Tanh", "HardSigmoid", "HardSwish", "Elu", "Gelu", "QuickGelu", "PRelu", "Mish",
     "Softplus", "Erf", "Exp", "Sqrt", "Abs", "Neg", "Reciprocal", "Softsign", "Selu", "Celu",
     "Slice", "Split", "Resize", "Pad", "Max", "Min"}
)  # fmt: skip
"""Operators behind an integer Conv that the runtime runs in its channels-last layout."""


def leave_slow_pools_float(
    view: GraphView, classes: Mapping[str, NodeClass], integer: Collection[str]
) -> dict[str, NodeClass]:
    """The classes with each MaxPool made float whose data is not channels-last.

    Args:
        view: The prepared model.
        classes: The classes so far.
        integer: Names of the nodes that would run in integer.
    """
    out = dict(classes)
    laid_out: set[int] = set()
    for node in view.nodes:
        c = out[str(node.name)]
        runs = str(node.name) in integer
        if runs and node.op_type == "MaxPool" and not _all(c, laid_out):
            out[str(node.name)] = replace(
                c, role=Role.ISLAND, rule=_RULE, reason="its data is not channels-last, where int8 pools are slow"
            )
            continue
        if _hands_on(c, runs, laid_out):
            laid_out.update(id(v) for v in node.outputs)
    return out


def _hands_on(c: NodeClass, runs: bool, laid_out: set[int]) -> bool:
    """Whether the runtime has the outputs of a node channels-last."""
    if c.role is Role.ANCHOR:
        return runs and c.node.op_type == "Conv"
    if c.node.op_type not in CHANNELS_LAST:
        return False
    # The runtime transposes the smaller part of the operands of an integer kernel; it does not for float ones.
    return any(id(v) in laid_out for v in c.data) if runs else _all(c, laid_out)


def _all(c: NodeClass, laid_out: set[int]) -> bool:
    return bool(c.data) and all(id(v) in laid_out for v in c.data)


_ABSORBED: Final = ("Relu", "Clip")


def writes_float(view: GraphView, node: ir.Node, options: PlacementOptions) -> bool:
    """Whether the integer kernel of a Gemm or MatMul may write float; a Gemm needs an int32 bias for it.

    Source: rules gemm-float-output and gemm-float-bias-needs-output-q.
    """
    float_bias = node.op_type == "Gemm" and len(node.inputs) > 2 and node.inputs[2] is not None
    return (
        (options.quantize_bias or not float_bias)
        and not _becomes_float_gemm(view, options, node)
        and not _hidden_by_activation(view, node)
    )


def _becomes_float_gemm(view: GraphView, options: PlacementOptions, node: ir.Node) -> bool:
    """Whether the session would merge a MatMul with the Add behind it into a Gemm that runs in float.

    Source: rules matmul-residual-float-gemm and matmul-add-float-bias-trap. A bias vector is no danger where it becomes
    int32.
    """
    consumer = view.sole_consumer(node.outputs[0]) if node.op_type == "MatMul" else None
    if consumer is None or consumer.node.op_type != "Add":
        return False
    other = consumer.node.inputs[1 - consumer.index]
    if other is not None and view.is_row_bias(node, other):
        return not options.quantize_bias
    return other is not None and view.rank(node.outputs[0]) in (2, None)


def _hidden_by_activation(view: GraphView, node: ir.Node) -> bool:
    """Whether the session would look for the Q of an anchor behind its Relu or Clip, and find another node.

    Source: rule activation-hides-float-output. Where the activation has several readers the session does not look.
    """
    consumer = view.sole_consumer(node.outputs[0])
    if consumer is None or consumer.node.op_type not in _ABSORBED:
        return False
    return view.sole_consumer(consumer.node.outputs[0]) is not None


_FLOAT_WEIGHT_OPS = ("Conv", "ConvTranspose", "Gemm")  # whose float weights the session may quantize
_MERGED = ("Relu", "Clip", "BatchNormalization", "Add", "Mul")  # into the Conv, Gemm or MatMul before them
_MAY_VANISH = frozenset(
    {"Identity", "Dropout", "Cast", "Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Expand",
     "Concat", "Pad", "Relu", "Clip", "Add", "Sub", "Mul", "Div"}
)  # fmt: skip
"""Operators that the session drops or merges into a Clip where they do nothing."""


def find_barriers(placed: Placed) -> tuple[str, ...]:
    """The quantized values whose Q must not touch the float node before it.

    The session would quantize the float weights of such a node (rule float-weight-silently-quantized), or
    fail to match an integer Gemm or MatMul whose output feeds Q and float nodes alike, and then dequantize
    its weights on every run. Runtimes before 1.24 refuse a graph input, Clip and Q in a row.
    """
    finder = _Finder(placed)
    return tuple(name for name, value in placed.quantized.items() if finder.needs_barrier(name, value))


class _Finder:
    """Looks for barriers in a placement."""

    def __init__(self, placed: Placed) -> None:
        self.placed, self.view = placed, placed.view

    def needs_barrier(self, name: str, value: ir.Value) -> bool:
        """Whether the Q of a value must not touch the node before it."""
        if self._clips_an_input(value):
            return True
        node = self._float_source(value)
        if node is None:
            return False
        if self._is_integer(node) or str(node.name) in self.placed.biased:
            return self._branches(value, node) or any(d.how is How.FLOAT for d in self._reads(name))
        return node.op_type == "MaxPool" or self._reads_dq(node)

    def _clips_an_input(self, value: ir.Value) -> bool:
        """Whether a value is a float Clip of a graph input, perhaps behind operators that the session drops."""
        node = value.producer()
        if node is None or node.op_type != "Clip" or str(node.name) in self.placed.absorbed:
            return False
        while node is not None and node.op_type in _MAY_VANISH:
            data = [v for v in node.inputs if v is not None and not self.view.is_constant(v)]
            reads = [d for d in self._reads(str(data[0].name)) if d.edge.consumer == str(node.name)] if data else []
            if len(data) != 1 or any(d.how is not How.FLOAT for d in reads):
                return False
            node = data[0].producer()
        return node is None

    def _branches(self, value: ir.Value, source: ir.Node) -> bool:
        """Whether anything else reads what lies between a node and a value behind it."""
        node = value.producer()
        while node is not None and node is not source:
            data = next(v for v in node.inputs if v is not None and not self.view.is_constant(v))
            if self.view.sole_consumer(data) is None:
                return True
            node = data.producer()
        return False

    def _reads_dq(self, node: ir.Node) -> bool:
        first = node.inputs[0]
        return first is not None and any(
            d.edge.consumer == str(node.name) and d.edge.index == 0 and d.how is How.DEQUANTIZED
            for d in self._reads(str(first.name))
        )

    def _float_source(self, value: ir.Value) -> ir.Node | None:
        """The heavy float node behind a value, looking through what the session merges into it."""
        node = value.producer()
        while node is not None and self._merges_into_producer(node):
            if str(node.name) in self.placed.biased:
                return node
            data = [v for v in node.inputs if v is not None and not self.view.is_constant(v)]
            node = data[0].producer() if len(data) == 1 else None
        if node is None or str(node.name) in self.placed.absorbed:
            return None
        if self._is_integer(node):
            return node if str(node.name) in self.placed.float_output else None
        if str(node.name) in self.placed.requested:
            return None
        return node if node.op_type in (*_FLOAT_WEIGHT_OPS, "MatMul", "MaxPool") else None

    def _merges_into_producer(self, node: ir.Node) -> bool:
        """Whether the session may merge a float node into the Conv, Gemm or MatMul before it."""
        absorbed = str(node.name) in self.placed.absorbed
        return not absorbed and not self._is_integer(node) and node.op_type in _MERGED

    def _is_integer(self, node: ir.Node) -> bool:
        return str(node.name) in self.placed.integer

    def _reads(self, value: str) -> Sequence[Decision]:
        return self.placed.decisions.get(value, ())
