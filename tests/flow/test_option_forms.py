"""One table of options: a value said in Python, in a recipe file or on the command line makes the same request."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType

from kenosis_ort import Stages
from kenosis_ort.api import _previewed
from kenosis_ort.cli import flags
from kenosis_ort.cli.main import build_parser
from kenosis_ort.flow.request import Request
from kenosis_ort.option_types import IN_FILE, OPTIONS, RecipeFile
from kenosis_ort.recipe import RECIPES
from tests import models

MODEL = models.mlp()
VALUES: dict[str, tuple[Any, str]] = {
    "activation_bits": (5, "--activation-bits 5 --format qcdq"),
    "activation_type": (QuantType.QInt8, "--activation-type int8"),
    "calibrate_method": (CalibrationMethod.Entropy, "--method entropy"),
    "calibration_providers": (("CPUExecutionProvider",), ""),
    "extra_options": ({"WeightSymmetric": False}, "--option WeightSymmetric=False"),
    "format": ("qop", "--format qop"),
    "host": ("vnni", "--for-host vnni"),
    "kv_cache": ("int8", "--kv-cache int8"),
    "max_opset": (17, "--max-opset 17"),
    "nodes_to_exclude": (("a", "b"), "--exclude a --exclude b"),
    "nodes_to_quantize": (("fc1",), "--only fc1"),
    "on_failure": ("float", "--on-failure float"),
    "op_types_to_quantize": (("Gemm",), "--op-type Gemm"),
    "per_channel": (False, "--no-per-channel"),
    "primary_inputs": (("x",), "--primary-input x"),
    "promise": (False, "--no-promise"),
    "protect_outputs": ("int8", "--protect-outputs int8"),
    "quant_format": (QuantFormat.QOperator, ""),
    "reduce_range": (True, "--reduce-range"),
    "rewrites": (False, "--no-rewrites"),
    "sequence_lengths": ((1, 8), "--sequence-lengths 1,8"),
    "stages": (Stages(nudge=False), ""),
    "target": ("qnn", "--target qnn"),
    "threads": (2, "--threads 2"),
    "tune": ("off", "--tune off"),
    "use_external_data_format": (True, "--external-data"),
    "verify": (False, "--no-verify"),
    "weight_bits": (4, "--weight-bits 4 --format qcdq"),
    "weight_type": (QuantType.QUInt8, "--weight-type uint8"),
}
BESIDE = {"weight_bits": {"format": "qcdq"}, "activation_bits": {"format": "qcdq"}}


def request(**given: Any) -> Request:
    return _previewed(MODEL, given)


def known(made: Request) -> dict[str, Any]:
    """What a request says, but for functions, which are made anew for each target."""
    fields = {name: value for name, value in vars(made).items() if name not in ("target", "choices")}
    return fields | {"target": made.target.name, "choices": {k: c.value for k, c in made.choices.items()}}


def test_every_option_that_a_file_may_hold_has_a_value_here() -> None:
    assert {*VALUES} == {*IN_FILE}


@pytest.mark.parametrize("name", VALUES)
def test_python_file_and_shell_say_the_same(name: str, tmp_path: Path) -> None:
    value, line = VALUES[name]
    given = {name: value, **BESIDE.get(name, {})}
    said = known(request(**given))
    assert said != known(request()), "the value is none that an option has by itself"
    RecipeFile(RECIPES["fast"], given).save(tmp_path / "recipe.toml")
    assert known(request(recipe=tmp_path / "recipe.toml")) == said
    if line:
        words = flags.given(build_parser().parse_args(shlex.split(f"quantize m.onnx {line}")))
        assert known(request(**flags.to_api(words))) == said


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in IN_FILE])
def test_a_file_holds_nothing_of_a_single_run(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        RecipeFile.from_toml(f'schema = 1\n[recipe]\nname = "fast"\n[options]\n{name} = "x"\n')
