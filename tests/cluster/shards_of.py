"""Functions that make shards, in a module that workers import."""

import os
import signal
import time

import numpy as np

from kenosis_ort import CalibrationError
from tests import models

MODEL = models.residual_block()
SHARDS = 6
EACH = 3


def feeds(number):
    """Three samples that depend on the number; later shards have larger values."""
    return [{k: v * (1 + number) for k, v in f.items()} for f in models.feeds(MODEL, EACH, seed=number)]


ALL = [feed for number in range(SHARDS) for feed in feeds(number)]


def deadly(folder, which, number, *, always=False):
    """Makes shards; the worker that opens one of them dies on the spot.

    Args:
        folder: Where it is marked that it did.
        which: The shard that it dies of.
        number: The shard to make.
        always: Also the second time.
    """
    mark = folder / f"{number}.died"
    for at, feed in enumerate(feeds(number)):
        if number == which and at == 1 and (always or not mark.exists()):
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        yield feed


def slow(number):
    """Makes a shard that takes a while."""
    time.sleep(0.3)
    return feeds(number)


def some(number):
    """Makes shards; number 1 is empty."""
    return [] if number == 1 else feeds(number)


def bad(number):
    """Makes shards; number 2 has a NaN in its last sample, after others were counted."""
    made = feeds(number)
    if number == 2:
        made[-1] = {k: np.full_like(v, np.nan) for k, v in made[-1].items()}
    return made


def huge(number):
    """Makes shards by numbers that overflow."""
    return [{k: np.clip(v * np.float32(10) * np.float32(3e38), -1, 1) for k, v in f.items()} for f in feeds(number)]


def broken(number):
    """Makes shards; number 1 cannot be read."""
    if number == 1:
        raise OSError("the disk is gone")
    return feeds(number)


def squared_though_killed(piece):
    """Squares a number; the first two workers that are given 3 die on the spot."""
    folder, number = piece
    for mark in (folder / "first", folder / "second"):
        if number == 3 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return number, np.full(3000, number**2)


def always_killed(piece):
    """Dies of its piece, where that is 1."""
    if piece == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return piece


def refused(piece):
    """Refuses 2."""
    if piece == 2:
        raise CalibrationError("two is too many", where="piece", fix="take one")
    return piece


def broken_work(_):
    """Has a defect."""
    raise TypeError("a defect")


def wide(number):
    """Makes a shard of 16 MB."""
    return ({"x": np.full((1, 4, 1024, 1024), number + 20 * at, np.uint8)} for at in range(4))


def much(number):
    """Returns 16 MB."""
    return np.full(2**21, float(number))
