"""What the installed runtime can do on this machine: formats, providers, and which data types are fast.

The speeds are measured on small generated models, each a single Conv or MatMul on data that is quantized already, so
that the kernel is timed and not the conversion around it.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort.bench.harness import Schedule, time_interleaved
from kenosis_ort.errors import KenosisError
from kenosis_ort.graph.runtime import RuntimeLimits, runtime_limits
from kenosis_ort.graph.session import open_session
from kenosis_ort.targets.host import host_defaults
from kenosis_ort.verify.fusion import verify_fusion

_log = logging.getLogger(__name__)

Progress = Callable[[int, "int | None"], None]

_OPSET: Final = 21  # the first with 16-bit QuantizeLinear
_ROUNDS: Final = 7
_BLOCK_S: Final = 0.03
_FAST, _SLOW = 1.15, 0.87  # beyond what such short runs scatter by
_CONV: Final = (32, 28, 28)  # channels, height and width in and out, 3x3: 14 MMAC
_MATMUL: Final = (128, 256, 256)  # rows, depth and columns: 8 MMAC
_FLOAT: Final = "float32"
_TYPES: Final[Mapping[str, tuple[int, int]]] = {
    _FLOAT: (TensorProto.FLOAT, TensorProto.FLOAT),
    "float16": (TensorProto.FLOAT16, TensorProto.FLOAT16),
    "uint8 x int8": (TensorProto.UINT8, TensorProto.INT8),
    "int8 x int8": (TensorProto.INT8, TensorProto.INT8),
    "uint8 x uint8": (TensorProto.UINT8, TensorProto.UINT8),
    "uint16 x int8": (TensorProto.UINT16, TensorProto.INT8),
}


@dataclass(frozen=True)
class KernelSpeed:
    """One operator in one pair of data types.

    Attributes:
        operator: ``Conv`` or ``MatMul``.
        types: Of activations and weights.
        kernel: What the runtime executes it with.
        microseconds: Median time of a run; None where it does not run.
        ratio: Speed relative to float32, above 1 is faster; None where it does not run.
        verdict: ``baseline``, ``fast``, ``no gain``, ``slow`` or ``refused``.
        reason: Why it is refused, or runs in float.
    """

    operator: str
    types: str
    kernel: str = ""
    microseconds: float | None = None
    ratio: float | None = None
    verdict: str = "refused"
    reason: str = ""


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
    notes: tuple[Advice, ...] = field(default=())

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
    limits, host = runtime_limits(), host_defaults()
    speeds = kernel_speeds(threads=threads, budget_s=budget_s, progress=progress) if budget_s > 0 else ()
    providers = tuple(ort.get_available_providers())
    return Examination(
        architecture=host.machine,
        flags=tuple(flags),
        host=host.why,
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
        problems=tuple(_problems(limits, providers)),
        notes=tuple(_notes(limits, saturates=host.reduce_range, flags=flags, speeds=speeds)),
    )


def kernel_speeds(
    *, threads: int = 1, budget_s: float = 3.0, progress: Progress | None = None
) -> tuple[KernelSpeed, ...]:
    """Times Conv and MatMul in each pair of data types, interleaved.

    Args:
        threads: Threads of a session; 0 for the runtime's own choice.
        budget_s: Seconds, give or take a round.
        progress: Called with (rounds done, rounds).
    """
    begin = time.perf_counter()
    makers = {"Conv": _conv, "MatMul": _matmul}
    probes = {(op, types): make(*_TYPES[types]) for op, make in makers.items() for types in _TYPES}
    sources = {f"{op} {types}": model.SerializeToString() for (op, types), model in probes.items()}
    feeds = {name: _feed(sources[name]) for name in sources}
    timings = time_interleaved(
        list(sources),
        lambda name: _Fed(open_session(sources[name], threads=threads), feeds[name]),
        [{}],
        Schedule(_ROUNDS, begin + budget_s, warmup=2, block_s=_BLOCK_S),
        progress=progress,
    )
    found = []
    for op, types in probes:
        name, base = f"{op} {types}", f"{op} {_FLOAT}"
        if name not in timings.blocks or base not in timings.blocks:
            found.append(KernelSpeed(op, types, reason=timings.failed.get(name, "float32 did not run")))
            continue
        own, reference = (np.asarray(timings.round_ms(n)) for n in (name, base))
        ratio = float(np.median(reference / own))
        kernel, reason = _kernel(sources[name])
        found.append(KernelSpeed(op, types, kernel, float(np.median(own)) * 1e3, ratio, _verdict(types, ratio), reason))
    return tuple(found)


class _Fed:
    """A session with the feed that it takes; the harness hands all the same one."""

    def __init__(self, session: ort.InferenceSession, feed: Mapping[str, Any]) -> None:
        self._session, self._feed = session, feed

    def run(self, output_names: None, input_feed: Any) -> Any:  # noqa: ARG002
        """Runs the model once on its own feed."""
        return self._session.run(output_names, self._feed)


def _verdict(types: str, ratio: float) -> str:
    if types == _FLOAT:
        return "baseline"
    return "fast" if ratio >= _FAST else "slow" if ratio <= _SLOW else "no gain"


def _kernel(source: bytes) -> tuple[str, str]:
    """Returns what executes the heavy node, and why in float where it does so."""
    heavy = next(k for k in verify_fusion(source).kernels if k.op_type in ("Conv", "MatMul"))
    return heavy.kernel.removeprefix("com.microsoft."), "" if heavy.integer else heavy.reason


def _conv(activation: int, weight: int) -> onnx.ModelProto:
    channels, height, width = _CONV
    shape = (1, channels, height, width)
    return _model("Conv", activation, weight, shape, (channels, channels, 3, 3), shape, pads=[1, 1, 1, 1])


def _matmul(activation: int, weight: int) -> onnx.ModelProto:
    rows, depth, columns = _MATMUL
    return _model("MatMul", activation, weight, (rows, depth), (depth, columns), (rows, columns))


def _model(
    op_type: str,
    activation: int,
    weight: int,
    shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    out_shape: tuple[int, ...],
    **attributes: Any,
) -> onnx.ModelProto:
    """Returns a model of one node; with quantized types it reads and returns quantized data."""
    quantized = activation not in (TensorProto.FLOAT, TensorProto.FLOAT16)
    draws = np.random.default_rng(0)
    dtype = helper.tensor_dtype_to_np_dtype(weight)
    if quantized:
        middle = 128 if weight == TensorProto.UINT8 else 0
        values = (draws.integers(-60, 60, weight_shape) + middle).astype(dtype)
    else:
        values = (0.05 * draws.standard_normal(weight_shape)).astype(dtype)
    tensors = [numpy_helper.from_array(values, "w")]
    nodes = [helper.make_node(op_type, ["x", "w"], ["y"], op_type, **attributes)]
    if quantized:
        nodes = [
            *_dequantize("x", "x_float", activation, 0.02, tensors),
            *_dequantize("w", "w_float", weight, 0.01, tensors),
            helper.make_node(op_type, ["x_float", "w_float"], ["y_float"], op_type, **attributes),
            *_quantize("y_float", "y", activation, tensors),
        ]
    graph = helper.make_graph(
        nodes,
        "probe",
        [helper.make_tensor_value_info("x", activation, shape)],
        [helper.make_tensor_value_info("y", activation, out_shape)],
        tensors,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=8)


def _dequantize(
    value: str, result: str, data_type: int, scale: float, tensors: list[onnx.TensorProto]
) -> Iterator[onnx.NodeProto]:
    yield helper.make_node("DequantizeLinear", [value, *_grid(value, data_type, scale, tensors)], [result])


def _quantize(value: str, result: str, data_type: int, tensors: list[onnx.TensorProto]) -> Iterator[onnx.NodeProto]:
    yield helper.make_node("QuantizeLinear", [value, *_grid(value, data_type, 0.05, tensors)], [result])


def _grid(value: str, data_type: int, scale: float, tensors: list[onnx.TensorProto]) -> tuple[str, str]:
    unsigned: dict[int, int] = {TensorProto.UINT8: 128, TensorProto.UINT16: 32768}
    point = np.asarray(unsigned.get(data_type, 0), helper.tensor_dtype_to_np_dtype(data_type))
    tensors += [
        numpy_helper.from_array(np.float32(scale).reshape(()), f"{value}_scale"),
        numpy_helper.from_array(point, f"{value}_point"),
    ]
    return f"{value}_scale", f"{value}_point"


def _feed(source: bytes) -> dict[str, Any]:
    value = onnx.load_model_from_string(source).graph.input[0].type.tensor_type
    dtype = helper.tensor_dtype_to_np_dtype(value.elem_type)
    shape = [d.dim_value for d in value.shape.dim]
    draws = np.random.default_rng(1)
    if np.issubdtype(dtype, np.floating):
        return {"x": draws.standard_normal(shape).astype(dtype)}
    bounds = np.iinfo(dtype)
    return {"x": draws.integers(bounds.min, bounds.max, shape, dtype=dtype, endpoint=True)}


def _problems(limits: RuntimeLimits, providers: Sequence[str]) -> Iterator[Advice]:
    if "CPUExecutionProvider" not in providers:
        yield Advice("The runtime has no CPU execution provider.", "pip install onnxruntime")
    if not _has_quantizer():
        yield Advice("onnxruntime.quantization is missing.", "pip install --force-reinstall onnxruntime")
    if onnx.defs.onnx_opset_version() - limits.max_opset > 2:
        yield Advice(
            f"onnx {onnx.__version__} writes operator set {onnx.defs.onnx_opset_version()}; "
            f"onnxruntime {limits.version} reads up to {limits.max_opset}.",
            "upgrade onnxruntime, or export models with an older operator set",
        )


def _notes(
    limits: RuntimeLimits, *, saturates: bool, flags: Sequence[str], speeds: Sequence[KernelSpeed]
) -> Iterator[Advice]:
    if limits.max_ir < onnx.IR_VERSION:
        yield Advice(
            f"onnx {onnx.__version__} saves IR version {onnx.IR_VERSION} by default; this runtime reads up to "
            f"{limits.max_ir}. kenosis-ort writes what the runtime reads; for other files set model.ir_version."
        )
    if saturates:
        yield Advice("8-bit products saturate on this processor: weights get 7 bits unless you say otherwise.")
    if flags and not {"avx512_vnni", "avx_vnni", "amx_int8", "i8mm", "asimddp"}.intersection(flags):
        yield Advice("The processor has no 8-bit dot product (VNNI, AMX or dotprod): int8 gains less here.")
    fast = [s for s in speeds if s.verdict == "fast" and s.types not in (_FLOAT, "float16")]
    if speeds and not fast:
        yield Advice(
            "No 8-bit type is faster than float32 here, as measured; the speed promise will often deliver float."
        )
    half = [s for s in speeds if s.types == "float16" and s.verdict in ("slow", "refused")]
    if half:
        yield Advice("float16 does not pay on this CPU.")


def _has_quantizer() -> bool:
    from importlib.util import find_spec

    try:
        return find_spec("onnxruntime.quantization") is not None
    except (ImportError, KenosisError) as error:
        _log.info("onnxruntime.quantization: %s", error)
        return False
