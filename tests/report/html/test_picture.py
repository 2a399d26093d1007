"""The picture: repeated stretches are what they say, nothing overlaps, edges lead down, and every node is placed."""

import itertools
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.report.evidence import OpTime, OpTimes
from kenosis_ort.report.html.layout import MAX_READERS, NODE_HEIGHT, NODE_WIDTH, layered, layout_of
from kenosis_ort.report.html.plots import time_plot


@st.composite
def graphs(draw) -> tuple[int, list[tuple[int, int]]]:
    count = draw(st.integers(1, 60))
    pairs = draw(st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=120, unique=True))
    return count, [(min(a, b), max(a, b)) for a, b in pairs if a != b]


@given(graphs())
def test_every_edge_leads_to_a_lower_layer(graph):
    count, edges = graph
    found = layered(count, edges)
    assert all(found.layer_of[a] < found.layer_of[b] for a, b in edges)
    placed = sorted(n for layer in found.layers for n in layer)
    assert placed == list(range(len(found.layer_of)))


@given(graphs())
def test_no_two_nodes_overlap_and_routes_join_the_nodes_they_belong_to(graph):
    count, edges = graph
    layout = layout_of(count, edges)
    rows = defaultdict(list)
    for x, y in layout.centres:
        rows[y].append(x)
        assert 0 <= x - NODE_WIDTH / 2 < x + NODE_WIDTH / 2 <= layout.width
        assert 0 <= y - NODE_HEIGHT / 2 < y + NODE_HEIGHT / 2 <= layout.height
    assert all(b - a >= NODE_WIDTH for xs in rows.values() for a, b in itertools.pairwise(sorted(xs)))
    assert len(layout.routes) == len(layout.faint) == len(edges)
    for (a, b), route in zip(edges, layout.routes, strict=True):
        (xa, ya), (xb, yb) = layout.centres[a], layout.centres[b]
        assert route[0] == (xa, ya + NODE_HEIGHT / 2)
        assert route[-1] == (xb, yb - NODE_HEIGHT / 2)


def test_a_chain_stands_straight_and_is_folded():
    layout = layout_of(400, [*itertools.pairwise(range(400))])
    assert len({x for x, _ in layout.centres}) < 40
    assert 0.4 < layout.width / layout.height < 4


def test_a_value_that_all_read_is_drawn_faintly():
    readers = MAX_READERS + 4
    edges = [(0, i) for i in range(1, readers)] + [(i, i + 1) for i in range(1, readers - 1)]
    layout = layout_of(readers, edges)
    assert sum(layout.faint) == readers - 2
    assert not any(layout.faint[readers:])


@pytest.mark.parametrize("edges", [[], [(2, 1)], [(0, 0)]])
def test_odd_edges_do_no_harm(edges):
    assert len(layout_of(3, edges).centres) == 3
    assert layout_of(0, []).centres == ()


def test_operators_of_equal_time_keep_their_order_in_every_process():
    names = [f"Op{i}" for i in range(9)]
    plot = time_plot(OpTimes(tuple(OpTime(name, name, name, 1.0) for name in names), ()))
    assert plot is not None
    assert [row["op_type"] for row in plot["rows"]] == names
