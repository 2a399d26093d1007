"""The table of breaks follows the package, and only a test that fails has caught one."""

from pathlib import Path

import pytest

import kenosis_ort
from tests.mutations.__main__ import verdict
from tests.mutations.breaks import BREAKS, Break

PACKAGE, TESTS = Path(kenosis_ort.__file__).parent, Path(__file__).parents[1]


@pytest.mark.parametrize("each", BREAKS, ids=[f"{number}" for number in range(1, len(BREAKS) + 1)])
def test_what_is_broken_stands_there_once_and_its_tests_exist(each):
    assert (PACKAGE / each.file).read_text(encoding="utf-8").count(each.old) == (each.new != each.old) == 1
    assert [name for name in each.tests.split() if not (TESTS / name).exists()] == []


@pytest.mark.parametrize(("new", "longest_s", "says"), [
    ("ANSWER = 43", 120.0, "caught test_it.py::test_it"), ("ANSWER = 6 * 7", 120.0, "NOT CAUGHT"),
    ("while True: pass", 2.0, "NOT CAUGHT: the tests do not end within 2 s"),
], ids=["fails", "passes", "hangs"])  # fmt: skip
def test_a_test_that_fails_has_caught_it_not_one_that_never_ends(tmp_path, new, longest_s, says):
    for folder in ("kenosis_ort", "tests"):
        (tmp_path / folder).mkdir()
    source, tests = tmp_path / "kenosis_ort" / "it.py", tmp_path / "tests"
    source.write_text("ANSWER = 42")
    (tests / "conftest.py").write_text("import hypothesis\nhypothesis.settings.register_profile('mutations')\n")
    reading = "runpy.run_path('kenosis_ort/it.py')['ANSWER']"
    (tests / "test_it.py").write_text(f"import runpy\ndef test_it(): assert {reading} == 42\n")
    assert verdict(tmp_path, Break("it.py", "ANSWER = 42", new, "test_it.py"), longest_s) == says
    assert source.read_text() == "ANSWER = 42"
