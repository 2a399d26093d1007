"""What tells one machine from another."""

from __future__ import annotations

from dataclasses import replace

import onnxruntime as ort
import pytest

from kenosis_ort.targets.machine import read_cpu_info
from kenosis_ort.tuning.machine import machine_fingerprint, this_machine

X86 = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Some  Processor 9000
stepping\t: 8
flags\t\t: fpu avx2 avx512f avx512_vnni fma

processor\t: 1
model name\t: Another
"""
ARM = """processor : 0
Features : fp asimd asimddp i8mm
CPU implementer : 0x41
CPU part : 0xd40
"""


def test_the_same_machine_has_the_same_fingerprint():
    assert machine_fingerprint(1) == machine_fingerprint(1) == this_machine(1).fingerprint
    assert len(machine_fingerprint(1)) == 64
    assert machine_fingerprint(1) != machine_fingerprint(2)


@pytest.mark.parametrize("change", [{"runtime": "0.1"}, {"cores": 999}, {"flags": ("amx_int8",)}, {"cpu": "other"}])
def test_everything_that_matters_changes_it(change: dict):
    here = this_machine(1)
    assert replace(here, **change).fingerprint != here.fingerprint


def test_it_can_be_read():
    text = str(this_machine(1))
    assert ort.__version__ in text
    assert "one thread" in text
    assert "all threads" in str(this_machine(0))


def test_reading_the_processor():
    assert read_cpu_info(X86, fallback="?") == ("Some Processor 9000 6 143 8", ("avx2", "avx512_vnni", "avx512f"))
    assert read_cpu_info(ARM, fallback="aarch64") == ("aarch64 0x41 0xd40", ("asimddp", "i8mm"))
    assert read_cpu_info("", fallback="unknown") == ("unknown", ())
