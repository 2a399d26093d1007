"""From arguments to the API's keywords, from its words to the shell's; wrong values of text are refused by name."""

import argparse
import contextlib
import inspect
import json
import re
import shlex
from contextlib import redirect_stdout
from enum import Enum
from io import StringIO
from pathlib import Path
from typing import get_args

import pytest
import tomli_w
from hypothesis import given, strategies as st

from kenosis_ort import RECIPES, OptionError, Recipe, options, quantize_static
from kenosis_ort.cli import flags, parser
from kenosis_ort.cli.main import COMMANDS, build_parser
from kenosis_ort.option_types import IN_FILE, OPTIONS, RecipeFile, resolve
from tests import wrong


def given_by(line):
    return flags.given(build_parser().parse_args(shlex.split(line)))


SAMPLES = {
    "accuracy_budget": [("0.5%", 0.005), ("0.01", 0.01)], **{name: [("17", 17)] for name in ("threads", "max_opset")},
    **{name: [("4", 4)] for name in ("weight_bits", "activation_bits")}, "sequence_lengths": [("1,128", [1, 128])],
    "extra_options": [("WeightSymmetric=False", {"WeightSymmetric": False})], "recipe": [("strict", "strict")],
    "target": [("ort-cpu", "ort-cpu")],
}  # fmt: skip
"""Words of the shell and what the library takes for them, of options that take no choice."""


def words_of(name):
    """The arguments that say an option in all its ways, and the value of each."""
    flag = flags.FLAGS[name]
    known, first = OPTIONS[name].words, flag.names[0]
    if flag.settings.get("action") is argparse.BooleanOptionalAction:
        return [([first], True), ([f"--no-{first.removeprefix('--')}"], False)]
    if choices := flag.settings.get("choices"):
        return [([first, word], {"qoperator": "qop"}.get(word, known.get(word, word))) for word in choices]
    if flag.settings.get("action") == "append" and name != "extra_options":
        return [([first, "/a/Conv", first, "n2"], ["/a/Conv", "n2"])]
    return [([option, word], value) for option in flag.names for word, value in SAMPLES.get(name, [("a", "a")])]


def test_nothing_given_means_nothing_passed_on():
    assert given_by("quantize a.onnx b.onnx --synthetic") == {}
    assert build_parser().parse_args(["quantize", "a.onnx", "--synthetic"]).synthetic == flags.DEFAULT_SYNTHETIC


@pytest.mark.parametrize("name", flags.FLAGS)
def test_an_option_means_the_same_on_the_command_line_in_a_file_in_python_and_in_advice(name):
    """Given, it alone reaches the API, as the library's own check leaves it; said in Python's words it comes back."""
    assert name in {*inspect.signature(quantize_static).parameters, *options.KEYWORDS}
    for tokens, value in words_of(name):
        words = flags.given(build_parser().parse_args(["quantize", "m.onnx", *tokens]))
        assert words.keys() == {name}
        found = flags.to_api(words)
        assert found == {name: value}
        checked = OPTIONS[name].check(name, found[name])
        if name in IN_FILE:
            file = RecipeFile.from_toml(RecipeFile(Recipe(), {name: found[name]}).to_toml())
            assert OPTIONS[name].check(name, file.options[name]) == checked
        if name in ("extra_options", "sequence_lengths", "custom_op_libraries", "accuracy_budget"):
            continue  # advice does not spell their values
        python = f"QuantType.{value.name}" if name.endswith("_type") and isinstance(value, Enum) else repr(words[name])
        shell = flags.in_shell_words(f"Leave it, or pass {name}={python}.").removeprefix("Leave it, or pass ")
        if not (isinstance(value, list) and len(value) > 1):
            assert flags.given(build_parser().parse_args(["quantize", "m.onnx", *shlex.split(shell[:-1])])) == words


def test_the_words_are_those_of_the_library():
    assert flags.FLAGS.keys() <= OPTIONS.keys()
    assert {*flags.FLAGS["calibrate_method"].settings["choices"]} == OPTIONS["calibrate_method"].words.keys()
    assert {*flags.FLAGS["format"].settings["choices"]} == {*get_args(options.Format), "qoperator"}


def test_a_preset_is_a_recipe():
    for line, recipe in (("--preset fast", "fast"), ("--recipe fast", "fast"), ("--preset fast --recipe tiny", "tiny")):
        assert given_by(f"quantize m.onnx {line}") == {"recipe": recipe}
    for name in RECIPES:
        assert resolve(name).options.keys() <= {*inspect.signature(quantize_static).parameters, *options.KEYWORDS}
        assert f"{name}:" in help_of("--help")


def test_a_setting_takes_the_place_of_the_recipes_own():
    file = given_by("quantize m.onnx --recipe accurate --set equalize=false --set smooth=0.5")["recipe"]
    assert (file.recipe.equalize, file.recipe.smooth, file.recipe.rounding) == (False, 0.5, "learned")
    with pytest.raises(OptionError, match="Did you mean 'equalize'"):
        given_by("quantize m.onnx --set equalise=false")


def help_of(option):
    printed = StringIO()
    with redirect_stdout(printed), pytest.raises(SystemExit):
        build_parser().parse_args(["quantize", option])
    return printed.getvalue()


def test_help_shows_the_first_options_and_help_all_shows_the_rest():
    named = re.compile(r"^  (?:-\w, )?(--[\w-]+)", re.M)
    first, everything = (set(named.findall(help_of(option))) for option in ("--help", "--help-all"))
    assert first < everything
    assert len(first - {"--help", "--help-all", "--json", "--quiet", "--verbose"}) <= 10
    assert {"--data", "--recipe"} <= first
    assert {"--tune", "--seed", "--weight-type"} <= everything - first


# -- values as the shell gives them


READERS = [
    (parser.whole, {"0": 0}, ["-1", "1.5", "²", "", "x", "9" * 5000]),
    (parser.threads, {"0": 0}, ["99999999999", "-1"]), (parser.positives, {"1, 128": [1, 128]}, ["0", "1,,2"]),
    (parser.positive, {"3": 3}, ["0"]), (parser.number, {"-1.5": -1.5}, ["nan", "inf"]),
    (parser.seconds, {"0.5": 0.5}, ["0", "soon"]),
    (parser.share, {"0.005": 0.005, "0.5%": 0.005, "100%": 1.0}, ["1.5", "101%", "-1%", "nan", "inf", "x"]),
    (parser.numbers, {"0.485,0.456": (0.485, 0.456)}, ["a,b", "1,,2"]),
    (parser.image_size, {"224X320": (224, 320)}, ["224", "1x2x3", "0x3"]),
    (parser.named_shape, {"ids=1x128": ("ids", (1, 128)), "a=b=2": ("a=b", (2,))}, ["1x2", "=1x2", "a=axb"]),
    (parser.named_word, {"x=token ids": ("x", "token ids")}, ["a="]),
    (parser.input_range, {"0,255": (None, (0, 255)), "image=-1,1": ("image", (-1, 1))}, ["1,0", "a=1"]),
    (parser.extra_option, {"A=True": ("A", True), "A=b=c": ("A", "b=c"), "A=": ("A", ""),
                           'A={"x": [1]}': ("A", {"x": [1]})}, ["A", "=1"]),
]  # fmt: skip
"""What reads a word of the shell, words with their values, and words that it refuses."""


@pytest.mark.parametrize(("read", "taken", "refused"), READERS)
@given(data=st.data())
def test_what_is_taken_and_what_is_refused_and_nothing_else_breaks_a_reader(read, taken, refused, data):
    assert {text: read(text) for text in taken} == taken
    for text in refused:
        with pytest.raises((argparse.ArgumentTypeError, ValueError)):
            read(text)
    with contextlib.suppress(argparse.ArgumentTypeError):
        read(data.draw(st.text(max_size=12)))


# -- advice worded for Python, in the shell's words


@pytest.mark.parametrize(("python", "shell"), [
    ("take the node out of nodes_to_exclude", "take the node out of --exclude"),
    ("protect_outputs='int8' quantizes it", "--protect-outputs int8 quantizes it"),
    ("activation_type=QuantType.QUInt8, or leave it out", "--activation-type uint8, or leave it out"),
    ("or promise=False to get INT8", "or --no-promise to get INT8"),
    ("host=1.5 is a float", "--for-host 1.5 is a float"),
    ("per_channel=nan is a float", "--per-channel nan is a float"),
    ("Give SyntheticReader(kinds={'x': kind}), the kind one", "Give --input-kind x=KIND, the kind one"),
    ("or input_ranges={'x': (low, high)}; or", "or --input-range x=LOW,HIGH; or"),
    ("Give SyntheticReader(input_shapes={name: shape}), or", "Give --input-shape name=1x3x224x224, or"),
    ("extra_options['BlockSize'] dictates", "extra_options['BlockSize'] dictates"),
    ("or mean= and std= of the preprocessing", "or --mean and --std of the preprocessing"),
])  # fmt: skip
def test_options_are_spelled_as_the_command_takes_them(python, shell):
    assert flags.in_shell_words(python) == shell


# ---- every wrong value that text can hold, in a recipe file and behind a flag: refused and named, nothing is written


QUANTIZE = "quantize float.onnx out.onnx --data samples.npz"


def held(values):
    """The values that JSON gives back as they are, and TOML too."""

    def is_held(value):
        try:
            return "None" not in repr(value) and repr(json.loads(json.dumps(value))) == repr(value)
        except TypeError:
            return False

    return [value for value in values if is_held(value)]


def says(told, name):
    """Whether a complaint names an option, by Python's name or the shell's."""
    return name in told or flags.FLAGS[name].names[0].removeprefix("--") in told


TABLES = {
    ("options",): {name: wrong.OPTIONS[name] for name in IN_FILE if name != "stages"},  # a table of its own in a file
    ("options", "extra_options"): wrong.EXTRA, ("options", "stages"): wrong.STAGES, ("recipe",): wrong.RECIPE,
}  # fmt: skip


@pytest.mark.parametrize(("tables", "name"), [
    pytest.param(at, name, id=".".join((*at, name))) for at, names in TABLES.items() for name in names
])  # fmt: skip
def test_in_a_recipe_file(tables, name, shell):
    for value in held(TABLES[tables][name]):
        content = {name: value}
        for table in reversed(tables):
            content = {table: content}
        Path("r.toml").write_text(tomli_w.dumps({"recipe": {"name": "mine"}, **content}))
        told = shell.complaint(f"{QUANTIZE} --recipe r.toml")
        assert says(told, name), told
        if value not in ("nonsense", "int4", "", "head"):  # targets, files and nodes are looked for later
            assert told.index("[at: r.toml") < told.index("Fix: ")


@pytest.mark.parametrize("name", flags.FLAGS)
def test_behind_its_flag(name, shell):
    before = shell.files()
    for value in wrong.OPTIONS[name]:
        is_word = isinstance(value, str) and "\0" not in value  # no shell hands that over
        if is_word or (isinstance(value, float) and name != "calibration_cache_path"):  # a file's name there
            printed = shell(QUANTIZE, f"{flags.FLAGS[name].names[0]}={value}", code=2)
            assert (printed.out, says(printed.err, name), shell.files()) == ("", True, before), printed.err


@pytest.mark.parametrize("name", [*wrong.RECIPE, *wrong.EXTRA])
def test_as_a_setting_or_extra_option(name, shell):
    option, values = ("--set", wrong.RECIPE[name]) if name in wrong.RECIPE else ("--option", wrong.EXTRA[name])
    for value in held(values):
        assert says(shell.complaint(QUANTIZE, option, f"{name}={json.dumps(value)}"), name)


@pytest.mark.parametrize("command", COMMANDS)
def test_words_that_no_reader_takes(command, capsys):
    refused, parser = {read: words for read, _, words in READERS}, build_parser()
    for one in COMMANDS[command].arguments:
        flag, read = one.names[0], one.settings.get("type")
        wrong_words = ("x",) if "choices" in one.settings else refused.get(read, ())
        for word in wrong_words if flag.startswith("-") else ():
            with pytest.raises(SystemExit, match=r"^2$"):
                parser.parse_args([command, f"{flag}={word}"])
            printed = capsys.readouterr()
            assert [text for text in ("usage:", flag, "Fix: see kenosis-ort") if text not in printed.err] == []
