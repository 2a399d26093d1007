"""Measuring a host profile: the fit, what a measurement holds, and whether a second kernel is faster here too."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from kenosis_ort import HostProfile, OptionError, Speed, measure_host
from kenosis_ort.api import _previewed
from kenosis_ort.bench.kernel_times import profile_ops
from kenosis_ort.cli.main import main
from kenosis_ort.flow.target_options import with_own_profile
from kenosis_ort.runtime.machine import machine
from kenosis_ort.targets import get_target
from kenosis_ort.targets.ort_cpu.probes import _convs
from kenosis_ort.targets.profile import KernelCost, Work
from kenosis_ort.tuning import measure
from tests.flow.support import changed
from tests.processor import with_flags

TARGET = get_target("ort-cpu")


@settings(max_examples=20)
@given(seed=st.integers(0, 2**16), values=st.tuples(*[st.floats(1, 50)] * 3))
def test_the_fit_finds_what_times_were_made_of(seed, values):
    rng = np.random.default_rng(seed)
    made = KernelCost(fixed=1e3 * values[0], product=values[1], weight=10 * values[2])
    works = [Work("x", products=int(a), weights=int(b)) for a, b in 10 ** rng.uniform(3, 7, (24, 2))]
    found = measure.fit(works, [made.microseconds(work) for work in works])
    for work in works:
        assert found.microseconds(work) == pytest.approx(made.microseconds(work), rel=0.05)
    assert min(found.fixed, found.product, found.weight, found.read) >= 0


def test_a_few_probes_make_a_whole_profile(monkeypatch):
    probes, told = [probe for probe in TARGET.hooks.probes() if probe.kernels], []
    few = replace(TARGET, hooks=replace(TARGET.hooks, probes=lambda: iter(probes[:4])))
    found = measure.measure_profile(few, budget_s=0.2, name="mine", progress=lambda *at: told.append(at))
    assert told == [(i, 4) for i in range(1, 5)]
    assert (found.name, found.target, found.cpu, found.threads) == ("mine", "ort-cpu", machine().cpu, 1)
    assert found.kernels.keys() == TARGET.profiles[0].kernels.keys()
    assert HostProfile.from_dict(found.to_dict()) == found
    in_float, integer = found.kernels["quantize"]
    assert (in_float, in_float.microseconds(Work("quantize", elements=1000)) > 0) == (integer, True)


def test_probes_ask_for_every_class_and_integer_kernels_run_in_integer():
    asked = {"float": set(), "integer": set(), "shifted": set()}
    for probe in TARGET.hooks.probes():
        for work, form in probe.nodes.values():
            asked[form].add(work.shape_class)
        asked["float"] |= {work.shape_class for work in probe.kernels.values()}
    reference = TARGET.profiles[0]
    assert reference.kernels.keys() - asked["float"] <= {"recurrent"}
    known = {name for name, (in_float, integer) in reference.kernels.items() if integer not in (None, in_float)}
    assert known - asked["integer"] <= {"nothing"}
    assert asked["shifted"] == reference.shifted.keys()
    for form in ("integer", "shifted"):
        small = _convs(form, [(8, 8, 7, 1, 1, 1), (16, 16, 7, 3, 1, 1), (16, 16, 7, 3, 1, 16), (3, 16, 8, 3, 2, 1)])
        kernels = {op.node: op.kernel for op in profile_ops(small.model, [small.feed], runs=1, warmup=0)}
        assert {kernels[node] for node in small.nodes} == {"QLinearConv"}


def test_what_was_measured_is_kept_and_written(tmp_path, monkeypatch, capsys):
    made = {}

    def quick(target, **options):
        made.update(options)
        return replace(TARGET.profiles[1], name=options["name"] or "here")

    monkeypatch.setattr(measure, "measure_profile", quick)
    monkeypatch.setattr("kenosis_ort.targets.profile.keep_profile", lambda profile: made.update(kept=profile))
    out = tmp_path / "host.json"
    with pytest.raises(OptionError, match="keep"):
        measure_host(keep="x")
    assert not made  # before anything is measured
    assert (measure_host(keep=False).name, "kept" in made) == ("here", False)
    assert main(["profile", "--seconds", "2", "--threads", "2", "--out", str(out), "--name", "server"]) == 0
    assert made["kept"] == HostProfile.load(out)
    assert (made["budget_s"], made["threads"], made["name"]) == (2.0, 2, "server")
    assert "'server'" in capsys.readouterr().out


@pytest.mark.parametrize("options", [{"target": "tensorrt"}, {"threads": -1}, {"budget_s": 0}, {"name": 3}])
def test_what_cannot_be_measured_is_an_error(options, monkeypatch):
    monkeypatch.setattr(measure, "_timed", lambda *_: pytest.fail("nothing is to be timed"))
    with pytest.raises(OptionError):
        measure_host(**options)


# ---- the nearest profile is believed about the second kernel of Conv only where it is faster here too, and exact --

SHAPES = [(512, 256, 7, 1, 1, 1), (16, 16, 7, 1, 1, 1)]
AMX, VNNI = (next(p for p in TARGET.profiles if p.name == name) for name in ("amx", "vnni"))


def probes():
    return (_convs(form, SHAPES) for form in ("float", "integer", "shifted"))


PROBED = replace(TARGET, hooks=replace(TARGET.hooks, probes=probes))


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """What is kept between processes."""
    facts = {}
    monkeypatch.setattr(measure, "_known", {})
    monkeypatch.setattr(measure, "recall", facts.get)
    monkeypatch.setattr(measure, "keep", facts.__setitem__)
    return facts


def times_of(deep, small):
    """Returns times with which the second kernel gains as said at each of the two Convs."""

    def times(probe, _):
        gains = dict(zip(probe.nodes, (deep, small), strict=True))
        return {n: 100.0 / (gains[n] if form == "shifted" else 1) for n, (_, form) in probe.nodes.items()}

    return times


@pytest.mark.parametrize(("profile", "deep", "small", "expected"), [
    (AMX, 1.6, 0.5, True), (AMX, 0.8, 9.0, False), (AMX, 1.05, 9.0, False), (VNNI, 9.0, 9.0, True),
])  # fmt: skip
def test_only_nodes_that_should_gain_are_asked(monkeypatch, profile, deep, small, expected):
    """A profile that promises nothing is not asked."""
    monkeypatch.setattr(measure, "_times", times_of(deep, small) if profile is AMX else pytest.fail)
    assert measure.pays(PROBED, profile, 1) is expected


def test_a_kernel_that_computes_something_else_is_not_taken(monkeypatch):
    def wrong():
        for probe in probes():
            weight = next(i.name for i in probe.model.graph.initializer if len(i.dims) == 4)
            shifted = {form for _, form in probe.nodes.values()} == {"shifted"}
            yield replace(probe, model=changed(probe.model, **{weight: lambda array: array + 1})) if shifted else probe

    monkeypatch.setattr(measure, "_times", times_of(3, 3))
    assert measure.pays(PROBED, AMX, 1)
    measure._known.clear()
    monkeypatch.setattr(measure, "recall", lambda _: None)
    assert not measure.pays(replace(TARGET, hooks=replace(TARGET.hooks, probes=wrong)), AMX, 1)


def test_it_is_run_once_for_a_machine(monkeypatch, kept):
    found = measure.pays(PROBED, AMX, 1)  # timed here
    (key,) = kept
    assert kept[key]["gain"] > 0
    monkeypatch.setattr(measure, "_gain", lambda *_: pytest.fail("it is known"))
    for _ in range(2):
        assert measure.pays(PROBED, AMX, 1) is found
        measure._known.clear()
    kept[key] = {"gain": "much"}
    monkeypatch.setattr(measure, "_gain", lambda *_: 0.5)
    assert not measure.pays(PROBED, AMX, 1)


@pytest.mark.parametrize(("gain", "named"), [(0.9, {}), (1.5, {}), (0.5, {"host": "amx"})])
def test_the_nearest_profile_loses_a_kernel_that_is_no_faster(monkeypatch, pretend, gain, named):
    """A machine that the caller names is believed."""
    monkeypatch.setattr(measure, "_gain", lambda *_: gain)
    pretend(with_flags(*(VNNI if named else AMX).features))
    asked = _previewed("model.onnx", {"speed": Speed(**named)})
    assert asked.host == AMX
    found = with_own_profile(asked)
    if gain > 1 or named:
        assert (found is asked, "second kernel" in found.host_label) == (True, False)
    else:
        assert (found.host, found.target.costs.profile.shifted) == (replace(AMX, shifted={}), {})
        assert "nearest to this machine, but for its second kernel of Conv" in found.host_label
