"""Which Convs get weights that select the matrix product, and that nothing but the kernel changes."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnxruntime.quantization import QuantType

from kenosis_ort import preview
from tests.flow.support import Made, changed, make, proof, run
from tests.models import Net


def net_of_convs(size: int = 12) -> onnx.ModelProto:
    """A small stem, a deep Conv, a depthwise one and a narrow one."""
    net = Net()
    y = net.op("Relu", [net.conv(net.input("x", [1, 3, size, size]), 3, 64, name="stem")], name="r0")
    y = net.op("Relu", [net.conv(y, 64, 64, name="deep")], name="r1")
    y = net.op("Conv", [y, net.weight((64, 1, 3, 3), name="dw")], name="depthwise", group=64, pads=[1] * 4)
    y = net.op("Relu", [net.conv(y, 64, 16, name="narrow")], name="r2")
    return net.of(net.gemm(net.op("Flatten", [y], name="flat"), 16 * size * size, 64, name="head"))


def on_tiles(folder: Path, model: onnx.ModelProto | None = None, **options: Any) -> Made:
    return make(model or net_of_convs(), folder, tune="model", host="amx", **options)


def zero_points(model: onnx.ModelProto) -> dict[str, set[int]]:
    held = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    makers = {n.output[0]: n for n in model.graph.node}
    layers = [n for n in model.graph.node if n.op_type in ("Conv", "Gemm") and n.input[1] in makers]
    return {n.name: set(np.ravel(held[makers[n.input[1]].input[2]]).tolist()) for n in layers}


def test_deep_convs_alone_are_shifted(tmp_path: Path) -> None:
    made = on_tiles(tmp_path, protect_outputs="int8")
    report, found = made.report, zero_points(made.written)
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
    made = on_tiles(tmp_path, **options)
    raised = dict.fromkeys(("deep_w_quantized", "deep_w_zero_point"), lambda w: w + np.int8(1))
    without = changed(made.written, **raised)  # the same weights, stored as they are
    assert zero_points(without)["deep"] == {0}
    assert np.array_equal(run(made.written, made.feeds), run(without, made.feeds))


@pytest.mark.parametrize("weights", [np.full((64, 64, 3, 3), -1.0), np.ones((64, 64, 3, 3))])
def test_weights_at_the_end_of_the_grid(tmp_path: Path, weights: Any) -> None:
    """Alike weights of one sign: two of them stored one lower sum to what 16 bits hold."""
    held = on_tiles(tmp_path, changed(net_of_convs(), deep_w=lambda _: weights)).held["deep_w_quantized"]
    assert set(np.unique(held)) <= {-64, 62}


@pytest.mark.parametrize("options", [
    {"TensorQuantOverrides": {"deep_w": [{"symmetric": True, "reduce_range": True}]}},
    {"TensorQuantOverrides": {"deep_w": [{"quant_type": QuantType.QUInt8}]}},
    {"WeightSymmetric": False},
    {"MinimumRealRange": 0.01},
], ids=["range", "type", "asymmetric", "least range"])  # fmt: skip
def test_what_the_caller_says_of_weights_is_kept_and_the_report_is_true(tmp_path, options):
    made = on_tiles(tmp_path, extra_options=options)
    assert zero_points(made.written)["deep"] != {-1}
    assert all(d.zero_point == 0 for d in made.report.plan.decisions)
    assert not any("zero point -1" in note for note in made.report.notes)
