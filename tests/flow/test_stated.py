"""What the call states counts, at an option's default too: before the recipe file, before the named recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from onnxruntime.quantization import QuantFormat, QuantType, StaticQuantConfig

from kenosis_ort import KenosisWarning, OptionError, Placement, Speed, Stages, quantize, quantize_static
from kenosis_ort.api import _previewed
from kenosis_ort.flow.request import Request
from kenosis_ort.graph.walk import opset_of
from kenosis_ort.option_types import RecipeFile
from kenosis_ort.recipe import RECIPES
from kenosis_ort.rewrite.attention import ATTENTION_OPSET
from kenosis_ort.runtime.limits import runtime_limits
from tests import models

MODEL = models.mlp()
HELD: dict[str, tuple[Any, Any]] = {
    "target": ("qnn", "ort-cpu"),
    "quant_format": (QuantFormat.QOperator, QuantFormat.QDQ),
    "use_external_data_format": (True, False),
    "verify": (False, True),
    "custom_op_libraries": (["no_such_library.so"], []),
    "nodes_to_exclude": (["a"], []),
    "protect_outputs": ("float", "auto"),
    "rewrites": (False, True),
    "max_opset": (17, None),
    "on_failure": ("float", "error"),
    "kv_cache": ("int8", None),
}
"""An option with what the file holds, and its default, which the call states."""
SPEED: dict[str, tuple[Any, Any]] = {
    "promise": (False, True),
    "tune": ("off", "model"),
    "threads": (2, 1),
    "sequence_lengths": ([1, 8], ()),
}


def request(**said: Any) -> Request:
    return _previewed(MODEL, said)


def file(**options: Any) -> RecipeFile:
    return RecipeFile(RECIPES["fast"], options)


def value(found: Request, name: str) -> Any:
    if name == "quant_format":
        return found.choices[name].value
    return found.target.name if name == "target" else getattr(found, name)


@pytest.mark.parametrize("name", HELD)
def test_a_default_that_the_call_states_goes_before_the_file(name: str) -> None:
    held, usual = HELD[name]
    plain, from_file = value(request(), name), value(request(recipe=file(**{name: held})), name)
    assert from_file != plain
    assert value(request(recipe=file(**{name: held}), **{name: usual}), name) == plain


@pytest.mark.parametrize("name", SPEED)
def test_a_field_of_speed_goes_before_the_file(name: str) -> None:
    held, usual = SPEED[name]
    assert getattr(request(recipe=file(**{name: held})).speed, name) == (
        tuple(held) if name == "sequence_lengths" else held
    )
    for said in ({"speed": Speed(**{name: usual})}, {name: usual}):
        assert getattr(request(recipe=file(**{name: held}), **said).speed, name) == usual
    other: dict[str, Any] = {"threads": 3} if name != "threads" else {"tune": "off"}
    assert getattr(request(recipe=file(**{name: held}), speed=Speed(**other)).speed, name) != usual


def test_named_recipes_give_way_to_what_is_stated() -> None:
    assert request(recipe="tiny").speed.promise is False
    assert request(recipe="tiny", speed=Speed(promise=True)).speed.promise is True
    assert request(recipe="tiny").speed.tune == "off"
    assert request(recipe="tiny", speed=Speed(tune="model")).speed.tune == "model"
    assert request(recipe="tiny", speed=Speed("model")).speed.tune == "model"
    held = file(protect_outputs="float")
    assert request(recipe=held, placement=Placement(protect_outputs="auto")).protect_outputs == "auto"
    assert request(recipe=held, placement=Placement(rewrites=False)).protect_outputs == "float"


@pytest.mark.parametrize("most", [13, 17, 21])
def test_the_operator_set_is_no_higher_than_asked_for(tmp_path: Path, most: int) -> None:
    for name, options in {"int8": {"promise": False}, "promise": {}, "stock": {"stages": Stages.none()}}.items():
        for given in (17, 22):
            model = models.conv_relu_chain(2, opset=given) if most < 17 or given > 17 else models.transformer_block()
            out = tmp_path / f"{name}{given}.onnx"
            report = quantize_static(model, out, models.reader(model), max_opset=most, **options)
            assert opset_of(onnx.load(out)) <= most
            assert report.options["max_opset"].value == most
            assert any(f"{most} at most, as asked for" in note for note in report.notes)
            assert report.recipe_file().options["max_opset"] == most


def test_what_needs_a_higher_operator_set_is_refused(tmp_path: Path) -> None:
    for wide in ({"activation_type": QuantType.QUInt16}, {"recipe": "weight-only-4"}):
        with pytest.raises(OptionError, match="needs operator set 21"):
            quantize_static(MODEL, tmp_path / "out.onnx", models.reader(MODEL), max_opset=17, **wide)
    assert not [*tmp_path.iterdir()]


def test_a_data_type_as_format_is_ignored_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(KenosisWarning, match="quant_format=QInt8 is no QuantFormat"):
        found = request(quant_format=QuantType.QInt8, recipe=file(quant_format=QuantFormat.QOperator))
    assert found.choices["quant_format"].value is QuantFormat.QOperator
    config = StaticQuantConfig(models.reader(MODEL), quant_format=QuantType.QInt8)
    with pytest.warns(KenosisWarning, match="quant_format"):
        assert quantize(MODEL, tmp_path / "out.onnx", config).options["quant_format"].value is QuantFormat.QDQ


@pytest.mark.parametrize("opset", [13, 17, 22])
def test_the_operator_set_rises_where_the_cost_table_gives_it_more_than_a_twentieth(tmp_path: Path, opset: int) -> None:
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


def test_a_target_without_cost_table_leaves_the_operator_set(tmp_path: Path) -> None:
    model, out = models.transformer_block(tokens=96), tmp_path / "out.onnx"
    report = quantize_static(model, out, models.reader(model), format="qcdq", weight_bits=4)
    assert opset_of(onnx.load(out)) == opset_of(model), report.notes
