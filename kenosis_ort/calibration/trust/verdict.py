"""``trusted``, ``usable`` or ``do not ship``: the rules.

They rest on what was measured on trained nets. Gaussian noise brings about BatchNormalization misfits of 0.3 to 25 and
ruins some nets altogether; made-up photographs and fitted features 0.05 to 0.3, and cost less than a point of
accuracy. An input scale off by two costs little, one off by a hundred ruins everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from kenosis_ort.calibration.provenance import Known
from kenosis_ort.calibration.trust.model import TensorTrust, Verdict

Because = Callable[[Verdict, str, str], None]

_NATURAL_MISFIT = 0.4
_WORTHLESS_MISFIT = 1.0
_UNSTABLE = 0.3  # spread of a range over groups of samples, as a share of its width
_FEW, _MANY = 0.1, 0.35  # shares of unstable tensors
_NAMED = 3
_ENOUGH_REAL = 8


def judge(
    tensors: Mapping[str, TensorTrust],
    known: Mapping[str, Known],
    misfits: Mapping[str, float],
    *,
    silent: Mapping[str, str],
    natural: bool,
    real: int,
    needed: int | None,
) -> tuple[Verdict, tuple[str, ...], tuple[str, ...]]:
    """Returns the verdict, what caused it, and what the caller could supply.

    Args:
        tensors: By tensor name.
        known: How well the scale of each input is known, by its name.
        misfits: Of BatchNormalizations by the node's name.
        silent: Outputs that answer nothing to the samples, by name, and how that shows.
        natural: Whether the samples are made after what the inputs are in nature.
        real: Number of real samples or groups.
        needed: After how many of them the ranges had settled.
    """
    worst, causes, supply = Verdict.TRUSTED, [], []

    def because(verdict: Verdict, cause: str, remedy: str) -> None:
        nonlocal worst
        if list(Verdict).index(verdict) > list(Verdict).index(worst):
            worst = verdict
        causes.append(cause)
        if remedy not in supply:
            supply.append(remedy)

    if real:
        if needed is None and real < _ENOUGH_REAL:
            because(Verdict.USABLE, f"ranges still changed with the last of {real} real samples", "more real samples")
    else:
        fitted = bool(misfits) and float(np.median(list(misfits.values()))) <= _NATURAL_MISFIT
        _judge_inputs(known, because)
        if not natural and not fitted:
            because(
                Verdict.USABLE,
                "tokens, sound, states or features were made up, and no BatchNormalization says that they are natural",
                "ten real samples",
            )
        _judge_batch_norms(misfits, because)
        for name, how in silent.items():
            because(
                Verdict.DO_NOT_SHIP,
                f"output '{name}' {how}: what the net is made for is not in the made-up samples",
                "ten real samples",
            )
    unstable = sorted((n for n, t in tensors.items() if t.spread > _UNSTABLE), key=lambda n: -tensors[n].spread)
    share = len(unstable) / max(len(tensors), 1)
    if share > _FEW:
        because(
            Verdict.DO_NOT_SHIP if share > _MANY else Verdict.USABLE,
            f"the ranges of {len(unstable)} of {len(tensors)} tensors change with the seed: {_some(unstable)}",
            "more samples (samples=256), or ten real ones",
        )
    return worst, tuple(causes), tuple(supply)


def _judge_inputs(known: Mapping[str, Known], because: Because) -> None:
    for name, how in known.items():
        if how is Known.GUESS:
            because(
                Verdict.DO_NOT_SHIP,
                f"the scale of input '{name}' is a guess",
                f"input_ranges={{'{name}': (low, high)}}, or mean= and std= of the preprocessing, or ten real samples",
            )
        elif how is Known.CONVENTION:
            because(
                Verdict.USABLE,
                f"the scale of input '{name}' follows from convention only",
                f"input_ranges={{'{name}': (low, high)}}, or mean= and std= of the preprocessing",
            )


def _judge_batch_norms(misfits: Mapping[str, float], because: Because) -> None:
    if not misfits:
        return
    middle = float(np.median(list(misfits.values())))
    if middle > _NATURAL_MISFIT:
        odd = sorted(misfits, key=lambda name: -misfits[name])
        because(
            Verdict.DO_NOT_SHIP if middle > _WORTHLESS_MISFIT else Verdict.USABLE,
            f"the samples do not look natural to the BatchNormalizations (misfit {middle:.2f}), {_some(odd)} first",
            "input_ranges= or mean= and std= of the preprocessing, or ten real samples",
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:_NAMED])
    return shown + (" and others" if len(names) > _NAMED else "")
