"""Ranges that follow from others hold what the runtime computes."""

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.clients.quantizer import with_derived
from tests import models, planning
from tests.flow.support import run

# Each takes the value named "{0}" of shape (1, 4, 4, 4) to one of the same shape.
STEPS = {
    "Relu": "Relu ({0})",
    "Clip": "Clip ({0}, low, high)",
    "Clip above": "Clip ({0}, , high)",
    "Transpose": "Transpose <perm = [0, 2, 3, 1]> ({0})",
    "Identity": "Identity ({0})",
    "MaxPool": "MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> ({0})",
    "AveragePool": "AveragePool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> ({0})",
    "Reshape": "Reshape ({0}, shape)",
}
CONSTANTS = {
    "low": np.float32(-0.5),
    "high": np.float32(1),
    "beyond": np.float32(-9),
    "shape": np.array([1, 4, 4, 4]),
    "pads": np.array([0, 1, 0, 0, 0, 0, 0, 0]),
    "extra": np.full((1, 1, 4, 4), 7, np.float32),
}


def net(steps: list[str], *last: str) -> onnx.ModelProto:
    lines = [f"v{i + 1} = {STEPS[s].format(f'v{i}')}" for i, s in enumerate(steps)]
    lines += [f"w{i} = {text.format(f'v{len(steps)}')}" for i, text in enumerate(last)]
    names = [f"v{i + 1}" for i in range(len(steps))] + [f"w{i}" for i in range(len(last))]
    text = f"(float[1,4,4,4] v0) => ({', '.join(names)}) {{ {chr(10).join(lines)} }}"
    return planning.parse(text, CONSTANTS, checked=False)


@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=6), st.integers(0, 2**16))
def test_derived_ranges_hold_what_is_computed(steps: list[str], seed: int) -> None:
    model = net(steps, "Pad ({0}, pads)", "Pad ({0}, pads, beyond)", "Concat <axis = 1> ({0}, extra)")
    x = models.normal((1, 4, 4, 4), seed, 2)
    found = with_derived(model, {"v0": (float(x.min()), float(x.max()))})
    for name, array in zip((o.name for o in model.graph.output), run(model, [{"v0": x}])[0], strict=True):
        low, high = np.nextafter(np.float32(found[name]), np.float32([-9e9, 9e9]))
        assert low <= array.min() <= array.max() <= high, name


ENDS = "Pad ({0}, pads, beyond)", "Concat <axis = 1> ({0}, extra)"


@pytest.mark.parametrize(("model", "known", "more"), [
    (net(["Relu", "Clip"], *ENDS), {"v0": (-3, 2)}, {"v1": (0, 2), "v2": (0, 1), "w0": (-9, 1), "w1": (0, 7)}),
    (net(["Relu", "Reshape", "Transpose", "MaxPool"]), {"v3": (0, 2)}, dict.fromkeys(("v1", "v2", "v4"), (0, 2))),
    (net(["Relu", "Identity"]), {"v0": (-1, 1), "v1": (0, 9), "v2": (0, 5)}, {}),
    *((net([], text), {"v0": (0, 1)}, {}) for text in ("Sigmoid ({0})", "Concat <axis = 1> ({0}, no)", "Exp ({0})")),
], ids=["ends", "moved", "known", "sigmoid", "unknown", "exp"])  # fmt: skip
def test_the_ends_are_those_of_the_operator_and_nothing_is_made_up(model: Any, known: Any, more: Any) -> None:
    assert with_derived(model, known) == {**known, **more}
