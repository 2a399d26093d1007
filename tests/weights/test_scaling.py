"""Channels that matter, scaled in front of linear layers before their weights are rounded."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort import quantize_weights
from kenosis_ort.weights.blocks import Float64, relative_error, round_in_blocks, weigh_channels
from tests.flow import support
from tests.flow.support import sqnr_db
from tests.models import FeedReader
from tests.passes.support import array
from tests.planning import parse

ROWS, LARGE = 32, 4


def net(gain: float = 30.0, seed: int = 0, behind: str = "gate") -> onnx.ModelProto:
    """Two layers behind a normalization, a few of whose channels are large where weights are small."""
    rng = np.random.default_rng(seed)
    sizes = np.ones(ROWS)
    sizes[rng.choice(ROWS, LARGE, replace=False)] = gain
    up, gate = rng.normal(0, ROWS**-0.5, (2, ROWS, ROWS)) / sizes[:, None]
    arrays = {"gamma": sizes, "beta": np.zeros(ROWS), "up": up, "gate": gate}
    text = f"""(float[1,T,32] x) => (float[1,T,32] y, float[1,T,32] z) {{
        [node0] n = LayerNormalization (x, gamma, beta)
        [node1] y = MatMul (n, up)
        [node2] z = MatMul (n, {behind})
    }}"""
    return onnx.shape_inference.infer_shapes(parse(text, {n: a.astype(np.float32) for n, a in arrays.items()}))


def feeds(count: int = 8, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [{"x": rng.normal(size=(1, 20, ROWS)).astype(np.float32)} for _ in range(count)]


def run(model: onnx.ModelProto | Path, samples: list[dict[str, Any]]) -> Any:
    return np.concatenate([value.ravel() for outputs in support.run(model, samples) for value in outputs])


def moments(model: onnx.ModelProto) -> Any:
    inner = np.concatenate([f["x"][0] for f in feeds()])
    inner = (inner - inner.mean(-1, keepdims=True)) / inner.std(-1, keepdims=True)
    inner *= array(model.graph.initializer, "gamma").astype(np.float64)
    return inner.T @ inner / len(inner)


def error(matrix: Any, hessian: Any) -> float:
    found, grid = round_in_blocks(np.asarray(matrix, np.float64), 4, 32, hessian)
    return relative_error(matrix, found, grid, hessian)


def weighed(model: onnx.ModelProto, error: Any = error, **options: Any) -> tuple[onnx.ModelProto, dict[str, Float64]]:
    hessian = moments(model)
    return weigh_channels(model, options.get("moments", lambda _: hessian), error, options.get("excluded", ()))


@given(gain=st.floats(8.0, 200.0), seed=st.integers(0, 99))
def test_exact_in_float_and_the_model_is_not_changed(gain: float, seed: int) -> None:
    model = net(gain, seed)
    before, plain = model.SerializeToString(), moments(model)
    changed, factors = weighed(model, lambda _, hessian: 1.0 if np.array_equal(hessian, plain) else 0.5)
    assert factors.keys() == {"node1", "node2"}
    want = run(model, feeds(2))
    np.testing.assert_allclose(run(changed, feeds(2)), want, rtol=1e-4, atol=1e-5 * np.abs(want).max())
    assert model.SerializeToString() == before


def test_large_channels_get_finer_weights() -> None:
    factors, gamma = weighed(net())[1]["node1"], array(net().graph.initializer, "gamma")
    assert factors[gamma > 1].min() > 1.5 * factors[gamma == 1].max()


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (net(1.0), {}),  # channels alike
        (net(), {"error": lambda *_: 1.0}),  # no gain
        (net(), {"moments": lambda _: None}),
        (net(), {"excluded": ("node1",)}),
        (net(behind="up"), {}),  # a matrix of two layers
    ],
)
def test_left_alone(model: onnx.ModelProto, options: dict[str, Any]) -> None:
    changed, factors = weighed(model, **options)
    assert factors == {}
    assert changed is model


def test_through_the_public_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured: 8.7 dB without, 12.0 dB, on other samples and at products in float."""
    model, found = net(), {}
    options: dict[str, Any] = {"protect_sensitive": False, "accuracy_level": 0}
    for name in ("with", "without"):
        if name == "without":
            monkeypatch.setattr("kenosis_ort.weights.blocks.weigh_channels", lambda same, *_: (same, {}))
        report = quantize_weights(model, tmp_path / f"{name}.onnx", FeedReader(feeds(32)), **options)
        assert any("(AWQ)" in note for note in report.notes) == (name == "with")
        found[name] = sqnr_db(run(model, feeds(8, 9)), run(tmp_path / f"{name}.onnx", feeds(8, 9)))
    assert found["with"] > found["without"] + 0.5
