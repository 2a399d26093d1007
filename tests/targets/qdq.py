"""Hand-written QDQ graphs, and what the installed runtime makes of them.

`QdqGraph` builds a graph call by call; every call returns the name of the value it made. Activations are float
values that went through a QuantizeLinear/DequantizeLinear pair; weights are DequantizeLinear of an int8 (or other)
initializer; biases are DequantizeLinear of an int32 initializer of scale ``input_scale * weight_scale``.

`kernels` loads a model at ORT_ENABLE_ALL and reads the optimized graph back; `compute_ops` is its short form;
`snr_db` and `largest_difference` compare its outputs with those of the same model without any optimization.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from kenosis_ort.graph.constants import base_op
from kenosis_ort.verify import Status, verify_fusion
from tests import models
from tests.flow.support import sqnr_db
from tests.verify.expect import check_complete

Array = npt.NDArray[Any]
IR_VERSION = 10
MS = "com.microsoft"
STEP = 8 / 255  # default step of an activation: 256 levels over -4..4
RELU_STEP = 4 / 255  # the same for 0..4
FLOAT_ONLY_DB = 100.0  # outputs that differ by float rounding only
VERSION = tuple(int(part) for part in ort.__version__.split(".")[:2])
PAIR = ("QuantizeLinear", "DequantizeLinear")
LAYOUT = frozenset({*PAIR, "Transpose", "ReorderInput", "ReorderOutput"})


def _middle(dtype):
    info = np.iinfo(dtype)
    return (int(info.min) + int(info.max) + 1) // 2


class QdqGraph:
    """Builds one QDQ graph.

    Args:
        opset: Version of the ONNX operator set.
        act: Integer type of the activations.
        weight: Integer type of the weights.
        seed: Seed of the random weights.
    """

    def __init__(self, *, opset=17, act=np.uint8, weight=np.int8, seed=0):
        self.net = models.Net(opset=opset, seed=seed, suffix="")
        self.act = act
        self.weight = weight
        self._scales: dict[str, Array] = {}

    def model(self, *outputs):
        """Returns the model with the given float values as graph outputs, unchecked: the runtime is to judge it."""
        self.net.outputs = [helper.make_tensor_value_info(o, TensorProto.FLOAT, None) for o in outputs]
        opsets = [helper.make_opsetid("", self.net.opset), helper.make_opsetid(MS, 1)]
        return helper.make_model(self.net.graph("qdq"), opset_imports=opsets, ir_version=IR_VERSION)

    # ---- values -----------------------------------------------------------------------------------------------

    def input(self, shape=(1, 16, 12, 12), elem_type=TensorProto.FLOAT):
        """Adds a graph input."""
        return self.net.input(f"x_{len(self.net.inputs)}", shape, elem_type)

    def act_input(self, shape=(1, 16, 12, 12), scale=STEP):
        """Adds a graph input with a Q/DQ pair behind it."""
        return self.q(self.input(shape), scale)

    def const(self, value, dtype=np.float32):
        """Adds an initializer; the element type of a numpy value is kept."""
        return self.net.const(value if isinstance(value, (np.ndarray, np.generic)) else np.array(value, dtype))

    def ints(self, *values):
        """Adds an int64 vector initializer."""
        return self.const(np.array(values, np.int64))

    def floats(self, *values):
        """Adds a float32 vector initializer."""
        return self.const(np.array(values, np.float32))

    def random(self, *shape, spread=0.5):
        """Returns float32 normal values of the given shape."""
        return (self.net.rng.standard_normal(shape) * spread).astype(np.float32)

    def op(self, op_type, *inputs, domain="", **attributes):
        """Adds a node with one output."""
        return self.net.op(op_type, inputs, domain=domain, **attributes)

    def ops(self, op_type, *inputs, count, domain="", **attributes):
        """Adds a node with ``count`` outputs."""
        first = self.net.op(op_type, inputs, outputs=count, domain=domain, **attributes)
        return [first, *(f"{first}_{i}" for i in range(1, count))]

    def q(self, value, scale=STEP, zero_point=None, *, act=None, rank=0):
        """Adds a Q/DQ pair and returns the DQ output.

        Args:
            value: The float value.
            scale: Step of the quantization; the default covers -4..4.
            zero_point: The default is the middle of the type's range (uint8: 128, int8: 0).
            act: Integer type, the graph's by default.
            rank: 0 for scalar parameters, 1 for shape ``[1]``.
        """
        dtype = self.act if act is None else act
        zp = _middle(dtype) if zero_point is None else zero_point
        grid = self.const(np.full((1,) * rank, scale, np.float32)), self.const(np.full((1,) * rank, zp, dtype))
        out = self.op("DequantizeLinear", self.op("QuantizeLinear", value, *grid), *grid)
        self._scales[out] = np.asarray(scale, np.float32)
        return out

    def relu_q(self, value, scale=RELU_STEP, *, rank=0):
        """Adds a Q/DQ pair for values from 0 up: the zero point is the lowest quantized value."""
        return self.q(value, scale, int(np.iinfo(self.act).min), rank=rank)

    # ---- constants behind DequantizeLinear --------------------------------------------------------------------

    def dq_weight(self, array, *, axis=0, zero_point=None):
        """Adds a weight behind DequantizeLinear; ``axis=None`` is per-tensor.

        Only half of the integer range is used, so that kernels with 16-bit intermediate sums cannot saturate and
        the numbers are the same on every CPU.
        """
        info = np.iinfo(self.weight)
        zp = _middle(self.weight) if zero_point is None else zero_point
        others = tuple(i for i in range(array.ndim) if i != axis) if axis is not None else None
        span = np.asarray(np.abs(array).max(axis=others), np.float64)
        scale = np.asarray(span / (min(info.max - zp, zp - info.min) // 2), np.float32)
        shape = [1] * array.ndim
        if axis is not None:
            shape[axis] = -1
        data = np.clip(np.rint(array / scale.reshape(shape)) + zp, info.min, info.max).astype(self.weight)
        out = self._dequantized(data, scale, np.full(scale.shape, zp, self.weight), axis)
        self._scales[out] = scale
        return out

    def _dequantized(self, data, scale, zero_point, axis):
        grid = self.const(data), self.const(scale), self.const(zero_point)
        return self.op("DequantizeLinear", *grid, **({} if axis is None else {"axis": axis}))

    def dq_constant(self, array, *, dtype=None):
        """Adds a per-tensor quantized constant operand that covers -4..4."""
        kind = self.act if dtype is None else dtype
        info = np.iinfo(kind)
        zp = _middle(kind)
        data = np.clip(np.rint(np.asarray(array, np.float64) / STEP) + zp, info.min, info.max)
        return self._dequantized(np.asarray(data, kind), np.float32(STEP), np.array(zp, kind), None)

    def dq_bias(self, array, value, weight, *, factor=1.0):
        """Adds an int32 bias of scale ``input_scale * weight_scale * factor`` behind DequantizeLinear."""
        scale = np.asarray(self._scales[value] * self._scales[weight] * np.float32(factor), np.float32)
        data, zero_point = np.rint(array / scale).astype(np.int32), np.zeros(scale.shape, np.int32)
        return self._dequantized(data, scale, zero_point, 0 if scale.ndim else None)

    # ---- compute nodes with constant weights ------------------------------------------------------------------

    def conv(self, value, cin=16, cout=16, *, kernel=3, group=1, transpose=False, axis=0, **how):
        """Adds a Conv or ConvTranspose of stride 1 with random weights that keeps the spatial size.

        Args:
            value: Input, an NCHW float value (normally a DQ output).
            cin: Input channels.
            cout: Output channels.
            kernel: Edge of the square kernel.
            group: Groups; ``cin`` for a depthwise Conv.
            transpose: ConvTranspose instead of Conv.
            axis: Channel axis of the weight scales, ``None`` for per-tensor.
            how: What `_operands` takes.
        """
        shape = (cin, cout // group) if transpose else (cout, cin // group)
        array = self.random(*shape, kernel, kernel, spread=1.0 / np.sqrt(cin // group * kernel * kernel))
        inputs = self._operands(value, array, cout, axis=axis, **how)
        op_type = "ConvTranspose" if transpose else "Conv"
        return self.op(op_type, *inputs, kernel_shape=[kernel] * 2, pads=[kernel // 2] * 4, group=group)

    def gemm(self, value, k=32, n=16, *, transposed=True, axis=0, alpha=1.0, beta=1.0, **how):
        """Adds a Gemm with random weights; arguments as in `conv`, ``axis`` counts on the stored weight."""
        array = self.random(*((n, k) if transposed else (k, n)), spread=1.0 / np.sqrt(k))
        inputs = self._operands(value, array, n, axis=axis, **how)
        return self.op("Gemm", *inputs, transB=int(transposed), alpha=alpha, beta=beta)

    def matmul(self, value, k=32, n=16, *, bias="none", axis=1, weight="dq"):
        """Adds a MatMul with a random constant right operand, and an Add behind it where a bias is asked for."""
        array = self.random(k, n, spread=1.0 / np.sqrt(k))
        left, right, *added = self._operands(value, array, n, weight=weight, bias=bias, axis=axis)
        product = self.op("MatMul", left, right)
        return self.op("Add", product, *added) if added else product

    def _operands(self, value, array, outputs, *, axis, weight="dq", zero_point=None, bias="int32", bias_factor=1):
        """What a layer reads: a value, a weight and a random bias.

        Args:
            value: The value.
            array: The weight.
            outputs: Number of biases.
            axis: Channel axis of the weight scales.
            weight: ``"dq"`` or ``"float"``.
            zero_point: Zero point of the weight, the middle of the type by default.
            bias: ``"int32"``, ``"float"`` or ``"none"``.
            bias_factor: Error of the int32 bias scale; 1 is right.
        """
        held = self.const(array) if weight == "float" else self.dq_weight(array, axis=axis, zero_point=zero_point)
        inputs, biases = [value, held], self.random(outputs)
        if bias == "float" or (bias == "int32" and not self._scales.keys() >= set(inputs)):
            inputs.append(self.const(biases))
        elif bias == "int32":
            inputs.append(self.dq_bias(biases, value, held, factor=bias_factor))
        return inputs

    def clip(self, value, low, high):
        """Adds a Clip with constant bounds."""
        return self.op("Clip", value, self.const(low), self.const(high))


def build(make, **options):
    """Returns the model whose outputs ``make`` returns; ``options`` go to `QdqGraph`."""
    graph = QdqGraph(**options)
    made = make(graph)
    return graph.model(*([made] if isinstance(made, str) else made))


def conv_then(make, **options):
    """Returns ``input -> Q/DQ -> Conv -> make(graph, conv output)``, the frame of most graphs here."""
    return build(lambda g: make(g, g.conv(g.act_input())), **options)


# ---- examples -------------------------------------------------------------------------------------------------

Make = Callable[[QdqGraph], str | list[str]]
Step = Callable[[QdqGraph, str], str]
IMAGE, LINES = (1, 16, 12, 12), (4, 32)
ANY = "any"
FLOAT_CONV = "a float Conv"
BYTES = "Q and DQ around"
ISLAND = "float with Q and DQ around"


def step(op_type, *further, **attributes):
    """An operator of one value; further inputs are names, arrays, or vectors of ints."""

    def made(g, value):
        more = [each if isinstance(each, str) else g.const(np.asarray(each)) for each in further]
        return g.op(op_type, value, *more, **attributes)

    return made


def alone(make, *q, q_behind=True, shape=IMAGE):
    """A step of a quantized input, with Q behind it unless told otherwise."""

    def made(g):
        y = make(g, g.act_input(shape))
        return g.q(y, *q) if q_behind else y

    return made


PRODUCERS = {
    "QLinearConv": (IMAGE, lambda g, x: g.conv(x)),
    "QGemm": (LINES, lambda g, x: g.gemm(x)),
    "QLinearMatMul": (LINES, lambda g, x: g.matmul(x)),
    **{f"QLinear{op}": (IMAGE, lambda g, x, op=op: g.op(op, x, g.act_input())) for op in ("Add", "Mul")},
    "QLinearConcat": (IMAGE, lambda g, x: g.op("Concat", x, g.act_input(), axis=1)),
    "QLinearAveragePool": (IMAGE, step("AveragePool", kernel_shape=[2, 2])),
    "QLinearGlobalAveragePool": (IMAGE, step("GlobalAveragePool")),
    "QLinearSigmoid": (IMAGE, step("Sigmoid")),
    "QLinearLeakyRelu": (IMAGE, step("LeakyRelu", alpha=0.1)),
}
"""Integer kernels, with the shape of what they read and what makes them between DQ and Q."""


def produced(g, kernel):
    shape, make = PRODUCERS[kernel]
    return make(g, g.act_input(shape))


class Case(NamedTuple):
    """A graph, and what the installed runtime makes of it.

    Attributes:
        kernels: Operator types of the optimized graph but for Q, DQ and layout, apart by spaces; or all of them in
            order, apart by " > "; or `ANY`; or `FLOAT_CONV`: no Conv is integer; or `BYTES` behind the name of an
            operator: it stands alone between one Q and DQ; or `ISLAND`: it does so between two of each, in float.
        make: Makes the graph, returns its outputs.
        step: The most by which outputs may differ from the unoptimized model's: a step of the output, and rounding.
        exact: They differ by float rounding at most.
        weights: How many of its weights are integers, those included that are in the file.
        marks: Of the test.
        options: Of a `QdqGraph`.
    """

    kernels: str
    make: Make
    step: float | None = None
    exact: bool = False
    weights: int | None = None
    marks: Sequence[pytest.MarkDecorator] = ()
    options: Mapping[str, Any] = {}

    def check(self):
        """Fails where the runtime makes something else of it."""
        model = build(self.make, **self.options)
        if self.kernels.endswith(ISLAND):
            assert ordered(model) == ["Q", "DQ", self.kernels.split()[0], "Q", "DQ"]
            assert verify_fusion(model).float_nodes()
        elif " > " in self.kernels:
            assert ordered(model) == self.kernels.split(" > ")
        elif self.kernels.endswith(BYTES):
            assert [o for o in ordered(model) if o != "DQ"] == ["Q", self.kernels.split()[0]]
            assert not verify_fusion(model).float_nodes()
        elif self.kernels == FLOAT_CONV:
            assert {"QLinearConv", "Conv", "FusedConv"} & {*compute_ops(model)} in ({"Conv"}, {"FusedConv"})
        elif self.kernels != ANY:
            assert compute_ops(model) == sorted(self.kernels.split())
        assert self.weights is None or quantized_weights(model) == self.weights
        if self.step is not None:
            assert largest_difference(model) <= self.step * 1.01
        if self.exact:
            assert snr_db(model) > FLOAT_ONLY_DB


def each_case(examples):
    """One test a graph, named after its rule."""
    named = ((f"{rule}-{number}", case) for rule, found in examples.items() for number, case in enumerate(found))
    each = [pytest.param(case, id=name, marks=getattr(case, "marks", ())) for name, case in named]
    return pytest.mark.parametrize("case", each)


def since(version):
    return (pytest.mark.since(version),)


# ---- what the runtime makes of a model ------------------------------------------------------------------------


def optimized(model):
    """Returns the graph that the runtime executes at ORT_ENABLE_ALL."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "optimized.onnx"
        models.session(model, saved=path)
        return onnx.load(path)


def kernels(model):
    """Returns the nodes of the optimized graph in order."""
    return list(optimized(model).graph.node)


def op_types(model):
    """Returns the operator types of the optimized graph in order, without their domains."""
    return [k.op_type for k in kernels(model)]


def ordered(model):
    """Returns the operator types of the optimized graph in order, Q and DQ for short, but for the reorders of NCHWc."""
    short = dict(zip(PAIR, ("Q", "DQ"), strict=True))
    return [short.get(op_type, op_type) for op_type in op_types(model) if not op_type.startswith("Reorder")]


def compute_ops(model):
    """Returns the sorted operator types of the optimized graph without Q, DQ, Transpose and layout reorders.

    The proof is held against the same graph: it accounts for every kernel, and finds each under its source node.
    """
    graph = optimized(model).graph
    _check_proof(model, graph)
    return sorted(n.op_type for n in graph.node if n.op_type not in LAYOUT)


def _check_proof(model, graph):
    found = verify_fusion(model)
    check_complete(model, found)
    own = [k for k in found.kernels if k.kernel and k.absorbed_into is None and not k.graph]
    told = Counter(name for k in own for name in k.kernel.split(" + ")) + Counter(found.overhead)
    made = Counter(f"{n.domain}.{n.op_type}" if n.domain not in ("", "ai.onnx") else n.op_type for n in graph.node)
    bodies = Counter(k.kernel for k in found.kernels if k.graph)
    assert told - bodies == made - bodies, (told, made)
    for k in own:
        base = base_op(k.kernel.split(" + ")[-1].rpartition(".")[2])
        if k.status is Status.INTEGER:
            assert base == k.op_type or {base, k.op_type} == {"Gemm", "MatMul"}, k
            assert not k.reason or k.silently_quantized, k
        assert k.status is not Status.FLOAT or "QLinear" not in k.kernel, k


def quantized_weights(model):
    """Returns how many 8-bit initializers of two or more axes the optimized graph holds; the proof tells of them."""
    kinds = (TensorProto.INT8, TensorProto.UINT8)
    held, found = (
        sum(i.data_type in kinds and len(i.dims) > 1 for i in each.graph.initializer)
        for each in (model, optimized(model))
    )
    assert len(verify_fusion(model).silently_quantized()) == found - min(found, held)
    return found


def run(model, feeds, *, optimize=True):
    """Runs the model at ORT_ENABLE_ALL or without optimization."""
    return [np.asarray(a) for a in models.session(model, optimize=optimize).run(None, feeds)]


def random_feeds(model, seed=1):
    """Returns one sample for every graph input; ids are 0..7, symbolic axes 2 long."""
    symbols = {d.dim_param for info in model.graph.input for d in info.type.tensor_type.shape.dim}
    return models.feeds(model, 1, seed=seed, dims=dict.fromkeys(symbols, 2), high=8)[0]


def _both(model):
    feeds = random_feeds(model)
    pairs = zip(run(model, feeds), run(model, feeds, optimize=False), strict=True)
    return [(a.astype(np.float64), b.astype(np.float64)) for a, b in pairs]


def snr_db(model):
    """Returns the signal to difference ratio of the optimized against the unoptimized model in dB."""
    return min(sqnr_db(reference, actual) for actual, reference in _both(model))


def largest_difference(model):
    """Returns the largest absolute difference between the optimized and the unoptimized model."""
    return max(float(np.abs(actual - reference).max()) for actual, reference in _both(model))
