"""Marks for what the installed runtime decides."""

from __future__ import annotations

import gc
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import onnxruntime as ort
import pytest
from hypothesis import Phase, settings

from kenosis_ort.tuning.measure import measure_profile
from tests.one_core import open_session
from tests.pace import Pace

# A loaded machine is no fault of the code; CI tries the same examples each time, so that what it says can be repeated.
settings.register_profile("suite", deadline=None, max_examples=25, derandomize=bool(os.environ.get("CI")))
settings.register_profile("nightly", deadline=None, max_examples=200)
settings.register_profile("mutations", deadline=None, max_examples=25, derandomize=True, phases=[Phase.generate])
settings.load_profile("suite")  # --hypothesis-profile=nightly is read after it

X86 = platform.machine().lower() in {"x86_64", "amd64"}


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what holds on x86-64 only elsewhere, and what is younger than the installed runtime."""
    for item in items:
        if item.get_closest_marker("x86_only") and not X86:
            item.add_marker(pytest.mark.skip(reason="a rule of the x86-64 kernels"))
        since = item.get_closest_marker("since")
        if since is not None and _version(ort.__version__) < _version(since.args[0]):
            item.add_marker(pytest.mark.skip(reason=f"a rule of onnxruntime {since.args[0]} and later"))
        until = item.get_closest_marker("until")
        if until is not None and _version(ort.__version__) >= _version(until.args[0]):
            item.add_marker(pytest.mark.skip(reason=f"a rule of onnxruntime before {until.args[0]}"))


def pytest_collection_finish() -> None:
    """What collection made stays to the end: the garbage collector need not look through it again and again."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marks."""
    config.addinivalue_line("markers", "x86_only: the rule holds on x86-64 only")
    config.addinivalue_line("markers", "real_clock: races are timed by the machine's clock; elsewhere see tests.pace")
    config.addinivalue_line("markers", "since(version): the rule holds from this version of the runtime on")
    config.addinivalue_line("markers", "until(version): the rule held before this version of the runtime")


@cache
def _last_probes(make: Callable[[], Iterable[Any]]) -> list[Any]:
    return list(make())[-2:]


VNNI = ("avx2", "avx512_bf16", "avx512_vnni", "avx512f", "avx_vnni")


@pytest.fixture(autouse=True, scope="session")
def _one_machine() -> Iterator[None]:
    """Files are laid out for the same machine wherever the tests run, and nothing that was measured on it counts."""

    def measured(target: Any, **options: Any) -> Any:
        """Measures by a few of the probes."""
        every = target.hooks.probes
        probes = None if every is None else lambda: iter(_last_probes(every))
        return measure_profile(replace(target, hooks=replace(target.hooks, probes=probes)), **options)

    with pytest.MonkeyPatch.context() as patch:  # before fixtures of whole modules make their files
        for module in ("target_options", "request"):
            patch.setattr(f"kenosis_ort.flow.{module}.processor", lambda: ("a processor of the tests", VNNI))
        patch.setattr(ort.InferenceSession, "__init__", open_session)
        patch.setattr("kenosis_ort.flow.target_options.cached_profile", lambda *_: None)
        patch.setattr("kenosis_ort.flow.target_options.with_own_profile", lambda request: request)
        patch.setattr("kenosis_ort.tuning.measure.measure_profile", measured)
        patch.setattr("kenosis_ort.targets.profile.keep_profile", lambda _: None)
        yield


@pytest.fixture(autouse=True)
def pace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Pace:
    """The speed promise as it is, sessions and runs too; how long a run took does not depend on the machine."""
    pace = Pace()
    if request.node.get_closest_marker("real_clock") is None:
        pace.install(monkeypatch)
    return pace
