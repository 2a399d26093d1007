"""Nets of QONNX for tests, and an executor of its operators in numpy that is independent of the package's reader."""

from collections import Counter

import numpy as np
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from kenosis_ort.graph.qdq import annotate
from kenosis_ort.targets.vocabulary import DataTypes
from tests import models, planning

DOMAIN = "qonnx.custom_op.general"
X86 = DataTypes(single_reader=(TensorProto.INT8,), largest_pair=2**15 - 1)  # what ONNX Runtime's kernels take there


def ends(bits, signed, narrow):
    """Equations 2 and 3 of the paper, with narrow ranges."""
    if signed:
        return -(2.0 ** (bits - 1)) + narrow, 2.0 ** (bits - 1) - 1
    return 0.0, 2.0**bits - 1 - narrow


ROUNDING = {"ROUND": np.rint, "FLOOR": np.floor, "CEIL": np.ceil}


class Quant(OpRun):
    op_domain = DOMAIN

    def _run(self, x, scale, zero_point, bits, signed=1, narrow=0, rounding_mode="ROUND"):
        low, high = ends(float(bits.reshape(-1)[0]), signed, narrow)
        whole = ROUNDING[rounding_mode](np.clip(x / scale + zero_point, np.float32(low), np.float32(high)))
        return (((whole - zero_point) * scale).astype(np.float32),)


class BipolarQuant(OpRun):
    op_domain = DOMAIN

    def _run(self, x, scale):
        return (np.where(x >= 0, scale, -scale).astype(np.float32),)


class Trunc(OpRun):
    op_domain = DOMAIN

    def _run(self, x, scale, zero_point, bits, to_bits, rounding_mode="FLOOR"):
        whole = np.rint(x / scale + zero_point) / np.float32(2.0 ** (bits - to_bits))
        return (((ROUNDING[rounding_mode](whole) - zero_point) * scale).astype(np.float32),)


def execute(model, feed):
    """Runs a model node by node in numpy."""
    return ReferenceEvaluator(model, new_ops=[Quant, BipolarQuant, Trunc]).run(None, dict(feed))


class Net(models.Net):
    """A net with operators of QONNX, which reads ``x``.

    Args:
        shape: Of ``x``.
        domain: Of the operators of QONNX.
        opset: Version of the ONNX operator set.
    """

    def __init__(self, shape=(2, 3, 6, 6), domain=DOMAIN, opset=17):
        super().__init__(opset=opset)
        self.domain = domain
        self.input("x", shape)

    def quant(self, x, scale, zero_point=0.0, bits=4, **given):
        """Adds a Quant; its parameters and a constant ``x`` become float32."""
        operands = (x, scale, zero_point, bits)
        inputs = [each if isinstance(each, str) else np.asarray(each, np.float32) for each in operands]
        said = {"signed": 1, "narrow": 0, "rounding_mode": "ROUND", **given}
        return self.op("Quant", inputs, domain=self.domain, **said)

    def of(self, *outputs):
        """The finished model, which ONNX does not check: it may be a broken one."""
        values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
        graph = helper.make_graph(self.nodes, "net", self.inputs, values, self.initializers)
        imports = [helper.make_opsetid("", self.opset), *(helper.make_opsetid(d, 1) for d in sorted(self.domains))]
        return helper.make_model(graph, opset_imports=imports, ir_version=8)


def draw(shape=(2, 3, 6, 6), seed=1):
    """Normal float32 numbers of deviation 2."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) * 2


def run(model, feed, *, optimize=False):
    """The outputs for a feed, or for an ``x``, of the nodes as they stand unless optimized."""
    session = models.session(model, optimize=optimize)
    return list(session.run(None, feed if isinstance(feed, dict) else {"x": feed}))


def same(found, wanted, x=None):
    """Two models compute the same to the bit; one of QONNX as numpy executes it."""
    x = draw([d.dim_value for d in wanted.graph.input[0].type.tensor_type.shape.dim]) if x is None else x
    numpy_alone = any(node.domain == DOMAIN for node in wanted.graph.node)
    for a, b in zip(run(found, x), execute(wanted, {"x": x}) if numpy_alone else run(wanted, x), strict=True):
        np.testing.assert_array_equal(a, b)


def operators(model):
    """How many nodes of each type there are."""
    return Counter(node.op_type for node in model.graph.node)


def conv_net(bits=4, *, signed=False, norm=False, bias=True, seed=0, domain=DOMAIN):
    """Two convolutions between quantizers, as Brevitas exports them, with a residual sum of signed integers."""
    rng = np.random.default_rng(seed)
    net = Net(domain=domain)
    values, channels, branches = net.quant("x", 1 / 16, bits=8), 3, []
    for _ in range(2):
        w = rng.normal(size=(8, channels, 3, 3)) * 0.2
        scale = np.abs(rng.normal(size=(8, 1, 1, 1))) * 0.03 + 0.02
        inputs = [values, net.quant(w, scale, bits=bits, narrow=1)]
        if bias:
            inputs.append(net.const(rng.normal(size=8) * 0.3))
        y = net.op("Conv", inputs, group=1, kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[1, 1], dilations=[1, 1])
        if norm:
            gamma, mean, spread = rng.normal(size=8), rng.normal(size=8), rng.uniform(0.5, 2, size=8)
            y = net.op("BatchNormalization", [y, gamma, mean * 0.1, mean, spread])
        y = y if signed else net.op("Relu", [y])
        values, channels = net.quant(y, 0.11, bits=bits, signed=int(signed)), 8
        branches.append(values)
    total = net.quant(net.op("Add", branches), 0.17, bits=bits, signed=int(signed))
    pooled = net.quant(net.op("Flatten", [net.op("GlobalAveragePool", [total])]), 0.03, bits=8, signed=0)
    w = net.quant(rng.normal(size=(5, 8)), 0.2, bits=bits, narrow=1)
    return net.of(net.quant(net.op("Gemm", [pooled, w, np.zeros(5)], transB=1), 0.4, bits=8))


def model_of(low, high, *, weight=""):
    """x -> Q -> Clip -> DQ -> Conv with int8 weights behind DQ, and a data type said of the weights."""
    clip, clipped = ("", "q") if high is None else ("[clip] c = Clip (q, lo, hi)", "c")
    text = f"""(float[1,3,4,4] x) => (float[1,2,4,4] y) {{ q = QuantizeLinear (x, s, z) {clip}
        [dq] d = DequantizeLinear ({clipped}, s, z) wd = DequantizeLinear <axis = 0> (w, ws, wz) y = Conv (d, wd) }}"""
    constants = {
        "s": np.float32(0.1), "z": np.uint8(3), "lo": np.uint8(low or 0), "hi": np.uint8(high or 0),
        "w": np.int8([-7, 7, 0, 1, 2, -3]).reshape(2, 3, 1, 1), "ws": np.float32([0.5, 0.25]), "wz": np.int8([0, 0]),
    }  # fmt: skip
    model = planning.parse(text, constants, opset=13, ir_version=8)
    if weight:
        annotate(model.graph, "w", weight)
    return model
