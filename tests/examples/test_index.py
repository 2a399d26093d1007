"""The index of the examples names every script, and its commands name scripts and options that exist."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
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
    source = (EXAMPLES.parent / script).read_text(encoding="utf-8")
    source += "".join((EXAMPLES / f"{name}.py").read_text(encoding="utf-8") for name in ("cifar10_data",))
    for option in (argument for argument in arguments if argument.startswith("--")):
        assert f'"{option}"' in source
