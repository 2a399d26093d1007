"""MinMax ranges are stock's, bit for bit; what stock gets wrong is right."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from kenosis_ort.calibration import CalibrationConfig, collect
from kenosis_ort.errors import CalibrationError
from tests import models
from tests.calibration.support import ListReader, node_outputs, one_node_model, random_feeds, stock

NETS = ["residual_block", "mobile_block", "silu_net", "bn_net", "two_input_detector", "mlp", "concat_net"]


def same_as_stock(theirs: Any, ours: Any) -> None:
    for name in theirs:
        for end in ("lowest", "highest"):
            a, b = getattr(theirs[name], end), getattr(ours[name], end)
            assert (a.dtype, a.shape) == (b.dtype, b.shape), name
            np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize(
    ("options", "stride"),
    [
        ({}, None),
        ({"symmetric": True}, None),
        ({}, 3),
        ({"moving_average": True}, None),
        ({"moving_average": True, "averaging_constant": 0.3}, 3),
        ({"moving_average": True, "averaging_constant": 0.3, "symmetric": True}, 2),
    ],
)
def test_equals_stock_bit_for_bit(net: str, options: dict[str, Any], stride: int | None) -> None:
    model = models.ALL[net]()
    samples = models.feeds(model, 6)
    theirs = stock(model, samples, stride=stride, **options)
    config = CalibrationConfig(strided=stride, bit_exact=True, **options)
    ours = collect(model, ListReader(samples), tensors=list(theirs.keys()), config=config, threads=1)
    same_as_stock(theirs, ours.to_tensors_data())


@pytest.mark.parametrize("net", NETS)
def test_optimized_session_differs_by_rounding_only(net: str) -> None:
    model = models.ALL[net]()
    samples = models.feeds(model, 3)
    theirs = stock(model, samples)
    ours = collect(model, ListReader(samples), tensors=list(theirs.keys()), threads=1)
    for name in theirs:
        low, high = ours.range_of(name)
        margin = 1e-5 * max(abs(low), abs(high))
        assert float(theirs[name].lowest[0]) == pytest.approx(low, abs=margin)
        assert float(theirs[name].highest[0]) == pytest.approx(high, abs=margin)


@pytest.mark.parametrize("count", [1, 7, 40, 300])
def test_mean_of_many_samples_is_summed_as_stock_sums_it(count: int) -> None:
    model, samples = one_node_model(), random_feeds(count)
    theirs = stock(model, samples, moving_average=True)
    config = CalibrationConfig(moving_average=True, bit_exact=True)
    same_as_stock(theirs, collect(model, samples, tensors=list(theirs.keys()), config=config).to_tensors_data())


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_max_intermediate_outputs_loses_no_data(limit: int) -> None:
    """Stock drops every full chunk; here the range is that of all samples."""
    model, samples = one_node_model(), random_feeds(5)[::-1]  # the largest come first, and would be lost
    config = CalibrationConfig(max_intermediate_outputs=limit)
    table = collect(model, samples, tensors=["y"], config=config)
    everything = np.concatenate([s["x"].ravel() for s in samples])
    assert table.range_of("y") == (everything.min(), everything.max())


def test_max_intermediate_outputs_chunks_the_moving_average_like_a_stride() -> None:
    model, samples = one_node_model(), random_feeds(6)
    common = {"moving_average": True, "averaging_constant": 0.25}
    by_limit = collect(model, samples, tensors=["y"], config=CalibrationConfig(max_intermediate_outputs=2, **common))
    by_stride = collect(model, ListReader(samples), tensors=["y"], config=CalibrationConfig(strided=2, **common))
    assert by_limit.range_of("y") == by_stride.range_of("y")


def test_float16_is_stock_in_type_and_value() -> None:
    model = one_node_model(element_type=TensorProto.FLOAT16)
    samples = [{"x": f["x"].astype(np.float16)} for f in random_feeds(5)]
    for options in ({}, {"moving_average": True}):
        theirs = stock(model, samples, **options)
        config = CalibrationConfig(bit_exact=True, **options)
        same_as_stock(theirs, collect(model, samples, tensors=["x", "y", "z"], config=config).to_tensors_data())


def test_zero_size_tensors_count_for_nothing() -> None:
    model = one_node_model()
    full = {"x": np.array([[1.0, -2.0]], np.float32)}
    empty = {"x": np.zeros((0, 2), np.float32)}
    for config in (CalibrationConfig(), CalibrationConfig(moving_average=True), CalibrationConfig(method="percentile")):
        mixed = collect(model, [empty, full, empty], tensors=["x", "y"], config=config)
        alone = collect(model, [full], tensors=["x", "y"], config=config)
        assert mixed.samples == 3
        for name in ("x", "y"):
            assert mixed.range_of(name) == alone.range_of(name)
            assert mixed.tensors[name].count == 2
        nothing = collect(model, [empty], tensors=["x", "y"], config=config)
        assert nothing.range_of("y") == (0.0, 0.0)
        assert nothing.tensors["y"].count == 0


def test_scalars() -> None:
    model = one_node_model("ReduceSum", keepdims=0)
    table = collect(model, random_feeds(3), tensors=["y", "z"])
    sums = [float(f["x"].sum()) for f in random_feeds(3)]
    assert table.range_of("y") == pytest.approx((min(sums), max(sums)), rel=1e-5)
    assert table.tensors["y"].count == 3


def test_dynamic_shapes_from_sample_to_sample() -> None:
    rng = np.random.default_rng(0)
    samples = [{"x": rng.standard_normal((n, 4)).astype(np.float32)} for n in (1, 9, 3)]
    everything = np.concatenate([s["x"] for s in samples])
    for config in (CalibrationConfig(), CalibrationConfig(method="percentile", percentile=100)):
        table = collect(one_node_model(), samples, tensors=["y"], config=config)
        assert (table.tensors["y"].low, table.tensors["y"].high) == (everything.min(), everything.max())
        assert table.tensors["y"].count == everything.size


def test_inputs_outputs_and_constants_can_be_observed() -> None:
    model = models.residual_block()
    weight = model.graph.initializer[0]
    samples = models.feeds(model, 2)
    head = model.graph.output[0].name
    table = collect(model, samples, tensors=[weight.name, "x", head])
    assert list(table.tensors) == [weight.name, "x", head]
    values = onnx.numpy_helper.to_array(weight)
    assert table.range_of(weight.name) == (values.min(), values.max())
    fed = np.stack([s["x"] for s in samples])
    assert table.range_of("x") == (fed.min(), fed.max())


def test_integer_tensors_are_left_out() -> None:
    model = models.transformer_block()
    table = collect(model, models.feeds(model, 2), tensors=node_outputs(model))
    assert "ids" not in table
    assert all(s.dtype == "float32" for s in table.tensors.values())


def test_types_are_asked_of_the_runtime_where_annotations_lack() -> None:
    model = one_node_model(annotate=False)
    assert not model.graph.value_info
    for method in ("minmax", "percentile"):
        table = collect(model, random_feeds(2), tensors=["y"], config=CalibrationConfig(method=method))
        assert table.tensors["y"].count == 30


@pytest.mark.parametrize("method", ["minmax", "percentile"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("tensors", [["x"], ["y", "z"], ["z", "x"]])
def test_not_finite_is_an_error_that_names_tensor_and_sample(method: str, bad: float, tensors: list[str]) -> None:
    samples = random_feeds(4, (30, 40))
    samples[2]["x"][7, 7] = bad
    with pytest.raises(CalibrationError, match="sample 2") as caught:
        collect(one_node_model(), samples, tensors=tensors, config=CalibrationConfig(method=method))
    assert caught.value.where is not None
    assert "'x'" in caught.value.where  # the input itself, whichever tensors are observed


def test_the_first_tensor_in_graph_order_is_named() -> None:
    net = models.Net()
    x = net.input("x", ["N"])
    net.output(net.op("Exp", [net.op("Log", [x], name="log", out="log")], name="exp", out="exp"), ["N"])
    samples = [{"x": np.array([1.0, -1.0], np.float32)}]
    with pytest.raises(CalibrationError, match="tensor 'log'"):
        collect(net.model(), samples, tensors=["exp", "log"])


def test_a_mean_that_overflows_is_no_error() -> None:
    samples = [{"x": np.full((4, 64), 3e38, np.float32)}]
    table = collect(one_node_model(), samples, tensors=["y"])
    assert table.range_of("y") == (np.float32(3e38), np.float32(3e38))


def test_model_without_inputs_runs_once() -> None:
    graph = helper.make_graph(
        [helper.make_node("Constant", [], ["c"], value_floats=[1.0, 5.0]), helper.make_node("Neg", ["c"], ["y"])],
        "g",
        [],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    table = collect(model, ListReader([]), tensors=["y"])
    assert table.samples == 1
    assert table.range_of("y") == (-5.0, -1.0)


def test_the_model_and_the_feeds_are_not_changed() -> None:
    model = models.residual_block()
    before = model.SerializeToString()
    samples = models.feeds(model, 2)
    copies = [{k: v.copy() for k, v in s.items()} for s in samples]
    for method in ("minmax", "percentile"):
        collect(model, samples, tensors=node_outputs(model), config=CalibrationConfig(method=method))
    assert model.SerializeToString() == before
    for a, b in zip(samples, copies, strict=True):
        np.testing.assert_array_equal(a["x"], b["x"])
