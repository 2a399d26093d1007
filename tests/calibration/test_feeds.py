"""Readers as users write them, and what is said about wrong data."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from onnxruntime.quantization import CalibrationDataReader

from kenosis_ort.calibration import CalibrationConfig, collect, sample_feeds
from kenosis_ort.calibration.feeds import InputSpec, check_feed
from kenosis_ort.errors import CalibrationError
from tests import models
from tests.calibration.support import ListReader, one_node_model, random_feeds

METHODS = pytest.mark.parametrize("method", ["minmax", "percentile"])


def run(reader: Any, *, model: Any = None, tensors: tuple[str, ...] = ("y",), **options: Any) -> Any:
    config = CalibrationConfig(**options)
    return collect(one_node_model() if model is None else model, reader, tensors=tensors, config=config, threads=1)


@METHODS
def test_one_pass_over_a_one_shot_reader(method: str) -> None:
    model = models.residual_block()
    reader = models.reader(model, 5)
    table = collect(model, reader, tensors=["x"], config=CalibrationConfig(method=method))
    assert (reader.handed_out, table.samples) == (5, 5)


def test_iterables_will_do_too() -> None:
    samples = random_feeds(3)
    ranges = {run(r).range_of("y") for r in (samples, iter(samples), (s for s in samples), ListReader(samples))}
    assert len(ranges) == 1
    assert list(sample_feeds(ListReader(samples))) == samples


@METHODS
def test_feeds_are_not_kept(method: str) -> None:
    alive: list[int] = []
    references: list[weakref.ref[Any]] = []

    def make() -> Iterator[dict[str, Any]]:
        for _ in range(8):
            array = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
            references.append(weakref.ref(array))
            yield {"x": array}
            del array
            gc.collect()
            alive.append(sum(r() is not None for r in references))

    run(make(), method=method)
    assert max(alive) <= 2


def test_progress() -> None:
    seen: list[tuple[int, int | None]] = []
    model, samples = one_node_model(), random_feeds(3)
    collect(model, ListReader(samples), tensors=["y"], progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]
    seen.clear()
    collect(model, models.FeedReader(samples), tensors=["y"], progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, None), (1, None), (2, None), (3, None)]


def test_a_runtime_value_as_feed() -> None:
    samples = random_feeds(3)
    values = [{"x": ort.OrtValue.ortvalue_from_numpy(s["x"])} for s in samples]
    for method in ("minmax", "percentile"):
        a, b = (run(r, tensors=("x", "y"), method=method) for r in (samples, values))
        assert a.range_of("x") == b.range_of("x")
        assert a.range_of("y") == b.range_of("y")
        assert a.data_fingerprint == b.data_fingerprint


@pytest.mark.parametrize("empty", [[], ListReader([]), models.FeedReader([]), iter(())])
def test_nothing_to_read(empty: Any) -> None:
    with pytest.raises(CalibrationError, match="No data is collected") as caught:
        run(empty)
    assert "get_next" in str(caught.value.fix)


def test_an_exhausted_reader() -> None:
    reader = models.FeedReader(random_feeds(2))
    run(reader)
    with pytest.raises(CalibrationError, match="rewound"):
        run(reader)


@pytest.mark.parametrize("reader", [3, None, "path", {"x": 1}])
def test_no_reader_at_all(reader: Any) -> None:
    with pytest.raises(CalibrationError, match="get_next"):
        run(reader)


def test_a_feed_that_is_no_dictionary() -> None:
    with pytest.raises(CalibrationError, match=r"list, not a dictionary.*sample 1"):
        run([random_feeds(1)[0], [1, 2]])


@pytest.mark.parametrize(
    ("feed", "match"),
    [
        ({"X1": np.zeros((2, 3), np.float32)}, "lacks|Did you mean"),
        ({"x": np.zeros((2, 3), np.float32), "xx": 1}, "'xx' that the model lacks. Did you mean 'x'"),
        ({"x": np.zeros((2, 3), np.uint8)}, "expected float32 of shape .N, M., got uint8.*astype.numpy.float32"),
        ({"x": np.full((2, 3), 1e300)}, "expected float32.*got float64"),
        ({"x": [["a"]]}, "expected float32.*got <U1"),
        ({"x": [[1.0, 2.0], [3.0]]}, "is no array: .*inhomogeneous"),
        ({"x": np.zeros(3, np.float32)}, "wrong shape.*batch axis"),
        ({"x": [1.0, 2.0]}, "wrong shape.*got float32 of shape .2,.*batch axis"),
    ],
)
@METHODS
def test_wrong_feeds(feed: dict[str, Any], match: str, method: str) -> None:
    with pytest.raises(CalibrationError, match=match) as caught:
        run([random_feeds(1)[0], feed], method=method)
    assert "sample 1" in str(caught.value.where)


SPEC_OF_IDS = InputSpec("ids", np.dtype("int64"), (None, 3))
SPEC_OF_X = InputSpec("x", np.dtype("float32"), (1, "M"))


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        (SPEC_OF_IDS, [[1, 2, 3]]),
        (SPEC_OF_IDS, [np.array([1, 2, 3], np.int32)]),
        (SPEC_OF_IDS, np.array([[1, 2, 3]], np.uint8)),
        (SPEC_OF_IDS, ort.OrtValue.ortvalue_from_numpy(np.array([[1, 2, 3]], np.int64))),
        (SPEC_OF_X, [[1, 2, 3]]),
        (SPEC_OF_X, [(1.0, 2.0, 3.0)]),
        (SPEC_OF_X, np.array([[1.0, 2.0, 3.0]])),
        (SPEC_OF_X, np.array([[1.0, 2.0, 3.0]], np.float16)),
        (InputSpec("b", np.dtype("bool"), (1, 3)), [[1, 2, 3]]),
        (InputSpec("b", np.dtype("int32"), None), np.array([[1, 2, 3]], np.int64)),
    ],
)
def test_values_become_the_models_type_where_that_keeps_them(spec: InputSpec, value: Any) -> None:
    (made,) = check_feed({spec.name: value}, [spec], [], 0).values()
    assert isinstance(made, np.ndarray)
    assert made.dtype == spec.dtype
    assert made.tolist() == np.array([[1, 2, 3]]).astype(made.dtype).tolist()


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("int32", np.array([2**40])),
        ("uint8", [-1]),
        ("int64", np.array([1.0], np.float32)),
        ("int64", [1.5]),
        ("bool", np.array([1], np.int64)),
        ("float32", np.array([True])),
    ],
)
def test_values_that_would_change_are_refused(dtype: str, value: Any) -> None:
    with pytest.raises(CalibrationError, match=f"wrong type: expected {dtype}.*input 'v', sample 7"):
        check_feed({"v": value}, [InputSpec("v", np.dtype(dtype), None)], [], 7)


def test_infinity_in_a_wider_float_stays_infinity() -> None:
    fed = {"v": np.array([np.inf, np.nan, 1.0])}
    (made,) = check_feed(fed, [InputSpec("v", np.dtype("float32"), None)], [], 0).values()
    np.testing.assert_array_equal(made, fed["v"].astype(np.float32))


class Failing(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, error: BaseException) -> None:
        self.error, self.left = error, random_feeds(2)

    def get_next(self) -> Any:
        if not self.left:
            raise self.error
        return self.left.pop()


def test_a_reader_that_raises() -> None:
    cause = KeyError("pixel_values")
    with pytest.raises(CalibrationError, match=r"reader failed: KeyError: 'pixel_values'\..*sample 2") as caught:
        run(Failing(cause))
    assert caught.value.__cause__ is cause

    def generator() -> Iterator[Any]:
        yield from random_feeds(1)
        raise OSError("disk gone")

    with pytest.raises(CalibrationError, match=r"OSError: disk gone.*sample 1"):
        run(generator())


def test_what_a_reader_raises_on_purpose_goes_through() -> None:
    with pytest.raises(CalibrationError, match=r"^my own words"):
        run(Failing(CalibrationError("my own words")))
    with pytest.raises(KeyboardInterrupt):
        run(Failing(KeyboardInterrupt()))


def test_a_bare_next_in_a_reader_ends_the_data() -> None:
    assert run(Failing(StopIteration())).samples == 2


def test_a_missing_input() -> None:
    model = models.two_input_detector()
    feed = models.feeds(model, 1)[0]
    del feed["scale_factor"]
    with pytest.raises(CalibrationError, match="lacks the input 'scale_factor'"):
        collect(model, [feed], tensors=["image"])


def test_channels_last_by_mistake() -> None:
    model = models.residual_block()
    with pytest.raises(CalibrationError, match=r"got float32 of shape \(1, 8, 8, 3\).*transpose\(0, 3, 1, 2\)"):
        collect(model, [{"x": np.zeros((1, 8, 8, 3), np.float32)}], tensors=["x"])


@METHODS
def test_a_model_that_fails_on_a_sample(method: str) -> None:
    model = one_node_model("Reshape", annotate=False)
    model.graph.node[0].input.append("shape")
    model.graph.initializer.append(helper.make_tensor("shape", TensorProto.INT64, [1], [15]))
    samples = [*random_feeds(1), {"x": np.zeros((2, 3), np.float32)}]
    with pytest.raises(CalibrationError, match=r"float model fails.*sample 1"):
        run(samples, model=model, method=method)


def test_unknown_tensor() -> None:
    with pytest.raises(CalibrationError, match="tensor 'layer_1'"):
        run(random_feeds(1), tensors=("layer_1",))


def test_a_model_the_runtime_refuses() -> None:
    model = one_node_model()
    model.graph.node[0].op_type = "NoSuchOp"
    with pytest.raises(CalibrationError, match="custom_op_libraries"):
        run(random_feeds(1), model=model)


def test_stride_needs_length_range_and_a_divisor() -> None:
    samples = random_feeds(4)
    with pytest.raises(CalibrationError, match="not divisible"):
        run(ListReader(samples), strided=3)
    with pytest.raises(CalibrationError, match="__len__"):
        run(models.FeedReader(samples), strided=2)

    class NoRange(CalibrationDataReader):  # type: ignore[misc]
        def __len__(self) -> int:
            return 4

        def get_next(self) -> None:
            return None

    with pytest.raises(CalibrationError, match="set_range"):
        run(NoRange(), strided=2)


def test_inputs_with_a_default_need_not_be_fed() -> None:
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "d"], ["y"])],
        "g",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in ("x", "d")],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
        [helper.make_tensor("d", TensorProto.FLOAT, [2], [1.0, 2.0])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    x = np.zeros(2, np.float32)
    for method in ("minmax", "percentile"):
        assert run([{"x": x}], model=model, method=method).tensors["y"].high == 2.0
        assert run([{"x": x, "d": x}], model=model, method=method).tensors["y"].high == 0.0
