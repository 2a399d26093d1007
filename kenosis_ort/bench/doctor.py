"""Abilities of the installed runtime on this machine: formats, providers, fast data types, and advice.

Which data types are fast in this runtime on this machine.

The speeds are measured on small generated models, each a few equal Convs or MatMuls in a row between float ends, as
within a net: at the ends of a graph the runtime fuses fewer types. Pairs of 8 bits are measured by the operators of
integers themselves: between Q and DQ a session for x86-64 makes int8 activations uint8, and another kernel runs.
"""

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort.bench.harness import Schedule, time_interleaved
from kenosis_ort.runtime.machine import RuntimeLimits, has_dot_products, runtime_limits, sums_of_products
from kenosis_ort.runtime.session import open_session
from kenosis_ort.targets import DEFAULT_TARGET, get_target
from kenosis_ort.verify import verify_fusion

Progress = Callable[[int, "int | None"], None]

_OPSET: Final = 21  # the first with 16-bit QuantizeLinear
_ROUNDS: Final = 7
_BLOCK_S: Final = 0.03
_FAST, _SLOW = 1.15, 0.87  # beyond what such short runs scatter by
_LAYERS: Final = 3  # so that quantizing the input and dequantizing the output weigh little
_CONV: Final = (32, 28, 28)  # channels, height and width, 3x3: 7 million multiply-accumulates a layer
_MATMUL: Final = (128, 256)  # rows, columns: 8 million multiply-accumulates a layer
FLOAT32: Final = "float32"
FLOAT16: Final = "float16"
_TYPES: Final[Mapping[str, tuple[int, int]]] = {
    FLOAT32: (TensorProto.FLOAT, TensorProto.FLOAT),
    FLOAT16: (TensorProto.FLOAT16, TensorProto.FLOAT16),
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
        microseconds: Median time of a layer; None where it does not run.
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


def kernel_speeds(
    *, threads: int = 1, budget_s: float = 3.0, progress: Progress | None = None
) -> tuple[KernelSpeed, ...]:
    """Times Conv and MatMul in each pair of data types, interleaved.

    Args:
        threads: Threads of a session; 0 for the runtime's own choice.
        budget_s: Seconds, give or take a round.
        progress: Called with (rounds done, rounds).
    """
    # A model for each operator and pair of types, all timed against each other.
    begin = time.perf_counter()
    probes = {(op, types): _model(op, *_TYPES[types]) for op in ("Conv", "MatMul") for types in _TYPES}
    sources = {f"{op} {types}": model.SerializeToString() for (op, types), model in probes.items()}
    feeds = {f"{op} {types}": _feed(model) for (op, types), model in probes.items()}

    def opened(name: str) -> Any:
        """A session that takes a feed of its own, where the harness hands all the same one."""
        session = open_session(sources[name], threads=threads, spinning=True)
        return SimpleNamespace(run=lambda names, _: session.run(names, feeds[name]))

    timings = time_interleaved(
        list(sources), opened, [{}], Schedule(_ROUNDS, begin + budget_s, warmup=2, block_s=_BLOCK_S), progress=progress
    )
    # Speeds beside float32, and the kernel that the runtime takes.
    found = []
    for op, types in probes:
        name, base = f"{op} {types}", f"{op} {FLOAT32}"
        if name not in timings.blocks or base not in timings.blocks:
            found.append(KernelSpeed(op, types, reason=timings.failed.get(name, "float32 did not run")))
            continue
        own, reference = (np.asarray(timings.round_ms(n)) for n in (name, base))
        ratio, milliseconds = float(np.median(reference / own)), float(np.median(own)) / _LAYERS
        verdict = "fast" if ratio >= _FAST else "slow" if ratio <= _SLOW else "no gain"
        heavy = [k for k in verify_fusion(sources[name]).kernels if k.op_type.endswith(("Conv", "MatMul"))]
        middle = heavy[_LAYERS // 2]
        kernel, reason = (middle.kernel or middle.op_type).removeprefix("com.microsoft."), middle.reason
        verdict, reason = "baseline" if types == FLOAT32 else verdict, "" if middle.integer else reason
        found.append(KernelSpeed(op, types, kernel, 1e3 * milliseconds, ratio, verdict, reason))
    return tuple(found)


_GRID: Final = "a_scale, a_point"
_NODES: Final = {
    "float": "{y} = {op}{how}({x}, w{i})",
    "bytes": f"{{y}} = QLinear{{op}}{{how}}({{x}}, {_GRID}, w{{i}}, w_scale, w_point, {_GRID})",
    "words": f"""
        w{{i}}_dq = DequantizeLinear(w{{i}}, w_scale, w_point)
        {{y}}_float = {{op}}{{how}}({{x}}, w{{i}}_dq)
        {{y}}_q = QuantizeLinear({{y}}_float, {_GRID})
        {{y}} = DequantizeLinear({{y}}_q, {_GRID})
    """,
}
"""A layer in float, on integers of 8 bits, and on wider ones between Q and DQ."""


def _model(op: str, activation: int, weight: int) -> onnx.ModelProto:
    """A model of a few equal layers; with quantized types each reads and writes quantized data."""
    channels, height, width = _CONV
    of_conv = ((1, channels, height, width), (channels, channels, 3, 3), "<pads=[1, 1, 1, 1]>")
    shape, weight_shape, how = of_conv if op == "Conv" else (_MATMUL, _MATMUL[1:] * 2, "")
    in_float = activation in (TensorProto.FLOAT, TensorProto.FLOAT16)
    kind = "float" if in_float else "words" if activation == TensorProto.UINT16 else "bytes"
    draws = np.random.default_rng(0)
    ends = helper.tensor_dtype_to_string(activation if kind == "float" else TensorProto.FLOAT)
    ends = f"{ends.removeprefix('TensorProto.').lower()}[{','.join(map(str, shape))}]"
    # The layers, between Q and DQ where they are quantized.
    values = ["x" if kind == "float" else "h", *(f"h{i}" for i in range(_LAYERS - 1)), "z" if kind == "bytes" else "y"]
    nodes = [_NODES[kind].format(op=op, how=how, x=values[i], y=values[i + 1], i=i) for i in range(_LAYERS)]
    if kind == "bytes":
        nodes = [f"h = QuantizeLinear(x, {_GRID})", *nodes, f"y = DequantizeLinear(z, {_GRID})"]
    elif kind == "words":
        nodes = [f"x_q = QuantizeLinear(x, {_GRID})", f"h = DequantizeLinear(x_q, {_GRID})", *nodes]
    text = f'<ir_version: 8, opset_import: ["" : {_OPSET}]> probe ({ends} x) => ({ends} y) {{ {" ".join(nodes)} }}'
    model = onnx.parser.parse_model(text)
    # Weights, and the grids of both.
    dtype = helper.tensor_dtype_to_np_dtype(weight)
    tensors = {}
    for i in range(_LAYERS):
        drawn = 0.05 * draws.standard_normal(weight_shape) if kind == "float" else draws.integers(-60, 60, weight_shape)
        tensors[f"w{i}"] = (drawn + (128 if weight == TensorProto.UINT8 else 0)).astype(dtype)
    if kind != "float":
        for name, data_type, scale in (("a", activation, 0.05), ("w", weight, 0.002)):
            middle = 128 if data_type == TensorProto.UINT8 else 32768 if data_type == TensorProto.UINT16 else 0
            tensors[f"{name}_scale"] = np.asarray(scale, np.float32)
            tensors[f"{name}_point"] = np.asarray(middle, helper.tensor_dtype_to_np_dtype(data_type))
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in tensors.items())
    return model


def _feed(model: onnx.ModelProto) -> dict[str, Any]:
    value = model.graph.input[0].type.tensor_type
    shape = [d.dim_value for d in value.shape.dim]
    noise = np.random.default_rng(1).standard_normal(shape)
    return {"x": noise.astype(helper.tensor_dtype_to_np_dtype(value.elem_type))}


@dataclass(frozen=True)
class Examination:
    """Findings about the machine and the packages.

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
        notes: What is worth knowing, with a fix where there is one.
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
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
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
        providers=tuple(ort.get_available_providers()),
        max_ir=limits.max_ir,
        max_opset=limits.max_opset,
        threads=threads,
        speeds=speeds,
        notes=tuple(_notes(limits, saturates=types.saturates, flags=flags, speeds=speeds)),
    )


def _notes(
    limits: RuntimeLimits, *, saturates: bool, flags: Sequence[str], speeds: Sequence[KernelSpeed]
) -> Iterator[str]:
    if onnx.defs.onnx_opset_version() - limits.max_opset > 2:
        yield (
            f"onnx {onnx.__version__} writes operator set {onnx.defs.onnx_opset_version()}; "
            f"onnxruntime {limits.version} reads up to {limits.max_opset}. "
            "Fix: upgrade onnxruntime, or export models with an older operator set"
        )
    if limits.max_ir < onnx.IR_VERSION:
        yield (
            f"onnx {onnx.__version__} saves IR version {onnx.IR_VERSION} by default; this runtime reads up to "
            f"{limits.max_ir}. kenosis-ort writes what the runtime reads; for other files set model.ir_version."
        )
    clipped = " and clipped there; files that are made here keep pairs of weights below that."
    yield sums_of_products(flags, saturates=saturates) + (clipped if saturates else ".")
    if flags and not has_dot_products(flags):
        yield "The processor has no 8-bit dot product (VNNI, AMX or dotprod): int8 gains less here."
    fast = [s for s in speeds if s.verdict == "fast" and s.types not in (FLOAT32, FLOAT16)]
    if speeds and not fast:
        yield "No 8-bit type is faster than float32 here, as measured; the speed promise will often deliver float."
    half = [s for s in speeds if s.types == FLOAT16 and s.verdict in ("slow", "refused")]
    if half:
        yield "float16 does not pay on this CPU."
