"""Repeated stretches are found, do not overlap, and are what they say."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kenosis_ort.report.html.picture import find_blocks

LAYER = ["Norm", "MatMul", "MatMul", "Softmax", "MatMul", "Add"]


def test_layers_of_a_transformer_are_its_blocks():
    blocks = find_blocks(["Gather", "Cast", *LAYER * 12, "Gemm"])
    assert [(b.start, b.length, b.number, b.repeats) for b in blocks] == [(2 + 6 * i, 6, i + 1, 12) for i in range(12)]


def test_a_net_without_repetition_has_none():
    assert find_blocks([f"Op{i}" for i in range(50)]) == ()
    assert find_blocks([]) == ()


def test_a_repetition_begins_where_little_goes_across():
    operators = LAYER * 4 + LAYER[:3]
    crossing = [5] * len(operators)
    crossing[2] = 1
    assert find_blocks(operators, crossing)[0].start == 2


@settings(deadline=None)
@given(st.lists(st.sampled_from("abc"), max_size=80))
def test_blocks_repeat_and_do_not_overlap(operators):
    blocks = find_blocks(operators)
    end = 0
    for block in blocks:
        assert block.start >= end
        end = block.start + block.length
        first = block.start - (block.number - 1) * block.length
        assert operators[block.start : end] == operators[first : first + block.length]
        assert 1 <= block.number <= block.repeats
    assert end <= len(operators)
