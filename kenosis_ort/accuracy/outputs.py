"""Outputs of two models beside each other: one comparison, for reports, commands, evaluators and targets."""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kenosis_ort.accuracy import product
from kenosis_ort.errors import VerificationError
from kenosis_ort.runtime.session import Array, Model, Session, open_session, repeats

_FINE_DB: Final = 30.0
_FINE_SHARE: Final = 0.995


@dataclass(frozen=True)
class OutputComparison:
    """One graph output of two models over a set of samples.

    Attributes:
        name: Name of the output.
        sqnr_db: Power of the reference over the power of the difference, dB; inf if equal.
        cosine: Cosine similarity of the two outputs taken as one long vector each; nan where one is zero.
        max_abs: Largest absolute difference.
        agreement: Share of equal argmax positions, 0..1: along the last axis for up to three dimensions,
            along axis 1 (channels) beyond; None for scalars and where that axis has one element.
        equal: Share of equal elements, 0..1.
        elements: Compared elements.
        floating: Whether it holds floating-point numbers.
        skipped: Samples on which the two models return another number of rows (what was found, what is not zero):
            these are not compared.
        samples: Samples in all.
        random: The reference itself returns something else on a second run, so that nothing is compared.
    """

    name: str
    sqnr_db: float
    cosine: float
    max_abs: float
    agreement: float | None
    equal: float
    elements: int
    floating: bool = True
    skipped: int = 0
    samples: int = 0
    random: bool = False

    @property
    def is_fine(self) -> bool:
        """Whether there is nothing to improve."""
        return self.is_compared and (
            self.sqnr_db >= _FINE_DB or (self.agreement is not None and self.agreement >= _FINE_SHARE)
        )

    @property
    def is_compared(self) -> bool:
        """Whether any sample was compared."""
        return self.skipped < self.samples


def sqnr_db(reference: Array, actual: Array) -> float:
    """The signal to quantization noise ratio of ``actual`` in dB.

    Elements that are the same infinity or NaN in both count as equal.

    Args:
        reference: Float outputs of any shape.
        actual: Outputs of the same shape.

    Returns:
        ``10 log10(sum reference^2 / sum (reference - actual)^2)``; inf if equal, -inf if the reference is zero and
        ``actual`` is not, or if only one of them is finite somewhere.

    Raises:
        ValueError: The shapes differ.
    """
    sums = _Sums()
    sums.add(reference, actual)
    return sums.sqnr_db()


def decibels(signal: float, noise: float) -> float:
    """Signal power over noise power in dB; inf without noise, -inf of nothing."""
    if noise <= 0:
        return np.inf
    return float(10 * np.log10(signal / noise)) if signal > 0 else -np.inf


class _Sums:
    """Running sums over samples, so that memory does not grow with their number."""

    def __init__(self, *, random: bool = False) -> None:
        self.signal = self.other = self.noise = self.dot = self.max_abs = 0.0
        self.elements = self.equal = self.positions = self.agreeing = 0
        self.broken = False
        self.floating = True
        self.skipped = self.samples = 0
        self.random = random

    def add(self, reference: Array, actual: Array) -> None:
        a, b = np.asarray(reference), np.asarray(actual)
        self.floating = a.dtype.kind not in "iubOSU"
        if a.shape != b.shape:
            raise ValueError(f"shapes differ: {a.shape} and {b.shape}")
        # Texts are equal or not.
        if a.dtype.kind in "OSU":
            self.elements += a.size
            self.equal += int(np.sum(a == b))
            self.broken = self.broken or self.equal < self.elements
            return
        # Decisions: the place of the largest value.
        if a.ndim:
            axis = -1 if a.ndim <= 3 else 1
            if a.shape[axis] > 1 and a.size:
                same = a.argmax(axis) == b.argmax(axis)
                self.positions += same.size
                self.agreeing += int(same.sum())
        # Numbers; what is not finite in one of them breaks the comparison, unless it is the same in both.
        x, y = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
        finite = np.isfinite(x) & np.isfinite(y)
        odd = ~finite
        if odd.any():
            self.broken = self.broken or not np.array_equal(x[odd], y[odd], equal_nan=True)
            self.elements += int(odd.sum())
            self.equal += int(np.sum((x[odd] == y[odd]) | (np.isnan(x[odd]) & np.isnan(y[odd]))))
            x, y = x[finite], y[finite]
        difference = x - y
        self.elements += x.size
        self.equal += int(np.sum(difference == 0))
        self.signal += product(x, x)
        self.other += product(y, y)
        self.dot += product(x, y)
        self.noise += product(difference, difference)
        self.max_abs = max(self.max_abs, float(np.abs(difference).max(initial=0.0)))

    def sqnr_db(self) -> float:
        return -np.inf if self.broken else decibels(self.signal, self.noise)

    def result(self, name: str) -> OutputComparison:
        norm = float(np.sqrt(self.signal * self.other))
        return OutputComparison(
            name=name,
            sqnr_db=self.sqnr_db(),
            cosine=self.dot / norm if norm > 0 else float("nan"),
            max_abs=float("inf") if self.broken else self.max_abs,
            agreement=self.agreeing / self.positions if self.positions else None,
            equal=self.equal / self.elements if self.elements else 1.0,
            elements=self.elements,
            floating=self.floating,
            skipped=self.skipped,
            samples=self.samples,
            random=self.random,
        )


def compare_outputs(
    reference: Model,
    quantized: Model,
    feeds: Iterable[Mapping[str, Array]],
    *,
    custom_op_libraries: Sequence[str] = (),
    threads: int = 1,
) -> tuple[OutputComparison, ...]:
    """Runs two models on the same samples and compares each output.

    Args:
        reference: The float model.
        quantized: The model to compare; its outputs are matched by name.
        feeds: Samples; consumed once, memory does not grow with their number.
        custom_op_libraries: Shared libraries of custom operators to register.
        threads: Threads of both sessions.

    Returns:
        One entry per output of the reference, in its order; sequences and maps count as one array each.

    Raises:
        VerificationError: The runtime refuses a model or a sample, an output is missing or of another rank.
    """
    expected, actual = (
        open_session(m, custom_op_libraries=custom_op_libraries, threads=threads) for m in (reference, quantized)
    )
    check_names(expected.outputs, actual.outputs)
    own = ({k: v for k, v in feed.items() if k in expected.inputs} for feed in feeds)
    first = next(own, None)
    if first is None:
        return compare_pairs(expected.outputs, ())
    once, again = (_run(expected, first, 0) for _ in range(2))
    random = {name for name in expected.outputs if not repeats(once[name], again[name])}
    pairs = ((_run(expected, feed, at), _run(actual, feed, at)) for at, feed in enumerate(own, 1))
    return compare_pairs(expected.outputs, itertools.chain([(once, _run(actual, first, 0))], pairs), random)


def _run(runner: Session, feed: Mapping[str, Array], number: int) -> dict[str, Array]:
    try:
        return runner.answer(feed)
    except VerificationError as error:
        raise VerificationError(error.what, where=f"sample {number}", fix=error.fix) from error


def compare_pairs(
    names: Sequence[str],
    pairs: Iterable[tuple[Mapping[str, Array], Mapping[str, Array]]],
    random: Collection[str] = (),
) -> tuple[OutputComparison, ...]:
    """Compares each output of two models; returns as `compare_outputs`.

    Args:
        names: Of the outputs.
        pairs: What should be and what is, by name, one pair a sample; read once.
        random: Names of outputs that are others on each run of the reference: they are not compared.

    Raises:
        VerificationError: An output is missing or of another rank.
    """
    sums = OutputSums(names, random)
    for expected, actual in pairs:
        sums.add(expected, actual)
    return sums.result()


class OutputSums:
    """The comparison of outputs so far, sample by sample.

    Args:
        names: Of the outputs.
        random: Names of outputs that are not compared.
    """

    def __init__(self, names: Sequence[str], random: Collection[str] = ()) -> None:
        self._sums = {name: _Sums(random=name in random) for name in names}
        self._samples = 0

    def add(self, expected: Mapping[str, Array], actual: Mapping[str, Array]) -> None:
        """Adds the outputs of one sample; raises as `compare_pairs`."""
        check_names([*self._sums], actual)
        for name, total in self._sums.items():
            a, b = expected[name], actual[name]
            if a.ndim != b.ndim:
                raise VerificationError(
                    f"output '{name}' of sample {self._samples} has shape {a.shape}, in the other model {b.shape}",
                    fix="compare models of the same outputs",
                )
            total.samples += 1
            if a.shape == b.shape and not total.random:
                total.add(a, b)
            else:
                total.skipped += 1
        self._samples += 1

    def result(self) -> tuple[OutputComparison, ...]:
        """One entry per output."""
        return tuple(total.result(name) for name, total in self._sums.items())


def check_names(wanted: Sequence[str], present: Collection[str]) -> None:
    """Refuses a model without one of the outputs; raises as `compare_pairs`."""
    missing = [name for name in wanted if name not in present]
    if missing:
        raise VerificationError(
            f"the quantized model has no output '{missing[0]}'", fix="compare models of the same outputs"
        )
