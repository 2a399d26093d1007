"""Names of a package that are imported from their modules when they are first used."""

import importlib
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

_IMPORT: Final = re.compile(r"^from ([\w.]+) import (\w+) as \2$", re.MULTILINE)


def homes_in_stub(file: str) -> dict[str, str]:
    """The modules that define a package's names, as the stub beside its file imports them for type checkers.

    Args:
        file: The package's ``__file__``.
    """
    stub = Path(file).with_suffix(".pyi").read_text(encoding="utf-8")
    return {name: module for module, name in _IMPORT.findall(stub)}


def deferred(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's ``__getattr__``.

    Args:
        package: Its ``__name__``.
        homes: By name the module that defines it.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return find
