"""Nets of QONNX for tests, and an executor of its operators in numpy that is independent of the package's reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from kenosis_ort.targets.model import DataTypes

DOMAIN = "qonnx.custom_op.general"
X86 = DataTypes(single_reader=(TensorProto.INT8,), largest_pair=2**15 - 1)  # what ONNX Runtime's kernels take there


def ends(bits: float, signed: int, narrow: int) -> tuple[float, float]:
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


def execute(model: onnx.ModelProto, feed: Mapping[str, Any]) -> list[Any]:
    """Runs a model node by node in numpy."""
    return ReferenceEvaluator(model, new_ops=[Quant, BipolarQuant, Trunc]).run(None, dict(feed))


class Net:
    """Builds a model node by node.

    Args:
        shape: Of the input ``x``.
        domain: Of the operators of QONNX.
    """

    def __init__(self, shape: Sequence[int | str] = (2, 3, 6, 6), domain: str = DOMAIN, opset: int = 17) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[TensorProto] = []
        self.shape, self.domain, self.opset = shape, domain, opset

    def constant(self, array: Any, name: str = "") -> str:
        name = name or f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def add(self, op_type: str, *inputs: str, output: str = "", domain: str = "", **attributes: Any) -> str:
        output = output or f"{op_type.lower()}{len(self.nodes)}"
        self.nodes.append(
            helper.make_node(
                op_type, inputs, [output], name=f"{op_type}_{len(self.nodes)}", domain=domain, **attributes
            )
        )
        return output

    def quant(
        self,
        x: str,
        scale: Any,
        zero_point: Any = 0.0,
        bits: float = 4,
        *,
        signed: int = 1,
        narrow: int = 0,
        rounding_mode: str = "ROUND",
        op_type: str = "Quant",
        output: str = "",
    ) -> str:
        parameters = [self.constant(np.asarray(p, np.float32)) for p in (scale, zero_point, bits)]
        said = {"signed": signed, "narrow": narrow, "rounding_mode": rounding_mode}
        return self.add(op_type, x, *parameters, domain=self.domain, output=output, **said)

    def model(self, *outputs: str) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes,
            "net",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(self.shape))],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
            self.constants,
        )
        imports = [helper.make_opsetid("", self.opset), helper.make_opsetid(self.domain, 1)]
        return helper.make_model(graph, opset_imports=imports, ir_version=8)


def conv_net(
    bits: int = 4, *, signed: bool = False, norm: bool = False, bias: bool = True, seed: int = 0, domain: str = DOMAIN
) -> onnx.ModelProto:
    """Two convolutions between quantizers, as Brevitas exports them, with a residual sum of signed integers."""
    rng = np.random.default_rng(seed)
    net = Net(domain=domain)
    x = net.quant("x", 1 / 16, bits=8)
    channels, values, branches = 3, x, []
    for _ in range(2):
        w = net.constant(rng.normal(size=(8, channels, 3, 3)).astype(np.float32) * 0.2)
        scale = np.abs(rng.normal(size=(8, 1, 1, 1))).astype(np.float32) * 0.03 + 0.02
        inputs = [values, net.quant(w, scale, bits=bits, narrow=1)]
        if bias:
            inputs.append(net.constant(rng.normal(size=8).astype(np.float32) * 0.3))
        window = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [1, 1], "dilations": [1, 1]}
        y = net.add("Conv", *inputs, group=1, **window)
        if norm:
            gamma, mean = (rng.normal(size=8).astype(np.float32) for _ in range(2))
            spread = rng.uniform(0.5, 2, size=8).astype(np.float32)
            y = net.add("BatchNormalization", y, *(net.constant(a) for a in (gamma, mean * 0.1, mean, spread)))
        if not signed:
            y = net.add("Relu", y)
        values = net.quant(y, 0.11, bits=bits, signed=int(signed))
        channels = 8
        branches.append(values)
    total = net.quant(net.add("Add", *branches), 0.17, bits=bits, signed=int(signed))
    pooled = net.add("Flatten", net.add("GlobalAveragePool", total))
    w = net.quant(net.constant(rng.normal(size=(5, 8)).astype(np.float32)), 0.2, bits=bits, narrow=1)
    pooled = net.quant(pooled, 0.03, bits=8, signed=0)
    return net.model(
        net.quant(net.add("Gemm", pooled, w, net.constant(np.zeros(5, np.float32)), transB=1), 0.4, bits=8)
    )
