"""Work of nodes on ONNX Runtime: the kernel that runs one, its products, elements and pieces, and their costs.

The kernels of ``ort-cpu`` fill up tiles of 16 output channels, gather the rows of a window one by one where the window
is larger than one element, and stream the weights of a linear layer from memory once a run. Found by the profiles that
``benchmarks/op_costs.py`` takes.

Costs are those of one machine, in ``profiles/``: ``amx`` of a Xeon with matrix tiles (AMX), ``vnni`` of an EPYC
with AVX512-VNNI alone, ``zen4`` of one that computes AVX-512 in two halves, so that Convs take twice as long and what
memory bounds hardly longer, ``avx2`` of one with neither. `kenosis_ort.tuning.measure` takes further ones, and took
``zen4``. Absolute times differ between processors; the ratios of float to integer are what decisions rest on. Those of
grouped Convs in ``vnni`` and of ``conv-grouped-odd`` in ``avx2`` were fitted to 440 shapes on an EPYC of another
family, and scaled: to its dense Convs for the one, for the other to the grouped Convs that were measured with AVX2.

``python benchmarks/cost_model.py`` holds estimates against measured nets.

ONNX Runtime's QLinearConv multiplies directly where all weights have zero point 0, and by im2col and the 8-bit matrix
product where they have another one. Weights stored one lower, with zero point -1, are the same weights, and all outputs
are the same bit for bit. On processors with matrix tiles (AMX) the second kernel is up to twice as fast for deep Convs;
without them it takes 1.1 to 1.5 times as long throughout. The profile of the machine that a file is made for decides.
Source: benchmarks/conv_paths.py.
"""

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.resources import files
from typing import Final

from kenosis_ort.graph.view import GraphView, ir, optional
from kenosis_ort.plan import Decision, EdgeRole, How, PlacementPlan
from kenosis_ort.runtime.session import Runner, open_session, session_options
from kenosis_ort.storage.writing import Scratch
from kenosis_ort.targets.profile import CostTable, HostProfile, Work

_log = logging.getLogger(__name__)


open_runner: Final = partial(open_session, spinning=True)
"""Opens a stock session at full optimization, as it is timed."""


def opener(source: str | bytes, *, threads: int, custom_op_libraries: Sequence[str]) -> Callable[[], Runner]:
    """Function that opens fresh sessions of a model, which the runtime optimizes once, for the first of them.

    Most of what opening takes is optimizing the graph (YOLOX-Nano in int8: 110 ms, of its optimized form 14 ms). What
    the runtime writes of that graph has the same kernels: over eleven nets in float and int8 its runs take between
    0.99 and 1.01 of the time, with equal outputs. A model in a file has large weights, which would be written again; it
    is opened as it is, and so is what the runtime refuses, whose sessions then say why.
    """
    optimized = b"" if isinstance(source, bytes) else None  # not known yet, or never to be
    open_timed = partial(open_runner, threads=threads, custom_op_libraries=custom_op_libraries)

    def opened() -> Runner:
        nonlocal optimized
        try:
            if optimized:
                return open_timed(optimized, optimize=False)
            if optimized is not None:
                with Scratch("optimized") as folder:
                    options = session_options(threads=threads, spinning=True)
                    options.optimized_model_filepath = str(folder / "model.onnx")
                    runner = open_timed(source, options=options)
                    optimized = (folder / "model.onnx").read_bytes()
                return runner
        except Exception as error:  # the runtime raises several unrelated classes, all of them plain exceptions
            _log.info("not opened in optimized form: %s", error)
            optimized = None
        return open_timed(source)

    return opened


SHIFTED: Final = -1
CLEAR: Final = 1.12
"""By how much the second kernel has to be estimated faster: below that it lost as often as it won when measured."""
_BUFFERS: Final = 1 << 24
_FAR: Final = 5.5e-4
"""Bytes that the second kernel gathers and sums up, of a picture, which near caches hold, and microseconds a byte more.

Measured on a Xeon with AMX, runtime 1.32.0: 128 to 64 channels, 3x3, gain 1.23 at 28x28 places (1 MB), 0.92 at 112x112
(18 MB), 0.37 at 224x224 (71 MB); 512 to 512, 1x1, 1.61 at 80x80 (13 MB), 0.54 at 112x112 (26 MB).
"""
_USUAL: Final = 14 * 14
"""Positions of a picture of unknown size."""


def with_matrix_products(
    plan: PlacementPlan, view: GraphView, keep: Collection[str], costs: CostTable
) -> PlacementPlan:
    """The plan with the weights of Convs that gain by the matrix product stored one lower.

    Args:
        plan: The plan.
        view: Its model.
        keep: Names of weights that are stored as they are.
        costs: What the kernels cost on the machine that the file is made for.
    """
    by_weight: dict[str, list[Decision]] = {}
    for d in plan.decisions:
        if d.role is EdgeRole.WEIGHT and d.how is How.OWN and d.edge.value not in keep:
            by_weight.setdefault(d.edge.value, []).append(d)
    chosen = {name for name, decisions in by_weight.items() if all(_gains(d, view, costs) for d in decisions)}
    if not chosen:
        return plan
    why = f"stored with zero point -1, for the kernel of the matrix product, which is faster on '{costs.profile.name}'"
    decisions = tuple(
        replace(d, zero_point=SHIFTED, reason=f"{d.reason}; {why}")
        if d.edge.value in chosen and d.role is EdgeRole.WEIGHT
        else d
        for d in plan.decisions
    )
    return replace(plan, decisions=decisions)


def _gains(decision: Decision, view: GraphView, costs: CostTable) -> bool:
    node = view.node(decision.edge.consumer)
    weight = view.graph.initializers.get(decision.edge.value)
    if node is None or weight is None or node.op_type != "Conv" or node.attributes.get_int("group", 1) != 1:
        return False
    outputs, inputs, *window = view.content(weight).shape
    work = costs.work(view, node) or conv_work(pixels=_USUAL, inputs=inputs, outputs=outputs, window=window)
    direct, product = costs.integer_us(work), costs.shifted_us(work)
    # All of a picture is gathered, and its sums of four bytes kept, before they are brought to eight bits.
    buffers = (work.reads if work.pieces else 0) + 4 * work.elements
    far = _FAR * max(0, buffers - _BUFFERS)
    return direct is not None and product is not None and (product + far) * CLEAR < direct


_TILE: Final = 16
_STRIDED: Final = 2  # times as long an element takes that is gathered without its neighbour
_MATRIX: Final = 2
_ALIGNED: Final = 4  # bytes; a window whose rows are no multiple of it is packed byte by byte
_NEAR: Final = 1 << 17
"""Weights of a matrix that the processor's near cache still holds at the next run."""

_NOTHING: Final = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout", "Shape", "Constant"})
CLASSES: Final = {
    "Add": "add", "Sub": "add", "Sum": "add", "Max": "add", "Min": "add", "Mean": "add",
    "Mul": "mul", "Div": "mul", "PRelu": "mul", "Abs": "mul", "Neg": "mul", "Sqrt": "mul", "Reciprocal": "mul",
    "Exp": "mul", "Floor": "mul", "Ceil": "mul", "Round": "mul", "Cast": "mul",
    "Relu": "clip", "Clip": "clip", "LeakyRelu": "leaky-relu",
    "Sigmoid": "sigmoid", "Tanh": "sigmoid", "QuickGelu": "sigmoid", "Swish": "sigmoid",
    "HardSigmoid": "hard-sigmoid", "HardSwish": "hard-sigmoid",
    "Erf": "erf", "Gelu": "erf", "BiasGelu": "erf", "FastGelu": "erf",
    "BatchNormalization": "batch-norm",
    "LayerNormalization": "norm", "RMSNormalization": "norm", "SimplifiedLayerNormalization": "norm",
    "InstanceNormalization": "norm", "GroupNormalization": "norm", "LpNormalization": "norm",
    "MeanVarianceNormalization": "norm", "SkipLayerNormalization": "skip-norm",
    "Concat": "concat", "Split": "concat", "Slice": "concat", "Pad": "concat", "Expand": "concat", "Tile": "concat",
    "Gather": "concat", "Transpose": "transpose",
    "Resize": "resize", "Upsample": "resize",
}  # fmt: skip
"""Kernels by the operator where elements written are all that counts."""
_SEQUENCE: Final = 3
_PICTURE: Final = 4
DIRECT: Final = "direct"
PRODUCT: Final = "matrix product"
"""The kernels of an integer Conv, as reports call them."""
_FOUR: Final = 4  # channels that the direct kernel multiplies at once
_POOLS: Final = {"MaxPool": "max-pool", "AveragePool": "average-pool"}


def work_of(view: GraphView, node: ir.Node) -> Work | None:
    """Work of a node, None where shapes that matter are not known.

    A first dimension without a number counts as 1: the batch.

    Args:
        view: The prepared model.
        node: One of its nodes.
    """
    if node.op_type in _NOTHING:
        return Work("nothing")
    out = view.shape_of_one(node.outputs[0]) if node.outputs else None
    if out is None:
        return None
    if node.op_type in _COUNTS:
        return _COUNTS[node.op_type](view, node, out)
    elements = math.prod(out)
    if node.op_type == "SpaceToDepth":
        return Work("transpose", elements=elements, reads=elements)
    if node.op_type == "DepthToSpace":
        return Work("transpose", elements=elements, pieces=elements)
    return Work(CLASSES.get(node.op_type, "other"), elements=elements)


def conv_work(
    *, pixels: int, inputs: int, outputs: int, groups: int = 1, window: Sequence[int] = (1, 1), stride: int = 1
) -> Work:
    """Work of a Conv.

    Args:
        pixels: Positions written, batch included.
        inputs: Input channels.
        outputs: Output channels.
        groups: Groups of channels.
        window: Size of the window along each axis.
        stride: The largest along any axis.
    """
    taps = math.prod(window)
    read, written = inputs // groups, outputs // groups
    macs = pixels * outputs * read * taps
    elements = pixels * outputs
    if groups > 1 and read == 1 and written == 1:
        name = "conv-depthwise" if outputs % _TILE == 0 else "conv-depthwise-odd"
        return Work(name, macs, macs, elements, pixels * taps, macs, outputs * taps)
    products = pixels * groups * _filled(written) * read * taps
    rows = pixels * groups * math.prod(window[:-1])
    reads, weights = pixels * inputs * taps, outputs * read * taps
    if groups > 1 and (written % _TILE or read % _TILE):
        # Float kernels in blocks do not take it: a picture is packed into tiles row by row, between strides element by
        # element. Integer ones gather the channels of a group place by place.
        reads = (reads + _TILE * math.isqrt(pixels) * inputs * taps) * (_STRIDED if stride > 1 else 1)
        return Work("conv-grouped-odd", macs, products, elements, pixels * groups * taps, reads, weights)
    if groups > 1:
        return Work("conv-grouped", macs, products, elements, rows, reads, weights)
    second = not has_direct_kernel(inputs, outputs)
    if taps == 1 and stride == 1:
        return Work("conv-pointwise", macs, products, elements, 0, reads, weights, second)
    if read * taps % _ALIGNED:
        return Work("conv-few-channels", macs, products, elements, rows, reads, weights)
    return Work("conv-dense", macs, products, elements, rows, reads, weights, second)


def has_direct_kernel(inputs: int, outputs: int, groups: int = 1) -> bool:
    """Whether the runtime has its direct kernel for an integer Conv, weights with zero point 0 supposed.

    Others are gathered (im2col) and multiplied by the 8-bit matrix product. Holds for x86-64 with AVX512; processors
    with AVX2 alone ask for eight output channels at a time. Source: ``MlasConvSymPackWSize`` of ONNX Runtime.

    Args:
        inputs: Input channels, of all groups.
        outputs: Output channels, of all groups.
        groups: Groups of channels.
    """
    if groups > 1:
        return inputs == outputs == groups and groups % _TILE == 0
    return outputs >= _TILE and inputs % _FOUR == outputs % _FOUR == 0


def linear_work(*, lines: int, rows: int, columns: int) -> Work:
    """Work of a linear layer.

    Args:
        lines: Lines of data.
        rows: Rows of the constant matrix.
        columns: Columns of it.
    """
    name = "linear-one" if lines == 1 else "linear"
    weights = rows * columns
    read = weights if lines > 1 or weights > _NEAR else 0
    return Work(name, lines * weights, lines * rows * _filled(columns), lines * columns, read, 0, weights)


def pool_work(shape: Sequence[int], *, taps: int, reads: int) -> Work:
    """Work of a pool over windows; where channels do not fill blocks, its kernel takes them one by one.

    Args:
        shape: What it writes, batch and channels first.
        taps: Elements of a window.
        reads: Elements of its input.
    """
    elements = math.prod(shape)
    in_blocks = len(shape) == _PICTURE and shape[1] % _TILE == 0
    products = elements * taps
    return Work("max-pool", 0, products, elements, 0 if in_blocks else products, reads)


def softmax_work(shape: Sequence[int], axis: int) -> Work:
    """Work of a Softmax: its pieces are the rows that it normalizes; along other axes it transposes twice.

    Args:
        shape: Its output's.
        axis: Along which it normalizes.
    """
    elements, axis = math.prod(shape), axis % max(len(shape), 1)
    rows = elements // max(shape[axis], 1) if shape else 1
    return Work("softmax", elements=elements, pieces=rows, reads=0 if axis == len(shape) - 1 else elements)


def _pool(view: GraphView, node: ir.Node, out: tuple[int, ...]) -> Work | None:
    read = view.shape_of_one(node.inputs[0])
    if read is None:
        return None
    if node.op_type not in _POOLS:  # over all of a picture
        return Work("global-pool", elements=math.prod(read))
    taps = math.prod(node.attributes.get_ints("kernel_shape", ()))
    return replace(pool_work(out, taps=taps, reads=math.prod(read)), shape_class=_POOLS[node.op_type])


def _conv(view: GraphView, node: ir.Node, out: tuple[int, ...]) -> Work | None:
    data, weight = view.shape_of_one(node.inputs[0]), view.shape_of_one(node.inputs[1])
    if weight is None or data is None or len(out) < 3:
        return None
    window, groups = weight[2:], node.attributes.get_int("group", 1)
    if node.op_type == "ConvTranspose":
        macs = math.prod(data) * (out[1] // groups) * math.prod(window)
        return Work("conv-transpose", macs, macs, math.prod(out))
    pixels = out[0] * math.prod(out[2:])
    stride = max(node.attributes.get_ints("strides", (1,)))
    return conv_work(pixels=pixels, inputs=data[1], outputs=out[1], groups=groups, window=window, stride=stride)


def _product(view: GraphView, node: ir.Node, out: tuple[int, ...]) -> Work | None:
    weight = node.inputs[1]
    if not out or weight is None:
        return None
    if view.is_constant(weight) and view.rank(weight) == _MATRIX:
        matrix = view.content(weight).shape
        rows = matrix[1 if node.op_type == "Gemm" and node.attributes.get_int("transB", 0) != 0 else 0]
        return linear_work(lines=math.prod(out[:-1]), rows=rows, columns=out[-1])
    data = view.shape_of_one(node.inputs[0])
    if data is None:
        return None
    transposed = node.op_type == "Gemm" and node.attributes.get_int("transA", 0) != 0
    macs = math.prod(out) * data[0 if transposed else -1]
    return Work("matmul", macs, macs, math.prod(out))


def _attention(view: GraphView, node: ir.Node, out: tuple[int, ...]) -> Work | None:
    """Scores and what they weigh; the layers before them are nodes of their own."""
    keys = view.shape_of_one(optional(node, 1))
    elements, flat = math.prod(out), len(out) == _SEQUENCE
    if len(out) < _SEQUENCE:
        return None
    heads = node.attributes.get_int("num_heads", node.attributes.get_int("q_num_heads", 1)) if flat else 1
    positions = out[-2] if keys is None or len(keys) != len(out) else keys[-2]
    scores = math.prod(out[:-1]) * heads * positions
    macs = 2 * elements * positions
    return Work("matmul", macs, macs, elements + 2 * scores)  # scores are written twice, the second time normalized


def _recurrent(view: GraphView, node: ir.Node, _: tuple[int, ...]) -> Work | None:
    data, weight = view.shape_of_one(node.inputs[0]), view.shape_of_one(node.inputs[1])
    if data is None or weight is None or len(data) != 3 or len(weight) != 3:
        return None
    directions, gates, read = weight
    hidden = node.attributes.get_int("hidden_size", 0)
    macs = data[0] * data[1] * directions * gates * (read + hidden)
    return Work("recurrent", macs, macs, data[0] * data[1] * directions * hidden, directions * gates * (read + hidden))


def _filled(channels: int) -> int:
    """The channels of full tiles."""
    return -(-channels // _TILE) * _TILE


_COUNTS: Final[Mapping[str, Callable[[GraphView, ir.Node, tuple[int, ...]], Work | None]]] = {
    **dict.fromkeys(("Conv", "ConvTranspose"), _conv),
    **dict.fromkeys(("Gemm", "MatMul"), _product),
    **dict.fromkeys(("Attention", "MultiHeadAttention"), _attention),
    **dict.fromkeys((*_POOLS, "GlobalAveragePool", "GlobalMaxPool", "ReduceMean", "ReduceSum", "ReduceMax"), _pool),
    **dict.fromkeys(
        ("Softmax", "LogSoftmax"), lambda _, node, out: softmax_work(out, node.attributes.get_int("axis", -1))
    ),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrent),
}
"""How a node is counted, by operator, where elements written are not all."""


_FOLDER: Final = files(__package__) / "profiles"
PROFILES: Final = tuple(
    HostProfile.parse((_FOLDER / f"{name}.json").read_text("utf-8")) for name in ("vnni", "amx", "avx2", "zen4")
)
"""The machines that come with the package; where nothing is known of a processor, the first whose products are exact or
not, as its own are."""

ORT_CPU_COSTS: Final = CostTable(
    PROFILES[0],
    work=work_of,
    fused=frozenset({"clip", "leaky-relu", "hard-sigmoid", "add"}),
    blocked=frozenset({
        "conv-pointwise", "conv-dense", "conv-few-channels", "conv-depthwise", "conv-depthwise-odd", "conv-grouped",
        "max-pool", "average-pool", "global-pool",
    }),
    passes_blocks=frozenset({"add", "mul", "clip", "leaky-relu", "hard-sigmoid", "sigmoid", "concat"}),
    gates=frozenset({"Sigmoid"}),
)  # fmt: skip
