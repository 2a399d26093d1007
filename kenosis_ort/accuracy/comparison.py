"""Result of `compare`: plain data, a short table, and a rule-based next step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kenosis_ort.errors import printable

_SHOWN = 8
_FINE_DB = 30.0  # outputs beyond this, or that agree to _FINE_SHARE, need nothing
_FINE_SHARE = 0.995
_CLIPPED = 1e-3  # share of clipped elements that is blamed before anything else
_COARSE_WEIGHTS_DB = 30.0  # 8-bit weights with a scale by channel keep 38 to 45 dB
_WIDE = 60.0  # a range this many times the rms leaves the bulk of the values some 4 of 256 steps


@dataclass(frozen=True)
class TensorComparison:
    """One tensor in both models.

    Attributes:
        name: Its name in the float model.
        node: The node that makes it in the quantized model; for a weight the one that reads it.
        sqnr_db: Signal to quantization noise ratio against the float model, dB; inf if equal.
        cosine: Cosine similarity.
        low: Least value in the float model.
        high: Largest value in the float model.
        clipping: Share of the float model's elements beyond what the quantized tensor can hold, 0..1.
        peak_to_rms: Range of the quantized tensor over the root mean square of the values.
        drop_db: What is lost here: the SQNR of the worst quantized tensor it is computed from (at most 40 dB) less its
            own, or less the worst that its readers make of it if that is better.
        rescaled: Its channels are scaled in the quantized model (equalization), which was undone for the comparison.
        per_channel: For a weight, whether it has a scale by channel.
    """

    name: str
    node: str
    sqnr_db: float
    cosine: float
    low: float
    high: float
    clipping: float = 0.0
    peak_to_rms: float = 0.0
    drop_db: float = 0.0
    rescaled: bool = False
    per_channel: bool = False


@dataclass(frozen=True)
class OutputAgreement:
    """One graph output in both models.

    Attributes:
        name: Its name.
        sqnr_db: Signal to quantization noise ratio, dB.
        cosine: Cosine similarity.
        max_abs: Largest absolute difference.
        agreement: Share of equal argmax positions, 0..1: along the last axis for up to three dimensions, along axis 1
            beyond; None where that axis has one element.
        skipped: Samples on which the models return another number of rows: these are not compared.
    """

    name: str
    sqnr_db: float
    cosine: float
    max_abs: float
    agreement: float | None
    skipped: int = 0

    @property
    def is_fine(self) -> bool:
        """Whether there is nothing to improve."""
        return self.sqnr_db >= _FINE_DB or (self.agreement is not None and self.agreement >= _FINE_SHARE)


@dataclass(frozen=True)
class Comparison:
    """A float model and a quantized one, tensor by tensor.

    Attributes:
        outputs: Graph outputs in order, as the runtime computes them.
        tensors: Quantized activations that both models have, in the order of computation.
        weights: Quantized constants that both models have: those that a rewrite changed (BatchNormalization folded,
            channels equalized) are other weights and left out.
        unmatched: Number of quantized activations without a counterpart in the float model.
        samples: Number of feeds.
        jump: Name of the tensor at which the error jumps first; None if it does so nowhere.
        advice: What to do next, in one or two sentences.
    """

    outputs: tuple[OutputAgreement, ...]
    tensors: tuple[TensorComparison, ...]
    weights: tuple[TensorComparison, ...]
    unmatched: int
    samples: int
    jump: str | None
    advice: str

    @property
    def by_name(self) -> Mapping[str, TensorComparison]:
        """Activations and weights by name."""
        return {t.name: t for t in (*self.weights, *self.tensors)}

    def worst(self, count: int = _SHOWN) -> tuple[TensorComparison, ...]:
        """The activations at which most is lost, the worst first."""
        return tuple(sorted(self.tensors, key=lambda t: (-t.drop_db, t.sqnr_db))[:count])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; infinity and NaN become None."""

        def plain(value: Any) -> Any:
            if isinstance(value, float) and not math.isfinite(value):
                return None
            if isinstance(value, dict):
                return {k: plain(v) for k, v in value.items()}
            return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value

        found: dict[str, Any] = plain(asdict(self))
        return found

    def __str__(self) -> str:
        lines = [f"{self.samples} samples; {len(self.tensors)} activations compared, {self.unmatched} without a match"]
        for o in self.outputs:
            agree = "" if o.agreement is None else f", agreement {100 * o.agreement:.1f} %"
            rows = f", another number of rows on {o.skipped} samples: not compared there" if o.skipped else ""
            lines.append(f"output '{o.name}': {o.sqnr_db:.1f} dB, cosine {o.cosine:.5f}{agree}{rows}")
        shown = self.worst()
        if shown:
            wide = max(len(_short(t.name)) for t in shown)
            lines.append(f"{'tensor':<{wide}}   SQNR   lost here   clipped   float range")
            for t in shown:
                mark = " <- first jump" if t.name == self.jump else ""
                lines.append(
                    f"{_short(t.name):<{wide}}  {t.sqnr_db:5.1f}   {t.drop_db:9.1f}   {100 * t.clipping:5.2f} %   "
                    f"{t.low:.3g} .. {t.high:.3g}{mark}"
                )
        return printable("\n".join([*lines, self.advice]))


def advise(
    outputs: tuple[OutputAgreement, ...],
    jump: TensorComparison | None,
    weights: tuple[TensorComparison, ...],
    *,
    first: bool,
    last: bool,
    saturating: bool = False,
) -> str:
    """The suggested next step.

    Args:
        outputs: The graph's outputs.
        jump: The tensor at which the error jumps first, if any.
        weights: The weights of the node that makes it, or all weights.
        first: Whether that node reads nothing but graph inputs.
        last: Whether the tensor is a graph output.
        saturating: Whether an operator reads the tensor that cuts off large values itself.
    """
    if all(o.is_fine for o in outputs):
        return "The outputs agree; nothing to do."
    coarse = [w for w in weights if w.sqnr_db < _COARSE_WEIGHTS_DB]
    if jump is None:
        if coarse:
            return _about_weights(coarse[0])
        return "The error grows evenly from layer to layer: try recipe='accurate', or recipe='strict' for a budget."
    where = f"The error jumps at '{jump.name}'" + (f" (node '{jump.node}')" if jump.node else "")
    if jump.clipping > _CLIPPED and not saturating:
        return (
            f"{where}: its range cuts off {100 * jump.clipping:.2g} % of the values. Calibrate on more samples, or "
            "with a method that keeps the extremes (MinMax, a higher percentile)."
        )
    if coarse:
        return f"{where}. {_about_weights(coarse[0])}"
    if last:
        return f"{where}, a graph output. Leave it float: protect_outputs='float'."
    if first and jump.node:
        return f"{where}, the first layer. Leave it float: nodes_to_exclude=['{jump.node}']."
    if jump.peak_to_rms > _WIDE:
        return (
            f"{where}: its range is {jump.peak_to_rms:.0f} times the size of a typical value. Try a range method that "
            "cuts outliers (Percentile, Entropy), or leave the node float: "
            f"nodes_to_exclude=['{jump.node}']."
        )
    return f"{where}. Leave it float with nodes_to_exclude, or let recipe='strict' search what to leave float."


def _about_weights(weight: TensorComparison) -> str:
    what = f"The weights '{weight.name}' of node '{weight.node}' keep only {weight.sqnr_db:.1f} dB"
    if not weight.per_channel:
        return f"{what}: quantize them with per_channel=True."
    return f"{what}: their channels differ too much; try recipe='accurate' (equalization, rounding)."


def _short(name: str, limit: int = 48) -> str:
    return name if len(name) <= limit else f"...{name[3 - limit :]}"
