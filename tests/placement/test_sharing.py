"""Scale groups: union-find against a plain model, and when a Concat's producers may join."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kenosis_ort.placement.decisions import ScaleGroups
from kenosis_ort.plan import RangeLimit

NAMES = list("abcdefgh")


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)), max_size=15))
def test_groups_are_the_connected_components(ties: list[tuple[str, str]]) -> None:
    groups = ScaleGroups({}, {}, 1.5)
    components = {name: {name} for name in NAMES}
    roots = {name: name for name in NAMES}
    for value, provider in ties:
        groups.tie(value, provider)
        if components[value] is not components[provider]:
            merged = components[value] | components[provider]
            root = roots[provider]
            for name in merged:
                components[name], roots[name] = merged, root
    for name in NAMES:
        assert set(groups.members(name)) == components[name]
        assert len(groups.members(name)) == len(components[name])
        assert groups.root(name) == roots[name], "the provider's root keeps providing"


def nowhere(_: str) -> bool:
    return False


def elsewhere(_: str) -> bool:
    return True


@pytest.mark.parametrize(
    ("own", "shared", "read_elsewhere", "may"),
    [
        ((0.0, 1.0), (0.0, 1.4), True, True),
        ((0.0, 1.0), (0.0, 1.6), True, False),
        ((0.0, 1.0), (0.0, 100.0), False, True),
        ((2.0, 3.0), (0.0, 4.0), True, True),  # ranges are widened to hold 0 before they are compared
        ((-1.0, 0.0), (-1.0, 1.0), True, False),
    ],
)
def test_a_value_that_is_read_elsewhere_must_not_lose_resolution(
    own: tuple[float, float], shared: tuple[float, float], read_elsewhere: bool, may: bool
) -> None:
    groups = ScaleGroups({"v": own, "out": shared}, {}, 1.5)
    reason = groups.may_share("v", "out", elsewhere if read_elsewhere else nowhere)
    assert (reason is None) == may
    assert reason is None or "'v' is read elsewhere" in reason


@pytest.mark.parametrize(
    ("limit", "shared", "said"),
    [
        (RangeLimit("v", 0.0, None), (-1.0, 4.0), "below 0.0"),
        (RangeLimit("v", 0.0, 6.0), (0.0, 8.0), "above 6.0"),
        (RangeLimit("v", 0.0, 6.0), (0.0, 6.0), None),
        (RangeLimit("v", 0.0, None), (0.5, 4.0), None),
    ],
)
def test_an_absorbed_activation_must_stay_absorbed(
    limit: RangeLimit, shared: tuple[float, float], said: str | None
) -> None:
    groups = ScaleGroups({"v": (0.0, 4.0), "out": shared}, {"v": limit}, 1.5)
    reason = groups.may_share("v", "out", nowhere)
    assert (reason is None) if said is None else (reason is not None and said in reason)


def test_every_member_of_the_group_counts() -> None:
    groups = ScaleGroups({"v": (0, 1), "u": (0, 1), "out": (-1, 1)}, {"u": RangeLimit("u", 0.0, None)}, 1.5)
    assert groups.may_share("v", "out", nowhere) is None
    groups.tie("u", "v")
    assert groups.may_share("v", "out", nowhere) is not None


def test_before_calibration_everything_may_be_shared() -> None:
    """So that every value that may need its own range is observed."""
    assert ScaleGroups({}, {"v": RangeLimit("v", 0.0, None)}, 1.5).may_share("v", "out", elsewhere) is None
