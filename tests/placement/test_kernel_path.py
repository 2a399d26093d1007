"""Which Convs get weights that select the matrix product, and that nothing but the kernel changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import QuantType

from kenosis_ort import QuantizationReport, preview
from tests import models
from tests.flow.support import changed, initializers, proof, quantized, run
from tests.models import Net


def net_of_convs(size: int = 12) -> onnx.ModelProto:
    """A small stem, a deep Conv, a depthwise one and a narrow one."""
    net = Net()
    y = net.op("Relu", [net.conv(net.input("x", [1, 3, size, size]), 3, 64, name="stem")], name="r0")
    y = net.op("Relu", [net.conv(y, 64, 64, name="deep")], name="r1")
    y = net.op("Conv", [y, net.weight((64, 1, 3, 3), name="dw")], name="depthwise", group=64, pads=[1] * 4)
    y = net.op("Relu", [net.conv(y, 64, 16, name="narrow")], name="r2")
    return net.of(net.gemm(net.op("Flatten", [y], name="flat"), 16 * size * size, 64, name="head"))


def on_tiles(out: Path, **options: Any) -> QuantizationReport:
    return quantized(net_of_convs(), out, **{"tune": "model", "host": "amx", **options})


def zero_points(out: Path) -> dict[str, set[int]]:
    held, model = initializers(out), onnx.load(out)
    makers = {n.output[0]: n for n in model.graph.node}
    return {
        n.name: set(np.ravel(held[makers[n.input[1]].input[2]]).tolist())
        for n in model.graph.node
        if n.op_type in ("Conv", "Gemm") and n.input[1] in makers
    }


def test_deep_convs_alone_are_shifted(tmp_path: Path) -> None:
    report = on_tiles(tmp_path / "out.onnx", protect_outputs="int8")
    found = zero_points(tmp_path / "out.onnx")
    assert found["deep"] == {-1}
    assert all(points == {0} for name, points in found.items() if name != "deep")
    assert "matrix product" in report.plan.explain("deep")
    assert any("zero point -1" in note for note in report.notes)
    assert report.left_float() == ()
    assert all(k.integer for k in proof(report).kernels if k.op_type == "Conv")


@pytest.mark.parametrize(("size", "shifted"), [(112, {"deep"}), (160, set())])
def test_pictures_beyond_near_caches_stay_on_the_direct_kernel(size: int, shifted: set[str]) -> None:
    plan = preview(net_of_convs(size), tune="model", host="amx")
    assert {d.edge.consumer for d in plan.decisions if d.zero_point} == shifted


@pytest.mark.parametrize("options", [{}, {"per_channel": False}, {"reduce_range": True}])
def test_the_same_results_to_the_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    with_tiles, without = tmp_path / "tiles.onnx", tmp_path / "direct.onnx"
    on_tiles(with_tiles, **options)
    raised = dict.fromkeys(("deep_w_quantized", "deep_w_zero_point"), lambda w: w + np.int8(1))
    onnx.save(changed(onnx.load(with_tiles), **raised), without)  # the same weights, stored as they are
    assert zero_points(without)["deep"] == {0}
    feeds = models.feeds(net_of_convs(), 4)
    assert np.array_equal(run(with_tiles, feeds), run(without, feeds))


@pytest.mark.parametrize("weights", [np.full((64, 64, 3, 3), -1.0), np.ones((64, 64, 3, 3))])
def test_weights_at_the_end_of_the_grid(tmp_path: Path, weights: Any) -> None:
    """Alike weights of one sign: two of them stored one lower sum to what 16 bits hold."""
    model = changed(net_of_convs(), deep_w=lambda _: weights)
    quantized(model, tmp_path / "out.onnx", tune="model", host="amx")
    held = initializers(tmp_path / "out.onnx")["deep_w_quantized"]
    assert set(np.unique(held)) <= {-64, 62}


@pytest.mark.parametrize("options", [
    {"TensorQuantOverrides": {"deep_w": [{"symmetric": True, "reduce_range": True}]}},
    {"TensorQuantOverrides": {"deep_w": [{"quant_type": QuantType.QUInt8}]}},
    {"WeightSymmetric": False},
    {"MinimumRealRange": 0.01},
], ids=["range", "type", "asymmetric", "least range"])  # fmt: skip
def test_what_the_caller_says_of_weights_is_kept_and_the_report_is_true(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    report = on_tiles(tmp_path / "out.onnx", extra_options=options)
    assert zero_points(tmp_path / "out.onnx")["deep"] != {-1}
    assert all(d.zero_point == 0 for d in report.plan.decisions)
    assert not any("zero point -1" in note for note in report.notes)
