"""Results of conversions, as data."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import onnx

from kenosis_ort.errors import printable
from kenosis_ort.formats.tensors import QuantizedTensor, quantizers_of
from kenosis_ort.targets.proof import FusionReport


@dataclass(frozen=True)
class Agreement:
    """One output of the model as it came and of the result, on made-up inputs.

    Attributes:
        output: Its name.
        sqnr_db: Power of the output over that of the difference, dB; inf where both are equal.
        equal: Share of equal elements, 0..1.
        largest: Largest absolute difference.
    """

    output: str
    sqnr_db: float
    equal: float
    largest: float


@dataclass(frozen=True)
class Conversion:
    """Result of `kenosis_ort.convert`.

    Attributes:
        source: What the model is called, its path if it has one.
        output: The file written.
        read_as: The format that was found: ``"qonnx"``, ``"qop"``, ``"qcdq"`` or ``"qdq"``.
        written_as: The format that was asked for.
        tensors: How many activations and constants have how many bits, as ``"4-bit unsigned activations"``.
        agreement: How the outputs of both models compare; empty where no inputs could be made up.
        notes: Sentences on what was done.
        fusion: The proof of what the runtime executes, of ``"qdq"`` and ``"qop"``.
        size: Bytes written.
    """

    source: str
    output: str
    read_as: str
    written_as: str
    tensors: dict[str, int]
    agreement: tuple[Agreement, ...]
    notes: tuple[str, ...]
    fusion: FusionReport | None
    size: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        plain = {name: getattr(self, name) for name in ("source", "output", "read_as", "written_as", "tensors", "size")}
        return {
            **plain,
            "notes": list(self.notes),
            "agreement": [asdict(entry) for entry in self.agreement],
            "fusion": None if self.fusion is None else self.fusion.to_dict(),
        }

    def __str__(self) -> str:
        counted = ", ".join(f"{count} {what}" for what, count in self.tensors.items()) or "nothing quantized"
        lines = [f"{self.source} ({self.read_as}) -> {self.output} ({self.written_as}): {counted}"]
        for entry in self.agreement:
            same = "equal" if entry.equal == 1.0 else f"{100 * entry.equal:.2f} % equal, {entry.sqnr_db:.1f} dB"
            lines.append(f"  output '{entry.output}' beside the model as it came: {same}")
        lines += [f"  {note}" for note in self.notes]
        if self.fusion is not None:
            lines.append(f"  {self.fusion}")
        return printable("\n".join(lines))


def count_tensors(model: onnx.ModelProto) -> dict[str, int]:
    """Numbers of activations and constants of a canonical model by number of bits, most frequent first."""
    return dict(Counter(_kind(tensor) for tensor in quantizers_of(model)).most_common())


def _kind(tensor: QuantizedTensor) -> str:
    what = "activations" if tensor.constant is None else "constants"
    return f"{tensor.quantizer.bits}-bit {'signed' if tensor.quantizer.signed else 'unsigned'} {what}"
