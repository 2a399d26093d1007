"""The two kernels of an integer Conv compute the same bits: which one runs is a matter of speed alone.

ONNX Runtime's QLinearConv multiplies directly where all weights have zero point 0 and by im2col and the 8-bit matrix
product where they have another one. Weights stored one lower with zero point -1 are the same weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort.targets.ort_cpu.work import has_direct_kernel
from tests.processor import LARGEST_WEIGHT

PLAIN = [(4, 16), (16, 20), (64, 64), (12, 72), (3, 16), (7, 5), (1, 1), (8, 130)]
"""Channels read and written: by fours and more than fifteen, which the direct kernel asks for, and others."""
INTEGERS = {np.uint8: TensorProto.UINT8, np.int8: TensorProto.INT8}


@st.composite
def convs(draw: st.DrawFn) -> dict[str, Any]:
    """A Conv of one or two axes, in one of the kernels' classes: plain, depthwise, grouped, of odd channels."""
    axes = draw(st.sampled_from([1, 2, 2]))
    window = [draw(st.integers(1, 5)) for _ in range(axes)]
    dilations = [draw(st.integers(1, 2)) for _ in range(axes)]
    pads = [draw(st.integers(0, 3)) for _ in range(2 * axes)]
    size = [draw(st.integers(1, 13)) for _ in range(axes)]
    for i in range(axes):
        assume(size[i] + pads[i] + pads[i + axes] >= (window[i] - 1) * dilations[i] + 1)
    groups, read, written = draw(
        st.sampled_from(
            [
                *((1, read, written) for read, written in PLAIN),
                (16, 1, 1),
                (48, 1, 1),
                (10, 1, 1),
                (4, 1, 2),
                (2, 8, 16),
            ]
        )
    )
    return {
        "axes": axes, "window": window, "dilations": dilations, "pads": pads, "size": size, "groups": groups,
        "read": read, "written": written, "strides": [draw(st.integers(1, 3)) for _ in range(axes)],
        "batch": draw(st.integers(1, 2)), "signed": draw(st.booleans()), "per_channel": draw(st.booleans()),
        "bias": draw(st.booleans()), "seed": draw(st.integers(0, 2**16)),
        "zero": draw(st.sampled_from([0, 1, 110, 128, 254, 255])),
        "out_zero": draw(st.sampled_from([0, 77, 128, 255])),
    }  # fmt: skip


def output(c: dict[str, Any], zero_point: int) -> Any:
    """Runs the Conv with weights that are stored with a zero point."""
    rng = np.random.default_rng(c["seed"])
    kind = np.int8 if c["signed"] else np.uint8
    shift = 128 if c["signed"] else 0
    outputs, inputs = c["written"] * c["groups"], c["read"] * c["groups"]
    weights = rng.integers(-LARGEST_WEIGHT, LARGEST_WEIGHT + 1, (outputs, c["read"], *c["window"])) + zero_point
    scales = rng.uniform(1e-4, 1e-2, outputs if c["per_channel"] else 1).astype(np.float32)
    steps = np.sqrt(c["read"] * np.prod(c["window"])) * float(scales.mean()) * 30
    held = {
        "xs": np.float32(0.04),
        "xz": kind(c["zero"] - shift),
        "w": weights.astype(np.int8),
        "ws": scales if c["per_channel"] else scales[0],
        "wz": np.full(scales.shape if c["per_channel"] else (), zero_point, np.int8),
        "ys": np.float32(0.04 * steps),
        "yz": kind(c["out_zero"] - shift),
        **({"b": rng.integers(-5000, 5000, outputs).astype(np.int32)} if c["bias"] else {}),
    }
    how = {name: c[name] for name in ("strides", "pads", "dilations")} | {"group": c["groups"]}
    node = helper.make_node("QLinearConv", ["x", *held], ["y"], kernel_shape=c["window"], **how)
    x = helper.make_tensor_value_info("x", INTEGERS[kind], [c["batch"], inputs, *c["size"]])
    y = helper.make_tensor_value_info("y", INTEGERS[kind], None)
    stored = [numpy_helper.from_array(np.asarray(value), name) for name, value in held.items()]
    graph = helper.make_graph([node], "conv", [x], [y], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    data = rng.integers(0, 256, (c["batch"], inputs, *c["size"])) - shift
    return session.run(None, {"x": data.astype(kind)})[0]


@given(convs())
def test_both_kernels_compute_the_same_bits(c: dict[str, Any]) -> None:
    direct, product = output(c, 0), output(c, -1)
    assert direct.dtype == product.dtype
    assert np.array_equal(direct, product)


@pytest.mark.parametrize(("inputs", "outputs", "groups", "direct"), [
    (4, 16, 1, True), (64, 64, 1, True), (64, 20, 1, True), (3, 16, 1, False), (64, 12, 1, False), (64, 18, 1, False),
    (6, 32, 1, False), (16, 16, 16, True), (48, 48, 48, True), (24, 24, 24, False), (64, 64, 2, False),
    (16, 32, 16, False),
])  # fmt: skip
def test_which_convs_have_the_direct_kernel(inputs: int, outputs: int, groups: int, direct: bool) -> None:
    assert has_direct_kernel(inputs, outputs, groups) is direct
