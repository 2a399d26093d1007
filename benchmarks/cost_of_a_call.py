"""What one call costs beside stock's: sessions opened, runs of the model, bytes handed out, seconds and peak memory.

Processor seconds of a call, all threads, stand beside those of stock's best recipe: its pre-processing, and scales by
channel. Each call is made in a process of its own, with the default options, on nets that the benchmark builds, on a
file, or on the zoo with its own calibration data. Sessions and runs are counted where the runtime is called, by the
stage of the call. Seconds are set against plain inference: one session of the runtime's own settings, each sample run
once, measured again beside each call. The package is compiled first, as an installer does it: a working copy may be
without bytecode, which costs each process a third of a second. Of a zoo net the calibration alone is timed as well:
what a sweep over the data takes beside running the model on it, once the sessions are open. On a machine that does
other work at the same time, ``--processor`` counts the seconds of the process' own threads, with sessions of one thread
throughout.

    python benchmarks/cost_of_a_call.py                                   # SqueezeNet and MobileNetV2 with 40 samples
    python benchmarks/cost_of_a_call.py --nets squeezenet --samples 8 --recipes accurate --stages
    python benchmarks/cost_of_a_call.py --model model.onnx
    python benchmarks/cost_of_a_call.py --zoo                             # all of the zoo, with the bounds held or not
    python benchmarks/cost_of_a_call.py --zoo yolox_nano --only calibration --processor
"""

from __future__ import annotations

import argparse
import compileall
import json
import multiprocessing
import resource
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from nets import NETS

import kenosis_ort

Feed = dict[str, Any]
Source = tuple[str, str, int]  # "zoo", "net" or "file", the net's name or path, samples to make up
BOUNDS = {"fast": (3.0, 3.0), "accurate": (8.0, 10.0)}  # times plain inference, and seconds beyond
CALIBRATION = {"MinMax": 1.5, "Percentile": 1.8}  # times plain inference
_ROUNDS = 5


def by_processor_time() -> None:
    """Counts processor time from now on, in stages too; threads that wait for work spin, so each session gets one."""
    time.perf_counter = time.process_time
    from kenosis_ort.runtime import session

    class OneThread(session.Session):
        def __init__(self, source: Any, sess_options: Any = None, **more: Any) -> None:
            options = ort.SessionOptions() if sess_options is None else sess_options
            options.intra_op_num_threads = 1
            super().__init__(source, options, **more)

    session.Session = OneThread  # type: ignore[misc]
    ort.InferenceSession = OneThread


def opened(source: Source) -> tuple[str, list[Feed]]:
    """Returns the path of a model, and its calibration data: the zoo's, or smooth random pictures, or plain noise."""
    kind, name, count = source
    if kind == "zoo":
        from _zoo import load_zoo

        entry = load_zoo().ENTRIES[name]()
        return entry.path, [entry.calib[i] for i in range(len(entry.calib))]
    if kind == "net":
        return name, list(NETS[Path(name).stem].feeds(count, 1))
    rng = np.random.default_rng(0)
    inputs = ort.InferenceSession(name, providers=["CPUExecutionProvider"]).get_inputs()
    shapes = {i.name: [d if isinstance(d, int) and d > 0 else 1 for d in i.shape] for i in inputs}
    return name, [{n: rng.normal(0, 1, s).astype(np.float32) for n, s in shapes.items()} for _ in range(count)]


def plain(path: str, feeds: list[Feed]) -> tuple[float, float]:
    """Returns the seconds of opening a session, and of one run of each feed."""
    start = time.perf_counter()
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    begun = time.perf_counter()
    for feed in feeds:
        session.run(None, feed)
    return begun - start, time.perf_counter() - begun


def infer(source: Source, answer: Any) -> None:
    """Sends the seconds of plain inference."""
    answer.put({"inference": plain(*opened(source))[1]})


def call(tool: str, source: Source, options: dict[str, Any], answer: Any) -> None:
    """Makes one call, counted, and sends what it cost."""
    warnings.simplefilter("ignore")
    path, feeds = opened(source)
    from onnxruntime.quantization import CalibrationDataReader

    from kenosis_ort.runtime.counting import Cost, counted
    from kenosis_ort.runtime.session import Session

    if not issubclass(ort.InferenceSession, Session):
        ort.InferenceSession = Session  # stock's sessions count themselves too

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left: Iterator[Feed] = iter(feeds)

        def get_next(self) -> Any:
            return next(self.left, None)

    with tempfile.TemporaryDirectory() as folder, counted() as counts:
        out = Path(folder) / "out.onnx"
        if tool == "stock":
            from onnxruntime.quantization import quantize_static
        else:
            from kenosis_ort import quantize_static  # type: ignore[no-redef]
        held = _resident_mb()
        start, begun = time.perf_counter(), time.process_time()
        if tool == "stock":
            from onnxruntime.quantization.shape_inference import quant_pre_process

            prepared = str(Path(folder) / "prepared.onnx")
            quant_pre_process(path, prepared, skip_symbolic_shape=True)
            path = prepared
        report = quantize_static(path, str(out), Reader(), **options)
        seconds, processor = time.perf_counter() - start, time.process_time() - begun
    took = {} if report is None else report.seconds
    speed = None if report is None else report.speed
    answer.put(
        {
            "tool": tool,
            "sessions": counts.total.sessions,
            "runs": counts.total.runs,
            "copied_mb": counts.total.copied / 2**20,
            "seconds": seconds,
            "processor": processor,
            "timing": 0.0 if speed is None else speed.seconds,
            "held_mb": held,
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "stages": {
                name or "elsewhere": {
                    **vars(counts.by_stage.get(name, Cost())),
                    "seconds": round(took.get(name, 0.0), 2),
                }
                for name in dict.fromkeys((*took, *counts.by_stage))
            },
            "passes": {} if report is None else {p.name: round(p.seconds, 2) for p in report.passes},
        }
    )


class Passes:
    """A reader of the same data several times over, which times what happens between, and plain inference in turn.

    Args:
        path: The float model.
        feeds: The data.
    """

    def __init__(self, path: str, feeds: list[Feed]) -> None:
        self._session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        self._feeds, self._at, self._since = feeds, 0, 0.0
        self.taken: list[float] = []
        self.inference: list[float] = []

    def get_next(self) -> Feed | None:
        """Returns the next sample; at the end of a pass runs the model on all of them first."""
        now = time.perf_counter()
        if self._at % len(self._feeds) == 0:
            if self._at > len(self._feeds):  # the first pass opens sessions
                self.taken.append(now - self._since)
            for feed in self._feeds:
                self._session.run(None, feed)
            self._since = time.perf_counter()
            self.inference.append(self._since - now)
            if self._at == _ROUNDS * len(self._feeds):
                return None
        self._at += 1
        return self._feeds[(self._at - 1) % len(self._feeds)]

    @property
    def ratio(self) -> float:
        """A pass as a multiple of plain inference just before and after it, the median."""
        around = zip(self.inference[1:], self.inference[2:], strict=False)
        return statistics.median(own / ((a + b) / 2) for own, (a, b) in zip(self.taken, around, strict=True))


def calibration(tool: str, method: str, source: Source, answer: Any) -> None:
    """Sends what a sweep over the data takes beside plain inference, once the sessions are open."""
    warnings.simplefilter("ignore")
    path, feeds = opened(source)
    from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, create_calibrator

    from kenosis_ort import calibrate

    passes = Passes(path, feeds)
    reader = type("Reader", (CalibrationDataReader,), {"get_next": lambda _: passes.get_next()})()
    with tempfile.TemporaryDirectory() as folder:
        if tool == "stock":
            made = create_calibrator(path, None, f"{folder}/augmented.onnx", calibrate_method=CalibrationMethod[method])
            made.collect_data(reader)
        else:
            table = Path(folder) / "table.json"
            calibrate(path, table, reader, calibrate_method=CalibrationMethod[method], recipe="plain")
    answer.put({"inference": statistics.median(passes.inference), "ratio": passes.ratio})


def taken(step: Callable[..., None], processor: bool, *arguments: Any) -> None:
    """Performs a step in this process."""
    if processor:
        by_processor_time()
    step(*arguments)


def apart(processor: bool, step: Callable[..., None], *arguments: Any) -> dict[str, Any]:
    """Returns what a step sends, from a process of its own."""
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    worker = context.Process(target=taken, args=(step, processor, *arguments, answer))
    worker.start()
    while True:
        try:
            found: dict[str, Any] = answer.get(timeout=1)
            break
        except Exception as error:  # queue.Empty, or what pickling raises
            if not worker.is_alive() and answer.empty():
                raise SystemExit(f"the process of {arguments[0]} ended with {worker.exitcode}") from error
    worker.join()
    return found


def within(row: dict[str, Any]) -> str:
    """Returns whether a call holds the bounds of its recipe, as text."""
    if row["tool"] not in BOUNDS:
        return ""
    times, more = BOUNDS[row["tool"]]
    beyond = row["seconds"] - times * row["inference"]
    text = f"{times:g}x {beyond:+.1f} s"
    if beyond > more:
        text += f", {more:g} allowed"
    if row["timing"] > max(0.2 * row["seconds"], 0.05):
        text += f"; timing {row['timing']:.1f} s of it"
    return text


def show(net: str, row: dict[str, Any], *, stages: bool, stock: float | None) -> None:
    """Prints one call, beside the processor seconds of stock's."""
    beside = "" if stock is None else f"{row['processor'] / stock:.2f}"
    print(
        f"{net:<24} {row['tool']:<8} {row['sessions']:8d} {row['runs']:6d} {row['copied_mb']:9.0f} "
        f"{row['inference']:9.2f} {row['seconds']:8.1f} {row['seconds'] / row['inference']:11.1f} "
        f"{row['peak_mb']:8.0f} {row['processor']:8.1f} {beside:>8}  {within(row)}",
        flush=True,
    )
    for stage, cost in row["stages"].items() if stages else ():
        print(
            f"    {stage:<28} {cost['sessions']:8d} {cost['runs']:6d} {cost['copied'] / 2**20:9.0f} "
            f"{'':9} {cost['seconds']:8.1f}"
        )
    if stages and row["passes"]:
        print("    passes: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in row["passes"].items()))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="*", default=["squeezenet", "mobilenet_v2"], choices=sorted(NETS))
    parser.add_argument("--model", type=Path, help="a file in place of the nets")
    parser.add_argument("--zoo", nargs="*", metavar="NET", help="nets of the zoo with their data; all by default")
    parser.add_argument("--samples", type=int, default=40, help="without --zoo")
    parser.add_argument("--recipes", nargs="*", help="by default fast, and with --zoo accurate as well")
    parser.add_argument("--only", choices=("calls", "calibration"), help="of what --zoo prints")
    parser.add_argument("--no-stock", action="store_true")
    parser.add_argument("--no-promise", action="store_true")
    parser.add_argument("--stages", action="store_true", help="sessions, runs and seconds by the stage of the call")
    parser.add_argument("--processor", action="store_true", help="processor time in place of wall time")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    compileall.compile_dir(Path(kenosis_ort.__file__).parent, quiet=1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        sources: dict[str, Source]
        if arguments.zoo is not None:
            from _zoo import choose, load_zoo

            sources = {name: ("zoo", name, 0) for name in choose(load_zoo(), arguments.zoo)}
        elif arguments.model:
            sources = {arguments.model.stem: ("file", str(arguments.model), arguments.samples)}
        else:
            sources = {n: ("net", str(Path(folder) / f"{n}.onnx"), arguments.samples) for n in arguments.nets}
            for name, (_, path, _) in sources.items():
                onnx.save(NETS[name].build(), path)
        recipes = arguments.recipes or ["fast", *(["accurate"] if arguments.zoo is not None else [])]
        calls: list[tuple[str, dict[str, Any]]] = [] if arguments.no_stock else [("stock", {"per_channel": True})]
        calls += [(recipe, {"recipe": recipe, "promise": not arguments.no_promise}) for recipe in recipes]
        if arguments.only != "calibration":
            print(
                f"{'net':<24} {'tool':<8} {'sessions':>8} {'runs':>6} {'copied MB':>9} {'inference':>9} {'seconds':>8} "
                f"{'x inference':>11} {'peak MB':>8} {'CPU s':>8} {'x stock':>8}  multiple and remainder"
            )
            for net, source in sources.items():
                stock = None
                for tool, options in calls:
                    before = apart(arguments.processor, infer, source)["inference"]
                    row = {"net": net, **apart(arguments.processor, call, tool, source, options)}
                    row["inference"] = (before + apart(arguments.processor, infer, source)["inference"]) / 2
                    rows.append(row)
                    stock = row["processor"] if tool == "stock" else stock
                    show(net, row, stages=arguments.stages and tool != "stock", stock=stock)
        if arguments.zoo is not None and arguments.only != "calls":
            columns = [
                *([] if arguments.no_stock else [("stock", "MinMax")]),
                *(("ours", name) for name in CALIBRATION),
            ]
            heads = "".join(f"{f'{tool}, {method}':>24}" for tool, method in columns)
            print(f"\n{'calibration of':<24} {'inference':>9}{heads}")
            for net, source in sources.items():
                print(f"{net:<24} ", end="", flush=True)
                for at, (tool, method) in enumerate(columns):
                    found = apart(arguments.processor, calibration, tool, method, source)
                    rows.append({"net": net, "tool": tool, "method": method, **found})
                    most = CALIBRATION[method] if tool == "ours" else float("inf")
                    beyond = f" ({most} allowed)" if found["ratio"] > most else ""
                    cell = f"{found['ratio']:.2f}x{beyond}"
                    print((f"{found['inference']:9.2f}" if at == 0 else "") + f"{cell:>24}", end="", flush=True)
                print()
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


def _resident_mb() -> float:
    """Returns the memory that the process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


if __name__ == "__main__":
    main()
