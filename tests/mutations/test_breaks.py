"""The table of breaks follows the package."""

from __future__ import annotations

from pathlib import Path

import pytest

import kenosis_ort
from tests.mutations.breaks import BREAKS, Break

PACKAGE = Path(kenosis_ort.__file__).parent
TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("each", BREAKS, ids=[f"{number}" for number in range(1, len(BREAKS) + 1)])
def test_what_is_broken_stands_there_once_and_its_tests_exist(each: Break) -> None:
    assert (PACKAGE / each.file).read_text(encoding="utf-8").count(each.old) == 1
    assert each.new != each.old
    for name in each.tests.split():
        assert (TESTS / name).exists(), name
