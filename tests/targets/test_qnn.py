"""The rules of target qnn on the provider's simulator of HTP, and its files, for which none is needed."""

import importlib.util
from contextlib import nullcontext
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st
from onnx import TensorProto
from onnxruntime.quantization import QuantType

from kenosis_ort import errors, preview, quantize_static
from kenosis_ort.errors import CalibrationError, OptionError, RuntimeEndedError, VerificationError
from kenosis_ort.graph.qdq import QDQ_OPS, SourceGraph, integer_bounds, tag
from kenosis_ort.plan import How, Kind, RangeLimit
from kenosis_ort.quantizer.grids import absorbs, nudged_parameters
from kenosis_ort.targets import get_target
from kenosis_ort.targets.proof import Status
from kenosis_ort.targets.qnn import htp_proof as runtime
from kenosis_ort.targets.qnn.htp_proof import PROVIDER, Answer, prove, report_of
from tests import models
from tests.planning import parse
from tests.targets.files import Written, net_of

WIDE = {"activation_type": QuantType.QUInt16}
pytestmark = pytest.mark.filterwarnings("ignore::kenosis_ort.errors.KenosisWarning")
simulated = pytest.mark.skipif(not importlib.util.find_spec("onnxruntime_qnn"), reason="onnxruntime-qnn is not there")


def made(model, folder, **options):
    """Quantizes a net, or that of a text, for HTP, without passes."""
    model = net_of(model) if isinstance(model, str) else model
    return Written(model, folder, "qnn", **{"rewrites": False, **options})


def left(written):
    """Returns what became of each node that is left after loading."""
    assert written.report.fusion is not None, written.report.warnings
    kernels = written.report.fusion.kernels
    return {k.node: k.status.value for k in kernels if k.status not in (Status.REMOVED, Status.OTHER)}


def runs_whole(model, folder, *types):
    """Checks that every node of a net runs on integers on HTP, where that is there."""
    for options in () if runtime.missing() else types:
        found = left(made(model, folder, **options))
        assert found
        assert set(found.values()) <= {"integer", "absorbed"}, found


# ---- rules ------------------------------------------------------------------------------------------------------

CONV = "[conv] c = Conv <pads = [1,1,1,1]> (x, w6_6_3_3)"
JOINED = f"""[wide] a = Mul (x, nine) [narrow] b = Sigmoid (x) {CONV} [relu] r = Relu (c)
    [join] y = Concat <axis = 1> (a, b, r)"""
"""A Concat of values of very different ranges, and of one behind a Relu."""
IMAGE = "1,6,8,8"
EXAMPLES = {
    "qnn-conv": (IMAGE, "c = Conv (x, w8_6_3_3) y = ConvTranspose <strides = [2,2]> (c, w8_4_2_2, ones4)"),
    "qnn-gemm": ("2,8", "y = Gemm (x, w8_4, ones4)"),
    "qnn-matmul-activations": ("4,8", "t = Transpose <perm = [1,0]> (x) y = MatMul (x, t)"),
    "qnn-elementwise": (IMAGE, """a = Abs (x) b = Add (a, by) c = Mul (b, by) d = Max (c, by) e = Div (d, by)
        y = Sub (e, x)"""),
    "qnn-where": (IMAGE, "n = Neg (x) y = Where (even, x, n)"), "qnn-softmax": (IMAGE, "y = Softmax (x)"),
    "qnn-sigmoid": (IMAGE, "y = Sigmoid (x)"), "qnn-tanh": (IMAGE, "y = Tanh (x)"),
    "qnn-functions": (IMAGE, "a = LeakyRelu (x) b = HardSwish (a) c = Gelu (b) d = Elu (c) y = Exp (d)"),
    "qnn-norms": (IMAGE, "n = InstanceNormalization (x, ones6, zeros6) y = LayerNormalization (n, ones8, zeros8)"),
    "qnn-pools": (IMAGE, "p = AveragePool <kernel_shape = [2,2], strides = [2,2]> (x) y = GlobalAveragePool (p)"),
    "qnn-reductions": (IMAGE, "m = ReduceMean (x, i3) y = ReduceMax (m, i2)"), "qnn-concat": (IMAGE, JOINED),
    "qnn-moves": (IMAGE, """p = MaxPool <kernel_shape = [2,2], strides = [2,2]> (x)
        t = Transpose <perm = [0,2,3,1]> (p) s = Slice (t, i0, i3, i1) y = Reshape (s, flat)"""),
    "qnn-resize-nearest": (IMAGE, "y = Resize (x, , twice)"),
    "qnn-resample": (IMAGE, 'r = Resize <mode = "linear"> (x, , twice) y = Pad (r, pads)'),
}  # fmt: skip
"""Nets by rule whose every node runs on integers on HTP."""


@pytest.mark.parametrize("rule", EXAMPLES)
def test_rule(rule, tmp_path):
    shape, body = EXAMPLES[rule]
    plan = preview(net_of(body, shape), target="qnn")
    assert rule in {n.rule for n in plan.nodes}
    assert {n.kind for n in plan.nodes} <= {Kind.INTEGER, Kind.PASS_THROUGH, Kind.ABSORBED}
    runs_whole(net_of(body, shape), tmp_path, {}, WIDE)


@simulated
def test_rule_qnn_matmul(tmp_path):
    written = made(net_of("y = MatMul (x, w8_4)", "2,3,8"), tmp_path)
    assert list(left(written).values()) == ["integer"]
    weights = next(t for t in written.model.graph.initializer if t.data_type == TensorProto.INT8 and len(t.dims) == 2)
    assert [len(t.dims) for t in written.model.graph.initializer if t.name == f"{weights.name[:-10]}_scale"] == [1]


@pytest.mark.parametrize(("name", "grid"), [("Sigmoid", (1 / 65536, 0)), ("Tanh", (1 / 32768, 32768))])
def test_one_grid_in_sixteen_bits(name, grid, tmp_path):
    body = f"s = {name} (x) y = Relu (s)"
    assert made(body, tmp_path, **WIDE, verify=False).grids["s"] == grid
    assert made(body, tmp_path, verify=False).grids["s"][0] < grid[0] * 256  # the range that was observed


@pytest.mark.parametrize("options", [{}, WIDE])
def test_a_softmax_stays_off_the_grid_of_a_concat(options, tmp_path):
    body = "p = Softmax (x) t = Transpose <perm = [0,1,3,2]> (p) m = Mul (x, tiny) y = Concat <axis = 1> (t, m)"
    found = made(body, tmp_path, verify=False, **options).grids
    assert found["p"] == found["t"] == (found["p"][0], 0) != found["y_QuantizeLinear_Input"]
    scale, zero_point = found["y_QuantizeLinear_Input"]  # covers what it reads: HTP's Concat would wrap around
    most = 65535 if options else 255
    assert (most - zero_point) * scale >= most * found["p"][0] * 0.99


def test_symmetric_activations_leave_a_softmax_at_zero_point_0(tmp_path):
    """HTP would compute half of the range away, without a word."""
    options = {"extra_options": {"ActivationSymmetric": True}, "verify": False}
    written = made("n = Neg (x) p = Softmax (n) y = Transpose (p)", tmp_path, **options)
    assert (written.grids["p"][1], written.grids["n"][1] in (127, 128)) == (0, True)
    assert any("ActivationSymmetric is not kept for 'p'" in note for note in written.report.notes)


@pytest.mark.parametrize("entry", [{"symmetric": True}, {"scale": np.float32(0.01), "zero_point": np.uint8(128)}])
def test_another_zero_point_for_a_softmax_is_refused(entry, tmp_path):
    said = {"y": [{"quant_type": QuantType.QUInt8, **entry}]}
    with pytest.raises(OptionError, match="'y' asks for another zero point than 0: Softmax in 8 bits"):
        made("y = Softmax (x)", tmp_path, extra_options={"TensorQuantOverrides": said})


def test_a_concat_and_all_it_reads_are_on_one_grid(tmp_path):
    written = made(JOINED, tmp_path, verify=False)
    reads = [d for d in written.report.plan.decisions if d.edge.consumer == "join"]
    assert {d.provider for d in reads} == {"y"}
    assert written.report.plan.by_node["relu"].kind is Kind.INTEGER  # on that grid it would not vanish
    assert len({written.grids[d.edge.value] for d in reads}) == 1


def test_a_concat_covers_what_cannot_be_on_its_grid(tmp_path):
    """A Sigmoid of 16 bits has one grid alone."""
    body = "m = Mul (x, tiny) s = Sigmoid (x) y = Concat <axis = 1> (s, m)"
    found = made(body, tmp_path, **WIDE, verify=False).grids
    scale, zero_point = found["y_QuantizeLinear_Input"]
    assert found["s"] == (1 / 65536, 0)
    assert (65535 - zero_point) * scale >= 65535 / 65536 * 0.9999


@pytest.mark.parametrize(("body", "kind"), [
    ("n = Neg (x) j = Concat <axis = 1> (x, n) [act] y = Relu (j)", Kind.INTEGER),
    (f"{CONV} [act] y = Relu (c)", Kind.ABSORBED), (f"{CONV} [act] y = Clip (c, zero, one)", Kind.ABSORBED),
])  # fmt: skip
def test_rule_qnn_relu(body, kind, tmp_path):
    assert preview(net_of(body), target="qnn").by_node["act"].kind is kind
    runs_whole(net_of(body), tmp_path, {}, WIDE)


test_rule_qnn_relu_behind_concat = test_rule_qnn_relu


@simulated
@pytest.mark.parametrize("name", ["Erf", "Softsign"])
def test_rule_qnn_refused(name, tmp_path):
    report = made(f"{CONV} [it] y = {name} (c)", tmp_path).report
    assert report.fusion.by_node["it"].kernel == f"CPUExecutionProvider {name}"
    assert "HTP refuses" in report.fusion.by_node["it"].reason
    assert any(f"1 node does not run on integers on target 'qnn': {name} 'it'" in text for text in report.warnings)


# ---- facts ------------------------------------------------------------------------------------------------------


def test_rule_qnn_whole(tmp_path):
    """Every float value but those inside a kernel carries Q and DQ, the net's outputs included."""
    for name, build in models.ALL.items():
        written = made(build(), tmp_path, verify=False, rewrites=True)
        kinds = {n.node: n.kind for n in written.report.plan.nodes}
        graph = SourceGraph(written.model)
        for node in graph.nodes:
            if node.is_compute and kinds.get(node.label) in (Kind.INTEGER, Kind.PASS_THROUGH) and not node.graph:
                written_values = [v for v in node.proto.output if graph.is_float(v)]
                readers = [r for v in written_values for r in graph.consumers.get(v, [])]
                inner = {kinds.get(r.label) for r in readers if r.op_type not in QDQ_OPS}
                assert inner <= {Kind.ABSORBED}, f"{name}: {node.label}"
        floats = {o.name for o in written.model.graph.output if o.type.tensor_type.elem_type == TensorProto.FLOAT}
        assert {graph.producer[o].op_type for o in floats} == {"DequantizeLinear"}, name


@simulated
def test_rule_qnn_static_shapes(tmp_path):
    """A file with a batch of any size is refused as a whole."""
    written = made(models.ALL["mlp"](), tmp_path)
    assert not prove(written.model).float_nodes()
    for info in (*written.model.graph.input, *written.model.graph.output):
        info.type.tensor_type.shape.dim[0].dim_param = "batch"
    del written.model.graph.value_info[:]
    report = prove(written.model)
    assert Status.INTEGER not in {k.status for k in report.kernels}
    assert "static" in report.kernels[0].reason


def test_rule_qnn_transposed_groups(tmp_path):
    body = "[up] y = ConvTranspose <group = 2, strides = [2,2]> (x, w6_2_2_2, ones4)"
    decisions = made(body, tmp_path, verify=False).report.plan.decisions
    assert [(d.how, d.axis) for d in decisions if (d.edge.consumer, d.edge.index) == ("up", 1)] == [(How.OWN, None)]


# ---- the caller's words -----------------------------------------------------------------------------------------


def test_a_batch_of_any_size_becomes_one(tmp_path):
    model = models.ALL["mlp"]()
    written = made(model, tmp_path, verify=False)
    for info in (*written.model.graph.input, *written.model.graph.output):
        assert info.type.tensor_type.shape.dim[0].dim_value == 1
    assert any("the batch is 1 in the file (inputs were 'x' [batch, " in note for note in written.report.notes)
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    with pytest.raises(CalibrationError, match="'x'"):  # of another batch
        made(model, tmp_path, feeds=models.feeds(model, 2, dims={"batch": 2}))


@pytest.mark.parametrize(("dims", "shown"), [(["n", 6, "h", "w"], r"\[n, 6, h, w\]"), ([1, 6, 8, None], r"8, \?\]")])
def test_other_symbolic_dimensions_are_refused(dims, shown, tmp_path):
    model = net_of("y = Relu (x)")
    model.graph.input[0].CopyFrom(onnx.helper.make_tensor_value_info("x", TensorProto.FLOAT, dims))
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    with pytest.raises(errors.UnsupportedModelError, match=f"input 'x' is .*{shown}") as caught:
        quantize_static(model, tmp_path / "out.onnx", models.FeedReader([]), target="qnn")
    assert "make_dynamic_shape_fixed --input_name x" in str(caught.value)
    assert not (tmp_path / "out.onnx").exists()


def test_without_the_provider_it_is_not_proved(tmp_path, monkeypatch):
    if get_target("qnn").hooks.prove is None:
        report = made(models.ALL["conv_relu_chain"](), tmp_path).report
        assert (report.fusion, "onnxruntime-qnn is not installed" in report.unproved) == (None, True)
    monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda _: None)
    assert "kenosis-ort[qnn]" in runtime.missing()
    with pytest.raises(VerificationError, match="not installed"):
        runtime.ask([])


def test_a_chip_is_a_number(monkeypatch):
    monkeypatch.delenv(runtime.CHIP_VARIABLE, raising=False)
    assert runtime.chip() == "60"
    monkeypatch.setenv(runtime.CHIP_VARIABLE, "X Elite")
    with pytest.raises(VerificationError, match="soc_model"):
        runtime.chip()


def test_where_8_bits_are_too_few_the_warning_names_16(tmp_path):
    """One channel is 60 times as large as the others, and then it is not."""
    body = f"{CONV} m = Mul (c, channels) y = Div (m, channels)"
    narrow, wide = (made(body, tmp_path, **how).report for how in ({}, WIDE))
    assert any("activation_type=QuantType.QUInt16, which target 'qnn' takes" in text for text in narrow.warnings)
    assert not any("QUInt16" in text for text in wide.warnings)


@simulated
def test_types_are_mixed_by_tensor(tmp_path):
    """As `get_qnn_qdq_config` says it: one node in 16 bits, what it reads converted and what others read back."""
    model = models.ALL["conv_relu_chain"]()
    inner, wide = model.graph.node[2], {"quant_type": QuantType.QUInt16}
    back = {"quant_type": QuantType.QUInt8, "recv_nodes": {model.graph.node[4].name}}
    said = {inner.input[0]: [{"quant_type": QuantType.QUInt8, "convert": {**wide, "recv_nodes": {inner.name}}}]}
    said[inner.output[0]] = [{**wide, "convert": {**back, "recv_nodes": {model.graph.node[3].name}}}]
    written = made(model, tmp_path, extra_options={"TensorQuantOverrides": said})
    assert set(left(written).values()) <= {"integer", "absorbed"}, left(written)
    assert TensorProto.UINT16 in {t.data_type for t in written.model.graph.initializer}


# ---- the proof --------------------------------------------------------------------------------------------------


def test_what_the_provider_says_is_read():
    """Told from its answer alone: taken, taken in, refused, gone."""
    model = parse(
        """(float[1,4] x) => (y) <float s, uint8 z> { a = QuantizeLinear (x, s, z) b = DequantizeLinear (a, s, z)
        [neg] n = Neg (b) [relu] r = Relu (n) q = QuantizeLinear (r, s, z) d = DequantizeLinear (q, s, z)
        [gone] g = Abs (d) [erf] y = Erf (g) }"""
    )
    tagged = tag(model)
    tokens = {label: node.name for label, node in zip(tagged.labels, tagged.proto.graph.node, strict=True)}
    taken = {
        PROVIDER: [f"{tokens['neg']}_token_1", tokens["relu"], "Transpose"],
        "CPUExecutionProvider": [tokens["erf"]],
    }
    graph = SourceGraph(tagged.proto, labels=tagged.labels, paths=tagged.paths)
    report = report_of(graph, Answer(taken), None, "2.7")
    told = {"neg": Status.INTEGER, "relu": Status.ABSORBED, "gone": Status.REMOVED, "erf": Status.FLOAT}
    assert {k.node: k.status for k in report.kernels} == told
    assert (report.by_node["relu"].absorbed_into, report.overhead) == ("neg", {f"{PROVIDER} layout": 1})
    assert "HTP" in report.by_node["erf"].reason


@simulated
def test_a_file_that_does_not_load_names_the_node(tmp_path):
    model = net_of(f"{CONV} [lrn] y = LRN <size = 3> (c)")
    runs_whole(model, tmp_path, {})
    written = made(model, tmp_path, **WIDE, verify=False)
    assert {k.node: k.status for k in prove(written.model).kernels} == {"conv": Status.OTHER, "lrn": Status.FLOAT}
    repaired = made(model, tmp_path, **WIDE)  # without Q around it, it loads
    assert left(repaired) == {"conv": "integer", "lrn": "float"}
    assert any("LRN 'lrn' (" in text for text in repaired.report.warnings)


def refused_by(monkeypatch, *refused, ends=False):
    """Has files with some operators not load; returns what was asked."""
    asked = []

    class Fake(nullcontext[Any]):
        log = ""

        def ask(self, question):
            if not question:
                return {}
            asked.append([n.op_type for n in onnx.load(question["model"]).graph.node])
            failed = set(refused) & set(asked[-1])
            if failed and ends:
                raise RuntimeEndedError("killed")
            return {"failure": "Failed to finalize QNN graph"} if failed else {"taken": {}}

        def __enter__(self):
            return self

    monkeypatch.setattr(runtime, "missing", lambda: "")
    monkeypatch.setattr(runtime, "Child", lambda *_: Fake())
    monkeypatch.setattr("kenosis_ort.targets.qnn.htp_proof.runtime_version", lambda: "2.7")
    return asked


@pytest.mark.parametrize("ends", [False, True])
def test_what_the_compiler_refuses_is_found_node_by_node(ends, tmp_path, monkeypatch):
    body = f"{CONV} [relu] r = Relu (c) [one] s = Selu (r) [abs] a = Abs (s) [two] y = Selu (a)"
    written = made(body, tmp_path, verify=False)
    asked = refused_by(monkeypatch, "Selu", ends=ends)
    found = {k.node: k for k in prove(written.model).kernels}
    assert {name for name, k in found.items() if k.status is Status.FLOAT} == {"one", "two"}
    assert "with it the model does not load" in found["one"].reason
    pieces = [[op for op in ops if "Linear" not in op] for ops in asked[1:]]
    assert pieces == [["Conv", "Relu"], ["Selu"], ["Abs"], ["Selu"]]  # one of each kind, then the others that fail


def test_where_each_node_loads_alone_the_error_says_so(tmp_path, monkeypatch):
    written = made("s = Selu (x) y = Abs (s)", tmp_path, verify=False)
    refused_by(monkeypatch, "Selu")
    whole = runtime.ask
    monkeypatch.setattr(runtime, "ask", lambda paths: whole(paths) if len(paths) == 1 else [Answer() for _ in paths])
    with pytest.raises(VerificationError, match="each of 2 nodes tried loads in a model of its own: Failed to final"):
        prove(written.model)


@simulated
def test_what_the_chip_lacks_is_named(tmp_path, monkeypatch):
    """The provider takes Selu for a chip without float16, and cannot compile it."""
    monkeypatch.setenv(runtime.CHIP_VARIABLE, "30")
    written = made(f"{CONV} [selu] y = Selu (c)", tmp_path)
    assert left(written)["selu"] == "float"
    assert any("Selu 'selu' (with it the model does not load" in text for text in written.report.warnings)


@simulated
def test_what_writes_float_is_told():
    kernels = prove(net_of(f"{CONV} [erf] y = Erf (c)")).by_node
    assert (kernels["conv"].kernel, kernels["conv"].integer) == ("HTP Conv", False)
    assert "reads or writes float" in kernels["conv"].reason


# ---- arithmetic -------------------------------------------------------------------------------------------------


@given(low=st.floats(-50, 0), high=st.floats(0.01, 50), wide=st.booleans())
def test_a_relu_taken_in_keeps_its_bound_to_the_last_digit(low, high, wide):
    """The provider refuses a Relu whose quantized range reaches below 0 by anything."""
    bits = 16 if wide else 8
    limit = RangeLimit("v", 0.0, 6.0)
    found = nudged_parameters(low, high, signed=False, limit=limit, bits=bits)
    assert (found.zero_point, np.float32(found.scale) * np.float32(2**bits - 1) <= np.float32(6)) == (0, True)
    assert absorbs(found.scale, found.zero_point, limit, integer_bounds(bits, signed=False))
