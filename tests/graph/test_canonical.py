"""Each spelling of a model means to the prepared model what it means to the runtime."""

import numpy as np
import pytest
from onnx import helper, numpy_helper

from kenosis_ort.graph.canonical import sort_nodes
from kenosis_ort.rewrite import PREPARATION
from tests.graph.build import assert_same, net, ops, ready, run
from tests.models import normal

X = np.arange(8, dtype=np.float32).reshape(2, 2, 2)
OWN = '<domain: "own", opset_import: ["" : {}, "own" : 1]>'


@pytest.mark.parametrize("imports", [
    [("", 11), ("", 17)], [("", 17), ("", 11)], [("ai.onnx", 13), ("", 12)], [("", 12), ("ai.onnx", 13)],
    [("com.microsoft", 1)], [("", 13), ("nobody.knows", 3)],
])  # fmt: skip
def test_operator_sets_as_the_runtime_reads_them(imports):
    proto = net("(float[2,2,2] x) => (float[2,2,2] y) { y = Softmax(x) }")
    del proto.opset_import[:]
    proto.opset_import.extend(helper.make_opsetid(domain, version) for domain, version in imports)
    prepared = ready(proto).proto
    assert [entry.domain for entry in prepared.opset_import].count("") == 1
    assert_same(proto, prepared, {"x": X})


@pytest.mark.parametrize("width", [2, 200])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_of_several_constants_the_one_counts_that_the_runtime_reads(width, order):
    """It reads the last of small initializers and the first of large ones, and Constant nodes before both."""
    proto = net(f"""(float[{width}] x) => (float[{width}] y) {{ [first] c = Constant<value = float[1] {{1}}>()
        [last] c = Constant<value = float[1] {{1}}>() z = Add(x, k) u = Add(z, c) y = Add(u, s) }}""")
    tensors = {seed: numpy_helper.from_array(normal((width,), seed)) for seed in (*order, 3, 4, 10, 11)}
    for at, node in enumerate(proto.graph.node[:2]):
        node.attribute[0].t.CopyFrom(tensors[10 + at])
    for seed, name in [*((at, "k") for at in order), (3, "c"), (4, "s")]:
        proto.graph.initializer.add(name=name).MergeFrom(tensors[seed])
    five, at = numpy_helper.from_array(np.float32([5]), "s"), numpy_helper.from_array(np.int64([1]))
    proto.graph.sparse_initializer.append(helper.make_sparse_tensor(five, at, [width]))
    prepared = ready(proto)
    assert_same(proto, prepared.proto, {"x": normal((width,), 5)})
    assert sorted(t.name for t in prepared.proto.graph.initializer) == ["c", "k", "s"]
    assert any("5 constants in whose place" in note for note in prepared.notes)


@pytest.mark.parametrize("by_axis", [False, True])
@pytest.mark.parametrize("as_node", [False, True])
def test_sparse_constants_become_dense(by_axis, as_node):
    dense = np.float32([[0, 2, 0], [0, 0, 3]])
    indices = np.argwhere(dense) if by_axis else np.flatnonzero(dense)
    values = numpy_helper.from_array(dense[dense != 0], "w")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(indices.astype(np.int64)), [2, 3])
    first = "w = Constant<value_int = 0>()" if as_node else ""
    proto = net(f"(float[1,2] x) => (float[1,3] y) {{ {first} y = MatMul(x, w) }}", ir_version=11)
    if as_node:
        proto.graph.node[0].attribute[0].CopyFrom(helper.make_attribute("sparse_value", sparse))
    else:
        proto.graph.sparse_initializer.append(sparse)
    prepared = ready(proto).proto
    assert [t.name for t in prepared.graph.initializer] == ["w"]
    np.testing.assert_array_equal(run(prepared, {"x": np.float32([[1, 1]])})[0], [[0, 2, 3]])


def test_nodes_come_after_what_they_read():
    body = "() => (float[] {0}) {{ {0} = Add(n, late) n = Neg(x) }}"
    proto = net(f"""(float[2] x) => (float[2] y) <float zero = {{0}}, float one = {{1}}> {{
        y = If(flag) <then_branch = t {body.format("t")}, else_branch = e {body.format("e")}>
        late = Abs(mid) mid = Exp(x) flag = Less(zero, one) }}""")
    x, prepared = np.float32([1, 2]), ready(proto).proto
    assert ops(prepared) == ["Exp", "Abs", "Less", "If"]
    assert [n.op_type for n in prepared.graph.node[-1].attribute[0].g.node] == ["Neg", "Add"]
    np.testing.assert_allclose(run(prepared, {"x": x})[0], np.exp(x) - x, rtol=1e-6)
    assert not sort_nodes(prepared)
    assert not sort_nodes(net("(float[2] x) => (float[2] b) { a = Neg(b) b = Neg(a) }")), "a cycle is the runtime's"


def test_optional_outputs_that_nothing_reads_are_dropped():
    text = """(float[1,2,4] x) => (float[1,2,3] y, float[1,2,1] t) {
    p, where = MaxPool<kernel_shape = [2]>(x) d, mask = Dropout(p) e, read = Dropout(d) t, index = TopK(e, k)
    y = Where(read, e, e) }"""
    proto = net(text, {"k": np.int64([1])})
    prepared = ready(proto).proto
    assert [len(n.output) for n in prepared.graph.node] == [1, 1, 2, 2, 1]
    assert_same(proto, prepared, {"x": np.float32([[[1, 5, 2, 3], [4, 0, 1, 2]]])})
    assert len(ready(proto, keep_values=["where"]).proto.graph.node[0].output) == 2


@pytest.mark.parametrize("opset", [9, 13])
def test_a_batch_norm_with_statistics_declared_normalizes_by_the_batch(opset):
    text = "(float[4,3,2] x) => (float[] y) { y, m, v, sm, sv = BatchNormalization(x, a, b, a, b) }"
    proto = net(text, {"a": np.float32([1, 2, 3]), "b": np.float32([3, 2, 1])}, opset=opset)
    assert_same(proto, ready(proto, rewrites=PREPARATION).proto, {"x": normal((4, 3, 2))})


# ---- functions ------------------------------------------------------------------------------------------------------


def test_functions_are_read_by_the_models_operator_set_whatever_they_are_called():
    """A function may be called Conv; its body means what it says, in the model's operator set."""
    text = f"""(float[2,2,2] x) => (float[] y) {{ [call] r = own.Relu(x) [other] y = own.Conv(r, x) }}
    {OWN.format(12)} Conv (a, b) => (o) {{ s = Softmax(a) o = Mul(s, b) }}
    {OWN.format(17)} Relu (a) => (o) {{ c = own.Conv(a, a) o = Neg(c) }}"""
    proto = net(text, opset=13, domains=("own",))
    prepared = ready(proto)
    assert ops(prepared.proto) == ["Softmax", "Mul", "Neg", "Softmax", "Mul"]
    assert_same(proto, prepared.proto, {"x": X})
    names = [n.name for n in prepared.proto.graph.node]
    assert (prepared.nodes["call"], prepared.nodes["other"]) == (tuple(names[:3]), tuple(names[3:]))


def test_functions_in_bodies_and_with_bodies():
    text = f"""(float[2] x, bool c) => (float[] y) {{ h = own.Choose(x, c)
    y = If(c) <then_branch = u () => (float[] t) {{ t = own.Choose(h, c) }},
               else_branch = w () => (float[] e) {{ e = Neg(x) }}> }}
    {OWN.format(17)} Choose (a, c) => (o) {{ h = Exp(a) o = If(c) <
        then_branch = t () => (float[] t) {{ t = Abs(h) }}, else_branch = e () => (float[] e) {{ e = Neg(a) }}> }}"""
    proto = net(text, domains=("own",))
    prepared = ready(proto).proto
    assert not prepared.functions
    for flag in (True, False):
        assert_same(proto, prepared, {"x": np.float32([-1, 2]), "c": np.array(flag)})


def test_names_of_weights_are_not_taken_by_what_is_inlined():
    text = f"""(float[2] x) => (float[2] y) {{ h = own.Twice(x) g = own.Twice(h) y = Add(g, w__1) }}
    {OWN.format(17)} Twice (a) => (o) {{ w = Add(a, a) o = Neg(w) }}"""
    proto = net(text, {f"w__{at}": np.float32([1, 2]) for at in (1, 2)}, domains=("own",))
    assert_same(proto, ready(proto).proto, {"x": np.float32([3, 4])})


@pytest.mark.parametrize("given", ["", "<slope = 0.5>", "<slope = 0.5, bend = 0.2>", "<bend = 0.2>"])
def test_attributes_of_functions_given_by_default_and_left_out(given):
    branch = "() => (float[] t) { t = LeakyRelu<alpha: float = @slope>(a) }"
    text = f"""(float[4] x, bool c) => (float[] y) {{ h = own.Act{given}(x) y = own.Choose(h, c) }}
    {OWN.format(17)} Act <bend, slope: float = 0.3> (a) => (o)
        {{ l = LeakyRelu<alpha: float = @slope>(a) o = Elu<alpha: float = @bend>(l) }}
    {OWN.format(17)} Choose <slope: float = 0.7> (a, c) => (o)
        {{ o = If(c) <then_branch = t {branch}, else_branch = e {branch}> }}"""
    proto = net(text, domains=("own",))
    assert_same(proto, ready(proto).proto, {"x": np.float32([-2, -1, 1, 2]), "c": np.array(True)})


def test_outputs_of_open_size_get_no_made_up_names():
    proto = net("(float[n,3] x) => (int64[] y) { y = NonZero(x) }")
    (dim, open_dim) = ready(proto).proto.graph.output[0].type.tensor_type.shape.dim
    assert dim.dim_value == 2
    assert not open_dim.WhichOneof("value")
