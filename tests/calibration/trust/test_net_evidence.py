"""What models know about their ranges: bounds, statistics of BatchNormalizations, outputs that answer nothing."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort import KenosisWarning, SyntheticReader, quantize_static
from kenosis_ort.calibration import Points, collect
from kenosis_ort.calibration.trust.assess import depths
from kenosis_ort.calibration.trust.net_evidence import fit_batch_norms, hard_bounds, predicted_ranges, silent_outputs
from tests import models
from tests.calibration.synthetic.test_pages import edges
from tests.models import Net

INF = math.inf


def chain(*nodes: onnx.NodeProto, constants: dict[str, np.ndarray] | None = None) -> onnx.ModelProto:
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3])],
        [helper.make_empty_tensor_value_info(nodes[-1].output[0])],
        [numpy_helper.from_array(a, n) for n, a in (constants or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("Relu", (0, INF)),
        ("Sigmoid", (0, 1)),
        ("Tanh", (-1, 1)),
        ("Softmax", (0, 1)),
        ("LogSoftmax", (-INF, 0)),
        ("Neg", None),
    ],
)
def test_bounds_of_activations_hold(op: str, expected: tuple[float, float] | None) -> None:
    model = chain(helper.make_node(op, ["x"], ["y"]), helper.make_node("Identity", ["y"], ["z"]))
    assert hard_bounds(model).get("z") == expected
    if expected is not None:
        feed = {"x": np.random.default_rng(0).normal(0, 20, (50, 3)).astype(np.float32)}
        low, high = collect(model, [feed], Points(["z"], threads=1)).range_of("z")
        assert expected[0] <= low <= high <= expected[1]


def test_bounds_of_clip_and_concat() -> None:
    limits = {"six": np.float32(6), "zero": np.float32(0)}
    model = chain(
        helper.make_node("Clip", ["x", "zero", "six"], ["a"]),
        helper.make_node("Clip", ["x", "", "six"], ["b"]),
        helper.make_node("Concat", ["a", "a"], ["c"], axis=1),
        helper.make_node("Concat", ["a", "x"], ["d"], axis=1),
        constants=limits,
    )
    assert hard_bounds(model) == {"a": (0, 6), "b": (-INF, 6), "c": (0, 6)}


def test_depth_counts_layers() -> None:
    model = models.conv_relu_chain(4)
    found = depths(model)
    assert found["x"] == 0
    assert found[model.graph.output[0].name] == 1
    values = [found[node.output[0]] for node in model.graph.node]
    assert values == sorted(values)


def normalized(scale: float = 1.0) -> tuple[onnx.ModelProto, np.ndarray]:
    """A BatchNormalization and Relu trained on given data, and the data."""
    data = np.random.default_rng(0).normal([1.0, -2.0, 5.0], [1.0, 3.0, 0.5], (4000, 3)).astype(np.float32)
    constants = {
        "g": np.array([1.5, -0.7, 1.0], np.float32),
        "b": np.array([0.5, 0.0, -1.0], np.float32),
        "m": data.mean(axis=0),
        "v": data.var(axis=0),
    }
    nodes = [
        helper.make_node("BatchNormalization", ["x", "g", "b", "m", "v"], ["y"], name="bn"),
        helper.make_node("Relu", ["y"], ["z"]),
    ]
    return chain(*nodes, constants=constants), data * np.float32(scale)


def test_natural_data_fit_and_their_range_is_predicted_from_scaled_ones() -> None:
    model, data = normalized()
    (fit,) = fit_batch_norms(model, [{"x": data[:2000]}, {"x": data[2000:]}])
    assert fit.misfit < 0.01
    real = collect(model, [{"x": data}], Points(["y", "z"], threads=1))
    weak = fit_batch_norms(model, [{"x": data * np.float32(0.5)}])
    assert weak[0].misfit > 0.4
    predicted = predicted_ranges(model, weak, hard_bounds(model))
    np.testing.assert_allclose(predicted["y"], real.range_of("y"), rtol=1e-3)
    np.testing.assert_allclose(predicted["z"], real.range_of("z"), rtol=1e-3)


def test_dead_channels_and_models_without_statistics() -> None:
    model, data = normalized()
    data[:, 0] = 1.0
    (fit,) = fit_batch_norms(model, [{"x": data}])
    assert np.isfinite(fit.range).all()
    assert fit_batch_norms(models.conv_relu_chain(2), []) == ()
    assert fit_batch_norms(model, []) == ()


def feeds(count: int = 6) -> list[dict[str, np.ndarray]]:
    return models.feeds(edges(), count)


def test_a_map_that_never_says_yes() -> None:
    assert silent_outputs(edges(), feeds()) == {}
    found = silent_outputs(edges(bias=-1000.0), feeds())
    assert "never rises above 0" in found["probability_out"]


def test_an_output_that_does_not_depend_on_the_sample() -> None:
    net = Net()
    x = net.input("x", [1, 4])
    net.output(net.op("Add", [net.op("Mul", [x, net.const(1e-9)]), net.const(3.0)], name="flat"), [1, 4])
    model = net.model()
    assert silent_outputs(model, models.feeds(model, 6)) == {"flat_out": "is the same for all samples"}
    assert silent_outputs(model, models.feeds(model, 3)) == {}, "too few to tell"


@pytest.mark.parametrize("build", [models.residual_block, models.mlp, models.two_input_detector])
def test_other_nets_answer(build: object) -> None:
    model: onnx.ModelProto = build()  # type: ignore[operator]
    assert silent_outputs(model, models.feeds(model, 6)) == {}


def test_the_report_says_do_not_ship(tmp_path: Path) -> None:
    model = edges(bias=-200.0)
    reader = SyntheticReader(model, samples=8, input_range=(0, 1))
    with pytest.warns(KenosisWarning):
        report = quantize_static(model, tmp_path / "out.onnx", reader, recipe="plain")
    assert report.trust is not None
    assert report.trust.verdict == "do not ship"
    assert "never rises above" in report.trust.reason
