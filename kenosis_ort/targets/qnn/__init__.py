"""Target ``qnn``: Qualcomm's HTP, by ONNX Runtime's QNN provider.

`rules` is the table, `runtime` asks the provider in a process of its own, `proof` reads what it says. The accuracy
passes are evaluated on ONNX Runtime's CPU provider, which computes the same integers but for roundings, in a hundredth
of the simulator's time.
"""

from __future__ import annotations

from typing import Final

from onnx import TensorProto

from kenosis_ort.targets.model import DataTypes, Target
from kenosis_ort.targets.qnn.htp_proof import prove
from kenosis_ort.targets.qnn.htp_rules import FACTS, RULES
from kenosis_ort.targets.qnn.qnn_runtime import missing

_WHY_NOT: Final = missing()

QNN: Final = Target(
    name="qnn",
    rules=RULES,
    absorbs=("Relu", "Clip"),
    clamps=("Relu", "Clip"),
    output_q_needed=("Conv", "ConvTranspose", "Gemm", "MatMul"),
    float_output=(),
    whole=True,
    static_shapes=True,
    concat_share_limit=1.0,
    head_float_share=0.0,
    types=DataTypes(
        activation=TensorProto.UINT8,
        weight=TensorProto.INT8,
        activations=(TensorProto.UINT8, TensorProto.UINT16),
        mixed=True,
        only_these=True,
        why="HTP takes uint8 or uint16 activations, int8 weights by channel or uint8 ones",
    ),
    float_forms=(
        *("collapse_clip", "collapse_gelu", "collapse_hard_swish", "fold_scale", "collapse_layer_norm"),
        *("collapse_affine_norm", "split_skip_norm", "pool_from_mean"),
    ),
    kernel_forms=(),
    min_opset=20,  # Gelu
    facts=FACTS,
    why_unasked=_WHY_NOT or "the simulator of HTP tells no times",
    prove=None if _WHY_NOT else prove,
)

__all__ = ["QNN"]
