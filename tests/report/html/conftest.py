"""The mark of tests that open a browser."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Registers the mark."""
    config.addinivalue_line("markers", "browser: opens a headless Chromium; skipped where there is none")
