"""Journal of a call: notes, warnings, times, outcomes of passes; and the one place where optional work is isolated."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, TypeVar

from kenosis_ort import errors
from kenosis_ort.runtime.counting import at_stage

_log = logging.getLogger(__name__)
T = TypeVar("T")

_MESSAGE_LIMIT: Final = 300
OF_THE_MODEL: Final = (errors.CalibrationError, errors.UnsupportedModelError)
"""What the model computes or is, and no defect of ours."""


@dataclass(frozen=True)
class PassOutcome:
    """One accuracy pass that was tried.

    Attributes:
        name: Of the pass, as the recipe calls it, e.g. ``equalize``.
        kept: Whether its result was kept; False for one that was undone or found nothing to do.
        error_before: Error on held-out calibration samples before it, in units of `measure`; None if not measured.
        error_after: The same after it.
        measure: What the error is, e.g. ``noise power over signal power of the outputs``.
        reason: Why it was kept, undone or skipped, one sentence.
        seconds: Wall time.
    """

    name: str
    kept: bool
    error_before: float | None = None
    error_after: float | None = None
    measure: str = ""
    reason: str = ""
    seconds: float = 0.0

    @property
    def change(self) -> float | None:
        """Relative change of the error, -0.2 for a fifth less; None if it was not measured."""
        if self.error_before is None or self.error_after is None or not self.error_before:
            return None
        return self.error_after / self.error_before - 1.0


@dataclass
class Journal:
    """Notes, warnings, times and outcomes of a call, and the one place where optional work is isolated.

    Attributes:
        isolates: An optional step that raises is left out, and told of; else its error is the caller's.
        seconds: Wall time by stage.
        passes: What became of each pass.
    """

    isolates: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    passes: list[PassOutcome] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times a named stage."""
        start = time.perf_counter()
        with at_stage(name):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def attempt(self, what: str, step: Callable[[], T], otherwise: T) -> T:
        """Result of an optional step; where it raises, the value before the step, with a warning.

        Args:
            what: The step, as the subject of a sentence.
            step: Leaves nothing changed where it raises.
            otherwise: What holds without the step.

        Raises:
            OptionError: The caller's own metric or options are at fault.
            ClusterError: The caller's cluster is.
        """
        try:
            return step()
        except (errors.OptionError, errors.ClusterError):
            raise
        except Exception as error:
            self.tell(what, error)
            return otherwise

    def tell(self, what: str, error: Exception) -> None:
        """Records a failure that the call survives; raises it where nothing is isolated."""
        if not self.isolates:
            raise error
        _log.debug("%s failed", what, exc_info=error)
        bug = "" if isinstance(error, OF_THE_MODEL) else "; please report this as a bug of kenosis-ort, with the model"
        fix = f"nothing, the file is made without it{bug}"
        if isinstance(error, errors.VerificationError) and error.fix:  # of the runtime, not of an attempt of ours
            fix = error.fix
        self.warnings.append(f"{what} failed and was left out: {reason_of(error)}. Fix: {fix}.")


def reason_of(error: Exception) -> str:
    """Message of an error, without a full stop; of one about the model or its data with the place."""
    text = error.what if isinstance(error, errors.KenosisError) else f"{type(error).__name__}: {error}"
    reason = " ".join(text.split())[:_MESSAGE_LIMIT].rstrip(".")
    return f"{reason} [at: {error.where}]" if isinstance(error, OF_THE_MODEL) and error.where else reason
