"""Every wrong value that text can hold, in a recipe file and behind a flag: refused and named, and nothing is written.

What is no value of an option, an entry or a setting stands in `tests.wrong`, words that a reader of the shell refuses
in `tests.cli.test_options`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from kenosis_ort.cli.commands import COMMANDS
from kenosis_ort.cli.flags import FLAGS
from kenosis_ort.cli.main import build_parser
from kenosis_ort.option_types import IN_FILE
from tests import wrong
from tests.cli.conftest import Shell
from tests.cli.test_options import READERS

QUANTIZE = "quantize float.onnx out.onnx --data samples.npz"


def held(values: tuple[Any, ...]) -> list[Any]:
    """The values that JSON gives back as they are, and TOML too."""

    def is_held(value: Any) -> bool:
        try:
            return "None" not in repr(value) and repr(json.loads(json.dumps(value))) == repr(value)
        except TypeError:
            return False

    return [value for value in values if is_held(value)]


def says(told: str, name: str) -> bool:
    """Whether a complaint names an option, by Python's name or the shell's."""
    return name in told or FLAGS[name].names[0].removeprefix("--") in told


TABLES = {
    ("options",): {name: wrong.OPTIONS[name] for name in IN_FILE if name != "stages"},  # a table of its own in a file
    ("options", "extra_options"): wrong.EXTRA,
    ("options", "stages"): wrong.STAGES,
    ("recipe",): wrong.RECIPE,
}


@pytest.mark.parametrize(
    ("tables", "name"),
    [pytest.param(at, name, id=".".join((*at, name))) for at, names in TABLES.items() for name in names],
)
def test_in_a_recipe_file(tables: tuple[str, ...], name: str, shell: Shell) -> None:
    for value in held(TABLES[tables][name]):
        content: dict[str, Any] = {name: value}
        for table in reversed(tables):
            content = {table: content}
        Path("r.toml").write_text(tomli_w.dumps({"recipe": {"name": "mine"}, **content}))
        told = shell.complaint(f"{QUANTIZE} --recipe r.toml")
        assert says(told, name), told
        if value not in ("nonsense", "int4", "", "head"):  # targets, files and nodes are looked for later
            assert told.index("[at: r.toml") < told.index("Fix: ")


@pytest.mark.parametrize("name", FLAGS)
def test_behind_its_flag(name: str, shell: Shell) -> None:
    before = shell.files()
    for value in wrong.OPTIONS[name]:
        is_word = isinstance(value, str) and "\0" not in value  # no shell hands that over
        if is_word or (isinstance(value, float) and name != "calibration_cache_path"):  # a file's name there
            printed = shell(QUANTIZE, f"{FLAGS[name].names[0]}={value}", code=2)
            assert (printed.out, says(printed.err, name), shell.files()) == ("", True, before), printed.err


@pytest.mark.parametrize("name", [*wrong.RECIPE, *wrong.EXTRA])
def test_as_a_setting_or_extra_option(name: str, shell: Shell) -> None:
    option, values = ("--set", wrong.RECIPE[name]) if name in wrong.RECIPE else ("--option", wrong.EXTRA[name])
    for value in held(values):
        assert says(shell.complaint(QUANTIZE, option, f"{name}={json.dumps(value)}"), name)


@pytest.mark.parametrize("command", COMMANDS)
def test_words_that_no_reader_takes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused, parser = {read: words for read, _, words in READERS}, build_parser()
    for one in COMMANDS[command].arguments:
        flag, read = one.names[0], one.settings.get("type")
        wrong_words = ("x",) if "choices" in one.settings else refused.get(read, ())
        for word in wrong_words if flag.startswith("-") else ():
            with pytest.raises(SystemExit, match=r"^2$"):
                parser.parse_args([command, f"{flag}={word}"])
            printed = capsys.readouterr()
            assert [text for text in ("usage:", flag, "Fix: see kenosis-ort") if text not in printed.err] == []
