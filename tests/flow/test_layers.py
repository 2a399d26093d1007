"""Kernel, path and time of each layer: of a call's file, of a float model by estimate, of any quantized one."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from kenosis_ort import OptionError, layer_times
from kenosis_ort.cli.main import main
from tests.flow.support import quantized
from tests.models import Net, feeds


def two_convs() -> onnx.ModelProto:
    """A Conv that has the direct kernel, one of too few outputs for it, and one that gains by tiles."""
    net = Net()
    y = net.op("Relu", [net.conv(net.input("x", [1, 16, 12, 12]), 16, 64, name="wide")], name="r0")
    y = net.op("Relu", [net.conv(y, 64, 64, name="deep")], name="r1")
    y = net.op("Relu", [net.conv(y, 64, 6, name="few")], name="r2")
    net.output(net.gemm(net.op("Flatten", [y], name="flat"), 6 * 144, 8, name="head"), [1, 8])
    return net.model()


@pytest.mark.parametrize(("host", "deep"), [("vnni", "direct"), ("amx", "matrix product")])
def test_the_path_is_read_off_what_the_runtime_loads(tmp_path: Path, host: str, deep: str) -> None:
    model = two_convs()
    report = quantized(model, tmp_path / "q.onnx", tune="model", host=host, evidence="full")
    layers = {layer.node: layer for layer in report.layers}
    assert {name: layers[name].path for name in ("wide", "deep", "few")} == {
        "wide": "direct",
        "deep": deep,
        "few": "matrix product",
    }
    assert layers["deep"].kernel == "com.microsoft.QLinearConv"
    assert "r1" not in layers
    assert all(layers[n].estimated_us and layers[n].measured_us for n in ("wide", "deep", "few", "head", ""))
    read = {layer.node: layer for layer in layer_times(tmp_path / "q.onnx", feeds(model, 1), budget_s=0.1)}
    assert {n: layer.path for n, layer in read.items()} == {n: layer.path for n, layer in layers.items()}
    assert read["deep"].measured_us
    assert read["deep"].estimated_us is None


def test_a_float_model_by_estimate_and_machine(tmp_path: Path) -> None:
    here, there = ({x.node: x for x in layer_times(two_convs(), host=host)} for host in ("vnni", "amx"))
    assert here["deep"].estimated_us != there["deep"].estimated_us
    assert here["deep"].measured_us is None
    quantized(two_convs(), tmp_path / "q.onnx")
    with pytest.raises(OptionError, match="quantized already"):
        layer_times(tmp_path / "q.onnx", host="amx")


def test_from_the_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(two_convs(), tmp_path / "f.onnx")
    quantized(two_convs(), tmp_path / "q.onnx")
    assert main(["explain", str(tmp_path / "f.onnx"), "--times", "--for-host", "vnni"]) == 0
    assert "estimated" in capsys.readouterr().out
    assert main(["explain", str(tmp_path / "q.onnx"), "few", "--times", "--json"]) == 0
    (few,) = json.loads(capsys.readouterr().out)
    assert few["path"] == "matrix product"
    assert few["measured_us"] > 0
