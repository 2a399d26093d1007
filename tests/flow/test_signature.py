"""The call is stock's: names, order, positions, configurations of tools; the caller's objects stay as they are."""

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import onnx
import onnxruntime.quantization as stock
import pytest
from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, StaticQuantConfig, get_qdq_config
from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config
from typing_extensions import Unpack

import kenosis_ort
from kenosis_ort import OptionError, calibrate, preview, quantize, quantize_static
from kenosis_ort.options import KEYWORDS, Keywords
from tests import models
from tests.flow.support import Made, Untouched, changed, chosen, make, quality, quantized
from tests.models import FeedReader

FIRST = "recipe accuracy_budget metric eval_reader target format speed placement custom_op_libraries progress"
FURTHER = """verify evidence executor kv_cache on_failure weight_bits activation_bits protect_outputs primary_inputs
    rewrites stages tune threads promise host sequence_lengths max_opset"""
OPEN = {"per_channel", "reduce_range", "activation_type", "weight_type", "calibrate_method", "quant_format"}
OPEN.add("use_external_data_format")
"""At stock's default where nothing states them."""


def parameters(call: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(call).parameters.values())


def test_stock_parameters_in_stock_order_and_ten_keyword_only_parameters() -> None:
    own = [p for p in parameters(quantize_static) if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    theirs = parameters(stock.quantize_static)
    assert [p.name for p in own][: len(theirs)] == [p.name for p in theirs]
    assert own[-1].name == "calibration_cache_path"
    assert {p.name for p in own} >= OPEN
    for mine, other in zip(own, theirs, strict=False):
        required = other.default is inspect.Parameter.empty  # the reader, before there was a cache to take its place
        default = None if required and mine.name == "calibration_data_reader" else other.default
        assert mine.name in OPEN or mine.default == default, mine.name
    names = [p.name for p in parameters(stock.quantize)]
    assert [p.name for p in parameters(quantize)][: len(names)] == names
    *extras, further = parameters(quantize_static)[len(own) :]
    assert [p.name for p in extras] == FIRST.split()
    assert {p.kind for p in extras} == {inspect.Parameter.KEYWORD_ONLY}
    assert all(p.default is not inspect.Parameter.empty for p in extras)
    assert further.kind is inspect.Parameter.VAR_KEYWORD
    assert [*KEYWORDS] == [*Keywords.__annotations__] == FURTHER.split()
    assert get_type_hints(quantize_static)["further"] == Unpack[Keywords]


@pytest.mark.parametrize(("call", "given"), [
    (quantize_static, ("out.onnx", Untouched())), (quantize, ("out.onnx", StaticQuantConfig(Untouched()))),
    (preview, ()), (calibrate, (Untouched(),)),
])  # fmt: skip
def test_an_unknown_parameter_is_a_type_error_that_names_the_nearest(call: Any, given: tuple[Any, ...]) -> None:
    for said, meant in (("promis", "promise"), ("weight_tpye", "weight_type"), ("acuracy_budget", "accuracy_budget")):
        with pytest.raises(TypeError, match=f"no parameter '{said}'. Did you mean '{meant}'"):
            call(models.bn_net(), *given, **{said: None})


def test_public_names_exist_and_are_documented() -> None:
    assert len(set(kenosis_ort.__all__)) == len(kenosis_ort.__all__)
    assert [n for n in kenosis_ort.__all__ if not inspect.getdoc(getattr(kenosis_ort, n))] in ([], ["__version__"])


def test_config_object(tmp_path: Path) -> None:
    model = models.residual_block()
    given = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8, "per_channel": True}
    method = {"calibrate_method": CalibrationMethod.Percentile, "extra_options": {"CalibPercentile": 99.9}}
    config = StaticQuantConfig(models.reader(model), nodes_to_exclude=["head"], **method, **given)
    report = quantize(model, tmp_path / "out.onnx", config, protect_outputs="int8", verify=False)
    said = chosen(report)
    given |= {"extra_options.CalibPercentile": 99.9, "nodes_to_exclude": ("head",), "protect_outputs": "int8"}
    assert {name: said[name] for name in given} == {name: (value, "caller") for name, value in given.items()}
    assert report.calibration.method == "percentile"
    assert report.fusion is None


def test_config_defaults_leave_the_choice_to_the_host(tmp_path: Path) -> None:
    model = models.residual_block()
    config = StaticQuantConfig(models.reader(model))
    report = quantize(model, tmp_path / "config.onnx", config, recipe="plain", promise=False)
    quantized(model, tmp_path / "plain.onnx")
    assert {chosen(report)[k][1] for k in ("activation_type", "weight_type", "per_channel")} == {"host default"}
    assert (tmp_path / "config.onnx").read_bytes() == (tmp_path / "plain.onnx").read_bytes()
    for other in (stock.DynamicQuantConfig(), None, {}):
        with pytest.raises(OptionError, match="StaticQuantConfig"):
            quantize(model, tmp_path / "out.onnx", other)


# ---- configurations as tools make them: what they leave open is placed as without them -----------------------------


def with_words(model: onnx.ModelProto, reader: FeedReader) -> Any:
    words = {"calibrate_method": CalibrationMethod.MinMax, "calibrate_args": {"symmetric": False}, "per_channel": True}
    return get_qdq_config(model, reader, **words, min_real_range=1e-4, keep_removable_activations=True)


def as_olive_writes_it(model: onnx.ModelProto, reader: FeedReader) -> Any:
    off = ("extra.Sigmoid.nnapi", "ActivationSymmetric", "EnableSubgraph", "AddQDQPairToWeight", "DedicatedQDQPair")
    on = ("WeightSymmetric", "ForceQuantizeNoInputCheck", "MatMulConstBOnly")
    rest = {"QDQOpTypePerChannelSupportToAxis": {}, "TensorQuantOverrides": {}, "MinimumRealRange": None}
    said: dict[str, Any] = {
        "calibrate_method": CalibrationMethod.MinMax, "quant_format": QuantFormat.QDQ, "nodes_to_quantize": [],
        "activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8, "nodes_to_exclude": [],
        "op_types_to_quantize": sorted({n.op_type for n in model.graph.node}),
        "extra_options": {**dict.fromkeys(off, False), **dict.fromkeys(on, True), **rest},
    }  # fmt: skip
    return StaticQuantConfig(reader, per_channel=False, reduce_range=False, **said)


def by_config(plain: Made, config: Any, **more: Any) -> Made:
    """What a configuration makes of the same model and samples."""
    said = config(plain.model, FeedReader(plain.feeds), **more)
    return replace(plain, report=quantize(plain.model, plain.out, said, recipe="plain", promise=False, tune="off"))


@pytest.mark.parametrize("net", ["bn_net", "residual_block", "mobile_block", "transformer_block"])
def test_a_configuration_that_leaves_all_open(tmp_path: Path, net: str) -> None:
    """The same integer nodes and the same quality as a call without options; stock's file is coarser."""
    model = models.ALL[net]()
    plain = make(model, tmp_path, models.feeds(model, 8))
    nodes, decibels = plain.integer, plain.db()
    for_qnn = [get_qnn_qdq_config] if net == "mobile_block" else []  # types and parameters of its own
    for config in (get_qdq_config, with_words, as_olive_writes_it, *for_qnn):
        made = by_config(plain, config)
        assert made.integer == nodes, config
        assert made.db() == pytest.approx(decibels, abs=0.5), config
        assert any(note.startswith("op_types_to_quantize") for note in made.report.notes), config
    stock.quantize(changed(model), plain.out, config(model, FeedReader(plain.feeds)))
    assert quality(model, plain.out, plain.feeds) < decibels


def test_a_configuration_that_excludes_by_a_function(tmp_path: Path) -> None:
    plain = make(models.residual_block(), tmp_path)
    made = by_config(plain, get_qdq_config, nodes_to_exclude=lambda _, node: node.op_type == "Gemm")
    assert made.integer & {"stem", "conv1", "conv2", "head"} == {"stem", "conv1", "conv2"}
    assert made.report.plan.by_node["head"].rule == "caller-excluded"
