"""Files for TensorRT are made as its documents say; nothing is run there."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import QuantFormat

from kenosis_ort import OptionError
from tests import models
from tests.planning import parse
from tests.targets.files import DQ, Q, Written

written = partial(Written, target="tensorrt")


@dataclass(frozen=True)
class Case:
    """A net over a picture of three channels, and what stands around its nodes in the file.

    Attributes:
        body: What follows ``c = Conv (x, w)``, a Softmax of ``z`` but for the output.
        before: The operators before a node's inputs, apart by spaces, by the node.
        behind: The operators that read a node, likewise.
        decibels: The least that the file is worth.
        weights: Contents of constants.
        outputs: Of the net.
        options: Of the call.
    """

    body: str
    before: dict[str, str] = field(default_factory=dict)
    behind: dict[str, str] = field(default_factory=dict)
    decibels: float = 0.0
    weights: dict[str, Any] = field(default_factory=dict)
    outputs: str = "y"
    options: dict[str, Any] = field(default_factory=dict)

    def net(self) -> onnx.ModelProto:
        weights = "float[8,3,3,3] w, float[8,3,3,3] w2, float[8,8,3,3] v, float[4,16,1,1] wide, float[8,4,2,2] up"
        more = "float[4,3,2,2] g, float[64,16] m, float[16] b, float[16,5] n, float[8] one"
        head = f"net (float[1,3,8,8] x) => ({self.outputs}) <{weights}, {more}>"
        return parse(f"{head} {{ {CONV} {self.body} y = Softmax (z) }}", self.weights)


CONV = "c = Conv <pads = [1,1,1,1]> (x, w)"
NEXT = "z = Conv <pads = [1,1,1,1]> ({}, v)"
POOL = "MaxPool <kernel_shape = [2,2], strides = [2,2]>"
ACTIVATIONS = ("Relu", "LeakyRelu", "Sigmoid", "HardSwish", "Tanh", "Softplus")
EXAMPLES: dict[str, list[Case]] = {
    "trt-weighted-inputs": [
        Case(
            "u = ConvTranspose <strides = [2,2]> (c, up) p = MaxPool <kernel_shape = [4,4], strides = [4,4]> (u) "
            "f = Flatten (p) d = Gemm (f, m, b) z = MatMul (d, n)",
            {"Conv_c": f"{DQ} {DQ}", "ConvTranspose_u": f"{DQ} {DQ}", "Gemm_d": f"{DQ} {DQ}", "MatMul_z": f"{DQ} {DQ}"},
            decibels=15,
        )
    ],
    "trt-add-all-int8": [
        Case(
            f"d = Conv <pads = [1,1,1,1]> (x, w2) p = {POOL} (c) q = {POOL} (d) j = {op} (p, q) {NEXT.format('j')}",
            {f"{op}_j": f"{DQ} {DQ}"},
            {f"{op}_j": Q},
        )
        for op in ("Add", "Mul")
    ],
    "trt-pool-int8": [
        Case(f"r = Relu (c) p = {op} (r) z = Conv <pads = [1,1,1,1]> (p, v)", {f"{name}_p": DQ}, {f"{name}_p": Q})
        for name, op in (("AveragePool", "AveragePool <kernel_shape = [2,2]>"), ("GlobalAveragePool",) * 2)
    ],
    "trt-concat-int8": [
        Case(
            "d = Conv <pads = [1,1,1,1]> (x, w2) r = Relu (c) s = Relu (d) j = Concat <axis = 1> (r, s) "
            "z = Conv (j, wide)",
            {"Concat_j": f"{DQ} {DQ}"},
            {"Concat_j": Q},
        )
    ],
    "trt-fused-activations": [
        *(
            Case(
                f"a = {op} (c) d = Conv <pads = [1,1,1,1]> (a, v) e = {op} (d) {NEXT.format('e')}",
                behind={"Conv_c": op, "Conv_d": op},
                decibels=15,
                options={"rewrites": False},
            )
            for op in ACTIVATIONS
        ),
        Case(
            f"s = Sigmoid (c) a = Mul (c, s) {NEXT.format('a')}",
            behind={"Conv_c": "Mul Sigmoid", "Mul_a": Q},
            decibels=15,
            options={"rewrites": False},
        ),
        Case(  # an output between them, so that it cannot be folded
            f"n1 = BatchNormalization (c, one, one, one, one) a = Relu (n1) {NEXT.format('a')}",
            behind={"Conv_c": "BatchNormalization"},
            weights={"one": np.linspace(0.5, 1.5, 8, dtype=np.float32)},
            outputs="y, c",
        ),
    ],
    "trt-float-operators": [Case(f"r = Relu (c) {NEXT.format('r')}", {"Softmax_y": "Conv"})],
    "trt-float-between": [
        Case(f"r = Relu (c) a = Abs (r) {NEXT.format('a')}", {"Abs_a": "Relu"}, {"Abs_a": Q})
    ],
    "trt-no-output-q": [Case(f"r = Relu (c) {NEXT.format('r')}", behind={"Conv_z": "Softmax"})],
    "trt-shortcut-alone": [
        Case(
            "r = Relu (c) d = Conv <pads = [1,1,1,1]> (r, v) e = Relu (d) s = Conv <pads = [1,1,1,1]> (e, v) "
            f"a = Add (s, r) q = Relu (a) {NEXT.format('q')}",
            {"Add_a": f"Conv {DQ}"},
            {"Conv_s": "Add", "Add_a": "Relu", "Relu_q": Q},
            decibels=20,
        ),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=f"{rule}-{n}") for rule, cases in EXAMPLES.items() for n, c in enumerate(cases)]
)
def test_rule(case: Case, tmp_path: Path) -> None:
    made = written(case.net(), tmp_path, **case.options)
    for name, operators in case.before.items():
        assert made.before(name)[: len(operators.split())] == operators.split(), name
    for name, operators in case.behind.items():
        assert made.readers(name) == operators.split(), name
    assert made.decibels() > case.decibels


def test_rule_trt_commuting(tmp_path: Path) -> None:
    """One grid before and behind what moves data."""
    body = f"r = Relu (c) p = {POOL} (r) t = Transpose <perm = [0,1,3,2]> (p) {NEXT.format('t')}"
    made = written(Case(body).net(), tmp_path)
    for name in ("MaxPool_p", "Transpose_t"):
        (behind,) = [n for n in made.model.graph.node if n.op_type == Q and n.input[0] in made.nodes[name].output]
        assert list(behind.input[1:]) == list(made.makers[made.nodes[name].input[0]].input[1:])
    scales = {tuple(n.input[1:]) for n in made.model.graph.node if n.op_type == Q}
    assert len(scales) == 2  # the input's and one for all behind the Conv


def test_rule_trt_int8_zero_point_0(tmp_path: Path) -> None:
    made = written(models.mobile_block(), tmp_path)
    points = [made.constants[n.input[2]] for n in made.model.graph.node if n.op_type in (Q, DQ)]
    assert points
    assert all(p.dtype == np.int8 and not p.any() for p in points)
    weights = [made.constants[n.input[0]] for n in made.model.graph.node if n.input[0] in made.constants]
    assert min(int(w.min()) for w in weights) >= -127
    with pytest.raises(OptionError, match="ActivationSymmetric is False"):
        written(models.mobile_block(), tmp_path, extra_options={"ActivationSymmetric": False})


def test_rule_trt_weights_by_channel(tmp_path: Path) -> None:
    up, grouped = "ConvTranspose <strides = [2,2]>", "ConvTranspose <group = 2, strides = [2,2]>"
    made = written(Case(f"u = {up} (c, up) z = {grouped} (u, g)").net(), tmp_path)
    for name, axis, count in (("Conv_c", 0, 8), ("ConvTranspose_u", 1, 4), ("ConvTranspose_z", 1, 3)):
        dq = made.makers[made.nodes[name].input[1]]
        assert next((a.i for a in dq.attribute if a.name == "axis"), None) == axis
        assert made.constants[dq.input[1]].shape == (count,)


def test_an_output_that_the_caller_wants_in_int8_has_q(tmp_path: Path) -> None:
    made = written(models.conv_relu_chain(2), tmp_path, protect_outputs="int8")
    assert set(made.readers(made.makers[made.source.graph.output[0].name].name)) <= {Q}


def test_a_kernel_that_writes_float_adds_the_shortcut_in_float(tmp_path: Path) -> None:
    head = "(float[1,3,8,8] x, float[1,8,8,8] other) => (y) <float[8,3,3,3] w>"
    made = written(parse(f"{head} {{ {CONV} a = Add (c, other) y = Softmax (a) }}"), tmp_path)
    assert made.before("Conv_c")[0] == DQ
    assert made.before("Add_a") == ["Conv", ""]


def test_rule_trt_float_bias(tmp_path: Path) -> None:
    made = written(models.residual_block(), tmp_path)
    biases = [n.input[2] for n in made.model.graph.node if n.op_type in ("Conv", "Gemm") and len(n.input) > 2]
    assert biases
    assert all(made.constants[b].dtype == np.float32 for b in biases)


def test_rule_trt_no_integer_operators(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="does not read files in format 'qop'"):
        written(models.conv_relu_chain(2), tmp_path, quant_format=QuantFormat.QOperator)


@pytest.mark.parametrize("name", models.ALL)
def test_rule_trt_standard_operators(tmp_path: Path, name: str) -> None:
    made = written(models.ALL[name](), tmp_path)
    assert {n.domain for n in made.model.graph.node} <= {"", "ai.onnx"}
    assert not [n for n in made.model.graph.node if n.op_type.startswith("QLinear") or n.op_type.endswith("Integer")]
    assert made.report.plan.integer_nodes()
