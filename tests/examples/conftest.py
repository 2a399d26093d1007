"""The example scripts as modules."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def load_example() -> Iterator[Callable[[str], ModuleType]]:
    """Loads ``examples/<name>.py`` under a name that no installed package can shadow; its siblings as it finds them."""
    loaded: list[str] = []
    sys.path.insert(0, str(ROOT / "examples"))  # as Python does for a script

    def load(name: str) -> ModuleType:
        key = f"kenosis_example_{name}"
        if key not in sys.modules:
            spec = importlib.util.spec_from_file_location(key, ROOT / "examples" / f"{name}.py")
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[key] = module
            loaded.append(key)
            spec.loader.exec_module(module)
        return sys.modules[key]

    yield load
    sys.path.remove(str(ROOT / "examples"))
    for key in loaded:
        del sys.modules[key]
