"""SmoothQuant: exact in float, folded where it can be, and better where channels differ."""

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.accuracy.channel_statistics import channel_statistics
from kenosis_ort.graph.live import LiveGraph
from kenosis_ort.passes.smooth import Smoothed, smooth, values_for_smoothing
from kenosis_ort.runtime.limits import runtime_limits
from tests.passes.support import array, first
from tests.planning import parse, prepared

D = 32
NORMS = {
    "layer norm": "n = LayerNormalization <axis = -1> (x, gamma, beta)",
    "rms norm": "n = RMSNormalization <axis = -1> (x, gamma)",
    "rms norm in pieces": """q = Mul (x, x)\n m = ReduceMean <axes = [-1]> (q)\n e = Add (m, eps)\n r = Sqrt (e)
        d = Div (x, r)\n n = Mul (gamma, d)""",
    "affine": "d = Mul (x, gamma)\n n = Add (d, beta)",
}
ALPHAS = ("auto", 0.0, 0.3, 0.5, 0.85, 1.0)
INSTALLED = sorted(NORMS if runtime_limits().max_opset >= 23 else NORMS.keys() - {"rms norm"})  # its operator set
READERS = {
    "two linears": "a = MatMul (n, w1)\n b = MatMul (n, w2)\n c = Add (b, b2)\n y = Mul (a, c)",
    "gemm behind a reshape": "f = Reshape (n, flat)\n g = Gemm <transB = 1> (f, w1, b2)\n y = Reshape (g, back)",
    "transposed": "t = Transpose <perm = [1, 0, 2]> (n)\n g = MatMul (t, w1)\n y = Transpose <perm = [1, 0, 2]> (g)",
}


def weights(gain: float = 30.0, seed: int = 0) -> dict[str, Any]:
    """Weights of which the norm's gains have a few channels far above the rest."""
    rng = np.random.default_rng(seed)
    gamma = rng.uniform(0.5, 1.5, D)
    gamma[rng.choice(D, 3, replace=False)] *= gain
    dense = {f"w{i}": rng.standard_normal((D, D)) / D**0.5 for i in range(1, 5)}
    arrays = {"gamma": gamma, "beta": rng.standard_normal(D) * 0.1, "b2": rng.standard_normal(D), **dense}
    shapes = {"flat": np.array([-1, D], np.int64), "back": np.array([1, 10, D], np.int64)}
    return {**{k: v.astype(np.float32) for k, v in arrays.items()}, "eps": np.float32(1e-5), **shapes}


def net(body: str, given_weights: dict[str, Any] | None = None, outputs: str = "float[1,10,32] y") -> onnx.ModelProto:
    used = {k: v for k, v in (given_weights or weights()).items() if k in body.replace("(", " ").replace(")", " ")}
    opset = 23 if "RMSNormalization" in body else 17
    return prepared(parse(f"net (float[1,10,{D}] x) => ({outputs}) {{ {body} }}", used, opset=opset))


def feeds(count: int = 4, seed: int = 1) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [{"x": rng.standard_normal((1, 10, D)).astype(np.float32)} for _ in range(count)]


def smoothed(model: onnx.ModelProto, **options: Any) -> Smoothed:
    insert = options.get("insert")
    wanted = values_for_smoothing(LiveGraph(model), nodes=options.get("nodes"), insert=insert)
    return smooth(model, peaks=channel_statistics(model, feeds(), wanted), **options)


def check_exact(model: onnx.ModelProto, result: Smoothed) -> None:
    before, after = (np.stack(first(m, feeds(seed=5))) for m in (model, result.model))
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-5 * np.abs(before).max())


@pytest.mark.parametrize("norm", INSTALLED)
@pytest.mark.parametrize("reader", READERS)
def test_folded_into_what_is_before(norm: str, reader: str) -> None:
    model = net(f"{NORMS[norm]}\n{READERS[reader]}")
    result = smoothed(model)
    (done,) = result.layers
    assert (done.value, len(done.layers)) == ("n", 2 if reader == "two linears" else 1)
    assert done.gain_db > 5
    assert [n.op_type for n in result.model.graph.node] == [n.op_type for n in model.graph.node]
    assert len(result.notes) == 1
    check_exact(model, result)


@given(st.sampled_from(INSTALLED), st.floats(1, 300), st.sampled_from(ALPHAS), st.integers(0, 99))
def test_exact_in_float(norm: str, gain: float, alpha: Any, seed: int) -> None:
    model = net(f"{NORMS[norm]}\n{READERS['two linears']}", weights(gain, seed))
    check_exact(model, smoothed(model, alpha=alpha))


@pytest.mark.parametrize(("body", "values"), [
    ("h = MatMul (x, w1)\n r = Relu (h)\n y = MatMul (r, w2)", ["r"]),
    ("h = MatMul (x, w1)\n a = Add (h, b2)\n r = LeakyRelu (a)\n y = MatMul (r, w2)", ["r"]),
    ("g = MatMul (x, w1)\n s = Sigmoid (g)\n u = MatMul (x, w2)\n h = Mul (s, u)\n y = MatMul (h, w3)", ["h"]),
    ("h = MatMul (x, w1)\n r = Tanh (h)\n y = MatMul (r, w2)", []),
    ("h = MatMul (x, w1)\n s = Softmax (h)\n p = Add (h, s)\n y = MatMul (p, w2)", []),
])  # fmt: skip
def test_folded_into_the_linear_layer_before(body: str, values: list[str]) -> None:
    arrays = weights()
    arrays["w1"][:, :2] *= 40.0  # outlier channels of the first layer's output
    arrays["w2"][:, 5] *= 40.0
    model = net(body, arrays)
    result = smoothed(model)
    assert [done.value for done in result.layers] == values
    check_exact(model, result)


NORMED = f"{NORMS['layer norm']}\n a = MatMul (n, w1)\n "


@pytest.mark.parametrize(("body", "options"), [
    (f"{NORMED} y = Add (a, n)", {"insert": False}),  # a residual reads it
    (f"{NORMED} y = Add (a, b2)", {"nodes": ["other"]}),
    ("y = MatMul (x, w1)", {}),
    (f"{NORMS['layer norm']}\n t = Transpose <perm = [0, 2, 1]> (n)\n y = MatMul (t, w)", {}),
])  # fmt: skip
def test_left_alone(body: str, options: dict[str, Any]) -> None:
    arrays = {**weights(), "w": np.zeros((10, 32), np.float32)}
    model = net(body, arrays, "float[1,32,32] y" if "Transpose" in body else "float[1,10,32] y")
    result = smoothed(model, **options)
    assert result.layers == result.notes == ()
    assert result.model == model


def rounding_noise(model: onnx.ModelProto) -> float:
    """Power of what 8 bits change of the products behind a norm, as a share of theirs."""
    x = np.concatenate([feed["x"] for feed in feeds(seed=7)]).astype(np.float64)
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    n, share = x * array(model.graph.initializer, "gamma") + array(model.graph.initializer, "beta"), 0.0
    step = (n.max() - n.min()) / 255
    for name in ("w1", "w2"):
        w = array(model.graph.initializer, name).astype(np.float64)
        steps = np.abs(w).max(axis=0) / 127
        off = (np.round(n / step) * step) @ (np.round(w / steps) * steps) - n @ w
        share += float((off**2).mean() / ((n @ w) ** 2).mean())
    return share


@pytest.mark.parametrize("gain", [3.0, 30.0, 100.0])
def test_the_gain_is_as_predicted(gain: float) -> None:
    model = net(f"{NORMS['layer norm']}\n{READERS['two linears']}", weights(gain))
    result = smoothed(model)
    gained = 10 * np.log10(rounding_noise(model) / rounding_noise(result.model))
    assert gained == pytest.approx(result.layers[0].gain_db, abs=1.0)


def test_auto_asks_for_a_gain_and_a_number_does_not() -> None:
    arrays = weights()
    arrays["gamma"][:] = 1.0
    model = net(f"{NORMS['layer norm']}\n{READERS['two linears']}", arrays)
    peaks = channel_statistics(model, feeds(), values_for_smoothing(LiveGraph(model)))
    (fixed,) = smooth(model, peaks=peaks, alpha=0.0).layers  # moves the weights' difficulty to the activations
    assert fixed.alpha == 0.0
    assert all(done.gain_db > 0.45 for done in smooth(model, peaks=peaks).layers)


@pytest.mark.parametrize("insert", [True, None])
def test_a_mul_where_nothing_takes_it(insert: bool | None) -> None:
    model = net(f"{NORMED} b = MatMul (n, w2)\n c = Add (a, b)\n y = Add (c, n)")
    assert values_for_smoothing(LiveGraph(model), insert=False) == {}
    result = smoothed(model, insert=insert)
    assert [n.op_type for n in result.model.graph.node].count("Mul") == 1
    assert result.layers[0].gain_db > 5
    onnx.checker.check_model(result.model)
    check_exact(model, result)


def test_weights_shared_with_others_are_not_changed() -> None:
    more = "m = LayerNormalization <axis = -1> (a, gamma, beta)\n s = Sigmoid (m)\n b = MatMul (s, w1)\n y = Add (b, m)"
    model = net(NORMED + more)
    result = smoothed(model)
    assert [done.value for done in result.layers] == ["n"]
    for name in ("w1", "gamma"):
        np.testing.assert_array_equal(array(result.model.graph.initializer, name), weights()[name])
    check_exact(model, result)


def test_dead_channels() -> None:
    arrays = weights()
    arrays["gamma"][4] = arrays["beta"][4] = 0.0
    arrays["w1"][7] = 0.0
    model = net(f"{NORMED} y = Add (a, b2)", arrays)
    result = smoothed(model)
    factors = result.rescaled["n"].factors
    assert factors[4] == factors[7] == 1.0
    check_exact(model, result)
