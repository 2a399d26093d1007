"""Wrong values: of every option, every entry of ``extra_options``, every setting of a recipe and every stage."""

import math
from typing import Any

import numpy as np
from onnxruntime.quantization import QuantType

from kenosis_ort import Placement, Recipe, Speed, Stages
from kenosis_ort.option_types import EXTRA_OPTION_CHECKS

NAN, INF = math.nan, math.inf

NO_FLAG: tuple[Any, ...] = ("x", "no", "", None, 2, 0.5, 1.0, [True], NAN, np.array([True, False]), b"1")
NO_PATH: tuple[Any, ...] = (3, b"out.onnx", "", "a\0b", ["out.onnx"], True, 1.5)
NO_LIST: tuple[Any, ...] = ("head", b"head", 3, [1], [None], {"head": 1}, True, [["head"]], [b"head"])
NO_FUNCTION: tuple[Any, ...] = (5, "print", [print], True)
NO_WORD: tuple[Any, ...] = (5, None, True, b"auto", ["auto"], "", "nonsense")
NO_TYPE: tuple[Any, ...] = (None, "int7", 99, 1.5, True, [], QuantType)
FLAGS = ("per_channel", "reduce_range", "use_external_data_format", "verify", "promise")
LISTS = ("op_types_to_quantize", "nodes_to_quantize", "nodes_to_exclude", "primary_inputs")
WORDS = ("target", "protect_outputs", "tune", "evidence", "on_failure")

OPTIONS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(FLAGS, NO_FLAG), **dict.fromkeys(LISTS, NO_LIST), **dict.fromkeys(WORDS, NO_WORD),
    **dict.fromkeys(("progress", "metric"), NO_FUNCTION),
    **dict.fromkeys(("calibration_cache_path", "host"), NO_PATH),
    **dict.fromkeys(("activation_type", "weight_type"), NO_TYPE),
    **dict.fromkeys(("weight_bits", "activation_bits"), ("x", 1, 9, 4.5, True, [4], NAN)),
    "model_input": (None, 3, b"model.onnx", "", "a\0b", [], object()),
    "model_output": (None, *NO_PATH), "quant_format": (None, 3, "QDO", True, [], "", b"QDQ"),
    "calibrate_method": (None, 3, "minimax", True, [], b"minmax", 0.5),
    "calibration_providers": ("CPUExecutionProvider", 3, [1], [None], {"CPUExecutionProvider": {}}, [("CPU", 1)]),
    "extra_options": ([], "WeightSymmetric", 3, True, {1: 2}, [("WeightSymmetric", True)]),
    "custom_op_libraries": ("lib.so", 3, None, [1], [b"lib.so"], {"lib.so": 1}),
    "stages": ("all", 3, True, [], {"weights": True}, Stages),
    "rewrites": ("x", None, 3, 0.5, [1], {"fold_scale": 1}),
    "recipe": (3, None, True, b"fast", ["fast"], "", "fastt", {"name": "fast"}, "a\0b.toml"),
    "eval_reader": (3, "samples.npz", b"", True, {"x": 1}, object()),
    "accuracy_budget": ("x", NAN, INF, -0.1, 1.5, True, [0.1], 10**400),
    "format": (3, True, "qdqq", "", b"qdq", ["qdq"]), "speed": ("measure", True, 3, Speed, {"threads": 1}),
    "placement": ("float", True, 3, Placement, {"rewrites": False}),
    "threads": ("x", None, -1, 1.5, 2.0, True, [1], 10**11, NAN),
    "max_opset": ("x", 1.5, 12, -1, [17], True),
    "sequence_lengths": ("x", 3, None, [0], [1.5], [-1], ["1"], {1: 2}),
    "kv_cache": (*(v for v in NO_PATH if v is not None), "int4"),
    "executor": ("tcp://127.0.0.1:8786", 3, True, [], object()),
}  # fmt: skip
NAMED = ("BlockSize", "CalibMaxIntermediateOutputs", "CalibStridedMinMax", "DefaultTensorType")
REAL = ("CalibMovingAverageConstant", "CalibPercentile", "MinimumRealRange", "SmoothQuantAlpha")
EXTRA: dict[str, tuple[Any, ...]] = {
    **{key: ("no", "", 2, 0.5, [True]) for key in EXTRA_OPTION_CHECKS},
    **dict.fromkeys(NAMED, ("x", 1.5, -1, [1], NAN, True)), **dict.fromkeys(REAL, ("x", -0.1, NAN, INF, [1], True)),
    "OpTypesToExcludeOutputQuantization": ("Conv", 3, [1], {"Conv": 1}),
    "QDQOpTypePerChannelSupportToAxis": ("Conv", 3, [1], {"Conv": "x"}, {1: 0}),
    "TensorQuantOverrides": ("x", 3, [1], {1: []}), "scenario": (3, True, [], b"same"),
}  # fmt: skip
SHARE = ("x", None, True, NAN, 2, -1, [])
RECIPE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("ranges", "rounding"), NO_WORD),
    **dict.fromkeys(("equalize", "bias_correction", "mixed_precision", "row_scales"), NO_FLAG),
    **dict.fromkeys(("smooth", "accuracy_budget", "max_float_share"), SHARE),
    **dict.fromkeys(("samples", "synthetic"), ("x", None, True, NAN, -1, 1.5, [])),
    **dict.fromkeys(("weight_bits", "activation_bits"), ("x", None, 1, 9, 4.5, True, [4], NAN)),
    "name": (3, None, b"x"), "weight_only": ("x", 3, 16, 4.5, True, [4], NAN),
    "bits": (3, "conv", {"conv": 4}, {"conv": {"weights": 1}}, {"conv": {"wheights": 4}}, {1: {"weights": 4}}),
    "speed": ("int8", True, {"form": "int8"}), "passes": ("equalize", 3, [3], None, [Recipe]),
}  # fmt: skip
STAGES = dict.fromkeys(Stages.__dataclass_fields__, NO_FLAG)
