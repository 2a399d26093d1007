"""The runtime's own ``qdq_loss_debug`` on our files: it pairs weights and activations with the float ones by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.quantization.qdq_loss_debug import (
    collect_activations,
    compute_activation_error,
    compute_weight_error,
    create_activation_matching,
    create_weight_matching,
    modify_model_output_intermediate_tensors,
)

from tests import models
from tests.flow.support import quantized
from tests.models import Net


def strided_stem() -> onnx.ModelProto:
    net = Net()
    x = net.input("x", [1, 3, 16, 16])
    y = net.op("Relu", [net.conv(x, 3, 16, k=3, stride=2, name="stem")])
    net.output(net.conv(y, 16, 8, name="second"), [1, 8, 8, 8])
    return net.model("strided_stem")


def stem_of_few_channels() -> onnx.ModelProto:
    net = Net()
    x = net.input("x", [1, 3, 16, 16])
    y = net.op("Relu", [net.conv(x, 3, 16, k=3, name="stem")])
    net.output(net.conv(y, 16, 8, name="second"), [1, 8, 16, 16])
    return net.model("stem_of_few_channels")


def odd_depthwise() -> onnx.ModelProto:
    net = Net()
    y = net.op("Relu", [net.conv(net.input("x", [1, 4, 16, 16]), 4, 16, name="stem")])
    for block in range(2):
        y = net.op("Relu", [net.conv(y, 16, 24, k=1, name=f"expand{block}")])
        y = net.op("Relu", [net.conv(y, 24, 24, groups=24, name=f"depthwise{block}")])
        y = net.op("Relu", [net.conv(y, 24, 16, k=1, name=f"project{block}")])
    net.output(net.conv(y, 16, 8, name="last"), [1, 8, 16, 16])
    return net.model("odd_depthwise")


def open_linear() -> onnx.ModelProto:
    net = Net()
    x = net.input("x", ["N", "T", 16])
    for i in range(2):
        weights = net.const(net.rng.normal(0, 0.2, (16, 16)).astype(np.float32), f"w{i}")
        bias = net.const(net.rng.normal(0, 0.2, (1, 1, 16)).astype(np.float32), f"b{i}")
        x = net.op("Relu", [net.op("Add", [net.op("MatMul", [x, weights]), bias])])
    net.output(x, ["N", "T", 16])
    return net.model("open_linear")


NETS = {
    "SpaceToDepth": strided_stem,
    "read a multiple of 4": stem_of_few_channels,
    "depthwise": odd_depthwise,
    "MatMul and Add became Gemm": open_linear,
    "": models.two_input_detector,
}


class Reader:
    def __init__(self, feeds: Any) -> None:
        self.feeds = iter(feeds)

    def __iter__(self) -> Any:
        return self.feeds


@pytest.mark.parametrize("rewrite", NETS, ids=lambda r: r or "none")
def test_weights_and_activations_are_paired_and_compared(rewrite: str, tmp_path: Path) -> None:
    model = NETS[rewrite]()
    feeds = models.feeds(model, 3)
    float_path, path = tmp_path / "float.onnx", tmp_path / "q.onnx"
    onnx.save(model, float_path)
    report = quantized(model, path, feeds)
    assert any(rewrite in note for note in report.notes), report.notes

    errors = compute_weight_error(create_weight_matching(str(float_path), str(path)))
    assert errors
    assert all(math.isfinite(db) for db in errors.values())

    activations = []
    for source in (float_path, path):
        augmented = tmp_path / f"augmented_{source.name}"
        modify_model_output_intermediate_tensors(str(source), str(augmented))
        activations.append(collect_activations(str(augmented), Reader(feeds)))
    pairs = create_activation_matching(activations[1], activations[0])
    assert pairs or rewrite.startswith("MatMul"), "there only reshaped values are quantized, which are new"
    for name, error in compute_activation_error(pairs).items():
        assert error["qdq_err"] > 10, name
        assert error["xmodel_err"] > 10, name
