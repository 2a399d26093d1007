"""Files for TensorRT are made as its documents say; nothing is run there."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from onnxruntime.quantization import QuantFormat

from kenosis_ort import OptionError
from tests import models
from tests.planning import parse
from tests.targets.files import DQ, Q, Written, net_of
from tests.targets.qdq import each_case

written = partial(Written, target="tensorrt")


SAME = "Conv <pads = [1,1,1,1]>"
CONV = f"c = {SAME} (x, w8_3_3_3)"


def net(body, outputs="y"):
    """A Conv of a picture to ``c``, nodes from there to ``z``, and a Softmax of that."""
    some = np.linspace(0.5, 1.5, 8, dtype=np.float32)
    return net_of(f"{CONV} {body} y = Softmax (z)", "1,3,8,8", outputs, some=some)


class Case(NamedTuple):
    """A net, and what stands around its nodes in the file.

    Attributes:
        body: Its nodes.
        before: The operators before a node's inputs, apart by spaces, by the node.
        behind: The operators that read a node, likewise.
        decibels: The least that the file is worth.
        outputs: Of the net.
        options: Of the call.
    """

    body: str
    before: Mapping[str, str] = {}
    behind: Mapping[str, str] = {}
    decibels: float = 0.0
    outputs: str = "y"
    options: Mapping[str, Any] = {}


NEXT = f"z = {SAME} ({{}}, w8_8_3_3)"
POOL = "MaxPool <kernel_shape = [2,2], strides = [2,2]>"
ACTIVATIONS = ("Relu", "LeakyRelu", "Sigmoid", "HardSwish", "Tanh", "Softplus")
EXAMPLES = {
    "trt-weighted-inputs": [
        Case(
            "u = ConvTranspose <strides = [2,2]> (c, w8_4_2_2) p = MaxPool <kernel_shape = [4,4], strides = [4,4]> (u) "
            "f = Flatten (p) d = Gemm (f, w64_16, zeros16) z = MatMul (d, w16_5)",
            {"Conv_c": f"{DQ} {DQ}", "ConvTranspose_u": f"{DQ} {DQ}", "Gemm_d": f"{DQ} {DQ}", "MatMul_z": f"{DQ} {DQ}"},
            decibels=15,
        )
    ],
    "trt-add-all-int8": [
        Case(
            f"d = {SAME} (x, w8_3_3_3b) p = {POOL} (c) q = {POOL} (d) j = {op} (p, q) {NEXT.format('j')}",
            {f"{op}_j": f"{DQ} {DQ}"}, {f"{op}_j": Q},
        )
        for op in ("Add", "Mul")
    ],
    "trt-pool-int8": [
        Case(f"r = Relu (c) p = {op} (r) z = {SAME} (p, w8_8_3_3)", {f"{name}_p": DQ}, {f"{name}_p": Q})
        for name, op in (("AveragePool", "AveragePool <kernel_shape = [2,2]>"), ("GlobalAveragePool",) * 2)
    ],
    "trt-concat-int8": [
        Case(
            f"d = {SAME} (x, w8_3_3_3b) r = Relu (c) s = Relu (d) j = Concat <axis = 1> (r, s) "
            "z = Conv (j, w4_16_1_1)",
            {"Concat_j": f"{DQ} {DQ}"}, {"Concat_j": Q},
        )
    ],
    "trt-fused-activations": [
        *(Case(
              f"a = {op} (c) d = {SAME} (a, w8_8_3_3) e = {op} (d) {NEXT.format('e')}",
              behind={"Conv_c": op, "Conv_d": op}, decibels=15, options={"rewrites": False},
          )
          for op in ACTIVATIONS),
        Case(
            f"s = Sigmoid (c) a = Mul (c, s) {NEXT.format('a')}", behind={"Conv_c": "Mul Sigmoid", "Mul_a": Q},
            decibels=15, options={"rewrites": False},
        ),
        Case(  # an output between them, so that it cannot be folded
            f"n1 = BatchNormalization (c, some, some, some, some) a = Relu (n1) {NEXT.format('a')}",
            behind={"Conv_c": "BatchNormalization"}, outputs="y, c",
        ),
    ],
    "trt-float-operators": [Case(f"r = Relu (c) {NEXT.format('r')}", {"Softmax_y": "Conv"})],
    "trt-float-between": [
        Case(f"r = Relu (c) a = Abs (r) {NEXT.format('a')}", {"Abs_a": "Relu"}, {"Abs_a": Q})],
    "trt-no-output-q": [Case(f"r = Relu (c) {NEXT.format('r')}", behind={"Conv_z": "Softmax"})],
    "trt-shortcut-alone": [
        Case(
            f"r = Relu (c) d = {SAME} (r, w8_8_3_3) e = Relu (d) s = {SAME} (e, w8_8_3_3) "
            f"a = Add (s, r) q = Relu (a) {NEXT.format('q')}",
            {"Add_a": f"Conv {DQ}"}, {"Conv_s": "Add", "Add_a": "Relu", "Relu_q": Q}, decibels=20,
        ),
    ],
}  # fmt: skip


@each_case(EXAMPLES)
def test_rule(case, tmp_path):
    made = written(net(case.body, case.outputs), tmp_path, **case.options)
    for name, operators in case.before.items():
        assert made.before(name)[: len(operators.split())] == operators.split(), name
    for name, operators in case.behind.items():
        assert made.readers(name) == operators.split(), name
    assert made.decibels() > case.decibels


def test_rule_trt_commuting(tmp_path):
    """One grid before and behind what moves data."""
    body = f"r = Relu (c) p = {POOL} (r) t = Transpose <perm = [0,1,3,2]> (p) {NEXT.format('t')}"
    made = written(net(body), tmp_path)
    for name in ("MaxPool_p", "Transpose_t"):
        (behind,) = [n for n in made.model.graph.node if n.op_type == Q and n.input[0] in made.nodes[name].output]
        assert list(behind.input[1:]) == list(made.makers[made.nodes[name].input[0]].input[1:])
    assert len(made.grids.values()) > len({*made.grids.values()}) == 2  # the input's and one for all behind the Conv


def test_rule_trt_weights_by_channel(tmp_path):
    up, grouped = "ConvTranspose <strides = [2,2]>", "ConvTranspose <group = 2, strides = [2,2]>"
    made = written(net(f"u = {up} (c, w8_4_2_2) z = {grouped} (u, w4_3_2_2)"), tmp_path)
    for name, axis, count in (("Conv_c", 0, 8), ("ConvTranspose_u", 1, 4), ("ConvTranspose_z", 1, 3)):
        dq = made.makers[made.nodes[name].input[1]]
        assert next((a.i for a in dq.attribute if a.name == "axis"), None) == axis
        assert made.constants[dq.input[1]].shape == (count,)


def test_an_output_that_the_caller_wants_in_int8_has_q(tmp_path):
    made = written(models.conv_relu_chain(2), tmp_path, protect_outputs="int8")
    assert set(made.readers(made.makers[made.source.graph.output[0].name].name)) <= {Q}


def test_a_kernel_that_writes_float_adds_the_shortcut_in_float(tmp_path):
    head = "(float[1,3,8,8] x, float[1,8,8,8] other) => (y) <float[8,3,3,3] w8_3_3_3>"
    made = written(parse(f"{head} {{ {CONV} a = Add (c, other) y = Softmax (a) }}"), tmp_path)
    assert (made.before("Conv_c")[0], made.before("Add_a")) == (DQ, ["Conv", ""])


@pytest.mark.parametrize(("options", "words"), [
    ({"quant_format": QuantFormat.QOperator}, "does not read files in format 'qop'"),
    ({"extra_options": {"ActivationSymmetric": False}}, "ActivationSymmetric is False"),
    ({"extra_options": {"WeightSymmetric": False}}, "WeightSymmetric is False"),
    *(({"extra_options": {"TensorQuantOverrides": {name: [{"symmetric": False}]}}}, f"entry of '{name}'")
      for name in ("x", "conv0_w")),
])  # fmt: skip
def test_rule_trt_no_integer_operators(tmp_path, options, words):
    with pytest.raises(OptionError, match=words):
        written(models.conv_relu_chain(2), tmp_path, **options)


@pytest.mark.parametrize("name", models.ALL)
def test_rule_trt_standard_operators(tmp_path, name):
    """Whatever the net: activations and weights are int8 of zero point 0, biases float, operators those of ONNX."""
    made = written(models.ALL[name](), tmp_path)
    assert {n.domain for n in made.model.graph.node} <= {"", "ai.onnx"}
    assert not [n for n in made.model.graph.node if n.op_type.startswith("QLinear") or n.op_type.endswith("Integer")]
    assert made.report.plan.integer_nodes()
    pairs = [n for n in made.model.graph.node if n.op_type in (Q, DQ)]
    assert all(made.constants[n.input[2]].dtype == np.int8 and not made.constants[n.input[2]].any() for n in pairs)
    assert min(int(made.constants[n.input[0]].min()) for n in pairs if n.input[0] in made.constants) >= -127
    biases = [n.input[2] for n in made.model.graph.node if n.op_type in ("Conv", "Gemm") and len(n.input) > 2]
    assert all(made.constants[b].dtype == np.float32 for b in biases)


test_rule_trt_int8_zero_point_0 = test_rule_trt_float_bias = test_rule_trt_standard_operators
