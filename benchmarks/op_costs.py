"""What kernels of the installed runtime cost on this machine, in float and in integer, and coefficients that follow.

Small nets of one kind of node are timed in both forms, one thread: chains of two and of six nodes, whose difference is
four nodes and nothing else; where a node cannot stand behind itself the runtime's profile tells its time. For every
class of kernel the coefficients of `kenosis_ort.targets.profile.KernelCost` are fitted to the times, none below zero,
each measurement weighted by its own size. ``kenosis-ort profile`` measures the host profiles of ``ort-cpu``;
``--target ort-web`` measures in Node what ``kenosis_ort/targets/ort_web/costs.json`` began with.

    python benchmarks/op_costs.py                       # a few minutes
    python benchmarks/op_costs.py --cases --only conv   # each measurement, beside the fitted time
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _node_times import LEAST_US, TARGET, Net, Step, calibrate, chain_us, middle, profile, quantized

from kenosis_ort.runtime.machine import machine
from kenosis_ort.targets.ort_cpu.work import conv_work, linear_work
from kenosis_ort.targets.profile import KernelCost, Work


@dataclass(frozen=True)
class Sample:
    """One measurement: what was done and the microseconds it took in each form, None where there is none."""

    label: str
    work: Work
    float_us: float | None
    integer_us: float | None


# ---- what is measured ---------------------------------------------------------------------------------------------


def conv_sample(
    inputs: int, outputs: int, size: int, window: Sequence[int] = (3, 3), stride: int = 1, groups: int = 1
) -> Sample:
    """Conv and Relu: a chain where the shape allows, else in front of a pointwise Conv."""
    pixels = (-(-size // stride)) ** 2
    work = conv_work(pixels=pixels, inputs=inputs, outputs=outputs, groups=groups, window=window, stride=stride)
    label = f"{inputs}->{outputs} {'x'.join(map(str, window))}/{stride} g{groups} @{size}"
    shape = [1, inputs, size, size]
    if inputs == outputs and stride == 1:

        def step(net: Net, x: str) -> str:
            return net.op("Relu", net.conv(x, inputs, outputs, window, stride, groups))

        return Sample(label, work, chain_us(shape, step, form="float"), chain_us(shape, step, form="planned"))
    net = Net(shape)
    x = net.op("Relu", net.conv("x", inputs, outputs, window, stride, groups))
    model, feed = net.model(net.op("Relu", net.conv(x, outputs, outputs, (1, 1)))), net.feed()
    with tempfile.TemporaryDirectory(prefix="kenosis-costs-") as folder:
        both = [profile(model.SerializeToString(), feed), profile(quantized(model, feed, Path(folder)), feed)]
    found = [[us for _, kind, us in ks if kind in ("Conv", "FusedConv", "QLinearConv")] for ks in both]
    return Sample(label, work, *(times[0] if len(times) == 2 else None for times in found))


def convs() -> Iterator[Sample]:
    """Convs of all classes."""
    for c in (8, 16, 24, 32, 64, 128, 256, 512):
        for size in (7, 14, 28, 56):
            if c * size * size <= 1 << 18:
                yield conv_sample(c, c, size, (1, 1))
    for c in (8, 16, 32, 64, 128, 256, 512):
        for size in (7, 14, 28, 56):
            if 9 * c * c * size * size < 2e8:
                yield conv_sample(c, c, size)
    for c, out, size, stride in ((32, 64, 56, 2), (64, 128, 28, 2), (128, 256, 14, 2)):
        yield conv_sample(c, out, size, (3, 3), stride)
        yield conv_sample(c, out, size, (1, 1), stride)
    for k in (3, 5):
        for c in (16, 24, 32, 64, 72, 96, 120, 128, 240, 512):
            for size in (7, 14, 28, 56, 112):
                if c * size * size <= 2.5e5:
                    yield conv_sample(c, c, size, (k, k), 1, c)
    for c, out, k, stride, size in (
        (3, 32, 3, 2, 224), (3, 16, 3, 2, 224), (3, 64, 7, 2, 224), (3, 24, 3, 1, 112), (3, 16, 3, 1, 32),
        (1, 64, 5, 1, 28), (3, 32, 3, 2, 112), (3, 64, 3, 1, 56), (12, 64, 3, 1, 112), (4, 32, 3, 1, 112),
    ):  # fmt: skip
        yield conv_sample(c, out, size, (k, k), stride)
    for c, groups, k in ((64, 4, 1), (128, 4, 1), (240, 3, 1), (480, 3, 1), (256, 32, 3), (128, 8, 3), (96, 12, 3)):
        for size in (14, 28):
            yield conv_sample(c, c, size, (k, k), 1, groups)


def linear_sample(lines: int, width: int, quantize_us: Callable[[int], float]) -> Sample:
    """A square Gemm, in integer with float output; what stands between the Gemms is taken off."""
    shape = [lines, width]

    def sigmoid(net: Net, x: str) -> str:
        return net.op("Sigmoid", x)

    def step(net: Net, x: str) -> str:
        weight = net.constant(net.rng.normal(0, width**-0.5, (width, width)))
        return sigmoid(net, net.op("Gemm", x, weight, net.constant(np.zeros(width))))

    between = chain_us(shape, sigmoid, form="float")
    in_float = chain_us(shape, step, form="float") - between
    in_integer = chain_us(shape, step, form="planned") - between - quantize_us(lines * width)
    work = linear_work(lines=lines, rows=width, columns=width)
    return Sample(f"{lines}x{width}x{width}", work, max(in_float, LEAST_US), max(in_integer, LEAST_US))


def linears() -> Iterator[Sample]:
    """Linear layers, of one line and of many."""
    price = fit(*zip(*((s.work, s.float_us or 0.0) for s in conversions() if s.work.shape_class == "quantize"),
                     strict=True))  # fmt: skip
    for width in (32, 64, 128, 256, 512, 1024):
        for lines in (1, 8, 64, 128):
            yield linear_sample(lines, width, lambda n: price.microseconds(Work("quantize", elements=n)))


def conversions() -> Iterator[Sample]:
    """Q and DQ around a node that has no integer kernel; the profile tells how they share the time."""
    for shape in ([1, 64], [8, 256], [1, 16, 14, 14], [1, 64, 28, 28], [1, 64, 56, 56]):
        size = int(np.prod(shape))

        def step(net: Net, x: str) -> str:
            return net.op("HardSwish", x)

        both = chain_us(shape, step, form="between") - chain_us(shape, step, form="float")
        net = Net(shape)
        kernels = profile(net.model(step(net, net.between("x"))).SerializeToString(), net.feed())
        q, dq = (middle(kernels, (kind,)) or 0.0 for kind in ("QuantizeLinear", "DequantizeLinear"))
        share = q / (q + dq)
        for name, part in (("quantize", share), ("dequantize", 1 - share)):
            us = max(both * part, LEAST_US)
            yield Sample(f"{name} {shape}", Work(name, elements=size), us, us)


def layouts() -> Iterator[Sample]:
    """The changes of layout at the ends of a Conv: quantized, to channels last; float, to blocks of channels."""
    for c, size in ((32, 14), (32, 28), (64, 28), (64, 56)):
        net = Net([1, c, size, size])
        y = net.op("Relu", net.conv("x", c, c, (3, 3)))
        model, feed = net.model(y), net.feed()
        with tempfile.TemporaryDirectory(prefix="kenosis-costs-") as folder:
            found = {
                "channels-last": middle(profile(quantized(model, feed, Path(folder)), feed), ("Transpose",)),
                "blocked": middle(profile(model.SerializeToString(), feed), ("ReorderInput", "ReorderOutput")),
            }
        for name, us in found.items():
            yield Sample(f"{name} {c}x{size}", Work(name, elements=c * size * size), us, us)


def chained(name: str, step: Step, shape: Sequence[int], *, integer: bool = False) -> Sample:
    """An elementwise node behind itself."""
    found = chain_us(shape, step, form="between") if integer else None
    work = Work(name, elements=int(np.prod(shape)))
    return Sample(f"{name} {list(shape)}", work, chain_us(shape, step, form="float"), found)


def alone(name: str, step: Step, shape: Sequence[int], work: Work, *, integer: bool) -> Sample:
    """One node between the graph's ends, and where it has an integer kernel between DQ and Q, by the profile."""
    times: list[float | None] = []
    for form in ("float", "between"):
        net = Net(shape)
        y = step(net, "x") if form == "float" else net.between(step(net, net.between("x")))
        kernels = profile(net.model(y).SerializeToString(), net.feed())
        own = [us for _, kind, us in kernels if not kind.startswith(("Quantize", "Dequantize", "Reorder"))]
        times.append(sum(own) if own and (form == "float" or integer) else None)
    return Sample(f"{name} {list(shape)}", work, times[0], times[1])


def between_convs(name: str, step: Step, kinds: Sequence[str], shape: Sequence[int], work: Work) -> Sample:
    """One node between pointwise Convs, where it meets the layouts of a whole net; ``kinds`` are its kernels."""
    net = Net(shape)
    channels = shape[1]
    inner = step(net, net.op("Relu", net.conv("x", channels, channels, (1, 1))))
    model, feed = net.model(net.op("Relu", net.conv(inner, channels, channels, (1, 1)))), net.feed()
    with tempfile.TemporaryDirectory(prefix="kenosis-costs-") as folder:
        both = [profile(model.SerializeToString(), feed), profile(quantized(model, feed, Path(folder)), feed)]
    found = [middle(kernels, kinds) for kernels in both]
    return Sample(f"{name} {list(shape)}", work, found[0], found[1])


def matmul_sample(heads: int, tokens: int, depth: int) -> Sample:
    """A product of two activations, which stays float."""
    net = Net([1, heads, tokens, depth])
    y = net.op("MatMul", "x", net.op("Transpose", "x", perm=[0, 1, 3, 2]))
    macs = heads * tokens * tokens * depth
    found = middle(profile(net.model(y).SerializeToString(), net.feed()), ("MatMul", "FusedMatMul"))
    return Sample(f"{heads}x{tokens}x{depth}", Work("matmul", macs, macs, heads * tokens * tokens), found, None)


def simples() -> Iterator[Sample]:
    """Everything that is no Conv, no linear layer and no border."""

    def unary(kind: str, domain: str = "", **attributes: Any) -> Step:
        return lambda net, x: net.op(kind, x, domain=domain, **attributes)

    def twice(kind: str, **attributes: Any) -> Step:
        return lambda net, x: net.op(kind, x, x, **attributes)

    def norm(kind: str, count: int, axis: int) -> Step:
        return lambda net, x: net.op(kind, x, *(net.constant(np.ones(net.shape[axis])) for _ in range(count)))

    def resize(net: Net, x: str) -> str:
        scales = net.constant([1, 1, 2, 2])
        return net.op("Resize", x, "", scales, mode="nearest", coordinate_transformation_mode="asymmetric",
                      nearest_mode="floor")  # fmt: skip

    pool = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
    for shape in ([1, 16, 7, 7], [1, 16, 14, 14], [1, 64, 28, 28], [1, 64, 56, 56]):
        size = int(np.prod(shape))
        for name, step, integer in (
            ("add", twice("Add"), True), ("mul", twice("Mul"), True), ("leaky-relu", unary("LeakyRelu"), True),
            ("sigmoid", unary("Sigmoid"), True), ("hard-sigmoid", unary("HardSwish"), False),
            ("batch-norm", norm("BatchNormalization", 4, 1), False),
        ):  # fmt: skip
            yield chained(name, step, shape, integer=integer)
        yield alone("clip", unary("Relu"), shape, Work("clip", elements=size), integer=False)
        yield alone("concat", twice("Concat", axis=1), shape, Work("concat", elements=2 * size), integer=True)
        yield alone("resize", resize, shape, Work("resize", elements=4 * size), integer=True)
        order = unary("Transpose", perm=[0, 2, 3, 1])
        yield alone("transpose", order, shape, Work("transpose", elements=size), integer=True)
        out = size // 4
        yield alone("average-pool", unary("AveragePool", **pool), shape, Work("average-pool", 0, 9 * out, out),
                    integer=False)  # fmt: skip
        yield between_convs("max-pool", unary("MaxPool", **pool), ("MaxPool", "NhwcMaxPool"), shape,
                            Work("max-pool", 0, 9 * out, out))  # fmt: skip
        kinds = ("GlobalAveragePool", "QLinearGlobalAveragePool")
        yield between_convs("global-pool", unary("GlobalAveragePool"), kinds, shape, Work("global-pool", elements=size))
    for shape in ([1, 16, 64], [1, 128, 256], [1, 197, 768]):
        yield chained("softmax", unary("Softmax", axis=-1), shape)
        yield chained("norm", norm("LayerNormalization", 2, -1), shape)
        yield chained("erf", unary("Gelu", "com.microsoft"), shape)
    for heads, tokens, depth in ((4, 32, 32), (4, 128, 64), (3, 197, 64), (12, 128, 64), (8, 64, 16), (4, 64, 256)):
        yield matmul_sample(heads, tokens, depth)


def borders() -> Iterator[Sample]:
    """What stands between float and integer."""
    yield from conversions()
    yield from layouts()


GROUPS: dict[str, Callable[[], Iterator[Sample]]] = {
    "conv": convs, "linear": linears, "simple": simples, "border": borders
}  # fmt: skip


# ---- the fit ------------------------------------------------------------------------------------------------------


def fit(works: Sequence[Work], times: Sequence[float]) -> KernelCost:
    """Fits coefficients, none below zero, to times in microseconds; each counts by its own size."""
    columns = np.array([[1e-3, w.products * 1e-6, w.elements * 1e-6, w.pieces * 1e-6] for w in works])
    wanted = np.asarray(times)
    weights = 1 / np.maximum(wanted, 0.5)
    matrix, right = columns * weights[:, None], wanted * weights
    scale = np.maximum(np.linalg.norm(matrix, axis=0), 1e-12)
    matrix = matrix / scale
    solution = np.zeros(4)
    gram, target = matrix.T @ matrix, matrix.T @ right
    for _ in range(20_000):  # coordinate descent: convex, so it ends at the non-negative optimum
        for i in range(4):
            if gram[i, i] > 1e-9:
                solution[i] = max(0.0, solution[i] + (target[i] - gram[i] @ solution) / gram[i, i])
    fixed, product, element, piece = solution / scale
    rounded = (float(f"{value:.3g}") if value > 1e-3 else 0.0 for value in (product, element, piece))
    return KernelCost(max(round(fixed, -1), 100.0), *rounded)


def fits(samples: Sequence[Sample]) -> dict[str, tuple[KernelCost | None, KernelCost | None]]:
    """Fits each class in both forms."""
    out = {}
    for name in dict.fromkeys(s.work.shape_class for s in samples):
        mine = [s for s in samples if s.work.shape_class == name]
        forms = []
        for form in ("float_us", "integer_us"):
            known = [(s.work, us) for s in mine if (us := getattr(s, form)) is not None]
            forms.append(fit([w for w, _ in known], [us for _, us in known]) if known else None)
        out[name] = (forms[0], forms[1])
    return out


def show(samples: Sequence[Sample], fitted: dict[str, tuple[KernelCost | None, KernelCost | None]]) -> None:
    """Prints every measurement with its fitted time."""
    for s in samples:
        cells = []
        for us, cost in zip((s.float_us, s.integer_us), fitted[s.work.shape_class], strict=True):
            if us is None or cost is None:
                cells.append(f"{'-':>24s}")
            else:
                cells.append(f"{us:8.2f} fit {cost.microseconds(s.work):8.2f} us")
        ratio = f"{s.float_us / s.integer_us:5.2f}x" if s.float_us and s.integer_us else ""
        print(f"{s.work.shape_class:18s} {s.label:26s} float {cells[0]}  int8 {cells[1]}  {ratio}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), default=list(GROUPS), help="what to measure")
    parser.add_argument("--target", choices=("ort-cpu", "ort-web"), default="ort-cpu", help="whose runtime is timed")
    parser.add_argument("--cases", action="store_true", help="print every measurement too")
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    args = parser.parse_args(argv)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    TARGET[0] = args.target
    run = calibrate()
    samples = [sample for name in args.only for sample in GROUPS[name]()]
    fitted = fits(samples)
    if args.cases:
        show(samples, fitted)
    print(f"# {machine().cpu}; a run besides its kernels: {run:.1f} us")
    for name, costs in fitted.items():  # as a host profile has them
        forms = zip(("float", "integer"), costs, strict=True)
        print(f'"{name}":', json.dumps({form: None if cost is None else asdict(cost) for form, cost in forms}))
    if args.json:
        rows = [{"class": s.work.shape_class, "label": s.label, "work": vars(s.work), "float_us": s.float_us,
                 "integer_us": s.integer_us} for s in samples]  # fmt: skip
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
