"""``kenosis-ort quantize``: what it writes, prints and returns; held-out data and metrics of the caller's."""

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from kenosis_ort import OptionError, PlacementPlan, QuantizationReport, Recipe, options
from kenosis_ort.cli import flags, main, quantize_command
from kenosis_ort.demo import load_digits
from kenosis_ort.option_types import RecipeFile
from kenosis_ort.passes.recipe import SpeedChoice
from kenosis_ort.report import facts, quantization_report
from tests import models
from tests.cli.conftest import PLAIN


def test_the_output_is_named_after_the_model():
    for model, expected in (("m.onnx", "m.int8.onnx"), ("m", "m.int8.onnx"), ("a.b", "a.b.int8.onnx")):
        assert quantize_command.output_path(Namespace(out=None, model=Path("x") / model)) == Path("x") / expected


def test_without_a_name_the_output_goes_beside_the_model_and_quiet_prints_nothing(shell):
    before = shell.files().keys()
    assert shell(f"-q quantize float.onnx --data samples.npz --no-save-recipe {PLAIN}") == ("", "")
    assert shell.files().keys() - before == {"float.int8.onnx"}


def test_json_is_the_whole_report(shell):
    printed = shell.quantize("--json --report report.html")
    report = json.loads(printed.out)
    assert (report["model_output"], report["calibration"]["samples"]) == ("out.onnx", 12)
    assert any(node["kind"] == "integer" for node in report["plan"]["nodes"])
    assert report["size_after"] == len(shell.files()["out.onnx"])
    assert printed.data["files"] == {"report": "report.html", "recipe": "out.recipe.toml"}
    assert b"5 of 5 Conv/Gemm/MatMul" in shell.files()["report.html"]


@pytest.mark.parametrize(
    ("data", "samples"), [("--synthetic 8", 8), ("--data samples.npz --synthetic 4", 16), ("--recipe r.toml", 3)]
)
def test_samples_are_made_up_alone_beside_real_ones_or_by_the_recipe(shell, data, samples):
    recipe = '[recipe]\nranges = "minmax"\nequalize = false\nbias_correction = false\nsynthetic = 3\n'
    (shell.folder / "r.toml").write_text(recipe)
    how = data if "recipe" in data else f"{data} --recipe plain"
    assert shell(f"quantize float.onnx out.onnx {how} --no-promise --json").data["calibration"]["samples"] == samples


def test_what_made_up_data_lack_is_said_in_the_commands_words(shell):
    onnx.save(models.conv_relu_chain(2, channels=3, size=16), "m.onnx")
    printed = shell(f"quantize m.onnx --synthetic 4 --no-save-recipe {PLAIN}")
    assert "what would help: --input-range x=LOW,HIGH, or --mean and --std" in printed.line


def test_a_dry_run_shows_the_plan_and_writes_nothing(shell):
    before = shell.files()
    printed = shell("quantize float.onnx --dry-run --exclude layer5.conv")
    shown = ("conv-integer", "3 Conv", "caller-excluded", "1 Conv: layer5.conv", "--exclude", "Nothing is written")
    assert not printed.lacks(*shown)
    assert shell.files() == before
    found = shell("quantize float.onnx --dry-run --json").data
    assert found["placement"] == "planned"
    assert {"kind": "integer", "rule": "gemm-integer", "nodes": 1, "operators": {"Gemm": 1}} in found["rules"]
    assert sum(rule["nodes"] for rule in found["rules"]) == sum(found["nodes"].values())
    assert len(found["float_nodes"]) == found["nodes"]["float"]
    assert shell("quantize float.onnx --dry-run --json --format qoperator").data == found


# -- held-out data and metrics

METRICS = """
import numpy as np
labels = np.load("labels.npy")

def top1(outputs, reference, indices):
    return float(np.mean([o["logits"].argmax() == labels[i] for o, i in zip(outputs, indices)]))

class Top1:
    def reset(self): self.right = []
    def update(self, outputs, reference, index): self.right.append(outputs["logits"].argmax() == labels[index])
    def compute(self): return np.mean(self.right)

updated = Top1()
number = 3
"""


@pytest.fixture
def held_out(shell):
    digits = load_digits()
    np.savez("held_out.npz", image=digits.images[:40])
    np.save("labels.npy", digits.labels[:40])
    (shell.folder / "metrics_of_digits.py").write_text(METRICS)
    return shell


@pytest.mark.parametrize("metric", ["top1", "updated", ""])
def test_labels_and_held_out_data(held_out, trained_model, metric):
    named = f"--metric metrics_of_digits.py:{metric}" if metric else ""
    found = held_out.quantize(f"--json --eval-data held_out.npz {named}", model=trained_model).data["measure"]
    assert (found["samples"], found["source"]) == (40, "evaluation sample")
    assert ("metric" if metric else "top-1 agreement") in found["measure"]
    assert found["float_value"] >= 0.95
    assert abs(found["loss"]) <= 0.05


@pytest.mark.parametrize(("arguments", "message"), [
    ("--eval-data missing.npz", "does not exist"), ("--metric top1", "is not module:name"),
    ("--metric metrics_of_digits.py:top5", "no function 'top5'. Did you mean 'top1'"),
    ("--metric metrics_of_digits.py:number", "metric=3"), ("--metric nowhere:top1", "nowhere"),
])  # fmt: skip
def test_mistakes_in_what_is_measured(held_out, arguments, message):
    assert message in held_out.quantize(f"--json {arguments}", code=2).err
    assert "out.onnx" not in held_out.files()


# -- the recipe beside every output: it makes the same bytes again, and a wrong one is refused

CASES = {
    "options": "--data samples.npz --exclude layer5.conv --method percentile --option ActivationSymmetric=true",
    "defaults": "--data samples.npz", "made up": "--synthetic 5 --seed 3 --input-range image=0,1 --recipe plain",
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_recipe_makes_the_same_bytes_again(case, shell):
    shell(f"quantize float.onnx first.onnx {CASES[case]}")
    data = "" if case == "made up" else "--data samples.npz"  # made-up data come from the recipe
    shell(f"quantize float.onnx again.onnx {data} --recipe first.recipe.toml")
    before = shell.files()
    assert before["first.onnx"] == before["again.onnx"]
    if case == "made up":
        shell("quantize float.onnx first.onnx --synthetic 2 --recipe first.recipe.toml")
        assert shell.files()["first.onnx"] != before["first.onnx"], "what is given goes before what is recorded"
        assert shell.files()["first.recipe.toml"] == before["first.recipe.toml"], "one that is used is not written over"


def test_it_is_a_recipe_for_the_library_as_well(shell):
    how = "--save-recipe mine.toml -q --recipe plain --accuracy-budget 1%"
    shell(f"quantize float.onnx o.onnx --data samples.npz {how}")
    assert "o.recipe.toml" not in shell.files()
    recipe = Recipe.load("mine.toml")
    assert (recipe.mixed_precision, recipe.accuracy_budget) == (True, 0.01)
    assert recipe.speed.form == "int8", "what timing decided"
    file = RecipeFile.load("mine.toml")
    assert set(quantization_report.HOST_CHOICES) <= file.options.keys()
    assert (file.host, "host" in file.options) == ("vnni", False), "the machine's choice is none of the caller's"
    assert str(shell.folder) not in str(replace(file, data={})), "no folder of this machine but where the data were"


def test_what_is_wrong_in_it_is_named():
    for said, told in (({"meen": "1"}, "Did you mean 'mean'?"), ({"mean": "grey"}, "'grey' is not a list of numbers")):
        with pytest.raises(OptionError, match=r"r\.toml.*Fix: ") as caught:
            quantize_command.saved_data(RecipeFile(Recipe(), data=said), "r.toml")
        assert told in str(caught.value)


DATA_OPTIONS = """--synthetic 4 --seed 2 --batch-size 3 --input-range 0,255 --input-range ids=0,9 --input-shape ids=1x8
    --input-kind ids=tokens --mean 0.485,0.456,0.406 --std 0.1,2,3e-05 --input image --size 32x48 --layout NHWC
    --scale 0.00392156862745098 --channel-order BGR --resize crop --fill 3 --limit 7"""


def test_what_was_said_about_data_survives_a_file(tmp_path):
    said = flags.given_data(main.build_parser().parse_args(["quantize", "m.onnx", *DATA_OPTIONS.split()]))
    assert said.keys() == {*flags.DATA_NAMES} - {"data"}
    path = tmp_path / "r.toml"
    RecipeFile(Recipe(), data={name: quantize_command.spelled(value) for name, value in said.items()}).save(path)
    read = quantize_command.saved_data(RecipeFile.load(path), str(path))
    assert read == said
    nothing = {name: [] if isinstance(said.get(name), list) else None for name in flags.DATA_NAMES}
    unsaid = Namespace(**{**nothing, "seed": 9})
    quantize_command.recall(unsaid, read)
    recalled = vars(unsaid).pop("recalled")
    assert vars(unsaid) == {**said, "data": None, "seed": 9}
    assert recalled == said.keys() - {"seed"}
    unsaid = Namespace(**{**nothing, "data": "samples.npz"})
    quantize_command.recall(unsaid, read)
    assert unsaid.synthetic is None, "real data in place of made-up ones"


def test_what_timing_decided_is_in_the_recipe_and_nothing_is_timed_where_nothing_was():
    summary = facts.CalibrationSummary("minmax", 1, 1, 0.0)
    said = {name: options.OptionChoice(value, "caller") for name, value in {"tune": "off", "threads": 2}.items()}
    for choice in (SpeedChoice("ab", "float"), None):
        recipe = Recipe(speed=choice)
        report = QuantizationReport("m", "o", "ort-cpu", said, PlacementPlan("ort-cpu"), None, summary, recipe=recipe)
        told = {"threads": 2, "tune": "off", **({} if choice else {"promise": False})}
        assert report.recipe_file().options.items() >= told.items()
        assert choice is None or "promise" not in report.recipe_file().options
