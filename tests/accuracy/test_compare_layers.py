"""Signal per layer: what is compared, and that it is the right value."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from kenosis_ort import quantize_static
from kenosis_ort.accuracy.outputs import compare_outputs
from kenosis_ort.accuracy.side_by_side import compare_layers
from tests import models
from tests.models import FeedReader, feeds


def quantized(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    quantize_static(
        model, folder / "q.onnx", FeedReader(feeds(model, 4)), rewrites=False, recipe="plain", promise=False
    )
    return onnx.load(folder / "q.onnx")


@pytest.mark.parametrize("build", [models.residual_block, models.mobile_block, models.mlp])
def test_layers_of_a_quantized_net_are_close_and_end_at_the_output(build, tmp_path: Path):
    model = build()
    result = quantized(model, tmp_path)
    few = feeds(model, 2)
    layers = compare_layers(model, result, few)
    by_value = {layer.value: layer for layer in layers}
    order = [name for node in model.graph.node for name in node.output]
    inputs = {value.name for value in model.graph.input}
    assert [layer.value for layer in layers if layer.value not in inputs] == [n for n in order if n in by_value]
    assert all(layer.sqnr_db > 15 for layer in layers)
    for output in compare_outputs(model, result, few):
        assert by_value[output.name].sqnr_db == pytest.approx(output.sqnr_db, abs=0.3)


def test_the_value_inside_a_fused_kernel_is_left_out(tmp_path: Path):
    model = models.conv_relu_chain(3)
    layers = {layer.value for layer in compare_layers(model, quantized(model, tmp_path), feeds(model, 1))}
    readers = {name: node for node in model.graph.node for name in node.input}
    for node in model.graph.node:
        reader = readers.get(node.output[0])
        if node.op_type == "Conv" and reader is not None and reader.op_type == "Relu":
            assert node.output[0] not in layers
            assert reader.output[0] in layers


def test_parts_give_the_same_figures(tmp_path: Path):
    model = models.residual_block()
    result = quantized(model, tmp_path)
    few = feeds(model, 1)
    whole = compare_layers(model, result, few)
    for one, other in zip(whole, compare_layers(model, result, few, budget=1), strict=True):
        assert one.value == other.value
        assert one.sqnr_db == pytest.approx(other.sqnr_db, abs=0.5)


def test_without_feeds_there_is_nothing(tmp_path: Path):
    model = models.mlp()
    assert compare_layers(model, quantized(model, tmp_path), []) == ()
    assert all(layer.sqnr_db == float("inf") for layer in compare_layers(model, model, feeds(model, 1)))
