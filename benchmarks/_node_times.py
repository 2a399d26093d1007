"""Small nets of one kind of node, and their times: by chains of different length, and by the runtime's profile."""

from __future__ import annotations

import collections
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from _zoo import OneShotReader
from onnx import TensorProto, helper, numpy_helper

import kenosis_ort
from kenosis_ort.runtime.session import session_options
from kenosis_ort.targets.ort_web import WebRunner, clock, node, stored

Feed = dict[str, npt.NDArray[Any]]
SHORT, LONG = 2, 6  # nodes of a chain
LEAST_US = 0.05
ROUNDS = 10
_ENDS = ("QuantizeLinear", "DequantizeLinear", "Transpose", "QLinearLeakyRelu")


class Net:
    """A few nodes over the input ``x``."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = list(shape)
        self.rng = np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def constant(self, values: npt.ArrayLike, dtype: Any = np.float32) -> str:
        """Stores a constant; returns its name."""
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(values, dtype), name))
        return name

    def op(self, kind: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """Adds a node; returns its output."""
        out = f"{kind.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [out], name=out, domain=domain, **attributes))
        return out

    def conv(self, x: str, inputs: int, outputs: int, window: Sequence[int], stride: int = 1, groups: int = 1) -> str:
        """Adds a Conv padded by half a window."""
        width = inputs // groups
        deviation = (2 / (width * int(np.prod(window)))) ** 0.5
        weight = self.constant(self.rng.normal(0, deviation, (outputs, width, *window)))
        bias = self.constant(self.rng.normal(0, 0.1, outputs))
        pads, strides = [k // 2 for k in window] * 2, [stride] * 2
        return self.op("Conv", x, weight, bias, kernel_shape=list(window), strides=strides, pads=pads, group=groups)

    def between(self, x: str) -> str:
        """Adds Q and DQ."""
        scale, zero = self.constant(0.05), self.constant(128, np.uint8)
        return self.op("DequantizeLinear", self.op("QuantizeLinear", x, scale, zero), scale, zero)

    def feed(self) -> Feed:
        """Returns values near one, which no chain of products lets fade or explode."""
        return {"x": (1 + self.rng.normal(0, 0.01, self.shape)).astype(np.float32)}

    def model(self, y: str) -> onnx.ModelProto:
        """Returns the model with ``y`` as its output."""
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, self.shape)
        out = helper.make_tensor_value_info(y, TensorProto.FLOAT, None)
        graph = helper.make_graph(self.nodes, "net", [x], [out], self.weights)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        return onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=opsets, ir_version=8))


Step = Callable[[Net, str], str]


TARGET = ["ort-cpu"]
"""Whose runtime is timed: this one's or ``ort-web``'s."""


def open_session(model: bytes | str, profile_to: Path | None = None) -> Any:
    """Opens a session of one thread."""
    if TARGET[0] == "ort-web":
        return WebRunner(model)
    options = session_options(spinning=True)
    if profile_to is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile_to / "profile")
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def microseconds(sessions: Sequence[Any], feed: Feed) -> list[float]:
    """Returns the time of a run of each session: the lowest of the medians of short blocks that take turns."""
    best = [np.inf] * len(sessions)
    thread_time = clock if TARGET[0] == "ort-web" else time.thread_time
    for session in sessions if TARGET[0] == "ort-web" else ():
        for _ in range(20):  # until its kernels are compiled well
            session.run(None, feed)
    for _ in range(ROUNDS):
        for index, session in enumerate(sessions):
            session.run(None, feed)
            times: list[float] = []
            end = thread_time() + 5e-3
            while len(times) < 3 or thread_time() < end:
                start = thread_time()  # one thread: what other programs take of the processor does not count
                session.run(None, feed)
                times.append(thread_time() - start)
            best[index] = min(best[index], float(np.median(times)) * 1e6)
    return best


def quantized(model: onnx.ModelProto, feed: Feed, folder: Path) -> str:
    """Quantizes a net of Convs or linear layers, all of it."""
    out = str(folder / "int8.onnx")
    kenosis_ort.quantize_static(model, out, OneShotReader([feed]), rewrites=False, protect_outputs="int8",
                                verify=False, promise=False, target=TARGET[0])  # fmt: skip
    return out


def chain_us(shape: Sequence[int], step: Step, *, form: str) -> float:
    """Returns the time of one step: in ``float``, ``planned`` by quantize_static, or ``between`` Q and DQ."""
    with tempfile.TemporaryDirectory(prefix="kenosis-costs-") as folder:
        sessions, feed = [], {}
        for nodes in (SHORT, LONG):
            net = Net(shape)
            x = "x" if form != "between" else net.between("x")
            for _ in range(nodes):
                x = step(net, x)
                x = net.between(x) if form == "between" else x
            model, feed = net.model(x), net.feed()
            source = quantized(model, feed, Path(folder)) if form == "planned" else model.SerializeToString()
            if TARGET[0] == "ort-web":
                if nodes == LONG:
                    ends = _ENDS if form == "planned" else ()
                    steps = [us for _, kind, us in profile(source, feed) if kind not in ends]
                    return max(sum(steps) / LONG, LEAST_US)
                continue
            sessions.append(open_session(source))
        short, long = microseconds(sessions, feed)
    return max((long - short) / (LONG - SHORT), LEAST_US)


def profile(model: bytes | str, feed: Feed, *, seconds: float = 0.25) -> list[tuple[str, str, float]]:
    """Returns (node, operator, microseconds) by kernel: the lower fifth over the runs, less what the profiler adds."""
    with tempfile.TemporaryDirectory(prefix="kenosis-costs-") as folder:
        if TARGET[0] == "ort-web":
            return _by_kernel(_web_events(model, feed, Path(folder)), 0.0)  # others' time counts: the least is taken
        session = open_session(model, Path(folder))
        begin, runs = time.perf_counter(), 0
        while runs < 8 or (time.perf_counter() - begin < seconds and runs < 600):
            session.run(None, feed)
            runs += 1
        return _by_kernel(json.loads(Path(session.end_profiling()).read_text()), 0.2)


def _web_events(model: bytes | str, feed: Feed, folder: Path, runs: int = 40) -> list[dict[str, Any]]:
    process, source, to = node(), folder / "model.onnx", folder / "profile.json"
    source.write_bytes(model if isinstance(model, bytes) else Path(model).read_bytes())
    told = stored(process, feed)
    process.ask("profile", file=str(source), inputs=told["inputs"], data=told["file"], runs=runs, to=str(to))
    events: list[dict[str, Any]] = json.loads(to.read_text().replace("\n", " "))
    return events


def _by_kernel(events: list[dict[str, Any]], quantile: float) -> list[tuple[str, str, float]]:
    taken: dict[str, list[float]] = collections.defaultdict(list)
    kinds: dict[str, str] = {}
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            name = event["name"].removesuffix("_kernel_time")
            taken[name].append(event["dur"])
            kinds[name] = event["args"]["op_name"]
    own = OWN_US[0]
    return [(n, kinds[n], max(float(np.quantile(times, quantile)) - own, LEAST_US)) for n, times in taken.items()]


OWN_US = [0.0]
"""What the profiler adds to a kernel, once `calibrate` has measured it."""


def calibrate() -> float:
    """Measures what the profiler adds to a kernel; returns the microseconds of a run besides its kernels."""
    plain, profiled = [], []
    for nodes in (4, 44):
        net = Net([1, 16])
        x = "x"
        for _ in range(nodes):
            x = net.op("Sigmoid", x)
        model, feed = net.model(x).SerializeToString(), net.feed()
        plain += microseconds([open_session(model)], feed)
        profiled.append(sum(us for _, _, us in profile(model, feed)))
    node = (plain[1] - plain[0]) / 40
    OWN_US[0] = max((profiled[1] - profiled[0]) / 40 - node, 0.0)
    return plain[0] - 4 * node


def middle(kernels: Sequence[tuple[str, str, float]], kinds: Sequence[str]) -> float | None:
    """Returns the median time of the kernels of some operators."""
    times = [us for _, kind, us in kernels if kind in kinds]
    return float(np.median(times)) if times else None
