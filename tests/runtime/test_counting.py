from __future__ import annotations

import re
from pathlib import Path

import kenosis_ort
from kenosis_ort.runtime.session import Cost, at_stage, counted, open_session
from tests.models import Net


def _model() -> bytes:
    net = Net()
    net.output(net.op("Relu", [net.input("x", [2, 4])]))
    return net.model().SerializeToString()


def _feed():
    import numpy as np

    return {"x": np.ones((2, 4), np.float32)}


def test_sessions_runs_and_bytes_are_counted_by_stage():
    with counted() as counts:
        with at_stage("outer"):
            session = open_session(_model())
            with at_stage("inner"):
                session.run(None, _feed())
            session.run(None, _feed())
        with counted() as within:
            session.run(None, _feed())
    session.run(None, _feed())
    assert counts.by_stage == {"outer": Cost(1, 1, 32), "inner": Cost(0, 1, 32), "": Cost(0, 1, 32)}
    assert within.total == Cost(0, 1, 32)
    assert counts.total == Cost(1, 3, 96)


def test_no_other_module_opens_sessions():
    folder = Path(kenosis_ort.__file__).parent
    opens = re.compile(r"\bInferenceSession\(")
    allowed = {
        folder / "runtime" / "session.py",
        folder / "targets" / "qnn" / "qnn_child.py",  # a program that imports nothing of this package
    }
    assert [p for p in folder.rglob("*.py") if p not in allowed and opens.search(p.read_text("utf-8"))] == []
