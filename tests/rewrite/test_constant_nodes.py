"""Nodes that compute nothing at run time: copies, constants, branches of a constant condition."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from onnx import TensorProto, numpy_helper

from kenosis_ort.rewrite import PREPARATION
from kenosis_ort.rewrite.constant_nodes import drop_identity, fold_constants, inline_branch
from tests.graph.build import assert_same, ready
from tests.models import Net, normal
from tests.rewrite.forms import check, ops, parse, rewritten

X = normal((2, 3))


def dropped(body, expected, outputs="float[2,3] y", declared="", **weights):
    proto = parse(f"(float[2,3] x) => ({outputs}) <{declared}> {{ {body} }}".replace("<>", ""), weights)
    return check(drop_identity, proto, X, expected, rtol=0)


@pytest.mark.parametrize(("body", "outputs", "expected"), [
    ("a = Relu(x) b = Identity(a) y = Identity(b)", "float[2,3] y", "Relu"),
    # An output that only copies a needed value stays.
    ("a = Relu(x) y = Identity(a) z = Neg(a)", "float[2,3] y, float[2,3] z", "Relu Identity Neg"),
    ("y = Identity(x)", "float[2,3] y", "Identity"),
    ("a = Relu(x) y = Identity(a)", "float[2,3] a, float[2,3] y", "Relu Identity"),
    # What joins or adds one value alone goes; a cache that is handed on is read as it came.
    ("a = Relu(x) b = Concat<axis = 1>(a) y = Neg(b)", "float[2,3] y", "Relu Neg"),
    ("a = Relu(x) b = Max(a) c = Sum(b) y = Neg(c)", "float[2,3] y", "Relu Neg"),
    ("y = Concat<axis = 1>(x, x)", "float[2,6] y", "Concat"), ("a = Sum(x) y = Relu(a)", "float[2,3] y", "Relu"),
])  # fmt: skip
def test_copies_go_and_what_an_output_needs_stays(body, outputs, expected):
    dropped(body, expected, outputs)


def test_dropout_in_inference_goes_and_in_training_stays():
    declared = "float rate, bool flag"
    dropped("a = Dropout(x, rate) y = Relu(a)", "Relu", declared=declared, rate=0.5)
    dropped("a = Dropout(x, rate, flag) y = Relu(a)", "Relu", declared=declared, rate=0.5, flag=False)
    text = f"(float[2,3] x) => (float[2,3] y) <{declared}> {{ a = Dropout(x, rate, flag) y = Relu(a) }}"
    assert ops(rewritten(drop_identity, parse(text, {"rate": 0.5, "flag": True})).proto) == ["Dropout", "Relu"]


@given(st.lists(st.tuples(st.sampled_from(["Identity", "Neg"]), st.integers(0, 9)), min_size=1, max_size=10), st.data())
def test_any_graph_of_copies_computes_the_same(steps, data):
    """Nodes read any earlier value, several values are outputs."""
    g, names = Net.over([2, 3]), ["x"]
    for op, at in steps:
        names.append(g.op(op, [names[at % len(names)]]))
    outputs = data.draw(st.lists(st.sampled_from(names[1:]), min_size=1, unique=True))
    kept = data.draw(st.lists(st.sampled_from(names[1:]), max_size=2))
    prepared = check(drop_identity, g.of(*outputs), X, rtol=0, keep_values=kept).proto
    assert set(kept) <= {name for node in prepared.graph.node for name in node.output}
    assert all(v.type.tensor_type.elem_type == TensorProto.FLOAT for v in prepared.graph.value_info)


SHAPE = "s = Shape(x) d = Gather(s, i) t = Concat<axis = 0>(d, m) y = Reshape(x, t)"


@pytest.mark.parametrize(("x", "declared", "body", "expected", "left"), [
    ("2,3", "float[4,3] w, int64[2] size", "t = Transpose(w) r = Reshape(t, size) y = MatMul(x, r)", "MatMul", "r"),
    ("2,3", "float[4,3] w", "a, b = Split<axis = 0>(w) p = Mul(a, b) h = Add(x, p) y = Add(h, b)", "Add Add", "p b"),
    ("2,3", "int64[1] i, int64[1] m", SHAPE, "Reshape", "t"),
    ("N,3", "int64[1] i, int64[1] m", SHAPE, "Shape Gather Concat Reshape", "i m"),
    *(("2,3", "", f"s = Shape{bounds}(x) y = Cast<to = 1>(s)", "Cast", "s")
      for bounds in ("", "<start = 1>", "<start = -2, end = -1>", "<end = 9>")),
    ("2,3", "int64[2] large", "c = ConstantOfShape(large) r = ReduceSum(c) y = Add(x, r)",
     "ConstantOfShape ReduceSum Add", "large"),
    ("2,3", "float16[3,90000] w", "f = Cast<to = 1>(w) y = MatMul(x, f)", "MatMul", "f"),
    ("2,3", "int8[3,4] w, float s", "f = DequantizeLinear(w, s) y = MatMul(x, f)", "DequantizeLinear MatMul", "w s"),
    ("2,3", "float[3] z", "n = RandomNormal<shape = [3]>() m = Mul(n, z) y = Add(x, m)", "RandomNormal Mul Add", "z"),
    ("2,3", "float[3] z", "kept = Neg(z) y = Add(x, kept)", "Neg Add", "z"),
], ids=["in a row", "several outputs", "a known shape", "an open one", *["part of a shape"] * 4, "large results",
        "half precision", "stored quantized", "random", "a value to keep"])  # fmt: skip
def test_what_is_folded_and_what_stays(x, declared, body, expected, left):
    known = {"size": [3, 4], "i": [0], "m": [-1], "large": [1000, 1000], "z": np.zeros(3)}
    given = {name: value for name, value in known.items() if f" {name}," in f"{declared},"}
    proto = parse(f"(float[{x}] x) => (y) <{declared}> {{ {body} }}".replace("<>", ""), given)
    result = check(fold_constants, proto, X, expected, rtol=0, keep_values=["kept"])
    assert {t.name for t in result.proto.graph.initializer} == {*left.split()}


def branch(tag, body, shape="a,b,c"):
    """A body that computes a value of its name."""
    return f"{tag} () => (float[{shape}] {tag}y) {{ {body} }}"


def net(then, other, *, front="", behind="", x="N,1,4", y="a,b,c", inputs="", outputs="", declared="", **known):
    text = f"""(float[{x}] x{inputs}) => (float[{y}] y{outputs}) <{declared}> {{ r = Relu(x) {front}
    i = If(c) <then_branch = {then}, else_branch = {other}> {behind} y = Neg(i) }}""".replace("<>", "")
    return parse(text, known)


def static(proto):
    return ready(proto, rewrites=PREPARATION)


def test_a_node_that_the_runtime_refuses_stops_nothing():
    text = f"""(float[2,3] x) => (float[2,3] y) <float[3] c, int64[1] i, bool f> {{ g = Gather(c, i) y = If(f) <
    then_branch = {branch("t", "ty = Identity(x)", "2,3")}, else_branch = {branch("e", "ey = Identity(g)", "1")}> }}"""
    proto = parse(text, {"i": [7], "f": True})  # out of range: fails when run
    assert ops(rewritten(fold_constants, proto).proto) == ["Gather", "If"]


BRANCH_X = {"x": normal((2, 1, 4))}
EXP, NEG = branch("e", "ey = Exp(r)"), branch("d", "dy = Neg(r)")


@given(st.booleans(), st.booleans())
def test_the_branch_of_a_constant_condition_takes_the_place(taken, scalar):
    then = branch("t", "tm = Mul(r, tw) ty = Add(tm, x)").replace("{", "<float[1,1] tw = {2.0}> {", 1)
    proto = net(then, EXP, declared="bool c" if scalar else "bool[1] c", c=taken)
    result = static(proto)
    assert ops(result.proto) == (["Relu", "Mul", "Add", "Neg"] if taken else ["Relu", "Exp", "Neg"])
    assert_same(proto, result.proto, BRANCH_X, rtol=0)
    assert (result.nodes["i"], any("constant condition" in note for note in result.notes)) == ((), True)


@pytest.mark.parametrize("known", [True, False])
def test_a_condition_on_one_known_dimension(known):
    """As exporters write a Squeeze: the batch is open, the squeezed dimension is known."""
    front = "s = Shape(r) d = Gather(s, one) c = Equal(d, one)"
    then, other = branch("t", "ty = Squeeze(r, axis)", "a,b"), branch("e", "ey = Identity(r)")
    more = {
        "x": f"N,{1 if known else 'C'},4",
        "y": "a,b",
        "declared": "int64 one, int64[1] axis",
        "one": 1,
        "axis": [1],
    }
    proto = net(then, other, front=front, **more)
    result = static(proto).proto
    assert ("If" in ops(result)) is not known
    assert_same(proto, result, BRANCH_X, rtol=0)


def test_a_condition_on_the_rank_and_one_behind_it():
    """The first branch settles the rank that the second condition asks for."""

    def choice(source, tag, rank, output):
        shapes = ("a", "a,b") if rank == 2 else ("a,b", "a,b,c")
        then = branch(f"{tag}t", f"{tag}ty = Squeeze({source}, axis)", shapes[0])
        other = branch(f"{tag}e", f"{tag}ey = Identity({source})", shapes[1])
        return f"""{tag}s = Shape({source}) {tag}n = Size({tag}s) {tag}c = Equal({tag}n, rank{rank})
        {output} = If({tag}c) <then_branch = {then}, else_branch = {other}>"""

    text = f"""(float[N,1,1] x) => (float[a] y) <int64 rank2, int64 rank3, int64[1] axis>
    {{ {choice("x", "a", 3, "p")} {choice("p", "b", 2, "q")} y = Relu(q) }}"""
    proto = parse(text, {"rank2": 2, "rank3": 3, "axis": [1]})
    result = static(proto).proto
    assert "If" not in ops(result)
    assert_same(proto, result, {"x": BRANCH_X["x"][:, :, :1]}, rtol=0)


def test_names_that_other_bodies_use_as_well():
    def twin(tag, op):
        return f"{tag} () => (float[a,b,c] o) <float[1] w = {{3.0}}> {{ m = Mul(r, w) o = {op}(m) }}"

    second = f"j = If(open) <then_branch = {twin('c', 'Neg')}, else_branch = {twin('d', 'Exp')}>"
    outer = {"inputs": ", bool open", "outputs": ", float[a,b,c] j", "declared": "bool c"}
    proto = net(twin("a", "Tanh"), twin("b", "Exp"), behind=second, c=True, **outer)
    result = static(proto).proto
    assert ops(result).count("If") == 1
    assert_same(proto, result, {**BRANCH_X, "open": np.array(False)}, rtol=0)


def test_an_output_that_is_a_constant_of_the_branch_or_unread():
    then = branch("t", "ty = Constant<value = float[1] {5.0}>()", "1")
    proto = net(then, EXP, y="n", declared="bool c", c=True)
    assert_same(proto, static(proto).proto, BRANCH_X, rtol=0)


def test_open_conditions_and_overridable_ones_stay():
    proto = net(EXP, NEG, inputs=", bool c")
    assert inline_branch(ready(proto).proto).notes == ()
    proto.graph.initializer.append(numpy_helper.from_array(np.array(True), "c"))
    assert inline_branch(ready(proto, keep_inputs=["c"]).proto).notes == ()
