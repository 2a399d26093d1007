"""Measuring a host profile: the fit, what a measurement holds, and when tuning takes one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kenosis_ort import HostProfile, OptionError, measure_host
from kenosis_ort.cli.main import main
from kenosis_ort.runtime.limits import machine
from kenosis_ort.targets import get_target
from kenosis_ort.targets.profile import KernelCost, Work
from kenosis_ort.tuning import measure
from kenosis_ort.tuning.measure import measure_profile

TARGET = get_target("ort-cpu")


@settings(max_examples=20)
@given(seed=st.integers(0, 2**16), values=st.tuples(*[st.floats(1, 50)] * 3))
def test_the_fit_finds_what_times_were_made_of(seed: int, values: tuple[float, float, float]):
    rng = np.random.default_rng(seed)
    made = KernelCost(fixed=1e3 * values[0], product=values[1], weight=10 * values[2])
    sizes = 10 ** rng.uniform(3, 7, (24, 2))
    works = [Work("x", products=int(a), weights=int(b)) for a, b in sizes]
    found = measure.fit(works, [made.microseconds(work) for work in works])
    for work in works:
        assert found.microseconds(work) == pytest.approx(made.microseconds(work), rel=0.05)
    assert min(found.fixed, found.product, found.weight, found.read) >= 0


def test_a_few_probes_make_a_whole_profile(monkeypatch: pytest.MonkeyPatch):
    assert TARGET.hooks.probes is not None
    probes = [probe for probe in TARGET.hooks.probes() if probe.kernels]
    few = replace(TARGET, hooks=replace(TARGET.hooks, probes=lambda: iter(probes[:4])))
    told: list[tuple[int, int | None]] = []
    found = measure_profile(few, budget_s=0.2, name="mine", progress=lambda *at: told.append(at))
    assert told == [(i, 4) for i in range(1, 5)]
    assert (found.name, found.target, found.cpu, found.threads) == ("mine", "ort-cpu", machine().cpu, 1)
    assert found.kernels.keys() == TARGET.profiles[0].kernels.keys()
    assert HostProfile.from_dict(found.to_dict()) == found
    assert found.kernels["quantize"][0].microseconds(Work("quantize", elements=1000)) > 0
    assert found.kernels["quantize"][0] == found.kernels["quantize"][1]


def test_probes_ask_for_every_class_and_integer_kernels_run_in_integer():
    assert TARGET.hooks.probes is not None
    asked: dict[str, set[str]] = {"float": set(), "integer": set(), "shifted": set()}
    for probe in TARGET.hooks.probes():
        for work, form in probe.nodes.values():
            asked[form].add(work.shape_class)
        asked["float"] |= {work.shape_class for work in probe.kernels.values()}
    reference = TARGET.profiles[0]
    assert reference.kernels.keys() - asked["float"] <= {"recurrent"}
    known = {name for name, (in_float, integer) in reference.kernels.items() if integer not in (None, in_float)}
    assert known - asked["integer"] <= {"nothing"}
    assert asked["shifted"] == reference.shifted.keys()
    from kenosis_ort.bench.op_times import profile_ops
    from kenosis_ort.targets.ort_cpu.probes import _convs

    for form in ("integer", "shifted"):
        small = _convs(form, [(8, 8, 7, 1, 1, 1), (16, 16, 7, 3, 1, 1), (16, 16, 7, 3, 1, 16), (3, 16, 8, 3, 2, 1)])
        kernels = {op.node: op.kernel for op in profile_ops(small.model, [small.feed], runs=1, warmup=0)}
        assert {kernels[node] for node in small.nodes} == {"QLinearConv"}


def test_what_was_measured_is_kept_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    made: dict[str, Any] = {}

    def quick(target: Any, **options: Any) -> HostProfile:
        made.update(options)
        return replace(TARGET.profiles[1], name=options["name"] or "here")

    monkeypatch.setattr("kenosis_ort.tuning.measure.measure_profile", quick)
    monkeypatch.setattr("kenosis_ort.targets.profile.keep_profile", lambda profile: made.update(kept=profile))
    out = tmp_path / "host.json"
    assert main(["profile", "--seconds", "2", "--threads", "2", "--out", str(out), "--name", "server"]) == 0
    assert made["kept"] == HostProfile.load(out)
    assert (made["budget_s"], made["threads"], made["name"]) == (2.0, 2, "server")
    assert "'server'" in capsys.readouterr().out
    made.clear()
    assert measure_host(keep=False).name == "here"
    assert "kept" not in made


@pytest.mark.parametrize(
    "options", [{"target": "tensorrt"}, {"threads": -1}, {"budget_s": 0}, {"name": 3}, {"keep": "x"}]
)
def test_what_cannot_be_measured_is_an_error(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure, "_timed", lambda *_: pytest.fail("nothing is to be timed"))
    if options.keys() == {"keep"}:
        monkeypatch.setattr("kenosis_ort.tuning.measure.measure_profile", lambda *_, **__: TARGET.profiles[0])
    with pytest.raises(OptionError):
        measure_host(**options)
