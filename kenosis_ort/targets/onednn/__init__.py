"""Target ``onednn``: OpenVINO's CPU plugin, and ONNX Runtime's OpenVINO provider, whose kernels are oneDNN's.

`rules` is the table, `anchors` and `apart` what else suits its kernels; `patterns` is what oneDNN's guide says
of quantized Convolutions, `conformance` holds models against it; `openvino_proof` asks OpenVINO and reads what it says.
"""

from functools import partial
from typing import Final

from onnx import TensorProto

from kenosis_ort.graph.product_pairs import INT16_SUM
from kenosis_ort.targets.model import DataTypes, Hooks, Target, TimedRuntime
from kenosis_ort.targets.onednn import openvino_rules as rules
from kenosis_ort.targets.onednn.conformance import conform
from kenosis_ort.targets.onednn.openvino_proof import missing, open_runner, prove
from kenosis_ort.targets.prefix import leave_prefix_float

_WHY_NOT: Final = missing()

ONEDNN: Final = Target(
    name="onednn",
    rules=rules.RULES,
    absorbs=rules.EPILOGUE,
    gates=rules.GATES,
    constant_steps=rules.CONSTANT_STEPS,
    longest_epilogue=4,
    residual="both",
    float_output=("Conv", "Gemm", "MatMul"),
    bias="float",
    types=DataTypes(
        activation=TensorProto.UINT8,
        weight=TensorProto.INT8,
        weights=(TensorProto.INT8,),
        only_these=True,
        largest_pair=INT16_SUM,
        even_channels=True,
        why="uint8 activations, int8 weights by channel, whose products cannot clip: what oneDNN's kernels take",
    ),
    float_forms=(
        *("collapse_clip", "collapse_hard_swish", "fold_scale", "collapse_layer_norm", "collapse_affine_norm"),
        *("pool_from_mean",),
    ),
    kernel_forms=(*("sum_to_add", "batch_norm_to_conv", "hard_sigmoid_to_clip", "fold_channel_shuffle"),),
    # No stem as SpaceToDepth: few channels are no slower there (without it 0.97 to 1.06 of the speed, median 1.01).
    own_forms=(rules.share_subsampling, rules.hold_apart),
    min_opset=14,  # HardSwish
    keeps_grid=True,
    formats=("qdq", "qop"),
    operators_per_tensor=True,
    facts=rules.FACTS,
    hooks=Hooks(
        prove=None if _WHY_NOT else prove,
        time=None if _WHY_NOT else TimedRuntime(open_runner, in_calling_thread=True),
        why_unasked=_WHY_NOT,
        conform=conform,
        reclass=partial(leave_prefix_float, reason=rules.STEM),
        writes_float=rules.writes_float,
    ),
)

__all__ = ["ONEDNN"]
