"""What becomes of precisions other than 8 bits, from the measured table."""

from __future__ import annotations

from typing import Final

from kenosis_ort.targets.ort_cpu.rules import PRECISIONS

from .markdown import code, table

INTEGER, FLOAT, FAILS = "on an integer kernel", "in float", "not at all"
ROWS: Final = {
    "int16-activations": ("16-bit activations, 8-bit weights", FLOAT, "Conv, Gemm, MatMul", "no"),
    "int16-weights": ("8-bit activations, 16-bit weights", FLOAT, "MatMul", "no"),
    "int4-activations": ("4-bit activations, 8-bit weights", FAILS, "", "no"),
    "float8": ("8-bit floating point", FAILS, "", "no"),
    "int4-weights-int8-activations": ("8-bit activations, 4-bit weights", FLOAT, "MatMul", "no"),
    "int4-conv": ("4-bit weights of a Conv", FLOAT, "Conv", "no"),
    "int4-weights": (
        *("float activations, 4-bit weights of MatMul or Gemm (by block, channel or tensor)", INTEGER),
        *("MatMulNBits", "yes"),
    ),
    "int8-weights": ("float activations, 8-bit weights of MatMul or Gemm", INTEGER, "MatMulNBits", "yes"),
    "int2-weights": ("float activations, 2-bit weights of MatMul or Gemm", INTEGER, "MatMulNBits", "no"),
    "blocked-int8-weights": ("8-bit activations, 8-bit weights with a scale by block", FAILS, "QLinearMatMul", "no"),
    "float16-qdq": ("Q and DQ on float16 values", FLOAT, "Conv, MatMul", "no"),
    "float16-inputs": (
        *("float16 graph inputs and outputs, everything between in float32 or 8 bits", INTEGER),
        *("QLinearConv", "yes"),
    ),
    "float16-int4-weights": ("float16 activations, 4-bit weights", INTEGER, "MatMulNBits", "yes"),
}
"""Weights and activations, what runs them, by which kernel, and whether it is of use; by the names of `PRECISIONS`."""


def precision_table() -> str:
    """Returns one row a combination."""
    rows = []
    for name, reason in PRECISIONS.items():
        what, runs, kernels, is_of_use = ROWS[name]
        rows.append(
            [what, runs, ", ".join(code(kernel) for kernel in kernels.split(", ") if kernel), is_of_use, reason]
        )
    return table(["Weights and activations", "Runs", "Kernel", "Of use", "Why"], rows)
