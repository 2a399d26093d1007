"""Every option has a checked type: a wrong one is refused by name, before data is read or anything written."""

from __future__ import annotations

import inspect
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import QuantType, StaticQuantConfig

import kenosis_ort
from kenosis_ort.option_types import EXTRA_OPTION_CHECKS, OPTIONS
from kenosis_ort.options import KEYWORDS
from tests import models
from tests.flow.support import Untouched

MODEL = models.residual_block()
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

WRONG: dict[str, tuple[Any, ...]] = {
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
    "stages": ("all", 3, True, [], {"weights": True}, kenosis_ort.Stages),
    "rewrites": ("x", None, 3, 0.5, [1], {"fold_scale": 1}),
    "recipe": (3, None, True, b"fast", ["fast"], "", "fastt", {"name": "fast"}, "a\0b.toml"),
    "eval_reader": (3, "samples.npz", b"", True, {"x": 1}, object()),
    "accuracy_budget": ("x", NAN, INF, -0.1, 1.5, True, [0.1], 10**400),
    "format": (3, True, "qdqq", "", b"qdq", ["qdq"]), "speed": ("measure", True, 3, kenosis_ort.Speed, {"threads": 1}),
    "placement": ("float", True, 3, kenosis_ort.Placement, {"rewrites": False}),
    "threads": ("x", None, -1, 1.5, 2.0, True, [1], 10**11, NAN),
    "max_opset": ("x", 1.5, 12, -1, [17], True),
    "sequence_lengths": ("x", 3, None, [0], [1.5], [-1], ["1"], {1: 2}),
    "kv_cache": (*(v for v in NO_PATH if v is not None), "int4"),
    "executor": ("tcp://127.0.0.1:8786", 3, True, [], object()),
}  # fmt: skip
NAMED = ("BlockSize", "CalibMaxIntermediateOutputs", "CalibStridedMinMax", "DefaultTensorType")
REAL = ("CalibMovingAverageConstant", "CalibPercentile", "MinimumRealRange", "SmoothQuantAlpha")
WRONG_EXTRA: dict[str, tuple[Any, ...]] = {
    **{key: ("no", "", 2, 0.5, [True]) for key in EXTRA_OPTION_CHECKS},
    **dict.fromkeys(NAMED, ("x", 1.5, -1, [1], NAN, True)), **dict.fromkeys(REAL, ("x", -0.1, NAN, INF, [1], True)),
    "OpTypesToExcludeOutputQuantization": ("Conv", 3, [1], {"Conv": 1}),
    "QDQOpTypePerChannelSupportToAxis": ("Conv", 3, [1], {"Conv": "x"}, {1: 0}),
    "TensorQuantOverrides": ("x", 3, [1], {1: []}), "scenario": (3, True, [], b"same"),
}  # fmt: skip
SHARE = ("x", None, True, NAN, 2, -1, [])
WRONG_RECIPE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("ranges", "rounding"), NO_WORD),
    **dict.fromkeys(("equalize", "bias_correction", "mixed_precision", "row_scales"), NO_FLAG),
    **dict.fromkeys(("smooth", "accuracy_budget", "max_float_share"), SHARE),
    **dict.fromkeys(("samples", "synthetic"), ("x", None, True, NAN, -1, 1.5, [])),
    **dict.fromkeys(("weight_bits", "activation_bits"), ("x", None, 1, 9, 4.5, True, [4], NAN)),
    "name": (3, None, b"x"), "weight_only": ("x", 3, 16, 4.5, True, [4], NAN),
    "bits": (3, "conv", {"conv": 4}, {"conv": {"weights": 1}}, {"conv": {"wheights": 4}}, {1: {"weights": 4}}),
    "speed": ("int8", True, {"form": "int8"}), "passes": ("equalize", 3, [3], None, [kenosis_ort.Recipe]),
}  # fmt: skip


def refused(folder: Path, name: str, call: Any, /, *arguments: Any, **options: Any) -> None:
    before = list(folder.iterdir())
    with pytest.raises((kenosis_ort.OptionError, kenosis_ort.OutputError)) as caught:
        call(*arguments, **options)
    error = caught.value
    assert name in str(error), f"{options}: {error}"
    assert error.fix or "must be" in error.what, f"{options}: {error}"
    assert list(folder.iterdir()) == before


def test_every_option_is_in_the_table() -> None:
    parameters = {*inspect.signature(kenosis_ort.quantize_static).parameters, *KEYWORDS}
    assert parameters - {"calibration_data_reader", "further"} == WRONG.keys()
    assert WRONG.keys() - {"model_input"} == OPTIONS.keys()
    assert WRONG_RECIPE.keys() == kenosis_ort.Recipe.__dataclass_fields__.keys()


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_refused_by_name(tmp_path: Path, name: str) -> None:
    usual = {"model_input": MODEL, "model_output": tmp_path / "out.onnx", "calibration_data_reader": Untouched()}
    for value in WRONG[name]:
        refused(tmp_path, name, kenosis_ort.quantize_static, **{**usual, name: value})


@pytest.mark.parametrize("name", WRONG_EXTRA)
def test_a_wrong_extra_option_is_refused_by_name(tmp_path: Path, name: str) -> None:
    call = partial(kenosis_ort.quantize_static, MODEL, tmp_path / "out.onnx", Untouched())
    for value in WRONG_EXTRA[name]:
        refused(tmp_path, name, call, extra_options={name: value})


WRONG_STAGES = dict.fromkeys(kenosis_ort.Stages.__dataclass_fields__, NO_FLAG)


@pytest.mark.parametrize(("kind", "name", "values"), [
    *((kenosis_ort.Recipe, name, values) for name, values in WRONG_RECIPE.items()),
    *((kenosis_ort.Stages, name, values) for name, values in WRONG_STAGES.items()),
    (kenosis_ort.Speed, "sequence_lengths", ([0], "1", 3)),
])  # fmt: skip
def test_recipes_stages_and_groups_are_checked(tmp_path: Path, kind: Any, name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        refused(tmp_path, name, kind, **{name: value})


def test_other_calls_are_checked_too(tmp_path: Path) -> None:
    out = tmp_path / "t"
    refused(tmp_path, "threads", kenosis_ort.preview, MODEL, threads=-1)
    refused(tmp_path, "verify", kenosis_ort.calibrate, MODEL, out, Untouched(), verify="no")
    refused(tmp_path, "table_path", kenosis_ort.calibrate, MODEL, b"t", Untouched())
    for name, value in (("per_channel", "x"), ("nodes_to_exclude", "head"), ("extra_options", [1])):
        config = StaticQuantConfig(Untouched(), **{"extra_options": {}, name: value})
        refused(tmp_path, name, kenosis_ort.quantize, MODEL, out, config)
    with pytest.raises(TypeError, match="per_channel='x' is a str"):
        kenosis_ort.quantize_static(MODEL, out, Untouched(), per_channel="x")


def test_numpy_values_and_other_sequences_are_taken(tmp_path: Path) -> None:
    """What counts as a boolean, a number or a list in Python's duck typing makes the same file."""
    options: dict[str, Any] = {"recipe": "plain", "promise": False, "nodes_to_exclude": ["head"], "per_channel": True}
    kenosis_ort.quantize_static(MODEL, tmp_path / "a.onnx", models.reader(MODEL), **options)
    options = {"promise": np.False_, "verify": np.bool_(True), "per_channel": 1, "nodes_to_exclude": {"head"}}
    options["recipe"] = kenosis_ort.Recipe("plain", "minmax", np.False_, np.False_, smooth="off", samples=np.int32(4))
    options |= {"threads": np.int64(1), "extra_options": {"WeightSymmetric": np.bool_(True), "CalibPercentile": None}}
    kenosis_ort.quantize_static(MODEL, tmp_path / "b.onnx", models.reader(MODEL), **options)
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
    assert onnx.load(tmp_path / "a.onnx").graph.node
