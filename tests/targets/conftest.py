"""Marks shared by the rule proofs."""

from __future__ import annotations

import platform

import pytest

X86 = platform.machine().lower() in {"x86_64", "amd64"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the proofs of x86-64 rules elsewhere: Arm's kernels take int8 activations."""
    for item in items:
        if item.get_closest_marker("x86_only") and not X86:
            item.add_marker(pytest.mark.skip(reason="a rule of the x86-64 kernels"))


def pytest_configure(config: pytest.Config) -> None:
    """Registers the mark."""
    config.addinivalue_line("markers", "x86_only: the rule holds on x86-64 only")
