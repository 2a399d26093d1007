"""Bad input: the right error, which says what, where and the fix; nothing written, nothing left behind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, StaticQuantConfig

from kenosis_ort import (
    AlreadyQuantizedError,
    ArrayReader,
    CalibrationError,
    KenosisError,
    KenosisWarning,
    ModelLoadError,
    OptionError,
    OutputError,
    Stages,
    UnsupportedModelError,
    quantize,
    quantize_static,
)
from kenosis_ort.errors import strict_names
from tests import models
from tests.flow.support import quantized, run
from tests.models import Feed, FeedReader, Net

OLD = b"the model of yesterday"
Refused = Callable[..., KenosisError]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Refused]:
    """Calls `quantize_static`, returns its refusal, and afterwards checks that nothing was written."""
    work, temporary, target = (tmp_path / n for n in ("work", "temporary", "target"))
    for folder in (work, temporary, target):
        folder.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    out = target / "out.onnx"
    out.write_bytes(OLD)

    def call(model: Any = None, reader: Any = "random", output: Path = out, **options: Any) -> KenosisError:
        model = models.residual_block() if model is None else model
        if isinstance(reader, str):
            reader = models.reader(model) if isinstance(model, onnx.ModelProto) else FeedReader([])
        with pytest.raises(KenosisError) as caught:
            quantize_static(model, output, reader, **options)
        return caught.value

    yield call
    assert out.read_bytes() == OLD
    assert [p.name for p in target.iterdir()] == ["out.onnx"]
    assert list(work.iterdir()) == []
    assert list(temporary.iterdir()) == []


def check(error: KenosisError, kind: type[KenosisError], *texts: str, where: str | None = None) -> None:
    """The class is the right one; what, where and fix are there, and these texts are in the message."""
    assert type(error) is kind, repr(error)
    assert error.what
    assert error.fix
    for text in texts:
        assert text in str(error), str(error)
    if where is not None:
        assert error.where is not None
        assert where in error.where, error.where


# ---- the model ------------------------------------------------------------------------------------------------


def saved(folder: Path, model: onnx.ModelProto | None = None, **options: Any) -> Path:
    path = folder / "float.onnx"
    onnx.save(model or models.residual_block(), path, **options)
    return path


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "empty"),
        (b"no model at all, only words " * 20, "not a complete ONNX model"),
        (b"PK\x03\x04" + b"\0" * 100, "zip"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS"),
        (b"\0" * 64, "ONNX"),
    ],
    ids=["empty", "text", "zip", "lfs", "zeros"],
)
def test_not_onnx(refused: Refused, tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "float.onnx"
    path.write_bytes(content)
    check(refused(path), ModelLoadError, text, where="float.onnx")


@pytest.mark.parametrize("keep", [0.02, 0.5, 0.99])
def test_truncated(refused: Refused, tmp_path: Path, keep: float) -> None:
    path = saved(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    check(refused(path), ModelLoadError, where="float.onnx")


def test_missing_file(refused: Refused, tmp_path: Path) -> None:
    check(refused(tmp_path / "nowhere.onnx"), ModelLoadError, "does not exist", where="nowhere.onnx")


def test_model_is_a_folder(refused: Refused, tmp_path: Path) -> None:
    check(refused(tmp_path), ModelLoadError, "folder", where=str(tmp_path))


def external(folder: Path) -> Path:
    options: dict[str, Any] = {"save_as_external_data": True, "location": "weights.bin", "size_threshold": 0}
    return saved(folder, **options)


def test_missing_external_data(refused: Refused, tmp_path: Path) -> None:
    path = external(tmp_path)
    (tmp_path / "weights.bin").unlink()
    check(refused(path), ModelLoadError, "weights.bin")


def test_short_external_data(refused: Refused, tmp_path: Path) -> None:
    path = external(tmp_path)
    data = tmp_path / "weights.bin"
    data.write_bytes(data.read_bytes()[:100])
    check(refused(path), ModelLoadError, "weights.bin")


@pytest.mark.parametrize("location", ["../secret.bin", "/etc/hostname", "a/../../secret.bin", "link.bin"])
def test_external_data_outside_the_folder(refused: Refused, tmp_path: Path, location: str) -> None:
    (tmp_path / "secret.bin").write_bytes(b"\0" * 4096)
    inside = tmp_path / "model"
    inside.mkdir()
    path = external(inside)
    os.symlink(tmp_path / "secret.bin", inside / "link.bin")
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    path.write_bytes(model.SerializeToString())
    check(refused(path), ModelLoadError, location)


def test_proto_without_its_external_data(refused: Refused, tmp_path: Path) -> None:
    model = onnx.load(external(tmp_path), load_external_data=False)
    check(refused(model), ModelLoadError, "external data")


def test_empty_proto(refused: Refused) -> None:
    check(refused(onnx.ModelProto(), FeedReader([])), ModelLoadError, "no ONNX graph")


def test_already_quantized(refused: Refused, tmp_path: Path) -> None:
    done = tmp_path / "int8.onnx"
    quantized(models.residual_block(), done)
    check(refused(done, models.reader(models.residual_block())), AlreadyQuantizedError, "already quantized")


def test_already_quantized_as_qoperator(refused: Refused, tmp_path: Path) -> None:
    done = tmp_path / "int8.onnx"
    quantized(models.residual_block(), done, quant_format=QuantFormat.QOperator)
    check(refused(done, models.reader(models.residual_block())), AlreadyQuantizedError, "already quantized")


def test_nan_in_the_weights(refused: Refused) -> None:
    model = models.residual_block()
    weight = next(t for t in model.graph.initializer if t.name == "conv1_w")
    values = onnx.numpy_helper.to_array(weight).copy()
    values.flat[3] = np.nan
    weight.CopyFrom(onnx.numpy_helper.from_array(values, "conv1_w"))
    check(refused(model), CalibrationError, "NaN", "relu1_out")  # the first value that it reaches


# ---- the data -------------------------------------------------------------------------------------------------


def test_reader_yields_nothing(refused: Refused) -> None:
    check(refused(reader=FeedReader([])), CalibrationError, "yields no sample")


def test_no_reader(refused: Refused) -> None:
    check(refused(reader=None), CalibrationError, "calibration_data_reader")


def test_no_reader_for_qoperator(refused: Refused) -> None:
    check(refused(reader=None, quant_format=QuantFormat.QOperator), CalibrationError, "calibration_data_reader")


@pytest.mark.parametrize("reader", [object(), 7])
def test_something_that_is_no_reader(refused: Refused, reader: Any) -> None:
    check(refused(reader=reader), CalibrationError, type(reader).__name__)


def test_reader_yields_something_else(refused: Refused) -> None:
    samples: Sequence[Any] = [np.zeros((1, 3, 8, 8), np.float32)]
    check(refused(reader=FeedReader(samples)), CalibrationError, "ndarray", where="sample 0")


def feed_of(**changes: Any) -> list[Feed]:
    return [{"x": np.zeros((1, 3, 8, 8), np.float32)}, {"x": np.ones((1, 3, 8, 8), np.float32), **changes}]


@pytest.mark.parametrize(
    "stages", [Stages(), Stages(placement=False), Stages.none()], ids=["all", "stock placement", "stock"]
)
@pytest.mark.parametrize(
    ("second", "texts"),
    [
        ({"y": np.zeros((1, 3, 8, 8), np.float32)}, ("'y'", "Fix:")),
        ({}, ("'x'",)),
        ({"x": np.zeros((1, 3, 9, 8), np.float32)}, ("'x'", "(1, 3, 8, 8)", "(1, 3, 9, 8)")),
        ({"x": np.zeros((3, 8, 8), np.float32)}, ("'x'", "array[None]")),
        ({"x": np.zeros((1, 8, 8, 3), np.float32)}, ("'x'", "channels-last")),
        ({"x": np.zeros((1, 3, 8, 8), np.uint8)}, ("'x'", "uint8", "float32", "astype")),
    ],
    ids=["name", "empty feed ends", "shape", "no batch", "layout", "bytes"],
)
def test_wrong_feeds(refused: Refused, second: Feed, texts: tuple[str, ...], stages: Stages) -> None:
    if not second:  # an empty dictionary is the end of the data, as in stock; here it leaves none
        check(refused(reader=FeedReader([{}]), stages=stages), CalibrationError, "no sample")
        return
    good = {"x": np.zeros((1, 3, 8, 8), np.float32)}
    check(refused(reader=FeedReader([good, second]), stages=stages), CalibrationError, *texts, where="sample 1")


@pytest.mark.parametrize(
    ("feeds", "texts"),
    [
        ([], ("no sample",)),
        ([{"y": np.zeros((1, 3, 8, 8), np.float32)}], ("'y'", "sample 0")),
        ([{"x": np.zeros((1, 3, 8, 8), np.uint8)}], ("'x'", "uint8")),
        ([{"x": np.zeros((3, 8, 8), np.float32)}], ("'x'", "(3, 8, 8)")),
    ],
    ids=["nothing", "name", "type", "shape"],
)
def test_wrong_feeds_for_qoperator(refused: Refused, feeds: list[Feed], texts: tuple[str, ...]) -> None:
    check(refused(reader=FeedReader(feeds), quant_format=QuantFormat.QOperator), CalibrationError, *texts)


def test_wrong_input_name_suggests_the_right_one(refused: Refused) -> None:
    model = models.two_input_detector()
    feed = models.feeds(model)[0]
    feed["scale_facto"] = feed.pop("scale_factor")
    check(refused(model, FeedReader([feed])), CalibrationError, "'scale_facto'", "Did you mean 'scale_factor'?")


def test_missing_input(refused: Refused) -> None:
    model = models.two_input_detector()
    feed = models.feeds(model)[0]
    del feed["scale_factor"]
    check(refused(model, FeedReader([feed])), CalibrationError, "'scale_factor'", where="sample 0")


METHODS = [CalibrationMethod.MinMax, CalibrationMethod.Entropy, CalibrationMethod.Percentile]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_in_the_data(refused: Refused, method: CalibrationMethod, value: float) -> None:
    feeds = models.feeds(models.residual_block(), 3)
    feeds[2]["x"][0, 1, 2, 3] = value
    error = refused(reader=FeedReader(feeds), calibrate_method=method)
    check(error, CalibrationError, "'x'", where="sample 2")


def test_nan_made_by_a_node_is_computed_as_the_runtime_does(tmp_path: Path) -> None:
    net = Net()
    x = net.conv(net.input("x", [1, 3, 8, 8]), 3, 4, name="conv0")
    y = net.op("Sqrt", [x], name="root")
    net.output(net.conv(y, 4, 4, name="conv1"), [1, 4, 8, 8])
    model, out = net.model(), tmp_path / "out.onnx"
    with pytest.warns(KenosisWarning, match="NaN or infinity"):
        report = quantize_static(model, out, models.reader(model))
    assert report.is_float
    feed = models.feeds(model)[0]
    (wanted,), (got,) = run(model, [feed]), run(out, [feed])
    assert np.isnan(wanted[0]).any()
    assert np.array_equal(wanted[0], got[0], equal_nan=True)


@pytest.mark.parametrize("quant_format", list(QuantFormat), ids=lambda f: f.name)
def test_reader_of_the_callers_that_raises(tmp_path: Path, quant_format: QuantFormat) -> None:
    class Broken(FeedReader):
        def get_next(self) -> Feed | None:
            raise RuntimeError("disk unplugged")

    model = models.residual_block()
    with pytest.raises(CalibrationError, match=r"RuntimeError: disk unplugged.*sample 0") as caught:
        quantize_static(model, tmp_path / "out.onnx", Broken([]), quant_format)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert not list(tmp_path.iterdir())


def test_array_reader_of_the_wrong_name(refused: Refused) -> None:
    reader = ArrayReader({"input": np.zeros((4, 3, 8, 8), np.float32)})
    check(refused(reader=reader), CalibrationError, "'input'", "x")


# ---- options --------------------------------------------------------------------------------------------------


TYPOS: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
    ({"extra_options": {"ActivationSymetric": True}}, ("ActivationSymetric", "'ActivationSymmetric'")),
    ({"extra_options": {"TensorQuantOverrides": {"xx": [{"symmetric": True}]}}}, ("'xx'", "no tensor of the model")),
    ({"nodes_to_exclude": ["heed"]}, ("nodes_to_exclude", "'heed'", "Did you mean 'head'?")),
    ({"nodes_to_quantize": ["conv_1", "conv2"]}, ("nodes_to_quantize", "'conv_1'", "Did you mean 'conv1'?")),
)


@pytest.mark.parametrize(("options", "texts"), TYPOS, ids=["option", "tensor", "excluded", "named"])
def test_names_that_fit_nothing(tmp_path: Path, options: dict[str, Any], texts: tuple[str, ...]) -> None:
    """A warning where stock says nothing and goes on; an error on the command line, where it can only be a typo."""
    model, out = models.residual_block(), tmp_path / "out.onnx"
    with pytest.warns(KenosisWarning, match="It is ignored") as caught:
        report = quantize_static(model, out, models.reader(model), recipe="plain", **options)
    (text,) = (str(w.message) for w in caught)
    assert all(part in text for part in texts), text
    assert report.warnings == (text,)
    assert caught[0].filename == __file__
    out.unlink()
    with strict_names(), pytest.raises(OptionError, match=texts[0]):
        quantize_static(model, out, models.reader(model), recipe="plain", **options)
    assert not out.exists()


def test_warnings_point_at_the_caller_of_quantize(tmp_path: Path) -> None:
    model = models.residual_block()
    config = StaticQuantConfig(models.reader(model), extra_options={"Dedicated": True})
    with pytest.warns(KenosisWarning, match="Dedicated") as caught:
        quantize(model, tmp_path / "out.onnx", config, recipe="plain")
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"target": "ort-cpuu"}, ("ort-cpuu", "Did you mean 'ort-cpu'?")),
        ({"protect_outputs": "int"}, ("protect_outputs", "'int'", "'int8'")),
        ({"rewrites": ["colapse_silu"]}, ("rewrites", "'colapse_silu'", "Did you mean 'collapse_silu'?")),
        ({"primary_inputs": ["xx"]}, ("primary_inputs", "'xx'")),
        ({"extra_options": {"SmoothQuant": True, "SmoothQuantAlpha": 2}}, ("SmoothQuantAlpha", "=2", "from 0 to 1")),
        ({"extra_options": {"SmoothQuant": True}, "stages": Stages(placement=False)}, ("SmoothQuant", "switched off")),
        ({"activation_type": "int8"}, ("activation_type", "'int8'", "QuantType.QInt8")),
        ({"weight_type": 99}, ("weight_type", "99")),
        ({"quant_format": "QQ"}, ("quant_format", "'QQ'")),
        ({"calibrate_method": "minimax"}, ("minimax", "'minmax'")),
        ({"activation_type": QuantType.QFLOAT8E4M3FN, "weight_type": QuantType.QFLOAT8E4M3FN}, ("Distribution",)),
        ({"activation_type": QuantType.QInt8, "weight_type": QuantType.QUInt8}, ()),
        ({"extra_options": {"CalibPercentile": 200}, "calibrate_method": CalibrationMethod.Percentile}, ("200",)),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_bad_options(refused: Refused, options: dict[str, Any], texts: tuple[str, ...]) -> None:
    error = refused(**options)
    assert isinstance(error, OptionError)
    for text in texts:
        assert text in str(error), str(error)
    assert error.fix or "must be" in error.what, str(error)


@pytest.mark.parametrize(
    "option", ["nodes_to_exclude", "nodes_to_quantize", "op_types_to_quantize", "primary_inputs", "rewrites"]
)
def test_a_string_where_a_list_is_meant(refused: Refused, option: str) -> None:
    """``nodes_to_exclude="head"`` would name the nodes h, e, a and d."""
    check(refused(**{option: "head"}), OptionError, option, "list")


@pytest.mark.parametrize("cache", ["{", "[]", '{"schema": 99}'])
def test_broken_cache(refused: Refused, tmp_path: Path, cache: str) -> None:
    path = tmp_path / "ranges.json"
    path.write_text(cache)
    error = refused(calibration_cache_path=path)
    assert isinstance(error, CalibrationError)
    assert "ranges.json" in str(error)
    assert path.read_text() == cache


# ---- the output -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"quant_format": QuantFormat.QOperator}], ids=["qdq", "qoperator"])
def test_output_folder_missing(refused: Refused, tmp_path: Path, options: dict[str, Any]) -> None:
    check(refused(output=tmp_path / "nowhere" / "out.onnx", **options), OutputError, "does not exist", where="nowhere")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("options", [{}, {"quant_format": QuantFormat.QOperator}], ids=["qdq", "qoperator"])
def test_output_is_a_folder(refused: Refused, tmp_path: Path, options: dict[str, Any]) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    check(refused(output=folder, **options), OutputError, "folder", where="folder")
    assert list(folder.iterdir()) == []


def test_output_is_checked_before_the_work(refused: Refused, tmp_path: Path) -> None:
    """An hour of calibration must not be lost to a typing error in the output path."""
    reader = models.reader(models.residual_block())
    refused(reader=reader, output=tmp_path / "nowhere" / "out.onnx")
    assert reader.handed_out == 0


def test_errors_are_also_the_built_in_ones() -> None:
    """Existing ``except ValueError`` and ``except OSError`` blocks around stock keep working."""
    assert issubclass(ModelLoadError, ValueError)
    assert issubclass(CalibrationError, ValueError)
    assert issubclass(OptionError, ValueError)
    assert issubclass(UnsupportedModelError, ValueError)
    assert issubclass(OutputError, OSError)


def test_long_names_are_no_defect_of_ours(tmp_path: Path) -> None:
    """Of files, nodes and tensors: what the system takes works, what it does not is an error that says so."""
    model = models.residual_block()
    text = {node.name: node.name + "n" * 250 for node in model.graph.node}
    for node in model.graph.node:
        node.name = text[node.name]
        for values in (node.input, node.output):
            for at, value in enumerate(values):
                values[at] = value + "v" * 250
    for value in (*model.graph.input, *model.graph.output, *model.graph.initializer):
        value.name += "v" * 250
    feeds = [{model.graph.input[0].name: feed["x"]} for feed in models.feeds(models.residual_block(), 2)]
    source, out, cache = tmp_path / ("m" * 255), tmp_path / ("o" * 255), tmp_path / ("c" * 255)
    onnx.save(model, source)
    report = quantize_static(source, out, FeedReader(feeds), promise=False, calibration_cache_path=cache)
    assert not report.is_float
    assert report.to_html()
    assert onnx.load(out).graph.input[0].name == feeds[0].popitem()[0]
    longer = tmp_path / ("x" * 300)
    with pytest.raises(OutputError, match="too long"):
        quantize_static(source, longer, FeedReader(feeds))
    with pytest.raises(CalibrationError, match="cannot be written"):
        quantize_static(source, out, FeedReader(feeds), calibration_cache_path=longer)
    with pytest.raises(CalibrationError, match="does not exist"):
        ArrayReader(longer)
