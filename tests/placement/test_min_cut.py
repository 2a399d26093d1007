"""The cheapest parting against all partings, and regions of a net that are left float wherever they lie."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.placement.cost import MinCut

_COST = st.integers(0, 9)


@given(
    st.lists(st.tuples(_COST, _COST), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), _COST), max_size=12),
)
def test_no_parting_is_cheaper(sides: list[tuple[int, int]], pairs: list[tuple[int, int, int]]) -> None:
    pairs = [p for p in pairs if p[0] < len(sides) and p[1] < len(sides) and p[0] != p[1]]

    def total(here: set[int]) -> int:
        own = sum(costs[0] if thing in here else costs[1] for thing, costs in enumerate(sides))
        return own + sum(cost for a, b, cost in pairs if a in here and b not in here)

    cut: MinCut[int] = MinCut()
    for thing, (here, there) in enumerate(sides):
        cut.cost(thing, here=here, there=there)
    for a, b, cost in pairs:
        cut.part(a, b, cost)
    things = range(len(sides))
    subsets = itertools.chain.from_iterable(itertools.combinations(things, n) for n in range(len(sides) + 1))
    found = cut.solve()
    assert total(found) == min(total(set(subset)) for subset in subsets)


def test_what_may_not_be_parted_stays_together() -> None:
    cut: MinCut[str] = MinCut()
    cut.cost("dear here", here=9, there=1)
    cut.cost("cheap here", here=1, there=9.5)
    cut.part("cheap here", "dear here", math.inf)
    assert cut.solve() == {"cheap here", "dear here"} or cut.solve() == set()
    cut = MinCut()
    cut.cost("a", here=math.inf, there=0)
    cut.cost("b", here=0, there=5)
    cut.part("b", "a", 7)
    assert cut.solve() == set()
