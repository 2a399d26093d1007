"""The index of the examples and the README name what exists: scripts, options, keywords."""

import ast
import importlib
import inspect
import re
import shlex
from pathlib import Path

import pytest

from kenosis_ort import Placement, Speed, quantize_static
from kenosis_ort.options import KEYWORDS

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
INDEX = (EXAMPLES / "README.md").read_text(encoding="utf-8")
SCRIPTS = sorted(EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_is_named_and_documented(script: Path):
    assert f"({script.name})" in INDEX
    assert ast.get_docstring(ast.parse(script.read_text(encoding="utf-8")))


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", INDEX, re.DOTALL)
    docstrings = [ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "" for path in SCRIPTS]
    lines = [line.strip() for text in (*blocks, *docstrings) for line in text.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line.startswith("python examples/")]


@pytest.mark.parametrize("line", commands())
def test_commands_name_scripts_and_options_that_exist(line: str):
    _, script, *arguments = shlex.split(line, comments=True)
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / script, EXAMPLES / "cifar10_data.py"))
    assert [option for option in arguments if option.startswith("--") and f'"{option}"' not in source] == []


README = (ROOT / "README.md").read_text(encoding="utf-8")
OPTIONS = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
SHELL = [line for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) for line in block.splitlines()]


def test_there_are_exactly_two_set_up_commands():
    demo, tests = (line for line in SHELL if "pip install" in line)
    assert (demo.endswith("kenosis-ort demo"), "pytest" in tests) == (True, True)


def test_the_names_it_imports_are_public():
    imports = re.findall(r"^from (kenosis_ort\S*) import (.+)$", README, re.MULTILINE)
    assert imports
    for module, names in imports:
        assert {*names.split(", ")} <= {*importlib.import_module(module).__all__}


def test_the_page_of_options_lists_them_all():
    def listed(heading: str) -> list[str]:
        rows = re.findall(r"^\| (`.*?) \|", OPTIONS.split(f"| {heading} |")[1].split("\n\n")[0], re.MULTILINE)
        return [name.strip("`") for row in rows for name in row.split(", ")]

    parameters = inspect.signature(quantize_static).parameters.values()
    assert listed("Parameter") == [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    in_groups = {*Speed.__dataclass_fields__, *Placement.__dataclass_fields__}
    assert listed("Keyword") == [name for name in KEYWORDS if name not in in_groups]
    fields = {f"{group.__name__}.{name}" for group in (Speed, Placement) for name in group.__dataclass_fields__}
    assert {*listed("Field")} == fields
