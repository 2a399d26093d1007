"""The two kernels of QLinearConv by shape: which is faster on this machine, and that both compute the same bits.

ONNX Runtime's QLinearConv takes its direct kernel where all weights have zero point 0, and im2col with the 8-bit matrix
product where they have another one. Weights stored one lower with zero point -1 are the same weights. For each shape a
Conv between Q and DQ is built both ways; what it prints is products per second of each, their ratio, what a host
profile chooses, and whether the outputs are equal bit for bit.

    python benchmarks/conv_paths.py            # about two minutes
    python benchmarks/conv_paths.py --host amx

Times are the least processor time of a run over interleaved rounds, so that other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator

import numpy as np
import onnxruntime as ort
from _session import session
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort.flow.target_options import profile_for
from kenosis_ort.options import Speed
from kenosis_ort.targets import get_target
from kenosis_ort.targets.ort_cpu.work import CLEAR, conv_work
from kenosis_ort.targets.profile import CostTable

SHAPES = [
    *itertools.product([1], [56, 28, 14, 7], [64, 128, 192, 256, 512, 1024], [64, 128, 256, 512]),
    *itertools.product([3], [56, 28, 14, 7], [16, 32, 48, 64, 128, 256], [16, 32, 64, 128, 256]),
    *itertools.product([5], [28, 14], [16, 32, 64], [32, 64, 128]),
    *itertools.product([7], [56], [4, 16], [32, 64]),
]
MOST_PRODUCTS = 4e8


def conv(window: int, size: int, inputs: int, outputs: int, zero_point: int, stride: int = 1) -> bytes:
    """Returns a quantized Conv whose weights are stored with the zero point."""
    rng = np.random.default_rng(window * size + inputs + outputs)
    weight = rng.integers(-126, 127, (outputs, inputs, window, window)) + zero_point
    scale = rng.uniform(1e-4, 1e-3, outputs).astype(np.float32)
    pad = window // 2
    held = {
        "s": np.float32(0.05),
        "z": np.uint8(110),
        "w": weight.astype(np.int8),
        "ws": scale,
        "wz": np.full(outputs, zero_point, np.int8),
        "os": np.float32(float(scale.mean()) * 0.05 * 60 * np.sqrt(inputs * window * window)),
        "b": rng.integers(-999, 999, outputs).astype(np.int32),
    }
    nodes = [
        helper.make_node("QLinearConv", ["x", "s", "z", "w", "ws", "wz", "os", "z", "b"], ["y"], pads=[pad] * 4,
                         strides=[stride] * 2),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes,
        "conv",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, [1, inputs, size, size])],
        [helper.make_tensor_value_info("y", TensorProto.UINT8, None)],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in held.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


def least_seconds(runners: list[ort.InferenceSession], feed: dict[str, np.ndarray], budget: float) -> list[float]:
    """Returns the least processor time of a run of each, interleaved."""
    least = [float("inf")] * len(runners)
    end = time.perf_counter() + budget
    while time.perf_counter() < end:
        for i, runner in enumerate(runners):
            start = time.thread_time()
            runner.run(None, feed)
            least[i] = min(least[i], time.thread_time() - start)
    return least


def costs_of(host: str | None) -> CostTable:
    """Returns the costs on a machine, None for this one."""
    target = get_target("ort-cpu")
    profile = profile_for(target, Speed(host=host))
    assert target.costs is not None
    assert profile is not None
    return profile.table(target.costs)


def rows(costs: CostTable, budget: float) -> Iterator[tuple[str, float, float, float, bool, bool]]:
    """Yields label, products per second by each kernel, their ratio, the table's choice, and whether bits are equal."""
    for window, size, inputs, outputs in SHAPES:
        products = window * window * size * size * inputs * outputs
        if products > MOST_PRODUCTS:
            continue
        runners = [session(conv(window, size, inputs, outputs, zero)) for zero in (0, -1)]
        x = np.random.default_rng(0).integers(0, 255, (1, inputs, size, size)).astype(np.uint8)
        same = np.array_equal(*(r.run(None, {"x": x})[0] for r in runners))
        direct, product = least_seconds(runners, {"x": x}, budget)
        work = conv_work(pixels=size * size, inputs=inputs, outputs=outputs, window=(window, window))
        chosen = (costs.shifted_us(work) or np.inf) * CLEAR < (costs.integer_us(work) or 0.0)
        label = f"{window}x{window} @{size} {inputs}->{outputs}"
        yield label, products / direct / 1e9, products / product / 1e9, direct / product, chosen, same


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.3, help="a shape (default %(default)s)")
    parser.add_argument("--host", help="whose choice to print: a profile's name or file (default: this machine's)")
    arguments = parser.parse_args()
    costs = costs_of(arguments.host)
    print(f"{'Conv':<24} {'direct':>9} {'product':>9} {'ratio':>6}  {costs.profile.name:<8} bits")
    gained = lost = 0.0
    count = 0
    for label, direct, product, ratio, chosen, same in rows(costs, arguments.seconds):
        mark = "product" if chosen else "direct"
        bits = "equal" if same else "DIFFER"
        print(f"{label:<24} {direct:7.0f} G {product:7.0f} G {ratio:6.2f}  {mark:<8} {bits}", flush=True)
        best = max(ratio, 1.0)
        got = ratio if chosen else 1.0
        gained += np.log(got)
        lost += np.log(best / got)
        count += 1
    print(f"{costs.profile.name}: {np.exp(gained / count):.3f}x of the direct kernel")
    print(f"the best choice for each shape would be {np.exp(lost / count):.3f}x of that")


if __name__ == "__main__":
    main()
