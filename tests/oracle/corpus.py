"""A corpus of small graphs that covers every operator of ONNX Runtime's two quantization registries.

Each graph reads its operator behind a Conv (so that pass-through operators see a quantized input), and most also
directly behind a graph input. `GRAPHS` maps names to builders, `OPTIONS` names to arguments of the quantizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper
from onnxruntime.quantization import QuantType

from tests import models
from tests.models import Net

Builder = Callable[[], onnx.ModelProto]
GRAPHS: dict[str, Builder] = dict(models.ALL)
CHANNELS, SIZE = 4, 6


def _register(
    name: str, wire: Callable[[Net, str], str | tuple[str, ...]], *, opset: int = models.OPSET, both: bool = True
) -> None:
    """Adds a graph with the operator behind a Conv, and one with the operator behind the graph input."""

    def build(behind_conv: bool) -> onnx.ModelProto:
        net = Net(opset=opset, seed=sum(map(ord, name)))
        x = net.input("x", [1, CHANNELS, SIZE, SIZE])
        y = wire(net, net.conv(x, CHANNELS, CHANNELS, name="front") if behind_conv else x)
        produced = {o for n in net.nodes for o in n.output}
        for value in (y,) if isinstance(y, str) else y:
            assert value in produced
            net.output(value, elem_type=TensorProto.INT64 if value.endswith("indices") else TensorProto.FLOAT)
        return net.model(name)

    GRAPHS[name] = lambda: build(True)
    if both:
        GRAPHS[f"{name}_at_input"] = lambda: build(False)


def _ints(net: Net, *values: int) -> str:
    return net.const(list(values))


def _unary(op_type: str, **attributes: Any) -> Callable[[Net, str], str]:
    return lambda net, x: net.op(op_type, [x], name="op", **attributes)


def _flat(net: Net, x: str) -> str:
    return net.op("Flatten", [x], name="flat")


def _conv_behind(wire: Callable[[Net, str], str], channels: int = CHANNELS) -> Callable[[Net, str], str]:
    return lambda net, x: net.conv(wire(net, x), channels, CHANNELS, k=1, name="back")


FLAT = CHANNELS * SIZE * SIZE

for _op in ("Relu", "Sigmoid", "LeakyRelu", "Tanh", "Erf", "HardSwish"):
    _register(_op.lower(), _unary(_op))
    _register(f"{_op.lower()}_conv", _conv_behind(_unary(_op)), both=False)
_register("softmax", _unary("Softmax", axis=1))
_register("softmax_last", lambda n, x: n.op("Softmax", [_flat(n, x)], name="op", axis=-1))
_register("clip_0_6", lambda n, x: n.op("Clip", [x, n.const(0.0), n.const(6.0)], name="op"))
_register(
    "clip_0_6_conv", _conv_behind(lambda n, x: n.op("Clip", [x, n.const(0.0), n.const(6.0)], name="op")), both=False
)
_register("clip_half", lambda n, x: n.op("Clip", [x, n.const(-0.5), n.const(0.5)], name="op"))
_register("clip_open", lambda n, x: n.op("Clip", [x, n.const(0.0)], name="op"))
_register("max_pool", _unary("MaxPool", kernel_shape=[2, 2], strides=[2, 2]))
_register("average_pool", _unary("AveragePool", kernel_shape=[2, 2], strides=[2, 2], pads=[0, 0, 1, 1]))
_register("global_average_pool", _unary("GlobalAveragePool"))
_register("flatten", _unary("Flatten"))
_register("transpose", _unary("Transpose", perm=[0, 2, 3, 1]))
_register("reshape", lambda n, x: n.op("Reshape", [x, _ints(n, 1, -1)], name="op"))
_register("squeeze", lambda n, x: n.op("Squeeze", [x, _ints(n, 0)], name="op"))
_register("unsqueeze", lambda n, x: n.op("Unsqueeze", [x, _ints(n, 0)], name="op"))
_register("slice", lambda n, x: n.op("Slice", [x, _ints(n, 1), _ints(n, 4), _ints(n, 2)], name="op"))
_register("pad", lambda n, x: n.op("Pad", [x, _ints(n, 0, 0, 1, 1, 0, 0, 1, 1), n.const(0.25)], name="op"))
_register("pad_no_value", lambda n, x: n.op("Pad", [x, _ints(n, 0, 0, 1, 1, 0, 0, 1, 1)], name="op"))
_register("pad_reflect", lambda n, x: n.op("Pad", [x, _ints(n, 0, 0, 1, 1, 0, 0, 1, 1)], name="op", mode="reflect"))
_register("resize", lambda n, x: n.op("Resize", [x, "", n.const([1.0, 1.0, 2.0, 2.0])], name="op", mode="nearest"))
_register(
    "resize_linear", lambda n, x: n.op("Resize", [x, "", n.const([1.0, 1.0, 2.0, 2.0])], name="op", mode="linear")
)
_register("gather", lambda n, x: n.op("Gather", [x, _ints(n, 0, 2)], name="op", axis=1))
_register(
    "gather_table", lambda n, x: n.op("Gather", [n.weight((7, 3)), n.op("ArgMax", [x], name="pick", axis=1)], name="op")
)
_register("gather_elements", lambda n, x: n.op("GatherElements", [_flat(n, x), _ints_2d(n)], name="op", axis=1))
_register("cum_sum", lambda n, x: n.op("CumSum", [x, n.const(np.array(1))], name="op"))
_register("arg_max", lambda n, x: n.op("ArgMax", [x], name="op", axis=1, out="indices"))
_register("concat", lambda n, x: n.op("Concat", [x, n.op("Relu", [x], name="r")], name="op", axis=1))
_register(
    "concat_convs",
    lambda n, x: n.op("Concat", [n.conv(x, 4, 4, name="a"), n.conv(x, 4, 4, k=1, name="b")], name="op", axis=1),
)
_register("add", lambda n, x: n.op("Add", [x, n.op("Relu", [x], name="r")], name="op"))
_register("add_constant", lambda n, x: n.op("Add", [x, n.weight((1, CHANNELS, 1, 1))], name="op"))
_register("mul", lambda n, x: n.op("Mul", [x, n.op("Sigmoid", [x], name="s")], name="op"))
_register("mul_scalar", lambda n, x: n.op("Mul", [x, n.const(0.125)], name="op"))
_register(
    "where", lambda n, x: n.op("Where", [n.const(np.arange(SIZE) % 2 == 0), x, n.op("Neg", [x], name="neg")], name="op")
)
_register(
    "where_constants",
    lambda n, x: n.op("Where", [n.op("Greater", [x, n.const(0.0)], name="gt"), x, n.const(-1.0)], name="op"),
)
_register("conv_no_bias", lambda n, x: n.conv(x, CHANNELS, 3, bias=False, name="op"))
_register("conv_depthwise", lambda n, x: n.conv(x, CHANNELS, CHANNELS, groups=CHANNELS, name="op"))
_register("conv_stride", lambda n, x: n.conv(x, CHANNELS, 8, stride=2, name="op"))
_register(
    "conv_transpose",
    lambda n, x: n.op(
        "ConvTranspose", [x, n.weight((CHANNELS, 3, 2, 2)), n.const(np.ones(3))], name="op", strides=[2, 2]
    ),
)
_register("gemm", lambda n, x: n.gemm(_flat(n, x), FLAT, 5, name="op"))
_register("gemm_alpha_beta", lambda n, x: n.gemm(_flat(n, x), FLAT, 5, name="op", alpha=0.5, beta=2.0))
_register(
    "gemm_no_trans", lambda n, x: n.op("Gemm", [_flat(n, x), n.weight((FLAT, 5)), n.const(np.ones(5))], name="op")
)
_register("gemm_no_bias", lambda n, x: n.op("Gemm", [_flat(n, x), n.weight((FLAT, 5))], name="op"))
_register(
    "gemm_relu_gemm",
    lambda n, x: n.gemm(n.op("Relu", [n.gemm(_flat(n, x), FLAT, 8, name="g1")], name="r"), 8, 3, name="g2"),
)
_register("matmul", lambda n, x: n.op("MatMul", [x, n.weight((SIZE, 5))], name="op"))
_register("matmul_bias", lambda n, x: n.linear(x, SIZE, 5, name="op"))
_register(
    "matmul_two_inputs",
    lambda n, x: n.op("MatMul", [x, n.op("Transpose", [x], perm=[0, 1, 3, 2], name="t")], name="op"),
)
_register("batch_normalization", lambda n, x: n.batch_norm(x, CHANNELS, name="op"))
_register(
    "instance_normalization",
    lambda n, x: n.op("InstanceNormalization", [x, n.const(np.ones(CHANNELS)), n.const(np.zeros(CHANNELS))], name="op"),
)
_register(
    "layer_normalization",
    lambda n, x: n.op("LayerNormalization", [x, n.const(np.ones(SIZE)), n.const(np.zeros(SIZE))], name="op", axis=-1),
)
_register(
    "layer_normalization_no_bias",
    lambda n, x: n.op("LayerNormalization", [x, n.const(np.ones(SIZE))], name="op", axis=-1),
)
_register("reduce_mean", _unary("ReduceMean", axes=[2, 3]))
_register("identity", _unary("Identity"))
_register("shared_weight", lambda n, x: _shared(n, x, bias=False))
_register("shared_bias", lambda n, x: _shared(n, x, bias=True))
_register(
    "relu_two_consumers",
    lambda n, x: n.op("Add", [n.conv(n.op("Relu", [x], name="r"), CHANNELS, CHANNELS, name="c"), "r_out"], name="op"),
)
_register("conv_two_consumers", lambda n, x: n.op("Add", [n.op("Relu", [x], name="r"), x], name="op"))


def _ints_2d(net: Net) -> str:
    return net.const(np.arange(5).reshape(1, 5))


def _shared(net: Net, x: str, *, bias: bool) -> str:
    """Two Convs with one weight, and one bias if asked, on inputs of different range."""
    w = net.weight((CHANNELS, CHANNELS, 1, 1), name="shared_w")
    extra = [net.const(net.rng.normal(0, 0.1, CHANNELS), "shared_b")] if bias else []
    a = net.op("Conv", [x, w, *extra], name="conv_a")
    b = net.op("Conv", [net.op("Mul", [x, net.const(5.0)], name="scaled"), w, *extra], name="conv_b")
    return net.op("Concat", [a, b], name="op", axis=1)


def _many_outputs(op: str) -> Builder:
    def build() -> onnx.ModelProto:
        net = Net(seed=3)
        y = net.conv(net.input("x", [1, CHANNELS, SIZE, SIZE]), CHANNELS, CHANNELS, name="front")
        if op == "Split":
            first = net.op("Split", [y, _ints(net, 1, 3)], name="op", outputs=2, out="part", axis=1)
            net.output(net.conv(first, 1, 2, k=1, name="back"))
            net.output(f"{first}_1")
        else:
            first = net.op("TopK", [y, _ints(net, 3)], name="op", outputs=2, out="values", axis=-1)
            net.output(first)
            net.output(f"{first}_1", elem_type=TensorProto.INT64)
        return net.model(op.lower())

    return build


GRAPHS["split"] = _many_outputs("Split")
GRAPHS["top_k"] = _many_outputs("TopK")


def _embed_layer_norm() -> onnx.ModelProto:
    """com.microsoft EmbedLayerNormalization, then a linear layer."""
    net = Net(seed=5)
    ids = net.input("ids", [1, 5], TensorProto.INT32)
    segments = net.input("segments", [1, 5], TensorProto.INT32)
    tables = [net.weight((n, 8), scale=0.5, name=f"table{n}") for n in (11, 6, 3)]
    norm = [net.const(np.ones(8), "gamma"), net.const(np.zeros(8), "beta")]
    y = net.op(
        "EmbedLayerNormalization", [ids, segments, *tables, *norm], name="embed", domain="com.microsoft", outputs=2
    )
    net.output(net.linear(y, 8, 4, name="linear"), [1, 5, 4])
    return net.model("embed_layer_norm")


GRAPHS["embed_layer_norm"] = _embed_layer_norm


def _lstm() -> onnx.ModelProto:
    net = Net(seed=7)
    x = net.input("x", [3, 1, 4])
    w, r = net.weight((1, 16, 4), name="w"), net.weight((1, 16, 4), name="r")
    y = net.op("LSTM", [x, w, r], name="lstm", hidden_size=4)
    net.output(net.linear(net.op("Squeeze", [y, _ints(net, 1)], name="squeeze"), 4, 2, name="head"), [3, 1, 2])
    return net.model("lstm")


GRAPHS["lstm"] = _lstm


def with_loop() -> onnx.ModelProto:
    """A Conv in front of a Loop whose body captures its output."""
    net = Net(seed=9)
    c = net.conv(net.input("x", [1, CHANNELS, SIZE, SIZE]), CHANNELS, CHANNELS, name="front")
    shape = [1, CHANNELS, SIZE, SIZE]
    value = helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node("Add", ["carried", c], ["next"], name="body_add"),
         helper.make_node("Identity", ["go"], ["go_on"], name="body_go")],
        "body",
        [value("i", TensorProto.INT64, []), value("go", TensorProto.BOOL, []),
         value("carried", TensorProto.FLOAT, shape)],
        [value("go_on", TensorProto.BOOL, []), value("next", TensorProto.FLOAT, shape)],
    )  # fmt: skip
    y = net.op("Loop", [net.const(np.array(2)), "", c], name="loop", body=body)
    net.output(net.conv(y, CHANNELS, 2, name="back"), [1, 2, SIZE, SIZE])
    return net.model("with_loop")


GRAPHS["with_loop"] = with_loop


@dataclass(frozen=True)
class Options:
    """Arguments of stock's quantizer, as `quantize_static` names them."""

    activation_type: QuantType = QuantType.QUInt8
    weight_type: QuantType = QuantType.QInt8
    per_channel: bool = False
    reduce_range: bool = False
    op_types_to_quantize: tuple[str, ...] = ()
    nodes_to_quantize: tuple[str, ...] = ()
    nodes_to_exclude: tuple[str, ...] = ()
    extra_options: Mapping[str, Any] = field(default_factory=dict)
    opset: int = models.OPSET


_S8 = QuantType.QInt8
OPTIONS: dict[str, Options] = {
    "u8s8": Options(),
    "u8s8_per_channel": Options(per_channel=True),
    "s8s8": Options(activation_type=_S8),
    "s8s8_symmetric": Options(activation_type=_S8, per_channel=True, extra_options={"ActivationSymmetric": True}),
    "u8u8_weight_asymmetric": Options(weight_type=QuantType.QUInt8, extra_options={"WeightSymmetric": False}),
    "reduce_range": Options(per_channel=True, reduce_range=True),
    "keep_removable": Options(extra_options={"QDQKeepRemovableActivations": True}),
    "qdq_pair_to_weight": Options(extra_options={"AddQDQPairToWeight": True}),
    "dedicated_pairs": Options(extra_options={"DedicatedQDQPair": True}),
    "exclude_output": Options(extra_options={"OpTypesToExcludeOutputQuantization": ["Conv", "Gemm", "MatMul", "Add"]}),
    "force_no_input_check": Options(extra_options={"ForceQuantizeNoInputCheck": True}),
    "minimum_range": Options(extra_options={"MinimumRealRange": 5.0}),
    "no_bias": Options(extra_options={"QuantizeBias": False}),
    "contrib_ops": Options(extra_options={"UseQDQContribOps": True}),
    "const_b_only": Options(extra_options={"MatMulConstBOnly": True}),
    "no_weight_adjust": Options(extra_options={"QDQDisableWeightAdjustForInt32Bias": True}),
    "channel_axis": Options(
        per_channel=True, extra_options={"QDQOpTypePerChannelSupportToAxis": {"MatMul": 1, "Conv": 0}}
    ),
    "u16s8": Options(activation_type=QuantType.QUInt16),
    "u16s16_opset21": Options(activation_type=QuantType.QUInt16, weight_type=QuantType.QInt16, opset=21),
    "u8s4_opset21": Options(weight_type=QuantType.QInt4, opset=21),
    "restricted_asymmetric": Options(activation_type=_S8, extra_options={"ActivationRestrictedAsymmetric": True}),
    "some_op_types": Options(op_types_to_quantize=("Conv", "Relu", "Add")),
    "only_front": Options(nodes_to_quantize=("front", "stem", "conv0", "fc0")),
    "without_front": Options(nodes_to_exclude=("front", "stem", "conv0", "fc0")),
}  # fmt: skip


def feeds(model: onnx.ModelProto, count: int = 2) -> list[models.Feed]:
    """Random feeds; integer inputs stay below 3."""
    return models.feeds(model, count, high=3, dims={"batch": 2})


def at_opset(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """Returns the model at a newer opset (the corpus' operators have adapters)."""
    current = next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
    return model if current == opset else onnx.version_converter.convert_version(model, opset)
