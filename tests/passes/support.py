"""What tests of passes share: outputs of two models beside each other, and weights changed in place."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from kenosis_ort.passes.evaluator import Evaluator, Reference
from kenosis_ort.passes.gates import GatedModel
from tests.flow.support import run


def first(model: onnx.ModelProto, feeds: Sequence[Any]) -> list[np.ndarray]:
    """The first output for each feed, float64."""
    return [outputs[0].astype(np.float64) for outputs in run(model, feeds)]


def noise(model: onnx.ModelProto, other: onnx.ModelProto, feeds: Sequence[Any]) -> float:
    """Power of the difference of the first outputs."""
    return sum(float(((a - b) ** 2).sum()) for a, b in zip(first(model, feeds), first(other, feeds), strict=True))


def array(tensors: Iterable[onnx.TensorProto], name: str) -> np.ndarray:
    """Content of a constant."""
    return numpy_helper.to_array(next(t for t in tensors if t.name == name))


def everything(gated: GatedModel) -> frozenset[int]:
    """All gates."""
    return frozenset(range(len(gated.gates)))


def evaluator_of(model: onnx.ModelProto, feeds: Sequence[Any], **options: Any) -> Evaluator:
    """The evaluator of candidates against a model."""
    return Evaluator(Reference(model), feeds, graph=model.graph, **options)
