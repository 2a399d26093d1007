"""Bad input: the right error, which says what, where and the fix; nothing written, nothing left behind."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, StaticQuantConfig

from kenosis_ort import ArrayReader, KenosisWarning, Stages, errors, quantize, quantize_static
from tests import models
from tests.flow.support import changed, run
from tests.models import FeedReader
from tests.planning import parse

OLD = b"the model of yesterday"
Refused = Any  # the fixture below, a function


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Refused]:
    """Calls `quantize_static`, checks its refusal, and afterwards that nothing was written.

    The refusal is of a class, tells what and how to mend it, has some texts in its message, and a place.
    """
    work, temporary, target = (tmp_path / n for n in ("work", "temporary", "target"))
    for folder in (work, temporary, target):
        folder.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    out = target / "out.onnx"
    out.write_bytes(OLD)

    def call(kind: type[errors.KenosisError], *texts: str, model: Any = None, reader: Any = "", output: Path = out,
             where: str = "", **options: Any) -> errors.KenosisError:  # fmt: skip
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
    assert out.read_bytes() == OLD
    assert [path for folder in (work, temporary, target) for path in folder.iterdir()] == [out]


# ---- the model: what all is told of files is in `tests.graph.test_load` and `tests.cli.test_mistakes` ---------------


def test_nan_among_the_weights(refused: Refused) -> None:
    """The first value that it reaches is named."""
    model = changed(models.residual_block(), conv1_w=np.where(np.arange(3) == 1, np.nan, 1))
    refused(errors.CalibrationError, "NaN", "relu1_out", model=model)


@pytest.mark.parametrize("written", ["qdq", "qop"])
def test_a_file_of_an_earlier_call(refused: Refused, tmp_path: Path, written: str) -> None:
    model, reader = models.residual_block(), models.reader(models.residual_block())
    quantize_static(model, tmp_path / "int8.onnx", reader, format=written)
    refused(errors.AlreadyQuantizedError, "already quantized", model=onnx.load(tmp_path / "int8.onnx"))


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
def test_no_readers_and_wrong_feeds(refused: Refused, reader: Any, texts: list[str], options: dict[str, Any]) -> None:
    """What all is told from a feed is in `tests.calibration.test_feeds`."""
    refused(errors.CalibrationError, *texts, reader=reader(), **options)


def test_nan_made_by_a_node_is_computed_as_the_runtime_does(tmp_path: Path) -> None:
    model, out = parse("""net (float[1,3,8,8] x) => (float[1,4,8,8] y) <float[4,3,1,1] w, float[4,4,1,1] v> {
        c = Conv (x, w)  root = Sqrt (c)  y = Conv (root, v) }"""), tmp_path / "out.onnx"  # fmt: skip
    with pytest.warns(KenosisWarning, match="NaN or infinity"):
        report = quantize_static(model, out, models.reader(model))
    assert report.is_float
    feed = models.feeds(model)[0]
    (wanted,), (got,) = run(model, [feed]), run(out, [feed])
    assert np.isnan(wanted[0]).any()
    assert np.array_equal(wanted[0], got[0], equal_nan=True)


# ---- options --------------------------------------------------------------------------------------------------


TYPOS: Any = (
    ({"extra_options": {"ActivationSymetric": True}}, ("ActivationSymetric", "'ActivationSymmetric'")),
    ({"extra_options": {"TensorQuantOverrides": {"xx": [{"symmetric": True}]}}}, ("'xx'", "no tensor of the model")),
    ({"nodes_to_exclude": ["heed"]}, ("nodes_to_exclude", "'heed'", "Did you mean 'head'?")),
    ({"nodes_to_quantize": ["conv_1", "conv2"]}, ("nodes_to_quantize", "'conv_1'", "Did you mean 'conv1'?")),
)


@pytest.mark.parametrize(("options", "texts"), TYPOS, ids=["option", "tensor", "excluded", "named"])
def test_names_that_fit_nothing(tmp_path: Path, options: dict[str, Any], texts: tuple[str, ...]) -> None:
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


FLOAT8 = QuantType.QFLOAT8E4M3FN


@pytest.mark.parametrize(("options", "texts"), [
    ({"target": "ort-cpuu"}, ("ort-cpuu", "Did you mean 'ort-cpu'?")),
    ({"rewrites": ["colapse_silu"]}, ("rewrites", "'colapse_silu'", "Did you mean 'collapse_silu'?")),
    ({"primary_inputs": ["xx"]}, ("primary_inputs", "'xx'")),
    ({"extra_options": {"SmoothQuant": True, "SmoothQuantAlpha": 2}}, ("SmoothQuantAlpha", "=2", "from 0 to 1")),
    ({"extra_options": {"SmoothQuant": True}, "stages": Stages(placement=False)}, ("SmoothQuant", "switched off")),
    ({"recipe": "weight-only-4", "format": "qop"}, ("weights alone",)),
    ({"activation_type": "int8"}, ("activation_type", "'int8'", "QuantType.QInt8")),
    ({"activation_type": FLOAT8, "weight_type": FLOAT8}, ("Distribution",)),
    ({"activation_type": QuantType.QInt8, "weight_type": QuantType.QUInt8}, ()),
    ({"extra_options": {"CalibPercentile": 200}, "calibrate_method": CalibrationMethod.Percentile}, ("200",)),
], ids=lambda v: next(iter(v)) if isinstance(v, dict) else "")  # fmt: skip
def test_bad_options(refused: Refused, options: dict[str, Any], texts: tuple[str, ...]) -> None:
    refused(errors.OptionError, *texts, **options)


# ---- the output -----------------------------------------------------------------------------------------------


def test_an_output_that_cannot_be_written_is_told_beforehand(refused: Refused, tmp_path: Path) -> None:
    """An hour of calibration must not be lost to a typing error in the output path."""
    (folder := tmp_path / "folder").mkdir()
    reader, nowhere = models.reader(models.residual_block()), tmp_path / "nowhere"
    for output, told, where in ((nowhere / "out.onnx", "does not exist", "nowhere"), (folder, "folder", "folder")):
        refused(errors.OutputError, told, reader=reader, output=output, where=where)
    assert reader.handed_out == 0
    assert not nowhere.exists()
    assert [*folder.iterdir()] == []


def test_errors_are_also_the_built_in_ones() -> None:
    """Existing ``except ValueError`` and ``except OSError`` blocks around stock keep working."""
    of_values = errors.ModelLoadError, errors.CalibrationError, errors.OptionError, errors.UnsupportedModelError
    assert all(issubclass(e, ValueError) for e in of_values)
    assert issubclass(errors.OutputError, OSError)


def test_long_names_are_no_defect_of_ours(tmp_path: Path) -> None:
    """Of files, nodes and tensors: what the system takes works, what it does not is an error that says so."""
    v, longer = "v" * 250, tmp_path / ("x" * 300)
    text = f"""(float[1,8] x{v}) => (float[1,8] y{v}) <float[8,8] u{v}, float[8,8] w{v}> {{
        [a{v}] a{v} = MatMul (x{v}, u{v})  [r{v}] r{v} = Relu (a{v})  [m{v}] y{v} = MatMul (r{v}, w{v}) }}"""
    model, feeds = parse(text), [{f"x{v}": models.normal((1, 8))}] * 2
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


def test_a_net_that_the_runtime_refuses_once_it_optimizes(refused: Refused) -> None:
    """A size declared where its maker says another hides from a load without optimization what does not fit."""
    text = """(float[1,4,8,8] x) => (float[1,4,8,8] y) <float[9,9,9,9] c, float[4,4,1,1] w, bool[1] t, float[9,1,1] o>
    { c = Conv(x, w) r = Relu(c) s = Where(t, o, r) y = Conv(s, w) }"""
    error = refused(errors.ModelLoadError, "Incompatible dimensions", model=parse(text, checked=False))
    assert "report" not in error.fix
