"""Which layers get 8 bits: those whose own rounding costs the outputs most for the bytes that it saves.

Each layer alone is put on its grid and the outputs are compared on a few samples; such errors nearly add up. The
value projections of a Llama with grouped queries hold 4 % of its weights and make 14 % of the error. Without samples,
or where that is too much to run, a layer is measured by the error of its own weights or outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import onnx

from kenosis_ort.accuracy.error import find_uses, output_error
from kenosis_ort.graph.bodies import state_pairs
from kenosis_ort.runtime.session import open_session
from kenosis_ort.weights import blocks

SENSITIVITY_FEEDS: Final = 4
MOST_BYTES: Final = 2**34
"""Float weights times layers, beyond which a model for each layer takes too long."""
_EXTRA: Final = 0.1  # of the bytes of all layers
_WORTH: Final = 1.5  # times what a byte saves on average
_MUCH_WORSE: Final = 4.0  # times the middle layer's error: 6 dB

Feed = Mapping[str, Any]


def output_errors(
    model: onnx.ModelProto,
    alone: Callable[[str], onnx.ModelProto | None],
    layers: Iterable[str],
    feeds: Sequence[Feed],
    *,
    custom_op_libraries: Sequence[str] = (),
) -> dict[str, float]:
    """The error of the outputs with each layer alone on its grid, relative to the signal.

    States that are fed back are left out where there are other outputs: their effect shows there.

    Args:
        model: The float model.
        alone: Returns it with one layer rounded.
        layers: Names of nodes.
        feeds: A few samples.
        custom_op_libraries: Libraries with custom operators to register.
    """
    states = state_pairs(model)

    def run(candidate: onnx.ModelProto) -> list[dict[str, Any]]:
        with open_session(candidate, custom_op_libraries=custom_op_libraries) as runner:
            return [dict(runner.answer(feed)) for feed in feeds]

    reference = run(model)
    uses = find_uses(reference)
    measured = {n: use for n, use in uses.items() if n not in states.keys() | set(states.values())} or uses
    found = {}
    for name in layers:
        made = alone(name)
        found[name] = 0.0 if made is None else float(output_error(run(made), reference, uses=measured))
    return found


def worth_their_bytes(errors: Mapping[str, float], sizes: Mapping[str, int]) -> frozenset[str]:
    """The layers that get 8 bits: the dearest by byte, a tenth of all bytes at most.

    Args:
        errors: Of the outputs, by layer.
        sizes: Weights of a layer.
    """
    left = _EXTRA * sum(sizes.values())
    average = sum(errors.values()) / max(sum(sizes.values()), 1)
    chosen = set()
    for name in sorted(errors, key=lambda name: (-errors[name] / sizes[name], name)):
        if errors[name] / sizes[name] > _WORTH * average and sizes[name] <= left:
            chosen.add(name)
            left -= sizes[name]
    return frozenset(chosen)


def much_worse(errors_db: Mapping[str, float]) -> frozenset[str]:
    """The layers whose error is far above the middle one's."""
    if len(errors_db) < 3:
        return frozenset()
    powers: blocks.Float64 = 10 ** (np.array(list(errors_db.values())) / 10)
    return frozenset(n for n, power in zip(errors_db, powers, strict=True) if power > _MUCH_WORSE * np.median(powers))
