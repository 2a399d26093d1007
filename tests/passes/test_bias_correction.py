from __future__ import annotations

import numpy as np
import pytest

from kenosis_ort.accuracy.channel_statistics import certain_mean
from kenosis_ort.passes import correct_biases
from kenosis_ort.passes.contract import materialize
from kenosis_ort.passes.correct_biases import FloatMeans, bias_shifts, chosen_feeds, with_biases, with_shifts
from kenosis_ort.runtime.session import counted
from tests import models, planning
from tests.models import Net
from tests.passes.support import change, first, noise


def means(model, feeds):
    outputs = np.concatenate(first(model, feeds))
    return outputs.mean(axis=tuple(i for i in range(outputs.ndim) if i != 1))


def biased_weights(net, *names):
    """Rounds weights down a little: a quantizer whose error has a mean, as clipped ranges and coarse scales have."""
    for name in names:
        change(net.graph.initializer, name, lambda w: w - 0.02 * np.abs(w).max())


def chain(act):
    net = Net(seed=1)
    y = net.op("Abs", [net.input("x", ["n", 4, 8, 8])])
    for at in range(3):
        y = net.conv(y, 4 if at == 0 else 8, 8, name=f"c{at}")
        y = {
            "relu": lambda y: net.op("Relu", [y]),
            "silu": lambda y: net.op("Mul", [y, net.op("Sigmoid", [y])]),
            "none": lambda y: y,
        }[act](y)
    net.output(net.conv(y, 8, 4, k=1, name="last"))
    return planning.prepared(net.model())


@pytest.mark.parametrize("act", ["relu", "silu", "none"])
def test_each_layer_is_corrected_with_those_before_it_corrected(act):
    """The damaged model stands for a quantized one: float kernels, weights with an error that has a mean."""
    model = chain(act)
    feeds = models.feeds(model, 16, seed=2)
    damaged = planning.prepared(model)
    biased_weights(damaged, "c0_w", "c1_w", "c2_w")
    shifts = bias_shifts(model, damaged, feeds, threads=1)
    assert list(shifts) == ["c0", "c1", "c2", "last"]
    corrected = materialize(damaged, with_shifts(damaged, shifts))
    held_out = models.feeds(model, 16, seed=3)
    assert noise(model, corrected, held_out) < noise(model, damaged, held_out) / 4
    spread = np.abs(means(model, held_out)).max()
    assert np.abs(means(corrected, held_out) - means(model, held_out)).max() < 0.05 * spread


def test_a_quantized_model_gets_closer_to_its_float_model():
    model = with_biases(chain("relu"))
    fit, held_out = models.feeds(model, 16, seed=4), models.feeds(model, 16, seed=5)
    outcome = planning.quantize(model, feeds=fit)
    shifts = bias_shifts(outcome.model, outcome.quantized, fit, threads=1)
    corrected = planning.quantize(materialize(outcome.model, with_shifts(outcome.model, shifts)), feeds=fit)
    assert noise(model, corrected.quantized, held_out) < noise(model, outcome.quantized, held_out)


@pytest.mark.parametrize("act", ["relu", "silu", "none"])
def test_one_run_of_all_samples_finds_what_a_run_of_each_finds(act, monkeypatch):
    model, feeds = chain(act), models.feeds(chain(act), 8, seed=2)
    damaged = planning.prepared(model)
    biased_weights(damaged, "c0_w", "c1_w", "c2_w")
    with counted() as counts:
        together = bias_shifts(model, damaged, feeds, threads=1)
    # the float model on each sample, and on two stacked; the quantized one on all
    assert (counts.total.sessions, counts.total.runs) == (2, len(feeds) + 1 + 1)
    monkeypatch.setattr(correct_biases, "shifts_in_one_run", lambda *_, **__: None)
    one_by_one = bias_shifts(model, damaged, feeds, threads=1)
    assert together.keys() == one_by_one.keys()
    for layer, shift in one_by_one.items():
        np.testing.assert_allclose(together[layer], shift, rtol=1e-3, atol=2e-5 * np.abs(shift).max())


def test_means_of_the_float_model_are_computed_once_for_the_same_samples():
    model, feeds = chain("relu"), models.feeds(chain("relu"), 8, seed=2)
    damaged = planning.prepared(model)
    biased_weights(damaged, "c1_w")
    known = FloatMeans()
    first = bias_shifts(model, damaged, feeds, nodes={"c0", "c1"}, float_means=known)
    with counted() as counts:
        again = bias_shifts(model, damaged, feeds, nodes={"c0", "c1"}, float_means=known)
    assert (counts.total.sessions, counts.total.runs) == (1, 1)
    more = bias_shifts(model, damaged, feeds, float_means=known)  # of more layers, some of them known
    others = bias_shifts(model, damaged, feeds[::2], float_means=known)
    for found, expected in (
        (again, first),
        (more, bias_shifts(model, damaged, feeds)),
        (others, bias_shifts(model, damaged, feeds[::2])),
    ):
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[layer], expected[layer]) for layer in expected)


def mixing_rows():
    """A net whose samples cannot be stacked: their rows are mixed."""
    net = Net(seed=1)
    y = net.conv(net.op("Abs", [net.input("x", [1, 4, 8, 8])]), 4, 8, name="a")
    top = net.op("ReduceMax", [y], axes=[0, 2, 3], keepdims=1)
    net.output(net.conv(net.op("Sub", [y, top]), 8, 4, k=1, name="b"))
    return planning.prepared(net.model())


def test_samples_whose_rows_are_mixed_are_run_one_by_one():
    model = mixing_rows()
    damaged = planning.prepared(model)
    biased_weights(damaged, "b_w")
    feeds = models.feeds(model, 6)
    with counted() as counts:
        shifts = bias_shifts(model, damaged, feeds, nodes={"b"}, threads=1)
    assert counts.total.runs > 2 * len(feeds)
    off = means(model, feeds) - means(damaged, feeds)
    np.testing.assert_allclose(shifts["b"], off, atol=0.2 * np.abs(off).max())


def test_equal_models_need_no_shift():
    model = chain("silu")
    shifts = bias_shifts(model, model, models.feeds(model, 4), threads=1)
    assert all(np.abs(s).max() < 1e-5 for s in shifts.values())


def test_matmul_is_corrected_in_its_add_and_only_named_nodes_are():
    net = Net()
    y = net.linear(net.input("x", ["n", 6]), 6, 8, name="m")
    net.output(net.gemm(net.op("Relu", [y]), 8, 4, name="g"))
    model = planning.prepared(net.model())
    damaged = planning.prepared(model)
    biased_weights(damaged, "m_w")
    feeds = [{"x": np.abs(f["x"])} for f in models.feeds(model, 8, dims={"n": 4})]
    assert set(bias_shifts(model, damaged, feeds, threads=1)) == {"m", "g"}
    shifts = bias_shifts(model, damaged, feeds, nodes={"m"}, threads=1)
    assert set(shifts) == {"m"}
    assert noise(model, materialize(damaged, with_shifts(damaged, shifts)), feeds) < noise(model, damaged, feeds) / 4


def test_every_layer_gets_a_bias_of_its_own():
    net = Net()
    x = net.input("x", ["n", 4, 6, 6])
    shared = net.const(np.ones(4, np.float32), "shared")
    y = net.op("Conv", [x, net.weight((4, 4, 1, 1)), shared], name="a")
    y = net.op("Conv", [y, net.weight((4, 4, 1, 1)), shared], name="b")
    net.output(net.conv(y, 4, 4, bias=False, name="c"))
    model = planning.prepared(net.model())
    result = with_biases(model)
    biases = [node.input[2] for node in result.graph.node]
    assert len(set(biases)) == 3
    feeds = models.feeds(model, 2)
    assert noise(model, result, feeds) == 0.0
    assert with_biases(result) is result
    assert [len(node.input) for node in with_biases(model, nodes={"a"}).graph.node] == [3, 3, 2]


def test_gemm_with_beta_moves_by_the_shift():
    net = Net()
    net.output(net.gemm(net.input("x", ["n", 4]), 4, 3, name="g", beta=0.5))
    model = planning.prepared(net.model())
    feeds = models.feeds(model, 2)
    moved = materialize(model, with_shifts(model, {"g": np.array([1.0, 2.0, 3.0])}))
    np.testing.assert_allclose(means(moved, feeds) - means(model, feeds), [1, 2, 3], rtol=1e-5)


def test_chance_is_not_corrected():
    rng = np.random.default_rng(0)
    noisy = certain_mean(rng.normal(0, 1, (16, 200)))
    assert np.mean(noisy == 0.0) > 0.5
    np.testing.assert_allclose(certain_mean(np.full((16, 3), 2.0)), 2.0)
    np.testing.assert_array_equal(certain_mean(np.array([[1.0, -1.0]])), [1.0, -1.0])


def test_feeds_are_chosen_by_their_cost():
    model = chain("relu")
    small = models.feeds(model, 200)
    assert len(chosen_feeds(model, small, ["c0_out"])) == 128
    batches = models.feeds(model, 10, dims={"n": 50})
    assert len(chosen_feeds(model, batches, ["c0_out"])) == 2
    assert chosen_feeds(model, [], ["c0_out"]) == []
