"""From arguments, presets and recipe files to the API's keywords."""

from __future__ import annotations

import inspect
import shlex
from enum import Enum
from typing import get_args

import pytest

from kenosis_ort import RECIPES, quantize_static
from kenosis_ort.cli import data, options
from kenosis_ort.cli.main import build_parser
from kenosis_ort.cli.quantize import words_in_force
from kenosis_ort.options import Format
from kenosis_ort.quantizer.stock import CalibrationMethod, QuantType
from kenosis_ort.recipe import resolve_recipe


def said(line: str) -> dict[str, object]:
    return options.said(build_parser().parse_args(shlex.split(line)))


def test_nothing_said_means_nothing_passed_on():
    assert said("quantize a.onnx b.onnx --synthetic") == {}
    assert build_parser().parse_args(["quantize", "a.onnx", "--synthetic"]).synthetic == data.DEFAULT_SYNTHETIC


def test_every_option_reaches_the_api():
    line = """quantize a.onnx b.onnx --synthetic 1 --per-channel --no-reduce-range --activation-type int8
        --weight-type uint8 --exclude n1 --exclude n2 --only n3 --op-type Conv --primary-input image --external-data
        --cache c.json --custom-op-library lib.so --no-verify --protect-outputs float --target ort-cpu --format qdq
        --weight-bits 4 --activation-bits 5
        --method entropy --option WeightSymmetric=False --recipe strict --accuracy-budget 0.5% --tune measure
        --tune-budget 5 --tuning-cache t --threads 4 --no-promise --no-rewrites"""
    keywords = options.to_api(said(line))
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
        "tune": "measure",
        "tune_budget_s": 5.0,
        "tuning_cache": "t",
        "threads": 4,
        "promise": False,
        "rewrites": False,
    }
    assert keywords.keys() <= inspect.signature(quantize_static).parameters.keys()


def test_the_words_are_those_of_the_library():
    assert set(options.METHODS.values()) == set(CalibrationMethod.__members__)
    assert set(options.METHODS) == set(data.METHODS)
    assert set(options.FORMATS.values()) == set(get_args(Format))
    assert options.to_api({"format": "qoperator"}) == {"format": "qop"}
    assert set(options.TYPES.values()) <= set(QuantType.__members__)
    for word in options.TYPES:
        assert options.type_word(options.to_api({"weight_type": word})["weight_type"]) == word
    assert options.type_word(True) is True


@pytest.mark.parametrize("preset", options.PRESETS)
def test_a_preset_is_made_of_options_that_exist(preset: str):
    words = options.PRESETS[preset]
    assert words.keys() <= inspect.signature(quantize_static).parameters.keys()
    assert resolve_recipe(words.get("recipe", "fast")).name in RECIPES


def test_what_is_said_goes_before_a_preset():
    def words(line: str) -> dict[str, object]:
        return words_in_force(build_parser().parse_args(shlex.split(line)), None)

    assert words("quantize m.onnx") == {}
    assert words("quantize m.onnx --preset accurate") == {"recipe": "accurate"}
    assert words("quantize m.onnx --preset accurate --recipe plain") == {"recipe": "plain"}
    assert words("quantize m.onnx --preset max-speed --tune off") == {"recipe": "fast", "tune": "off"}
