"""Made-up data: natural-looking, deterministic, and refused where an input is not understood."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnxruntime.quantization import CalibrationDataReader

from kenosis_ort.calibration import CalibrationConfig, Points, collect
from kenosis_ort.calibration.feeds import Known
from kenosis_ort.calibration.synthetic import SyntheticReader
from kenosis_ort.errors import CalibrationError
from tests import models
from tests.calibration.support import node_outputs
from tests.calibration.synthetic.support import model_of
from tests.downloaded import ZOO


@pytest.mark.parametrize("net", sorted(models.ALL.keys() - {"net_with_if"}))
def test_every_shared_net_gets_data_that_it_takes(net: str) -> None:
    model = models.ALL[net]()
    reader = SyntheticReader(model, samples=3)
    assert isinstance(reader, CalibrationDataReader)
    table = collect(model, reader, Points(node_outputs(model), threads=1))
    assert table.samples == 3
    assert len(reader.assumptions) == len(model.graph.input)


def test_the_same_seed_gives_the_same_data() -> None:
    model = models.two_input_detector()
    a, b, c = (SyntheticReader(model, samples=2, seed=s) for s in (1, 1, 2))
    for index in (0, 1):
        for name, array in a.feed(index).items():
            np.testing.assert_array_equal(array, b.feed(index)[name])
    assert not np.array_equal(a.feed(0)["image"], c.feed(0)["image"])
    assert not np.array_equal(a.feed(0)["image"], a.feed(1)["image"])
    a.set_range(1, 2)
    np.testing.assert_array_equal(a.get_next()["image"], b.feed(1)["image"])  # type: ignore[index]


def test_scale_factors_and_image_sizes() -> None:
    model = model_of(
        ("image", TensorProto.FLOAT, [1, 3, 40, 60]),
        ("scale_factor", TensorProto.FLOAT, [1, 2]),
        ("im_shape", TensorProto.FLOAT, [1, 2]),
    )
    feed = SyntheticReader(model, samples=1).feed(0)
    assert feed["scale_factor"].tolist() == [[1, 1]]
    assert feed["im_shape"].tolist() == [[40, 60]]


def test_tokens_stay_within_the_table() -> None:
    table = np.zeros((17, 4), np.float32)
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["c"], to=TensorProto.INT64),
        helper.make_node("Gather", ["table", "c"], ["out"]),
    ]
    names = [
        ("input_ids", TensorProto.INT32, ["batch", "seq"]),
        ("attention_mask", TensorProto.INT64, ["batch", "seq"]),
    ]
    model = model_of(*names, nodes=nodes, constants=[("table", table)])
    feed = SyntheticReader(model, samples=1).feed(0)
    ids = feed["input_ids"]
    assert (ids.dtype, ids.shape) == (np.int32, feed["attention_mask"].shape)
    assert (ids.min() >= 0, ids.max() < 17, len(np.unique(ids)) > 5) == (True, True, True)
    assert feed["attention_mask"].all()
    padded = SyntheticReader(model, samples=8)
    feeds = [padded.feed(i) for i in range(8)]
    lengths = {int(f["attention_mask"].sum()) for f in feeds}
    assert len(lengths) > 3
    assert all(not f["input_ids"][f["attention_mask"] == 0].any() for f in feeds)
    long = SyntheticReader(model, samples=1, input_shapes={"input_ids": (2, 9)}).feed(0)
    assert {a.shape for a in long.values()} == {(2, 9)}


def test_positions_segments_rate_and_states() -> None:
    model = model_of(
        ("position_ids", TensorProto.INT64, [1, 6]),
        ("token_type_ids", TensorProto.INT64, [1, 6]),
        ("sr", TensorProto.INT64, []),
        ("state", TensorProto.FLOAT, [2, 1, 8]),
        ("attention_mask", TensorProto.BOOL, [1, 6]),
    )
    feed = SyntheticReader(model, samples=1).feed(0)
    assert feed["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5]]
    assert not feed["token_type_ids"].any()
    assert feed["sr"].shape == ()
    assert feed["sr"] == 16_000
    assert not feed["state"].any()
    assert feed["attention_mask"].dtype == np.bool_
    assert feed["attention_mask"].all()


@pytest.mark.parametrize(
    ("op", "constant", "top"),
    [("Sub", 127.5, 255.0), ("Div", 255.0, 255.0), ("Mul", 1 / 255, 255.0), ("Sub", 0.5, 1.0)],
)
def test_the_range_follows_the_graph_own_normalization(op: str, constant: float, top: float) -> None:
    nodes = [helper.make_node(op, ["image", "k"], ["out"])]
    constants = [("k", np.float32(constant))]
    model = model_of(("image", TensorProto.FLOAT, [1, 3, 32, 32]), nodes=nodes, constants=constants)
    reader = SyntheticReader(model, samples=1)
    image = reader.feed(0)["image"]
    assert image.min() >= 0
    assert 0.6 * top < image.max() <= top
    assert reader.provenance.known["image"] is Known.GRAPH


def test_pixels_in_bytes_channels_last_and_given_ranges() -> None:
    model = model_of(("image", TensorProto.UINT8, [1, 30, 30, 3]))
    image = SyntheticReader(model, samples=1).feed(0)["image"]
    assert (image.dtype, image.shape, image.max() > 200) == (np.uint8, (1, 30, 30, 3), True)
    model = model_of(("image", TensorProto.FLOAT, [1, 3, 30, 30]))
    image = SyntheticReader(model, samples=1, input_ranges={"image": (-1, 1)}).feed(0)["image"]
    assert -1 <= image.min() < -0.5
    assert 0.5 < image.max() <= 1


def test_a_range_makes_an_input_known() -> None:
    model = model_of(("mystery", TensorProto.INT64, [1, 50]))
    ids = SyntheticReader(model, input_ranges={"mystery": (3, 9)}).feed(0)["mystery"]
    assert set(np.unique(ids)) <= set(range(3, 10))
    flag = model_of(("flag", TensorProto.BOOL, []))
    assert SyntheticReader(flag, input_ranges={"flag": (1, 1)}).feed(0)["flag"].item() is True


def test_bad_arguments() -> None:
    model = models.residual_block()
    with pytest.raises(CalibrationError, match="Did you mean 'x'"):
        SyntheticReader(model, input_ranges={"xx": (0, 1)})
    with pytest.raises(CalibrationError, match="does not fit"):
        SyntheticReader(model, input_shapes={"x": (1, 4, 8, 8)})
    with pytest.raises(CalibrationError, match="not positive"):
        SyntheticReader(model, samples=0)


def test_dynamic_sizes_are_tried_until_the_model_runs() -> None:
    nodes = [helper.make_node("Reshape", ["audio", "shape"], ["out"])]
    constants = [("shape", np.array([1, 512], np.int64))]
    model = model_of(("audio", TensorProto.FLOAT, [1, "n"]), nodes=nodes, constants=constants)
    assert SyntheticReader(model, samples=1).feed(0)["audio"].shape == (1, 512)
    constants = [("shape", np.array([1, 331], np.int64))]
    model = model_of(("audio", TensorProto.FLOAT, [1, "n"]), nodes=nodes, constants=constants)
    with pytest.raises(CalibrationError, match="input_shapes"):
        SyntheticReader(model, samples=1)


@pytest.mark.skipif(not ZOO.exists(), reason="the zoo is not here")
@pytest.mark.parametrize("name", ["cifar_resnet20", "silero_vad_16k", "mlperf_kws_dscnn", "ad01_bn"])
def test_zoo(name: str) -> None:
    path = ZOO / f"{name}.onnx"
    model = onnx.load(path)
    model.ir_version = min(model.ir_version, 10)
    outputs = [v.name for v in model.graph.output]
    table = collect(
        model,
        SyntheticReader(path, samples=2),
        Points(outputs, CalibrationConfig(method="percentile"), threads=1),
    )
    assert all(table.tensors[name].count for name in outputs if name in table)
