"""Host profiles: files that come from anywhere, which of them is taken, and what a file is laid out for."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from kenosis_ort import HostProfile, OptionError, Speed, preview, quantize_static
from kenosis_ort.flow.target_options import profile_for
from kenosis_ort.targets import get_target
from kenosis_ort.targets.profile import KernelCost, Work, cached_profile, keep_profile, nearest
from tests import models
from tests.processor import USUAL, with_flags

VNNI = USUAL.features

ORT = get_target("ort-cpu")
AMX = ("amx_bf16", "amx_int8", "avx2", "avx512_bf16", "avx512_vnni", "avx512f", "avx_vnni")
NUMBER = st.floats(0, 1e6)
COST = st.builds(KernelCost, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER)
WORD = st.text("abc-", min_size=1, max_size=8)
PROFILES = st.builds(
    HostProfile, **dict.fromkeys(("name", "target", "cpu", "runtime"), WORD),
    features=st.lists(WORD, max_size=3).map(lambda words: tuple(sorted(words))), threads=st.integers(0, 64), run=NUMBER,
    kernels=st.dictionaries(WORD, st.tuples(COST, st.none() | COST), max_size=3).map(
        lambda found: {**found, "other": (KernelCost(1.0), None)}),
    shifted=st.dictionaries(WORD, COST, max_size=2), error=st.floats(1, 9), warm=st.floats(0, 1),
    saturates=st.booleans(),
)  # fmt: skip


@given(profile=PROFILES)
def test_a_profile_survives_its_file(profile):
    assert HostProfile.parse(json.dumps(profile.to_dict())) == profile


def test_those_that_come_with_the_package_know_all_kernels(tmp_path):
    assert [profile.name for profile in ORT.profiles] == ["vnni", "amx", "avx2", "zen4"]
    for profile in ORT.profiles:
        assert profile.kernels.keys() == ORT.costs.profile.kernels.keys()
        profile.save(tmp_path / "p.json")
        assert HostProfile.load(tmp_path / "p.json") == profile
        assert profile_for(ORT, Speed(host=tmp_path / "p.json")) == profile


BROKEN = [
    *({"format": "another"}, {"schema": 9}, {"run": float("nan")}, {"run": -1}, {"run": True}),
    *({"error": float("inf")}, {"error": 0.5}, {"shifted": [1]}, {"warm": None}, {"threads": 2.5}),
    *({"features": "avx2"}, {"name": "x" * 999}, {"saturates": 1}),
    *({"kernels": found} for found in ({}, {"other": 3}, {"other": {"integer": {"fixed": 1}}})),
    *({"kernels": {"other": {"float": cost}}} for cost in ({"fixed": 1, "speed": 2}, {"fixed": "1"})),
]


@pytest.mark.parametrize("change", BROKEN, ids=lambda change: str(change)[:40])
def test_what_is_wrong_with_a_profile_is_said(tmp_path, change):
    path = tmp_path / "host.json"
    path.write_text(json.dumps({**ORT.profiles[0].to_dict(), **change}))
    with pytest.raises(OptionError, match="host profile cannot be used") as caught:
        HostProfile.load(path)
    assert (str(path) in str(caught.value), "Fix: " in str(caught.value)) == (True, True)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[" * 9999, b"[]", b" " * (1 << 17), None])
def test_other_files_are_no_profiles(tmp_path, content):
    """And a folder is none."""
    path = tmp_path if content is None else tmp_path / "host.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(OptionError, match="host profile" if content is not None else "cannot be read"):
        HostProfile.load(path)


HOSTS = {"anx": "Did you mean 'amx'", "nowhere.json": "neither a profile", "z80": "host=.z80. is neither", "": "a path"}


@pytest.mark.parametrize(("host", "message"), HOSTS.items())
def test_an_unknown_host_is_an_error(tmp_path, host, message):
    with pytest.raises(OptionError, match=message):
        quantize_static(models.ALL["mlp"](), tmp_path / "o.onnx", [], host=host)


def test_a_profile_of_another_target_or_without_some_kernels_is_refused():
    raw = ORT.profiles[0].to_dict()
    for change, message in (
        ({"target": "web"}, "is of target 'web'"),
        ({"kernels": {"other": raw["kernels"]["other"]}}, "lacks kernels: add"),
    ):
        with pytest.raises(OptionError, match=message):
            profile_for(ORT, Speed(host=HostProfile.from_dict({**raw, **change})))
    with pytest.raises(OptionError, match="no costs"):
        profile_for(get_target("tensorrt"), Speed(host="amx"))
    assert profile_for(get_target("tensorrt"), Speed()) is None


@pytest.mark.parametrize(("features", "saturates", "name"), [
    (AMX, False, "amx"), (("avx2", "avx_vnni"), False, "vnni"), (("asimddp", "i8mm"), False, "vnni"),
    (("avx2", "avx512f"), True, "avx2"), (("avx2",), True, "avx2"),
    (("avx2", "avx512_bf16", "avx512_vnni", "avx512f"), False, "zen4"),  # which lacks VNNI of 256 bits
    (VNNI, True, "vnni"),  # flags say more than a measurement, which an emulator may run
    ((), True, "avx2"), ((), False, "vnni"),  # SSE alone, or a system that lists no flags
])  # fmt: skip
def test_the_nearest_profile_is_taken(features, saturates, name):
    assert nearest(ORT.profiles, features, saturates=saturates).name == name


@pytest.mark.x86_only
@pytest.mark.parametrize(("features", "saturates", "shown"), [
    (("avx2",), True, "'avx2'"), (("avx2", "avx512f"), True, ""), ((), True, ""),
    (("avx2", "avx_vnni"), False, "'vnni'"),
])  # fmt: skip
def test_times_are_of_the_class_of_this_processor_or_absent(pretend, tmp_path, features, saturates, shown):
    pretend(with_flags(*features, saturates=saturates))
    model = models.ALL["residual_block"]()
    report = quantize_static(model, tmp_path / "o.onnx", models.feeds(model, 2), promise=False)
    assert any(layer.estimated_us is not None for layer in report.layers) == bool(shown)
    assert report.host.startswith(shown or "this machine, whose class was not measured")
    assert "'vnni'" not in report.host or shown == "'vnni'"
    asked = quantize_static(model, tmp_path / "o.onnx", models.feeds(model, 2), promise=False, host="vnni")
    assert (asked.host[:6], "as asked for" in asked.host) == ("'vnni'", True)
    assert any(layer.estimated_us is not None for layer in asked.layers)


def test_a_profile_of_another_architecture_or_without_features_is_refused(pretend):
    own = ORT.profiles[0]
    arm, unknown = (replace(own, name="mine", features=features) for features in (("asimddp",), ()))
    for profile, features, message in (
        (arm, VNNI, "host profile 'mine' is of an Arm processor"),
        (own, ("asimddp", "i8mm"), "host profile 'vnni' is of an x86-64 processor"),
        (unknown, VNNI, "host profile 'mine' has an empty list of features"),
    ):
        pretend(with_flags(*features, saturates=False))
        with pytest.raises(OptionError, match=message) as error:
            profile_for(ORT, Speed(host=profile))
        assert (error.value.where, bool(error.value.fix), "\n" in str(error.value)) == ("host", True, False)
    pretend(with_flags(saturates=False))
    assert profile_for(ORT, Speed(host=unknown)) is unknown  # as measured where the system lists no flags


def test_what_was_measured_here_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    profile = replace(ORT.profiles[1], name="mine", threads=2)
    assert cached_profile("ort-cpu", profile.runtime, 2) is None
    keep_profile(profile)
    kept = [cached_profile("ort-cpu", *key) for key in ((profile.runtime, 2), (profile.runtime, 1), ("another", 2))]
    assert kept == [profile, None, None]
    for file in (tmp_path / "kenosis-ort").iterdir():
        file.write_text(file.read_text().replace('"schema": 1', '"schema": 0'))
    assert cached_profile("ort-cpu", profile.runtime, 2) is None


def test_the_second_kernel_has_a_cost_where_there_is_one():
    work = Work("conv-dense", 10**8, 10**8, 10**5, 10**3, 10**5, 10**5)
    amx, vnni = (profile.table(ORT.costs) for profile in (ORT.profiles[1], ORT.profiles[0]))
    assert [profile.shifted_us(work) < profile.integer_us(work) for profile in (amx, vnni)] == [True, False]
    assert vnni.shifted_us(Work("add", elements=9)) is None
    for profile in ORT.profiles:
        assert all(cost.fixed >= profile.kernels[name][1].fixed for name, cost in profile.shifted.items())


@pytest.mark.parametrize("name", ["residual_block", "bn_net", "concat_net"])
def test_without_matrix_tiles_no_conv_is_laid_out_for_them(tmp_path, name):
    assert {decision.zero_point for decision in preview(models.ALL[name](), host="vnni").decisions} == {0}
