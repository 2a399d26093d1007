"""Every claim of a report is true of the file that was written, whatever form or fallback it holds."""

import tempfile
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from kenosis_ort import quantize_static, verify_fusion
from kenosis_ort.report.html.page import cards
from tests import models
from tests.flow.support import run, sqnr_db
from tests.planning import parse
from tests.quantizer.random_nets import nets

_QUANTIZED = {
    *("DequantizeLinear", "QLinearConv", "QLinearMatMul", "QGemm", "MatMulInteger", "ConvInteger"),
    *("MatMulNBits", "GatherBlockQuantized", "DynamicQuantizeMatMul"),
}
FORMS = {
    "plain": {"recipe": "plain", "promise": False}, "fast": {"recipe": "fast", "promise": False},
    "promise": {"recipe": "fast"}, "qop": {"recipe": "fast", "promise": False, "format": "qop"},
    "weight-only": {"recipe": "weight-only-4"},
    "excluded": {"recipe": "fast", "promise": False, "op_types_to_quantize": ["Softmax"]},
    "worthless": {"recipe": "fast", "extra_options": {"MinimumRealRange": 1e4}},
    "made up": {"recipe": "data-free", "promise": False},
    "made up and worthless": {"recipe": "data-free", "extra_options": {"MinimumRealRange": 1e4}, "promise": False},
    "defect": {"recipe": "fast", "on_failure": "float"},
}  # fmt: skip


def net(seed):
    """A chain of Conv or of Gemm with weights and biases of any magnitude."""
    rng, made = np.random.default_rng(seed), models.Net(seed=seed)
    count = int(rng.integers(1, 4))
    scale, bias = 10.0 ** rng.choice([-7, -2, 0]), 10.0 ** rng.choice([-3, 0, 37])
    convs = bool(rng.integers(2))
    y = made.input("x", shape := [1, 4, 4, 6] if convs else [1, 4])
    for i in range(count):
        operands = [y, rng.normal(0, scale, (4, 4, 1, 1) if convs else (4, 4)), rng.uniform(-bias, bias, 4)]
        y = made.op("Conv" if convs else "Gemm", operands, name=f"layer{i}")
        y = made.op("Relu", [y], name=f"relu{i}")
    made.output(y, shape)
    return made.model()


def check(report, model, out):
    """Compares a report with the file."""
    quantized = any(node.op_type in _QUANTIZED for node in onnx.load(out).graph.node)
    assert report.is_float is not quantized, report.verdict()
    assert (report.size_before, report.size_after) == (model.ByteSize(), out.stat().st_size)
    smaller = report.size_after < report.size_before
    assert report.size_change == "the same size" or report.size_change.endswith("smaller" if smaller else "larger")
    found = verify_fusion(out)
    if report.fusion is not None:
        told, seen = ({(k.node, k.kernel, k.integer) for k in each.kernels} for each in (report.fusion, found))
        assert told == seen
    integer = {k.node for k in found.kernels if k.integer}
    heavy = {n.node for n in report.plan.nodes if n.op_type in ("Conv", "Gemm")} & set(report.plan.integer_nodes())
    assert heavy - integer <= {k.node for k in report.left_float()}
    if not report.is_float:
        return
    assert (integer, report.plan.integer_nodes(), report.trust) == (set(), (), None)
    assert not any(p.kept for p in report.passes)
    assert report.verdict().startswith("Delivered: the float model")
    assert not any("do not fit this net" in text for text in report.warnings)
    assert bool(report.float_because) == bool(report.fallbacks)
    assert [c.label for c in cards(report) if c.name == "speed"] == ["the float model"]
    assert all(c.standing != "good" for c in cards(report) if c.name in ("speed", "size"))


def check_signal(report, model, out, feeds):
    """Compares the signal that a report tells with that of the file, read again.

    The report pools some of the samples, so that its figure is between that of the best and of the worst of them.
    """
    names = [output.name for output in model.graph.output]
    for output in report.outputs:
        with np.errstate(all="ignore"):
            at = names.index(output.name)
            signals = [sqnr_db(a[at], b[at]) for a, b in zip(run(model, feeds), run(out, feeds), strict=True)]
        if np.isfinite(signals).all():
            assert min(signals) - 0.05 <= output.sqnr_db <= max(signals) + 0.05


def checked(model, folder, form, samples, **options):
    """Quantizes in a form, and compares the report with the file."""
    out, made_up = Path(folder, "out.onnx"), form.startswith(("made up", "weight-only"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = None if made_up else models.reader(model, samples)
        report = quantize_static(model, out, reader, **{"evidence": "none", **FORMS[form], **options})
    check(report, model, out)
    if not made_up and report.outputs:
        check_signal(report, model, out, models.feeds(model, samples))
    return report


@pytest.mark.parametrize("form", FORMS)
def test_a_report_is_of_the_file(tmp_path, monkeypatch, form):
    if form == "defect":
        monkeypatch.setattr("kenosis_ort.flow.builder.emit", lambda *_: [][0])
    for seed in range(1 if form.startswith(("made up", "promise")) else 2):
        checked(net(seed), tmp_path, form, 12)


@settings(suppress_health_check=list(HealthCheck))
@given(nets(), st.sampled_from([form for form in FORMS if form != "defect"]), st.booleans())
def test_a_report_is_of_the_file_of_any_net(model, form, forced):
    """25 nets in the ordinary run, 200 by ``--hypothesis-profile=nightly``."""
    with tempfile.TemporaryDirectory() as folder:
        checked(model, folder, form, 8, **({"per_channel": False} if forced else {}))


@pytest.mark.parametrize(("form", "weight", "bias"), [
    ("promise", 1e-7, 1e38),  # the ranges that a pass chooses put the bias beyond what its scale holds
    ("made up and worthless", 1.0, 1.0),  # nor is it judged by the samples that were made up
])  # fmt: skip
def test_a_net_of_which_nothing_can_be_quantized_stays_float(tmp_path, form, weight, bias):
    weights = {"w": models.normal((4, 3, 1, 1), magnitude=weight), "b": models.normal((4,), magnitude=bias)}
    model = parse("(float[1,3,8,8] x) => (y) { [conv] y = Conv (x, w, b) }", weights)
    assert checked(model, tmp_path, form, 16).is_float


def test_all_samples_that_nothing_was_fitted_to_are_measured_on(tmp_path):
    model = net(3)
    report = quantize_static(model, tmp_path / "out.onnx", models.reader(model, 128), promise=False)
    assert report.measure.samples > 32
    told = report.to_dict()["measure"]
    assert (told["loss"], told["worst_loss"]) == (report.measure.loss, report.measure.worst_loss)
    assert told["samples"] == report.measure.samples


@pytest.mark.parametrize(("samples", "options", "told"), [
    (8, {}, "4 held-out calibration samples, whose values the ranges cover"),
    (2, {}, "2 calibration samples, none of them held out"),
    (8, {"recipe": "plain", "verify": True}, "4 calibration samples, none of them held out"),
    (128, {}, None),  # as many as there is time for
    *((samples, {"eval_reader": 5, "recipe": recipe}, "5 evaluation samples") for samples, recipe in [
        (8, "fast"), (2, "fast"), (8, "plain")]),
])  # fmt: skip
def test_a_report_tells_which_samples_its_outputs_were_compared_on(tmp_path, samples, options, told):
    model, seen = net(2), models.feeds(net(2), 5, seed=7)
    seen = [{"x": 4 * feed["x"]} for feed in seen]  # beyond the ranges
    if "eval_reader" in options:
        options = {**options, "eval_reader": models.FeedReader(seen)}
    report = quantize_static(model, tmp_path / "out.onnx", models.reader(model, samples), promise=False, **options)
    told = told or f"{max(report.outputs[0].samples, 33)} held-out calibration samples, whose values the ranges cover"
    assert report.samples_compared == told
    assert all(f"on {told}" in " ".join(text.split()) for text in (str(report), report.to_html()))
    assert f"{report.to_dict()['outputs'][0]['samples']} {report.to_dict()['compared_on']}" == told
    if "eval_reader" in options:
        pairs = zip(run(model, seen), run(tmp_path / "out.onnx", seen), strict=True)
        a, b = (np.concatenate([outputs[0].ravel() for outputs in each]) for each in zip(*pairs, strict=True))
        assert report.outputs[0].sqnr_db == pytest.approx(sqnr_db(a, b), abs=0.01)


def test_weights_alone_have_a_measure_of_quality(tmp_path):
    model = parse("(float[2,64] x) => (y) <float[64,32] w> { [fc] y = MatMul (x, w) }")
    report = quantize_static(model, tmp_path / "out.onnx", None, recipe="weight-only-4")
    assert (5 < report.outputs[0].sqnr_db < 60, report.samples_compared) == (True, "1 made-up sample")
    assert report.verdict().startswith("1 layers and embeddings have weights in blocks")
