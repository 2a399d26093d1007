"""What preparation makes of a model: names, constants, types; its values keep their meaning."""

import functools
import warnings

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from kenosis_ort.errors import UnsupportedModelError
from kenosis_ort.graph.outside import copy_model
from kenosis_ort.graph.shapes import has_rank
from kenosis_ort.rewrite import PREPARATION
from kenosis_ort.rewrite.prepare import PRE_PROCESSED_KEY, PRE_PROCESSED_VALUE
from kenosis_ort.runtime.machine import RuntimeLimits, runtime_limits
from tests import models
from tests.graph.build import assert_same, net, ops, ready, run

ONES = {"x": np.ones((2, 3), np.float32)}


def chain(body="y = Relu(x)", **options):
    return net(f"(float[2,3] x) => (float[2,3] y) {{ {body} }}", **{"opset": 13, **options})


@pytest.mark.parametrize("min_opset", [13, 21])
@pytest.mark.parametrize("name", models.ALL)
def test_every_shared_net(name, min_opset):
    given = models.ALL[name]()
    before = given.SerializeToString(deterministic=True)
    prepared = ready(given, min_opset=min_opset, rewrites=PREPARATION)
    proto = prepared.proto
    assert given.SerializeToString(deterministic=True) == before
    assert_same(given, proto, models.feeds(given, 1, dims={"batch": 2})[0])
    assert max(e.version for e in proto.opset_import if e.domain == "") >= min_opset
    for kind in ("input", "output"):
        assert [v.name for v in getattr(proto.graph, kind)] == [v.name for v in getattr(given.graph, kind)]
    names = [node.name for node in proto.graph.node]
    assert len({*names} - {""}) == len(names)
    assert {node.name for node in given.graph.node if node.name} <= {*names, *prepared.nodes}
    assert all(now in names for nodes in prepared.nodes.values() for now in nodes)
    known = {v.name for v in (*proto.graph.value_info, *proto.graph.output) if has_rank(v)}
    assert all(name in known for node in proto.graph.node for name in node.output if name)
    onnx.checker.check_model(proto, full_check=True)
    assert all(note.endswith(".") for note in prepared.notes)


# ---- the runtime's limits -------------------------------------------------------------------------------------------


def test_the_runtimes_limits_are_true():
    """1.23 reads operator set 23, but has no QuantizeLinear of it."""
    limits, constants = runtime_limits(), {"s": np.float32(0.5), "z": np.uint8(0)}

    def try_(opset, ir):
        body = "q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z)"
        run(chain(body, weights=constants, opset=opset, ir_version=ir, domains=()), ONES)

    try_(limits.max_opset, limits.max_ir)
    for opset, ir in [(limits.max_opset + 1, limits.max_ir), (limits.max_opset, limits.max_ir + 1)]:
        with pytest.raises(Exception, match=r"(?i)support|implementation"):
            try_(opset, ir)


@pytest.mark.parametrize(("limits", "ops", "best"), [
    ((11, 22, "1.23.2"), {"Conv"}, 22), ((11, 22, "1.23.2"), {"Conv", "MaxPool"}, 21),
    ((13, 26, "1.28.0"), {"Conv", "MaxPool"}, 26), ((10, 20, "1.27.1"), {"MaxPool"}, 20),
])  # fmt: skip
def test_max_pool_is_wanted_in_the_operator_set_in_which_it_fuses(limits, ops, best):
    assert RuntimeLimits(*limits).best_opset(ops) == best


# ---- inputs, names, constants ---------------------------------------------------------------------------------------


def test_initializers_leave_the_inputs():
    text = "(float[2,3] x, float[2,3] w) => (float[2,3] y) { r = Relu(x) y = Add(r, w) }"
    proto = net(text, {"w": np.ones((2, 3), np.float32)}, opset=9, ir_version=3, domains=())
    prepared = ready(proto)
    assert [v.name for v in prepared.proto.graph.input] == ["x"]
    assert prepared.proto.ir_version >= 4
    assert_same(proto, prepared.proto, ONES)
    assert [v.name for v in ready(proto, keep_inputs=["w"]).proto.graph.input] == ["x", "w"]
    assert [v.name for v in ready(proto, keep_values=["w"]).proto.graph.input] == ["x"]
    proto.graph.input.append(proto.graph.input[1])  # listed twice, as the runtime takes it
    assert [v.name for v in ready(proto, keep_inputs=["w"]).proto.graph.input] == ["x", "w"]


@pytest.mark.parametrize(("body", "names", "told"), [
    ("a = Relu(x) [mine] b = Relu(a) y = Relu(b)", "Relu_a mine Relu_y", {}),
    ("a = Relu(x) [Relu_a] y = Relu(a)", "Relu_a_1 Relu_a", {}),
    ("[s] a = Relu(x) [s] b = Relu(a) [s] y = Relu(b)", "s s_1 s_2", {"s": ("s", "s_1", "s_2")}),
], ids=["unnamed ones get one", "none is taken twice", "shared ones are told apart"])  # fmt: skip
def test_names_of_nodes(body, names, told):
    prepared = ready(chain(body))
    assert [n.name for n in prepared.proto.graph.node] == names.split()
    assert {name: nodes for name, nodes in prepared.nodes.items() if name == "s"} == told
    assert ["were shared" in note for note in prepared.notes] == [bool(told)]


def test_each_kind_of_constant():
    proto = net("""(float[2] x) => (float[2] y, int64 z, string[2] u) {
        a = Constant<value = float[2] {1, 2}>() b = Constant<value_float = 1.5>()
        c = Constant<value_floats = [1.0, 2.0]>() i = Constant<value_int = 3>()
        s = Constant<value_strings = ["a", "b"]>() y = Sum(x, a, b, c) z = Identity(i) u = Identity(s) }""")
    prepared = ready(proto)
    assert "Constant" not in ops(prepared.proto)
    assert {t.name for t in prepared.proto.graph.initializer} == {*"abcis"}
    assert prepared.nodes == {f"Constant_{name}": () for name in "abcis"}
    assert_same(proto, prepared.proto, {"x": np.float32([3, 4])})


def test_a_constant_that_is_an_output_stays():
    proto = net("() => (float y) { y = Constant<value_float = 1.0>() }")
    assert ops(ready(proto).proto) == ["Constant"]
    assert_same(proto, ready(proto, rewrites=PREPARATION).proto, {})


def test_values_that_bodies_capture_keep_their_meaning(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = """(float[1,3,4,4] x, bool flag) => (float[1,3,4,4] y, float[1,3,4,4] z)
    <float[3,3,1,1] w, float[3] g, float[3] h, float[3] m, float[3] v> {
    k = Constant<value_float = 1.0>() c = Conv(x, w) b = BatchNormalization(c, g, h, m, v) i = Identity(b)
    y = If(flag) <then_branch = t () => (float[] t) { t = Add(b, k) },
                  else_branch = e () => (float[] e) { e = Identity(c) }> z = Relu(i) }"""
    proto = net(text, {"v": np.full(3, 0.7)}, opset=11)
    prepared = ready(proto, rewrites=PREPARATION, min_opset=18).proto
    assert ops(prepared) == ["Conv", "BatchNormalization", "If", "Relu"]  # a branch reads the Conv's own output
    for flag in (True, False):
        assert_same(proto, prepared, {"x": models.normal((1, 3, 4, 4)), "flag": np.array(flag)})
    assert list(tmp_path.iterdir()) == [], "nothing is left in the working folder"


def test_models_marked_as_pre_processed_are_not_rewritten():
    proto = chain("h = Identity(x) y = Relu(h)", opset=11)
    assert ops(ready(proto, rewrites=PREPARATION).proto) == ["Relu"]
    assert ops(ready(proto, rewrites=PREPARATION, preprocessed=True).proto) == ["Identity", "Relu"]
    proto.metadata_props.add(key=PRE_PROCESSED_KEY, value=PRE_PROCESSED_VALUE)
    prepared = ready(proto, rewrites=PREPARATION)
    assert (ops(prepared.proto), prepared.proto.opset_import[0].version) == (["Identity", "Relu"], 13)
    assert [p.key for p in prepared.proto.metadata_props] == [PRE_PROCESSED_KEY]
    assert ops(ready(proto, rewrites=PREPARATION, preprocessed=False).proto) == ["Relu"]


# ---- operators of others, and types ---------------------------------------------------------------------------------


def test_operators_of_unknown_domains_pass():
    proto = chain("h = contrib.Strange(x) y = Relu(h)", opset=11, domains=("contrib",))
    prepared = ready(proto, rewrites=PREPARATION)
    assert ops(prepared.proto) == ["Strange", "Relu"]
    assert any("without type or rank" in note for note in prepared.notes)


def test_a_registered_library_gives_the_types_of_its_operators():
    extensions = pytest.importorskip("onnxruntime_extensions")
    proto = net("(string[2] s) => (string[2] y) { u = upper.StringUpper(s) y = Identity(u) }")
    proto.graph.node[0].domain = "ai.onnx.contrib"
    proto.opset_import.add(domain="ai.onnx.contrib", version=1)
    prepared = ready(proto, custom_op_libraries=[extensions.get_library_path()])
    types = {v.name: v.type.tensor_type.elem_type for v in prepared.proto.graph.value_info}
    assert types["u"] == TensorProto.STRING


@pytest.mark.parametrize(("text", "dims"), [
    ("""(float[2,3] x) => (float[2,3] y) <float[3,3] w>
     { c = com.microsoft.FusedMatMul<alpha = 0.5>(x, w) y = Relu(c) }""", [2, 3]),
    *((f"""(float[n,2,5,5] x) => (float[] y) <float[8,2,3,3] w, {wrong} c>
     {{ c = Conv<pads = [1, 1, 1, 1]>(x, w) y = Relu(c) }}""", ["n", 8, 5, 5])
      for wrong in ("float[1,3]", "float[1,8,3,3]", "double[]")),
], ids=["of the runtime's own operators", "a wrong rank", "wrong sizes", "a wrong type"])  # fmt: skip
def test_types_are_those_that_the_runtime_infers(text, dims):
    """Whatever a file declares: a rank that we believed would spread through what is built on it."""
    (found,) = (v.type.tensor_type for v in ready(net(text)).proto.graph.value_info if v.name == "c")
    assert (found.elem_type, [d.dim_value or d.dim_param for d in found.shape.dim]) == (TensorProto.FLOAT, dims)


def test_guessed_dimensions_are_not_trusted():
    """Symbolic inference takes a Split by computed sizes for one into equal parts; only its ranks are used."""
    proto = net(
        """(float[N,M] x) => (float[N,M] y) { n = Shape<start = 1, end = 2>(x) zero = Sub(n, n)
        sizes = Concat<axis = 0>(n, zero) a, b = Split<axis = 1>(x, sizes) y = Mul(a, w) }""",
        {"w": np.ones((1, 6), np.float32)},
    )
    prepared = ready(proto, rewrites=PREPARATION).proto
    known = [v for v in prepared.graph.value_info if v.name == "a"]
    assert not any(d.dim_value for v in known for d in v.type.tensor_type.shape.dim)
    assert_same(proto, prepared, {"x": np.ones((2, 6), np.float32)})


def test_an_operator_of_which_inference_dies_behind_one_that_it_does_not_know():
    """The process would end with a segmentation fault."""
    body = "g = com.microsoft.QuickGelu(x) e = EyeLike<dtype = 1>(g) y = Add(g, e)"
    proto = net(f"(float[4,4] x) => (float[4,4] y) {{ {body} }}")
    prepared = ready(proto).proto
    assert {v.name for v in prepared.graph.value_info} == {"g", "e"}
    assert [n.domain for n in prepared.graph.node] == ["com.microsoft", "", ""]
    assert_same(proto, prepared, {"x": np.eye(4, dtype=np.float32)})


# ---- a sample of onnx's own operator cases: preparation changes nothing of what the runtime computes -----------------


EVERY = 6
RANDOM = ("Bernoulli", "Dropout", "Multinomial", "Random")
HALF = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


@functools.cache
def cases():
    def pooled(padded, x_shape, kernel, strides, out_shape, *_, **__):
        """Zeros: onnx pools in Python, for many seconds, and what it expects is not looked at here."""
        return np.zeros((*x_shape[:2], *out_shape), padded.dtype)

    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr("onnx.reference.ops.op_pool_common.pool", pooled, raising=False)
        from onnx.backend.test.case.node import collect_testcases

        return [case for case in collect_testcases(None) if case.model is not None][::EVERY]


def outputs(proto, arrays):
    """The model's outputs, None where the runtime does not run it."""
    lowered = copy_model(proto)
    lowered.ir_version = min(proto.ir_version, runtime_limits().max_ir)
    try:
        session = models.session(lowered, optimize=False)
        return session.run(None, {entry.name: a for entry, a in zip(session.get_inputs(), arrays, strict=False)})
    except Exception:
        return None


def same(a, b):
    if a is None or b is None:
        return a is b
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    a, b = np.asarray(a), np.asarray(b)
    close = a.dtype.kind in "fc" and a.shape == b.shape
    return np.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True) if close else np.array_equal(a, b)


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="some of onnx's own cases need numpy 2")
@pytest.mark.parametrize("min_opset", [13, 22])
def test_what_ran_before_runs_the_same(min_opset):
    compared, refused = 0, []
    for case in cases():
        nodes = case.model.graph.node
        half = any(i.type.tensor_type.elem_type in HALF for i in case.model.graph.input)
        if half or any(node.op_type.startswith(RANDOM) for node in nodes):
            continue
        given = case.data_sets[0][0]
        arrays = [numpy_helper.to_array(a) if isinstance(a, onnx.TensorProto) else a for a in given]
        before = outputs(case.model, arrays)
        if before is None:
            continue
        try:
            prepared = ready(case.model, rewrites=PREPARATION, min_opset=min_opset)
        except UnsupportedModelError:
            refused.append(case.name)
            continue
        after = outputs(prepared.proto, arrays)
        newest = case.model.opset_import[0].version > runtime_limits().max_opset
        if after is None and (newest or nodes[0].op_type == "RoiAlign"):
            continue  # refused: types of an operator set that nothing is quantized in, RoiAlign of operator set 22
        assert same(before, after), case.name
        compared += 1
    assert compared > 100
    known = "test_scan_sum"  # of operator set 8, with a batch axis of its own
    if runtime_limits().max_opset < 23:  # RMSNormalization came with it, and the runtime quantizes below only
        known = (known, "test_rms_normalization")
    assert [name for name in refused if not name.startswith(known)] == []
