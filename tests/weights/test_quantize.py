"""`quantize_weights` as users call it."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

import kenosis_ort
from tests import models
from tests.flow.support import changed, quality
from tests.models import FeedReader


def decoder(width: int = 64, rows: int = 50, seed: int = 0) -> onnx.ModelProto:
    """Tokens in, an embedding, three linear layers with a residual, logits out."""
    net = models.Net(seed=seed)
    ids = net.input("ids", [1, 6], TensorProto.INT64)
    x = net.op("Gather", [net.weight((rows, width), scale=1.0, name="table"), ids], name="embed")
    for i in range(3):
        y = net.op("Relu", [net.linear(x, width, width, name=f"layer{i}")])
        x = net.op("Add", [x, y])
    return net.of(net.op("MatMul", [x, net.weight((width, rows), name="head_w")], name="head"))


def feeds(count: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [{"ids": rng.integers(0, 50, (1, 6))} for _ in range(count)]


@pytest.mark.parametrize("bits", [4, 8])
def test_layers_and_embedding_have_few_bits_and_the_file_runs(tmp_path: Path, bits: int):
    model, out = decoder(), tmp_path / "out.onnx"
    before = model.SerializeToString(deterministic=True)
    report = kenosis_ort.quantize_weights(model, out, FeedReader(feeds(16)), bits=bits, protect_sensitive=False)
    assert model.SerializeToString(deterministic=True) == before
    written = [node.op_type for node in onnx.load(out).graph.node]
    assert (written.count("MatMulNBits"), written.count("GatherBlockQuantized")) == (4, 1)
    assert {layer.bits for layer in report.layers} == {bits}
    assert len(report.layers) == 5
    assert report.bytes_after == out.stat().st_size < report.bytes_before
    (compared,) = report.outputs
    assert compared.sqnr_db == pytest.approx(quality(model, out, feeds(16)[1::2]), abs=1.5)
    assert quality(model, out, feeds(8, seed=9)) > (12 if bits == 4 else 30)


@pytest.mark.parametrize(
    ("coarse", "samples", "bits"), [(False, 16, 8), (False, 0, 8), (True, 16, 4), (True, 0, 8)], ids=str
)
def test_an_embedding_has_four_bits_where_they_cost_the_outputs_little(tmp_path, coarse, samples, bits):
    """A table on a grid of 16 steps loses nothing by 4 bits, one of random numbers more than the layers behind it."""
    steps = np.random.default_rng(1).integers(0, 16, (50, 64))
    steps[:, ::32], steps[:, 1::32] = 0, 15
    model, out = changed(decoder(), table=lambda table: steps / 8 - 1 if coarse else table), tmp_path / "out.onnx"
    reader = FeedReader(feeds(samples)) if samples else None
    report = kenosis_ort.quantize_weights(model, out, reader)
    assert {layer.node: layer.bits for layer in report.layers}["embed"] == bits
    assert any("Embeddings have 8 bits" in note for note in report.notes) == (bits == 8)
    plain, others = tmp_path / "float_table.onnx", feeds(8, seed=9)
    kenosis_ort.quantize_weights(model, plain, reader, embeddings=False)
    assert quality(model, out, others) > quality(model, plain, others) - 1.5


def test_samples_make_it_better_on_others(tmp_path: Path):
    model = decoder()
    found = {}
    for name, reader in (("nearest", None), ("rounded", FeedReader(feeds(64)))):
        options = {"embeddings": False, "accuracy_level": 0, "protect_sensitive": False}
        report = kenosis_ort.quantize_weights(model, tmp_path / f"{name}.onnx", reader, **options)
        assert {layer.rounded for layer in report.layers} == {name == "rounded"}
        found[name] = quality(model, tmp_path / f"{name}.onnx", feeds(32, seed=9))
    assert found["rounded"] > found["nearest"] + 1


def test_a_layer_that_loses_much_more_than_the_others_keeps_eight_bits(tmp_path: Path):
    one_of_a_block = np.where(np.arange(64) % 16, 1, 40)[:, None]  # takes all the range
    model = changed(decoder(), head_w=one_of_a_block)
    report = kenosis_ort.quantize_weights(model, tmp_path / "out.onnx", embeddings=False, block_size=128)
    bits = {layer.node: layer.bits for layer in report.layers}
    assert set(bits.values()) <= {4, 8}
    plain = kenosis_ort.quantize_weights(
        model, tmp_path / "plain.onnx", embeddings=False, block_size=128, protect_sensitive=False
    )
    errors = {layer.node: 10 ** (layer.error_db / 10) for layer in plain.layers}
    middle = np.median(list(errors.values()))
    assert bits == {node: 8 if error > 4 * middle else 4 for node, error in errors.items()}


def test_named_nodes_stay_float(tmp_path: Path):
    model, out = decoder(), tmp_path / "out.onnx"
    kenosis_ort.quantize_weights(model, out, nodes_to_exclude=["head", "embed"])
    written = {node.name: node.op_type for node in onnx.load(out).graph.node}
    assert (written["head"], written["embed"]) == ("MatMul", "Gather")


@pytest.mark.parametrize(("options", "error", "words"), [
    *((options, kenosis_ort.KenosisError, next(iter(options))) for options in (
        {"bits": 3}, {"bits": "4"}, {"block_size": 20}, {"accuracy_level": 2}, {"nodes_to_exclude": ["nowhere"]},
        {"symmetric": "yes"}, {"embeddings": 3},
    )),
    ({"model_input": models.conv_relu_chain(2)}, kenosis_ort.NothingToQuantizeError, "."),
    ({"calibration_data_reader": [{"other": np.zeros((1, 6))}]}, kenosis_ort.CalibrationError, "ids"),
])  # fmt: skip
def test_what_is_wrong_is_told_and_nothing_is_written(tmp_path: Path, options: dict, error: type, words: str):
    with pytest.raises(error, match=words):
        kenosis_ort.quantize_weights(**{"model_input": decoder(), "model_output": tmp_path / "out.onnx", **options})
    assert not list(tmp_path.iterdir())


def test_progress_is_told_by_layer(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    kenosis_ort.quantize_weights(decoder(), tmp_path / "out.onnx", feeds(6), progress=lambda *entry: told.append(entry))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
