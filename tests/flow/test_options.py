"""The call is stock's, and its options are one table: names, order, positions, types, and who says what.

A wrong value is refused by name, before data is read or anything written. At an option's default too, what is stated
goes before the recipe file, and before the named recipe.
"""

import inspect
from dataclasses import replace
from functools import partial
from typing import get_type_hints

import numpy as np
import onnx
import onnxruntime.quantization as stock
import pytest
from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, StaticQuantConfig, get_qdq_config
from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config
from typing_extensions import Unpack

import kenosis_ort
from kenosis_ort import (
    KenosisWarning,
    OptionError,
    Placement,
    Recipe,
    Speed,
    Stages,
    api,
    bench,
    quantize,
    quantize_static,
    verify_fusion,
    verify_patterns,
)
from kenosis_ort.graph.walk import opset_of
from kenosis_ort.option_types import IN_FILE, OPTIONS, RecipeFile
from kenosis_ort.options import KEYWORDS, Keywords
from kenosis_ort.passes.recipe import RECIPES
from kenosis_ort.rewrite.attention import ATTENTION_OPSET
from kenosis_ort.runtime.machine import runtime_limits
from tests import models, wrong
from tests.flow.support import Untouched, changed, chosen, make, quality, quantized

MODEL = models.residual_block()


def refused(folder, name, call, /, *arguments, **options):
    before = list(folder.iterdir())
    with pytest.raises((OptionError, kenosis_ort.OutputError)) as caught:
        call(*arguments, **options)
    error = caught.value
    assert name in str(error), f"{options}: {error}"
    assert error.fix or "must be" in error.what, f"{options}: {error}"
    assert list(folder.iterdir()) == before


def test_every_option_is_in_the_table():
    parameters = {*inspect.signature(quantize_static).parameters, *KEYWORDS}
    assert parameters - {"calibration_data_reader", "further"} == wrong.OPTIONS.keys()
    assert wrong.OPTIONS.keys() - {"model_input"} == OPTIONS.keys()
    assert wrong.RECIPE.keys() == Recipe.__dataclass_fields__.keys()
    assert {*VALUES} == {*IN_FILE}, "each that a file may hold has a value here"


@pytest.mark.parametrize("name", wrong.OPTIONS)
def test_a_wrong_value_is_refused_by_name(tmp_path, name):
    usual = {"model_input": MODEL, "model_output": tmp_path / "out.onnx", "calibration_data_reader": Untouched()}
    for value in wrong.OPTIONS[name]:
        refused(tmp_path, name, quantize_static, **{**usual, name: value})


@pytest.mark.parametrize("name", wrong.EXTRA)
def test_a_wrong_extra_option_is_refused_by_name(tmp_path, name):
    call = partial(quantize_static, MODEL, tmp_path / "out.onnx", Untouched())
    for value in wrong.EXTRA[name]:
        refused(tmp_path, name, call, extra_options={name: value})


@pytest.mark.parametrize(("kind", "name", "values"), [
    *((Recipe, name, values) for name, values in wrong.RECIPE.items()),
    *((Stages, name, values) for name, values in wrong.STAGES.items()),
    (Speed, "sequence_lengths", ([0], "1", 3)),
])  # fmt: skip
def test_recipes_stages_and_groups_are_checked(tmp_path, kind, name, values):
    for value in values:
        refused(tmp_path, name, kind, **{name: value})


def test_other_calls_are_checked_too(tmp_path):
    out = tmp_path / "t"
    refused(tmp_path, "threads", kenosis_ort.preview, MODEL, threads=-1)
    refused(tmp_path, "verify", kenosis_ort.calibrate, MODEL, out, Untouched(), verify="no")
    refused(tmp_path, "table_path", kenosis_ort.calibrate, MODEL, b"t", Untouched())
    for name, value in (("per_channel", "x"), ("nodes_to_exclude", "head"), ("extra_options", [1])):
        config = StaticQuantConfig(Untouched(), **{"extra_options": {}, name: value})
        refused(tmp_path, name, quantize, MODEL, out, config)
    for call in (verify_fusion, verify_patterns, bench):
        with pytest.raises(OptionError, match="NoneType"):
            call(None)
    with pytest.raises(TypeError, match="per_channel='x' is a str"):
        quantize_static(MODEL, out, Untouched(), per_channel="x")


def test_numpy_values_and_other_sequences_are_taken(tmp_path):
    """What counts as a boolean, a number or a list in Python's duck typing makes the same file."""
    options = {"recipe": "plain", "promise": False, "nodes_to_exclude": ["head"], "per_channel": True}
    quantize_static(MODEL, tmp_path / "a.onnx", models.reader(MODEL), **options)
    options = {"promise": np.False_, "verify": np.bool_(True), "per_channel": 1, "nodes_to_exclude": {"head"}}
    options["recipe"] = Recipe("plain", "minmax", np.False_, np.False_, smooth="off", samples=np.int32(4))
    options |= {"threads": np.int64(1), "extra_options": {"WeightSymmetric": np.bool_(True), "CalibPercentile": None}}
    quantize_static(MODEL, tmp_path / "b.onnx", models.reader(MODEL), **options)
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
    assert onnx.load(tmp_path / "a.onnx").graph.node


# ---- what is stated counts ----------------------------------------------------------------------------------------

MLP = models.mlp()
VALUES = {
    "activation_bits": 5, "activation_type": QuantType.QInt8, "calibrate_method": CalibrationMethod.Entropy,
    "calibration_providers": ("CPUExecutionProvider",), "extra_options": {"WeightSymmetric": False}, "format": "qop",
    "host": "vnni", "kv_cache": "int8", "max_opset": 17, "nodes_to_exclude": ("a", "b"), "nodes_to_quantize": ("fc1",),
    "on_failure": "float", "op_types_to_quantize": ("Gemm",), "per_channel": False, "primary_inputs": ("x",),
    "promise": False, "protect_outputs": "int8", "quant_format": QuantFormat.QOperator, "reduce_range": True,
    "rewrites": False, "sequence_lengths": (1, 8), "stages": Stages(nudge=False), "target": "qnn", "threads": 2,
    "tune": "off", "use_external_data_format": True, "verify": False, "weight_bits": 4, "weight_type": QuantType.QUInt8,
}  # fmt: skip
"""An option with a value that it has not by itself; how the shell says it is in `tests.cli.test_options`."""
BESIDE = {"weight_bits": {"format": "qcdq"}, "activation_bits": {"format": "qcdq"}}
SPEED = ("promise", "tune", "threads", "sequence_lengths")
STATED = (
    *("target", "quant_format", "use_external_data_format", "verify", "protect_outputs", "rewrites", "max_opset"),
    *("on_failure", "kv_cache", *SPEED),
)
USUAL = {"nodes_to_exclude": [], **{name: OPTIONS[name].default for name in STATED}}
"""Options at their defaults, which the call states."""


def request(**given):
    return api._previewed(MLP, given)


def file(**options):
    return RecipeFile(RECIPES["fast"], options)


def known(made):
    """What a request says, but for functions, which are made anew for each target, and for who said it."""
    fields = {name: value for name, value in vars(made).items() if name not in ("target", "choices")}
    return fields | {"target": made.target.name, "choices": {k: c.value for k, c in made.choices.items()}}


@pytest.mark.parametrize("name", VALUES)
def test_python_and_file_say_the_same(name, tmp_path):
    given = {name: VALUES[name], **BESIDE.get(name, {})}
    said = known(request(**given))
    assert said != known(request()), "the value is none that an option has by itself"
    RecipeFile(RECIPES["fast"], given).save(tmp_path / "recipe.toml")
    assert known(request(recipe=tmp_path / "recipe.toml")) == said


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in IN_FILE])
def test_a_file_holds_nothing_of_a_single_run(name):
    with pytest.raises(ValueError, match=name):
        RecipeFile.from_toml(f'schema = 1\n[recipe]\nname = "fast"\n[options]\n{name} = "x"\n')


@pytest.mark.parametrize("name", USUAL)
def test_a_default_that_the_call_states_goes_before_the_file(name):
    held, usual = file(**{name: VALUES[name]}), USUAL[name]
    assert known(request(recipe=held)) != known(request())
    stated = [{name: usual}]
    if name in SPEED:
        stated.append({"speed": Speed(**{name: usual})})
        other = {"threads": 3} if name != "threads" else {"tune": "off"}
        assert getattr(request(recipe=held, speed=Speed(**other)).speed, name) != usual
    for said in stated:
        assert known(request(recipe=held, **said)) == known(request(**said)), said


def test_named_recipes_give_way_to_what_is_stated():
    for said in ({}, {"promise": True}, {"tune": "model"}):
        made = request(recipe="tiny", speed=Speed(**said)).speed
        assert {"promise": made.promise, "tune": made.tune} == {"promise": False, "tune": "off", **said}
    held = file(protect_outputs="float", activation_type=QuantType.QInt8, threads=3)
    assert request(recipe=held, activation_type=QuantType.QUInt8).activation_type is QuantType.QUInt8
    assert request(recipe=held, speed=Speed(threads=2), threads=5).speed.threads == 5
    assert request(recipe=held, placement=Placement(protect_outputs="auto")).protect_outputs == "auto"
    assert request(recipe=held, placement=Placement(rewrites=False)).protect_outputs == "float"


def test_a_data_type_as_format_is_ignored_with_a_warning(tmp_path):
    with pytest.warns(KenosisWarning, match="quant_format=QInt8 is no QuantFormat"):
        found = request(quant_format=QuantType.QInt8, recipe=file(quant_format=QuantFormat.QOperator))
    assert found.choices["quant_format"].value is QuantFormat.QOperator
    config = StaticQuantConfig(models.reader(MLP), quant_format=QuantType.QInt8)
    with pytest.warns(KenosisWarning, match="quant_format"):
        assert quantize(MLP, tmp_path / "out.onnx", config).options["quant_format"].value is QuantFormat.QDQ


# ---- the operator set -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [13, 17, 21])
def test_the_operator_set_is_no_higher_than_asked_for(tmp_path, most):
    for name, options in {"int8": {"promise": False}, "promise": {}, "stock": {"stages": Stages.none()}}.items():
        for given in (17, 22):
            model = models.conv_relu_chain(2, opset=given) if most < 17 or given > 17 else models.transformer_block()
            out = tmp_path / f"{name}{given}.onnx"
            report = quantize_static(model, out, models.reader(model), max_opset=most, **options)
            assert opset_of(onnx.load(out)) <= most
            assert report.options["max_opset"].value == most
            assert any(f"{most} at most, as asked for" in note for note in report.notes)
            assert report.recipe_file().options["max_opset"] == most


def test_what_needs_a_higher_operator_set_is_refused(tmp_path):
    for wide in ({"activation_type": QuantType.QUInt16}, {"recipe": "weight-only-4"}):
        with pytest.raises(OptionError, match="needs operator set 21"):
            quantize_static(MLP, tmp_path / "out.onnx", models.reader(MLP), max_opset=17, **wide)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("opset", [13, 17, 22])
def test_the_operator_set_rises_where_the_cost_table_gives_it_more_than_a_twentieth(tmp_path, opset):
    """Attention of many positions over few numbers is most of a net's time, beside wide layers next to none."""
    if runtime_limits().max_opset < ATTENTION_OPSET:
        pytest.skip("the runtime does not know Attention")
    found = {}
    for name, model in {
        "wide": models.transformer_block(tokens=2, width=768),
        "long": models.transformer_block(tokens=96, width=16),
        "convs": models.conv_relu_chain(2),
    }.items():
        model.opset_import[0].version = opset
        report = quantize_static(model, tmp_path / "out.onnx", models.reader(model), promise=False)
        written = opset_of(onnx.load(tmp_path / "out.onnx"))
        said = [note for note in report.notes if note.startswith(f"By estimate operator set {written} makes")]
        assert written == opset or said, report.notes
        assert all(float(note.split("the model ")[1].split("x")[0]) > 1.04 for note in said)
        found[name] = written
    assert found == {"wide": opset, "long": ATTENTION_OPSET, "convs": opset}


def test_a_target_without_cost_table_leaves_the_operator_set(tmp_path):
    model, out = models.transformer_block(tokens=96), tmp_path / "out.onnx"
    report = quantize_static(model, out, models.reader(model), format="qcdq", weight_bits=4)
    assert opset_of(onnx.load(out)) == opset_of(model), report.notes


# ---- the call is stock's ---------------------------------------------------------------------------------------------


OPEN = {"per_channel", "reduce_range", "activation_type", "weight_type", "calibrate_method", "quant_format"}
OPEN.add("use_external_data_format")
"""At stock's default where nothing states them."""


def parameters(call):
    return list(inspect.signature(call).parameters.values())


def test_stock_parameters_in_stock_order_and_ours_by_keyword_alone():
    """Which these are, and in what order, is on the page of options: `tests.examples.test_scripts`."""
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
    assert {p.kind for p in extras} == {inspect.Parameter.KEYWORD_ONLY}
    assert all(p.default is not inspect.Parameter.empty for p in extras)
    assert further.kind is inspect.Parameter.VAR_KEYWORD
    assert [*KEYWORDS] == [*Keywords.__annotations__]
    assert get_type_hints(quantize_static)["further"] == Unpack[Keywords]


@pytest.mark.parametrize(("call", "given"), [
    (quantize_static, ("out.onnx", Untouched())), (quantize, ("out.onnx", StaticQuantConfig(Untouched()))),
    (kenosis_ort.preview, ()), (kenosis_ort.calibrate, (Untouched(),)),
])  # fmt: skip
def test_an_unknown_parameter_is_a_type_error_that_names_the_nearest(call, given):
    for said, meant in (("promis", "promise"), ("weight_tpye", "weight_type"), ("acuracy_budget", "accuracy_budget")):
        with pytest.raises(TypeError, match=f"no parameter '{said}'. Did you mean '{meant}'"):
            call(models.bn_net(), *given, **{said: None})


def test_public_names_exist_and_are_documented():
    assert len(set(kenosis_ort.__all__)) == len(kenosis_ort.__all__)
    assert [n for n in kenosis_ort.__all__ if not inspect.getdoc(getattr(kenosis_ort, n))] in ([], ["__version__"])


def test_config_object(tmp_path):
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
    with pytest.raises(OptionError, match="the configuration says per_channel"):
        quantize(model, tmp_path / "out.onnx", config, per_channel=False)


def test_config_defaults_leave_the_choice_to_the_host(tmp_path):
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


def with_words(model, reader):
    words = {"calibrate_method": CalibrationMethod.MinMax, "calibrate_args": {"symmetric": False}, "per_channel": True}
    return get_qdq_config(model, reader, **words, min_real_range=1e-4, keep_removable_activations=True)


def as_olive_writes_it(model, reader):
    off = ("extra.Sigmoid.nnapi", "ActivationSymmetric", "EnableSubgraph", "AddQDQPairToWeight", "DedicatedQDQPair")
    on = ("WeightSymmetric", "ForceQuantizeNoInputCheck", "MatMulConstBOnly")
    rest = {"QDQOpTypePerChannelSupportToAxis": {}, "TensorQuantOverrides": {}, "MinimumRealRange": None}
    said = {
        "calibrate_method": CalibrationMethod.MinMax, "quant_format": QuantFormat.QDQ, "nodes_to_quantize": [],
        "activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8, "nodes_to_exclude": [],
        "op_types_to_quantize": sorted({n.op_type for n in model.graph.node}),
        "extra_options": {**dict.fromkeys(off, False), **dict.fromkeys(on, True), **rest},
    }  # fmt: skip
    return StaticQuantConfig(reader, per_channel=False, reduce_range=False, **said)


def by_config(plain, config, **more):
    """What a configuration makes of the same model and samples."""
    said = config(plain.model, models.FeedReader(plain.feeds), **more)
    return replace(plain, report=quantize(plain.model, plain.out, said, recipe="plain", promise=False, tune="off"))


@pytest.mark.parametrize("net", ["bn_net", "residual_block", "mobile_block", "transformer_block"])
def test_a_configuration_that_leaves_all_open(tmp_path, net):
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
    stock.quantize(changed(model), plain.out, config(model, models.FeedReader(plain.feeds)))
    assert quality(model, plain.out, plain.feeds) < decibels


def test_a_configuration_that_excludes_by_a_function(tmp_path):
    plain = make(models.residual_block(), tmp_path)
    made = by_config(plain, get_qdq_config, nodes_to_exclude=lambda _, node: node.op_type == "Gemm")
    assert made.integer & {"stem", "conv1", "conv2", "head"} == {"stem", "conv1", "conv2"}
    assert made.report.plan.by_node["head"].rule == "caller-excluded"
