"""The mark of tests that open a browser."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Registers the mark."""
    config.addinivalue_line("markers", "browser: opens a headless Chromium; skipped where there is none")
