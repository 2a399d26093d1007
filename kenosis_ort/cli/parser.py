"""argparse with errors that suggest what was meant, exit codes, and values as the shell gives them."""

import argparse
import json
import math
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from kenosis_ort.checks import MOST_THREADS
from kenosis_ort.errors import OptionError, did_you_mean

SUCCESS: Final = 0
SHORT: Final = 1
"""Done, but something that was wanted is not so, e.g. a node runs in float, or outputs agree too little."""
ERROR: Final = 2
"""Bad usage or a KenosisError; nothing was written."""
INTERRUPTED: Final = 130
TERMINATED: Final = 143

_ANY: Final = "done, but something that was wanted is not so; the command's own --help says what"
_ERROR: Final = (
    "error: bad usage, bad model, bad data, output not writable; the reason and the fix are one line on stderr (with "
    "--json also an object on stdout), and an existing output file is untouched"
)
_CHOICE = re.compile(r"invalid choice: '?(?P<word>.*?)'? \(choose from (?P<known>.*)\)$", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviations, since they break when an option is added, and says what was meant.

    Args:
        first: Options that ``--help`` shows where others are left to ``--help-all``; empty for all.
        where: File whose words are parsed: what is wrong in it is an `OptionError`; empty for the shell's own words,
            where it ends the process.
        settings: As for ``argparse.ArgumentParser``.
    """

    def __init__(self, *, first: Sequence[str] = (), where: str = "", **settings: Any) -> None:
        defaults = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(**{**defaults, **settings})
        self.first = ("-h", "--help-all", *first) if first else ()
        self.where = where
        if first:
            about = "show all options, of which these are the first"
            self.add_argument("--help-all", action=_HelpAll, nargs=0, help=about)

    def format_help(self, *, whole: bool = False) -> str:
        """The help text with the first options, or all of them."""
        short = self.first and not whole
        left = [a for a in self._actions if short and a.option_strings and not {*a.option_strings} & {*self.first}]
        texts = [action.help for action in left]
        for action in left:
            action.help = argparse.SUPPRESS
        try:
            return super().format_help()
        finally:
            for action, text in zip(left, texts, strict=True):
                action.help = text

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parses all arguments, or complains about the first one that is too much."""
        for word in args or ():
            if "\0" in word:  # from a file, since no shell passes it on; no path and no process takes it
                self.error(f"'{word.partition('=')[0]}' is given a null character".replace("\0", "\\0"))
        parsed, rest = self.parse_known_args(args, namespace)
        command: Parser = getattr(parsed, "parser", self)
        if len(rest) == 1:
            rest = command.take_late(parsed, rest[0])
        if rest:
            words = [option for action in command._actions for option in action.option_strings]
            command.error(f"unknown argument '{rest[0]}'.{did_you_mean(rest[0].split('=')[0], words)}")
        return parsed

    def take_late(self, parsed: argparse.Namespace, word: str) -> list[str]:
        """Takes a model's file behind the options for the optional argument that argparse wants in front of them."""
        is_model = word.endswith(".onnx") and not word.startswith("-")
        left = [a for a in self._actions if not a.option_strings and a.nargs == "?"]
        for action in (a for a in left if is_model and getattr(parsed, a.dest, None) is None):
            setattr(parsed, action.dest, Path(word))
            return []
        return [word]

    def error(self, message: str) -> NoReturn:
        """Ends the process with the usage, the message and what was probably meant, or raises that."""
        wrong = _CHOICE.search(message)
        if wrong is not None:
            choices = [choice.strip(" '") for choice in wrong["known"].split(",")]
            message += f".{did_you_mean(wrong['word'], choices)}"
        if self.where:
            raise OptionError(message, where=self.where, fix=f"see {self.prog} --help")
        self.print_usage(sys.stderr)
        self.exit(ERROR, f"{self.prog}: error: {message} Fix: see {self.prog} --help\n")


class _HelpAll(argparse.Action):
    """Shows all options and ends the process."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        if isinstance(parser, Parser):
            print(parser.format_help(whole=True), end="")
        parser.exit()


def epilog(one: str = _ANY) -> str:
    """The table of exit codes for the end of a ``--help``.

    Args:
        one: What exit code 1 says; empty for a command that does not use it.
    """
    codes = ((SUCCESS, "done"), (SHORT, one), (ERROR, _ERROR), (INTERRUPTED, "interrupted"), (TERMINATED, "terminated"))
    lines = [textwrap.fill(f"  {code:<4} {text}", 79, subsequent_indent=" " * 7) for code, text in codes if text]
    return "\n".join(["exit codes:", *lines])


# -- values as the shell gives them


def _require(holds: object, text: str, what: str) -> None:
    if not holds:
        raise argparse.ArgumentTypeError(f"'{text}' is {what}")


def whole(text: str) -> int:
    """Whole number from 0 up."""
    _require(text.isdecimal(), text, "not a whole number from 0 up")
    return int(text)


def threads(text: str) -> int:
    """Number of threads, 0 for all."""
    count = whole(text)
    _require(count <= MOST_THREADS, text, f"more than {MOST_THREADS} threads")
    return count


def positive(text: str) -> int:
    """Whole number from 1 up."""
    _require(text.isdecimal() and int(text), text, "not a whole number above 0")
    return int(text)


def positives(text: str) -> list[int]:
    """Whole numbers from 1 up, with commas between them."""
    return [positive(part.strip()) for part in text.split(",")]


def number(text: str) -> float:
    """Finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    _require(math.isfinite(value), text, "not a number")
    return value


def seconds(text: str) -> float:
    """Time in seconds above 0."""
    value = number(text)
    _require(value > 0, text, "not a number of seconds above 0")
    return value


def share(text: str) -> float:
    """Share from 0 to 1, or one in percent like ``0.5%``."""
    value = number(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    _require(0 <= value <= 1, text, "not a share from 0 to 1, e.g. 0.005 or 0.5%")
    return value


def numbers(text: str) -> tuple[float, ...]:
    """Numbers with commas between them."""
    try:
        return tuple(number(part) for part in text.split(","))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of numbers like 0.485,0.456,0.406") from None


def sizes(text: str) -> tuple[int, ...]:
    """Sizes with an x between them, e.g. ``1x3x224x224``."""
    parts = text.lower().split("x")
    _require(all(part.isdecimal() and int(part) for part in parts), text, "not a list of sizes like 1x3x224x224")
    return tuple(int(part) for part in parts)


def image_size(text: str) -> tuple[int, int]:
    """Height and width, e.g. ``224x224``."""
    found = sizes(text)
    _require(len(found) == 2, text, "not HxW, e.g. 224x224")
    return found[0], found[1]


def named_word(text: str, example: str = "WORD") -> tuple[str, str]:
    """Name and text of ``NAME=WORD``; a tensor's name may hold an equals sign."""
    name, _, value = text.rpartition("=")
    _require(name and value, text, f"not NAME={example}")
    return name, value


def named_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Name and sizes of ``NAME=1x3x224x224``."""
    name, shape = named_word(text, "1x3x224x224")
    return name, sizes(shape)


def input_range(text: str) -> tuple[str | None, tuple[float, float]]:
    """Name and bounds of ``NAME=LOW,HIGH``; the name is None in ``LOW,HIGH``."""
    name, equals, bounds = text.rpartition("=")
    found = numbers(bounds)
    _require(len(found) == 2 and found[0] < found[-1], text, "not LOW,HIGH or NAME=LOW,HIGH, e.g. 0,255")
    return name if equals else None, (found[0], found[1])


def extra_option(text: str) -> tuple[str, Any]:
    """Key and value of ``KEY=VALUE``; the value as JSON where it is JSON, else as text."""
    key, equals, value = text.partition("=")
    _require(key and equals, text, "not KEY=VALUE")
    try:
        return key, json.loads(value.lower() if value in ("True", "False") else value)
    except json.JSONDecodeError:
        return key, value
