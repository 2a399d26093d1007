"""Every name that a benchmark or an example takes from the package, or from the tests, is there."""

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path for folder in ("benchmarks", "examples", "docs") for path in (ROOT / folder).glob("*.py"))


def taken(script: Path) -> list[tuple[str, str]]:
    """Modules of ours and the names that a script takes from each."""
    found = ast.walk(ast.parse(script.read_text(encoding="utf-8")))
    froms = [node for node in found if isinstance(node, ast.ImportFrom) and not node.level]
    ours = [node for node in froms if (node.module or "").split(".")[0] in ("kenosis_ort", "tests")]
    return [(str(node.module), alias.name) for node in ours for alias in node.names]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_what_it_takes_exists(script: Path) -> None:
    missing = [f"{module}.{name}" for module, name in taken(script) if not exists(module, name)]
    assert not missing


def exists(module: str, name: str) -> bool:
    """Whether a module has the name, or a module of its own under it."""
    found = importlib.import_module(module)
    is_package = hasattr(found, "__path__")
    return hasattr(found, name) or (is_package and importlib.util.find_spec(f"{module}.{name}") is not None)
