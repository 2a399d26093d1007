"""Values as JSON has them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.storage.data import to_data


class Colour(str, Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Leaf:
    name: str
    size: float | None = None
    colour: Colour = Colour.RED


@dataclass(frozen=True)
class Tree:
    first: Leaf
    others: tuple[Leaf, ...] = ()
    by_name: Mapping[str, tuple[Leaf, ...]] = field(default_factory=dict)


leaves = st.builds(Leaf, st.text(), st.none() | st.floats(allow_nan=False), st.sampled_from(Colour))
some = st.lists(leaves, max_size=3).map(tuple)


@given(st.builds(Tree, leaves, some, st.dictionaries(st.text(), some)))
def test_objects_are_mappings_of_their_fields_and_any_number_is_valid_json(tree: Tree) -> None:
    data = to_data(tree)
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    back = [Leaf(raw["name"], None if raw["size"] is None else float(raw["size"]), Colour(raw["colour"]))
            for raw in (data["first"], *data["others"])]  # fmt: skip
    assert back == [tree.first, *tree.others]
    assert data["by_name"] == {name: [to_data(leaf) for leaf in listed] for name, listed in tree.by_name.items()}


def test_what_json_lacks_goes_by_its_name() -> None:
    assert to_data({"a": (Leaf("b", float("-inf")),)}) == {"a": [{"name": "b", "size": "-inf", "colour": "red"}]}
