"""Every pass with a net that it improves and one that it leaves as it is, with the reason."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnxruntime.quantization import QuantType

from kenosis_ort import Recipe
from tests import models
from tests.flow.support import changed
from tests.flow.test_recipes import sentences, t5
from tests.models import Feed, Net

OFF: Mapping[str, Any] = {
    "ranges": "minmax", "row_scales": False, "equalize": False, "smooth": "off", "bias_correction": False
}  # fmt: skip
"""Settings of a recipe without any pass."""


IMAGE, SMALL, TOKENS = (1, 3, 8, 8), (1, 4, 8, 8), (1, 10, 32)


@dataclass(frozen=True)
class Example:
    """A net, its samples, and what a pass makes of it.

    Attributes:
        settings: Fields of the recipe that ask for the pass.
        net: The float model.
        samples: Its calibration samples.
        says: What its report says, a pattern.
        options: Further options of the call.
    """

    settings: Mapping[str, Any]
    net: Callable[[], onnx.ModelProto]
    samples: Callable[[], list[Feed]]
    says: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def recipe(self) -> Recipe:
        """The recipe with this pass alone."""
        return Recipe(**{**OFF, **self.settings})


def uneven(op: str = "Relu") -> onnx.ModelProto:
    """Two Convs with channels of very different size between them."""
    net, scale = Net(seed=1), 10.0 ** np.linspace(-2, 1, 8)
    y = net.op(op, [net.conv(net.input("x", [1, 3, 8, 8]), 3, 8, name="first")], name="between")
    model = net.of(net.conv(y, 8, 8, name="second"))
    return changed(model, first_w=scale.reshape(8, 1, 1, 1), first_b=scale, second_w=1 / scale.reshape(1, 8, 1, 1))


def normalized(outliers: float) -> onnx.ModelProto:
    """Linear layers behind a normalization, some of whose channels are so many times larger."""
    net, width = Net(seed=2), 32
    gamma = np.ones(width)
    gamma[::11] = outliers
    y = net.input("x", [1, 10, width])
    y = net.op("LayerNormalization", [y, net.const(gamma), net.const(np.zeros(width))], name="norm", axis=-1)
    y = net.op("Relu", [net.linear(y, width, width, name="fc0")], name="relu")
    return net.of(net.linear(y, width, 8, name="fc1"))


def coarse(depth: int = 3) -> onnx.ModelProto:
    """Convs of one scale of weights each, whose rounding moves what comes out."""
    net = Net(seed=3)
    y = net.input("x", [1, 4, 8, 8])
    for at in range(depth):
        y = net.op("Relu", [net.conv(y, 4, 4, name=f"conv{at}")], name=f"relu{at}")
    return net.of(net.conv(y, 4, 4, name="last"))


def whole() -> onnx.ModelProto:
    """A layer whose weights and inputs are whole numbers, so that integers compute it exactly."""
    net = Net(seed=4)
    weights = net.rng.integers(-127, 128, (16, 8)).astype(np.float32)
    weights[0] = 127.0
    return net.of(net.op("MatMul", [net.input("x", [4, 16]), net.const(weights)], name="exact"))


def integers() -> list[Feed]:
    """Samples of whole numbers from 0 to 255, both of which each one holds."""
    found = np.random.default_rng(0).integers(0, 256, (16, 4, 16)).astype(np.float32)
    found[:, 0, :2] = 0.0, 255.0
    return [{"x": x} for x in found]


def normal(shape: tuple[int, ...]) -> Callable[[], list[Feed]]:
    """Normally distributed samples."""
    return lambda: [{"x": models.normal(shape, seed)} for seed in range(16)]


def with_tails() -> list[Feed]:
    """Samples few of whose numbers are much larger than the others."""
    rng = np.random.default_rng(0)
    return [{"x": rng.standard_t(5, IMAGE).astype(np.float32)} for _ in range(32)]


EXAMPLES: Mapping[str, Example] = {
    "row_scales": Example({"row_scales": True}, t5, lambda: sentences(16), "layers behind"),
    "equalize": Example({"equalize": True}, uneven, normal(IMAGE), "1 places"),
    "smooth": Example({"smooth": "auto"}, lambda: normalized(40.0), normal(TOKENS), "2 places"),
    "bias_correction": Example({"bias_correction": True}, coarse, normal(SMALL)),
    "ranges": Example({"ranges": "auto"}, models.mobile_block, with_tails, "mse ranges"),
    "rounding": Example({"rounding": "learned"}, coarse, normal(SMALL)),
    "mixed_precision": Example(
        {"mixed_precision": True, "accuracy_budget": 1e-5, "max_float_share": 0.9}, coarse, normal(SMALL), "Left float"
    ),
}
"""What each pass improves, by its name."""

NEAR_MISSES: Mapping[str, Example] = {
    "row_scales": Example({"row_scales": True}, lambda: normalized(1.0), normal(TOKENS), "one range serves all rows"),
    "equalize": Example({"equalize": True}, lambda: uneven("Sigmoid"), normal(IMAGE), "nothing to gain"),
    "smooth": Example({"smooth": "auto"}, coarse, normal(SMALL), "nothing to gain"),
    "bias_correction": Example({"bias_correction": True}, whole, integers, "does not fall"),
    "ranges": Example({"ranges": "auto"}, whole, integers, "no other estimator is better"),
    "rounding": Example(
        {"rounding": "learned"}, coarse, normal(SMALL), "does not fall", {"weight_type": QuantType.QUInt8}
    ),
    "mixed_precision": Example(
        {"mixed_precision": True, "accuracy_budget": 0.9}, coarse, normal(SMALL), "the budget holds without"
    ),
}
"""What each pass leaves as it is."""
