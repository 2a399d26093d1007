"""argparse with short usage lines, errors that suggest what was meant, and the options that all commands share."""

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from kenosis_ort.errors import did_you_mean

_CHOICE = re.compile(
    r"(?:argument --(?P<option>\S+): )?invalid choice: '?(?P<word>.*?)'? \(choose from (?P<known>.*)\)$", re.DOTALL
)


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviations, since they break when an option is added, and says what was meant.

    Attributes:
        first: Options that ``--help`` shows where others are left to ``--help-all``; empty for all.
    """

    def __init__(self, **kwargs: Any) -> None:
        settings = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False, **kwargs}
        super().__init__(**settings)
        self.first: tuple[str, ...] = ()

    def show_first(self, *options: str) -> None:
        """Leaves all other options to ``--help-all``."""
        self.add_argument("--help-all", action=_HelpAll, nargs=0, help="show all options, of which these are the first")
        self.first = ("-h", "--help-all", *options)

    def format_help(self) -> str:
        """The help text with the first options."""
        left = [a for a in self._actions if self.first and a.option_strings and not {*a.option_strings} & {*self.first}]
        texts = [action.help for action in left]
        for action in left:
            action.help = argparse.SUPPRESS
        try:
            return super().format_help()
        finally:
            for action, text in zip(left, texts, strict=True):
                action.help = text

    def format_all(self) -> str:
        """The help text with all options."""
        return super().format_help()

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parses all arguments, or complains about the first one that is too much."""
        parsed, rest = self.parse_known_args(args, namespace)
        command: Parser = getattr(parsed, "parser", self)
        if len(rest) == 1:
            rest = command.take_late(parsed, rest[0])
        if rest:
            command.error(f"unknown argument '{rest[0]}'.{did_you_mean(rest[0].split('=')[0], command.words())}")
        return parsed

    def take_late(self, parsed: argparse.Namespace, word: str) -> list[str]:
        """Takes a model's file behind the options for the optional argument that argparse wants in front of them."""
        is_model = word.endswith(".onnx") and not word.startswith("-")
        left = [a for a in self._actions if not a.option_strings and a.nargs == "?"]
        for action in (a for a in left if is_model and getattr(parsed, a.dest, None) is None):
            setattr(parsed, action.dest, Path(word))
            return []
        return [word]

    def words(self) -> Iterable[str]:
        """The options this parser takes."""
        return [option for action in self._actions for option in action.option_strings]

    def error(self, message: str) -> NoReturn:
        """Ends the process with the usage, the message and what was probably meant."""
        wrong = _CHOICE.search(message)
        if wrong is not None:
            choices = [choice.strip(" '") for choice in wrong["known"].split(",")]
            message += f".{did_you_mean(wrong['word'], choices, option=wrong['option'] or '')}"
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: error: {message} Fix: see {self.prog} --help\n")


class _HelpAll(argparse.Action):
    """Shows all options and ends the process."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        if isinstance(parser, Parser):
            print(parser.format_all(), end="")
        parser.exit()


def add_output_arguments(parser: argparse.ArgumentParser, *, top: bool = False) -> None:
    """Adds what every command takes, before and after its name.

    Args:
        parser: Of the program or of a command.
        top: It is the program's: it sets the defaults, which a command must not set again.
    """
    group = parser.add_argument_group("output")

    def default(value: Any) -> Any:
        return value if top else argparse.SUPPRESS

    group.add_argument("--json", action="store_true", default=default(False), help="JSON on stdout, nothing else")
    group.add_argument("-q", "--quiet", action="store_true", default=default(False), help="print errors only")
    group.add_argument(
        "-v", "--verbose", action="count", default=default(0), help="log what is done to stderr; -vv: in detail"
    )
