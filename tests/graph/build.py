"""Small models and exact comparisons for the tests of graph/ and rewrite/."""

import itertools
import sys

import numpy as np

from kenosis_ort.rewrite.prepare import prepare
from tests import models
from tests.planning import parse


def net(text, weights=None, **options):
    """The model of an ONNX text, sound or not; see `tests.planning.parse`."""
    return parse(text, weights, **{"checked": False, "ir_version": 8, **options})


def ready(proto, *, min_opset=13, rewrites=(), **options):
    return prepare(proto, min_opset=min_opset, rewrites=rewrites, **options)


def run(proto, feeds):
    return models.session(proto, optimize=False).run(None, dict(feeds))


def assert_same(before, after, feeds, *, rtol=1e-4, least=1e-30):
    """The two models give the same outputs, relative to each output's largest value, or to the least one given."""
    for x, y in zip(run(before, feeds), run(after, feeds), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        if x.size and x.dtype.kind == "f":
            x, y = x.astype(np.float64), y.astype(np.float64)
            assert np.abs(x - y).max() <= rtol * max(float(np.abs(x).max()), least)
        else:
            np.testing.assert_array_equal(x, y)


def ops(proto):
    return [node.op_type for node in proto.graph.node]


def steps(call):
    """Functions, of Python and of C, that are called within a call: work that is the same on every machine."""
    seen = itertools.count()
    sys.setprofile(lambda *_: next(seen))
    try:
        call()
    finally:
        sys.setprofile(None)
    return next(seen)
