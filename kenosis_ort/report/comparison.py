"""Compares a float model with a quantized one, tensor by tensor, on samples.

In place of ``onnxruntime.quantization.qdq_loss_debug``: `Comparison.tensors` is what ``create_activation_matching``
and ``compute_activation_error`` give, `Comparison.weights` what ``create_weight_matching`` and
``compute_weight_error`` give, without augmented copies of the models on disk. The quantized values are those of the
runtime's integer kernels: a model that also returns its dequantized tensors is fused as it is without them (tested).
"""

import itertools
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import onnx
from rich.console import Group, RenderableType
from rich.text import Text

from kenosis_ort.accuracy.outputs import OutputComparison, OutputSums, check_names
from kenosis_ort.accuracy.side_by_side import ChannelSums, Pair, Pairing, WeightPair, answers, chunks
from kenosis_ort.calibration.feeds import checked_feeds, input_specs
from kenosis_ort.calibration.readers import for_model
from kenosis_ort.checks import MOST_THREADS, or_none, whole
from kenosis_ort.errors import CalibrationError, last_gate
from kenosis_ort.graph.load import load_model
from kenosis_ort.graph.outside import array_in
from kenosis_ort.report.text import Form, cells, make_table, table, to_text
from kenosis_ort.storage.data import without_odd
from kenosis_ort.storage.spool import Spool

Model = str | os.PathLike[str] | onnx.ModelProto

_JUMP_DB = 6.0  # a tensor that has this much less than what it is computed from
_BEST_DB = 40.0  # what 8 bits can be expected to keep: nothing is held against more
_SAME_STEPS = 1.5  # rounding moves a weight by half a step, at most by one: what is further off is another weight
_SAME_SHARE = 0.95
_SATURATING = frozenset({"Sigmoid", "HardSigmoid", "Tanh", "Softmax", "Clip", "HardSwish", "Elu", "Erf"})
_SHOWN = 8
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

    outputs: tuple[OutputComparison, ...]
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
        found: dict[str, Any] = without_odd(asdict(self))
        return found

    def __str__(self) -> str:
        return to_text(render_comparison(self))


_FLOAT_RANGE: Final = "{0.low:.3g} .. {0.high:.3g}"
_OUTPUTS: Final[Mapping[str, Form]] = {
    ">agreement": lambda o: "-" if o.agreement is None else f"{100 * o.agreement:.1f} %",
    ">SQNR": "{0.sqnr_db:.1f} dB",
    ">cosine": "{0.cosine:.5f}",
    ">largest difference": "{0.max_abs:.3g}",
}
_WEIGHTS: Final[Mapping[str, Form]] = {
    "weight": "{0.name}",
    ">SQNR": "{0.sqnr_db:.1f} dB",
    ">cosine": "{0.cosine:.5f}",
    ">scales": lambda w: "by channel" if w.per_channel else "one",
    ">float range": _FLOAT_RANGE,
}


def render_comparison(
    found: Comparison, short: Collection[str] = (), *, full: bool = False, made_up: bool = False
) -> RenderableType:
    """A comparison for a rich console.

    Args:
        found: What to show.
        short: Names of outputs that agree less than is demanded.
        full: Show every layer and the weights, not the few layers that lose most.
        made_up: Say that the data is.
    """
    rows = [(o.name, *(cells(o, _OUTPUTS) if o.is_compared else ["-"] * len(_OUTPUTS))) for o in found.outputs]
    styles = ["red" if o.name in short else "" if o.is_fine else "yellow" for o in found.outputs]
    blocks: list[RenderableType] = [make_table("output", *_OUTPUTS, rows=rows, styles=styles, title="Outputs")]
    blocks += [
        Text(f"'{o.name}': another number of rows on {o.skipped} samples, not compared there", style="yellow")
        for o in found.outputs
        if o.skipped
    ]
    if shown := found.worst(len(found.tensors) if full else _SHOWN):
        columns: dict[str, Form] = {
            "tensor": lambda t: Text.assemble(t.name, (" first jump" * (t.name == found.jump), "bold red")),
            ">SQNR": "{0.sqnr_db:.1f} dB",
            ">lost here": "{0.drop_db:.1f} dB",
            ">cosine": "{0.cosine:.5f}",
            ">clipped": lambda t: f"{100 * t.clipping:.2f} %",
            ">float range": _FLOAT_RANGE,
        }
        title = "Layers, most lost first" if full else f"The {len(shown)} layers that lose most"
        blocks.append(table(shown, columns, title=title))
    if found.weights and full:
        blocks.append(table(sorted(found.weights, key=lambda w: w.sqnr_db), _WEIGHTS, title="Weights, worst first"))
    compared = (
        f"{found.samples} samples; {len(found.tensors)} quantized activations have a counterpart in the float model, "
        f"{found.unmatched} do not"
    )
    blocks.append(Text(compared, style="dim"))
    if made_up:
        blocks.append(Text("note: on made-up data; agreement on real data may differ", style="yellow"))
    return Group(*blocks, Text(f"next: {found.advice}", style="bold"))


@last_gate
def compare(
    float_model: Model,
    quantized_model: Model,
    data: Any,
    *,
    samples: int | None = None,
    memory: int = 2**28,
    custom_op_libraries: Sequence[str] = (),
    threads: int = 0,
) -> Comparison:
    """Compares two models on samples and says where the error comes from.

    Args:
        float_model: Path of the float model, or the model. Not changed.
        quantized_model: Path of a QDQ model made of it by this or another quantizer, or the model. Not changed.
        data: Feeds: a ``CalibrationDataReader``, or an iterable of dictionaries from input name to array.
        samples: Number of feeds to read from it; None for all.
        memory: Bytes of tensors to hold at a time; more tensors are compared in several runs.
        custom_op_libraries: Libraries with custom operators to register.
        threads: Threads of the sessions; 0 leaves it to the runtime.

    Raises:
        OptionError: ``samples`` or ``threads`` is out of range.
        ModelLoadError: A model is missing or is not an ONNX model.
        CalibrationError: There are no samples, or they do not fit the float model.
        VerificationError: The runtime refuses a model or a sample, or an output is missing or of another rank.
    """
    or_none(partial(whole, least=1))("samples", samples)
    whole("threads", threads, most=MOST_THREADS)
    real, quantized = (
        load_model(m, custom_op_libraries=custom_op_libraries).proto for m in (float_model, quantized_model)
    )
    feeds = _first(data, samples, real)
    pairing = Pairing(real, quantized)
    pairs = list(pairing.activations())
    sums = {p.name: ChannelSums(p.grid) for p in pairs}
    names = [o.name for o in real.graph.output]
    check_names(names, {o.name for o in quantized.graph.output})
    measured = OutputSums(names)
    values = {p.name: p.quantized for p in pairs}
    for number, chunk in enumerate(chunks(real, values, feeds[0], memory)):
        for a, b in answers(real, quantized, chunk, feeds, custom_op_libraries, threads):
            for name, other in chunk.items():
                sums[name].add(a[name], b[other])
            if number == 0:
                measured.add(a, b)
    outputs = measured.result()
    weights = tuple(w for w in (_weight(pairing, w) for w in pairing.weights()) if w is not None)
    tensors = _with_drops(pairing, pairs, sums)
    jump = next((t for t in tensors if t.drop_db >= _JUMP_DB), None)
    return Comparison(
        outputs=outputs,
        tensors=tensors,
        weights=weights,
        unmatched=pairing.quantized_count - len(tensors),
        samples=len(feeds),
        jump=None if jump is None else jump.name,
        advice=_advice(pairing, pairs, jump, weights, outputs),
    )


def _first(data: Any, samples: int | None, model: onnx.ModelProto) -> Spool:
    inputs, feeds = input_specs(model), Spool()
    for feed in itertools.islice(checked_feeds(for_model(data, itertools.chain(*inputs)), inputs), samples):
        feeds.append(feed)
    if not len(feeds):
        raise CalibrationError("there are no samples to compare on", fix="pass at least one feed")
    return feeds


def _with_drops(
    pairing: Pairing, pairs: Sequence[Pair], sums: Mapping[str, ChannelSums]
) -> tuple[TensorComparison, ...]:
    compared = [p for p in pairs if sums[p.name].elements]
    results = {p.quantized: sums[p.name].result() for p in compared}
    above = {p.quantized: pairing.before(p) & results.keys() for p in compared}
    below: dict[str, list[float]] = {}
    for name, origins in above.items():
        for origin in origins:
            below.setdefault(origin, []).append(results[name][0])
    # An error that all readers are blind to (the tail before a Sigmoid, a branch too small to matter) is none.
    felt = {name: max(sqnr, min(below.get(name, [sqnr]))) for name, (sqnr, _, _) in results.items()}
    found = []
    for pair in compared:
        total = sums[pair.name]
        sqnr, cosine, rescaled = results[pair.quantized]
        base = min((felt[name] for name in above[pair.quantized]), default=_BEST_DB)
        low, high = (0.0, 0.0) if pair.grid is None else pair.grid.range
        found.append(
            TensorComparison(
                name=pair.name,
                node=pair.node,
                sqnr_db=sqnr,
                cosine=cosine,
                low=total.least,
                high=total.largest,
                clipping=total.clipping,
                peak_to_rms=(high - low) / total.rms if total.rms > 0 else 0.0,
                drop_db=max(min(base, _BEST_DB) - felt[pair.quantized], 0.0),
                rescaled=rescaled,
            )
        )
    return tuple(found)


def _weight(pairing: Pairing, pair: WeightPair) -> TensorComparison | None:
    real = array_in(pairing.float_constants[pair.name]).astype(np.float64)
    found = pair.grid.values()
    if found is None or found[0].size != real.size:
        return None
    value, step = found
    if np.mean(np.abs(real.reshape(value.shape) - value) <= _SAME_STEPS * step) < _SAME_SHARE:
        return None
    sums = ChannelSums()
    sums.add(real.reshape(1, -1), value.reshape(1, -1))
    sqnr, cosine = sums.plain()
    return TensorComparison(
        name=pair.name,
        node=pair.node,
        sqnr_db=sqnr,
        cosine=cosine,
        low=sums.least,
        high=sums.largest,
        per_channel=pair.grid.scale.size > 1,
    )


def _advice(
    pairing: Pairing,
    pairs: Sequence[Pair],
    jump: TensorComparison | None,
    weights: tuple[TensorComparison, ...],
    outputs: tuple[OutputComparison, ...],
) -> str:
    if jump is None:
        return advise(outputs, None, tuple(sorted(weights, key=lambda w: w.sqnr_db)), first=False, last=False)
    pair = next(p for p in pairs if p.name == jump.name)
    own = tuple(w for w in weights if w.node == jump.node)
    above = pairing.before(pair)
    quantized_inputs = {p.quantized for p in pairs if not p.node}
    return advise(
        outputs,
        jump,
        own,
        first=above <= quantized_inputs,
        last=jump.name in {o.name for o in outputs},
        saturating=any(node.op_type in _SATURATING for node in pairing.float_readers.get(jump.name, ())),
    )


def advise(
    outputs: tuple[OutputComparison, ...],
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
