"""A process that is asked questions: a line of JSON in, a line of JSON out, until its input ends.

So are runtimes asked that end their process over some models, keep what they were first opened for, or tell in their
log alone what they refuse. One that is asked again and again is `kept`.
"""

import atexit
import contextlib
import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kenosis_ort.errors import RuntimeEndedError
from kenosis_ort.runtime.session import Closing

_MESSAGE_LIMIT: Final = 600


class Child(Closing):
    """One process, which ends with this one.

    Args:
        command: What it is started by.
        name: What messages call it.

    Attributes:
        log: What it printed to standard error, once it is closed.
    """

    def __init__(self, command: Sequence[str], name: str) -> None:
        self._name, self._owner, self._lock = name, os.getpid(), threading.Lock()
        self.log = ""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
        )
        atexit.register(self.close)

    @property
    def runs(self) -> bool:
        """Whether it is alive; a fork of its owner has pipes that are not its own."""
        return self._owner == os.getpid() and self._process.poll() is None

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Answer to a question.

        Raises:
            RuntimeEndedError: It ended, with its exit code and what it printed last.
        """
        with self._lock:
            to, back = self._process.stdin, self._process.stdout
            assert to is not None
            assert back is not None
            try:
                to.write(json.dumps(question).encode() + b"\n")
                to.flush()
                line = back.readline()
            except (OSError, ValueError):  # a broken pipe, or one that is closed
                line = b""
            except BaseException:  # an answer that nobody waits for is not the next question's
                self._process.kill()
                raise
            if not line:
                code = self._process.wait()
                self.close()
                log = " ".join(self.log.split())[-_MESSAGE_LIMIT:] or "it printed nothing"
                raise RuntimeEndedError(
                    f"{self._name} ended its process, with code {code}: {log}",
                    fix=f"load the model in {self._name} alone",
                )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Ends it."""
        atexit.unregister(self.close)
        if self._owner != os.getpid() or self._errors.closed:
            return
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):  # what it did not read any more
                pipe.close()  # type: ignore[union-attr]
        with self._errors:
            self._errors.seek(0)
            self.log = self._errors.read().decode("utf-8", "replace")


_lock = threading.Lock()
_children: Final[dict[tuple[str, ...], Child]] = {}


def child_for(command: Sequence[str], name: str) -> Child:
    """The process of a command, kept for the next question and started where it does not run.

    Args:
        command: What it is started by.
        name: What messages call it.
    """
    with _lock:
        known = _children.get(tuple(command))
        if known is None or not known.runs:
            known = _children[tuple(command)] = Child(command, name)
        return known
