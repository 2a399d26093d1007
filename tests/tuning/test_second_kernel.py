"""The nearest profile is believed about the second kernel of Conv only where it is faster here too, and exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest

from kenosis_ort.flow.target_options import host_label, with_own_profile
from kenosis_ort.options import Speed
from kenosis_ort.targets import get_target
from kenosis_ort.targets.ort_cpu.probes import _convs
from kenosis_ort.targets.profile import Probe
from kenosis_ort.tuning import measure
from tests.processor import Pretend, with_flags

SHAPES = [(512, 256, 7, 1, 1, 1), (16, 16, 7, 1, 1, 1)]
AMX = next(p for p in get_target("ort-cpu").profiles if p.name == "amx")
VNNI = next(p for p in get_target("ort-cpu").profiles if p.name == "vnni")


def probes() -> Iterator[Probe]:
    return (_convs(form, SHAPES) for form in ("float", "integer", "shifted"))


ORT = get_target("ort-cpu")
TARGET = replace(ORT, hooks=replace(ORT.hooks, probes=probes))


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is kept between processes."""
    facts: dict[str, Any] = {}
    monkeypatch.setattr(measure, "_known", {})
    monkeypatch.setattr(measure, "recall", facts.get)
    monkeypatch.setattr(measure, "keep", facts.__setitem__)
    return facts


def times_of(deep: float, small: float) -> Callable[[Probe, int], Mapping[str, float]]:
    """Returns times with which the second kernel gains as said at each of the two Convs."""

    def times(probe: Probe, _: int) -> Mapping[str, float]:
        gains = dict(zip(probe.nodes, (deep, small), strict=True))
        return {n: 100.0 / (gains[n] if form == "shifted" else 1) for n, (_, form) in probe.nodes.items()}

    return times


@pytest.mark.parametrize(("deep", "small", "expected"), [(1.6, 0.5, True), (0.8, 9.0, False), (1.05, 9.0, False)])
def test_only_nodes_that_should_gain_are_asked(monkeypatch: pytest.MonkeyPatch, deep, small, expected):
    monkeypatch.setattr(measure, "_times", times_of(deep, small))
    assert measure.pays(TARGET, AMX, 1) is expected


def test_a_kernel_that_computes_something_else_is_not_taken(monkeypatch: pytest.MonkeyPatch):
    def wrong() -> Iterator[Probe]:
        for probe in probes():
            if {form for _, form in probe.nodes.values()} == {"shifted"}:
                held = next(i for i in probe.model.graph.initializer if len(i.dims) == 4)
                array = onnx.numpy_helper.to_array(held) + np.int8(1)
                held.CopyFrom(onnx.numpy_helper.from_array(array, held.name))
            yield probe

    monkeypatch.setattr(measure, "_times", times_of(3, 3))
    assert measure.pays(TARGET, AMX, 1)
    measure._known.clear()
    monkeypatch.setattr(measure, "recall", lambda _: None)
    assert not measure.pays(replace(ORT, hooks=replace(ORT.hooks, probes=wrong)), AMX, 1)


def test_it_is_run_once_for_a_machine(monkeypatch: pytest.MonkeyPatch, kept: dict[str, Any]):
    found = measure.pays(TARGET, AMX, 1)  # timed here
    assert next(iter(kept.values()))["gain"] > 0
    monkeypatch.setattr(measure, "_gain", lambda *_: pytest.fail("it is known"))
    assert measure.pays(TARGET, AMX, 1) is found
    measure._known.clear()
    assert measure.pays(TARGET, AMX, 1) is found
    measure._known.clear()
    kept[next(iter(kept))] = {"gain": "much"}
    monkeypatch.setattr(measure, "_gain", lambda *_: 0.5)
    assert not measure.pays(TARGET, AMX, 1)


def test_a_profile_that_promises_nothing_is_not_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure, "_gain", lambda *_: pytest.fail("nothing is to be run"))
    assert measure.pays(TARGET, VNNI, 1)


def request_for(pretend: Pretend, features: tuple[str, ...], **speed: Any) -> Any:
    from kenosis_ort.api import _previewed

    pretend(with_flags(*features))
    return _previewed("model.onnx", {"speed": Speed(**speed)})


@pytest.mark.parametrize("gain", [0.9, 1.5])
def test_the_nearest_profile_loses_a_kernel_that_is_no_faster(
    monkeypatch: pytest.MonkeyPatch, pretend: Pretend, gain: float
):
    monkeypatch.setattr(measure, "_gain", lambda *_: gain)
    asked = request_for(pretend, AMX.features)
    assert asked.host == AMX
    found = with_own_profile(asked)
    if gain > 1:
        assert found is asked
        assert "second kernel" not in host_label(found)
    else:
        assert found.host == replace(AMX, shifted={})
        assert found.target.costs.shifted == {}
        assert "nearest to this machine, but for its second kernel of Conv" in host_label(found)


def test_a_machine_that_the_caller_names_is_believed(monkeypatch: pytest.MonkeyPatch, pretend: Pretend):
    monkeypatch.setattr(measure, "_gain", lambda *_: 0.5)
    asked = request_for(pretend, VNNI.features, host="amx")
    assert with_own_profile(asked) is asked
