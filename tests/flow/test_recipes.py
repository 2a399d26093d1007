"""Recipes end to end: what the passes do, and that none makes it worse on data they have not seen."""

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import CalibrationMethod

import kenosis_ort
from kenosis_ort import errors
from kenosis_ort.passes import choose_ranges, correct_biases
from tests import models, planning
from tests.flow.support import changed, make, quality, quantized, run, sqnr_db
from tests.weights.test_quantize import decoder, feeds


def fast(folder, count=16, **options):
    model = models.bn_net()
    return make(model, folder, models.feeds(model, count), **{"recipe": "fast", **options}).report


def test_passes_that_are_left_out(tmp_path):
    """Of the plain recipe, with too few samples to hold some out, and where the caller names a method."""
    assert fast(tmp_path, recipe="plain").passes == ()
    report = fast(tmp_path, 3)
    assert "bias_correction" not in {p.name for p in report.passes}
    assert any("3 calibration samples at hand" in note for note in report.notes)
    assert "ranges" not in {p.name for p in fast(tmp_path, 8, calibrate_method=CalibrationMethod.MinMax).passes}


def test_the_callers_metric_decides(tmp_path):
    calls = []

    def metric(outputs, reference):
        calls.append(len(outputs))
        pairs = zip(outputs, reference, strict=True)
        return 1.0 if all(np.array_equal(mine[name], wanted[name]) for mine, wanted in pairs for name in mine) else 0.5

    report = fast(tmp_path, metric=metric)
    assert {p.name for p in report.passes} >= {"ranges", "bias_correction"}
    assert {*calls} == {8, 2}  # all that are held out, and parts of them for the spread
    assert (report.measure.value, report.measure.float_value) == (0.5, 1.0)
    assert "metric" in next(p.measure for p in report.passes if p.measure)


def test_a_broken_metric_ends_the_call(tmp_path):
    """What else is no metric is in `tests.accuracy.test_error`."""
    with pytest.raises(kenosis_ort.OptionError, match="the metric raised KeyError"):
        fast(tmp_path, 8, metric=lambda outputs, reference: {}["boxes"])
    assert not list(tmp_path.iterdir())


# ---- outlier channels -----------------------------------------------------------------------------------------


def post_norm(gain):
    """A feed-forward layer between normalizations, of which a few channels are so many times the others."""
    gains = np.array([gain] * 3 + [1.0] * 61)
    text = """net (float[1,tokens,64] x) => (float[1,tokens,8] y) <float[64] gamma, float[64] beta, float[64,256] up,
        float[256,64] down, float[64,8] head> {
        n = LayerNormalization <axis = -1> (x, gamma, beta)  u = MatMul (n, up)  r = Relu (u)  d = MatMul (r, down)
        a = Add (n, d)  m = LayerNormalization <axis = -1> (a, gamma, beta)  y = MatMul (m, head) }"""
    return planning.parse(text, {"gamma": gains, "head": models.normal((64, 8), 4, 1 / 8) / gains[:, None]})


def tokens(count, seed=0):
    return [{"x": models.normal((1, 12, 64), 100 * seed + at)} for at in range(count)]


@pytest.mark.filterwarnings("ignore:.*keeps only:kenosis_ort.KenosisWarning")
def test_outlier_channels_behind_a_residual_go_by_one_mul(tmp_path):
    """Measured: 5.7 dB without, 32.4 dB."""
    model = post_norm(40.0)
    off = kenosis_ort.Recipe(smooth="off", row_scales=False)
    without = make(model, tmp_path / "without.onnx", tokens(32), recipe=off)
    made = make(model, tmp_path, tokens(32), recipe="fast")
    assert (made.ops.count("Mul"), without.ops.count("Mul")) == (1, 0)
    assert all(made.heavy.values()), "the layers behind it stay integer"
    assert made.db(tokens(8, seed=9)) > without.db(tokens(8, seed=9)) + 15
    assert any("by an inserted Mul" in note for note in made.report.notes)


@pytest.mark.filterwarnings("ignore:.*keeps only:kenosis_ort.KenosisWarning")
@pytest.mark.parametrize(("gain", "extra", "count"), [
    (1.0, {}, 0), (40.0, {"SmoothQuant": True}, 0), (40.0, {"SmoothQuant": True, "SmoothQuantFolding": False}, 1),
])  # fmt: skip
def test_a_mul_where_it_pays_or_is_asked_for(tmp_path, gain, extra, count):
    assert make(post_norm(gain), tmp_path, tokens(32), recipe="fast", extra_options=extra).ops.count("Mul") == count


def test_a_mul_in_front_of_a_layer_that_reads_an_input(tmp_path):
    """Measured: 20 dB without, 35 dB."""
    hot = np.repeat(np.float32([40.0, 1.0]), [3, 61])
    model = planning.parse("""net (float[1,tokens,64] x) => (float[1,tokens,8] y) <float[64,64] up, float[64,8] down> {
        u = MatMul (x, up)  r = Relu (u)  y = MatMul (r, down) }""",
        {"up": models.normal((64, 64), 4, 1 / 8) / hot[:, None]})  # fmt: skip
    feeds = [{"x": feed["x"] * hot} for feed in tokens(40)]
    extra = {"SmoothQuant": True, "SmoothQuantFolding": False}
    made = make(model, tmp_path, feeds[:32], recipe="fast", extra_options=extra)
    without = make(model, tmp_path / "without.onnx", feeds[:32], recipe="fast")
    assert made.ops.count("Mul") == 1
    assert made.db(feeds[32:]) > without.db(feeds[32:]) + 10
    assert made.report.warnings == ()


# ---- ranges and biases -----------------------------------------------------------------------------------------


def test_ranges_are_chosen_for_biases_that_are_found_anew_for_them(tmp_path, monkeypatch):
    """The mean error, which the correction takes away, would hide what ranges differ by.

    Both times they start from the biases as they were.
    """
    rng = np.random.default_rng(0)
    feeds = [{"x": rng.standard_t(5, (1, 3, 8, 8)).astype(np.float32)} for _ in range(32)]
    fitted, compared, started = [], [], []

    def seen(owner, name, look):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, **options: look(*given) or real(*given, **options))

    seen(correct_biases, "bias_shifts", lambda model, quantized, *_: fitted.append(quantized))
    seen(correct_biases, "with_shifts", lambda model, shifts, before: started.append(before))
    seen(choose_ranges.RangeChoice, "apply", lambda self, state, *_: compared.append(bool(state.built.corrections)))
    report = make(models.mobile_block(), tmp_path, feeds, recipe="fast").report
    assert {p.name for p in report.passes if p.kept} >= {"bias_correction", "ranges"}
    assert compared == [True]
    assert [dict(before) for before in started] == [{}, {}], "no shift on top of another"
    first, second = ({t.name: onnx.numpy_helper.to_array(t) for t in m.graph.initializer} for m in fitted)
    scales = [name for name in first if name.endswith("_scale") and first[name].ndim == 0]
    assert any(second[name] < first[name] for name in scales), "the second time for the ranges that were chosen"


# ---- massive tokens: a T5-shaped net that one range for all tokens cannot serve ------------------------------------

WIDTH, INNER, WORDS, END, TOLD = 64, 256, 50, 1, 8


def t5(seed=0, layers=2, length="length"):
    """Feed-forward layers of T5: norm without mean, gated, no bias; one token excites all inner products."""
    net = models.Net(seed=seed)
    words = net.rng.normal(0, 1, (WORDS, WIDTH))
    words[:, :TOLD] = 0.0
    words[END, :TOLD] = 200.0
    x = net.op("Gather", [net.const(words), net.input("ids", [1, length], onnx.TensorProto.INT64)])

    def normal(x):
        square = net.op("ReduceMean", [net.op("Mul", [x, x])], axes=[-1])
        return net.op("Div", [x, net.op("Sqrt", [net.op("Add", [square, net.const(1e-6)])])])

    for _ in range(layers):
        gate, up, down = (net.rng.normal(0, s[0] ** -0.5, s) for s in [(WIDTH, INNER)] * 2 + [(INNER, WIDTH)])
        for weights in (gate, up):
            weights[:TOLD] = 0.5 * net.rng.normal(0, 1, INNER)
        down[:, :TOLD] = 0.0
        gate, up = (net.op("MatMul", [normal(x), net.const(weights)]) for weights in (gate, up))
        inside = net.op("Mul", [net.op("Relu", [gate]), up])
        x = net.op("Add", [x, net.op("MatMul", [inside, net.const(down)])])
    net.output(net.op("MatMul", [normal(x), net.const(net.rng.normal(0, WIDTH**-0.5, (WIDTH, 8)))]), [1, length, 8])
    return net.model()


def sentences(count, seed=0):
    rng = np.random.default_rng(seed)
    found = [rng.integers(2, WORDS, (1, int(rng.integers(8, 20)))) for _ in range(count)]
    for ids in found:
        ids[0, -1] = END
    return [{"ids": ids} for ids in found]


def quality_of_words(model, out):
    """The SQNR in dB of the tokens before the last, on sentences that are new."""
    test = sentences(8, seed=9)
    want, got = ([each[0][:, :-1] for each in run(m, test)] for m in (model, out))
    return sqnr_db(np.concatenate(want, axis=1), np.concatenate(got, axis=1))


def outcome(report):
    return next(p for p in report.passes if p.name == "row_scales")


@pytest.fixture(scope="module")
def net():
    return t5()


@pytest.mark.parametrize("recipe", ["fast", "accurate", "strict"])
def test_a_massive_token_costs_the_others_nothing(net, tmp_path, recipe):
    """Measured: 14.5 dB with every other pass, 29.3 dB."""
    quantized(net, tmp_path / "without.onnx", sentences(16), recipe=kenosis_ort.Recipe(row_scales=False))
    made = make(net, tmp_path / "out.onnx", sentences(16), recipe=recipe, evidence="full")
    found, least = (quality_of_words(net, tmp_path / f"{name}.onnx") for name in ("out", "without"))
    assert found > max(26.0, least + 8.0)
    assert outcome(made.report).kept
    assert outcome(made.report).error_after < 0.5 * outcome(made.report).error_before
    assert any("Rows brought to one size" in note for note in made.report.notes)
    assert made.report.warnings == ()
    assert recipe != "fast" or set(made.heavy.values()) == {True}


def test_nothing_is_done_where_nets_are_taken_whole(tmp_path):
    """Where tokens are alike: see `tests.contracts.passes`."""
    feeds = [{"ids": feed["ids"][:, -8:]} for feed in sentences(16)]
    report = quantized(t5(length=8), tmp_path / "out.onnx", feeds, recipe="fast", target="qnn", verify=False)
    assert "no float node" in outcome(report).reason


# ---- without the caller's data --------------------------------------------------------------------------------

MODEL = models.bn_net()


def alone(folder, data=None, *, model=MODEL, **options):
    return kenosis_ort.quantize_static(model, folder / "out.onnx", data, promise=False, **options)


@pytest.mark.filterwarnings("ignore::kenosis_ort.KenosisWarning")
def test_made_up_samples_get_a_verdict_and_real_ones_need_none(tmp_path):
    report = alone(tmp_path, recipe="data-free")
    assert (report.calibration.samples, report.trust.source) == (64, "synthetic")
    assert quality(MODEL, tmp_path / "out.onnx", models.feeds(MODEL, 8)) > 15
    with pytest.raises(errors.CalibrationError, match="data-free"):
        alone(tmp_path)
    report = alone(tmp_path, kenosis_ort.SyntheticReader(MODEL, samples=16))
    assert report.trust.tensors
    (ranges,) = (p for p in report.passes if p.name == "ranges")
    assert (ranges.kept, "made-up samples" in ranges.reason) == (False, True), "they do not show what clipping costs"
    assert alone(tmp_path, models.reader(MODEL)).trust is None


def test_a_net_whose_statistics_the_samples_miss(tmp_path):
    off = {f"bn{i}_{kind}": lambda values: 1e4 * (1 + values) for i in range(2) for kind in ("mean", "var")}
    with pytest.warns(kenosis_ort.KenosisWarning, match="made-up calibration samples"):
        trust = alone(tmp_path, model=changed(MODEL, **off), recipe="data-free").trust
    assert (trust.verdict, bool(trust.advice)) == ("do not ship", True)


# ---- weights alone --------------------------------------------------------------------------------------------


def weights_alone(out, samples=16, **options):
    data = models.FeedReader(feeds(samples)) if samples else None
    return kenosis_ort.quantize_static(decoder(), out, data, **{"recipe": "weight-only-4", **options})


@pytest.mark.parametrize("bits", [4, 8])
def test_the_report_tells_what_the_file_holds(tmp_path, bits):
    out = tmp_path / "out.onnx"
    report = weights_alone(out, recipe=f"weight-only-{bits}")
    assert report.size_after == out.stat().st_size
    assert report.outputs[0].sqnr_db > (12 if bits == 4 else 30)
    assert report.fusion.integer_share() == 1.0
    assert any(note.startswith("Weights alone") and f"{bits} bits" in note for note in report.notes)
    assert (report.measure.samples, report.recipe.weight_only) == (8, bits)
    report.save_recipe(tmp_path / "kept.toml")
    weights_alone(tmp_path / "again.onnx", recipe=tmp_path / "kept.toml")
    assert (tmp_path / "again.onnx").read_bytes() == out.read_bytes()


def test_a_budget_that_four_bits_do_not_keep_means_eight(tmp_path):
    def closeness(outputs, reference):
        (name,) = reference[0]
        off = np.mean([((a[name] - b[name]) ** 2).mean() for a, b in zip(outputs, reference, strict=True)])
        return 1.0 - float(np.sqrt(off / np.mean([(b[name] ** 2).mean() for b in reference])))

    report = weights_alone(tmp_path / "out.onnx", metric=closeness, accuracy_budget=0.03)
    bits = [a.i for n in onnx.load(tmp_path / "out.onnx").graph.node for a in n.attribute if a.name == "bits"]
    assert set(bits) == {8}
    assert report.measure.kept is True
    assert any("do not keep the budget" in note for note in report.notes)


def test_a_preview_names_the_nodes_whose_weights_are_quantized(tmp_path):
    model = decoder()
    plan = kenosis_ort.preview(model, recipe="weight-only-4")
    weights_alone(tmp_path / "out.onnx", 0)
    nodes = onnx.load(tmp_path / "out.onnx").graph.node
    made = {n.name for n in nodes if n.op_type in ("MatMulNBits", "GatherBlockQuantized")}
    assert set(plan.integer_nodes()) == made
    assert "4 bits in blocks" in plan.explain(min(made))
    assert "or 8" in plan.explain(min(made))
    left = kenosis_ort.preview(model, recipe="weight-only-8", nodes_to_exclude=[min(made)])
    assert set(left.integer_nodes()) == made - {min(made)}
    assert "8 bits in blocks" in left.explain(max(made))
    for only, kind in (("nodes_to_quantize", [min(made)]), ("op_types_to_quantize", ["MatMul"])):
        plan = kenosis_ort.preview(model, recipe="weight-only-4", **{only: kind})
        report = weights_alone(tmp_path / "some.onnx", **{only: kind})
        held = {n.name for n in onnx.load(tmp_path / "some.onnx").graph.node if n.domain == "com.microsoft"}
        assert held == set(plan.integer_nodes()) < made
        assert report.recipe.weight_only == 4
    with pytest.raises(errors.CalibrationError, match="yields no sample"):
        kenosis_ort.quantize_static(model, tmp_path / "out.onnx", iter([]), recipe="weight-only-4")
    with pytest.raises(errors.OptionError, match="no form of weights alone"):
        kenosis_ort.preview(model, recipe="weight-only-4", target="onednn")
    with pytest.raises(errors.NothingToQuantizeError):
        kenosis_ort.preview(models.conv_relu_chain(2), recipe="weight-only-4")
