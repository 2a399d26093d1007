"""Optional steps that fail are undone; a defect is an error, or the float model as it came where the caller says so."""

import logging
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

from kenosis_ort import InternalError, KenosisWarning, Stages, VerificationError
from kenosis_ort.accuracy.outputs import OutputComparison
from kenosis_ort.flow import finish, resolve, samples
from kenosis_ort.plan import Kind
from kenosis_ort.rewrite.rule import Rule
from kenosis_ort.targets import get_target, proof
from kenosis_ort.tuning.promise import LEAST_SQNR_DB
from tests import models, planning
from tests.flow import control
from tests.flow.support import changed, initializers, make, own_warnings, quantized


def told(out, source, feeds=None, **options):
    """Quantizes by the default recipe; the float model is delivered, with a warning."""
    with pytest.warns(KenosisWarning) as caught:
        report = quantized(source, out, feeds, **{"recipe": "fast", **options})
    assert report.is_float
    assert report.float_because
    assert report.float_because in report.verdict()
    assert any(f"float model as it came: {report.float_because}" in text for text in own_warnings(list(caught)))
    return report


# ---- nothing to quantize, or nothing worth it -------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("stages", [Stages(), Stages.none(), Stages(placement=False)], ids=["all", "none", "stock's"])
def test_nothing_to_quantize_is_delivered_byte_for_byte(tmp_path, stages, in_place):
    path = tmp_path / "float.onnx"
    onnx.save(planning.parse("net (float[1,4] x) => (float[1,4] y) { y = Erf (x) }"), path)
    before, out = path.read_bytes(), path if in_place else tmp_path / "out.onnx"
    told(out, path, stages=stages)
    assert out.read_bytes() == path.read_bytes() == before


@pytest.mark.parametrize(("options", "because"), [
    ({"nodes_to_exclude": ["conv0", "relu1"]}, ""), ({"recipe": "weight-only-4"}, "no"),  # there is no such layer
    ({"extra_options": {"MinimumRealRange": 1e4}}, "worthless"),  # a step is larger than all values
])  # fmt: skip
def test_where_all_is_excluded_or_the_result_is_worthless(tmp_path, options, because):
    model = models.conv_relu_chain(2)
    report = told(tmp_path / "out.onnx", model, **options)
    assert (because in report.float_because, report.calibration.method) == (True, "minmax")
    assert onnx.load(tmp_path / "out.onnx") == model


def spiky(behind, constant=0.0):
    """A net with a large channel in one or two of its tensors, read by nobody, and a share of constant output."""
    text = """net (float[1,8,16,16] x) => (float[1,32,14,14] y)
        <float[8,8,1,1] a, float[8] b, float[8,8,1,1] c, float[32,8,3,3] d, float[32] e, float[32,32,3,3] f> {
        g = Conv (x, a, b)  h = HardSwish (g)  i = Conv (h, c)  j = HardSwish (i)
        k = Conv <pads = [1,1,1,1]> (j, d, e)  l = HardSwish (k)  y = Conv (l, f) }"""
    model = planning.parse(text)
    model = changed(model, f=lambda f: f - (1 - constant) * f.mean((2, 3), keepdims=True))
    for bias, weight in behind.items():
        large = {bias: lambda b: np.where(np.arange(len(b)) == 0, 1e6, b)}
        model = changed(model, **large, **{weight: lambda w: w * (np.arange(w.shape[1]) > 0)[:, None, None]})
    return model


@pytest.mark.parametrize("constant", [0.0, 1.0], ids=["worthless", "poor"])
def test_where_a_small_part_of_the_work_makes_it_poor_that_is_float_and_the_rest_is_delivered(tmp_path, constant):
    """By default, and on other samples too; where it is a large part, the float model is delivered."""
    model = spiky({"b": "c"}, constant)
    made = make(model, tmp_path, models.feeds(model, 16), recipe="fast", promise=False)
    assert made.db(models.feeds(model, 8, seed=9)) > LEAST_SQNR_DB
    assert (made.report.is_float, len(made.report.plan.integer_nodes()) >= 2) == (False, True)
    assert any("worthless" in note and "are float" in note for note in made.report.notes)
    model = spiky({"b": "c", "e": "f"})
    assert "worthless" in told(tmp_path / "out.onnx", model, models.feeds(model, 16), promise=False).float_because


@pytest.mark.parametrize(("model", "feed", "because"), [
    (control.two_rates(outside=True), {"x": np.ones((1, 3, 16, 16), np.float32), "rate": np.array(8000)},
     "Conv is not among the caller's op_types_to_quantize"),
    (control.loop(3), {"x": np.ones((2, 32), np.float32)}, "no Conv, Gemm or MatMul outside of bodies"),
])  # fmt: skip
def test_where_operators_are_named_that_leave_nothing_of_a_model_with_bodies(tmp_path, model, feed, because):
    assert because in told(tmp_path / "out.onnx", model, [feed] * 4, op_types_to_quantize=["Relu"]).float_because


@pytest.mark.parametrize(("decibels", "bad"), [([30, -3], True), ([0.5, 0.6], True), ([30, 0.5], False), ([], False)])
def test_one_usable_output_does_not_make_up_for_one_without_signal(decibels, bad):
    found = [OutputComparison("y", sqnr_db, 0.0, 1.0, None, 0.0, 4, floating=True) for sqnr_db in decibels]
    assert (finish.worthless(found, "samples") is not None) == bad


def test_outputs_of_zero_are_not_worthless(tmp_path):
    """What the float model returns is zero but for the sign of noise: decibels say nothing."""
    text = """net (float[1,3,8,8] x) => (float[1,4,8,8] y, float[1,4,8,8] nothing)
        <float[4,3,1,1] w, float[4,4,1,1] v, float large = {1000000.0}> {
        c = Conv (x, w)  y = Conv (c, v)  s = Sub (c, large)  nothing = Relu (s) }"""
    assert not make(planning.parse(text), tmp_path, recipe="fast").report.is_float


# ---- steps that fail --------------------------------------------------------------------------------------------


def broken(*_, **__):
    raise IndexError("a step that fails")


STEPS = {
    "bias_correction": "kenosis_ort.passes.correct_biases.bias_shifts",
    "cost model": "kenosis_ort.flow.speed.float_regions", "evidence": "kenosis_ort.flow.finish.gather_evidence",
    "rows": "kenosis_ort.flow.call.find_division", "timing": "kenosis_ort.tuning.promise.keep_promise",
}  # fmt: skip


@pytest.mark.parametrize("step", list(STEPS))
def test_a_step_that_fails_is_left_out(tmp_path, monkeypatch, caplog, step):
    model = models.residual_block()
    monkeypatch.setattr(STEPS[step], broken)
    caplog.set_level(logging.DEBUG, "kenosis_ort")
    with pytest.warns(KenosisWarning, match="report this as a bug") as caught:
        made = make(model, tmp_path, models.feeds(model, 12), recipe="strict", promise=step == "timing")
    assert all("a step that fails" in text for text in own_warnings(list(caught)))
    assert any("Traceback" in (r.exc_text or "") for r in caplog.records)
    assert made.report.plan.integer_nodes()
    assert made.db() > 30


def test_what_the_runtime_refuses_of_stocks_placement_is_no_defect(tmp_path):
    def refuse(model, **_):
        raise VerificationError("the runtime does not load the model")

    target = get_target("ort-cpu")
    target = replace(target, hooks=replace(target.hooks, prove=refuse))
    for stages, kind in ((Stages(placement=False), VerificationError), (Stages(), InternalError)):
        with pytest.raises(kind, match="does not load the model"):
            quantized(models.residual_block(), tmp_path / "out.onnx", target=target, stages=stages)


def replaced(monkeypatch, form, change):
    """Puts another rewrite in the place of the one of this name."""
    rewrite = Rule(change, (), "are nearly another operator", "", whole=True)
    rewrite.__name__ = form
    for name in ("PREPARATION", "FLOAT_FORMS", "INTEGER_FORMS"):
        rules = tuple(rewrite if f.__name__ == form else f for f in getattr(resolve, name))
        monkeypatch.setattr(resolve, name, rules)


def spoilt(editor):
    del editor.proto.graph.node[:]
    raise KeyError("spoilt")


def relu_is_abs(editor):
    for node in editor.find("Relu"):
        editor.rewrite(node, "Abs", list(node.inputs))
        editor.done += 1


@pytest.mark.parametrize(("form", "change", "net"), [
    *((form, spoilt, "mobile_block") for form in ("fold_batch_norm", "collapse_clip", "fold_channel_shuffle")),
    ("linear_to_gemm", spoilt, "mobile_block"), ("collapse_clip", relu_is_abs, "residual_block"),
])  # fmt: skip
def test_a_rewrite_that_fails_or_is_wrong_is_left_out_and_told(tmp_path, monkeypatch, form, change, net):
    """The rewritten model is compared with the model as it came, not with itself."""
    replaced(monkeypatch, form, change)
    told = f"'{form}' failed" if change is spoilt else "rewritten float model is off"
    with pytest.warns(KenosisWarning, match=told):
        made = make(models.ALL[net](), tmp_path)
    assert made.report.plan.integer_nodes()
    wrong = any(text.startswith("Placement without rewrites and passes: the rew") for text in made.report.fallbacks)
    assert wrong == (change is relu_is_abs)
    assert made.db() > 25


def test_what_the_proof_finds_in_float_is_left_float(tmp_path):
    """A node that was planned as integer, with its reason, and no more."""
    target, proved = get_target("ort-cpu"), []

    def prove(model, **options):
        found = get_target("ort-cpu").hooks.prove(model, **options)
        proved.append(options["plan"])
        as_float = {"integer": False, "status": proof.Status.FLOAT, "reason": "the test says so"}
        return replace(found, kernels=tuple(replace(k, **as_float) if k.node == "conv1" else k for k in found.kernels))

    target = replace(target, hooks=replace(target.hooks, prove=prove))
    made = make(models.residual_block(), tmp_path, target=target)
    assert [plan.by_node["conv1"].kind for plan in proved][:2] == [Kind.INTEGER, Kind.FLOAT]
    assert [made.report.plan.by_node[name].kind for name in ("conv1", "conv2")] == [Kind.FLOAT, Kind.INTEGER]
    assert "conv1_w" in initializers(made.out)
    assert any("'conv1' (Conv) left float after verification: the test says so" in n for n in made.report.notes)


# ---- defects ----------------------------------------------------------------------------------------------------


def unreadable(proto, *_):
    model = changed(proto)
    model.graph.node.add(op_type="DequantizeLinear", input=["nothing", "none"], output=["never"], name="broken")
    return SimpleNamespace(model=SimpleNamespace(model=model), rescaled=lambda *_: None)


EMITTER = "kenosis_ort.flow.builder.emit"
PARTS = (EMITTER, "kenosis_ort.flow.builder.Planner", "kenosis_ort.targets.ort_cpu.cpu_proof.prove_by")


@pytest.mark.parametrize(("part", "defect", "says", "verify"), [
    *((part, broken, "a step that fails", True) for part in PARTS),
    *((EMITTER, unreadable, "does not load", verify) for verify in (True, False)),
])  # fmt: skip
def test_a_defect_is_an_error_or_the_float_model(tmp_path, monkeypatch, part, defect, says, verify):
    monkeypatch.setattr(part, defect)
    model, out = models.residual_block(), tmp_path / "out.onnx"
    out.write_bytes(b"the model of yesterday")
    with pytest.raises(InternalError, match=says) as raised:
        quantized(model, out, verify=verify)
    assert "report this as a bug" in str(raised.value)
    if defect is broken:
        assert re.search(r"quantize_static\(.*out\.onnx\) failed: ", str(raised.value))
        assert isinstance(raised.value.__cause__, IndexError)
    assert out.read_bytes() == b"the model of yesterday"
    report = told(out, model, verify=verify, on_failure="float")
    assert says in report.float_because
    assert report.fallbacks == (f"The float model as it came: {report.float_because}.",)
    assert "on_failure" in report.recipe_file().to_toml()
    assert onnx.load(out) == model
    assert [path.name for path in tmp_path.iterdir()] == ["out.onnx"]


# ---- batches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fixed", [False, True])
def test_a_batch_of_32_is_32_samples(tmp_path, fixed):
    model, rng = models.mlp(hidden=16, layers=4), np.random.default_rng(0)
    for value in (*model.graph.input, *model.graph.output) if fixed else ():
        value.type.tensor_type.shape.dim[0].dim_value = 32
    x = rng.normal(size=(32, 16)) * rng.lognormal(size=16)
    report = make(model, tmp_path / "one.onnx", [{"x": x.astype(np.float32)}], recipe="fast").report
    assert {p.name for p in report.passes} >= {"bias_correction", "ranges"}


def test_the_bytes_of_a_picture_are_not_a_batch():
    """A part of a compressed picture is none: the decoder of a custom operator may end the process."""
    assert samples.rows_of({"bytes": np.zeros(64, np.uint8)}) == 1
    assert samples.rows_of({"x": np.zeros((8, 3)), "length": np.zeros(8)}) == 1
    assert samples.rows_of({"x": np.zeros((8, 3)), "y": np.zeros((8, 1))}) == 8
