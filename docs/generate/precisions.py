"""What becomes of precisions other than 8 bits: a table that was measured, and is proved again by its tests.

Speeds are of one MatMul 1024 x 1024 against float32, one thread, for 1 / 8 / 128 rows (W8A8 itself: 2.5 / 2.6 / 4.3).
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from kenosis_ort.targets.ort_cpu.rules import PRECISIONS as REFUSED

from .markdown import code, table


class Runs(str, Enum):
    """Kernel that runs a node, if any."""

    INTEGER = "on an integer kernel"
    FLOAT = "in float"  # with Q and DQ as extra work
    FAILS = "not at all"  # the runtime refuses the model, at load or when it runs


class Precision(NamedTuple):
    """One combination of precisions.

    Attributes:
        key: Its identifier.
        what: Weights and activations.
        runs: What the runtime does.
        kernel: The kernel that executes it, empty where the model fails.
        offered: Whether it is of use to anybody.
        why: In one sentence; empty where the package refuses it with a sentence of its own.
    """

    key: str
    what: str
    runs: Runs
    kernel: str
    offered: bool
    why: str = ""

    @property
    def reason(self) -> str:
        """Why, in one sentence; the text of the refusal where it is refused."""
        return self.why or REFUSED[self.key]


PRECISIONS: Final = (
    Precision("int16-activations", "16-bit activations, 8-bit weights", Runs.FLOAT, "Conv, Gemm, MatMul", False),
    Precision("int16-weights", "8-bit activations, 16-bit weights", Runs.FLOAT, "MatMul", False),
    Precision("int4-activations", "4-bit activations, 8-bit weights", Runs.FAILS, "", False,
        "the runtime does not load models with 4-bit activations in front of Conv, Gemm or MatMul"),
    Precision("float8", "8-bit floating point", Runs.FAILS, "", False),
    Precision("int4-weights-int8-activations", "8-bit activations, 4-bit weights", Runs.FLOAT, "MatMul", False,
        "4-bit weights behind quantized activations run in float and are dequantized on every run; 4-bit weights pay "
        "only with float activations"),
    Precision("int4-conv", "4-bit weights of a Conv", Runs.FLOAT, "Conv", False),
    Precision("int4-weights", "float activations, 4-bit weights of MatMul or Gemm (by block, channel or tensor)",
        Runs.INTEGER, "MatMulNBits", True,
        "MatMulNBits quantizes the activations itself: 3.3x / 1.3x / 0.8x with blocks of 32, 4.8x / 1.9x / 1.2x with "
        "128; for language models that generate word by word, not for whole sequences or pictures"),
    Precision("int8-weights", "float activations, 8-bit weights of MatMul or Gemm", Runs.INTEGER, "MatMulNBits", True,
        "MatMulNBits quantizes the activations itself: 2.4x / 1.4x / 0.9x; needs no calibration, but 8-bit activations "
        "are faster for more than one row"),
    Precision("int2-weights", "float activations, 2-bit weights of MatMul or Gemm", Runs.INTEGER, "MatMulNBits", False,
        "2-bit weights have a kernel (MatMulNBits), but lose most of a net that was not trained for them"),
    Precision("blocked-int8-weights", "8-bit activations, 8-bit weights with a scale by block",
        Runs.FAILS, "QLinearMatMul", False,
        "the runtime loads 8-bit weights with a scale by block behind quantized activations and fails when it runs "
        "them; use a scale by channel, or leave BlockSize to 4-bit weights with float activations"),
    Precision("float16-qdq", "Q and DQ on float16 values", Runs.FLOAT, "Conv, MatMul", False,
        "Q and DQ with float16 scales never become integer kernels; quantize the float32 model"),
    Precision("float16-inputs", "float16 graph inputs and outputs, everything between in float32 or 8 bits",
        Runs.INTEGER, "QLinearConv", True,
        "a Cast to float32 behind the input and one back in front of the output keep the integer kernels"),
    Precision("float16-int4-weights", "float16 activations, 4-bit weights", Runs.INTEGER, "MatMulNBits", True,
        "MatMulNBits runs between two Casts to and from float32"),
)  # fmt: skip


def precision_table() -> str:
    """Returns one row a combination."""
    rows = [
        [
            p.what,
            p.runs.value,
            ", ".join(code(kernel) for kernel in p.kernel.split(", ") if kernel),
            "yes" if p.offered else "no",
            p.reason,
        ]
        for p in PRECISIONS
    ]
    return table(["Weights and activations", "Runs", "Kernel", "Of use", "Why"], rows)
