"""The command line, from its parsers."""
# ruff: noqa: SLF001  (argparse has no public way to its parts)

from __future__ import annotations

import argparse
import re
from itertools import groupby

from kenosis_ort.cli.main import COMMANDS, build_parser
from kenosis_ort.cli.parser import epilog

from .markdown import code, fence, table


def command_list() -> str:
    """Returns a section a command: what it does, examples, arguments, exit codes."""
    parsers = _parsers()
    return "\n\n".join(_command(name, parsers[name]) for name in COMMANDS)


def exit_codes() -> str:
    """Returns the exit codes that all commands share."""
    rows = re.findall(r"^  (\d+) +((?:.*\n?)(?:^ {7}.*\n?)*)", epilog(), re.MULTILINE)
    return table(["Code", "Meaning"], [[number, text] for number, text in rows])


def _parsers() -> dict[str, argparse.ArgumentParser]:
    actions = build_parser()._actions
    return dict(next(a for a in actions if isinstance(a, argparse._SubParsersAction)).choices)


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    command = COMMANDS[name]
    parts = [f"## {code(name)}", *_described(parser.description or ""), fence(parser.format_usage().strip())]
    for group in parser._action_groups:
        actions = [a for a in group._group_actions if a.help != argparse.SUPPRESS and not _is_common(a)]
        if actions:
            title = (group.title or "").capitalize()
            parts.append(f"**{title}**\n\n{table(['Argument', 'Meaning'], [_row(parser, a) for a in actions])}")
    parts.append(f"Exit code 1: {command.one}." if command.one else "Exit code 1 is not used.")
    return "\n\n".join(parts)


def _described(description: str) -> list[str]:
    """Returns prose and examples in their order; examples are indented, and continued lines more so."""
    parts: list[str] = []
    for is_example, group in groupby(description.splitlines(), key=lambda line: not line or line.startswith("  ")):
        lines = list(group)
        if not is_example:
            parts.append(" ".join(lines))
            continue
        examples = "\n".join(line[2:] for line in lines).strip().split("\n\n")
        for is_command, texts in groupby(examples, key=lambda text: text.startswith("kenosis-ort")):
            text = "\n\n".join(texts)
            parts += [fence(text, "sh" if is_command else "toml")] if text else []
    return parts


def _is_common(action: argparse.Action) -> bool:
    return isinstance(action, argparse._HelpAction) or action.dest in ("json", "quiet", "verbose")


def _row(parser: argparse.ArgumentParser, action: argparse.Action) -> list[str]:
    value = "" if action.nargs == 0 else parser._get_formatter()._format_args(action, _metavar(action))
    spelled = f"{', '.join(action.option_strings)} {value}".strip()
    return [code(spelled), _help(action)]


def _metavar(action: argparse.Action) -> str:
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return action.dest.upper() if action.option_strings else action.dest


def _help(action: argparse.Action) -> str:
    return (action.help or "").replace("%%", "%").replace("<", "&lt;")
