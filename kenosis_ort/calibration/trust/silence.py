"""Outputs that answer nothing: a detector that finds nothing in all of the made-up samples shows no range of finding.

The last layers of such a net work on what it was trained to find. A text detector that is shown photographs without
text says zero everywhere, and its last layers keep to a part of the range that they have on text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import onnx

from kenosis_ort.calibration.session import ObservedModel, SessionSettings, run
from kenosis_ort.calibration.trust.bounds import hard_bounds

_YES: Final = 0.5
"""Probability that a yes begins with: an output of its own yes or no says no below it."""
_LEAST_SAMPLES: Final = 4
_SAME: Final = 1e-4  # change between samples, as a share of the output's size
_YES_OR_NO: Final = frozenset({"Sigmoid", "HardSigmoid"})


def silent_outputs(
    proto: onnx.ModelProto, feeds: Sequence[Mapping[str, Any]], *, custom_op_libraries: Iterable[str] = ()
) -> dict[str, str]:
    """Returns the outputs that answer nothing to any of the samples, by name, with the end of a sentence about them.

    Those are outputs of a Sigmoid none of whose numbers reaches a yes, and outputs that do not depend on the sample.

    Args:
        proto: The float model.
        feeds: A few samples; of fewer than four nothing is said.
        custom_op_libraries: Shared libraries with custom operators.
    """
    names = [value.name for value in proto.graph.output if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT]
    if len(feeds) < _LEAST_SAMPLES or not names:
        return {}
    with ObservedModel(proto, SessionSettings(custom_op_libraries=tuple(custom_op_libraries))) as model:
        session = model.session(names)
        answers = [run(session, names, dict(feed), index) for index, feed in enumerate(feeds)]
    made_by = {name: node.op_type for node in proto.graph.node for name in node.output}
    bounds = hard_bounds(proto)
    found = {}
    for name, arrays in zip(names, zip(*answers, strict=True), strict=True):
        if not all(array.size for array in arrays):
            continue
        top = max(float(array.max()) for array in arrays)
        if made_by.get(name) in _YES_OR_NO and bounds.get(name) == (0.0, 1.0) and top < _YES:
            found[name] = f"never rises above {top:.2g} of 1"
        elif _is_same(arrays):
            found[name] = "is the same for all samples"
    return found


def _is_same(arrays: Sequence[np.ndarray[Any, Any]]) -> bool:
    if len({array.shape for array in arrays}) > 1:
        return False
    stacked = np.stack(arrays).astype(np.float64)
    change, size = float(np.abs(stacked - stacked[0]).max()), float(np.abs(stacked).max())
    return size > 0 and change <= _SAME * size
