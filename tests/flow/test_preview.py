"""The plan, the times of layers and the calibration table without a model written."""

import json

import onnx
import pytest

from kenosis_ort import CalibrationTable, calibrate, errors, layer_times, preview
from kenosis_ort.cli import main as cli
from tests import models, planning
from tests.flow.support import quantized

MODEL = models.residual_block()
FEEDS = models.feeds(MODEL, 6)


def test_the_plan_without_data_is_the_one_that_is_performed(tmp_path):
    seen = preview(MODEL)
    report = quantized(MODEL, tmp_path / "out.onnx", recipe="fast", tune="model")
    assert [(n.node, n.kind) for n in seen.nodes] == [(n.node, n.kind) for n in report.plan.nodes]


def test_the_model_is_laid_out_for_its_target_as_for_a_file():
    open_sizes = planning.parse("net (float[N,3,H,8] x) => (float[N,4,H,8] y) <float[4,3,1,1] w> { y = Conv (x, w) }")
    for call, given in ((preview, ()), (layer_times, ()), (calibrate, ("table.json", FEEDS))):
        with pytest.raises(errors.UnsupportedModelError, match="takes static shapes alone, and input 'x'"):
            call(open_sizes, *given, target="qnn")


def test_a_calibration_table_is_written_once(tmp_path):
    path = tmp_path / "table.json"
    table = calibrate(MODEL, path, models.FeedReader(FEEDS))
    assert CalibrationTable.load(path).tensors.keys() == table.tensors.keys()
    with pytest.raises(errors.OutputError, match="exists already"):
        calibrate(MODEL, path, models.FeedReader(FEEDS))
    with pytest.raises(errors.OutputError):
        calibrate(MODEL, tmp_path / "no" / "table.json", models.FeedReader(FEEDS))


# ---- kernel, path and time of each layer: of a call's file, of a float model by estimate, of any quantized one --


CONVS = """(float[1,16,12,12] x) => (float[1,8] y) <float[64,16,3,3] w, float[64] wb, float[64,64,3,3] d,
    float[64] db, float[6,64,3,3] f, float[6] fb, float[8,864] h, float[8] hb> {
    [wide] a = Conv <pads = [1,1,1,1]> (x, w, wb)  [r0] b = Relu (a)  [deep] c = Conv <pads = [1,1,1,1]> (b, d, db)
    [r1] e = Relu (c)  [few] g = Conv <pads = [1,1,1,1]> (e, f, fb)  [r2] i = Relu (g)
    [flat] j = Flatten (i)  [y] y = Gemm <transB = 1> (j, h, hb) }"""
"""A Conv that has the direct kernel, one that gains by tiles, and one of too few outputs for either."""


@pytest.mark.parametrize(("host", "deep"), [("vnni", "direct"), ("amx", "matrix product")])
def test_the_path_is_read_off_what_the_runtime_loads(tmp_path, host, deep):
    model = planning.parse(CONVS)
    report = quantized(model, tmp_path / "q.onnx", tune="model", host=host, evidence="full")
    layers = {layer.node: layer for layer in report.layers}
    paths = {"wide": "direct", "deep": deep, "few": "matrix product"}
    assert {name: layers[name].path for name in paths} == paths
    assert layers["deep"].kernel == "com.microsoft.QLinearConv"
    assert "r1" not in layers
    assert all(layers[n].estimated_us and layers[n].measured_us for n in ("wide", "deep", "few", "y", ""))
    read = {layer.node: layer for layer in layer_times(tmp_path / "q.onnx", models.feeds(model, 1), budget_s=0.1)}
    assert {n: layer.path for n, layer in read.items()} == {n: layer.path for n, layer in layers.items()}
    assert read["deep"].measured_us
    assert read["deep"].estimated_us is None


def test_layers_of_a_float_model_by_estimate_and_of_files_from_the_shell(tmp_path, capsys):
    here, there = ({x.node: x for x in layer_times(planning.parse(CONVS), host=host)} for host in ("vnni", "amx"))
    assert here["deep"].estimated_us != there["deep"].estimated_us
    assert here["deep"].measured_us is None
    onnx.save(planning.parse(CONVS), tmp_path / "f.onnx")
    quantized(planning.parse(CONVS), tmp_path / "q.onnx")
    with pytest.raises(errors.OptionError, match="quantized already"):
        layer_times(tmp_path / "q.onnx", host="amx")
    assert cli.main(["explain", str(tmp_path / "f.onnx"), "--times", "--for-host", "vnni"]) == 0
    assert "estimated" in capsys.readouterr().out
    assert cli.main(["explain", str(tmp_path / "q.onnx"), "few", "--times", "--json"]) == 0
    (few,) = json.loads(capsys.readouterr().out)
    assert few["path"] == "matrix product"
    assert few["measured_us"] > 0
