"""What the installed runtime can do on this machine: formats, providers, which data types are fast, and what to fix."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from kenosis_ort.bench.data_types import FLOAT16, FLOAT32, KernelSpeed, Progress, kernel_speeds
from kenosis_ort.runtime.limits import RuntimeLimits, runtime_limits
from kenosis_ort.targets import DEFAULT_TARGET, get_target
from kenosis_ort.targets.machine import has_dot_products, sums_of_products

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Advice:
    """Something to know or to fix: what, and the fix, empty where none is needed."""

    what: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.what} Fix: {self.fix}" if self.fix else self.what


@dataclass(frozen=True)
class Examination:
    """What was found.

    Attributes:
        architecture: Processor family.
        flags: Instruction sets that matter to matrix kernels.
        host: Data types that follow for this machine, and why.
        versions: Of the packages.
        build: What the runtime says about its build.
        providers: Its execution providers.
        max_ir: Highest IR version that it reads.
        max_opset: Highest operator set that it reads.
        threads: Threads of the sessions that were timed.
        speeds: By operator and data types; empty if nothing was timed.
        problems: What is wrong and has a fix.
        notes: What is worth knowing.
    """

    architecture: str
    flags: tuple[str, ...]
    host: str
    versions: Mapping[str, str]
    build: str
    providers: tuple[str, ...]
    max_ir: int
    max_opset: int
    threads: int = 1
    speeds: tuple[KernelSpeed, ...] = ()
    problems: tuple[Advice, ...] = ()
    notes: tuple[Advice, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON."""
        return asdict(self)


def examine(
    *, flags: Sequence[str] = (), threads: int = 1, budget_s: float = 3.0, progress: Progress | None = None
) -> Examination:
    """Looks at the machine and the packages.

    Args:
        flags: Instruction sets of the processor, as far as they are known.
        threads: Threads of the sessions that are timed; 0 for the runtime's own choice.
        budget_s: Seconds for the timing; 0 for none.
        progress: Called with (rounds done, rounds) while timing.
    """
    limits, types = runtime_limits(), get_target(DEFAULT_TARGET).data_types()
    speeds = kernel_speeds(threads=threads, budget_s=budget_s, progress=progress) if budget_s > 0 else ()
    providers = tuple(ort.get_available_providers())
    return Examination(
        architecture=platform.machine(),
        flags=tuple(flags),
        host=types.why,
        versions={
            "onnxruntime": ort.__version__,
            "onnx": onnx.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        build=" ".join(str(ort.get_build_info()).split()),
        providers=providers,
        max_ir=limits.max_ir,
        max_opset=limits.max_opset,
        threads=threads,
        speeds=speeds,
        problems=tuple(_problems(providers)),
        notes=tuple(_notes(limits, saturates=types.saturates, flags=flags, speeds=speeds)),
    )


def _problems(providers: Sequence[str]) -> Iterator[Advice]:
    if "CPUExecutionProvider" not in providers:
        yield Advice("The runtime has no CPU execution provider.", "pip install onnxruntime")
    if not _has_quantizer():
        yield Advice("onnxruntime.quantization is missing.", "pip install --force-reinstall onnxruntime")


def _notes(
    limits: RuntimeLimits, *, saturates: bool, flags: Sequence[str], speeds: Sequence[KernelSpeed]
) -> Iterator[Advice]:
    if onnx.defs.onnx_opset_version() - limits.max_opset > 2:
        yield Advice(
            f"onnx {onnx.__version__} writes operator set {onnx.defs.onnx_opset_version()}; "
            f"onnxruntime {limits.version} reads up to {limits.max_opset}.",
            "upgrade onnxruntime, or export models with an older operator set",
        )
    if limits.max_ir < onnx.IR_VERSION:
        yield Advice(
            f"onnx {onnx.__version__} saves IR version {onnx.IR_VERSION} by default; this runtime reads up to "
            f"{limits.max_ir}. kenosis-ort writes what the runtime reads; for other files set model.ir_version."
        )
    yield Advice(
        f"{sums_of_products(flags, saturates=saturates)}"
        + (" and clipped there; files that are made here keep pairs of weights below that." if saturates else ".")
    )
    if flags and not has_dot_products(flags):
        yield Advice("The processor has no 8-bit dot product (VNNI, AMX or dotprod): int8 gains less here.")
    fast = [s for s in speeds if s.verdict == "fast" and s.types not in (FLOAT32, FLOAT16)]
    if speeds and not fast:
        yield Advice(
            "No 8-bit type is faster than float32 here, as measured; the speed promise will often deliver float."
        )
    half = [s for s in speeds if s.types == FLOAT16 and s.verdict in ("slow", "refused")]
    if half:
        yield Advice("float16 does not pay on this CPU.")


def _has_quantizer() -> bool:
    try:
        return find_spec("onnxruntime.quantization") is not None
    except ImportError as error:
        _log.info("onnxruntime.quantization: %s", error)
        return False
