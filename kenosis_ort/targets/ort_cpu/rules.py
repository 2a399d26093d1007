"""The rules of the CPU execution provider of stock ONNX Runtime, and what becomes of data types beyond 8 bits.

Every row was measured on ONNX Runtime 1.31.1 (x86-64, AVX512-VNNI) and is proved again by its test on
whatever runtime is installed. Speeds quoted are of whole blocks against FP32, one thread.

Which data types the integer kernels of this machine take follows from their abilities. Whether 8-bit products saturate
is measured, not looked up: one tiny product on the installed runtime tells for every operating system and processor
alike.

Some quantized values need a barrier before their Q, so that the session does not change the float node before it; and
float is better than the table says for pools that are slow beside channels-last, and for what a MatMul writes. An
integer Conv works channels-last, and the runtime lays out what follows it the same way, as far as the operators
let it; everything else stays channels-first. A MaxPool on bytes has a fast kernel channels-last only. Channels-first
it is 30 times as slow as in float (192 channels of 56x56, window 3, stride 2: 3.2 ms for 0.1), so such a pool stays
float, and its output is quantized behind it.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper

from kenosis_ort.graph.view import GraphView, ir
from kenosis_ort.plan import Decision, How, PlacementOptions
from kenosis_ort.runtime.machine import fact_of_processor, machine
from kenosis_ort.runtime.session import open_session
from kenosis_ort.targets.model import Placed
from kenosis_ort.targets.vocabulary import WEIGHTED, DataTypes, NodeClass, Requirement, Role, rule

_log = logging.getLogger(__name__)


def is_arm(machine: str) -> bool:
    """Whether a processor family, as the operating system names it, is Arm."""
    return machine.lower().startswith(("arm", "aarch"))


@cache
def products_saturate() -> bool:
    """Whether uint8 x int8 products saturate at 16 bits in this runtime on this machine.

    255 * 127 + 255 * 127 = 64770 clips to 32767. Source: ``reduce_range`` in the ONNX Runtime quantization
    guide. Where the processor says what it can do, the answer is kept for the next process.
    """
    return fact_of_processor("saturate", _products_saturate, lambda cached: isinstance(cached, bool))


def _products_saturate() -> bool:
    n = 64
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["a", "b"], ["y"])],
        "saturation_probe",
        [helper.make_tensor_value_info("a", TensorProto.UINT8, [n, n])],
        [helper.make_tensor_value_info("y", TensorProto.INT32, [n, n])],
        [onnx.numpy_helper.from_array(np.full((n, n), 127, np.int8), "b")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    (y,) = open_session(model).run(None, {"a": np.full((n, n), 255, np.uint8)})
    return bool((np.asarray(y) != 255 * 127 * n).any())


def for_this_machine(types: DataTypes) -> DataTypes:
    """The data types of the target that run fastest and exactly on the machine at hand."""
    here = machine()
    if is_arm(here.family):
        why = "Arm kernels take int8 activations and weights"
        return replace(types, activation=TensorProto.INT8, saturates=False, single_reader=(), why=why)
    saturates = products_saturate() if here.saturates is None else here.saturates
    sums = "16 bits on this machine and clipped there" if saturates else "32 bits on this machine, in 16 on others"
    why = f"uint8 activations, int8 weights whose products cannot clip: they are added in {sums}"
    _log.debug("host %s: %s", here.family, why)
    return replace(types, activation=TensorProto.UINT8, saturates=saturates, single_reader=(TensorProto.INT8,), why=why)


RULES: Final = (
    rule("conv-integer", "Conv", Role.ANCHOR,
        "Conv between DQ and Q with int8 weights becomes QLinearConv (3.5x at 3x3, 64 channels)", requires=WEIGHTED),
    rule("gemm-integer", "Gemm", Role.ANCHOR,
        "Gemm with int8 weights and an int32 bias becomes QGemm, with quantized or float output",
        requires=(*WEIGHTED, Requirement.UNIT_ALPHA, Requirement.NO_TRANS_A, Requirement.WEIGHT_RANK_2)),
    rule("matmul-integer", "MatMul", Role.ANCHOR,
        "MatMul with a constant matrix becomes QLinearMatMul, or MatMulIntegerToFloat without Q behind it",
        requires=(Requirement.CONSTANT_WEIGHT, Requirement.WEIGHT_RANK_2)),
    rule("residual-add", "Add", Role.BINARY,
        "Add of two quantized values becomes QLinearAdd and rescales internally", data_inputs=None,
        requires=(Requirement.SCALAR_CONSTANT,)),
    rule("mul-integer", "Mul", Role.BINARY,
        "Mul of two quantized values becomes QLinearMul; a constant operand has to be exact in 8 bits",
        data_inputs=None, requires=(Requirement.EXACT_CONSTANT,)),
    rule("concat-shared", "Concat", Role.CONCAT,
        "Concat becomes QLinearConcat; producers that share its scale save the requantization (2.56x for 2.21x)",
        data_inputs=None),
    rule("sigmoid-lut", "Sigmoid", Role.UNARY,
        "Sigmoid becomes the table look-up QLinearSigmoid"),
    rule("leakyrelu-lut", "LeakyRelu", Role.UNARY,
        "LeakyRelu becomes the table look-up QLinearLeakyRelu"),
    rule("global-average-pool", "GlobalAveragePool", Role.UNARY,
        "GlobalAveragePool becomes QLinearGlobalAveragePool"),
    rule("average-pool", "AveragePool", Role.UNARY,
        "AveragePool becomes QLinearAveragePool; over a whole picture it is as good as GlobalAveragePool",
        requires=(Requirement.WHOLE_POOL,)),
    rule("maxpool-opset12", "MaxPool", Role.PASS_THROUGH,
        "MaxPool runs on bytes from opset 12 where scale and zero point are the same in and out",
        requires=(Requirement.ONE_OUTPUT,), min_opset=12),
    rule("pass-through-same-scale",
        "Reshape Transpose Flatten Squeeze Unsqueeze DepthToSpace Slice Expand Tile GatherElements", Role.PASS_THROUGH,
        "shape operators run on bytes where scale and zero point are the same in and out"),
    rule("gather-same-scale", "Gather", Role.PASS_THROUGH,
        "Gather runs on bytes where scale and zero point are the same in and out"),
    rule("split-same-scale", "Split", Role.PASS_THROUGH,
        "Split runs on bytes where every output has the scale and zero point of the input"),
    rule("resize-nearest-same-scale", "Resize", Role.PASS_THROUGH,
        "Resize runs on bytes in nearest mode with the same scale in and out", requires=(Requirement.RESIZE_NEAREST,)),
    rule("absorb-relu", "Relu", Role.ACTIVATION,
        "Relu vanishes into the requantization where the zero point is the least quantized value"),
    rule("absorb-clip", "Clip", Role.ACTIVATION,
        "Clip vanishes into the requantization where the quantized range lies inside its bounds to half a step"),
    rule("activation-q-on-both-sides",
        "PRelu HardSigmoid HardSwish Elu Tanh Gelu Mish Softplus Selu Celu Erf Exp Sqrt Abs Neg "
        "ThresholdedRelu Softsign Swish QuickGelu FastGelu BiasGelu", Role.ISLAND,
        "any other activation is float: Q on the Conv's output and after the activation (3.0x; 0.72x if deferred)"),
    rule("sub-div-float", "Sub Div Pow Min Max Sum Mean Reciprocal", Role.ISLAND,
        "these elementwise operators have no integer kernel and cost DQ and Q only", data_inputs=None),
    rule("reduce-mean-float", "ReduceMean ReduceMax ReduceSum GlobalMaxPool LpPool GlobalLpPool", Role.ISLAND,
        "reductions run in float between DQ and Q"),
    rule("pad-float", "Pad Upsample SpaceToDepth Identity Dropout Cast LRN", Role.ISLAND,
        "these have no integer kernel and are cheap in float"),
    rule("norms-float",
        "LayerNormalization InstanceNormalization GroupNormalization SimplifiedLayerNormalization "
        "RMSNormalization SkipLayerNormalization SkipSimplifiedLayerNormalization LpNormalization "
        "MeanVarianceNormalization", Role.FLOAT,
        "normalizations are float; their weights behind a DQ would be dequantized on every run"),
    rule("bn-unfolded-float", "BatchNormalization", Role.ISLAND,
        "a BatchNormalization that could not be folded is a float island between DQ and Q (2.8x; 0.7x without Q)"),
    rule("softmax-lut", "Softmax LogSoftmax Hardmax", Role.FLOAT,
        "QLinearSoftmax exists but is slower and loses accuracy (attention core 0.40x)"),
    rule("lstm-float", "LSTM GRU RNN Attention MultiHeadAttention Einsum CumSum TopK ArgMax Where", Role.FLOAT,
        "these are float; weights behind a DQ would be dequantized on every run"),
    rule("conv-transpose-float", "ConvTranspose", Role.ISLAND,
        "ConvTranspose has no integer kernel; int8 weights would be dequantized on every run (0.77x)"),
)  # fmt: skip
"""One rule an operator; an operator without a rule is float."""

FACTS: Final = (
    ("conv-needs-output-q", "a Conv with int8 weights and no Q on its output runs in float"),
    ("gemm-float-output", "Gemm without Q on the output and with an int32 bias runs as QGemm (1.96x for 1.80x)"),
    ("gemm-float-bias-needs-output-q", "a Gemm with a float bias runs as QGemm with a Q on its output only"),
    ("matmul-add-int32-bias", "MatMul and Add with an int32 bias at input_scale * weight_scale run as QGemm"),
    ("matmul-add-float-bias-trap", "a float bias behind a quantized MatMul dequantizes the weights on every run"),
    ("absorb-needs-single-consumer", "the pre-activation value must have the activation as its only consumer"),
    ("absorb-clip-needs-scalar-params", "scale and zero point must be rank 0 for Clip to vanish"),
    ("no-absorb-symmetric", "a symmetric zero point does not absorb Relu: the Conv would run in float"),
    ("residual-needs-q-on-conv", "Q on the second Conv's output and after the Relu behind the Add (3.4x for 1.3x)"),
    ("matmul-activations", "attention products stay float: all-quantized 0.40x, float scores 1.04x"),
    ("float-weight-silently-quantized", "the session quantizes float Conv/Gemm weights between DQ and Q"),
    ("barrier-keeps-float", "a barrier in front of Q keeps such a node float"),
    ("clip-of-input-barrier", "runtimes before 1.24 refuse graph input, Clip, Q in a row; a barrier lets it load"),
    ("int8-activation-branch-float", "on x64 an int8 value with several consumers keeps its Convs float"),
    ("int8-branches-behind-barrier",
        "on x64 a Q and DQ of its own for each reader, behind a barrier, keeps such Convs integer (1.35x for 0.6x)"),
    ("sixteen-bit-float",
        "16-bit activations run in float on this runtime, but for MatMul from 1.32 on, which takes blocks of 8 bits"),
    ("maxpool-channels-first-slow",
        "MaxPool on bytes is fast only where an integer Conv made the layout channels-last"),
    ("hoist-q-over-maxpool", "the session hoists Q above a float MaxPool and runs it slowly on bytes"),
    ("matmul-residual-float-gemm",
        "a MatMul without Q whose output meets an Add in two dimensions becomes a float Gemm"),
    ("activation-hides-float-output",
        "a Gemm or MatMul without Q runs in float if a Relu or Clip that one float node reads is behind it"),
    ("pass-through-into-body-dies", "the session dies on a DQ in front of a shape operator that a body reads"),
    ("conv-matrix-product",
        "weights with a zero point other than 0 send a QLinearConv to the matrix product, with the same bits"),
    ("subgraph-capture-counts-as-consumer", "a value read inside an If or Loop body has a second consumer"),
)  # fmt: skip
"""Further measured facts that placement relies on."""


PRECISIONS: Final = {
    "int16-activations":
        "16-bit activations run in float on the CPU: slower than the float model, for no gain there; leave sensitive "
        "nodes float instead (recipe='strict')",
    "int16-weights": "16-bit weights run in float on the CPU and are dequantized on every run",
    "int4-conv": "a Conv with 4-bit weights runs in float, and its weights are dequantized on every run",
    "float8": "the runtime's CPU provider does not load models with 8-bit floating-point activations",
}  # fmt: skip
"""Why types beyond 8 bits are refused; ``docs/generate/precisions.py`` has the kernels of these and of others."""


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
            data = self._computed(node)
            reads = [d for d in self._reads(str(data[0].name)) if d.edge.consumer == str(node.name)] if data else []
            if len(data) != 1 or any(d.how is not How.FLOAT for d in reads):
                return False
            node = data[0].producer()
        return node is None

    def _branches(self, value: ir.Value, source: ir.Node) -> bool:
        """Whether anything else reads what lies between a node and a value behind it."""
        node = value.producer()
        while node is not None and node is not source:
            data = self._computed(node)[0]
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
            data = self._computed(node)
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

    def _computed(self, node: ir.Node) -> list[ir.Value]:
        """What a node reads besides constants."""
        return [value for value in node.inputs if value is not None and not self.view.is_constant(value)]

    def _reads(self, value: str) -> Sequence[Decision]:
        return self.placed.decisions.get(value, ())
