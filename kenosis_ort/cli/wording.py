"""Advice that the library words for Python, in the shell's words."""

from __future__ import annotations

import re
from collections.abc import Callable

_INPUT = {
    "kinds": ("--input-kind", "KIND"),
    "input_ranges": ("--input-range", "LOW,HIGH"),
    "input_shapes": ("--input-shape", "1x3x224x224"),
}
_QUOTED = r"\[?'([^']*)'\]?"
_SPELLINGS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(rf"nodes_to_exclude=({_QUOTED})"), r"--exclude '\2'"),
    (re.compile(rf"nodes_to_quantize=({_QUOTED})"), r"--only '\2'"),
    (re.compile(r"(protect_outputs|recipe|tune|format)='([\w-]+)'"), lambda m: f"--{m[1].replace('_', '-')} {m[2]}"),
    (re.compile(r"(activation|weight)_type=QuantType\.Q(\w+)"), lambda m: f"--{m[1]}-type {m[2].lower()}"),
    (re.compile(r"\b(activation|weight)_type=Q(U?Int\d+)"), lambda m: f"--{m[1]}-type {m[2].lower()}"),
    (re.compile(r"quant_format=QuantFormat\.(\w+)"), lambda m: f"--format {m[1].lower()}"),
    (re.compile(r"calibrate_method=CalibrationMethod\.(\w+)"), lambda m: f"--method {m[1].lower()}"),
    (re.compile(r"\b(per_channel|reduce_range)=(True|False)"), lambda m: _flag(m[1], m[2] == "True")),
    (re.compile(r"\b(promise|verify|rewrites)=False"), r"--no-\1"),
    (
        re.compile(r"(?:SyntheticReader\()?\b(kinds|input_ranges|input_shapes)=\{'?([^':}]+)'?: [^}]*\}\)?"),
        lambda m: f"{_INPUT[m[1]][0]} {m[2]}={_INPUT[m[1]][1]}",
    ),
    (re.compile(r"\b(mean|std)=(?=[\s,.)]|$)"), r"--\1"),
    (re.compile(r"\bnodes_to_exclude\b"), "--exclude"),
    (re.compile(r"\bnodes_to_quantize\b"), "--only"),
    (re.compile(r"\bop_types_to_quantize\b"), "--op-type"),
    (re.compile(r"\b(weight|activation)_bits\b"), r"--\1-bits"),
    (re.compile(r"\bprimary_inputs\b"), "--primary-input"),
    (re.compile(r"\bcustom_op_libraries\b"), "--custom-op-library"),
    (re.compile(r"\bextra_options\b(?!\[)"), "--option"),
)


def in_shell_words(text: str) -> str:
    """Returns a message with options of the Python API spelled as options of the command."""
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    return text


def _flag(name: str, on: bool) -> str:
    return f"--{'' if on else 'no-'}{name.replace('_', '-')}"
