"""The site as a whole: it builds, its generated parts hold what the code holds, its pictures are used and small."""

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.generate import SECTIONS, fill, names_in
from docs.generate.markdown import from_docstring, table
from docs.generate.recipes import attributes
from kenosis_ort.cli.main import COMMANDS
from kenosis_ort.passes import PASSES, recipe
from kenosis_ort.rewrite import FLOAT_FORMS, INTEGER_FORMS, PREPARATION
from kenosis_ort.targets.ort_cpu import ORT_CPU

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TEXTS = {page: page.read_text(encoding="utf-8") for page in sorted(DOCS.rglob("*.md"))}


def test_it_builds_without_a_warning(tmp_path):
    if any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings_handlers")):
        pytest.skip("mkdocs-material and mkdocstrings are not installed")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) >= len(TEXTS)
    html = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert ("generated:" in html, "quantize_static" in html) == (False, True)


def test_every_generated_part_stands_in_a_page_and_every_marker_has_a_part():
    asked = [name for text in TEXTS.values() for name in names_in(text)]
    assert sorted(asked) == sorted(SECTIONS)
    with pytest.raises(KeyError):
        fill("<!-- generated: nonsense -->")


@pytest.mark.parametrize("name", SECTIONS)
def test_every_generated_part_can_be_made(name):
    assert len(SECTIONS[name]()) > 50  # a table, code, or a list


def test_the_rule_table_holds_every_rule_and_operator():
    text = SECTIONS["rules"]()
    assert [name for rule in ORT_CPU.rules for name in (f"`{rule.id}`", *rule.op_types) if name not in text] == []
    assert all(f"`{fact}`" in SECTIONS["facts"]() for fact, _ in ORT_CPU.facts)
    figures = [line for line in text.splitlines() if re.search(r"\| [^|]*\d\.\d+x[^|]* \|$", line)]
    assert len(figures) >= 5, "measured figures stand in the last column"


def test_the_rewrites_are_all_there_once():
    overview, details = SECTIONS["rewrites"](), SECTIONS["rewrite-details"]()
    for rewrite in (*PREPARATION, *FLOAT_FORMS, *INTEGER_FORMS, *ORT_CPU.own_forms):
        assert overview.count(f"(#{rewrite.__name__})") == 1
        assert details.count(f"{{ #{rewrite.__name__} }}") == 1


def test_every_command_has_its_section_with_an_example():
    sections = re.split(r"^## ", SECTIONS["commands"](), flags=re.MULTILINE)[1:]
    assert [re.match(r"`([\w-]+)`", section)[1] for section in sections] == list(COMMANDS)
    for section in sections:
        assert "```sh\nkenosis-ort " in section
        assert "%%" not in section


def test_every_setting_of_a_recipe_is_described():
    described = dict(entry for kind in (*PASSES, recipe.Recipe) for entry in attributes(kind))
    assert {*described} == {field.name for field in dataclasses.fields(recipe.Recipe)}
    assert described["smooth"].endswith("no smoothing.")


def test_docstrings_become_markdown():
    text = from_docstring("It is::\n\n    y = x\n      + 1\n\nand so on.")
    assert text == "It is:\n\n```text\ny = x\n  + 1\n```\n\nand so on."
    assert table(["a"], [["x | y\nz"]]) == "| a |\n| --- |\n| x \\| y z |"


def test_pictures_are_small_and_used():
    pictures = sorted((DOCS / "images").iterdir())
    assert pictures
    for picture in pictures:
        assert picture.stat().st_size <= 150_000, picture.name
        assert any(f"images/{picture.name}" in text for text in TEXTS.values()), picture.name
        if picture.suffix == ".svg":
            assert "url(" not in picture.read_text(encoding="utf-8").replace("url(#", "")


def test_no_page_names_a_place_of_this_machine():
    for page, text in TEXTS.items():
        assert not re.search(r"/(home|root|tmp|work|usr)/", text), page.name
