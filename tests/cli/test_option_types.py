"""Values of the wrong type or out of range, in arguments and recipe files: exit code 2 and nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest

from kenosis_ort.cli import exits
from kenosis_ort.cli.main import main


def exit_code(arguments: list[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as stopped:  # bad usage, from the parser
        return int(str(stopped.code))


@pytest.mark.parametrize(
    "wrong",
    [
        *(["--threads", value] for value in ("99999999999", "-1", "1.5", "x", "", "9" * 5000)),
        *(["--accuracy-budget", value] for value in ("nan", "inf", "-1", "2", "x", "150%")),
        *(["--synthetic", value] for value in ("0", "-1", "1.5", "x")),
        *(["--batch-size", value] for value in ("0", "-1", "x")),
        *(["--option", value] for value in ("WeightSymmetric=no", "CalibPercentile=x", "BlockSize=1.5", "=1", "x")),
        *(["--seed", value] for value in ("-1", "x")),
        *([option, "x"] for option in ("--preset", "--tune", "--method", "--format", "--weight-type", "--target")),
        ["--protect-outputs", "x"],
        ["--recipe", ""],
        ["--cache", ""],
    ],
    ids=lambda wrong: "=".join(wrong)[:40],
)
def test_a_wrong_value_on_the_command_line(
    wrong: list[str], digits_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    synthetic = [] if wrong[0] == "--synthetic" else ["--synthetic", "1"]
    assert exit_code(["quantize", str(digits_model), str(tmp_path / "out.onnx"), *synthetic, *wrong]) == exits.ERROR
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["bench", "compare", "doctor"])
def test_threads_of_other_commands(command: str, digits_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = {"bench": 1, "compare": 2, "doctor": 0}[command]
    assert exit_code([command, *[str(digits_model)] * models, "--threads", "99999999999"]) == exits.ERROR
    assert "threads" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        *("options = 3", "data = []", "made = 'x'", "schema = 9", "schema = 'x'", "recipe = 5", "= ="),
        *("[options]\nthreads = 99999999999", "[options]\nthreads = -1", "[options]\nthreads = true"),
        *("[options]\ntune_budget_s = nan", "[options]\nper_channel = 'x'", "[options]\nnodes_to_exclude = [1]"),
        *("[options]\nverify = 'no'", "[options]\nextra_options = { WeightSymmetric = 'no' }", "[options]\ntarget = 5"),
        *("[options]\nrewrites = [1]", "[options]\npromise = 2024-01-01", "[options]\nactivation_type = 'int7'"),
        *("[data]\nbatch_size = 'x'", "[data]\nseed = -1", "[data]\nsynthetic = 0", "[data]\nnothing = 1"),
        *("[recipe]\nsamples = 'x'", "[recipe]\nequalize = 'no'", "[recipe]\nsmooth = nan", "[recipe]\nname = 3"),
    ],
    ids=lambda text: text.replace("\n", " "),
)
def test_a_wrong_value_in_a_recipe_file(
    text: str, digits_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(f"{text}\n" if "recipe" in text else f"{text}\n[recipe]\nname = 'mine'\n")
    out = tmp_path / "out.onnx"
    assert exit_code(["quantize", str(digits_model), str(out), "--synthetic", "1", "--recipe", str(recipe)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    assert list(tmp_path.iterdir()) == [recipe]
