"""A net in which every rewrite finds something to do."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from tests.models import Net


def rich_net(*, channels: int = 8, size: int = 8) -> onnx.ModelProto:
    """Three nets in one: over a picture, over a sequence of any length, and over a vector."""
    net = Net(seed=3)
    _picture(net, channels, size)
    _sequence(net, channels)
    _vector(net, channels)
    return net.model("rich_net")


def _picture(net: Net, c: int, size: int) -> None:
    """A strided stem, copies, constants to fold, norms, SiLU, GELU, HardSwish, Sum, pools, a mean, a depthwise Conv."""
    y = net.conv(net.input("x", [1, 3, 2 * size, 2 * size]), 3, c, stride=2, bias=False, name="stem")
    y = net.op("Relu", [net.batch_norm(y, c, name="stem_bn")], name="stem_relu")
    y = net.op("Identity", [net.op("Dropout", [y], name="drop")], name="copy")
    y = net.conv(y, c, c, name="conv_silu")
    skip = y = net.op("Mul", [y, net.op("Sigmoid", [y], name="sigmoid")], name="silu")
    wide = net.op("Relu", [net.conv(y, c, 3 * c, k=1, name="expand")], name="expand_relu")
    wide = net.op("Relu", [net.conv(wide, 3 * c, 3 * c, groups=3 * c, name="depthwise")], name="depthwise_relu")
    y = net.conv(wide, 3 * c, c, k=1, name="shrink")
    three, six, zero = net.const(3.0, "three"), net.const(6.0, "six"), net.const(0.0, "zero")
    gate = net.op("Clip", [net.op("Add", [y, three], name="hs_add"), zero, six], name="hs_clip")
    y = net.op("Mul", [y, net.op("Div", [gate, six], name="hs_div")], name="hardswish")
    y = net.conv(y, c, c, k=1, name="project")
    y = net.op("Sum", [y, skip, net.conv(skip, c, c, k=1, name="side")], name="sum")
    y = net.conv(y, c, c, k=1, name="conv_gelu")
    erf = net.op("Erf", [net.op("Div", [y, net.const(2.0**0.5, "root2")], name="gelu_div")], name="gelu_erf")
    y = net.op("Mul", [y, net.op("Add", [erf, net.const(1.0, "one")], name="gelu_add")], name="gelu_mul")
    y = net.conv(net.op("Mul", [y, net.const(0.5, "half")], name="gelu_half"), c, c, k=1, name="conv_bn")
    y = net.batch_norm(net.op("Relu", [y], name="pre_relu"), c, name="late_bn")
    y = net.conv(y, c, c, k=1, name="conv_pool")
    y = net.op("AveragePool", [y], name="pool", kernel_shape=[2, 2], strides=[2, 2])
    y = _bounds_and_shuffle(net, net.conv(y, c, c, k=1, name="conv_scale"), c, size // 2)
    y = net.conv(y, c, c, k=1, name="last_conv")
    y = net.op("ReduceMean", [y], name="mean", axes=[2, 3], keepdims=0)
    head = net.op("Transpose", [net.weight((5, c), name="head_w_stored")], name="head_w", perm=[1, 0])
    y = net.op("MatMul", [y, head], name="head")
    mean = net.op("ReduceMean", [y], name="ln_mean", axes=[-1], keepdims=1)
    d = net.op("Sub", [y, mean], name="ln_sub")
    square = net.op("Pow", [d, net.const(2.0, "two")], name="ln_pow")
    variance = net.op("ReduceMean", [square], name="ln_var", axes=[-1], keepdims=1)
    root = net.op("Sqrt", [net.op("Add", [variance, net.const(1e-5, "eps")], name="ln_eps")], name="ln_sqrt")
    y = net.op("Mul", [net.op("Div", [d, root], name="ln_div"), net.const(np.ones(5), "ln_gamma")], name="ln_mul")
    net.output(net.op("Add", [y, net.const(np.zeros(5), "ln_beta")], name="ln_add"), [1, 5])


def _bounds_and_shuffle(net: Net, y: str, c: int, size: int) -> str:
    """A scale by channel, bounds as Max and Min, an LRN, a channel shuffle, gates."""
    y = net.op("Mul", [y, net.weight((c, 1, 1), name="scale")], name="scaled")
    y = net.op("Max", [y, net.const(0.0, "low")], name="at_least")
    y = net.op("Min", [y, net.const(4.0, "high")], name="at_most")
    y = net.op("LRN", [net.conv(y, c, c, k=1, name="conv_lrn")], name="lrn", size=3, alpha=0.1)
    y = net.conv(y, c, c, k=1, name="conv_shuffle")
    y = net.op("Reshape", [y, net.const(np.array([0, 2, c // 2, size, size]), "split")], name="shuffle_split")
    y = net.op("Transpose", [y], name="shuffle_turn", perm=[0, 2, 1, 3, 4])
    y = net.op("Reshape", [y, net.const(np.array([0, c, size, size]), "joined")], name="shuffle_join")
    y = net.conv(y, c, c, k=1, name="conv_swish")
    y = net.op("Mul", [y, net.op("HardSigmoid", [y], name="own_gate")], name="own_swish")
    y = net.conv(y, c, c, k=1, name="conv_gated")
    gate = net.conv(net.op("GlobalAveragePool", [y], name="squeeze"), c, c, k=1, name="conv_gate")
    return net.op("Mul", [y, net.op("HardSigmoid", [gate], name="gate")], name="gated")


def _vector(net: Net, c: int) -> None:
    """A Gemm with factors, and an If whose condition is constant."""
    x = net.input("vector", [2, c])
    y = net.op(
        "Gemm", [x, net.weight((c, c), name="factor_w"), net.weight((c,), name="factor_b")], name="factors", alpha=0.5
    )
    branches = [
        helper.make_graph(
            [helper.make_node(op, [y], [f"{op}_branch"], name=f"{op}_node")],
            f"{op}_body",
            [],
            [helper.make_tensor_value_info(f"{op}_branch", onnx.TensorProto.FLOAT, [2, c])],
        )
        for op in ("Tanh", "Exp")
    ]
    condition = net.const(np.array(True), "always")
    net.output(net.op("If", [condition], name="choice", then_branch=branches[0], else_branch=branches[1]), [2, c])


def _sequence(net: Net, c: int) -> None:
    """A linear layer, its residual and norm; norms in arithmetic, attention, a norm joined with its residual."""
    x = net.input("sequence", ["n", 4, c])
    y = net.op("MatMul", [x, net.weight((c, c), name="linear_w")], name="linear")
    y = net.op("Add", [y, net.weight((c,), name="linear_b")], name="linear_bias")
    gamma, beta = net.const(np.linspace(0.5, 1.5, c), "gamma"), net.const(np.linspace(-1, 1, c), "beta")
    y = net.op("LayerNormalization", [net.op("Add", [y, x], name="residual"), gamma, beta], name="norm", axis=-1)
    square = net.op("ReduceMean", [net.op("Mul", [y, y], name="rms_square")], name="rms_mean", axes=[-1])
    root = net.op("Sqrt", [net.op("Add", [square, net.const(1e-3, "rms_epsilon")], name="rms_add")], name="rms_root")
    y = net.op("Mul", [y, net.op("Reciprocal", [root], name="rms_inverse")], name="rms_quotient")
    y = net.op("Mul", [y, gamma], name="rms")
    scores = net.op("MatMul", [y, net.op("Transpose", [y], name="keys", perm=[0, 2, 1])], name="scores")
    y = net.op("MatMul", [net.op("Softmax", [scores], name="weights", axis=-1), y], name="attention")
    mean = net.op("ReduceMean", [y], name="tf_mean", axes=[-1])
    d = net.op("Sub", [y, mean], name="tf_difference")
    square = net.op("ReduceMean", [net.op("Mul", [d, d], name="tf_square")], name="tf_variance", axes=[-1])
    root = net.op("Sqrt", [net.op("Add", [square, net.const(1e-3, "tf_epsilon")], name="tf_add")], name="tf_root")
    factor = net.op("Mul", [net.op("Reciprocal", [root], name="tf_inverse"), gamma], name="tf_factor")
    shift = net.op("Sub", [beta, net.op("Mul", [mean, factor], name="tf_moved")], name="tf_shift")
    y = net.op("Add", [net.op("Mul", [y, factor], name="tf_scaled"), shift], name="tf_norm")
    joined = [y, x, gamma, beta]
    net.output(net.op("SkipLayerNormalization", joined, name="skip_norm", domain="com.microsoft"), ["n", 4, c])
