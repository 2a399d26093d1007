"""Readers as users write them, and what is said about wrong data."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from onnxruntime.quantization import CalibrationDataReader

from kenosis_ort.calibration import sample_feeds
from kenosis_ort.calibration.feeds import InputSpec, check_feed
from kenosis_ort.errors import CalibrationError
from tests import models
from tests.calibration.support import ListReader, one_node_model, random_feeds, swept
from tests.planning import parse

METHODS = pytest.mark.parametrize("method", ["minmax", "percentile"])


def run(reader: Any, *, model: Any = None, tensors: tuple[str, ...] = ("y",), **options: Any) -> Any:
    return swept(one_node_model() if model is None else model, reader, tensors, **options)


@METHODS
def test_one_pass_over_a_one_shot_reader(method: str) -> None:
    model = models.residual_block()
    reader = models.reader(model, 5)
    assert (run(reader, model=model, tensors=("x",), method=method).samples, reader.handed_out) == (5, 5)


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


@pytest.mark.parametrize(("reader", "total"), [(ListReader, 3), (models.FeedReader, None)])
def test_progress(reader: Any, total: int | None) -> None:
    seen: list[tuple[int, int | None]] = []
    run(reader(random_feeds(3)), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, total) for done in range(4)]


@METHODS
def test_a_runtime_value_as_feed(method: str) -> None:
    samples = random_feeds(3)
    values = [{"x": ort.OrtValue.ortvalue_from_numpy(s["x"])} for s in samples]
    assert run(samples, tensors=("x", "y"), method=method) == run(values, tensors=("x", "y"), method=method)


@pytest.mark.parametrize("empty", [[], ListReader([]), models.FeedReader([]), iter(())])
def test_nothing_to_read(empty: Any) -> None:
    with pytest.raises(CalibrationError, match=r"No data is collected.*get_next.*rewound"):
        run(empty)


@pytest.mark.parametrize(
    ("reader", "match"),
    [
        *((reader, "get_next") for reader in (3, None, "path", {"x": 1})),
        ([random_feeds(1)[0], [1, 2]], r"list, not a dictionary.*sample 1"),
    ],
)
def test_no_reader_and_no_feed(reader: Any, match: str) -> None:
    with pytest.raises(CalibrationError, match=match):
        run(reader)


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


@pytest.mark.parametrize(
    ("model", "feed", "match"),
    [
        (models.two_input_detector, "scale_factor", "lacks the input 'scale_factor'"),
        (
            models.residual_block,
            np.zeros((1, 8, 8, 3)),
            r"got float32 of shape \(1, 8, 8, 3\).*transpose\(0, 3, 1, 2\)",
        ),
    ],
)
def test_a_missing_input_and_channels_last_by_mistake(model: Any, feed: Any, match: str) -> None:
    net = model()
    feeds = models.feeds(net, 1)
    if isinstance(feed, str):
        del feeds[0][feed]
    else:
        feeds = [{"x": feed.astype(np.float32)}]
    with pytest.raises(CalibrationError, match=match):
        swept(net, feeds)


@METHODS
def test_a_model_that_fails_on_a_sample(method: str) -> None:
    model = parse("g (float[N,M] x) => (float[P] z) <int64[1] shape = {15}> { y = Reshape (x, shape)  z = Neg (y) }")
    samples = [*random_feeds(1), {"x": np.zeros((2, 3), np.float32)}]
    with pytest.raises(CalibrationError, match=r"float model fails.*sample 1"):
        run(samples, model=model, method=method)


def test_unknown_tensors_and_a_model_the_runtime_refuses() -> None:
    with pytest.raises(CalibrationError, match="tensor 'layer_1'"):
        run(random_feeds(1), tensors=("layer_1",))
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


@METHODS
def test_inputs_with_a_default_need_not_be_fed(method: str) -> None:
    model = parse("g (float[2] x, float[2] d) => (float[2] y) { y = Add (x, d) }", ir_version=8)
    model.graph.initializer.append(helper.make_tensor("d", TensorProto.FLOAT, [2], [1.0, 2.0]))
    x = np.zeros(2, np.float32)
    assert run([{"x": x}], model=model, method=method).tensors["y"].high == 2.0
    assert run([{"x": x, "d": x}], model=model, method=method).tensors["y"].high == 0.0
