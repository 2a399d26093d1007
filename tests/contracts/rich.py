"""A net in which every rewrite finds something to do."""

from __future__ import annotations

import numpy as np
import onnx

from tests.models import Net


def rich_net(*, channels: int = 8, size: int = 8) -> onnx.ModelProto:
    """A strided stem, copies, constants to fold, norms, SiLU, GELU, HardSwish, Sum, pools, a mean, a depthwise Conv."""
    net = Net(seed=3)
    c = channels
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
    return net.model("rich_net")
