"""The rewrites, from their' docstrings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final

from kenosis_ort.rewrite import FLOAT_FORMS, INTEGER_FORMS, OPTIONAL_FORMS, PREPARATION
from kenosis_ort.targets import TARGETS

from .markdown import code, from_docstring, table

Rewrite = Callable[..., Any]

GROUPS: Final = (
    ("always, as part of preparation", PREPARATION),
    ("before calibration", tuple(r for r in FLOAT_FORMS if r not in OPTIONAL_FORMS)),
    ("only where it is named", OPTIONAL_FORMS),
    ("between integer kernels", INTEGER_FORMS),
    *((f"between integer kernels of {name}", target.own_forms) for name, target in TARGETS.items() if target.own_forms),
)


def overview() -> str:
    """Returns name, what it does, and when it is applied."""
    rows = []
    for when, rewrite in _all():
        link = f"[{code(rewrite.__name__)}](#{rewrite.__name__})"
        rows.append([link, _docstring(rewrite).splitlines()[0], when])
    return table(["Rewrite", "What it does", "Applied"], rows)


def details() -> str:
    """Returns the algebra, the reason and the refusals of each."""
    parts = []
    for when, rewrite in _all():
        name = rewrite.__name__
        parts.append(f"### {code(name)} {{ #{name} }}\n\n*Applied {when}.*\n\n{from_docstring(_docstring(rewrite))}")
    return "\n\n".join(parts)


def _all() -> Iterator[tuple[str, Rewrite]]:
    for when, rewrites in GROUPS:
        for rewrite in rewrites:
            yield when, rewrite


def _docstring(rewrite: Rewrite) -> str:
    text = inspect.getdoc(rewrite)
    if not text:
        raise ValueError(f"{rewrite.__name__} has no docstring")
    return text
