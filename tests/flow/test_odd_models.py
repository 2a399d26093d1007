"""Valid models with surprising names, sizes, values or outputs; and bad input, of which nothing is left behind."""

from functools import partial

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, StaticQuantConfig

from kenosis_ort import ArrayReader, KenosisWarning, Recipe, Stages, errors, quantize, quantize_static
from tests import models, planning
from tests.flow.support import changed, good, make, run, sqnr_db
from tests.models import FeedReader

# ---- names ----------------------------------------------------------------------------------------------------


def renamed(model, names):
    """The model with values and initializers renamed."""
    for tensor in model.graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for node in model.graph.node:
        for field in (node.input, node.output):
            field[:] = [names.get(name, name) for name in field]
    return model


COLLISIONS = {
    "initializers": "stem_b: conv1_w_scale, conv1_b: x_scale, conv2_b: x_zero_point, head_b: x_quantized",
    "integers": "stem_b: conv1_w_quantized, conv1_b: conv2_w_zero_point",
    "values": "conv1_out: x_QuantizeLinear_Output, relu1_out: x_DequantizeLinear_Output",
    "outputs": "conv1_out: head_out_QuantizeLinear_Input, relu1_out: conv1_w_DequantizeLinear_Output",
    "scales": "conv1_out: stem_relu_out_scale, relu1_out: stem_relu_out_zero_point",
}


@pytest.mark.parametrize("policy", ["auto", "int8"])
@pytest.mark.parametrize("names", COLLISIONS.values(), ids=COLLISIONS)
def test_values_named_like_what_quantization_adds(tmp_path, names, policy):
    model = renamed(models.residual_block(), dict(pair.split(": ") for pair in names.split(", ")))
    model.graph.node[0].name, model.graph.node[1].name = "x_QuantizeLinear", "conv1_w_DequantizeLinear"
    assert all(good(model, tmp_path, protect_outputs=policy).heavy.values())


CONV = "Conv <pads = [1, 1, 1, 1]>"
NETS = {
    "a factor named like the scale of its input": (
        f"""(float[1,3,8,8] x) => (float[1,4,8,8] z) <float[4,3,3,3] w, float y_scale, float[4,4,3,3] v> {{
            y = {CONV} (x, w)  s = Mul (y, y_scale)  z = {CONV} (s, v) }}""", {"y_scale": 3.0}),
    "a weight and a bias of two grids, and a bias named like the second copy": (
        f"""(float[1,4,8,8] x) => (float[1,4,8,8] a, float[1,4,8,8] c, float[1,4,8,8] d)
            <float[4,4,3,3] w, float[4,4,3,3] v, float[4] b, float[4] b_1, float forty> {{
            a = {CONV} (x, w, b)  big = Mul (x, forty)  c = {CONV} (big, w, b)  d = {CONV} (x, v, b_1) }}""",
        {"forty": 40.0, "b": [0.4, -1.1, 0.7, 1.6], "b_1": [5.0, -3.0, 2.0, 4.0]}),
    "one initializer as weight and as bias": (
        """(float[1,1] x) => (float[1,4] y) <float[4,1] a, float[1,4] v, float[1] c, float[1,4] u> {
            f = Gemm <transB = 1> (x, a)  r = Relu (f)  g = Gemm <transB = 1> (r, v, c)  y = Gemm (g, u, v) }""",
        {"a": [0.9, -0.5, 1.2, 0.4], "v": [0.8, -1.3, 0.4, 1.1], "c": 0.5, "u": [0.7] * 4}),
    "one dimension": ("""(float[1,3,6] x) => (float[1,4,6] y) <float[4,3,3] w, float[4,4,3] v> {
            a = Conv <pads = [1, 1]> (x, w)  r = Relu (a)  y = Conv <pads = [1, 1]> (r, v) }""", {}),
    "three dimensions": ("""(float[1,3,6,6,6] x) => (float[1,4,6,6,6] y) <float[4,3,3,3,3] w, float[4,4,1,1,1] v> {
            a = Conv <pads = [1, 1, 1, 1, 1, 1]> (x, w)  r = Relu (a)  y = Conv (r, v) }""", {}),
    "unused inputs, initializers and nodes, and inner outputs": (
        f"""(float[1,3,8,8] x, float[1,2] unused) => (float[1,4,8,8] a, float[1,4,8,8] r, float[1,4,8,8] y)
            <float[4,3,3,3] w, float[4,4,3,3] v, float[3] nobody> {{
            a = {CONV} (x, w)  dead_end = Tanh (a)  r = Relu (a)  y = {CONV} (r, v) }}""", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", NETS)
def test_all_of_it_runs_in_integers(tmp_path, name):
    text, weights = NETS[name]
    made = good(planning.parse(text, weights), tmp_path, least=25)
    assert all(made.heavy.values())
    assert [o.name for o in made.report.outputs] == [o.name for o in made.model.graph.output]
    if "two grids" in name:
        assert sum(a.dtype == np.int32 and bool(a.any()) for a in made.held.values()) == 3  # a private bias for each


# ---- inputs and shapes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("listed", "fed", "overridable"), [
    (["factor"], False, {"factor"}),  # meant to be overridden
    (["w", "factor"], False, set()),  # weights are among them: all were listed as old exporters do
    (None, False, set()),
    (None, True, {"factor"}),
])  # fmt: skip
def test_initializers_that_are_inputs_too(tmp_path, listed, fed, overridable):
    text = f"""(float[1,3,8,8] x) => (float[1,4,8,8] y) <float[4,3,3,3] w, float[4,4,3,3] v, float factor> {{
        a = {CONV} (x, w)  scaled = Mul (a, factor)  y = {CONV} (scaled, v) }}"""
    model = planning.parse(text, {"factor": 2})
    feeds = models.feeds(model, 3)
    for tensor in [t for t in model.graph.initializer if listed is None or t.name in listed]:
        model.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    if fed:
        feeds = [{**feed, "factor": np.array(i, np.float32)} for i, feed in enumerate(feeds, 1)]
    made = good(model, tmp_path, feeds)
    assert all(made.heavy.values())
    assert {value.name for value in models.session(made.out).get_overridable_initializers()} == overridable


def test_weights_that_are_inputs(tmp_path):
    text = f"""net (float[1,3,8,8] x, float[4,3,3,3] w) => (float[1,4,8,8] y) <float[4,4,3,3] v> {{
        fed = {CONV} (x, w)  y = {CONV} (fed, v) }}"""
    assert good(planning.parse(text), tmp_path).heavy == {"Conv_fed": False, "Conv_y": True}


def test_an_input_that_is_an_output(tmp_path):
    text = f"(float[1,3,8,8] x) => (float[1,4,8,8] y, float[1,3,8,8] x) <float[4,3,3,3] w> {{ y = {CONV} (x, w) }}"
    made = good(planning.parse(text), tmp_path)
    assert np.array_equal(run(made.out, made.feeds)[0][1], made.feeds[0]["x"])


@pytest.mark.parametrize("batches", [[1, 4, 2], [5], [2, 0]], ids=str)
def test_batches_and_pictures_of_any_size_and_of_nothing(tmp_path, batches):
    text = f"""net (float[N,3,H,W] x) => (float[N,5] y) <float[8,3,3,3] w, float[8,8,3,3] v, float[5,8] h> {{
        a = {CONV} (x, w)  r = Relu (a)  c = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (r, v)
        p = GlobalAveragePool (c)  f = Flatten (p)  y = Gemm <transB = 1> (f, h) }}"""
    model = planning.parse(text)
    feeds = [models.feeds(model, 1, seed=b, dims={"N": b, "H": 8 + b, "W": 12})[0] for b in batches]
    made = good(model, tmp_path, feeds)
    assert all(made.heavy.values())
    others = models.feeds(model, 1, seed=9, dims={"N": 7, "H": 16, "W": 16})
    assert run(made.out, others)[0][0].shape == (7, 5)
    with pytest.raises(errors.CalibrationError, match="no sample with elements"):
        quantize_static(model, tmp_path / "none.onnx", [{"x": np.zeros((0, 3, 8, 12), np.float32)}] * 2)


# ---- values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["conv1_w", "conv1_b", "stem_w", "head_w"])
def test_weights_of_zero(tmp_path, name):
    assert all(good(changed(models.residual_block(), **{name: 0.0}), tmp_path, least=25).heavy.values())


@pytest.mark.parametrize("factor", [0.0, 1e-38, 1e-20, 1e20, 1e30])
def test_inputs_of_any_magnitude(tmp_path, factor):
    model = models.residual_block()
    feeds = [{"x": (f["x"] * factor).astype(np.float32)} for f in models.feeds(model)]
    assert all(is_integer or factor == 1e-38 for is_integer in good(model, tmp_path, feeds).heavy.values())


ENDS = """(float[1,3,12,12] x) => (float[1,4] y)
    <float[8,3,3,3] w1, float[8] b1, float[8,8,3,3] w2, float[8] b2, float[8,4] w3, float[4] b3> {
    [a] a = Conv <pads = [1,1,1,1]> (x, w1, b1)  r = Relu (a)  [c] c = Conv <pads = [1,1,1,1]> (r, w2, b2)
    s = Relu (c)  p = GlobalAveragePool (s)  f = Flatten (p)  [y] y = Gemm (f, w3, b3) }"""


@pytest.mark.parametrize(("magnitudes", "integer"), [
    ((1.0, 1e-36, 1.0, 1.0), {"a", "y"}), ((1.0, 1.0, 1e-40, 1.0), {"a", "c", "y"}),
    ((1.0, 1.0, 1.0, 1e-36), {"a", "c", "y"}), ((1.0, 1.0, 1e-36, 1e-42), {"a", "c", "y"}),
    ((1e-20, 1e-20, 1e-20, 1.0), {"a", "y"}), ((1e36, 1e-36, 1.0, 1.0), {"y"}), ((0.0, 1.0, 1.0, 1.0), {"a", "c", "y"}),
])  # fmt: skip
def test_weights_at_the_ends_of_float32(tmp_path, magnitudes, integer):
    """Two Convs and a Gemm whose weights and biases are of these magnitudes; every other channel times the fourth."""
    first, second, biases, dead = magnitudes
    rng = np.random.default_rng(0)
    arrays = {"w1": rng.normal(size=(8, 3, 3, 3)) * 0.2 * first, "w2": rng.normal(size=(8, 8, 3, 3)) * 0.1 * second}
    arrays |= {"w3": rng.normal(size=(8, 4)), "b1": rng.normal(size=8) * biases, "b2": rng.normal(size=8) * biases}
    for name in ("w2", "b1"):
        arrays[name][::2] *= dead
    made = make(planning.parse(ENDS, {**arrays, "b3": rng.normal(size=4)}), tmp_path)
    assert {name for name, is_integer in made.heavy.items() if is_integer} == integer
    assert made.db() > 30
    if len(integer) == 1:
        assert "beyond what scales hold" in made.report.plan.explain("c")


# ---- outputs --------------------------------------------------------------------------------------------------


MLP = "<float[8,16] a, float[16,4] b> { h = MatMul (x, a)  r = Relu (h)  s = MatMul (r, b)"
NO_TENSORS = {
    "seq(map(int64, float))": "p = Softmax (s)  y = ai.onnx.ml.ZipMap <classlabels_int64s = [3, 1, 2, 0]> (p)",
    "seq(float[M,N])": "y = SequenceConstruct (s, x)", "optional(float[1,4])": "y = Optional (s)",
}  # fmt: skip


@pytest.mark.parametrize("kind", NO_TENSORS)
def test_outputs_that_are_no_tensors_are_compared(tmp_path, kind):
    """A classifier's ZipMap, a list of tensors of several sizes: the report says how good they are."""
    model = planning.parse(f"(float[1,8] x) => ({kind} y) {MLP} {NO_TENSORS[kind]} }}", domains=["ai.onnx.ml"])
    made = make(model, tmp_path, models.feeds(model, 8), recipe="fast")
    assert made.report.warnings == ()
    assert [o.name for o in made.report.outputs] == ["y"]
    assert 25 < made.report.outputs[0].sqnr_db < 80
    found, expected = (run(m, models.feeds(model, 1))[0][0] for m in (made.out, model))
    assert type(found) is type(expected)


@pytest.mark.parametrize("recipe", ["plain", "fast"])
def test_outputs_that_are_drawn_at_random_are_not_compared(tmp_path, recipe):
    text = f"(float[1,8] x) => (float[1,4] s, float[1,4] y) {MLP} n = RandomNormalLike <scale=5.0>(s) y = Add (n, s) }}"
    made = make(planning.parse(text), tmp_path, models.feeds(planning.parse(text), 8), recipe=recipe)
    assert made.report.warnings == ()
    assert [o.name for o in made.report.outputs] == ["s"]
    assert any("is random" in note for note in made.report.notes)
    assert all(made.heavy.values())


MIDDLE = {
    "pairs": "ad = DequantizeLinear (aq, s, z)  wd = DequantizeLinear (q, ws, wz)  b = MatMul (ad, wd)",
    "operator": "bq = QLinearMatMul (aq, s, z, q, ws, wz, s, z)  b = DequantizeLinear (bq, s, z)",
}


@pytest.mark.parametrize("middle", MIDDLE)
def test_a_net_that_is_quantized_in_part_has_its_rest_quantized(tmp_path, middle):
    text = f"""net (float[4,16] x) => (float[4,16] y) <float[16,16] w1, float[16,16] w2, float s, uint8 z,
        int8[16,16] q, float ws, int8 wz> {{
        a = MatMul (x, w1)  aq = QuantizeLinear (a, s, z)  {MIDDLE[middle]}  y = MatMul (b, w2) }}"""
    whole = np.random.default_rng(0).integers(-127, 128, (16, 16))
    model = planning.parse(text, {"s": 0.04, "z": 128, "q": whole, "ws": 0.004})
    made = make(model, tmp_path, models.feeds(model, 8), recipe="fast", tune="model")
    assert made.heavy["MatMul_a"]
    assert made.heavy["MatMul_y"]
    assert made.db() > 20


# ---- bad input: the right error, which says what, where and the fix; nothing written, nothing left behind -----------


OLD = b"the model of yesterday"


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """Calls `quantize_static`, checks its refusal, and afterwards that nothing was written.

    The refusal is of a class, tells what and how to mend it, has some texts in its message, and a place.
    """
    (folder := tmp_path / "here").mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    (out := folder / "out.onnx").write_bytes(OLD)

    def call(kind, *texts, model=None, reader="", output=out, where="", **options):
        model = models.residual_block() if model is None else model
        reader = models.reader(model) if reader == "" else reader
        with pytest.raises(errors.KenosisError) as caught:
            quantize_static(model, output, reader, **options)
        error = caught.value
        assert isinstance(error, kind) if kind is errors.OptionError else type(error) is kind, repr(error)
        assert error.what
        assert error.fix or "must be" in error.what
        assert [text for text in texts if text not in str(error)] == [], str(error)
        assert where in (error.where or "")
        return error

    yield call
    assert {path: path.read_bytes() for path in folder.iterdir()} == {out: OLD}


def test_nan_among_the_weights(refused):
    """The first value that it reaches is named."""
    model = changed(models.residual_block(), conv1_w=np.where(np.arange(3) == 1, np.nan, 1))
    refused(errors.CalibrationError, "NaN", "relu1_out", model=model)


# ---- the data -------------------------------------------------------------------------------------------------

GOOD = np.zeros((1, 3, 8, 8), np.float32)
INFINITE = models.feeds(models.residual_block(), 3)
INFINITE[2]["x"][0, 1, 2, 3] = np.inf


@pytest.mark.parametrize(("reader", "texts"), [
    (lambda: FeedReader([{}]), ["no sample"]),  # an empty dictionary is the end of the data, as in stock
    (lambda: None, ["calibration_data_reader"]), (object, ["object"]),
    (lambda: FeedReader([{"y": GOOD}]), ["'y'", "sample 0"]), (lambda: ArrayReader({"input": GOOD}), ["'input'", "x"]),
    (lambda: FeedReader([{"x": GOOD}, {"x": GOOD.transpose(0, 2, 3, 1)}]), ["'x'", "channels-last", "sample 1"]),
    (lambda: FeedReader(INFINITE), ["'x'", "sample 2"]),
])  # fmt: skip
@pytest.mark.parametrize("options", [
    {}, {"quant_format": QuantFormat.QOperator}, {"stages": Stages(placement=False)}, {"stages": Stages.none()},
    {"calibrate_method": CalibrationMethod.Percentile, "on_failure": "float"},  # it is no defect of ours
], ids=["all", "qoperator", "stock placement", "stock", "percentile"])  # fmt: skip
def test_no_readers_and_wrong_feeds(refused, reader, texts, options):
    """What all is told from a feed is in `tests.calibration.test_feeds`."""
    refused(errors.CalibrationError, *texts, reader=reader(), **options)


def test_nan_made_by_a_node_is_computed_as_the_runtime_does(tmp_path):
    model, out = planning.parse("""net (float[1,3,8,8] x) => (float[1,4,8,8] y) <float[4,3,1,1] w, float[4,4,1,1] v> {
        c = Conv (x, w)  root = Sqrt (c)  y = Conv (root, v) }"""), tmp_path / "out.onnx"  # fmt: skip
    with pytest.warns(KenosisWarning, match=r"NaN or infinity.* \[at: tensor 'root', sample 0\]"):
        report = quantize_static(model, out, models.reader(model))
    assert report.is_float
    feed = models.feeds(model)[0]
    (wanted,), (got,) = run(model, [feed]), run(out, [feed])
    assert np.isnan(wanted[0]).any()
    assert np.array_equal(wanted[0], got[0], equal_nan=True)


# ---- options --------------------------------------------------------------------------------------------------


OVERRIDES, WIDE = "TensorQuantOverrides", QuantType.QInt16
TYPOS = (
    ({"extra_options": {"ActivationSymetric": True}}, ("ActivationSymetric", "'ActivationSymmetric'")),
    ({"extra_options": {OVERRIDES: {"x": [{"symetric": True}]}}}, ("'symetric'", "'symmetric'")),
    (
        {"extra_options": {OVERRIDES: {"x": [{"convert": {"quant_type": WIDE, "recv_nodes": ["stm"]}}]}}},
        ("'stm'", "'stem'"),
    ),
    ({"nodes_to_exclude": ["heed"]}, ("nodes_to_exclude", "'heed'", "Did you mean 'head'?")),
    ({"nodes_to_quantize": ["conv_1", "conv2"]}, ("nodes_to_quantize", "'conv_1'", "Did you mean 'conv1'?")),
)


@pytest.mark.parametrize(("options", "texts"), TYPOS, ids=["option", "setting", "reader", "excluded", "named"])
def test_names_that_fit_nothing(tmp_path, options, texts):
    """A warning where stock says nothing and goes on; an error on the command line, where it can only be a typo."""
    model, out = models.residual_block(), tmp_path / "out.onnx"
    config = StaticQuantConfig(models.reader(model), **options)
    calls = partial(quantize_static, model, out, models.reader(model), **options), partial(quantize, model, out, config)
    for call in calls:
        with pytest.warns(KenosisWarning, match="It is ignored") as caught:
            report = call(recipe="plain")
        (text,) = (str(w.message) for w in caught)
        assert all(part in text for part in texts), text
        assert report.warnings == (text,)
        assert caught[0].filename == __file__
    out.unlink()
    with errors.strict_names(), pytest.raises(errors.OptionError, match=texts[0]):
        quantize_static(model, out, models.reader(model), recipe="plain", **options)
    assert not out.exists()


def test_bits_of_no_node(tmp_path):
    """Stock is not said to ignore what it does not know."""
    model, recipe = models.residual_block(), Recipe("plain", bits={"heed": {"weights": 4}})
    with pytest.warns(KenosisWarning, match=r"Did you mean 'head'.* It is ignored\.$"):
        quantize_static(model, tmp_path / "out.onnx", models.reader(model), recipe=recipe, promise=False)


FLOAT8 = QuantType.QFLOAT8E4M3FN


@pytest.mark.parametrize(("options", "texts"), [
    ({"target": "ort-cpuu"}, ("ort-cpuu", "Did you mean 'ort-cpu'?")),
    ({"rewrites": ["colapse_silu"]}, ("rewrites", "'colapse_silu'", "Did you mean 'collapse_silu'?")),
    ({"primary_inputs": ["xx"]}, ("primary_inputs", "'xx'")),
    ({"extra_options": {OVERRIDES: {"hed_w": []}}}, ("'hed_w'", "no tensor", "Did you mean 'head_w'?")),
    ({"extra_options": {"SmoothQuant": True, "SmoothQuantAlpha": 2}}, ("SmoothQuantAlpha", "=2", "from 0 to 1")),
    ({"extra_options": {"SmoothQuant": True}, "stages": Stages(placement=False)}, ("SmoothQuant", "switched off")),
    ({"recipe": "weight-only-4", "format": "qop"}, ("weights alone",)),
    ({"activation_type": "int8"}, ("activation_type", "'int8'", "QuantType.QInt8")),
    ({"activation_type": FLOAT8, "weight_type": FLOAT8}, ("Distribution",)),
    ({"activation_type": QuantType.QInt8, "weight_type": QuantType.QUInt8}, ()),
    ({"extra_options": {"CalibPercentile": 200}, "calibrate_method": CalibrationMethod.Percentile}, ("200",)),
], ids=lambda v: next(iter(v)) if isinstance(v, dict) else "")  # fmt: skip
def test_bad_options(refused, options, texts):
    refused(errors.OptionError, *texts, **options)


# ---- the output -----------------------------------------------------------------------------------------------


def test_an_output_that_cannot_be_written_is_told_beforehand(refused, tmp_path):
    """An hour of calibration must not be lost to a typing error in the output path."""
    (folder := tmp_path / "folder").mkdir()
    reader, nowhere = models.reader(models.residual_block()), tmp_path / "nowhere"
    for output, told, where in ((nowhere / "out.onnx", "does not exist", "nowhere"), (folder, "folder", "folder")):
        refused(errors.OutputError, told, reader=reader, output=output, where=where)
    assert reader.handed_out == 0
    assert not nowhere.exists()
    assert [*folder.iterdir()] == []


def test_errors_are_also_the_built_in_ones():
    """Existing ``except ValueError`` and ``except OSError`` blocks around stock keep working."""
    of_values = errors.ModelLoadError, errors.CalibrationError, errors.OptionError, errors.UnsupportedModelError
    assert all(issubclass(e, ValueError) for e in of_values)
    assert issubclass(errors.OutputError, OSError)


def test_long_names_are_no_defect_of_ours(tmp_path):
    """Of files, nodes and tensors: what the system takes works, what it does not is an error that says so."""
    v, longer = "v" * 250, tmp_path / ("x" * 300)
    text = f"""(float[1,8] x{v}) => (float[1,8] y{v}) <float[8,8] u{v}, float[8,8] w{v}> {{
        [a{v}] a{v} = MatMul (x{v}, u{v})  [r{v}] r{v} = Relu (a{v})  [m{v}] y{v} = MatMul (r{v}, w{v}) }}"""
    model, feeds = planning.parse(text), [{f"x{v}": models.normal((1, 8))}] * 2
    source, out, cache = (tmp_path / (letter * 255) for letter in "moc")
    onnx.save(model, source)
    report = quantize_static(source, out, FeedReader(feeds), promise=False, calibration_cache_path=cache)
    assert not report.is_float
    assert report.to_html()
    assert onnx.load(out).graph.input[0].name == model.graph.input[0].name
    with pytest.raises(errors.OutputError, match="too long"):
        quantize_static(source, longer, FeedReader(feeds))
    with pytest.raises(errors.CalibrationError, match="cannot be written"):
        quantize_static(source, out, FeedReader(feeds), calibration_cache_path=longer)
    with pytest.raises(errors.CalibrationError, match="does not exist"):
        ArrayReader(longer)


def test_a_net_that_the_runtime_refuses_once_it_optimizes(refused):
    """A size declared where its maker says another hides from a load without optimization what does not fit."""
    text = """(float[1,4,8,8] x) => (float[1,4,8,8] y) <float[9,9,9,9] c, float[4,4,1,1] w, bool[1] t, float[9,1,1] o>
    { c = Conv(x, w) r = Relu(c) s = Where(t, o, r) y = Conv(s, w) }"""
    error = refused(errors.ModelLoadError, "Incompatible dimensions", model=planning.parse(text, checked=False))
    assert "report" not in error.fix


@pytest.mark.parametrize("from_file", [False, True])
def test_initializers_without_a_name_are_skipped_as_by_the_runtime(tmp_path, from_file):
    """A node that leaves an input out names it the same."""
    text = "(float[1,3,8,8] x) => (y) <float[4,3,3,3] w, float top = {9}> { c = Conv (x, w) y = Clip (c, , top) }"
    model = planning.parse(text)
    feeds = models.feeds(model, 8)
    want = run(model, feeds)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.full(4, 3, np.float32), ""))
    onnx.save(model, tmp_path / "model.onnx")
    source = tmp_path / "model.onnx" if from_file else model
    quantize_static(source, tmp_path / "out.onnx", FeedReader(feeds), promise=False)
    assert min(sqnr_db(a[0], b[0]) for a, b in zip(want, run(tmp_path / "out.onnx", feeds), strict=True)) > 25
