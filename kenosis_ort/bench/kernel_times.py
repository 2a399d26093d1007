"""The time of each kernel of a model, from the runtime's own profile, told by nodes of the given model."""

import json
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import onnx

from kenosis_ort.errors import CalibrationError, VerificationError
from kenosis_ort.graph.constants import base_op
from kenosis_ort.graph.load import load_model, parse_model
from kenosis_ort.graph.qdq import SourceGraph, tag, token_of
from kenosis_ort.report.evidence import OpTime
from kenosis_ort.runtime.session import Model, Session, open_session, openable, session_options
from kenosis_ort.storage.writing import Scratch

_KERNEL: Final = "_kernel_time"
_NCHWC: Final = "_nchwc"
_CHAIN_LIMIT: Final = 4  # nodes that the runtime merges behind a layout-optimized kernel


def profile_ops(
    model: Model,
    feeds: Iterable[Mapping[str, Any]],
    *,
    threads: int = 1,
    runs: int = 10,
    warmup: int = 2,
    budget_s: float = 10.0,
    quantile: float = 0.5,
    custom_op_libraries: Sequence[str] = (),
) -> tuple[OpTime, ...]:
    """The time of every kernel of a model, in the order they first run.

    Profiling itself costs about a microsecond a kernel, so the times of very small kernels, and their sum, are a
    little high; to compare models as wholes use `kenosis_ort.bench`.

    Args:
        model: Path, serialized model or ModelProto; not changed.
        feeds: Arrays by input name; the runs take turns through them.
        threads: Threads of the session; 0 for the runtime's own choice.
        runs: Timed runs at most; one is made in any case.
        warmup: Runs before them that do not count.
        budget_s: Seconds that warm-up and timed runs may take, give or take one.
        quantile: Which of the times of a kernel is reported, from the least (0) to the largest (1).
        custom_op_libraries: Libraries with custom operators to register.

    Returns:
        One entry per kernel, with its median time (or another ``quantile``) over the runs; a kernel inside the body of
        a control-flow node over all the times it ran.

    Raises:
        VerificationError: The model does not load or run.
        CalibrationError: There is no feed.
    """
    samples = [dict(feed) for feed in feeds]
    if not samples:
        raise CalibrationError("there is no feed to profile with", fix="give at least one feed")
    with Scratch("profile") as scratch:
        opened, graph = _tagged(model, scratch)
        options = session_options(threads=threads, spinning=True)
        options.enable_profiling = True
        options.profile_file_prefix = str(scratch / "ort")
        session = open_session(opened, options=options, custom_op_libraries=custom_op_libraries)
        timed = _run(session, samples, warmup=warmup, runs=runs, budget_s=budget_s)
        profile = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    taken: dict[str, list[float]] = defaultdict(list)
    kernels: dict[str, str] = {}
    for event in profile:
        if event.get("cat") != "Node" or not str(event.get("name", "")).endswith(_KERNEL):
            continue
        name = str(event["name"]).removesuffix(_KERNEL)
        taken[name].append(float(event["dur"]) / 1e3)
        kernels[name] = str(event.get("args", {}).get("op_name", ""))
    found = []
    for name, times in taken.items():
        counted = times[warmup * len(times) // (warmup + timed) :]
        found.append(OpTime(*_source_of(name, kernels[name], graph), kernels[name], _quantile(counted, quantile)))
    return tuple(found)


def profile_in_fresh_sessions(
    model: Model, feeds: Sequence[Mapping[str, Any]], *, sessions: int = 3, budget_s: float = 10.0, **how: Any
) -> tuple[OpTime, ...]:
    """Result of `profile_ops`, median over sessions: memory is allocated anew in each, and so times differ.

    Args:
        model: As for `profile_ops`.
        feeds: As there.
        sessions: How many.
        budget_s: Seconds that all of their runs may take together.
        how: Further arguments of `profile_ops`.
    """
    found = [profile_ops(model, feeds, budget_s=budget_s / sessions, **how) for _ in range(sessions)]
    times: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for taken in found:
        for key, op in _by_name(taken):
            times[key].append(op.milliseconds)
    return tuple(replace(op, milliseconds=statistics.median(times[key])) for key, op in _by_name(found[0]))


def _by_name(taken: Iterable[OpTime]) -> Iterator[tuple[tuple[str, str, int], OpTime]]:
    """Yields kernels of one session with a unique key: node, kernel, and its number among equal ones."""
    seen = Counter[tuple[str, str]]()
    for op in taken:
        seen[op.node, op.kernel] += 1
        yield (op.node, op.kernel, seen[op.node, op.kernel]), op


def _quantile(times: Sequence[float], share: float) -> float:
    if share == 0.5:
        return statistics.median(times)
    return sorted(times)[min(int(share * len(times)), len(times) - 1)]


def _tagged(model: Model, folder: Path) -> tuple[str | bytes, SourceGraph]:
    """Model that the runtime opens, with nodes named by tokens, and its index."""
    if isinstance(model, bytes):
        model = parse_model(model)
    elif not isinstance(model, onnx.ModelProto):
        model = load_model(model, ask_runtime=False).proto
    copy = tag(model)
    return openable(copy.proto, folder), SourceGraph(copy.proto, labels=copy.labels)


def _source_of(name: str, kernel: str, graph: SourceGraph) -> tuple[str, str]:
    """The name and the operator type of a kernel's source node; of one without its own name and type.

    The runtime names a layout-optimized kernel after the value it writes. Where that value is made by a node that the
    kernel absorbed, such as the Relu behind a Conv, the node meant stands a few nodes before it.
    """
    token = token_of(name)
    node = graph.producer.get(name.removesuffix(_NCHWC)) if token is None else graph.nodes[token]
    if token is None:
        above = node
        for _ in range(_CHAIN_LIMIT):
            if above is not None and above.proto.op_type == base_op(kernel):
                node = above
                break
            above = None if above is None else graph.producer.get(next(iter(above.proto.input), ""))
    return (name, kernel) if node is None else (node.label, node.proto.op_type)


def _run(session: Session, feeds: Sequence[Mapping[str, Any]], *, warmup: int, runs: int, budget_s: float) -> int:
    """Runs the model; returns the number of runs that count."""
    end = time.perf_counter() + budget_s
    for index in range(warmup + runs):
        if index > warmup and time.perf_counter() > end:
            return index - warmup
        feed = feeds[index % len(feeds)]
        try:
            session.run(None, {name: array for name, array in feed.items() if name in session.inputs})
        except Exception as error:  # as above
            raise VerificationError(
                f"the runtime refuses a feed: {' '.join(str(error).split())[:400]}",
                fix="check names, shapes and types of the feeds",
            ) from error
    return runs
