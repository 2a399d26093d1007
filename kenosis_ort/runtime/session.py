"""Sessions of the runtime, each of which counts itself, its runs and the bytes that it hands out.

What a call costs is what it asks of the runtime. `counted` gathers that for all sessions of the process, by the stage
of the call that `at_stage` names; benchmarks print it and tests hold it below bounds, where a timing would be noise.

What the installed runtime reads and can quantize: the highest IR version and operator sets.
"""

from __future__ import annotations

import hashlib
import logging
import platform
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

import onnx
import onnxruntime
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state
from typing_extensions import Self

from kenosis_ort.storage.writing import keep, recall

_CPU = ("CPUExecutionProvider",)
_stage: ContextVar[str] = ContextVar("stage", default="")
_entries: ContextVar[Mapping[str, str] | None] = ContextVar("entries", default=None)
_lock = threading.Lock()
_open: list[Counts] = []


@dataclass
class Cost:
    """Counts of sessions and runs of the runtime.

    Attributes:
        sessions: Models loaded.
        runs: Runs of a model.
        copied: Bytes of the arrays that the runs returned.
    """

    sessions: int = 0
    runs: int = 0
    copied: int = 0


@dataclass
class Counts:
    """Counts of sessions and runs in a part of the program, by stage; "" for those outside of all stages."""

    by_stage: dict[str, Cost] = field(default_factory=dict)

    @property
    def total(self) -> Cost:
        """All stages together."""
        costs = self.by_stage.values()
        return Cost(sum(c.sessions for c in costs), sum(c.runs for c in costs), sum(c.copied for c in costs))


class Session(ort.InferenceSession):  # type: ignore[misc]
    """A session of the runtime that counts itself and its runs."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        _count(sessions=1)

    def run(self, output_names: Sequence[str] | None, input_feed: Any, run_options: Any = None) -> list[Any]:
        """Runs the model, as `onnxruntime.InferenceSession.run`."""
        results: list[Any] = super().run(output_names, input_feed, run_options)
        if _open:
            _count(runs=1, copied=sum(int(getattr(value, "nbytes", 0)) for value in results))
        return results


def session_options(
    *, threads: int = 1, optimize: bool = True, custom_op_libraries: Sequence[str] = (), spinning: bool = True
) -> ort.SessionOptions:
    """The options that sessions start from; raises whatever the runtime raises for a library.

    Args:
        threads: Threads inside an operator.
        optimize: At full optimization, as a user's session; False for none.
        custom_op_libraries: Libraries with custom operators to register.
        spinning: Threads that wait for work keep their processor busy, as in a user's session. Without, a session of
            several threads that is not timed leaves it to others: a call takes a quarter less processor time.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    if not spinning:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4  # what fails is raised, and need not be printed too
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    for library in custom_op_libraries:
        options.register_custom_ops_library(library)
    return options


def write_optimized(options: ort.SessionOptions, path: Path, external_from: int) -> None:
    """Has a session write its optimized model to a file, and large weights to one beside it.

    Args:
        options: Of the session; changed.
        path: The file.
        external_from: Bytes from which on a weight is large.
    """
    options.optimized_model_filepath = str(path)
    entry = "session.optimized_model_external_initializers_"
    options.add_session_config_entry(f"{entry}file_name", f"{path.stem}.data")
    options.add_session_config_entry(f"{entry}min_size_in_bytes", str(external_from))


class Closing(ABC):
    """A context manager that closes itself."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Releases the sessions."""


def new_session(source: str | bytes, options: ort.SessionOptions, *, providers: Sequence[Any] = ()) -> Session:
    """Opens a session; raises whatever the runtime raises.

    Args:
        source: Path or serialized model.
        options: Of the session.
        providers: Execution providers, the CPU's if there is none.
    """
    for key, value in (_entries.get() or {}).items():
        options.add_session_config_entry(key, value)
    return Session(source, options, providers=list(providers or _CPU))


@contextmanager
def configured(entries: Mapping[str, str]) -> Iterator[None]:
    """Adds configuration entries to all sessions that are opened inside."""
    token = _entries.set(entries)
    try:
        yield
    finally:
        _entries.reset(token)


@contextmanager
def counted() -> Iterator[Counts]:
    """Counts what is asked of the runtime inside; of all threads."""
    counts = Counts()
    with _lock:
        _open.append(counts)
    try:
        yield counts
    finally:
        with _lock:
            _open[:] = [each for each in _open if each is not counts]


@contextmanager
def at_stage(name: str) -> Iterator[None]:
    """Names the stage under which everything inside is counted, but for what a stage inside of it counts."""
    token = _stage.set(name)
    try:
        yield
    finally:
        _stage.reset(token)


def _count(*, sessions: int = 0, runs: int = 0, copied: int = 0) -> None:
    stage = _stage.get()
    with _lock:
        for counts in _open:
            cost = counts.by_stage.setdefault(stage, Cost())
            cost.sessions += sessions
            cost.runs += runs
            cost.copied += copied


_log = logging.getLogger(__name__)

T = TypeVar("T")

_OLDEST_IR, _OLDEST_OPSET, _OLDEST_ML = 8, 17, 3  # every onnxruntime since 1.14 reads these
_NO_LIMIT = 200
_FUSES_LATER = {"MaxPool": (21, (1, 28))}
"""Operators whose newer definitions run on 8-bit data only since some runtime: last older operator set, runtime."""


@dataclass(frozen=True)
class RuntimeLimits:
    """The newest formats that a runtime loads.

    Attributes:
        max_ir: Highest ``ir_version``.
        max_opset: Highest version of the main operator set in which it runs QuantizeLinear and DequantizeLinear.
        version: The runtime's version string.
        max_ml: Highest version of the operator set ``ai.onnx.ml``.
    """

    max_ir: int
    max_opset: int
    version: str
    max_ml: int = _OLDEST_ML

    def best_opset(self, op_types: Collection[str]) -> int:
        """The highest operator set in which all of some operators run on 8-bit data, as far as they can."""
        late = [o for op, (o, since) in _FUSES_LATER.items() if op in op_types and not self.is_at_least(*since)]
        return min([self.max_opset, *late])

    def is_at_least(self, major: int, minor: int) -> bool:
        """Whether the runtime is of a version or a later one."""
        return tuple(int(part) for part in self.version.split(".")[:2]) >= (major, minor)


@lru_cache(maxsize=1)
def runtime_limits() -> RuntimeLimits:
    """The limits of the installed onnxruntime.

    Found by loading tiny models, once for an installation: they are kept in the user's cache, under the version, place
    and time of the runtime's library, and found again wherever that is not possible.
    """
    name = f"runtime-{installation()}"
    limits = _from_facts(recall(name) or {})
    if limits is None:
        limits = _probed()
        keep(name, asdict(limits))
    _log.debug("onnxruntime %s reads IR %d, opset %d", limits.version, limits.max_ir, limits.max_opset)
    return limits


def fact_of_processor(what: str, find: Callable[[], T], fits: Callable[[Any], bool]) -> T:
    """A fact about the runtime on this processor, found out once and kept where the processor is known.

    Args:
        what: Name of the fact, in letters.
        find: Finds it out: a truth value or a number.
        fits: Whether what was kept can be such a fact.
    """
    processor = _processor()
    name = f"{what}-{installation()}-{hashlib.sha256(processor.encode()).hexdigest()[:16]}"
    known = (recall(name) or {}).get(what) if processor else None
    if fits(known):
        return cast(T, known)
    found = find()
    if processor:
        keep(name, {what: found})
    return found


def _processor() -> str:
    """The model and the features of the processor as Linux names them; "" elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return "; ".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))


def installation() -> str:
    """Identity of this installation of the runtime, in letters and digits."""
    try:
        library = Path(onnxruntime_pybind11_state.__file__)
        seen = library.stat()
        place = f"{library} {seen.st_size} {seen.st_mtime_ns}"
    except (OSError, TypeError):
        place = str(onnxruntime.__file__)
    return hashlib.sha256(f"{onnxruntime.__version__} {place} {platform.machine()}".encode()).hexdigest()[:24]


def _from_facts(facts: Mapping[str, Any]) -> RuntimeLimits | None:
    """Limits as they were kept; None where they are not of this runtime, or no limits at all."""
    numbers = [facts.get(name) for name in ("max_ir", "max_opset", "max_ml")]
    known = (_OLDEST_IR, _OLDEST_OPSET, _OLDEST_ML)
    fits = all(type(n) is int and least <= n < _NO_LIMIT for n, least in zip(numbers, known, strict=True))
    if not fits or facts.get("version") != onnxruntime.__version__:
        return None
    return RuntimeLimits(**{name: facts[name] for name in ("max_ir", "max_opset", "version", "max_ml")})


def _probed() -> RuntimeLimits:
    return RuntimeLimits(
        max_ir=_highest(_OLDEST_IR, lambda version: _loads(ir_version=version, opset=_OLDEST_OPSET)),
        max_opset=_highest(_OLDEST_OPSET, lambda version: _loads(ir_version=_OLDEST_IR, opset=version)),
        version=onnxruntime.__version__,
        max_ml=_highest(_OLDEST_ML, lambda version: _loads(ir_version=_OLDEST_IR, opset=_OLDEST_OPSET, ml=version)),
    )


def _highest(known: int, loads: Callable[[int], bool]) -> int:
    """The highest version that loads: doubling steps up from a known one, then bisection."""
    low, step = known, 1
    while low + step < _NO_LIMIT and loads(low + step):
        low, step = low + step, step * 2
    high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if loads(middle) else (low, middle)
    return low


def _loads(*, ir_version: int, opset: int, ml: int = _OLDEST_ML) -> bool:
    value = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in ("x", "y")]
    nodes = [
        onnx.helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        onnx.helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
    ]
    parameters = [
        onnx.helper.make_tensor("scale", onnx.TensorProto.FLOAT, [], [1.0]),
        onnx.helper.make_tensor("zero", onnx.TensorProto.UINT8, [], [0]),
    ]
    graph = onnx.helper.make_graph(nodes, "probe", value[:1], value[1:], parameters)
    imports = [onnx.helper.make_opsetid("", opset), onnx.helper.make_opsetid("ai.onnx.ml", ml)]
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=ir_version)
    try:
        new_session(model.SerializeToString(), session_options())
    except Exception as error:  # the binding raises its own classes, all of them direct children of Exception
        _log.debug("IR %d, opset %d refused: %s", ir_version, opset, error)
        return False
    return True
