"""Runs a function in a process that is killed, by SIGKILL, in front of its n-th step on the file system."""

import os
import signal
import sys
import warnings

_STEPS = {"open", "os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree"}


def killed_at_every_step(function, *, most=200):
    """Yields the number of the step in front of which a fresh process was killed, until one comes to its end.

    Raises:
        AssertionError: The function fails by itself, or takes more steps than allowed.
    """
    for step in range(most):
        status = _in_child(function, step)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, "the function raised"
            return
        assert os.WTERMSIG(status) == signal.SIGKILL
        yield step
    raise AssertionError(f"more than {most} steps")


def _in_child(function, step):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads beside a fork: the child starts none and uses none
        child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    code = 1
    try:
        left = step

        def count(event, _):
            nonlocal left
            if event in _STEPS:
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        function()
        code = 0
    finally:
        os._exit(code)
