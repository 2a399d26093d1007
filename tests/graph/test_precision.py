"""Models of other floating types become float32 inside and keep their interface."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort.graph.precision import compute_in_float32
from kenosis_ort.graph.save import restore_interface
from kenosis_ort.graph.walk import all_graphs, all_nodes
from tests.graph.build import ready, run

F16, F32, F64, BF16 = TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.BFLOAT16
TOLERANCE = {F16: 2e-2, F64: 1e-4}
ROWS, WIDTH = 3, 4


class TypedNet:
    """Grows a net over values ``[ROWS, WIDTH]`` of one type, an operator at a time."""

    def __init__(self, kind: int, seed: int) -> None:
        self.kind, self.rng = kind, np.random.default_rng(seed)
        self.dtype = helper.tensor_dtype_to_np_dtype(kind)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.functions: list[onnx.FunctionProto] = []
        self.count = 0

    def name(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def const(self, array, dtype=None) -> str:
        name = self.name()
        self.weights.append(numpy_helper.from_array(np.asarray(array, dtype or self.dtype), name))
        return name

    def op(self, op_type, *inputs, outputs=1, **attributes):
        names = [self.name() for _ in range(outputs)]
        self.nodes.append(helper.make_node(op_type, list(inputs), names, name=f"n_{names[0]}", **attributes))
        return names[0] if outputs == 1 else names

    def value(self, name, shape=(ROWS, WIDTH)):
        return helper.make_tensor_value_info(name, self.kind, shape)

    def tensor(self, array, name=""):
        return numpy_helper.from_array(np.asarray(array, self.dtype), name)

    # -- what may come next: each takes and returns a value [ROWS, WIDTH] ----------------------------------------

    def linear(self, x):
        return self.op("MatMul", x, self.const(self.rng.normal(size=(WIDTH, WIDTH)) / 2))

    def gemm(self, x):
        weights = [self.const(self.rng.normal(size=s) / 2) for s in ((WIDTH, WIDTH), (WIDTH,))]
        return self.op("Gemm", x, *weights, alpha=0.5)

    def tanh(self, x):
        return self.op("Tanh", x)

    def island(self, x):
        """A float32 island in the middle."""
        y = self.op("Softmax", self.op("Cast", x, to=F32), axis=-1)
        return self.op("Cast", y, to=self.kind)

    def whole(self, x):
        """Integers and back."""
        y = self.op("Cast", self.op("Mul", x, self.const(0.0)), to=TensorProto.INT64)
        return self.op("Add", x, self.op("Cast", y, to=self.kind))

    def constants(self, x):
        ones = self.op("ConstantOfShape", self.op("Shape", x), value=self.tensor([0.5]))
        half = self.op("Constant", value=self.tensor(0.25))
        # Of a constant: ONNX's shape inference dies of an EyeLike whose input has no type.
        zeros = np.zeros((ROWS, WIDTH))
        if self.kind == F64:  # the runtime has no other
            eye = self.op("EyeLike", self.const(zeros, np.int64), dtype=self.kind)
        else:
            eye = self.const(zeros)
        return self.op("Add", self.op("Mul", ones, half), self.op("Sub", x, eye))

    def like(self, x):
        zeros = self.op("CastLike", self.const(np.zeros(WIDTH), np.float32), x)
        return self.op("Where", self.op("Greater", x, zeros), x, self.op("Neg", x))

    def norm(self, x):
        weights = [self.const(np.ones(WIDTH)), self.const(np.zeros(WIDTH))]
        return self.op("LayerNormalization", x, *weights)

    def branch(self, x):
        """If with a captured value, and constants of its own."""
        name, inner = self.name(), self.name()
        then = helper.make_graph(
            [helper.make_node("MatMul", [x, f"{inner}_w"], [inner], name=f"n_{inner}")],
            "then",
            [],
            [self.value(inner)],
            [self.tensor(self.rng.normal(size=(WIDTH, WIDTH)), f"{inner}_w")],
        )
        constant = helper.make_node("Constant", [], [f"{name}_c"], name=f"n_{name}_c", value=self.tensor(1.5))
        other = helper.make_graph(
            [constant, helper.make_node("Mul", [x, f"{name}_c"], [name], name=f"n_{name}")],
            "else",
            [],
            [self.value(name)],
        )
        nothing = self.op(
            "ReduceSum", self.op("Mul", self.op("Cast", x, to=F32), self.const(0.0, np.float32)), keepdims=0
        )
        condition = self.op("Less", nothing, self.const(self.rng.choice([-1.0, 1.0]), np.float32))
        return self.op("If", condition, then_branch=then, else_branch=other)

    def loop(self, x):
        i, keep, state, new = (self.name() for _ in range(4))
        body = helper.make_graph(
            [
                helper.make_node("Tanh", [state], [new], name=f"n_{new}"),
                helper.make_node("Identity", [keep], [f"{keep}_out"], name=f"n_{keep}"),
            ],
            "body",
            [
                helper.make_tensor_value_info(i, TensorProto.INT64, []),
                helper.make_tensor_value_info(keep, TensorProto.BOOL, []),
                self.value(state),
            ],
            [helper.make_tensor_value_info(f"{keep}_out", TensorProto.BOOL, []), self.value(new)],
        )
        return self.op("Loop", self.const(3, np.int64), "", x, body=body)

    def sequence(self, x):
        filled = self.op("SequenceInsert", self.op("SequenceEmpty", dtype=self.kind), x)
        return self.op("SequenceAt", filled, self.const(0, np.int64))

    def contrib(self, x):
        return self.op("QuickGelu", x, domain="com.microsoft", alpha=1.0)

    def function(self, x):
        """A local function whose caller names the type."""
        name = f"F{self.count}"
        cast = helper.make_node("Cast", ["t"], ["u"])
        cast.attribute.append(onnx.AttributeProto(name="to", ref_attr_name="kind", type=onnx.AttributeProto.INT))
        nodes = [helper.make_node("Cast", ["s"], ["t"], to=F32), cast]
        opsets = [helper.make_opsetid("", 18)]
        self.functions.append(helper.make_function("local", name, ["s"], ["u"], nodes, opsets, ["kind"]))
        return self.op(name, x, domain="local", kind=self.kind)

    def model(self, outputs) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes,
            "net",
            [self.value("x", ["N", WIDTH])],
            [self.value(o, ["N", WIDTH]) for o in outputs],
            self.weights,
        )
        opsets = [helper.make_opsetid(d, v) for d, v in (("", 18), ("com.microsoft", 1), ("local", 1))]
        return helper.make_model(graph, opset_imports=opsets, functions=self.functions, ir_version=9)


STEPS = [n for n, f in vars(TypedNet).items() if callable(f) and n[0] != "_"]
STEPS = [n for n in STEPS if n not in ("name", "const", "op", "value", "tensor", "model")]
IN_DOUBLE = {"contrib"}  # the runtime has them in float32 only


def declared(model: onnx.ModelProto) -> list[tuple[str, bytes]]:
    return [(v.name, v.type.SerializeToString()) for v in (*model.graph.input, *model.graph.output)]


def inner_types(model: onnx.ModelProto) -> set[int]:
    """Element types of what is stored, of what attributes name and of what bodies declare."""
    tensors = [t.data_type for g in all_graphs(model.graph) for t in g.initializer]
    attributes = [a for n in all_nodes(model) for a in n.attribute if not n.name.endswith("_Cast")]
    named = [a.i for a in attributes if a.name in ("to", "dtype", "kind")] + [a.t.data_type for a in attributes]
    bodies = [v.type.tensor_type.elem_type for g in list(all_graphs(model.graph))[1:] for v in (*g.input, *g.output)]
    return {*tensors, *named, *bodies}


def converted(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns the prepared model; the one given is not changed."""
    before = model.SerializeToString(deterministic=True)
    result = ready(model)
    assert model.SerializeToString(deterministic=True) == before
    assert declared(result.proto) == declared(model)
    assert any("inside it is float32" in note for note in result.notes)
    onnx.checker.check_model(result.proto)
    return result.proto


def assert_close(model: onnx.ModelProto, changed: onnx.ModelProto, x, kind: int) -> None:
    for want, got in zip(run(model, {"x": x}), run(changed, {"x": x}), strict=True):
        assert (want.dtype, want.shape) == (got.dtype, got.shape)
        scale = max(float(np.abs(want.astype(np.float64)).max(initial=0)), 1.0)
        assert np.abs(want.astype(np.float64) - got.astype(np.float64)).max(initial=0) <= TOLERANCE[kind] * scale


@given(
    kind=st.sampled_from([F16, F64]),
    steps=st.lists(st.sampled_from(STEPS), min_size=1, max_size=6),
    also=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_mix_of_operators_computes_the_same(kind, steps, also, seed):
    net = TypedNet(kind, seed)
    outputs, y = [], net.linear("x")
    for step in steps:
        if kind == F64 and step in IN_DOUBLE:
            continue
        outputs += [y] if also else []
        y = getattr(net, step)(y)
    y = net.op("Identity", y)
    model = net.model([*dict.fromkeys(outputs), y])
    changed = converted(model)
    assert kind not in inner_types(changed)
    assert_close(model, changed, net.rng.normal(size=(ROWS, WIDTH)).astype(net.dtype), kind)


# ---- edges --------------------------------------------------------------------------------------------------------


def test_inputs_constants_and_inner_values_may_be_outputs_too():
    net = TypedNet(F16, 0)
    y = net.linear("x")
    stored = net.const(np.ones((ROWS, WIDTH)))
    z = net.op("Add", net.op("Relu", y), stored)
    model = net.model(["x", stored, y, z])
    changed = converted(model)
    assert_close(model, changed, net.rng.normal(size=(ROWS, WIDTH)).astype(np.float16), F16)
    assert [n.op_type for n in changed.graph.node] == ["Cast", "MatMul", "Relu", "Add", "Cast", "Cast"]


def test_an_input_with_a_default_value_keeps_it():
    net = TypedNet(F16, 0)
    weight = net.const(net.rng.normal(size=(WIDTH, WIDTH)))
    model = net.model([net.op("MatMul", "x", weight)])
    model.graph.input.append(net.value(weight, (WIDTH, WIDTH)))
    result = ready(model, keep_inputs=[weight]).proto
    restore_interface(result, model)
    assert declared(result) == declared(model)
    x = np.ones((ROWS, WIDTH), np.float16)
    for extra in ({}, {weight: np.eye(WIDTH, dtype=np.float16)}):
        np.testing.assert_allclose(run(result, {"x": x, **extra})[0], run(model, {"x": x, **extra})[0], rtol=1e-2)


def test_an_input_that_only_a_body_reads():
    net = TypedNet(F16, 0)
    model = net.model([net.branch("x")])
    assert_close(model, converted(model), np.ones((ROWS, WIDTH), np.float16), F16)


def test_sequences_at_the_edges():
    net = TypedNet(F16, 0)
    pair = net.op("SequenceConstruct", net.linear("x"), net.op("SequenceAt", "many", net.const(0, np.int64)))
    model = net.model(["x"])
    many = helper.make_tensor_sequence_value_info("many", F16, None)
    model.graph.input.append(many)
    model.graph.output.append(helper.make_tensor_sequence_value_info(pair, F16, None))
    changed = converted(model)
    x = np.ones((ROWS, WIDTH), np.float16)
    feeds = {"x": x, "many": [2 * x, x]}
    (_, want), (_, got) = run(model, feeds), run(changed, feeds)
    assert [g.dtype for g in got] == [np.float16] * 2
    for a, b in zip(want, got, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-2)


# ---- nodes that keep the type -------------------------------------------------------------------------------------


def test_numbers_become_text_in_their_own_type():
    net = TypedNet(F16, 0)
    text = net.op("Cast", net.op("Identity", "x"), to=TensorProto.STRING)
    model = net.model([net.linear(net.op("Cast", text, to=F16))])
    model.graph.output.append(helper.make_tensor_value_info(text, TensorProto.STRING, ["N", WIDTH]))
    changed = converted(model)
    x = np.full((ROWS, WIDTH), 0.1, np.float16)
    want, got = run(model, {"x": x}), run(changed, {"x": x})
    assert got[1].tolist() == want[1].tolist()
    np.testing.assert_allclose(got[0], want[0], rtol=1e-2)


def test_a_custom_operator_keeps_its_types():
    net = TypedNet(F16, 0)
    y = net.op("Secret", net.linear("x"), domain="their.domain")
    net.nodes[-1].output[0] = "s"
    model = net.model([net.linear("s")])
    model.opset_import.append(helper.make_opsetid("their.domain", 1))
    model.graph.value_info.append(net.value("s"))
    changed = converted(model)
    kinds = [(n.op_type, [a.i for a in n.attribute if a.name == "to"]) for n in changed.graph.node]
    around = [("Cast", [F16]), ("Secret", []), ("Cast", [F32])]
    assert kinds == [("Cast", [F32]), ("MatMul", []), *around, ("MatMul", []), ("Cast", [F16])]
    assert y not in {name for n in changed.graph.node for name in n.output}


def test_such_an_operator_in_a_body_keeps_the_whole_model():
    net = TypedNet(F16, 0)
    model = net.model([net.branch(net.linear("x"))])
    body = next(a.g for n in model.graph.node if n.op_type == "If" for a in n.attribute)
    body.node[0].op_type, body.node[0].domain = "Secret", "their.domain"
    model.opset_import.append(helper.make_opsetid("their.domain", 1))
    result = ready(model)
    assert any("stays so: 'n_" in note for note in result.notes)
    assert {t.data_type for t in result.proto.graph.initializer} >= {F16}


# ---- what is left alone, and other types --------------------------------------------------------------------------


def test_float32_models_with_double_in_between_are_left_alone():
    net = TypedNet(F32, 0)
    y = net.op("Cast", net.linear("x"), to=F64)
    model = net.model([net.op("Cast", net.op("Floor", y), to=F32)])
    assert compute_in_float32(model) == (None, None)
    result = ready(model).proto
    assert [n.op_type for n in result.graph.node] == ["MatMul", "Cast", "Floor", "Cast"]


def test_a_half_model_may_hold_double_islands():
    net = TypedNet(F16, 0)
    y = net.op("Cast", net.op("Exp", net.op("Cast", net.linear("x"), to=F64)), to=F16)
    model = net.model([net.linear(y)])
    changed = converted(model)
    assert [n.op_type for n in changed.graph.node] == ["Cast", "MatMul", "Cast", "Exp", "Cast", "MatMul", "Cast"]
    assert_close(model, changed, np.ones((ROWS, WIDTH), np.float16), F16)


def test_numbers_beyond_float32_become_the_largest():
    net = TypedNet(F64, 0)
    y = net.op("Min", net.linear("x"), net.const(np.full(WIDTH, 1.7e308)))
    y = net.op("Max", y, net.const([-np.inf] * WIDTH))
    model = net.model([y])
    assert_close(model, converted(model), np.ones((ROWS, WIDTH)), F64)


def test_bfloat16_becomes_float32():
    net = TypedNet(BF16, 0)
    y = net.op("Relu", net.linear("x"))
    changed = converted(net.model([y]))
    assert BF16 not in inner_types(changed)
    kinds = [(n.op_type, [a.i for a in n.attribute]) for n in changed.graph.node]
    assert kinds == [("Cast", [F32]), ("MatMul", []), ("Relu", []), ("Cast", [BF16])]


@pytest.mark.parametrize("kind", [F16, F64])
def test_nothing_to_compute_is_nothing_to_convert(kind):
    net = TypedNet(kind, 0)
    assert compute_in_float32(net.model([net.op("Relu", "x")])) == (None, None)
