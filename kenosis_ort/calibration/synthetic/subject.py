"""What made-up pictures show: photographs alone, or writing too, whichever the net answers to.

A trained net is excited by what it was trained on: its last layers vary more over such pictures, and so do its answers.
Measured on trained nets, writing excites the last third of the layers of a text detector and of a classifier of text
lines 1.5 to 2 times as much as photographs do, and their answers more than 2.5 times; those of nets for photographs 0.8
to 1.25 times. A text recognizer is excited 1.1 times as much, but takes pictures of one line, which are wide and low.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import onnx

from kenosis_ort.calibration.session import ObservedModel, SessionSettings, run
from kenosis_ort.calibration.synthetic.images import ImageMaker
from kenosis_ort.calibration.synthetic.maker import Maker, Sample
from kenosis_ort.calibration.synthetic.pages import is_line
from kenosis_ort.errors import CalibrationError
from kenosis_ort.graph.operators import LAYERS

_log = logging.getLogger(__name__)

_TRIALS: Final = 8
_EXCITED: Final = 1.4  # times the deviation over photographs, from which on writing is what a net is for
_EXCITED_BY_LINES: Final = 1.0
_ANSWERS: Final = 2.0  # the same of an output
_MOST_LAYERS: Final = 16
_NOTHING: Final = 1e-9


def shows_writing(proto: onnx.ModelProto, makers: Sequence[Maker], settings: SessionSettings) -> bool:
    """Tells whether half of a net's pictures had better show writing.

    Args:
        proto: The model.
        makers: Of its inputs; of any but a single picture nothing is found out.
        settings: How to run the model.
    """
    maker = makers[0] if makers else None
    if not isinstance(maker, ImageMaker) or len(makers) > 1:
        return False
    try:
        photographs, pages = (_excitement(proto, maker, settings, writing=shown) for shown in (False, True))
    except CalibrationError as error:
        _log.info("photographs alone: %s", error)
        return False
    layers, answers = (
        (np.asarray(b) + _NOTHING) / (np.asarray(a) + _NOTHING) for a, b in zip(photographs, pages, strict=True)
    )
    excited = float(np.exp(np.mean(np.log(layers)))) if layers.size else 1.0
    answered = float(answers.max(initial=0.0))
    _log.info("writing excites the last layers %.2f times as much as photographs, answers %.2f", excited, answered)
    return excited >= (_EXCITED_BY_LINES if is_line(*maker.size) else _EXCITED) or answered >= _ANSWERS


def _excitement(
    proto: onnx.ModelProto, maker: ImageMaker, settings: SessionSettings, *, writing: bool
) -> tuple[list[float], list[float]]:
    """Returns the deviations of the last third of the layers, the median over their channels, and of the outputs."""
    nodes = [node for node in proto.graph.node if node.op_type in LAYERS]
    axes = {node.output[0]: -1 if node.op_type in ("Gemm", "MatMul") else 1 for node in nodes}
    layers = list(axes)[len(axes) * 2 // 3 :][-_MOST_LAYERS:]
    outputs = [v.name for v in proto.graph.output if v.type.tensor_type.elem_type == onnx.TensorProto.FLOAT]
    names = list(dict.fromkeys([*layers, *outputs]))
    sums: dict[str, Any] = dict.fromkeys(names, 0.0)
    with ObservedModel(proto, SessionSettings(custom_op_libraries=settings.custom_op_libraries)) as model:
        session = model.session(names)
        for index in range(_TRIALS):
            feed = {maker.info.name: maker.shown(Sample(0, index), writing=writing)}
            for value, array in zip(names, run(session, names, feed, index), strict=True):
                rows = np.moveaxis(array, axes[value], 0) if value in axes and array.ndim > 1 else array[None]
                wide = rows.reshape(len(rows), -1).astype(np.float64)
                sums[value] = sums[value] + np.stack(
                    [np.full(len(wide), wide.shape[1]), wide.sum(1), (wide * wide).sum(1)]
                )
    spreads = {}
    for value, (count, total, squares) in sums.items():
        mean = total / count
        spreads[value] = np.sqrt(np.maximum(squares / count - mean * mean, 0.0))
    return [float(np.median(spreads[v])) for v in layers], [float(spreads[v].max()) for v in outputs]
