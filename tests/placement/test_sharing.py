"""Scale groups: union-find against a plain model, and when a Concat's producers may join."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.placement.decisions import ScaleGroups
from kenosis_ort.plan import RangeLimit

NAMES = list("abcdefgh")


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)), max_size=15))
def test_groups_are_the_connected_components(ties: list[tuple[str, str]]) -> None:
    groups, roots = ScaleGroups({}, {}, 1.5), {name: name for name in NAMES}
    for value, provider in ties:
        groups.tie(value, provider)
        joined = roots[value]
        roots = {name: roots[provider] if root == joined else root for name, root in roots.items()}
    for name in NAMES:
        assert groups.root(name) == roots[name], "the provider's root keeps providing"
        assert sorted(groups.members(name)) == [other for other in NAMES if roots[other] == roots[name]]


@pytest.mark.parametrize(("own", "limit", "shared", "elsewhere", "said"), [
    # Read elsewhere, a value must not lose resolution; ranges are widened to hold 0 before they are compared.
    ((0.0, 1.0), None, (0.0, 1.4), True, None),
    ((0.0, 1.0), None, (0.0, 1.6), True, "'v' is read elsewhere"),
    ((0.0, 1.0), None, (0.0, 100.0), False, None),
    ((2.0, 3.0), None, (0.0, 4.0), True, None),
    ((-1.0, 0.0), None, (-1.0, 1.0), True, "'v' is read elsewhere"),
    # An absorbed activation must stay absorbed.
    ((0.0, 4.0), (0.0, None), (-1.0, 4.0), False, "below 0.0"),
    ((0.0, 4.0), (0.0, 6.0), (0.0, 8.0), False, "above 6.0"),
    ((0.0, 4.0), (0.0, 6.0), (0.0, 6.0), False, None),
    ((0.0, 4.0), (0.0, None), (0.5, 4.0), False, None),
    # Before calibration everything may be shared, so that every value that may need its own range is observed.
    (None, (0.0, None), None, True, None),
])  # fmt: skip
def test_what_a_value_may_share(own: Any, limit: Any, shared: Any, elsewhere: bool, said: str | None) -> None:
    limits = {} if limit is None else {"v": RangeLimit("v", *limit)}
    groups = ScaleGroups({} if own is None else {"v": own, "out": shared}, limits, 1.5)
    reason = groups.may_share("v", "out", lambda _: elsewhere)
    assert (reason is None) if said is None else (reason is not None and said in reason)


def test_every_member_of_the_group_counts() -> None:
    groups = ScaleGroups({"v": (0, 1), "u": (0, 1), "out": (-1, 1)}, {"u": RangeLimit("u", 0.0, None)}, 1.5)
    assert groups.may_share("v", "out", lambda _: False) is None
    groups.tie("u", "v")
    assert groups.may_share("v", "out", lambda _: False) is not None
