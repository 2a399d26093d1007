"""What tests of passes share: outputs of two models beside each other, and weights changed in place."""

import numpy as np
from onnx import numpy_helper

from kenosis_ort.passes.evaluator import Evaluator
from kenosis_ort.passes.reference import Reference
from tests.flow.support import run


def first(model, feeds):
    """The first output for each feed, float64."""
    return [outputs[0].astype(np.float64) for outputs in run(model, feeds)]


def noise(model, other, feeds):
    """Power of the difference of the first outputs."""
    return sum(float(((a - b) ** 2).sum()) for a, b in zip(first(model, feeds), first(other, feeds), strict=True))


def array(tensors, name):
    """Content of a constant."""
    return numpy_helper.to_array(next(t for t in tensors if t.name == name))


def everything(gated):
    """All gates."""
    return frozenset(range(len(gated.gates)))


def evaluator_of(model, feeds, **options):
    """The evaluator of candidates against a model."""
    return Evaluator(Reference(model), feeds, graph=model.graph, **options)
