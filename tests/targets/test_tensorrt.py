"""Files for TensorRT are made as its documents say; nothing is run there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnxruntime.quantization import QuantFormat, QuantType

from kenosis_ort import OptionError, quantize_static
from tests import models
from tests.flow.support import run, sqnr_db
from tests.models import Net

Q, DQ = "QuantizeLinear", "DequantizeLinear"


class Written:
    """A file for TensorRT, with what its tests ask of it."""

    def __init__(self, model: onnx.ModelProto, folder: Path, **options: Any) -> None:
        self.source, self.path = model, folder / "trt.onnx"
        options = {"recipe": "plain", **options}
        self.report = quantize_static(model, self.path, models.reader(model, 6), target="tensorrt", **options)
        self.model = onnx.load(self.path)
        self.nodes = {n.name: n for n in self.model.graph.node}
        self.makers = {v: n for n in self.model.graph.node for v in n.output}
        self.constants = {t.name: numpy_helper.to_array(t) for t in self.model.graph.initializer}

    def readers(self, name: str) -> list[str]:
        """Returns the operators behind a node."""
        made = set(self.nodes[name].output)
        return [n.op_type for n in self.model.graph.node if made & set(n.input)]

    def before(self, name: str) -> list[str | None]:
        """Returns the operator before each input of a node, None for graph inputs and constants."""
        makers = [self.makers.get(v) for v in self.nodes[name].input]
        return [None if maker is None else maker.op_type for maker in makers]

    def decibels(self) -> float:
        feeds = models.feeds(self.source, 4)
        return sqnr_db([o[0] for o in run(self.source, feeds)], [o[0] for o in run(self.path, feeds)])


def convs(*between: Sequence[str], head: bool = True) -> onnx.ModelProto:
    """Convs c0, c1, ... with operators between them."""
    net = Net()
    y = net.conv(net.input("x", [1, 3, 8, 8]), 3, 8, name="c0")
    for index, operators in enumerate(between):
        for op_type in operators:
            y = net.op("Mul", [y, net.op("Sigmoid", [y])]) if op_type == "SiLU" else net.op(op_type, [y])
        y = net.conv(y, 8, 8, name=f"c{index + 1}")
    net.output(net.op("Softmax", [y]) if head else y, [1, 8, 8, 8])
    return net.model()


def residual() -> onnx.ModelProto:
    net = Net()
    x = net.op("Relu", [net.conv(net.input("x", [1, 3, 8, 8]), 3, 8, name="stem")])
    y = net.op("Relu", [net.conv(x, 8, 8, name="first")])
    y = net.op("Add", [net.conv(y, 8, 8, name="second"), x], name="add")
    y = net.conv(net.op("Relu", [y], name="behind"), 8, 4, name="last")
    net.output(net.op("Softmax", [y]), [1, 4, 8, 8])
    return net.model()


def test_rule_trt_weighted_inputs(tmp_path: Path) -> None:
    net = Net()
    y = net.conv(net.input("x", [1, 3, 8, 8]), 3, 8, name="conv")
    up = net.op("ConvTranspose", [y, net.weight((8, 4, 2, 2), name="up_w")], name="up", strides=[2, 2])
    flat = net.op("Flatten", [net.op("MaxPool", [up], kernel_shape=[4, 4], strides=[4, 4])])
    y = net.gemm(flat, 64, 16, name="gemm")
    net.output(net.op("MatMul", [y, net.weight((16, 5), name="m_w")], name="matmul"), [1, 5])
    made = Written(net.model(), tmp_path)
    for name in ("conv", "up", "gemm", "matmul"):
        assert made.before(name)[:2] == [DQ, DQ], name
    assert made.decibels() > 20


@pytest.mark.parametrize("op_type", ["Add", "Mul"])
def test_rule_trt_add_all_int8(tmp_path: Path, op_type: str) -> None:
    net = Net()
    x = net.input("x", [1, 3, 8, 8])
    pools = [net.op("MaxPool", [net.conv(x, 3, 8, name=n)], kernel_shape=[2, 2], strides=[2, 2]) for n in "ab"]
    y = net.op(op_type, pools, name="joint")
    net.output(net.op("Softmax", [net.conv(y, 8, 4, name="last")]), [1, 4, 4, 4])
    made = Written(net.model(), tmp_path)
    assert made.before("joint") == [DQ, DQ]
    assert made.readers("joint") == [Q]


@pytest.mark.parametrize("op_type", ["AveragePool", "GlobalAveragePool"])
def test_rule_trt_pool_int8(tmp_path: Path, op_type: str) -> None:
    net = Net()
    y = net.op("Relu", [net.conv(net.input("x", [1, 3, 8, 8]), 3, 8, name="c")])
    said = {"kernel_shape": [2, 2]} if op_type == "AveragePool" else {}
    y = net.op(op_type, [y], name="pool", **said)
    net.output(net.op("Softmax", [net.conv(y, 8, 4, name="last")]), None)
    made = Written(net.model(), tmp_path)
    assert made.before("pool") == [DQ]
    assert made.readers("pool") == [Q]


def test_rule_trt_concat_int8(tmp_path: Path) -> None:
    net = Net()
    x = net.input("x", [1, 3, 8, 8])
    y = net.op("Concat", [net.op("Relu", [net.conv(x, 3, 8, name=n)]) for n in "ab"], name="joint", axis=1)
    net.output(net.op("Softmax", [net.conv(y, 16, 4, name="last")]), [1, 4, 8, 8])
    made = Written(net.model(), tmp_path)
    assert made.before("joint") == [DQ, DQ]
    assert made.readers("joint") == [Q]


def test_rule_trt_commuting(tmp_path: Path) -> None:
    net = Net()
    y = net.op("Relu", [net.conv(net.input("x", [1, 3, 8, 8]), 3, 8, name="c")])
    y = net.op("MaxPool", [y], name="pool", kernel_shape=[2, 2])
    y = net.op("Transpose", [y], name="turned", perm=[0, 1, 3, 2])
    net.output(net.op("Softmax", [net.conv(y, 8, 4, name="last")]), None)
    made = Written(net.model(), tmp_path)
    scales = {tuple(n.input[1:]) for n in made.model.graph.node if n.op_type == Q and n.output[0] not in "x"}
    for name in ("pool", "turned"):
        (behind,) = [n for n in made.model.graph.node if n.op_type == Q and n.input[0] in made.nodes[name].output]
        before = made.makers[made.nodes[name].input[0]]
        assert list(behind.input[1:]) == list(before.input[1:])
    assert len(scales) == 2  # the input's and one for all behind the Conv


@pytest.mark.parametrize("op_type", ["Relu", "LeakyRelu", "Sigmoid", "HardSwish", "Tanh", "SiLU", "Softplus"])
def test_rule_trt_fused_activations(tmp_path: Path, op_type: str) -> None:
    made = Written(convs([op_type], [op_type]), tmp_path, rewrites=False)
    first = "Sigmoid" if op_type == "SiLU" else op_type
    for name in ("c0", "c1"):
        assert Q not in made.readers(name)
        assert first in made.readers(name)
    assert made.decibels() > 15


def test_rule_trt_no_q_before_batch_normalization(tmp_path: Path) -> None:
    net = Net()
    c = net.conv(net.input("x", [1, 3, 8, 8]), 3, 8, name="c")
    parts = [net.const(np.linspace(0.5, 1.5, 8, dtype=np.float32)) for _ in range(4)]
    y = net.op("Relu", [net.op("BatchNormalization", [c, *parts], name="bn")])
    net.output(net.op("Softmax", [net.conv(y, 8, 4, name="last")]), [1, 4, 8, 8])
    model = net.model()
    model.graph.output.append(onnx.helper.make_tensor_value_info(c, onnx.TensorProto.FLOAT, [1, 8, 8, 8]))  # unfoldable
    made = Written(model, tmp_path)
    assert "BatchNormalization" in made.readers("c")
    assert Q not in made.readers("c")


def test_rule_trt_float_operators(tmp_path: Path) -> None:
    made = Written(convs(["Relu"]), tmp_path)
    (softmax,) = [n for n in made.model.graph.node if n.op_type == "Softmax"]
    assert made.before(softmax.name) == ["Conv"]


def test_rule_trt_float_between(tmp_path: Path) -> None:
    made = Written(convs(["Relu", "Abs"]), tmp_path)
    (node,) = [n for n in made.model.graph.node if n.op_type == "Abs"]
    assert made.before(node.name) == ["Relu"]
    assert made.readers(node.name) == [Q]


def test_rule_trt_int8_zero_point_0(tmp_path: Path) -> None:
    made = Written(models.mobile_block(), tmp_path)
    points = [made.constants[n.input[2]] for n in made.model.graph.node if n.op_type in (Q, DQ)]
    assert points
    assert all(p.dtype == np.int8 and not p.any() for p in points)
    weights = [made.constants[n.input[0]] for n in made.model.graph.node if n.input[0] in made.constants]
    assert min(int(w.min()) for w in weights) >= -127
    for said in ({"activation_type": QuantType.QUInt8}, {"weight_type": QuantType.QUInt8}):
        with pytest.raises(OptionError, match="int8 with zero point 0 alone"):
            Written(models.mobile_block(), tmp_path, **said)
    with pytest.raises(OptionError, match="ActivationSymmetric is False"):
        Written(models.mobile_block(), tmp_path, extra_options={"ActivationSymmetric": False})


def test_rule_trt_weights_by_channel(tmp_path: Path) -> None:
    net = Net()
    y = net.conv(net.input("x", [1, 3, 8, 8]), 3, 8, name="conv")
    y = net.op("ConvTranspose", [y, net.weight((8, 4, 2, 2), name="up_w")], name="up", strides=[2, 2])
    y = net.op("ConvTranspose", [y, net.weight((4, 3, 2, 2), name="g_w")], name="grouped", group=2, strides=[2, 2])
    net.output(net.op("Softmax", [y]), None)
    made = Written(net.model(), tmp_path)
    axes = {}
    for name in ("conv", "up", "grouped"):
        dq = made.makers[made.nodes[name].input[1]]
        scale = made.constants[dq.input[1]]
        axis = next((a.i for a in dq.attribute if a.name == "axis"), None)
        axes[name] = (axis, scale.shape)
    assert axes["conv"] == (0, (8,))
    assert axes["up"] == (1, (4,))
    assert axes["grouped"] == (1, (3,))


def test_rule_trt_no_output_q(tmp_path: Path) -> None:
    made = Written(convs([], [], head=False), tmp_path, protect_outputs="int8")
    assert made.readers("c2") in ([], [Q])  # an output that the caller wants in int8
    made = Written(convs(["Relu"]), tmp_path)
    assert made.readers("c1") == ["Softmax"]


def test_rule_trt_shortcut_alone(tmp_path: Path) -> None:
    made = Written(residual(), tmp_path)
    assert sorted(made.before("add"), key=str) == ["Conv", DQ]
    assert made.readers("second") == ["Add"]
    assert made.readers("add") == ["Relu"]
    assert made.readers("behind") == [Q]
    assert made.decibels() > 20


def test_a_kernel_that_writes_float_adds_the_shortcut_in_float(tmp_path: Path) -> None:
    net = Net()
    x, other = net.input("x", [1, 3, 8, 8]), net.input("other", [1, 8, 8, 8])
    y = net.op("Add", [net.conv(x, 3, 8, name="c"), other], name="add")
    net.output(net.op("Softmax", [y]), [1, 8, 8, 8])
    made = Written(net.model(), tmp_path)
    assert made.before("c")[0] == DQ
    assert made.before("add") == ["Conv", None]


def test_rule_trt_float_bias(tmp_path: Path) -> None:
    made = Written(models.residual_block(), tmp_path)
    biases = [n.input[2] for n in made.model.graph.node if n.op_type in ("Conv", "Gemm") and len(n.input) > 2]
    assert biases
    assert all(made.constants[b].dtype == np.float32 for b in biases)


def test_rule_trt_no_integer_operators(tmp_path: Path) -> None:
    made = Written(models.conv_relu_chain(2), tmp_path)
    assert not [n for n in made.model.graph.node if n.op_type.startswith("QLinear") or n.op_type.endswith("Integer")]
    with pytest.raises(OptionError, match="does not read files in format 'qop'"):
        Written(models.conv_relu_chain(2), tmp_path, quant_format=QuantFormat.QOperator)


@pytest.mark.parametrize("name", models.ALL)
def test_rule_trt_standard_operators(tmp_path: Path, name: str) -> None:
    made = Written(models.ALL[name](), tmp_path)
    assert {n.domain for n in made.model.graph.node} <= {"", "ai.onnx"}
    assert made.report.plan.integer_nodes()
