"""From arguments to the API's keywords, and from the API's words to the shell's."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import re
import shlex
from collections.abc import Callable
from contextlib import redirect_stdout
from enum import Enum
from io import StringIO
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort import RECIPES, OptionError, quantize_static
from kenosis_ort.cli import flags, parser
from kenosis_ort.cli.main import build_parser
from kenosis_ort.option_types import OPTIONS, RecipeFile, resolve
from kenosis_ort.options import KEYWORDS, Format


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
        texts = (
            [True, False]
            if flag.settings.get("action") is argparse.BooleanOptionalAction
            else values.get(name, [*flag.choices] or ["a_word"])
        )
        for value in texts:
            said = flags.in_shell_words(f"Leave it, or pass {name}={value!r}.")
            tokens = shlex.split(said.removeprefix("Leave it, or pass ").removesuffix("."))
            parsed = flags.given(build_parser().parse_args(["quantize", "m.onnx", *tokens]))
            assert parsed == {name: value}
    for kind in ("weight_type", "activation_type"):
        for word in flags.FLAGS[kind].choices:
            enum = OPTIONS[kind].words[word]
            said = flags.in_shell_words(f"{kind}=QuantType.{enum.name}")
            assert said == f"{flags.FLAGS[kind].names[0]} {word}"


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


# -- values as the shell gives them


@pytest.mark.parametrize(
    ("read", "text", "expected"),
    [
        (parser.whole, "0", 0),
        (parser.positive, "3", 3),
        (parser.number, "-1.5", -1.5),
        (parser.seconds, "0.5", 0.5),
        (parser.share, "0.005", 0.005),
        (parser.share, "0.5%", 0.005),
        (parser.share, "100%", 1.0),
        (parser.numbers, "0.485,0.456", (0.485, 0.456)),
        (parser.image_size, "224X320", (224, 320)),
        (parser.named_shape, "ids=1x128", ("ids", (1, 128))),
        (parser.named_shape, "a=b=2", ("a=b", (2,))),
        (parser.named_word, "x=token ids", ("x", "token ids")),
        (parser.input_range, "0,255", (None, (0.0, 255.0))),
        (parser.input_range, "image=-1,1", ("image", (-1.0, 1.0))),
        (parser.extra_option, "A=True", ("A", True)),
        (parser.extra_option, 'A={"x": [1]}', ("A", {"x": [1]})),
        (parser.extra_option, "A=b=c", ("A", "b=c")),
        (parser.extra_option, "A=", ("A", "")),
    ],
)
def test_what_is_taken(read: Callable[[str], Any], text: str, expected: object):
    assert read(text) == expected


@pytest.mark.parametrize(
    ("read", "texts"),
    [
        (parser.whole, ["-1", "1.5", "²"]),
        (parser.positive, ["0"]),
        (parser.number, ["nan", "inf"]),
        (parser.seconds, ["0", "soon"]),
        (parser.share, ["1.5", "101%", "-1%"]),
        (parser.numbers, ["a,b", "1,,2"]),
        (parser.image_size, ["224", "1x2x3", "0x3"]),
        (parser.named_shape, ["1x2", "=1x2", "a=axb"]),
        (parser.named_word, ["a="]),
        (parser.input_range, ["1,0", "a=1"]),
        (parser.extra_option, ["A", "=1"]),
    ],
)
@given(data=st.data())
def test_what_is_refused_is_no_usage_and_nothing_else_breaks_a_reader(
    read: Callable[[str], Any], texts: list[str], data: st.DataObject
) -> None:
    for text in texts:
        with pytest.raises(argparse.ArgumentTypeError):
            read(text)
    with contextlib.suppress(argparse.ArgumentTypeError):
        read(data.draw(st.text(max_size=12)))


# -- advice worded for Python, in the shell's words


@pytest.mark.parametrize(
    ("python", "shell"),
    [
        ("nodes_to_exclude=['/a/Conv']", "--exclude '/a/Conv'"),
        ("take the node out of nodes_to_exclude", "take the node out of --exclude"),
        ("protect_outputs='int8' quantizes it", "--protect-outputs int8 quantizes it"),
        ("try recipe='data-free'", "try --recipe data-free"),
        ("activation_type=QuantType.QUInt8, or leave it out", "--activation-type uint8, or leave it out"),
        ("weight_type=QuantType.QInt8", "--weight-type int8"),
        ("per_channel=True", "--per-channel"),
        ("per_channel=False", "--no-per-channel"),
        ("or promise=False to get INT8", "or --no-promise to get INT8"),
        ("Give SyntheticReader(kinds={'x': kind}), the kind one", "Give --input-kind x=KIND, the kind one"),
        ("or input_ranges={'x': (low, high)}; or", "or --input-range x=LOW,HIGH; or"),
        ("Give SyntheticReader(input_shapes={name: shape}), or", "Give --input-shape name=1x3x224x224, or"),
        ("extra_options['BlockSize'] dictates", "extra_options['BlockSize'] dictates"),
        ("or mean= and std= of the preprocessing", "or --mean and --std of the preprocessing"),
        ("nothing to translate", "nothing to translate"),
    ],
)
def test_options_are_spelled_as_the_command_takes_them(python: str, shell: str):
    assert flags.in_shell_words(python) == shell


def test_every_option_it_names_exists():
    texts = """nodes_to_exclude nodes_to_quantize op_types_to_quantize primary_inputs custom_op_libraries extra_options
        protect_outputs='float' recipe='fast' tune='off' per_channel=False reduce_range=True promise=False verify=False
        rewrites=False quant_format=QuantFormat.QDQ calibrate_method=CalibrationMethod.MinMax
        kinds={'x': k} input_ranges={'x': r} input_shapes={'x': s}"""
    named = {word for word in flags.in_shell_words(texts).split() if word.startswith("--")}
    everything = build_parser().parse_args(["quantize", "m.onnx"]).parser.format_all()
    assert len(named) == 19
    assert all(option in everything for option in named)
