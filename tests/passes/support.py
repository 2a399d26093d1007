"""What tests of passes share: outputs of two models beside each other, and weights changed in place."""

import numpy as np
from onnx import numpy_helper

from kenosis_ort.passes.evaluator import Evaluator
from kenosis_ort.passes.reference import Reference
from tests import models
from tests.flow.support import changed, run

BAD = 3


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


def spiky_chain(large=None):
    """Eight Convs; one channel behind the fourth is large, widens the range of its tensor, and is read by nobody.

    Args:
        large: Size of that channel by the number of the Conv, where it is another one, or there are several.

    Returns:
        The model, and the name of the tensor behind the first of them.
    """
    model, large = models.conv_relu_chain(16, channels=8), large or {BAD: 30.0}
    convs = [n for n in model.graph.node if n.op_type == "Conv"]
    first, how = np.arange(8) == 0, {}
    for at, size in large.items():
        how |= {convs[at].input[2]: lambda b, size=size: np.where(first, size, b)}
        how |= {convs[at + 1].input[1]: ~first[:, None, None]}
    relu = next(n for n in model.graph.node if convs[min(large)].output[0] in n.input)
    return changed(model, **how), relu.output[0]
