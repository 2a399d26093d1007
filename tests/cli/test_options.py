"""From arguments to the API's keywords."""

from __future__ import annotations

import inspect
import re
import shlex
from contextlib import redirect_stdout
from enum import Enum
from io import StringIO
from typing import get_args

import pytest

from kenosis_ort import RECIPES, OptionError, quantize_static
from kenosis_ort.cli import flags
from kenosis_ort.cli.main import build_parser
from kenosis_ort.option_types import OPTIONS
from kenosis_ort.options import KEYWORDS, Format
from kenosis_ort.recipe_file import RecipeFile, resolve


def said(line: str) -> dict[str, object]:
    return flags.given(build_parser().parse_args(shlex.split(line)))


def test_nothing_said_means_nothing_passed_on():
    assert said("quantize a.onnx b.onnx --synthetic") == {}
    assert build_parser().parse_args(["quantize", "a.onnx", "--synthetic"]).synthetic == flags.DEFAULT_SYNTHETIC


def test_every_option_reaches_the_api():
    line = """quantize a.onnx b.onnx --synthetic 1 --per-channel --no-reduce-range --activation-type int8
        --weight-type uint8 --exclude n1 --exclude n2 --only n3 --op-type Conv --primary-input image --external-data
        --cache c.json --custom-op-library lib.so --no-verify --protect-outputs float --target ort-cpu --format qdq
        --weight-bits 4 --activation-bits 5
        --method entropy --option WeightSymmetric=False --recipe strict --accuracy-budget 0.5% --tune off
        --threads 4 --no-promise --no-rewrites
        --sequence-lengths 1,128"""
    keywords = flags.to_api(said(line))
    assert {key: value.name if isinstance(value, Enum) else value for key, value in keywords.items()} == {
        "format": "qdq",
        "weight_bits": 4,
        "activation_bits": 5,
        "op_types_to_quantize": ["Conv"],
        "per_channel": True,
        "reduce_range": False,
        "activation_type": "QInt8",
        "weight_type": "QUInt8",
        "nodes_to_quantize": ["n3"],
        "nodes_to_exclude": ["n1", "n2"],
        "use_external_data_format": True,
        "calibrate_method": "Entropy",
        "extra_options": {"WeightSymmetric": False},
        "calibration_cache_path": "c.json",
        "target": "ort-cpu",
        "protect_outputs": "float",
        "primary_inputs": ["image"],
        "custom_op_libraries": ["lib.so"],
        "verify": False,
        "recipe": "strict",
        "accuracy_budget": 0.005,
        "tune": "off",
        "threads": 4,
        "promise": False,
        "sequence_lengths": [1, 128],
        "rewrites": False,
    }
    assert keywords.keys() <= {*inspect.signature(quantize_static).parameters, *KEYWORDS}


def test_the_words_are_those_of_the_library():
    assert flags.FLAGS.keys() <= OPTIONS.keys()
    assert {*flags.FLAGS["calibrate_method"].choices} == OPTIONS["calibrate_method"].words.keys()
    assert {*flags.FLAGS["format"].choices} == {*get_args(Format), "qoperator"}
    assert flags.to_api({"format": "qoperator"}) == {"format": "qop"}
    for name in ("weight_type", "activation_type"):
        assert {*flags.FLAGS[name].choices} <= OPTIONS[name].words.keys()


def test_advice_in_the_shells_words_is_understood_by_the_command():
    """Each flag, from the option as Python spells it: parsed again, it is the value that Python would take."""
    values: dict[str, list[object]] = {
        "nodes_to_exclude": [["/a/Conv"]],
        "nodes_to_quantize": [["/a/Conv"]],
        "op_types_to_quantize": [["Conv"]],
        "primary_inputs": [["x"]],
        "threads": [2],
        "max_opset": [17],
        "weight_bits": [4],
        "activation_bits": [4],
    }
    text_free = {"extra_options", "sequence_lengths", "custom_op_libraries", "accuracy_budget"}
    for name, flag in flags.FLAGS.items():
        if name in text_free:
            continue
        texts = [True, False] if flag.switch else values.get(name, [*flag.choices] or ["a_word"])
        for value in texts:
            said = flags.in_shell_words(f"Leave it, or pass {name}={value!r}.")
            tokens = shlex.split(said.removeprefix("Leave it, or pass ").removesuffix("."))
            parsed = flags.given(build_parser().parse_args(["quantize", "m.onnx", *tokens]))
            assert parsed == {name: value}
    for kind in ("weight_type", "activation_type"):
        for word in flags.FLAGS[kind].choices:
            enum = OPTIONS[kind].words[word]
            said = flags.in_shell_words(f"{kind}=QuantType.{enum.name}")
            assert said == f"{flags.FLAGS[kind].name} {word}"


def test_a_preset_is_a_recipe():
    assert (
        said("quantize m.onnx --preset accurate") == said("quantize m.onnx --recipe accurate") == {"recipe": "accurate"}
    )
    assert said("quantize m.onnx --preset accurate --recipe plain") == {"recipe": "plain"}
    for name in RECIPES:
        assert resolve(name).options.keys() <= {*inspect.signature(quantize_static).parameters, *KEYWORDS}
        assert f"{name}:" in help_of("--help")


def test_a_setting_takes_the_place_of_the_recipes_own():
    file = said("quantize m.onnx --recipe accurate --set equalize=false --set smooth=0.5")["recipe"]
    assert isinstance(file, RecipeFile)
    assert (file.recipe.equalize, file.recipe.smooth, file.recipe.rounding) == (False, 0.5, "learned")
    with pytest.raises(OptionError, match="Did you mean 'equalize'"):
        said("quantize m.onnx --set equalise=false")


def help_of(option: str) -> str:
    printed = StringIO()
    with redirect_stdout(printed), pytest.raises(SystemExit) as ended:
        build_parser().parse_args(["quantize", option])
    assert ended.value.code in (0, None)
    return printed.getvalue()


def test_help_shows_the_first_options_and_help_all_shows_the_rest():
    first, everything = (
        set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", help_of(o), re.M)) for o in ("--help", "--help-all")
    )
    assert first < everything
    assert len(first - {"--help", "--help-all", "--json", "--quiet", "--verbose"}) <= 10
    assert {"--data", "--recipe"} <= first
    assert {"--tune", "--seed", "--weight-type"} <= everything - first
