"""The example scripts as modules."""

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def load_example():
    """Loads ``examples/<name>.py``, which finds its siblings: the folder goes before installed packages."""
    sys.path.insert(0, str(ROOT / "examples"))  # as Python does for a script
    yield importlib.import_module
    sys.path.remove(str(ROOT / "examples"))
