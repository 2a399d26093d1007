"""Every option has a checked type: a wrong one is refused by name, before data is read or anything written."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import QuantType, StaticQuantConfig

from kenosis_ort import (
    KenosisError,
    OptionError,
    OutputError,
    Placement,
    Recipe,
    Speed,
    Stages,
    calibrate,
    preview,
    quantize,
)
from kenosis_ort import quantize_static as _quantize_static
from kenosis_ort.option_types import EXTRA_OPTION_CHECKS, OPTIONS
from kenosis_ort.options import KEYWORDS
from tests import models
from tests.models import FeedReader

quantize_static: Any = _quantize_static
MODEL = models.residual_block()
NAN, INF = math.nan, math.inf

NO_FLAG: tuple[Any, ...] = ("x", "no", "", None, 2, 0.5, 1.0, [True], NAN, np.array([True, False]), b"1")
NO_PATH: tuple[Any, ...] = (3, b"out.onnx", "", "a\0b", ["out.onnx"], True, 1.5)
NO_LIST: tuple[Any, ...] = ("head", b"head", 3, [1], [None], {"head": 1}, True, [["head"]], [b"head"])
NO_FUNCTION: tuple[Any, ...] = (5, "print", [print], True)
NO_WORD: tuple[Any, ...] = (5, None, True, b"auto", ["auto"], "", "nonsense")

WRONG: dict[str, tuple[Any, ...]] = {
    "model_input": (None, 3, b"model.onnx", "", "a\0b", [], object()),
    "model_output": (None, *NO_PATH),
    "quant_format": (None, 3, "QDO", True, [], "", b"QDQ"),
    "op_types_to_quantize": NO_LIST,
    "per_channel": NO_FLAG,
    "reduce_range": NO_FLAG,
    "activation_type": (None, "int7", 99, 1.5, True, [], QuantType),
    "weight_type": (None, "int7", 99, 1.5, True, [], QuantType),
    "nodes_to_quantize": NO_LIST,
    "nodes_to_exclude": NO_LIST,
    "use_external_data_format": NO_FLAG,
    "calibrate_method": (None, 3, "minimax", True, [], b"minmax", 0.5),
    "calibration_providers": ("CPUExecutionProvider", 3, [1], [None], {"CPUExecutionProvider": {}}, [("CPU", 1)]),
    "extra_options": ([], "WeightSymmetric", 3, True, {1: 2}, [("WeightSymmetric", True)]),
    "calibration_cache_path": NO_PATH,
    "target": NO_WORD,
    "protect_outputs": NO_WORD,
    "primary_inputs": NO_LIST,
    "custom_op_libraries": ("lib.so", 3, None, [1], [b"lib.so"], {"lib.so": 1}),
    "progress": NO_FUNCTION,
    "verify": NO_FLAG,
    "stages": ("all", 3, True, [], {"weights": True}, Stages),
    "rewrites": ("x", None, 3, 0.5, [1], {"fold_scale": 1}),
    "recipe": (3, None, True, b"fast", ["fast"], "", "fastt", {"name": "fast"}, "a\0b.toml"),
    "metric": NO_FUNCTION,
    "eval_reader": (3, "samples.npz", b"", True, {"x": 1}, object()),
    "accuracy_budget": ("x", NAN, INF, -0.1, 1.5, True, [0.1], 10**400),
    "format": (3, True, "qdqq", "", b"qdq", ["qdq"]),
    **dict.fromkeys(("weight_bits", "activation_bits"), ("x", 1, 9, 4.5, True, [4], NAN)),
    "speed": ("measure", True, 3, Speed, {"threads": 1}),
    "placement": ("float", True, 3, Placement, {"rewrites": False}),
    "tune": NO_WORD,
    "threads": ("x", None, -1, 1.5, 2.0, True, [1], 10**11, NAN),
    "promise": NO_FLAG,
    "max_opset": ("x", 1.5, 12, -1, [17], True),
    "host": NO_PATH,
    "sequence_lengths": ("x", 3, None, [0], [1.5], [-1], ["1"], {1: 2}),
    "kv_cache": (*(v for v in NO_PATH if v is not None), "int4"),
    "evidence": NO_WORD,
    "on_failure": NO_WORD,
    "executor": ("tcp://127.0.0.1:8786", 3, True, [], object()),
}
NO_WHOLE: tuple[Any, ...] = ("x", 1.5, -1, [1], NAN, True)
NO_SHARE: tuple[Any, ...] = ("x", -0.1, NAN, INF, [1], True)
NAMED = ("BlockSize", "CalibMaxIntermediateOutputs", "CalibStridedMinMax", "DefaultTensorType")
REAL = ("CalibMovingAverageConstant", "CalibPercentile", "MinimumRealRange", "SmoothQuantAlpha")
WRONG_EXTRA: dict[str, tuple[Any, ...]] = {
    **{key: ("no", "", 2, 0.5, [True]) for key in EXTRA_OPTION_CHECKS},
    **dict.fromkeys(NAMED, NO_WHOLE),
    **dict.fromkeys(REAL, NO_SHARE),
    "OpTypesToExcludeOutputQuantization": ("Conv", 3, [1], {"Conv": 1}),
    "QDQOpTypePerChannelSupportToAxis": ("Conv", 3, [1], {"Conv": "x"}, {1: 0}),
    "TensorQuantOverrides": ("x", 3, [1], {1: []}),
    "scenario": (3, True, [], b"same"),
}


class Untouched(FeedReader):
    """A reader that must not be asked."""

    def __init__(self) -> None:
        super().__init__([])

    def get_next(self) -> Any:
        raise AssertionError("data was read")


def refused(call: Any, folder: Path) -> KenosisError:
    before = list(folder.iterdir())
    with pytest.raises((OptionError, OutputError)) as caught:
        call()
    assert list(folder.iterdir()) == before
    error: KenosisError = caught.value
    return error


def named(error: KenosisError, name: str) -> bool:
    return name in str(error) and bool(error.fix or "must be" in error.what)


def test_every_option_is_in_the_table() -> None:
    parameters = {*inspect.signature(quantize_static).parameters, *KEYWORDS} - {"calibration_data_reader", "further"}
    assert parameters == WRONG.keys()
    assert parameters - {"model_input"} == OPTIONS.keys()


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_refused_by_name(tmp_path: Path, name: str) -> None:
    for value in WRONG[name]:
        said = {"model_input": MODEL, "model_output": tmp_path / "out.onnx", name: value}
        error = refused(lambda said=said: quantize_static(calibration_data_reader=Untouched(), **said), tmp_path)
        assert named(error, name), f"{value!r}: {error}"


@pytest.mark.parametrize("key", WRONG_EXTRA)
def test_a_wrong_extra_option_is_refused_by_name(tmp_path: Path, key: str) -> None:
    for value in WRONG_EXTRA[key]:
        said: dict[str, Any] = {"extra_options": {key: value}}
        error = refused(lambda said=said: quantize_static(MODEL, tmp_path / "o", Untouched(), **said), tmp_path)
        assert named(error, key), f"{value!r}: {error}"


@pytest.mark.parametrize("value", [("per_channel", "x"), ("nodes_to_exclude", "head"), ("extra_options", [1])])
def test_a_configuration_is_checked_too(tmp_path: Path, value: tuple[str, Any]) -> None:
    config = StaticQuantConfig(Untouched(), **{"extra_options": {}, value[0]: value[1]})
    assert named(refused(lambda: quantize(MODEL, tmp_path / "out.onnx", config), tmp_path), value[0])


def test_other_calls_are_checked_too(tmp_path: Path) -> None:
    assert named(refused(lambda: preview(MODEL, threads=-1), tmp_path), "threads")
    assert named(refused(lambda: calibrate(MODEL, tmp_path / "t", Untouched(), verify="no"), tmp_path), "verify")
    assert named(refused(lambda: calibrate(MODEL, b"t", Untouched()), tmp_path), "table_path")  # type: ignore[arg-type]


@pytest.mark.parametrize("field", Stages.__dataclass_fields__)
def test_stages_are_checked(field: str, tmp_path: Path) -> None:
    for value in NO_FLAG:
        assert named(refused(lambda value=value: Stages(**{field: value}), tmp_path), field)


WRONG_RECIPE: dict[str, tuple[Any, ...]] = {
    "name": (3, None, b"x"),
    "ranges": NO_WORD,
    "rounding": NO_WORD,
    "equalize": NO_FLAG,
    "bias_correction": NO_FLAG,
    "mixed_precision": NO_FLAG,
    "row_scales": NO_FLAG,
    "smooth": ("x", None, True, NAN, 2, -1, []),
    "accuracy_budget": ("x", None, True, NAN, 2, -1, []),
    "max_float_share": ("x", None, True, NAN, 2, -1, []),
    "samples": ("x", None, True, NAN, -1, 1.5, []),
    "synthetic": ("x", None, True, NAN, -1, 1.5, []),
    "weight_only": ("x", 3, 16, 4.5, True, [4], NAN),
    **dict.fromkeys(("weight_bits", "activation_bits"), ("x", None, 1, 9, 4.5, True, [4], NAN)),
    "bits": (3, "conv", {"conv": 4}, {"conv": {"weights": 1}}, {"conv": {"wheights": 4}}, {1: {"weights": 4}}),
    "speed": ("int8", True, {"form": "int8"}),
    "passes": ("equalize", 3, [3], None, [Recipe]),
}


@pytest.mark.parametrize("field", Recipe.__dataclass_fields__)
def test_a_recipe_is_checked(field: str, tmp_path: Path) -> None:
    for value in WRONG_RECIPE[field]:
        assert named(refused(lambda value=value: Recipe(**{field: value}), tmp_path), field)


def test_a_wrong_type_is_a_type_error_too(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="per_channel='x' is a str"):
        quantize_static(MODEL, tmp_path / "out.onnx", Untouched(), per_channel="x")


def test_an_output_that_is_a_folder(tmp_path: Path) -> None:
    assert "folder" in str(refused(lambda: quantize_static(MODEL, tmp_path, Untouched()), tmp_path))


def test_numpy_values_and_other_sequences_are_taken(tmp_path: Path) -> None:
    """What counts as a boolean, a number or a list in Python's duck typing makes the same file."""
    options: dict[str, Any] = {"recipe": "plain", "promise": False, "nodes_to_exclude": ["head"], "per_channel": True}
    quantize_static(MODEL, tmp_path / "a.onnx", models.reader(MODEL), **options)
    options.update(
        promise=np.False_,
        verify=np.bool_(True),
        per_channel=1,
        nodes_to_exclude={"head"},
        threads=np.int64(1),
        recipe=Recipe("plain", "minmax", np.False_, np.False_, smooth="off", samples=np.int32(4)),  # type: ignore[arg-type]
        extra_options={"WeightSymmetric": np.bool_(True), "CalibPercentile": None},
    )
    quantize_static(MODEL, tmp_path / "b.onnx", models.reader(MODEL), **options)
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
    assert onnx.load(tmp_path / "a.onnx").graph.node
