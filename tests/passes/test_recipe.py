"""Recipes: TOML in and out, checked; a file loses nothing, and the call of a report makes the same bytes."""

from dataclasses import FrozenInstanceError, replace

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st
from onnxruntime.quantization import CalibrationMethod, QuantType

from kenosis_ort import OptionError, Recipe, Speed, Stages, preview, quantize_static
from kenosis_ort.option_types import IN_FILE, RecipeFile, resolve
from kenosis_ort.passes.recipe import RECIPES, SpeedChoice, resolve_recipe
from kenosis_ort.report.html.page import python_call
from tests import models

shares = st.floats(0, 1)
recipes = st.builds(
    Recipe, name=st.text(st.characters(codec="utf-8"), max_size=20),
    ranges=st.sampled_from(["auto", "minmax", "percentile", "entropy"]), equalize=st.booleans(),
    bias_correction=st.booleans(), rounding=st.sampled_from(["nearest", "learned"]),
    smooth=st.sampled_from(["auto", "off"]) | shares, row_scales=st.booleans(), mixed_precision=st.booleans(),
    accuracy_budget=shares, max_float_share=shares, samples=st.integers(0, 1000), synthetic=st.integers(0, 1000),
    weight_only=st.sampled_from([0, 4, 8]), speed=st.none() | st.just(SpeedChoice("ab", "int8")),
)  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_names_and_files(name, tmp_path):
    recipe = resolve_recipe(name)
    recipe.save(tmp_path / "r.toml")
    assert resolve_recipe(tmp_path / "r.toml") == resolve_recipe(str(tmp_path / "r.toml")) == recipe
    assert (recipe.name, resolve_recipe(recipe) is recipe) == (name, True)
    assert resolve(recipe).options == {}  # its name alone says more than passes
    with pytest.raises(FrozenInstanceError):
        recipe.samples = 3


def test_unknown_names(tmp_path):
    (tmp_path / "big.toml").write_bytes(b"#" * (2**20 + 1))
    wrong = ("acurate", "Did you mean 'accurate'"), ("missing.toml", "cannot be read"), ("big.toml", "larger than")
    for name, said in wrong:
        with pytest.raises(OptionError, match=said):
            resolve_recipe(tmp_path / name if "." in name else name)


# ---- files -----------------------------------------------------------------------------------------------------------


types = st.sampled_from([QuantType.QInt8, QuantType.QUInt8, QuantType.QInt16, QuantType.QUInt16, QuantType.QInt4])
names = st.lists(st.text("abc/_.", min_size=1, max_size=6), min_size=1, max_size=3).map(tuple)
options = st.fixed_dictionaries({}, optional={
    "activation_type": types, "weight_type": types, "per_channel": st.booleans(), "reduce_range": st.booleans(),
    "calibrate_method": st.sampled_from(CalibrationMethod), "nodes_to_exclude": names, "op_types_to_quantize": names,
    "primary_inputs": names, "rewrites": st.booleans() | names, "verify": st.booleans(), "promise": st.booleans(),
    "stages": st.builds(Stages, bias=st.booleans(), placement=st.booleans()), "tune": st.sampled_from(["off", "model"]),
    "threads": st.integers(0, 9), "sequence_lengths": st.lists(st.integers(1, 999)).map(tuple),
    "target": st.just("ort-cpu"), "extra_options": st.sampled_from([{}, {"ActivationSymmetric": True}]),
})  # fmt: skip


@given(recipes, options)
def test_what_is_written_is_read(recipe, said):
    file = RecipeFile(recipe, said, {"limit": 3}, "vnni")
    assert RecipeFile.from_toml(file.to_toml()) == file


def test_overrides_of_tensors_survive():
    scale, zero = np.array(0.1, np.float32), np.array(3, np.uint8)
    entry = {"quant_type": QuantType.QUInt8, "scale": scale, "zero_point": zero, "convert": None}
    convert = {"quant_type": QuantType.QUInt16, "recv_nodes": {"b", "a"}}
    said = {"TensorQuantOverrides": {"x/0": [entry], "y": [{"axis": 0}, {"convert": convert}]}}
    file = RecipeFile(Recipe(), {"extra_options": said})
    held = RecipeFile.from_toml(file.to_toml()).options["extra_options"]["TensorQuantOverrides"]
    (first,) = held["x/0"]
    assert held["y"] == [{"axis": 0}, {"convert": convert}]
    assert first == {"quant_type": QuantType.QUInt8, "scale": scale, "zero_point": zero}
    assert (first["scale"].dtype, first["zero_point"].dtype) == (scale.dtype, zero.dtype)


@pytest.mark.parametrize(("text", "says"), [
    ("nonsense", "not valid TOML"), ("schema = 9\n[recipe]\n", "schema 9"), ("a = 1\n", "no \\[recipe\\]"),
    ("[recipe]\nequalise = true\n", "Did you mean 'equalize'"),
    ("[recipe]\nsamples = -1\n", "samples=-1 .*r.toml: samples"),
    ("[recipe.bits]\na = {weights = 9}\n", "=9 .*r.toml: bits.'a'"),
    ("[recipe.speed]\nmodel = 1\nform = 'a'\n", "'speed' must hold"),
    ("[recipe]\n[optoins]\nthreads = 1", "Did you mean 'options'"),
    ("[recipe]\n[options]\nper_chanel = true", "Did you mean 'per_channel'"),
    ("[recipe]\n[options]\nactivation_type = 'uint9'", "Did you mean 'uint8'"),
    ("[recipe]\n[options.stages]\nbiass = false", "Did you mean 'bias'"),
    ("[recipe]\n[options]\nmodel_output = 'x'", "unknown option 'model_output'"),
    ("options = 3\n[recipe]\n", "is no table"),
    ("[recipe]\n[options]\nweight_type = ['int8']", "is unknown. Did you mean 'int8'"),
    ("[recipe]\n[options]\nstages = {weights = 3}", "stages.weights=3 is a int"),
    ("[recipe]\n[options.extra_options.TensorQuantOverrides]\nx = [{scale = {dtype = 'nonsense', values = [1]}}]",
     "extra_options cannot be read"),
    ("x = " + "[" * 5000 + "]" * 5000, "not valid TOML"),
], ids=lambda text: text[:50])  # fmt: skip
def test_what_is_wrong_is_named(tmp_path, text, says):
    path = tmp_path / "r.toml"
    path.write_text(text)
    with pytest.raises(OptionError, match=says) as caught:
        preview(models.bn_net(), recipe=path)
    assert (f"[at: {path}" in str(caught.value), bool(caught.value.fix)) == (True, True)


def test_settings_in_place_of_a_recipes_own():
    file = RecipeFile(RECIPES["accurate"], {"threads": 2})
    assert file.with_settings({}) is file
    changed = file.with_settings({"smooth": 0.5, "equalize": False})
    assert changed.options == file.options
    assert changed.recipe == replace(RECIPES["accurate"], name="custom", smooth=0.5, equalize=False)
    for said, says in (({"equalise": False}, "Did you mean 'equalize'"), ({"smooth.by": 1}, "smooth")):
        with pytest.raises(OptionError, match=says):
            file.with_settings(said)


# ---- the same bytes -----------------------------------------------------------------------------------------------

OVERRIDE = [{"quant_type": QuantType.QUInt8, "rmin": np.float32(-3.0), "rmax": np.float32(3.0)}]
CALLS = {
    "nothing": {}, "types": {"activation_type": QuantType.QInt8, "per_channel": False, "reduce_range": True},
    "method": {"calibrate_method": CalibrationMethod.Percentile, "extra_options": {"CalibPercentile": 99.9}},
    "overrides": {"extra_options": {"TensorQuantOverrides": {"x": OVERRIDE}, "ActivationSymmetric": True}},
    "places": {"nodes_to_exclude": ["conv1"], "protect_outputs": "int8", "rewrites": False, "verify": False},
    "stages": {"stages": Stages(bias=False, nudge=False), "recipe": "plain"}, "stock": {"stages": Stages.none()},
    "accuracy": {"recipe": Recipe("mine", equalize=False, rounding="learned", samples=12), "accuracy_budget": 1e-6},
    "speed": {"speed": Speed(promise=False, tune="off", threads=2), "op_types_to_quantize": ["Conv"]},
    "named": {"recipe": "tiny"}, "bits": {"format": "qcdq", "weight_bits": 4},
    "operators": {"format": "qop", "extra_options": {"ActivationSymmetric": True}},
    "smooth": {"extra_options": {"SmoothQuant": True, "SmoothQuantAlpha": 0.4}},
}  # fmt: skip


@pytest.mark.parametrize("case", CALLS)
def test_call_and_file_make_the_same_bytes(case, tmp_path):
    model, source, out = models.bn_net(), tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(model, source)
    feeds = models.feeds(model, 12)
    report = quantize_static(source, out, models.FeedReader(feeds), **CALLS[case])
    first = out.read_bytes()
    report.save_recipe(tmp_path / "out.recipe.toml")
    script = python_call(report)
    assert script.count("= ...") == 1
    out.unlink()
    script = script.replace("reader = ...", "")
    exec(compile(script, "call", "exec", dont_inherit=True), {"reader": models.FeedReader(feeds)})
    assert out.read_bytes() == first, script
    assert RecipeFile.load(tmp_path / "out.recipe.toml") == report.recipe_file()


def test_what_a_script_cannot_hold_is_left_to_fill_in(tmp_path):
    cache = tmp_path / "cache.json"
    said = {"metric": lambda outputs, reference: 1.0, "calibration_cache_path": cache, "promise": False}
    model = models.bn_net()
    call = python_call(quantize_static(model, tmp_path / "out.onnx", models.reader(model, 8), **said))
    lines = ("reader = ...  # ", "model = ...  # ", "metric = ...  # ", "    metric=metric,", repr(str(cache)))
    assert "custom_op_libraries" not in call
    assert [line for line in lines if line not in call] == []
    compile(call, "call", "exec")
    assert not {"metric", "calibration_cache_path"} & {*IN_FILE}
