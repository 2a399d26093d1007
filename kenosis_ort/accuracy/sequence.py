"""A quantized model run layer by layer over all samples at once, so that each layer can be corrected before the next.

The graph is cut behind each layer in question. A part is run for every sample, its layer's output handed out and
possibly changed, and then the next part: that is one pass over the model, whatever the number of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.calibration.session import ObservedModel, Segment, SessionSettings, constant_values, run
from kenosis_ort.graph.session import fed_names
from kenosis_ort.graph.walk import read_names

Array = npt.NDArray[Any]
Visit = Callable[[str, list[Array]], None]


def run_in_sequence(
    model: onnx.ModelProto,
    feeds: Sequence[Mapping[str, Any]],
    values: Sequence[str],
    visit: Visit,
    *,
    custom_op_libraries: Sequence[str] = (),
    threads: int = 0,
) -> None:
    """Runs a model on all feeds together, stopping behind each of the given values.

    Args:
        model: The model, nodes in topological order. Not changed.
        feeds: Samples; what is alive between two parts is held for all of them.
        values: Values that nodes of the main graph compute.
        visit: Called with a value's name and its arrays, one a feed, in graph order; may change the arrays in place,
            and what follows is computed from what it leaves.
        custom_op_libraries: Shared libraries of custom operators to register.
        threads: Threads of the runtime, 0 for its own choice.

    Raises:
        CalibrationError: The runtime refuses the model or a sample.
    """
    nodes = model.graph.node
    constants, _ = constant_values(model)
    reads = [set(read_names(node)) - constants for node in nodes]
    last_use: dict[str, int] = {}
    for at, names in enumerate(reads):
        for name in names:
            last_use[name] = at
    wanted = set(values)
    ends = [at + 1 for at, node in enumerate(nodes) if wanted.intersection(node.output)]
    alive: list[dict[str, Any]] = [dict(feed) for feed in feeds]
    settings = SessionSettings(custom_op_libraries=tuple(custom_op_libraries), threads=threads)
    with ObservedModel(model, settings) as observed:
        start = 0
        for end in ends:
            made = dict.fromkeys(name for node in nodes[start:end] for name in node.output if name)
            here = [name for name in made if name in wanted]
            outputs = list(dict.fromkeys([*here, *(name for name in made if last_use.get(name, -1) >= end)]))
            needed = sorted(set().union(*reads[start:end]) - made.keys())
            part = Segment(start, end, tuple(needed), tuple(here), tuple(outputs))
            session = observed.segment(part, outputs, alive[0] if alive else {})
            asked = fed_names(session)
            for number, values_of in enumerate(alive):
                results = run(session, outputs, {n: values_of[n] for n in asked if n in values_of}, number)
                values_of.update(zip(outputs, results, strict=True))
                for name in needed:
                    if last_use[name] < end:
                        values_of.pop(name, None)
            for name in here:
                visit(name, [values_of[name] for values_of in alive])
                if last_use.get(name, -1) < end:
                    for values_of in alive:
                        del values_of[name]
            start = end


def shift_channels(array: Array, shift: npt.NDArray[np.float64], axis: int) -> None:
    """Adds a number to each channel, in place."""
    shape = [1] * array.ndim
    shape[axis % array.ndim] = -1
    array += shift.reshape(shape).astype(array.dtype)
