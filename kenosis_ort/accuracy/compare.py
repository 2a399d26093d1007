"""Compares a float model with a quantized one, tensor by tensor, on samples.

In place of ``onnxruntime.quantization.qdq_loss_debug``: `Comparison.tensors` is what ``create_activation_matching``
and ``compute_activation_error`` give, `Comparison.weights` what ``create_weight_matching`` and
``compute_weight_error`` give, without augmented copies of the models on disk. The quantized values are those of the
runtime's integer kernels: a model that also returns its dequantized tensors is fused as it is without them (tested).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx

from kenosis_ort.accuracy.channel_statistics import ChannelSums
from kenosis_ort.accuracy.comparison import Comparison, OutputAgreement, TensorComparison, advise
from kenosis_ort.accuracy.error import Array
from kenosis_ort.accuracy.pairing import Pair, Pairing, WeightPair
from kenosis_ort.calibration.feeds import check_feed, input_specs, sample_feeds
from kenosis_ort.calibration.readers import for_model
from kenosis_ort.calibration.segments import estimate_bytes
from kenosis_ort.checks import MOST_THREADS, or_none, whole
from kenosis_ort.errors import CalibrationError, VerificationError, last_gate
from kenosis_ort.graph.load import load_model
from kenosis_ort.graph.outside import array_in
from kenosis_ort.graph.shapes import infer_shapes
from kenosis_ort.runtime.session import Session, open_session
from kenosis_ort.storage.spool import Spool

Model = str | os.PathLike[str] | onnx.ModelProto

_JUMP_DB = 6.0  # a tensor that has this much less than what it is computed from
_BEST_DB = 40.0  # what 8 bits can be expected to keep: nothing is held against more
_SAME_STEPS = 1.5  # rounding moves a weight by half a step, at most by one: what is further off is another weight
_SAME_SHARE = 0.95
_SATURATING = frozenset({"Sigmoid", "HardSigmoid", "Tanh", "Softmax", "Clip", "HardSwish", "Elu", "Erf"})
_UNKNOWN_BYTES = 2**22  # taken for tensors of unknown shape


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
    sums = {p.name: ChannelSums(p.low, p.high, p.scale) for p in pairs}
    outputs: tuple[OutputAgreement, ...] = ()
    for number, chunk in enumerate(_chunks(real, pairs, feeds[0], memory)):
        with (
            _observing(real, [p.name for p in chunk], custom_op_libraries, threads) as first,
            _observing(quantized, [p.quantized for p in chunk], custom_op_libraries, threads) as second,
        ):
            measured = _Outputs([o.name for o in real.graph.output], second) if number == 0 else None
            for feed in map(feeds.__getitem__, range(len(feeds))):
                a, b = (r.answer({k: v for k, v in feed.items() if k in r.inputs}) for r in (first, second))
                for pair in chunk:
                    sums[pair.name].add(
                        a[pair.name] if pair.name in a else np.asarray(feed[pair.name]), b[pair.quantized]
                    )
                if measured is not None:
                    measured.add(a, b)
            if measured is not None:
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
    given = sample_feeds(for_model(data, itertools.chain(*inputs)))
    for index, feed in enumerate(itertools.islice(given, samples)):
        feeds.append(check_feed(feed, *inputs, index))
    if not len(feeds):
        raise CalibrationError("there are no samples to compare on", fix="pass at least one feed")
    return feeds


def _chunks(
    model: onnx.ModelProto, pairs: Sequence[Pair], feed: Mapping[str, Any], memory: int
) -> Iterator[list[Pair]]:
    """Yields the tensors in parts whose values in both models fit the memory; one empty part if there are none."""
    shaped = onnx.ModelProto()
    shaped.CopyFrom(model)
    infer_shapes(shaped, thorough=False)
    sizes = estimate_bytes(shaped, feed, {p.name for p in pairs})
    chunk: list[Pair] = []
    size_of_chunk = 0
    for pair in pairs:
        size = 2 * sizes.get(pair.name, _UNKNOWN_BYTES)
        if chunk and size_of_chunk + size > memory:
            yield chunk
            chunk, size_of_chunk = [], 0
        chunk.append(pair)
        size_of_chunk += size
    if chunk or not pairs:
        yield chunk


def _observing(
    model: onnx.ModelProto, values: Iterable[str], custom_op_libraries: Sequence[str], threads: int
) -> Session:
    """A session that returns further values; those of graph inputs are left out."""
    given = {value.name for value in model.graph.input}
    further = [value for value in values if value not in given]
    return open_session(model, threads=threads, custom_op_libraries=custom_op_libraries, further=further)


class _Outputs:
    """Sums over the graph's outputs."""

    def __init__(self, names: Sequence[str], quantized: Session) -> None:
        missing = [n for n in names if n not in quantized.outputs]
        if missing:
            raise VerificationError(
                f"the quantized model has no output '{missing[0]}'", fix="compare models of the same outputs"
            )
        self._sums = {name: ChannelSums() for name in names}
        self._largest = dict.fromkeys(names, 0.0)
        self._skipped = dict.fromkeys(names, 0)
        self._positions = {name: [0, 0] for name in names}

    def add(self, reference: Mapping[str, Array], actual: Mapping[str, Array]) -> None:
        for name, sums in self._sums.items():
            a, b = reference[name], actual[name]
            if a.dtype.kind not in "fiub":
                continue
            if a.ndim != b.ndim:
                raise VerificationError(
                    f"output '{name}' has shape {a.shape}, in the quantized model {b.shape}",
                    fix="compare models of the same outputs",
                )
            if not sums.add(a, b):
                self._skipped[name] += 1
                continue
            difference = np.abs(a.astype(np.float64) - b.astype(np.float64))
            finite = difference[np.isfinite(difference)]
            self._largest[name] = max(self._largest[name], float(finite.max(initial=0.0)))
            axis = -1 if a.ndim <= 3 else 1
            if a.ndim and a.shape[axis] > 1 and a.size:
                same = a.argmax(axis) == b.argmax(axis)
                self._positions[name][0] += int(same.sum())
                self._positions[name][1] += same.size

    def result(self) -> tuple[OutputAgreement, ...]:
        found = []
        for name, sums in self._sums.items():
            sqnr, cosine = sums.plain()
            same, positions = self._positions[name]
            agreement = same / positions if positions else None
            found.append(
                OutputAgreement(name, sqnr, cosine, self._largest[name], agreement, skipped=self._skipped[name])
            )
        return tuple(found)


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
        width = 0.0 if pair.low is None or pair.high is None else pair.high - pair.low
        found.append(
            TensorComparison(
                name=pair.name,
                node=pair.node,
                sqnr_db=sqnr,
                cosine=cosine,
                low=total.least,
                high=total.largest,
                clipping=total.clipping,
                peak_to_rms=width / total.rms if total.rms > 0 else 0.0,
                drop_db=max(min(base, _BEST_DB) - felt[pair.quantized], 0.0),
                rescaled=rescaled,
            )
        )
    return tuple(found)


def _weight(pairing: Pairing, pair: WeightPair) -> TensorComparison | None:
    real = array_in(pairing.float_constants[pair.name]).astype(np.float64)
    found = _dequantized(pairing, pair.dequantize)
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
        per_channel=pair.channels > 1,
    )


def _dequantized(pairing: Pairing, node: onnx.NodeProto) -> tuple[Array, Array] | None:
    """Dequantized constant of a DQ, and the scale; None for blocked scales and external constants."""
    tensors = [pairing.constants.get(name) for name in node.input]
    if tensors[0] is None or tensors[1] is None:
        return None
    values, scale = (array_in(t).astype(np.float64) for t in tensors[:2] if t is not None)
    point = array_in(tensors[2]).astype(np.float64) if len(tensors) > 2 and tensors[2] else np.zeros(())
    if scale.ndim > 1:
        return None
    axis = next((int(a.i) for a in node.attribute if a.name == "axis"), 1)
    if scale.size > 1:
        shape = [1] * values.ndim
        shape[axis] = -1
        scale, point = scale.reshape(shape), point.reshape(shape) if point.size > 1 else point.reshape(())
    else:
        scale, point = scale.reshape(()), point.reshape(())
    return (values - point) * scale, scale


def _advice(
    pairing: Pairing,
    pairs: Sequence[Pair],
    jump: TensorComparison | None,
    weights: tuple[TensorComparison, ...],
    outputs: tuple[OutputAgreement, ...],
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
        saturating=bool(_SATURATING.intersection(pairing.reader_types(jump.name))),
    )
