"""The recipe beside every output: it makes the same bytes again, and a wrong one is refused."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import pytest
import tomli_w

from kenosis_ort import PlacementPlan, QuantizationReport, Recipe
from kenosis_ort.cli import flags, quantize_command
from kenosis_ort.cli.main import build_parser
from kenosis_ort.errors import OptionError
from kenosis_ort.option_types import RecipeFile
from kenosis_ort.recipe import SpeedChoice
from kenosis_ort.report import CalibrationSummary, OptionChoice
from kenosis_ort.report.quantization_report import HOST_CHOICES
from tests.cli.conftest import Shell

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CASES = {
    "options": "--no-per-channel --exclude layer5.conv --protect-outputs int8 --method percentile",
    "extra options": "--option ActivationSymmetric=true --activation-type int8 --recipe plain",
    "defaults": "",
}
MADE_UP = "--synthetic 5 --seed 3 --input-range image=0,1 --recipe plain"


@pytest.mark.parametrize("case", CASES)
def test_the_recipe_makes_the_same_bytes_again(case: str, shell: Shell) -> None:
    shell(f"quantize float.onnx first.onnx --data samples.npz {CASES[case]}")
    again = shell("quantize float.onnx again.onnx --data samples.npz --json --recipe first.recipe.toml")
    assert again.data["same_as_recorded"] is True
    files = shell.files()
    assert files["first.onnx"] == files["again.onnx"]


def test_made_up_data_comes_from_the_recipe_and_others_are_told_from_it(shell: Shell) -> None:
    shell(f"quantize float.onnx first.onnx {MADE_UP}")
    assert "byte for byte" in shell("quantize float.onnx again.onnx --recipe first.recipe.toml").out
    before = shell.files()
    assert before["first.onnx"] == before["again.onnx"]
    printed = shell("quantize float.onnx first.onnx --synthetic 2 --recipe first.recipe.toml")
    assert "is not the recorded one" in printed.line
    assert shell.files()["first.recipe.toml"] == before["first.recipe.toml"], "one that is used is not written over"


def test_it_is_a_recipe_for_the_library_as_well(shell: Shell) -> None:
    shell(
        "quantize float.onnx o.onnx --data samples.npz --save-recipe mine.toml -q --recipe plain --accuracy-budget 1%"
    )
    assert "o.recipe.toml" not in shell.files()
    recipe = Recipe.load("mine.toml")
    assert recipe.mixed_precision
    assert recipe.accuracy_budget == 0.01
    raw = tomllib.loads(Path("mine.toml").read_text())
    assert raw["made"]["output_sha256"] == quantize_command.sha256(Path("o.onnx"))
    assert set(HOST_CHOICES) <= raw["options"].keys()
    assert raw["recipe"]["speed"]["form"] == "int8", "what timing decided"
    assert str(shell.folder) not in str({**raw, "data": {}}), "no folder of this machine but where the data were"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[data]\nmeen = "1"', "Did you mean 'mean'?"),
        ('[data]\nmean = "grey"', "'grey' is not a list of numbers"),
    ],
)
def test_what_is_wrong_in_it_is_named(tmp_path: Path, text: str, message: str):
    path = tmp_path / "r.toml"
    path.write_text(f"[recipe]\n{text}\n")
    with pytest.raises(OptionError, match="Fix: ") as caught:
        quantize_command.saved_data(RecipeFile.load(path), str(path))
    assert message in str(caught.value)
    assert "r.toml" in str(caught.value)


DATA_OPTIONS = """--synthetic 4 --seed 2 --batch-size 3 --input-range 0,255 --input-range ids=0,9 --input-shape ids=1x8
    --input-kind ids=tokens --mean 0.485,0.456,0.406 --std 0.1,2,3e-05 --input image --size 32x48 --layout NHWC
    --scale 0.00392156862745098 --channel-order BGR --resize crop --fill 3 --limit 7"""


def test_what_was_said_about_data_survives_a_file(tmp_path: Path):
    said = flags.given_data(build_parser().parse_args(["quantize", "m.onnx", *DATA_OPTIONS.split()]))
    assert said.keys() == {*flags.DATA_NAMES} - {"data"}
    path = tmp_path / "r.toml"
    spelled = {name: quantize_command.spelled(value) for name, value in said.items()}
    path.write_text(tomli_w.dumps({"recipe": {}, "data": spelled}))
    read = quantize_command.saved_data(RecipeFile.load(path), str(path))
    assert read == said
    unsaid = Namespace(**{name: [] if isinstance(said.get(name), list) else None for name in flags.DATA_NAMES})
    unsaid.seed = 9
    quantize_command.recall(unsaid, read)
    recalled = vars(unsaid).pop("recalled")
    assert vars(unsaid) == {**said, "data": None, "seed": 9}
    assert recalled == said.keys() - {"seed"}
    unsaid = Namespace(**{name: [] if isinstance(said.get(name), list) else None for name in flags.DATA_NAMES})
    unsaid.data = "samples.npz"
    quantize_command.recall(unsaid, read)
    assert unsaid.synthetic is None, "real data in place of made-up ones"


def test_what_timing_decided_is_in_the_recipe_and_nothing_is_timed_where_nothing_was():
    summary = CalibrationSummary("minmax", 1, 1, 0.0)
    said = {name: OptionChoice(value, "caller") for name, value in {"tune": "off", "threads": 2}.items()}
    for choice in (SpeedChoice("ab", "float"), None):
        recipe = Recipe(speed=choice)
        report = QuantizationReport("m", "o", "ort-cpu", said, PlacementPlan("ort-cpu"), None, summary, recipe=recipe)
        options = report.recipe_file().options
        assert options["threads"] == 2
        assert options.get("promise", True) is (choice is not None)
        assert options["tune"] == "off"
