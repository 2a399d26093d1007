"""The scale of inputs: found from statistics, folded biases, the graph, metadata, real samples, or the caller."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from kenosis_ort.calibration.feeds import Known
from kenosis_ort.calibration.synthetic import SyntheticReader
from kenosis_ort.calibration.synthetic.drawing import photograph
from kenosis_ort.calibration.synthetic.draws import Draws
from kenosis_ort.calibration.synthetic.pixels import WAYS
from kenosis_ort.errors import CalibrationError
from tests.calibration.synthetic.support import first_layer, model_of

F = TensorProto.FLOAT


def trained_on(way: Any, count: int = 12) -> list[np.ndarray]:
    return [way.apply(photograph(Draws(77, i), 32, 32))[None].astype(np.float32) for i in range(count)]


@pytest.mark.parametrize("way", WAYS, ids=[w.name for w in WAYS])
def test_stored_statistics_tell_the_range(way: Any) -> None:
    reader = SyntheticReader(first_layer(24, trained_on(way), folded=False))
    assert reader.provenance.known["image"] is Known.STATISTICS
    assert f"{way.name} (" in reader.assumptions[0]


@pytest.mark.parametrize("way", WAYS, ids=[w.name for w in WAYS])
def test_a_folded_bias_tells_the_order_of_magnitude(way: Any) -> None:
    reader = SyntheticReader(first_layer(24, trained_on(way), folded=True))
    made = np.stack([reader.feed(i)["image"] for i in range(16)])
    ratio = made.std() / np.stack(trained_on(way)).std()
    assert 0.4 < ratio < 3
    assert reader.provenance.known["image"] is Known.CONVENTION


def test_no_usual_way_is_a_guess() -> None:
    strange = [trained_on(WAYS[0])[i] * 30 + 500 for i in range(12)]
    reader = SyntheticReader(first_layer(24, strange, folded=False))
    assert reader.provenance.known["image"] is Known.GUESS


def test_a_model_that_does_not_run_as_it_is_leaves_a_guess() -> None:
    model = first_layer(24, trained_on(WAYS[0]), folded=True)
    model.graph.node.append(helper.make_node("Unheard", ["out"], ["more"]))
    assert SyntheticReader(model).provenance.known["image"] is Known.GUESS
    model = first_layer(24, trained_on(WAYS[0]), folded=False)
    model.ir_version = 99  # lowered for the runtime, as in quantization
    assert SyntheticReader(model).provenance.known["image"] is Known.STATISTICS


def test_metadata_tells() -> None:
    model = model_of(("image", F, [1, 3, 16, 16]))
    for key, value in (("image.mean", "[0.5, 0.5, 0.5]"), ("image.std", "[0.25, 0.25, 0.25]")):
        model.metadata_props.add(key=key, value=value)
    image = SyntheticReader(model).feed(0)["image"]
    assert -2 <= image.min() < image.max() <= 2
    assert SyntheticReader(model).provenance.known["image"] is Known.GRAPH


@pytest.mark.parametrize(
    ("wishes", "low", "high"),
    [
        ({"input_range": (0, 255)}, 0, 255),
        ({"input_range": (-1, 1)}, -1, 1),
        ({"mean": 127.5, "std": 127.5}, -1, 1),
        ({"mean": (104, 117, 123)}, -123, 151),
        ({"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}, -2.2, 2.7),
        ({"input_range": (0, 1), "mean": 0.5, "std": 0.5}, -1, 1),
        ({"input_range": (0, 255), "mean": 0.0, "std": 255.0}, 0, 1),
    ],
)
def test_the_caller_tells(wishes: dict[str, Any], low: float, high: float) -> None:
    reader = SyntheticReader(model_of(("image", F, [1, 3, 48, 48])), samples=8, **wishes)
    made = np.stack([reader.feed(i)["image"] for i in range(8)])
    assert low <= made.min() < low + 0.15 * (high - low)
    assert high - 0.15 * (high - low) < made.max() <= high + 1e-6
    assert reader.provenance.known["image"] is Known.GIVEN


@pytest.mark.parametrize(
    ("wishes", "match"),
    [
        ({"std": 0}, "std must not be 0"),
        ({"mean": [1, 2]}, "one a channel"),
        ({"input_range": (2, 1)}, "upside down"),
        ({"input_range": (0, float("inf"))}, "not finite"),
        ({"input_ranges": {"image": 3}}, "no pair of numbers"),
        ({"seed": -1}, "negative"),
        ({"real": []}, "yields none"),
    ],
)
def test_bad_wishes(wishes: dict[str, Any], match: str) -> None:
    with pytest.raises(CalibrationError, match=match):
        SyntheticReader(model_of(("image", F, [1, 3, 8, 8])), **wishes)
    if "mean" in wishes or "std" in wishes:
        return
    with pytest.raises(CalibrationError, match="for images"):
        SyntheticReader(model_of(("x", F, [1, 8])), mean=1.0)


def test_features_are_fitted_to_statistics() -> None:
    rng = np.random.default_rng(0)
    mean, spread = np.linspace(-30, 10, 20), np.linspace(1, 4, 20)
    data = (mean + spread * rng.standard_normal((500, 20))).astype(np.float32)
    weight = rng.normal(0, 0.2, (20, 60)).astype(np.float32)
    arriving = data @ weight
    named = {"g": np.ones(60), "b": np.zeros(60), "m": arriving.mean(axis=0), "v": arriving.var(axis=0)}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("BatchNormalization", ["a", "g", "b", "m", "v"], ["out"]),
    ]
    constants = [("w", weight), *((k, v.astype(np.float32)) for k, v in named.items())]
    reader = SyntheticReader(model_of(("x", F, ["N", 20]), nodes=nodes, constants=constants), samples=400)
    made = np.concatenate([reader.feed(i)["x"] for i in range(400)])
    np.testing.assert_allclose(made.mean(axis=0), mean, atol=2.5)
    assert 0.5 < np.median(made.std(axis=0) / spread) < 2
    assert reader.provenance.known["x"] is Known.STATISTICS
    assert np.array_equal(reader.feed(3)["x"], SyntheticReader(
        model_of(("x", F, ["N", 20]), nodes=nodes, constants=constants), samples=4).feed(3)["x"])  # fmt: skip


def test_real_samples_come_first_and_give_the_scale() -> None:
    rng = np.random.default_rng(0)
    inputs = [("image", F, [1, 3, 24, 24]), ("features", F, [1, 6])]
    real = [
        {
            "image": rng.uniform(-3, 9, (1, 3, 24, 24)).astype(np.float32),
            "features": rng.normal(50, 2, (1, 6)).astype(np.float32),
        }
        for _ in range(12)
    ]
    reader = SyntheticReader(model_of(*inputs), samples=10, real=real)
    assert len(reader) == 22
    assert reader.provenance.real == 12
    np.testing.assert_array_equal(reader.feed(3)["image"], real[3]["image"])
    made = [reader.feed(i) for i in range(12, 22)]
    assert -3.1 < min(f["image"].min() for f in made) < -2
    assert 8 < max(f["image"].max() for f in made) < 9.1
    assert 45 < np.mean([f["features"] for f in made]) < 55
    assert set(reader.provenance.known.values()) == {Known.REAL}
    with pytest.raises(CalibrationError, match="'features'"):
        SyntheticReader(model_of(*inputs), real=[{"image": real[0]["image"]}])
