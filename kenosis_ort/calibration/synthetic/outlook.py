"""What the whole net says about the scale of its input, where its first layer says nothing.

A net of Relu or the like whose biases are small against what they are added to is homogeneous: any scale suits its
layers. What remains is its answer: a classifier that sees inputs of a fraction of their right size finds all classes
equally likely, and one that sees inputs of the right size does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.calibration.session import ObservedModel, SessionSettings, run
from kenosis_ort.calibration.synthetic.consumers import Consumers

Doubles = npt.NDArray[np.float64]

_MOST_LAYERS = 24
_LEAST_CLASSES = 10


class Outlook:
    """A whole model, ready to be asked.

    Args:
        proto: The model.
        name: Its only input.
        settings: How to run it.
    """

    def __init__(self, proto: onnx.ModelProto, name: str, settings: SessionSettings) -> None:
        self._name = name
        self._biases = _biases(proto)
        self._output = proto.graph.output[0].name
        self._ends_in_softmax = any(n.op_type == "Softmax" and self._output in n.output for n in proto.graph.node)
        with ObservedModel(proto, settings) as model:
            self._session = model.session([*self._biases, self._output])

    def ask(self, arrays: Iterable[npt.NDArray[np.generic]]) -> tuple[float, float | None]:
        """Returns the size of the biases and the confidence of the answers.

        Args:
            arrays: Inputs.

        Returns:
            The median over the layers of the median bias in deviations of the layer's output; and the mean probability
            of the likeliest class, None where the output is not that of a classifier.
        """
        ratios: list[float] = []
        confidences: list[float] = []
        for index, array in enumerate(arrays):
            names = [*self._biases, self._output]
            *layers, answer = run(self._session, names, {self._name: array}, index)
            for bias, layer in zip(self._biases.values(), layers, strict=True):
                spread = layer.std(axis=tuple(a for a in range(layer.ndim) if a != 1), dtype=np.float64)
                ratios.append(float(np.median(np.abs(bias)) / max(float(np.median(spread)), 1e-30)))
            if answer.ndim == 2 and answer.shape[1] >= _LEAST_CLASSES:
                confidences.append(_confidence(answer.astype(np.float64), plain=self._ends_in_softmax))
        return float(np.median(ratios or [0.0])), float(np.mean(confidences)) if confidences else None


def _biases(proto: onnx.ModelProto) -> Mapping[str, Doubles]:
    """Returns biases of Convs by their output's name, of some spread over the net."""
    consumers = Consumers(proto)
    found: dict[str, Doubles] = {}
    for node in proto.graph.node:
        bias = consumers.array(node.input[2]) if node.op_type == "Conv" and len(node.input) > 2 else None
        if bias is not None:
            found[node.output[0]] = bias
    names = list(found)[:: max(1, -(-len(found) // _MOST_LAYERS))]
    return {name: found[name] for name in names}


def _confidence(answer: Doubles, *, plain: bool) -> float:
    if not plain:
        answer = np.exp(answer - answer.max(axis=1, keepdims=True))
        answer = answer / answer.sum(axis=1, keepdims=True)
    return float(answer.max(axis=1).mean())
