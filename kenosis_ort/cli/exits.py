"""Exit codes of the ``kenosis-ort`` command."""

import textwrap
from typing import Final

SUCCESS: Final = 0
NOT_INTEGER: Final = 1
"""The model is fine, but the proof shows float kernels where integer ones were wanted."""
LEFT_OUT: Final = 1
"""The benchmark is done, but without a model that does not load or run."""
BELOW: Final = 1
"""The models were compared, and agree less than was demanded."""
PROBLEM: Final = 1
"""The machine was looked at, and something is wrong that has a fix."""
ERROR: Final = 2
"""Bad usage or a KenosisError; nothing was written."""
INTERRUPTED: Final = 130
TERMINATED: Final = 143

_ANY: Final = "done, but something that was wanted is not so; the command's own --help says what"
_ERROR: Final = (
    "error: bad usage, bad model, bad data, output not writable; the reason and the fix are one line on stderr (with "
    "--json also an object on stdout), and an existing output file is untouched"
)


def epilog(one: str = _ANY) -> str:
    """The table of exit codes for the end of a ``--help``.

    Args:
        one: What exit code 1 says; empty for a command that does not use it.
    """
    codes = [("0", "done"), ("1", one), ("2", _ERROR), ("130", "interrupted"), ("143", "terminated")]
    lines = [textwrap.fill(f"  {code:<4} {text}", 79, subsequent_indent=" " * 7) for code, text in codes if text]
    return "\n".join(["exit codes:", *lines])
