"""The processors of the tests: that at hand where it is asked, and those that a test means, each for `on`."""

from collections.abc import Callable
from dataclasses import replace

from kenosis_ort.runtime.machine import Machine, at_hand
from kenosis_ort.targets.ort_cpu.rules import products_saturate

X86 = at_hand().family.lower() in {"x86_64", "amd64"}
SATURATES = products_saturate()
"""Kernels add products of uint8 and int8 in int16: stock has to reduce the range of weights."""

LARGEST_WEIGHT = 62 if SATURATES else 127
"""Of weights drawn at random, so that no two clip, stored one lower either."""

USUAL = replace(
    at_hand(), cpu="a processor of the tests", features=("avx2", "avx512_bf16", "avx512_vnni", "avx512f", "avx_vnni")
)
"""What calls of the tests run on, wherever the tests run, so that files are laid out alike."""

VNNI = replace(USUAL, family="x86_64", saturates=False)
NO_VNNI = replace(USUAL, family="x86_64", saturates=True)
ARM = replace(USUAL, family="aarch64")


def with_flags(*features: str, saturates: bool | None = None) -> Machine:
    """A processor with these flags."""
    return replace(USUAL, cpu="a processor", features=features, saturates=saturates)


Pretend = Callable[[Machine], None]
"""The fixture `pretend`: calls take a machine for the one at hand until the test ends."""
