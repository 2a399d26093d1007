"""Dataclasses go to plain data and come back as they were."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.storage.data import Data, of_data, to_data


class Colour(str, Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Leaf:
    name: str
    size: float | None = None
    colour: Colour = Colour.RED


@dataclass(frozen=True)
class Tree(Data):
    first: Leaf
    others: tuple[Leaf, ...] = ()
    ends: tuple[float, float] | None = None
    by_name: Mapping[str, tuple[Leaf, ...]] = field(default_factory=dict)
    count: int = 0
    alive: bool = True


numbers = st.floats(allow_nan=False)
leaves = st.builds(Leaf, st.text(), st.none() | numbers, st.sampled_from(Colour))
some = st.lists(leaves, max_size=3).map(tuple)
trees = st.builds(
    Tree, leaves, some, st.none() | st.tuples(numbers, numbers), st.dictionaries(st.text(), some), st.integers()
)


@given(trees)
def test_what_is_written_is_read(tree: Tree) -> None:
    text = json.dumps(tree.to_dict(), allow_nan=False)
    assert Tree.from_dict(json.loads(text)) == tree


def test_what_is_missing_has_its_default_and_what_is_unknown_is_passed_over() -> None:
    assert Tree.from_dict({"first": {"name": "a", "age": 3}, "roots": 2}) == Tree(Leaf("a"))
    assert of_data(Leaf, {"name": "a", "colour": "red"}, colour=Colour.BLUE) == Leaf("a", None, Colour.BLUE)
    assert to_data({"a": (Leaf("b", float("-inf")),)}) == {"a": [{"name": "b", "size": "-inf", "colour": "red"}]}


@pytest.mark.parametrize(
    "raw",
    [
        {},
        [],
        {"first": "a"},
        {"first": {"name": "a", "colour": "green"}},
        {"first": {"name": "a", "size": "large"}},
        {"first": {"name": "a"}, "others": [3]},
        {"first": {"name": "a"}, "ends": [1.0]},
    ],
)
def test_what_does_not_fit_is_refused(raw: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        Tree.from_dict(raw)
