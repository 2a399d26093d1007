from __future__ import annotations

import numpy as np

from kenosis_ort.accuracy.candidates import Candidates
from kenosis_ort.runtime.session import counted
from tests import models
from tests.models import Net


def scaled(by: float):
    net = Net()
    net.output(net.op("Mul", [net.input("x", [1, 4]), net.const(by)], name="y"), [1, 4])
    return net.model()


def test_a_candidate_is_loaded_once_and_run_once_on_a_sample():
    a, b, c = scaled(1.0), scaled(2.0), scaled(3.0)
    feeds = models.feeds(a, 3)
    candidates = Candidates()
    with counted() as counts:
        first = list(candidates.outputs(a, feeds[:2]))
        list(candidates.outputs(b, feeds))
        again = list(candidates.outputs(a, feeds))
    assert (counts.total.sessions, counts.total.runs) == (2, 6)
    for feed, outputs in zip(feeds, again, strict=True):
        np.testing.assert_array_equal(next(iter(outputs.values())), feed["x"])
    assert all(x is y for x, y in zip(first, again, strict=False))
    with counted() as counts:
        list(candidates.outputs(c, feeds, keep=False))
        list(candidates.outputs(c, feeds, keep=False))
        list(candidates.outputs(a, feeds))  # not among the latest two any more
    assert (counts.total.sessions, counts.total.runs) == (2, 9)


def test_equal_candidates_are_told_apart_by_identity():
    a, b = scaled(1.0), scaled(1.0)
    feeds = models.feeds(a, 1)
    candidates = Candidates()
    (one,), (other,) = candidates.outputs(a, feeds), candidates.outputs(b, feeds)
    assert one is not other
