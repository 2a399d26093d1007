"""What each rule of the target makes of a single node, and what forbids the integer kernel."""

from typing import Any

import numpy as np
import pytest

from kenosis_ort.plan import Kind
from kenosis_ort.targets import Role
from tests.placement.build import CONV, classes_of
from tests.planning import parse, plan_of

CONV_NET = f"net (float[1,3,8,8] x) => (y) <float[4,3,3,3] w, float[4] b> {{ y = Conv <{CONV}> (x, w, b) }}"


def only(text: str, weights: dict[str, Any] | None = None, **options: Any) -> tuple[Role, str, str]:
    """Returns (role, rule, reason) of the last node."""
    c = list(classes_of(text, weights, **options).values())[-1]
    return c.role, c.rule, c.reason


@pytest.mark.parametrize(("net", "rule", "said"), [
    ("float[1,3,8,8] x, float[4,3,1,1] w) => (y) { y = Conv (x, w) }", "conv-integer", "constant weight"),
    ("float[1,3,8,8] x, float[4] b) => (y) <float[4,3,1,1] w> { y = Conv (x, w, b) }", "conv-integer",
     "not a constant"),
    ("float[2,3] x) => (y) <float[3,4] w> { y = Gemm <alpha = 0.5> (x, w) }", "gemm-integer", "alpha"),
    ("float[3,2] x) => (y) <float[3,4] w> { y = Gemm <transA = 1> (x, w) }", "gemm-integer", "transposed"),
    *((f"float[2,3] x) => (y) <float[3,4] w, {bias} b> {{ y = Gemm (x, w, b) }}", "gemm-integer",
       "one value a channel") for bias in ("float[2,4]", "float[1]")),
    ("float[2,3] x, float[3,4] v) => (y) { y = MatMul (x, v) }", "matmul-activations", "constant weight"),
    ("float[2,3] x) => (y) <float[3] w> { y = MatMul (x, w) }", "matmul-integer", "not a matrix"),
    ("float[2,5,3] x) => (y) <float[2,3,4] w> { y = MatMul (x, w) }", "matmul-integer", "not a matrix"),
    ("int32[2,3] x) => (int32[2,4] y) <int32[3,4] w> { y = MatMul (x, w) }", "not-float32", "float32"),
    ("float[1,3] x) => (y) { y = Softmax (x) }", "softmax-lut", "QLinearSoftmax"),
    ("float[1,3] x) => (y) { y = Round (x) }", "unsupported-op", "no integer kernel for Round"),
    ("float[1,3] x) => (float[1,3] y) { y = com.microsoft.Rfft (x) }", "unsupported-op", "com.microsoft.Rfft"),
])  # fmt: skip
def test_what_forbids_the_integer_kernel(net: str, rule: str, said: str) -> None:
    role, found, reason = only(f"({net}")
    assert (role, found) == (Role.FLOAT, rule)
    assert said in reason


@pytest.mark.parametrize(("weight", "said"), [
    (np.full((3, 4), np.nan), "holds NaN or infinity"), (np.full((3, 4), np.inf), "holds NaN or infinity"),
    (np.zeros((3, 0)), "empty or a scalar"),
])  # fmt: skip
def test_weights_that_have_no_scale(weight: Any, said: str) -> None:
    found = only("(float[2,3] x) => (y) { y = MatMul (x, w) }", {"w": weight.astype(np.float32)})
    assert (found[0], said in found[2]) == (Role.FLOAT, True), found


@pytest.mark.parametrize(("node", "constant", "role"), [
    *((f"{op} (x, k)", operand, Role.BINARY) for op in ("Add", "Mul") for operand in (2.0, [2.0])),
    # A constant by channel is quantized if nothing is lost.
    ("Add (x, k)", [[[[1.0]], [[1.5]], [[2.25]]]], Role.ISLAND),
    ("Mul (x, k)", [[[[1.0]], [[1.5]], [[2.25]]]], Role.BINARY),
    *((f"{op} (x, k)", [[[[1.0]], [[3.1416]], [[2.7183]]]], Role.ISLAND) for op in ("Add", "Mul")),
    ('Resize <mode = "nearest"> (x, , k)', [1, 1, 2, 2], Role.PASS_THROUGH),
    ('Resize <mode = "linear"> (x, , k)', [1, 1, 2, 2], Role.ISLAND),
])  # fmt: skip
def test_what_a_constant_and_a_mode_allow(node: str, constant: Any, role: Role) -> None:
    assert only(f"(float[1,3,8,8] x) => (y) {{ y = {node} }}", {"k": np.array(constant, np.float32)})[0] is role


def test_maxpool_whose_indices_are_read_stays_float() -> None:
    text = "net (float[1,3,8,8] x) => (y, int64[1,3,7,7] i) { y, i = MaxPool <kernel_shape = [2,2]> (x) }"
    assert (only(text)[0], "'i' is used" in only(text)[2]) == (Role.ISLAND, True)


def test_the_callers_wishes() -> None:
    assert only(CONV_NET)[:2] == (Role.ANCHOR, "conv-integer")
    assert only(CONV_NET, nodes_to_exclude=frozenset({"Conv_y"}))[:2] == (Role.FLOAT, "caller-excluded")
    assert only(CONV_NET, op_types=frozenset({"MatMul"}))[:2] == (Role.FLOAT, "caller-op-types")
    assert only(CONV_NET, op_types=frozenset({"Conv"}))[0] is Role.ANCHOR
    assert only(CONV_NET, keep_float={"Conv_y": "it runs in float"})[1:] == ("verified-float", "it runs in float")
    assert only(CONV_NET, protected={"Conv_y": "a mask"})[1:] == ("protected-input", "a mask")


def test_a_relu_needs_no_mention_in_the_callers_op_types() -> None:
    relu = "net (float[1,3] x) => (y) { y = Relu (x) }"
    assert only(relu, op_types=frozenset({"Conv"}))[0] is Role.ACTIVATION
    assert only(relu, nodes_to_exclude=frozenset({"Relu_y"}))[0] is Role.ISLAND
    add = "net (float[1,3] x, float[1,3] z) => (y) { y = Add (x, z) }"
    assert only(add, nodes_to_exclude=frozenset({"Add_y"}))[0] is Role.ISLAND, "the integer domain goes on around it"


def test_a_shape_operator_before_a_body_takes_part_even_if_excluded() -> None:
    """The session dies of a float one (rule pass-through-into-body-dies)."""
    text = """net (float[1,4] x, bool f) => (y) {
      r = Reshape (x, s)
      y = If (f) <then_branch = t () => (float[2,2] a) { a = Neg (r) },
                  else_branch = e () => (float[2,2] b) { b = Tanh (r) }>
    }"""
    wish = frozenset({"Reshape_r"})
    assert classes_of(text, {"s": np.array([2, 2])}, nodes_to_exclude=wish)["Reshape_r"].role is Role.PASS_THROUGH


def test_data_are_the_values_that_the_kernel_would_read_quantized() -> None:
    c = classes_of("net (float[1,3] x, float[1,3] z) => (y) { y = Concat <axis = 0> (x, z, x) }")["Concat_y"]
    assert [v.name for v in c.data] == ["x", "z", "x"]
    assert [v.name for v in classes_of(CONV_NET)["Conv_y"].data] == ["x"]


def test_a_pool_runs_on_bytes_from_operator_set_12_on() -> None:
    text = """net (float[1,4,8,8] x) => (float[1,4,4,4] y) <float[4,4,1,1] w, float[4,4,1,1] v> {
        c = Conv (x, w)  p = MaxPool <kernel_shape = [2,2], strides = [2,2]> (c)  y = Conv (p, v) }"""
    pools = [plan_of(parse(text, opset=opset), min_opset=opset).by_node["MaxPool_p"] for opset in (11, 12)]
    assert [node.kind for node in pools] == [Kind.FLOAT, Kind.PASS_THROUGH]
    assert pools[0].reason == "needs opset 12, the model has 11"
