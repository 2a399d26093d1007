"""Small nets whose nodes are timed for the costs of ONNX Runtime's kernels on a machine.

Each node that is asked about stands where it stands in a net: between Convs, whose layout it meets, and beside many
others, so that its weights have left the near caches when its turn comes again.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort.targets.ort_cpu.work import CLASSES, SHIFTED, conv_work, linear_work, pool_work, softmax_work
from kenosis_ort.targets.profile import Form, Probe, Work

_LARGE: Final = 56  # size of pictures that only pools behind a stem read
_FEW: Final = 4  # channels at both ends of a branch
_FORMS: Final[tuple[Form, ...]] = ("float", "integer", "shifted")
_POOL: Final[dict[str, Any]] = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}


class _Net:
    """A net of independent branches.

    Args:
        form: Of the nodes: in float, in integer, or in integer with weights of another zero point.
    """

    def __init__(self, form: Form) -> None:
        self.form = form
        self.rng = np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.inputs: dict[str, list[int]] = {}
        self.outputs: list[str] = []
        self.asked: dict[str, Work] = {}

    def op(
        self, kind: str, *inputs: str, work: Work | None = None, elements: int = 0, domain: str = "", **attributes: Any
    ) -> str:
        """Adds a node; returns its output, which is its name too. One with work or elements is asked about."""
        name = f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=name, domain=domain, **attributes))
        if work is not None or elements:
            self.asked[name] = work or Work(CLASSES.get(kind, "other"), elements=elements)
        return name

    def out(self, kind: str, *inputs: str, **settings: Any) -> None:
        """Adds a node, as `op` does, whose output is one of the net's."""
        self.outputs.append(self.op(kind, *inputs, **settings))

    def constant(self, values: Any, dtype: Any = np.float32) -> str:
        name = f"c{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(values, dtype), name))
        return name

    def data(self, *shape: int) -> str:
        """Shared input of a shape."""
        name = "x" + "x".join(map(str, shape))
        self.inputs[name] = list(shape)
        return name

    def between(self, x: str) -> str:
        """Adds Q and DQ, but for nodes in float."""
        if self.form == "float":
            return x
        scale, zero = self.constant(0.05), self.constant(128, np.uint8)
        return self.op("DequantizeLinear", self.op("QuantizeLinear", x, scale, zero), scale, zero)

    def matrix(self, shape: Sequence[int], axis: int) -> str:
        """Weights in the net's form; ``axis`` has a scale a channel."""
        if self.form == "float":
            return self.constant(self.rng.normal(0, 0.1, shape))
        zero, scale = (SHIFTED if self.form == "shifted" else 0), np.full(shape[axis], 1e-3)
        stored = self.constant(self.rng.integers(-100, 100, shape) + zero, np.int8)
        zeros = self.constant(np.full(shape[axis], zero), np.int8)
        return self.op("DequantizeLinear", stored, self.constant(scale), zeros, axis=axis)

    def bias(self, channels: int) -> str:
        if self.form == "float":
            return self.constant(np.zeros(channels))
        scale = self.constant(np.full(channels, 0.05 * 1e-3))
        return self.op("DequantizeLinear", self.constant(np.zeros(channels), np.int32), scale, axis=0)

    def conv(
        self,
        x: str,
        inputs: int,
        outputs: int,
        *,
        k: int = 1,
        stride: int = 1,
        groups: int = 1,
        work: Work | None = None,
    ) -> str:
        """Adds a Conv, in float with a Relu; in integer a Relu is part of the Q behind it."""
        weight, bias = self.matrix((outputs, inputs // groups, k, k), 0), self.bias(outputs)
        pads: dict[str, Any] = {"pads": [k // 2] * 4, "strides": [stride] * 2, "kernel_shape": [k, k]}
        y = self.op("Conv", x, weight, bias, work=work, group=groups, **pads)
        return self.op("Relu", y) if self.form == "float" else self.between(y)

    def begin(self, channels: int, size: int) -> str:
        """The first value of a branch, as a Conv leaves it."""
        return self.conv(self.between(self.data(1, _FEW, size, size)), _FEW, channels)

    def end(self, x: str, channels: int) -> None:
        """Closes a branch that has the channels of a picture."""
        self.outputs.append(self.conv(x, channels, _FEW))

    def probe(self, **kernels: Work) -> Probe:
        """The probe."""
        made = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n, shape in self.inputs.items()]
        out = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in self.outputs]
        graph = helper.make_graph(self.nodes, "probe", made, out, self.weights)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
        feed = {n: self.rng.normal(1, 0.1, shape).astype(np.float32) for n, shape in self.inputs.items()}
        nodes = {name: (work, self.form) for name, work in self.asked.items()}
        return Probe(onnx.shape_inference.infer_shapes(model), feed, nodes, kernels)


ConvShape = tuple[int, int, int, int, int, int]
"""Input and output channels of a Conv, height and width of its picture, size of its window, stride, and groups."""


def probes() -> Iterator[Probe]:
    """Yields all nets, the most important first."""
    for form in _FORMS:
        yield _convs(form, _pointwise())
        yield _convs(form, _dense())
    for form in _FORMS[:2]:
        yield _convs(form, _depthwise())
        yield _convs(form, (*_STEMS, *_GROUPED))
        yield _linear(form)
        yield _between_convs(form)
    yield _plain()
    yield from _borders()


def _pointwise() -> Iterator[ConvShape]:
    for size, pairs in (
        (56, ((16, 64), (24, 96), (64, 16), (64, 64), (64, 256), (128, 64), (256, 64))),
        (28, ((32, 64), (32, 192), (144, 32), (128, 128), (128, 512), (256, 128), (512, 128))),
        (14, ((64, 64), (64, 384), (384, 64), (256, 256), (256, 1024), (480, 112), (512, 512), (1024, 256))),
        (7, ((160, 960), (320, 1280), (512, 512), (832, 256), (960, 160), (512, 2048), (2048, 512))),
    ):
        yield from ((inputs, outputs, size, 1, 1, 1) for inputs, outputs in pairs)


def _dense() -> Iterator[ConvShape]:
    for size, pairs in (
        (56, ((16, 16), (16, 64), (32, 32), (64, 64), (64, 192))),
        (28, ((32, 32), (64, 64), (96, 128), (128, 32), (128, 128), (192, 192))),
        (14, ((32, 128), (64, 64), (112, 224), (128, 128), (256, 256))),
        (7, ((160, 320), (256, 256), (512, 512))),
    ):
        yield from ((inputs, outputs, size, 3, 1, 1) for inputs, outputs in pairs)
    yield from ((32, 64, 56, 3, 2, 1), (128, 128, 28, 3, 2, 1), (256, 512, 28, 1, 2, 1))
    yield from ((16, 48, 28, 5, 1, 1), (32, 96, 14, 5, 1, 1))


def _depthwise() -> Iterator[ConvShape]:
    for c, size in ((32, 112), (64, 56), (96, 56), (144, 56), (144, 28), (192, 28), (240, 14), (384, 14), (576, 14),
                    (960, 7), (72, 28), (120, 28), (200, 14), (184, 14)):  # fmt: skip
        yield from ((c, c, size, k, step, c) for k, step in ((3, 1), (5, 1), (3, 2)) if step == 1 or size > 14)


_STEMS: Final[tuple[ConvShape, ...]] = (
    (3, 32, 224, 3, 2, 1), (3, 16, 112, 3, 2, 1), (3, 64, 112, 7, 2, 1), (3, 64, 56, 3, 1, 1), (3, 16, 32, 3, 1, 1),
    (1, 32, 28, 3, 1, 1), (6, 32, 56, 3, 1, 1),
)  # fmt: skip
_GROUPED: Final[tuple[ConvShape, ...]] = (
    (64, 64, 28, 1, 1, 4), (128, 128, 14, 1, 1, 4), (256, 256, 14, 3, 1, 16), (128, 128, 28, 3, 1, 8),
    (240, 240, 14, 1, 1, 3), (240, 240, 28, 1, 1, 3), (60, 60, 28, 1, 1, 3), (240, 60, 14, 1, 1, 3),
    (544, 136, 14, 1, 1, 4), (400, 100, 28, 1, 1, 4), (816, 204, 7, 1, 1, 4), (136, 544, 14, 1, 1, 4),
    (480, 480, 7, 1, 1, 3), (120, 480, 14, 1, 1, 3), (96, 96, 14, 3, 1, 12), (120, 120, 14, 3, 1, 5),
    (96, 96, 28, 3, 2, 12), (240, 240, 14, 3, 2, 30), (64, 64, 4, 3, 1, 8), (64, 64, 7, 5, 1, 16),
)  # fmt: skip


def _convs(form: Form, shapes: Iterable[ConvShape]) -> Probe:
    net = _Net(form)
    for inputs, outputs, size, k, stride, groups in shapes:
        pixels = (-(-size // stride)) ** 2
        work = conv_work(pixels=pixels, inputs=inputs, outputs=outputs, groups=groups, window=(k, k), stride=stride)
        first = inputs <= 2 * _FEW and groups == 1  # a stem reads the net's input
        x = net.between(net.data(1, inputs, size, size)) if first else net.begin(inputs, size)
        net.end(net.conv(x, inputs, outputs, k=k, stride=stride, groups=groups, work=work), outputs)
    return net.probe()


def _linear(form: Form) -> Probe:
    net = _Net(form)
    for lines in (1, 8, 32, 128, 197):
        for rows, columns in ((64, 64), (256, 256), (192, 768), (768, 192), (512, 1000)):
            x = net.between(net.op("Neg", net.data(lines, rows)))
            work = linear_work(lines=lines, rows=rows, columns=columns)
            net.out("Gemm", x, net.matrix((rows, columns), 1), net.bias(columns), work=work)
    return net.probe()


def _between_convs(form: Form) -> Probe:
    """Operators in the layout of a picture within a net."""
    net = _Net(form)
    for channels, size in ((32, 7), (64, 14), (64, 28), (128, 28), (64, 56), (64, 112)):
        count = channels * size * size
        first, pool = partial(net.begin, channels, size), _pool_work(channels, size)
        net.end(net.between(net.op("MaxPool", first(), work=pool, **_POOL)), channels)
        if size > _LARGE:
            continue
        net.end(net.between(net.op("Concat", first(), first(), axis=1, elements=2 * count)), 2 * channels)
        scales = net.constant([1, 1, 2, 2])
        twice: dict[str, Any] = {
            "mode": "nearest",
            "coordinate_transformation_mode": "asymmetric",
            "nearest_mode": "floor",
        }
        net.end(net.between(net.op("Resize", first(), "", scales, elements=4 * count, **twice)), channels)
        one = net.op("GlobalAveragePool", first(), work=Work("global-pool", elements=count))
        net.end(net.between(one), channels)
        if form == "float":
            net.end(net.op("AveragePool", first(), work=replace(pool, shape_class="average-pool"), **_POOL), channels)
            continue
        x = first()
        for kind in ("Add", "Mul"):
            net.end(net.between(net.op(kind, x, first(), elements=count)), channels)
        for kind in ("Sigmoid", "LeakyRelu"):
            net.end(net.between(net.op(kind, first(), elements=count)), channels)
        net.outputs.append(net.between(net.op("Transpose", x, perm=[0, 2, 3, 1], elements=count)))
    return net.probe()


def _pool_work(channels: int, size: int) -> Work:
    """Work of a MaxPool as `_POOL` says over a picture."""
    half = -(-size // 2)
    return pool_work((1, channels, half, half), taps=9, reads=channels * size * size)


def _plain() -> Probe:
    """Operators in float that stand beside integer kernels, or in nets without Convs."""
    net = _Net("float")
    for channels, size in ((16, 7), (16, 14), (64, 28), (64, 56)):
        x, count = net.op("Neg", net.data(1, channels, size, size)), channels * size * size
        for kind in ("Relu", "LeakyRelu", "Sigmoid", "HardSwish"):
            net.out(kind, x, elements=count)
        other = net.op("Neg", net.data(1, channels, size, size))
        for kind in ("Add", "Mul"):
            net.out(kind, x, other, elements=count)
        net.out("Transpose", x, perm=[0, 2, 3, 1], elements=count)
        net.out("Reshape", net.op("Abs", x), net.constant([1, -1], np.int64), work=Work("nothing"))
        moved = Work("transpose", elements=count, reads=count)
        if size % 2 == 0:
            net.out("SpaceToDepth", x, blocksize=2, work=moved)
        net.out("DepthToSpace", x, blocksize=2, work=Work("transpose", elements=count, pieces=count))
        for axis in (1, 3):
            net.out("Softmax", x, axis=axis, work=softmax_work((1, channels, size, size), axis))
        narrow = net.op("Neg", net.data(1, channels - 4, size, size))  # not in blocks of channels
        pool = _pool_work(channels - 4, size)
        net.out("MaxPool", narrow, work=pool, **_POOL)
        net.out("AveragePool", narrow, work=replace(pool, shape_class="average-pool"), **_POOL)
        ones = [net.constant(np.ones(channels)) for _ in range(4)]
        net.out("BatchNormalization", x, *ones, elements=count)
    for shape in ((1, 16, 64), (1, 128, 256), (1, 197, 192), (1, 197, 768)):
        x, count = net.op("Neg", net.data(*shape)), math.prod(shape)
        scale, shift = net.constant(np.ones(shape[-1])), net.constant(np.zeros(shape[-1]))
        net.out("Softmax", x, axis=-1, work=softmax_work(shape, -1))
        net.out("LayerNormalization", x, scale, shift, axis=-1, elements=count)
        y = net.op("Neg", net.data(*shape))
        both = (y, net.op("Abs", y), scale, shift)
        net.out("SkipLayerNormalization", *both, domain="com.microsoft", elements=count)
        net.out("Gelu", x, domain="com.microsoft", elements=count)
        net.out("Sin", x, elements=count)
    for heads, tokens, depth in ((4, 32, 32), (4, 128, 64), (3, 197, 64), (12, 128, 64), (8, 64, 16)):
        x, y = (net.op(kind, net.data(1, heads, tokens, depth)) for kind in ("Neg", "Abs"))
        macs = heads * tokens * tokens * depth
        y = net.op("Transpose", y, perm=[0, 1, 3, 2])
        work = Work("matmul", macs, macs, heads * tokens * tokens)
        net.out("MatMul", x, net.op("Sin", y), work=work)
    for inputs, outputs, size in ((32, 16, 14), (64, 32, 28)):
        weight = net.constant(np.ones((inputs, outputs, 2, 2)))
        macs = inputs * size * size * outputs * 4
        x = net.op("Neg", net.data(1, inputs, size, size))
        work = Work("conv-transpose", macs, macs, outputs * 4 * size * size)
        net.out("ConvTranspose", x, weight, strides=[2, 2], kernel_shape=[2, 2], work=work)
    return net.probe()


def _borders() -> Iterator[Probe]:
    """Q, DQ and the changes of layout beside them, by their kernels: the runtime adds some of them."""
    for channels, size in ((16, 7), (32, 14), (64, 28), (96, 28), (64, 56)):
        count = channels * size * size
        net = _Net("integer")
        x = net.op("Neg", net.data(1, channels, size, size))
        net.outputs.append(net.conv(net.between(x), channels, channels, k=3))
        names = {"QuantizeLinear": "quantize", "DequantizeLinear": "dequantize", "Transpose": "channels-last"}
        yield net.probe(**{kind: Work(name, elements=count) for kind, name in names.items()})
        net = _Net("float")
        x = net.op("Neg", net.data(1, channels, size, size))
        net.out("Sin", net.conv(x, channels, channels, k=3))
        yield net.probe(**{kind: Work("blocked", elements=count) for kind in ("ReorderInput", "ReorderOutput")})
