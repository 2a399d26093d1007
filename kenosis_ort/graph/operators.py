"""The operator schema: what each operator is, in one table that rewrites, passes, placement and calibration read.

Operators go by the names of `known_as`: one of a custom domain may be anything, and is nothing here.
Source: the operator specifications of ONNX and of ONNX Runtime's own domain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Flag, auto
from typing import Final

import onnx

from kenosis_ort.graph.walk import known_as


class Is(Flag):
    """What an operator is; most are several things."""

    LAYER = auto()
    """Multiplies its first input by weights and sums up."""
    HEAVY = auto()
    """A layer that takes nearly all of a net's time and has integer kernels."""
    FUSED = auto()
    """A layer as the runtime writes it with an activation in it."""
    INTEGER = auto()
    """A layer that multiplies integers, as quantized operators do."""
    RECURRENT = auto()
    """Runs layers of its own step by step."""
    ACTIVATION = auto()
    """A fixed function of each single number of its first input."""
    ELEMENTWISE = auto()
    """Each number of the output stems from the numbers at the same place of the inputs."""
    HOMOGENEOUS = auto()
    """A positive factor on its first input is a factor on its output."""
    POOL = auto()
    """Each channel of a picture or signal on its own, over a window or all of it."""
    REDUCTION = auto()
    """Takes axes together."""
    MOVE = auto()
    """The output holds the very numbers of the first input, each once, in another order or shape."""
    FREE = auto()
    """No number is touched: the runtime shares the buffer, or drops the node."""
    PICK = auto()
    """The outputs stay within the least and the largest number of the first input."""
    SHAPE = auto()
    """Reads shapes alone."""


_EVERY: Final = Is.ELEMENTWISE | Is.ACTIVATION
_COPY: Final = Is.ELEMENTWISE | Is.HOMOGENEOUS | Is.MOVE | Is.FREE
_RESHAPE: Final = Is.HOMOGENEOUS | Is.MOVE | Is.FREE
_WINDOW: Final = Is.POOL | Is.PICK | Is.HOMOGENEOUS

_ROWS: Final[tuple[tuple[Is, str], ...]] = (
    (Is.LAYER | Is.HEAVY, "Conv Gemm MatMul"),
    (Is.LAYER, "ConvTranspose"),
    (Is.LAYER | Is.HEAVY | Is.FUSED, "FusedConv FusedGemm FusedMatMul"),
    (Is.LAYER | Is.HEAVY | Is.INTEGER, "QLinearConv QLinearMatMul QGemm MatMulIntegerToFloat"),
    (Is.LAYER | Is.HEAVY | Is.INTEGER, "ConvInteger MatMulInteger"),
    (Is.RECURRENT, "LSTM GRU RNN"),
    (_EVERY | Is.HOMOGENEOUS, "Relu LeakyRelu PRelu"),
    (_EVERY, "Clip Elu Selu Celu ThresholdedRelu Sigmoid HardSigmoid Tanh HardSwish Softplus Softsign Mish Swish"),
    (_EVERY, "Gelu FastGelu QuickGelu"),
    (Is.ELEMENTWISE, "Add Sub Mul Div Max Min Mean Sum Pow"),
    (Is.ELEMENTWISE | Is.HOMOGENEOUS, "Abs Neg"),
    (Is.ELEMENTWISE, "Erf Exp Reciprocal Sqrt"),
    (_COPY, "Identity Dropout"),
    (_RESHAPE, "Reshape Flatten Squeeze Unsqueeze"),
    (Is.HOMOGENEOUS | Is.MOVE, "Transpose DepthToSpace SpaceToDepth"),
    (Is.HOMOGENEOUS | Is.PICK, "Slice Gather Expand Split Tile"),
    (_WINDOW, "MaxPool AveragePool GlobalMaxPool GlobalAveragePool"),
    (Is.HOMOGENEOUS | Is.REDUCTION | Is.PICK, "ReduceMean ReduceMax ReduceMin"),
    (Is.HOMOGENEOUS | Is.REDUCTION, "ReduceSum"),
    (Is.SHAPE, "Shape Size"),
)

OPERATORS: Final[Mapping[str, Is]] = {name: what for what, names in _ROWS for name in names.split()}
"""What each operator is; one that is not listed is nothing of this."""

BOUNDS: Final[Mapping[str, tuple[float, float]]] = {
    **dict.fromkeys(("Sigmoid", "HardSigmoid", "Softmax"), (0.0, 1.0)),
    **dict.fromkeys(("Tanh", "Erf", "Softsign", "Sin", "Cos"), (-1.0, 1.0)),
    **dict.fromkeys(("Relu", "Softplus", "Exp", "Abs", "Sqrt"), (0.0, math.inf)),
    "LogSoftmax": (-math.inf, 0.0),
}
"""What the output of a function cannot exceed, whatever it is given."""


def what(node: onnx.NodeProto) -> Is:
    """Properties of a node's operator; ``Is(0)``, which is false, for one that is not listed."""
    return OPERATORS.get(known_as(node.domain, node.op_type), Is(0))


def having(wanted: Is) -> frozenset[str]:
    """The names of the operators that are all of what is wanted."""
    return frozenset(name for name, found in OPERATORS.items() if wanted in found)


LAYERS: Final = having(Is.LAYER) - having(Is.FUSED) - having(Is.INTEGER)
"""Conv, ConvTranspose, Gemm, MatMul."""
HEAVY: Final = having(Is.HEAVY) - having(Is.FUSED) - having(Is.INTEGER)
"""Conv, Gemm, MatMul."""
