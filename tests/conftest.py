"""Marks for what the installed runtime decides."""

import gc
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import onnxruntime as ort
import pytest
from hypothesis import Phase, settings

from kenosis_ort.runtime.machine import machine, on, runtime_limits
from kenosis_ort.targets.ort_cpu.rules import products_saturate
from tests.one_core import open_session
from tests.pace import Pace
from tests.processor import USUAL, X86, Pretend

# A loaded machine is no fault of the code; CI tries the same examples each time, so that what it says can be repeated.
settings.register_profile("suite", deadline=None, max_examples=25, derandomize=bool(os.environ.get("CI")))
settings.register_profile("nightly", deadline=None, max_examples=200)
settings.register_profile("mutations", deadline=None, max_examples=25, derandomize=True, phases=[Phase.generate])
settings.load_profile("suite")  # --hypothesis-profile=nightly is read after it


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what holds on x86-64 only elsewhere, and what is younger or older than the installed runtime."""
    installed = _version(ort.__version__)
    for item in items:
        if item.get_closest_marker("x86_only") and not X86:
            item.add_marker(pytest.mark.skip(reason="a rule of the x86-64 kernels"))
        for name, is_other in (("since", installed.__lt__), ("until", installed.__ge__)):
            mark = item.get_closest_marker(name)
            if mark is not None and is_other(_version(mark.args[0])):
                item.add_marker(pytest.mark.skip(reason=f"a rule of onnxruntime {name} {mark.args[0]}"))


def pytest_collection_finish() -> None:
    """What collection made stays to the end: the garbage collector need not look through it again and again."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marks."""
    config.addinivalue_line("markers", "browser: opens a headless Chromium; skipped where there is none")
    config.addinivalue_line("markers", "x86_only: the rule holds on x86-64 only")
    config.addinivalue_line("markers", "real_clock: races are timed by the machine's clock; elsewhere see tests.pace")
    config.addinivalue_line("markers", "since(version): the rule holds from this version of the runtime on")
    config.addinivalue_line("markers", "until(version): the rule held before this version of the runtime")


@pytest.fixture(autouse=True, scope="session")
def _one_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Files are laid out for the same machine wherever the tests run, and nothing that was measured on it counts."""
    with pytest.MonkeyPatch.context() as patch, on(USUAL):  # before fixtures of whole modules make their files
        patch.setattr(ort.InferenceSession, "__init__", open_session)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        runtime_limits(), products_saturate()  # found once, so that no test counts their sessions
        yield


@pytest.fixture(autouse=True)
def pace(request: pytest.FixtureRequest) -> Iterator[Pace]:
    """The speed promise as it is, sessions and runs too; how long a run took does not depend on the machine."""
    pace = Pace()
    timed = USUAL if request.node.get_closest_marker("real_clock") else replace(USUAL, timed=pace.timed)
    with on(timed):
        yield pace


@pytest.fixture
def pretend() -> Iterator[Pretend]:
    """Function that makes calls take a machine for the one at hand, but for its clock, until the test ends."""
    with ExitStack() as stack:
        yield lambda given: stack.enter_context(on(replace(given, timed=machine().timed))) and None
