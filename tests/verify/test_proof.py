"""Whatever form a model has, whose runtime is asked, in pieces if it is large, as plain data; biases' scales."""

import dataclasses
import json
import re
import tempfile
import warnings
from collections import Counter

import numpy as np
import onnx
import pytest
from hypothesis import given, settings, strategies as st
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort import KenosisWarning, ModelLoadError, OptionError, VerificationError, quantize_static
from kenosis_ort.cli.main import main
from kenosis_ort.graph.constants import replace_nodes
from kenosis_ort.graph.files import made_for, mark
from kenosis_ort.graph.outside import copy_model
from kenosis_ort.graph.qdq import SourceGraph
from kenosis_ort.targets import Hooks, get_target
from kenosis_ort.targets.ort_cpu.cpu_proof import cut
from kenosis_ort.verify import Cause, FusionReport, KernelReport, Status, check_bias_alignment, verify_fusion
from tests import models
from tests.targets.qdq import QdqGraph, build, random_feeds, run
from tests.verify.expect import one


@pytest.fixture
def model():
    g = QdqGraph()
    return g.model(g.relu_q(g.op("Relu", g.conv(g.act_input()))))


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """An empty folder for temporary files and as working folder."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.chdir(folder)
    return folder


def split(model, path):
    """Saves a model with its data beside it."""
    onnx.save(model, path, save_as_external_data=True, location="model.data", size_threshold=0)
    return path


def test_all_forms_of_a_model_give_the_same_report_and_leave_nothing(model, tmp_path, scratch, monkeypatch):
    expected, content, path = verify_fusion(model), model.SerializeToString(), tmp_path / "model.onnx"
    onnx.save(model, path)
    assert [verify_fusion(form) for form in (path, str(path), content)] == [expected] * 3
    assert verify_fusion(split(onnx.load(path), tmp_path / "split.onnx")) == expected
    monkeypatch.setattr("kenosis_ort.graph.load.MAPPED_FROM", 0)  # a large one goes through a file
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((64, 1024), np.float32), "unused"))
    assert (verify_fusion(model), list(scratch.iterdir())) == (expected, [])
    assert {p.name for p in tmp_path.iterdir()} == {"model.onnx", "split.onnx", "model.data", "scratch"}


def test_float_node_with_external_scales(tmp_path):
    g = QdqGraph()
    path = split(g.model(g.q(g.op("Relu", g.conv(g.act_input())))), tmp_path / "model.onnx")
    assert "zero point of its Q is 128" in one(verify_fusion(path), "Conv").reason
    assert check_bias_alignment(onnx.load(path, load_external_data=False), base=tmp_path) == []


def test_missing_files(model, tmp_path):
    path = split(copy_model(model), tmp_path / "model.onnx")
    (tmp_path / "model.data").unlink()
    with pytest.raises(VerificationError):
        verify_fusion(path)
    with pytest.raises(ModelLoadError, match="does not exist"):
        verify_fusion(tmp_path / "none.onnx")
    with pytest.raises(VerificationError):
        verify_fusion(model, custom_op_libraries=[str(tmp_path / "none.so")])


def test_refusal_names_the_node_by_its_own_name(model, scratch):
    node = next(n for n in model.graph.node if n.op_type == "Relu")
    node.op_type, node.name = "NoSuchOperator", "my_node"
    with pytest.raises(VerificationError, match="my_node") as caught:
        verify_fusion(model)
    assert ("kv#" in str(caught.value), len(str(caught.value)) < 1000) == (False, True)
    assert list(scratch.iterdir()) == []


# ---- a file says for which target it was made; the proof asks its runtime, and says so where it cannot ---------------


def made(out, target="ort-cpu", **options):
    model = models.conv_relu_chain(2)
    quantize_static(model, out, models.reader(model, 4), target=target, recipe="plain", promise=False, **options)
    return out


def test_a_file_says_for_which_target_it_was_made_but_not_one_for_other_tools(tmp_path):
    out = tmp_path / "out.onnx"
    assert made_for(onnx.load(made(out))) == made_for(onnx.load(made(out, format="qop"))) == "ort-cpu"
    assert made_for(onnx.load(made(out, "tensorrt"))) == "tensorrt"
    assert made_for(onnx.load(made(out, format="qonnx"))) is made_for(models.conv_relu_chain(2)) is None


def test_marking_replaces_the_mark_and_nothing_else():
    model = models.conv_relu_chain(2)
    onnx.helper.set_model_props(model, {"author": "somebody"})
    mark(model, "first")
    mark(model, "second")
    assert {e.key: e.value for e in model.metadata_props} == {"author": "somebody", "kenosis_ort.target": "second"}


def test_the_runtime_of_the_files_own_target_is_asked(tmp_path, monkeypatch):
    asked = []

    def prove(model, **_):
        asked.append("elsewhere")
        return FusionReport((), "1", runtime="another")

    elsewhere = dataclasses.replace(get_target("ort-cpu"), name="elsewhere", hooks=Hooks(prove=prove))
    monkeypatch.setattr("kenosis_ort.verify.TARGETS", {"elsewhere": elsewhere, "ort-cpu": get_target("ort-cpu")})
    path = made(tmp_path / "out.onnx", elsewhere)
    asked.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert verify_fusion(path).runtime == "another"
    assert asked == ["elsewhere"]
    with pytest.warns(KenosisWarning, match="was made for target 'elsewhere'.*Fix: target='elsewhere'"):
        assert verify_fusion(path, target="ort-cpu").runtime == "onnxruntime"


def test_a_file_for_a_runtime_that_is_not_here_is_told(tmp_path, capsys):
    path = made(tmp_path / "out.onnx", "tensorrt")
    with pytest.warns(KenosisWarning, match="made for target 'tensorrt', and the runtime of 'ort-cpu' is asked"):
        verify_fusion(path)
    with pytest.raises(OptionError, match="'tensorrt' has no runtime here"):
        verify_fusion(path, target="tensorrt")
    for command, shown in (("verify", "asked: onnxruntime"), ("explain", "nodes that carry arithmetic")):
        assert main([command, str(path)]) == 0
        printed = capsys.readouterr()
        assert re.fullmatch("kenosis-ort: warning: .*made for target 'tensorrt'.*\n", printed.err), command
        assert shown in printed.out


# ---- a large model is proved in pieces, and the proof is that of the whole ------------------------------------------


def _residual_net(*, signed=False, shapes=True):
    g = QdqGraph(act=np.int8 if signed else np.uint8)
    known, x = [], g.act_input((1, 8, 6, 6))
    for _ in range(6):
        known += [first := g.op("Relu", g.conv(x, 8, 8)), second := g.conv(g.relu_q(first), 8, 8)]
        known.append(g.op("Relu", g.op("Add", g.q(second), x)))
        x = g.relu_q(known[-1])
    tail = g.op("LeakyRelu", g.conv(x, 8, 8))  # a float node, second reader of x
    model = g.model(g.op("Sigmoid", tail), x)
    if shapes:
        model.graph.value_info.extend(helper.make_tensor_value_info(v, TensorProto.FLOAT, (1, 8, 6, 6)) for v in known)
    return model


def _small_pieces(monkeypatch, size):
    module = "kenosis_ort.targets.ort_cpu.cpu_proof"
    monkeypatch.setattr(f"{module}.WHOLE_LIMIT", 0)
    monkeypatch.setattr(f"{module}.cut", lambda model, graph: cut(model, graph, size=size))


@pytest.mark.parametrize("size", [1, 4, 11])
def test_the_proof_is_that_of_the_whole(size, monkeypatch):
    model = _residual_net()
    whole = verify_fusion(model)
    _small_pieces(monkeypatch, size)
    found = verify_fusion(model)
    assert (whole.pieces, found.pieces > 1, found.kernels) == (1, True, whole.kernels)


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_every_node_is_in_one_piece_and_the_pieces_compute_the_whole(size):
    model = _residual_net()
    parts = cut(model, SourceGraph(model), size=size)
    movable = ("DequantizeLinear", "Constant")
    counts = Counter(n.name for part in parts for n in part.graph.node if n.op_type not in movable)
    assert counts == Counter(n.name for n in model.graph.node if n.op_type not in movable)
    values = random_feeds(model)
    expected = run(model, values, optimize=False)
    for part in parts:
        made = run(part, {i.name: values[i.name] for i in part.graph.input}, optimize=False)
        values.update(zip([o.name for o in part.graph.output], made, strict=True))
    for output, array in zip(model.graph.output, expected, strict=True):
        np.testing.assert_array_equal(values[output.name], array)


def test_no_cut_through_int8_or_values_of_unknown_rank():
    signed, unknown = _residual_net(signed=True), _residual_net(shapes=False)
    assert len(cut(signed, SourceGraph(signed), size=1)) == 1
    first, rest = cut(unknown, SourceGraph(unknown), size=1)  # only the graph input has a rank
    assert [n.op_type for n in first.graph.node] == ["QuantizeLinear"]
    assert len(rest.graph.node) == len(unknown.graph.node) - 1


def test_no_cut_where_the_order_is_not_topological():
    model = _residual_net()
    replace_nodes(model.graph, list(model.graph.node)[::-1])
    assert len(cut(model, SourceGraph(model), size=1)) == 1


def test_a_body_keeps_what_it_reads(monkeypatch):
    model = _residual_net()
    graph = model.graph
    captured = next(n.output[0] for n in graph.node if n.op_type == "DequantizeLinear" and "quantize" in n.input[0])
    graph.input.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, ()))
    branches = ", ".join(
        f"{kind}_branch = {op} () => (float[] {op}_y) {{ [{op}] {op}_y = {op} ({captured}) }}"
        for kind, op in (("then", "Exp"), ("else", "Abs"))
    )
    graph.node.append(onnx.parser.parse_node(f"[if] chosen = If (flag) <{branches}>"))
    graph.output.append(helper.make_tensor_value_info("chosen", TensorProto.FLOAT, None))
    whole = verify_fusion(model)
    _small_pieces(monkeypatch, 3)
    found = verify_fusion(model)
    assert (found.pieces > 1, found.kernels) == (True, whole.kernels)


# ---- the report is plain data ---------------------------------------------------------------------------------------


kernels = st.builds(
    KernelReport, node=st.text(min_size=1, max_size=8), op_type=st.sampled_from(["Conv", "Gemm", "Relu", "Shape"]),
    kernel=st.sampled_from(["", "Conv", "com.microsoft.QLinearConv"]), integer=st.booleans(),
    absorbed=st.lists(st.text(max_size=4), max_size=2).map(tuple), absorbed_into=st.none() | st.text(max_size=4),
    reason=st.text(max_size=8), status=st.sampled_from(Status), cause=st.sampled_from(Cause),
    graph=st.sampled_from(["", "If.then_branch"]), silently_quantized=st.booleans(), weights_per_run=st.booleans(),
)  # fmt: skip
reports = st.builds(
    FusionReport, kernels=st.lists(kernels, max_size=12).map(tuple), runtime_version=st.just("1.2.3"),
    overhead=st.dictionaries(st.sampled_from(["Transpose", "QuantizeLinear"]), st.integers(1, 9)),
)  # fmt: skip


@given(reports)
def test_json_has_every_kernel(report):
    assert json.loads(json.dumps(report.to_dict())) == {
        "schema": 1,
        **json.loads(json.dumps(dataclasses.asdict(report))),
    }


@given(reports)
def test_counts_and_shares(report):
    assert sum(report.counts().values()) == len(report.kernels)
    assert 0.0 <= report.integer_share() <= 1.0
    assert len(report.float_nodes()) == report.counts()["float"]
    assert len(str(report).splitlines()) <= 13


def test_absorbed_matmul_counts_by_its_kernel():
    report = FusionReport(
        (
            KernelReport("a", "MatMul", "com.microsoft.QGemm", True, absorbed=("b",), status=Status.INTEGER),
            KernelReport("b", "Add", "com.microsoft.QGemm", True, absorbed_into="a", status=Status.ABSORBED),
            KernelReport("c", "Conv", "Conv", False), KernelReport("d", "Conv", "", False, status=Status.REMOVED),
        ),
        "1.2.3",
    )  # fmt: skip
    assert (report.integer_share(), report.kernel_counts()) == (0.5, {"com.microsoft.QGemm": 1, "Conv": 1})


# ---- scales and zero points of biases -------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, None])
def test_aligned_biases_pass(axis):
    def make(g):
        return g.gemm(g.q(g.op("Flatten", g.q(g.conv(g.act_input(), axis=axis)))), 16 * 144, 8, axis=axis)

    assert check_bias_alignment(build(make)) == []


@settings(max_examples=20, deadline=None)
@given(st.floats(0.5, 2.0).filter(lambda f: abs(f - 1) > 1e-5))
def test_misaligned_bias_is_found(factor):
    model = build(lambda g: g.gemm(g.act_input((4, 32)), bias_factor=factor))
    assert [(problem.kind, problem.node[:4]) for problem in check_bias_alignment(model)] == [("bias-scale", "gemm")]


def test_tiny_scales_are_judged_in_steps_of_float32():
    model = build(lambda g: g.gemm(g.act_input((4, 32))))
    makers = {n.output[0]: n for n in model.graph.node}
    gemm = next(n for n in model.graph.node if n.op_type == "Gemm")
    data, weight, bias = (makers[v].input[1] for v in gemm.input)
    for name, value in ((data, np.full((), 1e-20)), (weight, np.full(16, 1.23e-20)), (bias, np.full(16, 1.23e-40))):
        _edit(model, name, value.astype(np.float32))
    assert check_bias_alignment(model) == []
    _edit(model, bias, np.full(16, 1.24e-40, np.float32))
    (problem,) = check_bias_alignment(model)
    assert "0.81 %" in problem.what


def test_a_bias_that_counts_nothing_is_not_judged():
    assert check_bias_alignment(build(lambda g: g.gemm(g.act_input((4, 32)), bias_factor=2.0, beta=0.0))) == []


def test_shared_bias_of_disagreeing_consumers_is_found():
    model = build(lambda g: [g.gemm(g.act_input((4, 32))), g.gemm(g.act_input((4, 32), 0.05))])
    first, second = [n for n in model.graph.node if n.op_type == "Gemm"]
    first.input[2] = second.input[2]
    assert [p.node for p in check_bias_alignment(model)] == [first.name]


def _edit(model, name, change):
    next(i for i in model.graph.initializer if i.name == name).CopyFrom(numpy_helper.from_array(change, name))


def test_a_bias_has_the_zero_point_zero():
    model = build(lambda g: g.q(g.conv(g.act_input((1, 16, 6, 6)))))
    makers = {n.output[0]: n for n in model.graph.node}
    bias = makers[next(n.input[2] for n in model.graph.node if n.op_type == "Conv")]
    _edit(model, bias.input[2], np.full(16, 1, np.int32))
    assert [p.kind for p in check_bias_alignment(model)] == ["bias-zero-point"]
