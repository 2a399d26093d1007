"""Target ``onednn``: OpenVINO's CPU plugin, and ONNX Runtime's OpenVINO provider, whose kernels are oneDNN's.

Every rule was measured on OpenVINO 2026.4.1 and is proved again by its test on whatever OpenVINO is installed. Speeds
quoted are of whole nets or blocks against OpenVINO in float32, one thread.

A Conv or linear layer may write float anywhere. Activations are parted from the kernel before them where that kernel is
slow at them (`hold_apart`); the plan is that of one epilogue all the same: Q stands behind the activation alone.

`conformance` holds models against what oneDNN's guide says of quantized Convolutions; `openvino_proof` asks OpenVINO
and reads what it says.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Final

import numpy as np
from onnx import TensorProto

from kenosis_ort.graph.product_pairs import INT16_SUM
from kenosis_ort.graph.view import GraphView, ir, optional
from kenosis_ort.plan import PlacementOptions
from kenosis_ort.rewrite.rule import Editor, rule
from kenosis_ort.runtime.machine import has_matrix_tiles
from kenosis_ort.targets import vocabulary
from kenosis_ort.targets.model import Hooks, Target, TimedRuntime
from kenosis_ort.targets.onednn.conformance import conform
from kenosis_ort.targets.onednn.openvino_proof import missing, open_runner, prove
from kenosis_ort.targets.prefix import leave_prefix_float
from kenosis_ort.targets.vocabulary import WEIGHTED, DataTypes, Requirement, Role

SLOW_IN_KERNEL: Final = frozenset({"Sigmoid", "Tanh", "Gelu", "Elu", "Mish"})
"""Activations with an exponential in them."""
_MOST_ELEMENTS: Final = 3 << 17
"""Of a sum that is written as float32: 1.5 MB. Beyond it a pass of its own was slower than the kernel."""


@rule("Conv", did="activations with an exponential are held apart from the kernel before them", whole=True)
def hold_apart(editor: Editor) -> None:
    """Max with the least number between a Conv and an activation with an exponential.

    ``Max(x, least number) = x`` for every number. It is no operation that oneDNN's kernels for matrix tiles (AMX) take
    in, so that the activation behind it is a pass of its own: those kernels compute an exponential in the epilogue a
    vector at a time, each waiting for the one before. The pass takes two thirds of the time, and works on the float sum
    just as exactly (3 Convs of 64 channels with SiLU: 4.6x of float32, for 3.2x in the kernel and 4.0x with Q in
    between). The Max costs it nothing.

    Not changed: anything on processors without tiles, which compute the epilogue at full speed; sums of more elements
    than fit the processor's second cache as float32, whose pass would cost more; sums that others need as well.
    """
    least: ir.Value | None = None
    for conv in editor.find("Conv") if has_matrix_tiles() else ():
        value = conv.outputs[0]
        readers, dims = editor.readers(value), editor.dims(value)
        if not any(reader.op_type in SLOW_IN_KERNEL for reader in readers) or dims is None or None in dims[1:]:
            continue
        elements = math.prod(size or 0 for size in dims[1:])  # of an image
        if not editor.may_change(conv) or editor.is_pinned(value) or not 0 < elements <= _MOST_ELEMENTS:
            continue
        least = least or editor.add_constant(np.array(np.finfo(np.float32).min, np.float32), "least_number")
        apart = ir.Value(name=editor.fresh_name(f"{value.name}_apart"))
        _redirect(editor, readers, value, editor.append_behind(conv, "Max", [value, least], output=apart))
        editor.done += 1


@rule("Conv", did="values are subsampled before the pointwise Convs that stride over them", whole=True)
def share_subsampling(editor: Editor) -> None:
    """One MaxPool of 1x1 in front of pointwise Convs of the same strides that alone read a value.

    ``Conv(x; 1x1, strides s) = Conv(MaxPool(x; 1x1, strides s); 1x1)``: both read every s-th position of each channel
    and nothing else. OpenVINO does the same to a float model, where all readers of a value are such Convs, but behind
    the DequantizeLinear, and then runs the Convs in float. Done before quantization the MaxPool moves bytes and the
    Convs are integer (ResNet-50 with strides in its pointwise Convs: 6 of 53 Convs float, 3.9x for 2.7x).

    Not changed: padded Convs, readers of other strides, values that others read too.
    """
    for node in editor.nodes:
        for value in node.outputs:
            readers = editor.readers(value)
            strides = {_strides(reader, value) if editor.may_change(reader) else () for reader in readers}
            step = strides.pop() if len(strides) == 1 else ()
            if not step or editor.is_pinned(value):
                continue
            apart = ir.Value(name=editor.fresh_name(f"{value.name}_subsampled"))
            ones = (1,) * len(step)
            editor.append_behind(node, "MaxPool", [value], output=apart, kernel_shape=ones, strides=step)
            _redirect(editor, readers, value, apart)
            for reader in readers:
                editor.set_attribute(reader, "strides", ones)
            editor.done += 1


def _redirect(editor: Editor, readers: Iterable[ir.Node], value: ir.Value, to: ir.Value) -> None:
    """Makes nodes read another value."""
    for reader in readers:
        for position in [at for at, read in enumerate(reader.inputs) if read is value]:
            editor.read(reader, position, to)


def _strides(node: ir.Node, value: ir.Value) -> tuple[int, ...]:
    """The strides of a pointwise Conv over a value, empty for another node and for one without strides."""
    if node.op_type != "Conv" or node.inputs.count(value) != 1 or node.inputs[0] is not value:
        return ()
    kernel, strides, pads = (node.attributes.get_ints(name, ()) for name in ("kernel_shape", "strides", "pads"))
    if not kernel or any(size != 1 for size in kernel) or all(step == 1 for step in strides):
        return ()
    automatic = node.attributes.get_string("auto_pad", "") not in ("", "NOTSET", "VALID")
    return () if any(pads) or automatic else tuple(strides)


EPILOGUE: Final = (
    *("Relu", "Clip", "LeakyRelu", "PRelu", "Sigmoid", "HardSwish", "Gelu", "Tanh", "Elu", "Mish"),
    *("Abs", "Sqrt", "Round", "Neg"),
)
"""Activations that a Conv or linear layer computes behind its sum."""

GATES: Final = ("Sigmoid",)
"""Functions f of ``x * f(x)`` that it computes as one."""

CONSTANT_STEPS: Final = ("Add", "Mul", "Sub", "Div", "Max")
"""Operators with a constant operand that it computes."""

STEM: Final = "stem of a mobile net, few channels and then depthwise: int8 loses accuracy there and gains little time"
"""Why such a stem stays float: `onednn-float-stem` says at what price."""

RULES: Final = (
    vocabulary.rule("onednn-conv", "Conv", Role.ANCHOR,
        "Conv with dequantized data and int8 weights runs on int8, with its whole epilogue, and writes bytes or float",
        requires=WEIGHTED),
    vocabulary.rule("onednn-linear", "Gemm MatMul", Role.ANCHOR,
        "a linear layer with int8 weights runs on int8, with bias and epilogue, and writes bytes or float",
        requires=(*WEIGHTED, Requirement.UNIT_ALPHA, Requirement.NO_TRANS_A, Requirement.WEIGHT_RANK_2)),
    vocabulary.rule("onednn-residual", "Add", Role.BINARY,
        "Q on both inputs of a residual Add, none between it and its Relu (3.5x; without Q on the branch 3 Adds more)",
        data_inputs=None, requires=(Requirement.NO_CONSTANT,)),
    vocabulary.rule("onednn-mul", "Mul", Role.BINARY,
        "a product of two values reads and writes bytes in one pass", data_inputs=None,
        requires=(Requirement.NO_CONSTANT,)),
    vocabulary.rule("onednn-concat", "Concat", Role.CONCAT,
        "Concat of values of one scale moves bytes; of several, each is requantized in a pass of its own",
        data_inputs=None),
    vocabulary.rule("onednn-average-pool", "GlobalAveragePool AveragePool", Role.UNARY,
        "an average pool reads and writes bytes; without Q behind it the Conv behind it runs in float"),
    vocabulary.rule("onednn-moves",
        "MaxPool Reshape Transpose Flatten Squeeze Unsqueeze DepthToSpace SpaceToDepth Slice Split "
        "Gather Expand Tile", Role.PASS_THROUGH,
        "operators that move bytes keep the scale; a Q behind them would requantize in a pass of its own"),
    vocabulary.rule("onednn-resize", "Resize", Role.PASS_THROUGH,
        "Resize moves bytes in nearest mode", requires=(Requirement.RESIZE_NEAREST,)),
    vocabulary.rule("onednn-epilogue", EPILOGUE, Role.ACTIVATION,
        "an activation is part of the kernel before it; with Q in between it is a pass of its own (2.8x for 2.4x)"),
    vocabulary.rule("onednn-float-activations",
        "HardSigmoid Softplus Exp Log Erf Selu Celu ThresholdedRelu Softsign Swish QuickGelu "
        "FastGelu BiasGelu Reciprocal Pow Min Max Sum Mean Sub Div", Role.ISLAND,
        "these are float passes of their own between integer kernels", data_inputs=None),
    vocabulary.rule("onednn-float-passes",
        "ReduceMean ReduceMax ReduceSum GlobalMaxPool Pad Identity Dropout Cast LRN "
        "BatchNormalization ConvTranspose", Role.ISLAND,
        "these run in float between dequantize and quantize; ConvTranspose is float whatever its types"),
    vocabulary.rule("onednn-float",
        "LayerNormalization InstanceNormalization GroupNormalization SimplifiedLayerNormalization "
        "RMSNormalization SkipLayerNormalization LpNormalization MeanVarianceNormalization Softmax "
        "LogSoftmax LSTM GRU RNN Attention MultiHeadAttention Einsum TopK Where", Role.FLOAT,
        "quantizing around these does not pay"),
)  # fmt: skip

FACTS: Final = (
    ("moves-keep-grid",
        "behind an operator that moves bytes stands no Q: it would requantize in a pass of its own (5 %)"),
    ("onednn-tiles-slow-exponential",
        "kernels for matrix tiles are slow at an exponential: a Max holds it apart (a SiLU detector 2.4x for 1.9x)"),
    ("onednn-deferred-q", "Q belongs behind the whole epilogue: 2.74x for 2.02x on a SiLU detector, and 2 dB more"),
    ("onednn-uint8-weights-float", "a Conv with uint8 weights runs in float"),
    ("onednn-clip-on-weights-float", "a Conv whose weights pass a Clip runs in float"),
    ("onednn-qoperator-per-channel-wrong", "QLinearConv with scales by channel does not import, or is silently wrong"),
    ("onednn-strides-behind-dequantize-float",
        "pointwise Convs that stride over a value they alone read run in float; behind a MaxPool of 1x1 they do not"),
    ("onednn-float-stem",
        "a mobile net's stem runs on int8, and stays float for accuracy (MobileNetV1, trained: 3.3 dB for no time)"),
    ("onednn-hard-sigmoid-slow", "HardSigmoid is a slow float node with two changes of layout; a Clip is none"),
)  # fmt: skip


_ROLES: Final = {op: each.role for each in RULES for op in each.op_types}
_ON_BYTES: Final = (Role.ANCHOR, Role.BINARY, Role.UNARY, Role.CONCAT)


def writes_float(view: GraphView, node: ir.Node, _: PlacementOptions) -> bool:
    """Whether an anchor had better write float.

    A Conv does where nothing that works on bytes on the way to a further layer reads it; in between a Q would be a pass
    less in front of the reader. A linear layer always does where not only further layers read it: the residual stream
    of a transformer is float.
    """
    if node.op_type != "Conv":
        return True
    passed = partial(_is_passed, view)
    readers = (reader for reader in _behind(view, node, passed) if not passed(reader))
    return not any(_works_on_bytes(reader) and _leads_on(view, reader) for reader in readers)


def _behind(view: GraphView, node: ir.Node, passes: Callable[[ir.Node], bool]) -> Iterator[ir.Node]:
    """Yields the nodes that read what a node writes, and those behind each of them that passes it on."""
    stack, seen = [node], {id(node)}
    while stack:
        for reader in (consumer.node for value in stack.pop().outputs for consumer in view.consumers(value)):
            if id(reader) not in seen:
                seen.add(id(reader))
                yield reader
                if passes(reader):
                    stack.append(reader)


def _is_passed(view: GraphView, node: ir.Node) -> bool:
    """Whether a node is part of an epilogue, or is once it is rewritten (HardSigmoid as Clip), or moves bytes."""
    if node.op_type in EPILOGUE or node.op_type == "HardSigmoid" or _ROLES.get(node.op_type) is Role.PASS_THROUGH:
        return True
    if node.op_type in CONSTANT_STEPS and any(map(view.is_constant, node.inputs)):
        return True
    return node.op_type == "Mul" and _is_gate(node)


def _works_on_bytes(node: ir.Node) -> bool:
    """Whether a node works on bytes, or does so once it is rewritten: Sum as Add, BatchNormalization as Conv."""
    return _ROLES.get(node.op_type) in _ON_BYTES or node.op_type in ("Sum", "BatchNormalization")


def _is_gate(product: ir.Node) -> bool:
    """Whether a product is ``x * f(x)``."""
    for gate in (v.producer() for v in product.inputs if v is not None):
        if gate is not None and gate.op_type in GATES and any(v is gate.inputs[0] for v in product.inputs):
            return True
    return False


def _leads_on(view: GraphView, node: ir.Node) -> bool:
    """Whether a layer with constant weights can be reached from a node, or is it."""
    reached = chain([node], _behind(view, node, lambda _: True))
    return any(_ROLES.get(n.op_type) is Role.ANCHOR and view.is_constant(optional(n, 1)) for n in reached)


_WHY_NOT: Final = missing()

ONEDNN: Final = Target(
    name="onednn",
    rules=RULES,
    absorbs=EPILOGUE,
    gates=GATES,
    constant_steps=CONSTANT_STEPS,
    longest_epilogue=4,
    float_output=("Conv", "Gemm", "MatMul"),
    bias="float",
    types=DataTypes(
        weights=(TensorProto.INT8,),
        only_these=True,
        largest_pair=INT16_SUM,
        even_channels=True,
        why="uint8 activations, int8 weights by channel, whose products cannot clip: what oneDNN's kernels take",
    ),
    float_forms=(
        *("collapse_clip", "collapse_hard_swish", "fold_scale", "collapse_layer_norm", "collapse_affine_norm"),
        *("cancel_transposes", "pool_from_mean", "fold_padding"),
    ),
    kernel_forms=(*("sum_to_add", "batch_norm_to_conv", "hard_sigmoid_to_clip", "fold_channel_shuffle"),),
    # No stem as SpaceToDepth: few channels are no slower there (without it 0.97 to 1.06 of the speed, median 1.01).
    own_forms=(share_subsampling, hold_apart),
    min_opset=14,  # HardSwish
    keeps_grid=True,
    formats=("qdq", "qop"),
    operators_per_tensor=True,
    facts=FACTS,
    hooks=Hooks(
        prove=None if _WHY_NOT else prove,
        time=None if _WHY_NOT else TimedRuntime(open_runner, in_calling_thread=True),
        why_unasked=_WHY_NOT,
        conform=conform,
        reclass=partial(leave_prefix_float, reason=STEM),
        writes_float=writes_float,
    ),
)

__all__ = ["ONEDNN"]
