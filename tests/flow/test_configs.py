"""Configurations as tools make them: they say little, and what they leave open is placed as without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime.quantization as stock
import pytest
from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, StaticQuantConfig

from kenosis_ort import QuantizationReport, quantize, verify_fusion
from kenosis_ort.demo.measurements import load_digits
from tests import models
from tests.flow.support import quality, quantized
from tests.flow.test_zoo import ZOO, cifar, keywords
from tests.models import Feed, FeedReader

qdq_config = getattr(stock, "get_qdq_config", None)
pytestmark = pytest.mark.skipif(qdq_config is None, reason="this runtime has no get_qdq_config")
Net = tuple[onnx.ModelProto, list[Feed]]
PLAIN: dict[str, Any] = {"recipe": "plain", "promise": False, "tune": "off"}


def everything(model: onnx.ModelProto, feeds: list[Feed]) -> Any:
    assert qdq_config is not None
    return qdq_config(model, FeedReader(feeds))


def with_words(model: onnx.ModelProto, feeds: list[Feed]) -> Any:
    assert qdq_config is not None
    return qdq_config(
        model,
        FeedReader(feeds),
        calibrate_method=CalibrationMethod.MinMax,
        calibrate_args={"symmetric": False},
        per_channel=True,
        min_real_range=1e-4,
        keep_removable_activations=True,
    )


def as_olive_writes_it(model: onnx.ModelProto, feeds: list[Feed]) -> Any:
    return StaticQuantConfig(
        FeedReader(feeds),
        calibrate_method=CalibrationMethod.MinMax,
        quant_format=QuantFormat.QDQ,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        op_types_to_quantize=sorted({node.op_type for node in model.graph.node}),
        nodes_to_quantize=[],
        nodes_to_exclude=[],
        per_channel=False,
        reduce_range=False,
        extra_options={
            "extra.Sigmoid.nnapi": False,
            "ActivationSymmetric": False,
            "WeightSymmetric": True,
            "EnableSubgraph": False,
            "ForceQuantizeNoInputCheck": True,
            "MatMulConstBOnly": True,
            "AddQDQPairToWeight": False,
            "OpTypesToExcludeOutputQuantization": [],
            "DedicatedQDQPair": False,
            "QDQOpTypePerChannelSupportToAxis": {},
            "TensorQuantOverrides": {},
            "MinimumRealRange": None,
        },
    )


CONFIGS = {"get_qdq_config": everything, "with words": with_words, "Olive's": as_olive_writes_it}


def digits() -> Net:
    model = models.narrow_digits()
    return model, [{model.graph.input[0].name: x[None]} for x in load_digits().calibration[:16]]


def small(name: str) -> Callable[[], Net]:
    def make() -> Net:
        model = models.ALL[name]()
        return model, models.feeds(model, 8)

    return make


def of_the_zoo(name: str, data: Callable[[], list[Feed]]) -> Callable[[], Net]:
    def make() -> Net:
        if not (ZOO / name).exists():
            pytest.skip("the zoo is not here")
        return onnx.load(ZOO / name), data()

    return make


NETS: dict[str, Callable[[], Net]] = {
    "digits": digits,
    "residual_block": small("residual_block"),
    "mobile_block": small("mobile_block"),
    "transformer_block": small("transformer_block"),
    "kws": of_the_zoo("mlperf_kws_dscnn.onnx", keywords),
    "resnet20": of_the_zoo("cifar_resnet20.onnx", lambda: cifar()[:2]),
}


def integer(out: Path) -> set[str]:
    return {kernel.node for kernel in verify_fusion(out).kernels if kernel.integer}


@pytest.mark.parametrize("net", NETS)
def test_a_configuration_that_leaves_all_open(tmp_path: Path, net: str) -> None:
    """The same integer nodes and the same quality as a call without options; stock's file is coarser."""
    model, feeds = NETS[net]()
    out = tmp_path / "out.onnx"
    quantized(model, out, feeds)
    nodes, decibels = integer(out), quality(model, out, feeds)
    for name, config in CONFIGS.items():
        report = quantize(model, out, config(model, feeds), **PLAIN)
        assert integer(out) == nodes, name
        assert quality(model, out, feeds) == pytest.approx(decibels, abs=0.5), name
        assert said(report, "op_types_to_quantize"), name
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    stock.quantize(copy, out, everything(model, feeds))
    assert quality(model, out, feeds) < decibels


def said(report: QuantizationReport, option: str) -> list[str]:
    return [note for note in report.notes if note.startswith(option)]


def test_a_configuration_that_excludes_by_a_function(tmp_path: Path) -> None:
    assert qdq_config is not None
    model, out = models.residual_block(), tmp_path / "out.onnx"
    config = qdq_config(model, models.reader(model), nodes_to_exclude=lambda _, node: node.op_type == "Gemm")
    report = quantize(model, out, config, **PLAIN)
    assert integer(out) & {"stem", "conv1", "conv2", "head"} == {"stem", "conv1", "conv2"}
    assert report.plan.by_node["head"].rule == "caller-excluded"


def test_a_configuration_for_qnn(tmp_path: Path) -> None:
    """It names types and parameters of its own; on this runtime they run in integer as well as any."""
    qnn = pytest.importorskip("onnxruntime.quantization.execution_providers.qnn")
    model, out = models.mobile_block(), tmp_path / "out.onnx"
    feeds = models.feeds(model, 8)
    quantized(model, out, feeds)
    nodes = integer(out)
    quantize(model, out, qnn.get_qnn_qdq_config(model, FeedReader(feeds)), **PLAIN)
    assert integer(out) == nodes
    ours = quality(model, out, feeds)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    stock.quantize(copy, out, qnn.get_qnn_qdq_config(model, FeedReader(feeds)))
    assert ours > quality(model, out, feeds)


@pytest.mark.parametrize("name", ["QOperator", QuantFormat.QOperator, "QDQ", QuantFormat.QDQ], ids=repr)
def test_formats_by_name(tmp_path: Path, name: str | QuantFormat) -> None:
    out = tmp_path / "out.onnx"
    quantized(models.residual_block(), out, quant_format=name)
    types = {node.op_type for node in onnx.load(out).graph.node}
    assert ("QLinearConv" in types) == (str(name) == "QOperator")
