"""Names of a package that are imported from their modules when they are first used."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def deferred(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's ``__getattr__``.

    Args:
        package: Its ``__name__``.
        names: The names, apart by spaces, by the module that defines them.
    """
    homes = {name: module for module, defined in names.items() for name in defined.split()}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return find
