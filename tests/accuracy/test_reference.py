from __future__ import annotations

import numpy as np
import pytest

from kenosis_ort.accuracy.metric import Reference
from kenosis_ort.errors import CalibrationError, VerificationError
from kenosis_ort.runtime.session import counted
from tests import models
from tests.models import Net


def net(noise: bool = False):
    made = Net()
    x = made.input("x", [1, 4])
    made.output(made.op("Relu", [x]), [1, 4])
    if noise:
        made.output(made.op("RandomNormalLike", [x]), [1, 4])
    return made.model()


@pytest.mark.parametrize(("stays_open", "sessions"), [(True, 1), (False, 3)])
def test_each_sample_is_run_once(stays_open: bool, sessions: int):
    reference, feeds = Reference(net(), stays_open=stays_open), models.feeds(net(), 3)
    with counted() as counts:
        first = reference.outputs(feeds)
        again = reference.outputs(feeds[::-1])[::-1]
        (alone,) = reference.run(feeds[0])
    assert (counts.total.sessions, counts.total.runs) == (sessions, 4)
    for a, b, feed in zip(first, again, feeds, strict=True):
        (name,) = a
        np.testing.assert_array_equal(a[name], np.maximum(feed["x"], 0))
        assert a[name] is b[name]
    np.testing.assert_array_equal(alone, np.maximum(feeds[0]["x"], 0))


def test_random_outputs_are_found_out_once():
    model = net(noise=True)
    reference, feeds = Reference(model), models.feeds(model, 2)
    with counted() as counts:
        found = reference.random(feeds[0])
        assert reference.random(feeds[1]) == found
    assert found == {reference.names[1]}
    assert counts.total.runs == 2


def test_what_does_not_run_is_told():
    with pytest.raises(CalibrationError, match="does not run") as told:
        Reference(net()).outputs([*models.feeds(net(), 1), {"x": np.zeros((1, 5), np.float32)}])
    assert told.value.where == "held-out sample 1"
    broken = net()
    broken.graph.node[0].op_type = "Unheard"
    with pytest.raises(VerificationError):
        Reference(broken).outputs(models.feeds(net(), 1))
