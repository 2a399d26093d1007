"""Parts of the documentation that are read off the code when the site is built.

A page holds ``<!-- generated: NAME -->`` on a line of its own; `fill` puts the part of that name in its place. So a
table of rules, commands or recipes cannot be older than the code. ``python -m docs.generate NAME`` prints one part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

from . import commands, costs, inputs, precisions, recipes, rewrites, rules, targets

SECTIONS: Final[Mapping[str, Callable[[], str]]] = {
    "rules": rules.rule_table,
    "facts": rules.fact_table,
    "targets": targets.target_table,
    "tensorrt": targets.tensorrt_table,
    "kernel-costs": costs.cost_table,
    "rewrites": rewrites.overview,
    "rewrite-details": rewrites.details,
    "recipes": recipes.recipe_table,
    "recipe-settings": recipes.setting_table,
    "precisions": precisions.precision_table,
    "commands": commands.command_list,
    "exit-codes": commands.exit_codes,
    "input-kinds": inputs.kind_list,
}

_MARKER = re.compile(r"^<!-- generated: (.+?) -->$", re.MULTILINE)


def fill(markdown: str) -> str:
    """Returns a page with its generated parts.

    Raises:
        KeyError: There is no part of a name.
    """
    return _MARKER.sub(lambda marker: SECTIONS[marker[1]](), markdown)


def names_in(markdown: str) -> list[str]:
    """Returns the names of the parts that a page asks for."""
    return _MARKER.findall(markdown)
