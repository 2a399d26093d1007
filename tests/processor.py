"""What tests ask about the processor at hand, in one place."""

from __future__ import annotations

from kenosis_ort.targets.ort_cpu.rules import products_saturate

SATURATES = products_saturate()
"""Kernels add products of uint8 and int8 in int16: stock has to reduce the range of weights."""

LARGEST_WEIGHT = 62 if SATURATES else 127
"""Of weights drawn at random, so that no two clip, stored one lower either."""
