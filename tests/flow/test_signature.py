"""The call is stock's: names, order, positions, configurations of tools; the caller's objects stay as they are."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import onnx
import onnxruntime.quantization as stock
import pytest
from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, StaticQuantConfig
from typing_extensions import Unpack

import kenosis_ort
from kenosis_ort import OptionError, QuantizationReport, calibrate, preview, quantize, quantize_static
from kenosis_ort.demo.measurements import load_digits
from kenosis_ort.options import KEYWORDS, Keywords
from tests import models
from tests.flow.support import Made, Untouched, chosen, make, quality, quantized
from tests.models import Feed, FeedReader

FIRST = "recipe accuracy_budget metric eval_reader target format speed placement custom_op_libraries progress"
FURTHER = """verify evidence executor kv_cache on_failure weight_bits activation_bits protect_outputs primary_inputs
    rewrites stages tune threads promise host sequence_lengths max_opset"""
POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD


def parameters(call: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(call).parameters.values())


def test_stock_parameters_in_stock_order() -> None:
    own, theirs = [p for p in parameters(quantize_static) if p.kind is POSITIONAL], parameters(stock.quantize_static)
    assert [p.name for p in own][: len(theirs)] == [p.name for p in theirs]
    assert own[-1].name == "calibration_cache_path"
    open_types = {"per_channel", "reduce_range", "activation_type", "weight_type", "calibrate_method"}
    open_types |= {"quant_format", "use_external_data_format"}  # at stock's default where nothing states them
    for mine, other in zip(own, theirs, strict=False):
        assert other.kind is POSITIONAL
        required = other.default is inspect.Parameter.empty  # the reader, before there was a cache to take its place
        default = None if required and mine.name == "calibration_data_reader" else other.default
        assert mine.name in open_types or mine.default == default, mine.name
    names = [p.name for p in parameters(stock.quantize)]
    assert [p.name for p in parameters(quantize)][: len(names)] == names


def test_a_newcomer_sees_ten_keyword_only_parameters() -> None:
    *extras, further = (p for p in parameters(quantize_static) if p.kind is not POSITIONAL)
    assert [p.name for p in extras] == FIRST.split()
    assert len(extras) == 10
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in extras)
    assert all(p.default is not inspect.Parameter.empty for p in extras)
    assert further.kind is inspect.Parameter.VAR_KEYWORD
    assert [*KEYWORDS] == [*Keywords.__annotations__] == FURTHER.split()
    assert get_type_hints(quantize_static)["further"] == Unpack[Keywords]


@pytest.mark.parametrize("call", [quantize_static, quantize, preview, calibrate])
def test_an_unknown_parameter_is_a_type_error_that_names_the_nearest(tmp_path: Path, call: Any) -> None:
    first: Any = {
        quantize_static: (tmp_path / "out.onnx", Untouched()),
        quantize: (tmp_path / "out.onnx", StaticQuantConfig(Untouched())),
        preview: (),
        calibrate: (Untouched(),),
    }[call]
    for said, meant in (("promis", "promise"), ("weight_tpye", "weight_type"), ("acuracy_budget", "accuracy_budget")):
        with pytest.raises(TypeError, match=f"no parameter '{said}'. Did you mean '{meant}'"):
            call(models.bn_net(), *first, **{said: None})
    assert not [*tmp_path.iterdir()]


def test_public_names_exist_and_are_documented() -> None:
    assert len(set(kenosis_ort.__all__)) == len(kenosis_ort.__all__)
    for name in kenosis_ort.__all__:
        member = getattr(kenosis_ort, name)
        assert name == "__version__" or inspect.getdoc(member), name


def test_call_by_position_as_in_existing_scripts(tmp_path: Path) -> None:
    model = models.residual_block()
    source, out = tmp_path / "float.onnx", tmp_path / "int8.onnx"
    onnx.save(model, source)
    report = quantize_static(
        str(source), str(out), models.reader(model), QuantFormat.QDQ, ["Conv", "Relu", "Add", "Gemm"], True, False,
        QuantType.QUInt8, QuantType.QInt8, [], ["head"], False, CalibrationMethod.MinMax, ["CPUExecutionProvider"],
        {"ActivationSymmetric": False}, None,
    )  # fmt: skip
    assert isinstance(report, QuantizationReport)
    assert (report.model_input, report.model_output) == (str(source), str(out))
    assert chosen(report)["nodes_to_exclude"] == (("head",), "caller")
    assert quality(model, out, models.feeds(model)) > 25


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


@pytest.mark.parametrize("config", [stock.DynamicQuantConfig(), None, {}])
def test_other_configurations_are_refused(tmp_path: Path, config: Any) -> None:
    with pytest.raises(OptionError, match="StaticQuantConfig"):
        quantize(models.bn_net(), tmp_path / "out.onnx", config)


@pytest.mark.parametrize("build", [models.bn_net, models.net_with_if, models.mobile_block])
@pytest.mark.parametrize("recipe", ["plain", "fast"])
def test_the_callers_objects_are_not_changed(tmp_path: Path, build: Any, recipe: str) -> None:
    model = build()
    feeds = models.feeds(model, 8)
    for array in (array for feed in feeds for array in feed.values()):
        array.setflags(write=False)
    options: dict[str, Any] = {
        "op_types_to_quantize": ["Conv", "Relu", "Clip", "Add", "Gemm", "BatchNormalization"],
        "nodes_to_exclude": [model.graph.node[0].name],
        "calibration_providers": ["CPUExecutionProvider"],
        "extra_options": {"CalibMovingAverage": True, "MinimumRealRange": 0.001},
        "primary_inputs": [model.graph.input[0].name],
        "custom_op_libraries": [],
    }
    before = copy.deepcopy((options, feeds, model.SerializeToString(deterministic=True)))
    quantized(model, tmp_path / "out.onnx", feeds, recipe=recipe, **options)
    assert options == before[0]
    np.testing.assert_equal(feeds, before[1])
    assert model.SerializeToString(deterministic=True) == before[2]


# ---- configurations as tools make them: what they leave open is placed as without them -----------------------------

qdq_config: Any = getattr(stock, "get_qdq_config", None)
of_tools = pytest.mark.skipif(qdq_config is None, reason="this runtime has no get_qdq_config")


def everything(model: onnx.ModelProto, feeds: list[Feed]) -> Any:
    return qdq_config(model, FeedReader(feeds))


def with_words(model: onnx.ModelProto, feeds: list[Feed]) -> Any:
    words = {"calibrate_method": CalibrationMethod.MinMax, "calibrate_args": {"symmetric": False}, "per_channel": True}
    return qdq_config(model, FeedReader(feeds), **words, min_real_range=1e-4, keep_removable_activations=True)


def as_olive_writes_it(model: onnx.ModelProto, feeds: list[Feed]) -> Any:
    off = ("extra.Sigmoid.nnapi", "ActivationSymmetric", "EnableSubgraph", "AddQDQPairToWeight", "DedicatedQDQPair")
    on = ("WeightSymmetric", "ForceQuantizeNoInputCheck", "MatMulConstBOnly")
    rest = {"QDQOpTypePerChannelSupportToAxis": {}, "TensorQuantOverrides": {}, "MinimumRealRange": None}
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
        extra_options={**dict.fromkeys(off, False), **dict.fromkeys(on, True), **rest},
    )


def data_of(net: str) -> tuple[onnx.ModelProto, list[Feed]]:
    if net == "digits":
        model = models.narrow_digits()
        return model, [{model.graph.input[0].name: x[None]} for x in load_digits().calibration[:16]]
    return models.ALL[net](), models.feeds(models.ALL[net](), 8)


def by_config(plain: Made, config: Any) -> Made:
    """What a configuration makes of the same model and samples."""
    options = {"recipe": "plain", "promise": False, "tune": "off"}
    return Made(plain.model, plain.feeds, plain.out, quantize(plain.model, plain.out, config, **options))


def stocks(plain: Made, config: Any) -> float:
    """The quality of stock's file."""
    copy = onnx.ModelProto()
    copy.CopyFrom(plain.model)
    stock.quantize(copy, plain.out, config)
    return quality(plain.model, plain.out, plain.feeds)


@of_tools
@pytest.mark.parametrize("net", ["digits", "residual_block", "mobile_block", "transformer_block"])
def test_a_configuration_that_leaves_all_open(tmp_path: Path, net: str) -> None:
    """The same integer nodes and the same quality as a call without options; stock's file is coarser."""
    model, feeds = data_of(net)
    plain = make(model, tmp_path, feeds)
    nodes, decibels = plain.integer, plain.db()
    for config in (everything, with_words, as_olive_writes_it):
        made = by_config(plain, config(model, feeds))
        assert made.integer == nodes, config
        assert made.db() == pytest.approx(decibels, abs=0.5), config
        assert any(note.startswith("op_types_to_quantize") for note in made.report.notes), config
    assert stocks(plain, everything(model, feeds)) < decibels


@of_tools
def test_a_configuration_that_excludes_by_a_function(tmp_path: Path) -> None:
    plain = make(models.residual_block(), tmp_path)
    reader = FeedReader(plain.feeds)
    made = by_config(plain, qdq_config(plain.model, reader, nodes_to_exclude=lambda _, node: node.op_type == "Gemm"))
    assert made.integer & {"stem", "conv1", "conv2", "head"} == {"stem", "conv1", "conv2"}
    assert made.report.plan.by_node["head"].rule == "caller-excluded"


@of_tools
def test_a_configuration_for_qnn(tmp_path: Path) -> None:
    """It names types and parameters of its own; on this runtime they run in integer as well as any."""
    qnn = pytest.importorskip("onnxruntime.quantization.execution_providers.qnn")
    plain = make(models.mobile_block(), tmp_path, models.feeds(models.mobile_block(), 8))
    nodes = plain.integer
    made = by_config(plain, qnn.get_qnn_qdq_config(plain.model, FeedReader(plain.feeds)))
    assert made.integer == nodes
    ours = made.db()
    assert ours > stocks(plain, qnn.get_qnn_qdq_config(plain.model, FeedReader(plain.feeds)))
