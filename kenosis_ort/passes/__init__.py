"""Passes for accuracy, and the one evaluator that decides which results are kept.

A pass of your own is a class like those in the files here, made known by `register`: see `docs/extending.md`.
"""

from typing import Final

from kenosis_ort.exports import deferred, homes_in_stub

_HOMES: Final = homes_in_stub(__file__)
__all__ = [*_HOMES]
__getattr__ = deferred(__name__, _HOMES)
