"""Small seeded float models that tests and benchmarks share.

Every builder returns a fresh, checked `ModelProto` with random weights of sensible magnitude (so that activations
stay within a few units of zero), no file touched. `feeds` makes matching inputs; `FeedReader` hands them out once,
as a `CalibrationDataReader` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader

from kenosis_ort.demo import load_digits, model_path

Array = npt.NDArray[Any]
Feed = dict[str, Array]
IR_VERSION = 10
OPSET = 17


class Net:
    """Builds one float graph; each call adds a node and returns the name of its (first) output.

    Args:
        opset: Version of the ONNX operator set.
        seed: Seed of the random weights, or the generator of the net around this one.
        tag: Beginning of all names that are not given; of a body, so that they differ from those outside.
        suffix: What a value is called beside its node.
        stored: Constants are initializers, else Constant nodes, as exporters write them in bodies.
    """

    def __init__(
        self, *, opset: int = OPSET, seed: int | np.random.Generator = 0, tag: str = "", suffix: str = "_out",
        stored: bool = True
    ) -> None:  # fmt: skip
        self.opset, self.tag, self.suffix, self.stored = opset, tag, suffix, stored
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.domains: set[str] = set()

    @classmethod
    def over(cls, shape: Sequence[int | str], **options: Any) -> Net:
        """A net of one float input ``x``, whose values are called as their nodes."""
        net = cls(**{"suffix": "", **options})
        net.input("x", shape)
        return net

    def input(self, name: str, shape: Sequence[int | str], elem_type: int = TensorProto.FLOAT) -> str:
        """Adds a graph input."""
        self.inputs.append(helper.make_tensor_value_info(name, elem_type, list(shape)))
        return name

    def output(self, name: str, shape: Sequence[int | str] | None = None, elem_type: int = TensorProto.FLOAT) -> str:
        """Declares a value as graph output."""
        self.outputs.append(helper.make_tensor_value_info(name, elem_type, None if shape is None else list(shape)))
        return name

    def const(self, value: Any, name: str | None = None, dtype: Any = None) -> str:
        """Adds an initializer (floats become float32, ints int64 unless ``dtype`` says otherwise)."""
        array = np.asarray(value) if dtype is None else np.asarray(value, dtype=dtype)
        if dtype is None and array.dtype == np.float64:
            array = array.astype(np.float32)
        if not self.stored:
            return self.op("Constant", [], out=name or f"{self.tag}constant_{len(self.nodes)}",
                           value=numpy_helper.from_array(array))  # fmt: skip
        name = name or f"{self.tag}const_{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def weight(self, shape: Sequence[int], *, scale: float | None = None, name: str | None = None) -> str:
        """Adds a random normal weight; its default deviation keeps the variance of what flows through it."""
        fan_in = int(np.prod(shape[1:])) if len(shape) > 2 else int(shape[0])
        deviation = scale if scale is not None else (1.5 / max(fan_in, 1)) ** 0.5
        return self.const(self.rng.normal(0.0, deviation, shape).astype(np.float32), name)

    def op(self, op_type: str, inputs: Sequence[Any], *, name: str | None = None, out: str | None = None,
           outputs: int = 1, domain: str = "", **attributes: Any) -> str:  # fmt: skip
        """Adds a node; inputs that are no names become constants, outputs are named after it or ``out``."""
        name = name or f"{self.tag}{op_type.lower()}_{len(self.nodes)}"
        first = out or f"{name}{self.suffix}"
        names = [first] + [f"{first}_{i}" for i in range(1, outputs)]
        operands = [operand if isinstance(operand, str) else self.const(operand) for operand in inputs]
        self.nodes.append(helper.make_node(op_type, operands, names, name=name, domain=domain, **attributes))
        if domain:
            self.domains.add(domain)
        return first

    def conv(self, x: str, c_in: int, c_out: int, *, k: int = 3, stride: int = 1, groups: int = 1, bias: bool = True,
             name: str | None = None, out: str | None = None) -> str:  # fmt: skip
        """Adds a "same" padded 2-D convolution."""
        name = name or f"{self.tag}conv_{len(self.nodes)}"
        inputs = [x, self.weight((c_out, c_in // groups, k, k), name=f"{name}_w")]
        if bias:
            inputs.append(self.const(self.rng.normal(0, 0.1, c_out).astype(np.float32), f"{name}_b"))
        return self.op("Conv", inputs, name=name, out=out, kernel_shape=[k, k], strides=[stride, stride],
                       pads=[k // 2] * 4, group=groups)  # fmt: skip

    def linear(self, x: str, n_in: int, n_out: int, *, name: str | None = None, bias: bool = True) -> str:
        """Adds MatMul with a constant weight, and an Add for the bias."""
        name = name or f"{self.tag}linear_{len(self.nodes)}"
        y = self.op("MatMul", [x, self.weight((n_in, n_out), name=f"{name}_w")], name=name)
        if bias:
            y = self.op("Add", [y, self.const(self.rng.normal(0, 0.1, n_out), f"{name}_b")], name=f"{name}_bias")
        return y

    def gemm(self, x: str, n_in: int, n_out: int, *, name: str | None = None, **attributes: Any) -> str:
        """Adds Gemm with transB=1 and a bias."""
        name = name or f"{self.tag}gemm_{len(self.nodes)}"
        w = self.const(self.rng.normal(0, (1.5 / n_in) ** 0.5, (n_out, n_in)), f"{name}_w")
        b = self.const(self.rng.normal(0, 0.1, n_out), f"{name}_b")
        return self.op("Gemm", [x, w, b], name=name, transB=1, **attributes)

    def both(self, op_type: str, left: Any, right: Any, flip: bool = False) -> str:
        """Adds a node of two operands, in the other order if ``flip``."""
        return self.op(op_type, [right, left] if flip else [left, right])

    def mean(self, x: str, axes: Sequence[int], **attributes: Any) -> str:
        """Adds ReduceMean in the form of the operator set."""
        if self.opset >= 18:
            return self.op("ReduceMean", [x, np.array(axes)], **attributes)
        return self.op("ReduceMean", [x], axes=list(axes), **attributes)

    def graph(self, name: str = "net") -> onnx.GraphProto:
        """The graph as it stands: a body of a node in another net, whose values it may read."""
        return helper.make_graph(self.nodes, name, self.inputs, self.outputs, self.initializers)

    def of(self, *outputs: str, graph_name: str = "net") -> onnx.ModelProto:
        """The finished model with these outputs; one that is written already is also needed inside if read there."""
        for name in outputs:
            self.output(name)
        return self.model(graph_name)

    def model(self, graph_name: str = "net", *, ir_version: int = IR_VERSION) -> onnx.ModelProto:
        """Returns the finished, checked model."""
        opsets = [
            helper.make_opsetid(d, v) for d, v in {"": self.opset, **dict.fromkeys(sorted(self.domains), 1)}.items()
        ]
        settings = {"opset_imports": opsets, "ir_version": ir_version, "producer_name": "kenosis-ort-tests"}
        model = helper.make_model(self.graph(graph_name), **settings)
        if not all(o.type.tensor_type.HasField("shape") for o in self.outputs):
            model = onnx.shape_inference.infer_shapes(model)  # fills the outputs' shapes
            del model.graph.value_info[:]
        onnx.checker.check_model(model)
        return model


# ---- data -----------------------------------------------------------------------------------------------------


def normal(shape: Sequence[int], seed: int = 0, magnitude: float = 1.0) -> Array:
    """Seeded normal float32 numbers."""
    return np.asarray(np.random.default_rng(seed).normal(size=shape) * magnitude, np.float32)


def feeds(model: onnx.ModelProto, count: int = 4, *, seed: int = 0, dims: Mapping[str, int] | None = None,
          high: int = 2) -> list[Feed]:  # fmt: skip
    """Returns ``count`` random feeds for a model: normal floats, ints in 0..high-1, random booleans.

    Args:
        model: The model; inputs that are also initializers are left out.
        count: Number of feeds.
        seed: Seed.
        dims: Sizes of named dimensions (default 1).
        high: Upper bound of integer inputs.
    """
    rng = np.random.default_rng(seed)
    held = {i.name for i in model.graph.initializer}
    fed = {value.name: value.type.tensor_type for value in model.graph.input if value.name not in held}

    def drawn(tensor: onnx.TypeProto.Tensor) -> Array:
        shape = [d.dim_value if d.HasField("dim_value") else (dims or {}).get(d.dim_param, 1) for d in tensor.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        if dtype.kind == "f":
            return rng.normal(0, 1, shape).astype(dtype)
        return rng.integers(0, 2 if dtype.kind == "b" else high, shape).astype(dtype)

    return [{name: drawn(tensor) for name, tensor in fed.items()} for _ in range(count)]


class FeedReader(CalibrationDataReader):  # type: ignore[misc]
    """Hands out feeds once; a second pass gets nothing, as with a user's own reader."""

    def __init__(self, samples: Sequence[Feed]) -> None:
        self._it: Iterator[Feed] = iter(samples)
        self.handed_out = 0

    def get_next(self) -> Feed | None:
        feed = next(self._it, None)
        if feed is not None:
            self.handed_out += 1
        return feed


def reader(model: onnx.ModelProto, count: int = 4) -> FeedReader:
    """Returns a one-shot reader of random feeds for the model."""
    return FeedReader(feeds(model, count))


# ---- the runtime ----------------------------------------------------------------------------------------------


def session(
    model: onnx.ModelProto | str | Path, *libraries: str, optimize: bool = True, saved: Path | None = None
) -> ort.InferenceSession:
    """Opens a session of one thread.

    Args:
        model: The model or its path.
        libraries: Of custom operators.
        optimize: The runtime optimizes the graph; else nodes run as they stand.
        saved: Where it writes the graph that it runs.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if saved is not None:
        options.optimized_model_filepath = str(saved)
    for library in libraries:
        options.register_custom_ops_library(library)
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


# ---- models ---------------------------------------------------------------------------------------------------


def conv_relu_chain(n: int, *, channels: int = 4, size: int = 8, seed: int = 0, opset: int = OPSET) -> onnx.ModelProto:
    """``n`` nodes: Conv and Relu in turn."""
    net = Net(opset=opset, seed=seed)
    y = net.input("x", [1, channels, size, size])
    for i in range(n):
        y = net.op("Relu", [y], name=f"relu{i}") if i % 2 else net.conv(y, channels, channels, k=1, name=f"conv{i}")
    return net.of(y, graph_name="conv_relu_chain")


def with_free_batch(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns the model with a first axis of any size, for nets whose nodes do not depend on it."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for value in (*changed.graph.input, *changed.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "n"
    del changed.graph.value_info[:]
    return changed


def residual_block(*, channels: int = 8, size: int = 8, seed: int = 0, opset: int = OPSET) -> onnx.ModelProto:
    """Conv, Relu, Conv, Relu, Conv, Add with the skip, Relu, global pool, Gemm head."""
    net = Net(opset=opset, seed=seed)
    x = net.input("x", [1, 3, size, size])
    skip = net.op("Relu", [net.conv(x, 3, channels, name="stem")], name="stem_relu")
    y = net.op("Relu", [net.conv(skip, channels, channels, name="conv1")], name="relu1")
    y = net.conv(y, channels, channels, name="conv2")
    y = net.op("Relu", [net.op("Add", [y, skip], name="add")], name="relu2")
    y = net.op("Flatten", [net.op("GlobalAveragePool", [y], name="pool")], name="flatten")
    return net.of(net.gemm(y, channels, 5, name="head"), graph_name="residual_block")


def mobile_block(*, channels: int = 8, size: int = 8) -> onnx.ModelProto:
    """MobileNetV2's inverted residual: 1x1, depthwise 3x3, 1x1, Add; ReLU6 as Clip."""
    net, wide = Net(), 4 * channels

    def act(value: str, name: str) -> str:
        return net.op("Clip", [value, net.const(0.0, f"{name}_min"), net.const(6.0, f"{name}_max")], name=name)

    x = act(net.conv(net.input("x", [1, 3, size, size]), 3, channels, name="stem"), "stem_act")
    y = act(net.conv(x, channels, wide, k=1, name="expand"), "expand_act")
    y = act(net.conv(y, wide, wide, groups=wide, name="depthwise"), "depthwise_act")
    y = net.op("Add", [net.conv(y, wide, channels, k=1, name="project"), x], name="add")
    y = net.op("Flatten", [net.op("GlobalAveragePool", [y], name="pool")], name="flatten")
    return net.of(net.gemm(y, channels, 5, name="head"), graph_name="mobile_block")


def silu_net() -> onnx.ModelProto:
    """Convs, each followed by x * Sigmoid(x): every Conv output has two consumers."""
    net = Net()
    y = net.input("x", [1, 3, 8, 8])
    for i, c in enumerate((3, 8)):
        y = net.conv(y, c, 8, name=f"conv{i}")
        y = net.op("Mul", [y, net.op("Sigmoid", [y], name=f"sigmoid{i}")], name=f"mul{i}")
    return net.of(net.conv(y, 8, 4, k=1, name="head"), graph_name="silu_net")


def bn_net(*, channels: int = 8) -> onnx.ModelProto:
    """Conv without bias, BatchNormalization, Relu, twice."""
    net = Net()
    y = net.input("x", [1, 3, 8, 8])
    for i, c in enumerate((3, channels)):
        y = net.conv(y, c, channels, bias=False, name=f"conv{i}")
        drawn = {
            "gamma": net.rng.uniform(0.5, 1.5, channels), "beta": net.rng.normal(0, 0.1, channels),
            "mean": net.rng.normal(0, 0.1, channels), "var": net.rng.uniform(0.5, 1.5, channels),
        }  # fmt: skip
        params = [net.const(values, f"bn{i}_{kind}") for kind, values in drawn.items()]
        y = net.op("BatchNormalization", [y, *params], name=f"bn{i}")
        y = net.op("Relu", [y], name=f"relu{i}")
    return net.of(y, graph_name="bn_net")


def two_input_detector() -> onnx.ModelProto:
    """An image and a ``scale_factor``; boxes in pixels and scores in 0..1 end in one output Concat."""
    net, cells = Net(), 64
    image, scale = net.input("image", [1, 3, 16, 16]), net.input("scale_factor", [1, 2])
    y = net.op("Relu", [net.conv(image, 3, 8, stride=2, name="stem")], name="stem_relu")
    y = net.op("Relu", [net.conv(y, 8, 8, name="body")], name="body_relu")

    def flat(value: str, c: int, name: str) -> str:
        value = net.op("Reshape", [value, net.const([1, c, cells], f"{name}_shape")], name=f"{name}_reshape")
        return net.op("Transpose", [value], name=f"{name}_transpose", perm=[0, 2, 1])

    boxes = net.op("Mul", [net.conv(y, 8, 4, k=1, name="box_head"), net.const(200.0, "stride")], name="box_stride")
    boxes = flat(boxes, 4, "box")
    four = net.op("Concat", [scale, scale], name="scale_twice", axis=1)
    four = net.op("Unsqueeze", [four, net.const([1], "scale_axis")], name="scale_unsqueeze")
    boxes = net.op("Div", [boxes, four], name="box_rescale")
    scores = net.op("Sigmoid", [net.conv(y, 8, 3, k=1, name="score_head")], name="score_sigmoid")
    detections = net.op("Concat", [boxes, flat(scores, 3, "score")], name="detections", axis=2)
    return net.of(detections, graph_name="two_input_detector")


def mlp(
    *, n_in: int = 16, hidden: int = 32, n_out: int = 4, layers: int = 3, seed: int = 0, gemm: bool = True
) -> onnx.ModelProto:
    """Linear layers with Relu between them, as Gemm or as MatMul + Add, with a symbolic batch."""
    net, sizes = Net(seed=seed), [n_in, *[hidden] * (layers - 1), n_out]
    y = net.input("x", ["batch", n_in])
    for i, (n, m) in enumerate(pairwise(sizes)):
        y = net.op("Relu", [y], name=f"relu{i - 1}") if i else y
        y = net.gemm(y, n, m, name=f"fc{i}") if gemm else net.linear(y, n, m, name=f"fc{i}")
    return net.of(y, graph_name="mlp")


def transformer_block(*, tokens: int = 6, width: int = 16) -> onnx.ModelProto:
    """Embedding rows in, attention with an additive mask (-1e9 above the diagonal), LayerNorm, Gelu MLP.

    Inputs: ``ids`` int64 [1, tokens] and ``mask`` float [1, 1, tokens, tokens] (0 keep, 1 hide), times -1e9.
    """
    net, heads = Net(), 2
    ids = net.input("ids", [1, tokens], TensorProto.INT64)
    mask = net.input("mask", [1, 1, tokens, tokens])
    x = net.op("Gather", [net.weight((50, width), scale=1.0, name="embedding"), ids], name="embed")

    def norm(value: str, name: str) -> str:
        gamma, beta = net.const(np.ones(width), f"{name}_gamma"), net.const(np.zeros(width), f"{name}_beta")
        return net.op("LayerNormalization", [value, gamma, beta], name=name, axis=-1)

    def split(value: str, name: str, perm: list[int]) -> str:
        value = net.linear(value, width, width, name=name)
        value = by("Reshape", value, [1, tokens, heads, width // heads], f"{name}_shape", f"{name}_reshape")
        return net.op("Transpose", [value], name=f"{name}_transpose", perm=perm)

    def by(op_type: str, value: str, constant: Any, held: str, name: str) -> str:
        return net.op(op_type, [value, net.const(constant, held)], name=name)

    h = norm(x, "norm1")
    q, k, v = (split(h, *to) for to in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])))
    scores = by("Div", net.op("MatMul", [q, k], name="qk"), (width / heads) ** 0.5, "root", "qk_scaled")
    hide = by("Mul", mask, -1e9, "minus_large", "hide")
    above = np.triu(np.full((1, 1, tokens, tokens), -1e9, np.float32), 1)
    hide = by("Add", hide, above, "causal", "hide_future")
    p = net.op("Softmax", [net.op("Add", [scores, hide], name="masked")], name="softmax", axis=-1)
    y = net.op("Transpose", [net.op("MatMul", [p, v], name="pv")], name="merge_transpose", perm=[0, 2, 1, 3])
    y = by("Reshape", y, [1, tokens, width], "merge_shape", "merge")
    x = net.op("Add", [x, net.linear(y, width, width, name="proj")], name="skip1")
    h = net.linear(norm(x, "norm2"), width, 4 * width, name="up")
    erf = net.op("Erf", [by("Div", h, 2.0**0.5, "sqrt2", "gelu_div")], name="gelu_erf")
    gate = by("Add", erf, 1.0, "one", "gelu_add")
    h = by("Mul", net.op("Mul", [h, gate], name="gelu_mul"), 0.5, "half", "gelu_half")
    skip = net.op("Add", [x, net.linear(h, 4 * width, width, name="down")], name="skip2")
    return net.of(skip, graph_name="transformer_block")


def net_with_if(*, capture_conv: bool = True) -> onnx.ModelProto:
    """Conv, Relu, and an If whose branches capture an outer value.

    Args:
        capture_conv: The branches capture the Conv's output, which a Relu also reads (folding that Relu into the
            Conv would rename what the body captures); otherwise they capture the Relu's.
    """
    net = Net()
    x, flag = net.input("x", [1, 3, 6, 6]), net.input("flag", [], TensorProto.BOOL)
    c = net.conv(x, 3, 4, name="conv0", out="conv0_out")
    r = net.op("Relu", [c], name="relu0", out="relu0_out")

    def branch(name: str, op: str) -> onnx.GraphProto:
        node = helper.make_node(op, [c if capture_conv else r], [f"{name}_out"], name=f"{name}_{op.lower()}")
        out = helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, [1, 4, 6, 6])
        return helper.make_graph([node], name, [], [out])

    y = net.op("If", [flag], name="if", then_branch=branch("then", "Tanh"), else_branch=branch("else", "Neg"))
    y = net.op("Add", [y, r], name="add")
    return net.of(net.conv(y, 4, 4, name="conv1"), graph_name="net_with_if")


def concat_net() -> onnx.ModelProto:
    """SqueezeNet's fire: 1x1 Conv + Relu, then 1x1 and 3x3 Conv + Relu into a Concat, MaxPool, Conv."""
    net = Net()
    s = net.op("Relu", [net.conv(net.input("x", [1, 3, 8, 8]), 3, 4, k=1, name="squeeze")], name="squeeze_relu")
    a, b = (net.op("Relu", [net.conv(s, 4, 8, k=k, name=f"expand{k}")], name=f"expand{k}_relu") for k in (1, 3))
    y = net.op("Concat", [a, b], name="concat", axis=1)
    y = net.op("MaxPool", [y], name="pool", kernel_shape=[2, 2], strides=[2, 2])
    return net.of(net.conv(y, 16, 4, k=1, name="head"), graph_name="concat_net")


def narrow_digits() -> onnx.ModelProto:
    """The shipped net of digits, a quarter of its channels, one block: its names and operators, not its accuracy."""
    with model_path() as path:
        model = onnx.load(path)
    for node in [node for node in model.graph.node if node.name.startswith("layer8.")]:
        model.graph.node.remove(node)
    next(node for node in model.graph.node if node.name == "layer9.pool").input[0] = "layer7.relu.out"
    for tensor in [tensor for tensor in model.graph.initializer if tensor.name.startswith("layer8.")]:
        model.graph.initializer.remove(tensor)
    model.graph.ClearField("value_info")
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    for tensor in weights.values():
        quarter = tuple(slice(size // 4 if size >= 32 else size) for size in tensor.dims)
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor)[quarter], tensor.name))
    images = load_digits().calibration
    for norm in (node for node in model.graph.node if node.op_type == "BatchNormalization"):
        seen = onnx.ModelProto()
        seen.CopyFrom(model)
        seen.graph.output[0].CopyFrom(onnx.ValueInfoProto(name=norm.input[0]))
        found = ort.InferenceSession(seen.SerializeToString()).run(None, {"image": images})[0]
        for name, array in zip(norm.input[3:5], (found.mean((0, 2, 3)), found.var((0, 2, 3))), strict=True):
            weights[name].CopyFrom(numpy_helper.from_array(array, name))
    return model


ALL = {
    "conv_relu_chain": lambda: conv_relu_chain(8), "residual_block": residual_block, "mobile_block": mobile_block,
    "silu_net": silu_net, "bn_net": bn_net, "two_input_detector": two_input_detector, "mlp": mlp,
    "mlp_matmul": lambda: mlp(gemm=False), "transformer_block": transformer_block, "net_with_if": net_with_if,
    "concat_net": concat_net,
}  # fmt: skip
