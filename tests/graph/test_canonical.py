"""Each spelling of a model, of every operator set, means to the prepared model what it means to the runtime."""

from itertools import pairwise

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st
from onnx import helper, numpy_helper

from kenosis_ort.errors import UnsupportedModelError
from kenosis_ort.graph.canonical import sort_nodes
from kenosis_ort.graph.opset import fit_opset
from kenosis_ort.graph.opset_adapters import ADAPTERS
from kenosis_ort.graph.shapes import has_rank
from kenosis_ort.rewrite import PREPARATION
from kenosis_ort.runtime.machine import runtime_limits
from tests import models
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
    dims = ready(proto).proto.graph.output[0].type.tensor_type.shape.dim
    assert [(dim.dim_value, dim.WhichOneof("value")) for dim in dims] == [(2, "dim_value"), (0, None)]


# ---- each change of an operator between operator sets 7 and 26 -------------------------------------------------------


TARGETS = (13, 18, 21, runtime_limits().max_opset)
GRID = np.random.default_rng(0).uniform(-1, 1, (2, 4, 4, 2)).astype(np.float32)
PADS = "pads = [0, 0, 1, 2, 0, 0, 3, 0]"


def scales(*numbers):
    return {"s": np.float32([1, 1, *numbers])}


CASES = [
    (7, "Clip<min = -0.5, max = 0.5>(x)"), (10, "Clip<max = 0.25>(x)"), (9, "Clip(x)"),
    (9, "Slice<starts = [1, 0], ends = [5, -1], axes = [1, 3]>(x)"), (7, "Slice<starts = [0, 1], ends = [1, 9999]>(x)"),
    (10, f"Pad<{PADS}, value = 1.5>(x)"), (7, f'Pad<{PADS}, mode = "reflect">(x)'),
    (7, f"Pad<{PADS}, value = 2.0>(x)", {"x": "double[2,6,8,10]", "y": "double[] y"}), (7, "Dropout<ratio = 0.3>(x)"),
    (10, "Dropout(x)"),
    *((opset, "y, mask = Dropout<ratio = 0.25>(x)", {"y": f"float[] y, {mask}[] mask"})
      for opset, mask in ((7, "float"), (10, "bool"), (11, "bool"))),
    (10, "Clip<min = -0.5>(x)", {"x": "float16[3]", "y": "float16[] y"}), (9, "y, indices = TopK<k = 3, axis = 2>(x)"),
    (7, "Upsample<scales = [1.0, 1.0, 2.0, 3.0]>(x)"),
    (8, 'Upsample<scales = [1.0, 1.0, 2.0, 2.0], mode = "linear">(x)'),
    (9, 'Upsample<mode = "nearest">(x, s)', scales(1.7, 2.3)), (9, 'Upsample<mode = "linear">(x, s)', scales(2, 3)),
    *((10, 'Resize<mode = "nearest">(x, s)', scales(*by))
      for by in ((0.6, 2.5), (0.6, 0.7), (1.7, 2.5), (1, 0.3), (1.0, 1.0))),
    (10, 'Resize<mode = "linear">(x, s)', scales(0.5, 2)),
    *((11, f"{op}<axis = {axis}>(x)") for op in ("Softmax", "LogSoftmax") for axis in (0, 1, 2, 3, -1, -2)),
    (7, "Softmax(x)"), (9, "Softmax(x)", {"x": "float[3,5]"}), (11, "Hardmax<axis = 2>(x)"),
    (11, "Squeeze<axes = [1, -1]>(x)", {"x": "float[3,1,4,1]"}), (7, "Squeeze(x)", {"x": "float[3,1,4,1]"}),
    (11, "Unsqueeze<axes = [0, -1]>(x)"),
    (11, "y, z = Split<axis = 1, split = [2, 4]>(x)", {"y": "float[] y, float[] z"}),
    (7, "y, z = Split<axis = -1>(x)", {"y": "float[] y, float[] z"}),
    (13, "y, z, u, v = Split<axis = 2>(x)", {"y": "float[] y, float[] z, float[] u, float[] v"}),
    (11, "ReduceSum<axes = [-1], keepdims = 0>(x)"), (7, "ReduceSum(x)"),
    *((12, f"Reduce{kind}<axes = [1, 3], keepdims = 1>(x)")
      for kind in ("L1", "L2", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")),
    (17, "ReduceMean<keepdims = 0>(x)"), (16, 'GridSample<mode = "bicubic">(x, g)', {"g": GRID}),
    (16, "GridSample(x, g)", {"g": GRID}),
    (18, "GroupNormalization<num_groups = 3>(x, s, b)", {"s": normal([3]), "b": normal([3], 1)}),
    (17, "DFT<axis = 2>(x)", {"x": "float[1,6,8,2]"}), (17, "DFT(x)", {"x": "float[1,6,2]"}),
    # the runtime has no kernel for a later one
    (10, "RoiAlign<output_height = 3, output_width = 2, spatial_scale = 0.5>(x, r, i)",
     {"r": np.float32([[0, 0, 9, 9], [2, 1, 7, 8]]), "i": np.array([0, 1]), "last": 21}),
    (9, "Scatter<axis = 1>(x, i, u)", {"x": "float[2,4]", "i": np.array([[1], [3]]), "u": np.float32([[9], [8]])}),
    (7, "BatchNormalization<epsilon = 0.001, spatial = 1>(x, g, b, m, v)",
     {name: np.abs(normal([6], at)) + np.float32(0.1) for at, name in enumerate("gbmv")}),
    (8, "BatchNormalization<spatial = 0, epsilon = 0.1>(x, s, b, m, v)",
     {"x": "float[2,3,4,4]",
      **{name: np.abs(normal((3, 4, 4), at)) + np.float32(0.5) for at, name in enumerate("sbmv")}}),
]  # fmt: skip
"""Operator set, call, and by name its constants or the types of ``x`` and ``y``, or the last target to try."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1]}")
def test_converted_operators_compute_the_same(case):
    opset, call, more = (*case, {})[:3]
    x, y, last = more.get("x", "float[2,6,8,10]"), more.get("y", "float[] y"), more.get("last", 99)
    constants = {name: value for name, value in more.items() if name not in ("x", "y", "last")}
    text = f"({x} x) => ({y}) {{ [the_node] {call if '= ' in call.split('(')[0].split('<')[0] else f'y = {call}'} }}"
    before = net(text, constants, opset=opset)
    (feed,) = models.feeds(before, 1)
    for target in (target for target in TARGETS if opset < target <= last):
        after = ready(before, min_opset=target).proto
        assert onnx.defs.get_schema(after.graph.node[-1].op_type, target).deprecated is False
        assert {e.domain: e.version for e in after.opset_import}[""] == target
        assert "the_node" in {node.name for node in after.graph.node}
        if all(has_rank(output) for output in after.graph.output):
            onnx.checker.check_model(after, full_check=True)
        assert_same(before, after, feed, rtol=1e-6)


def test_every_changed_signature_has_an_adapter():
    """An operator whose later definition cannot read an earlier node must be listed."""
    history = sorted(onnx.defs.get_all_schemas_with_history(), key=lambda s: (s.domain, s.name, s.since_version))
    for old, new in pairwise(history):
        if old.name != new.name or new.domain or not 7 < new.since_version <= runtime_limits().max_opset:
            continue
        lost = set(old.attributes) - set(new.attributes)
        shifted = [i.name for i in old.inputs] != [i.name for i in new.inputs][: len(old.inputs)]
        common = set(old.attributes) & set(new.attributes)
        changed = any(old.attributes[a].default_value != new.attributes[a].default_value for a in common)
        if new.deprecated or lost or changed or (shifted and new.name != "BatchNormalization"):
            listed = [version for version, _ in ADAPTERS.get(new.name, ())]
            assert any(v > old.since_version for v in listed), (new.name, new.since_version)


@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=5), data=st.data(), known=st.booleans())
def test_softmax_over_any_axis(shape, data, known):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    dims = ",".join(str(size) if known else f"d{at}" for at, size in enumerate(shape))
    before = net(f"(float[{dims}] x) => (float[] y) {{ y = Softmax<axis = {axis}>(x) }}", opset=11)
    assert_same(before, ready(before).proto, {"x": normal(shape, 1)}, rtol=1e-6)


def choice(out, body):
    """An If both of whose branches are this body."""
    return f"""If(c) <then_branch = t () => (float[] {out}) {{ {body} }},
                      else_branch = e () => (float[] {out}) {{ {body} }}>"""


INNER = choice("i", "i = Unsqueeze<axes = [0]>(x)")


@pytest.mark.parametrize(("x", "body"), [
    ("float[] x", f"y = {choice('b', 'b = Softmax<axis = 1>(x)')}"),
    ("float[2,3,4] x", f"q = {choice('p', f'o = {INNER} p = Softmax<axis = 1>(o)')} y = Softmax(q)"),
], ids=["of unknown rank", "nested"])  # fmt: skip
def test_bodies_are_converted(x, body):
    before = net(f"(bool c, {x}) => (float[] y) {{ {body} }}", opset=11)
    for flag in (True, False):
        assert_same(before, ready(before).proto, {"c": np.array(flag), "x": normal((2, 3, 4))})


def test_the_domain_alias_is_normalized():
    before = net("(float[2] x) => (float[2] y) { y = Relu(x) }", domains=())
    before.graph.node[0].domain = before.opset_import[0].domain = "ai.onnx"
    after = ready(before).proto
    assert [*((e.domain, e.version) for e in after.opset_import), after.graph.node[0].domain] == [("", 17), ""]


def test_a_model_of_an_older_operator_set_than_seven():
    weights = {"w": normal((4, 3)), "b": normal((2, 3), 1)}
    text = "(float[2,4] x, float[4,3] w, float[2,3] b) => (float[] y) { h = Gemm<broadcast = 1>(x, w, b) y = Relu(h) }"
    after = ready(net(text, weights, opset=6, ir_version=3, domains=())).proto
    assert [i.name for i in after.graph.input] == ["x"]
    x = normal((2, 4), 2)
    np.testing.assert_allclose(run(after, {"x": x})[0], np.maximum(x @ weights["w"] + weights["b"], 0), atol=1e-5)


def test_what_cannot_be_converted_is_named():
    text = "(float[2,3] x, float[3] a) => (float[] y) { [bad] y = BatchNormalization<spatial = 0>(x, a, a, a, a) }"
    with pytest.raises(UnsupportedModelError, match=r"spatial.*node 'bad'.* Fix: "):
        ready(net(text, opset=8))


# ---- newer than the runtime -----------------------------------------------------------------------------------------


def test_a_relabel_is_enough_where_nothing_changed():
    limits, newest = runtime_limits(), onnx.defs.onnx_opset_version()
    if newest <= limits.max_opset:
        pytest.skip("the installed onnx is not newer than the runtime")
    text = "(float[2,3] x) => (float[2,3] y) { h = Cast<to = 1, saturate = 1>(x) y = Relu(h) }"
    prepared = ready(net(text, opset=newest, ir_version=onnx.IR_VERSION))
    assert prepared.proto.ir_version <= limits.max_ir
    assert any("lowered" in note for note in prepared.notes)
    x = normal((2, 3))
    np.testing.assert_array_equal(run(prepared.proto, {"x": x})[0], np.maximum(x, 0))


def test_default_attributes_that_came_later_are_dropped():
    before = net("(float[2] x) => (float[2] y) { y = Cast<to = 1, saturate = 1>(x) }", opset=19)
    assert fit_opset(before, min_opset=13, max_opset=18)
    assert [a.name for a in before.graph.node[0].attribute] == ["to"]


@pytest.mark.parametrize(("call", "opset"), [
    ("Cast<to = 1, saturate = 0>(x)", 19), ("Gelu(x)", 20), ("ReduceMean(x, a)", 18), ("GridSample(x, a)", 20),
])  # fmt: skip
def test_what_the_runtime_cannot_read_is_refused(call, opset):
    before = net(f"(float[2] x, int64[1] a) => (float[2] y) {{ [bad] y = {call} }}", opset=opset)
    with pytest.raises(UnsupportedModelError, match="bad"):
        fit_opset(before, min_opset=13, max_opset=opset - 1)


def test_unknown_operator_sets_are_refused():
    with pytest.raises(UnsupportedModelError, match="operator set 999"):
        ready(net("(float[2] x) => (float[2] y) { y = Relu(x) }", opset=999))


def test_nothing_changes_when_nothing_must():
    before = net("(float[2] x) => (float[2] y) { y = Relu(x) }", opset=15)
    stored = before.SerializeToString()
    assert (fit_opset(before, min_opset=13, max_opset=20), before.SerializeToString()) == (None, stored)
