"""Where independent work is done: in this process, or wherever the caller's executor does it.

Passes hand their work to an `Executor` and know nothing of machines. What comes back is in the order of what was
handed over, whoever ended first, so that it does not depend on how many there are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

import onnx

from kenosis_ort.graph.runner import Runner, Running

T = TypeVar("T")
R = TypeVar("R")


class Executor(ABC):
    """Does pieces of work that do not depend on each other."""

    @property
    @abstractmethod
    def ahead(self) -> int:
        """Models worth having under way before the outcome of the first is looked at."""

    @abstractmethod
    def open(
        self, model: Path | onnx.ModelProto, *, threads: int = 1, custom_op_libraries: Sequence[str] = ()
    ) -> Running:
        """Opens a model to be run on feeds.

        Args:
            model: The model, or its file; not changed, neither here nor by the caller as long as it is open.
            threads: Threads of a session in this process, 0 for the runtime's own choice.
            custom_op_libraries: Libraries with custom operators to register.

        Raises:
            VerificationError: The runtime does not load the model; elsewhere, when it is first run.
        """

    @abstractmethod
    def map(self, work: Callable[[T], R], pieces: Iterable[T]) -> Iterator[R]:
        """Yields what each piece leads to, in their order.

        Args:
            work: A function of a module of this package, of nothing but its argument.
            pieces: What it takes; to be pickled.

        Raises:
            Exception: Whatever the work raises.
        """


class Here(Executor):
    """This process: one piece after the other, each when its outcome is asked for."""

    @property
    def ahead(self) -> int:
        return 0

    def open(
        self, model: Path | onnx.ModelProto, *, threads: int = 1, custom_op_libraries: Sequence[str] = ()
    ) -> Running:
        return Runner(model, threads=threads, custom_op_libraries=custom_op_libraries)

    def map(self, work: Callable[[T], R], pieces: Iterable[T]) -> Iterator[R]:
        return map(work, pieces)


HERE: Final = Here()
