"""Parts of ``onnxruntime.quantization`` that are used as they are: enumerations, defaults, whole stages."""

import contextlib
import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnxruntime.quantization import (
    CalibrationDataReader as CalibrationDataReader,
    CalibrationMethod as CalibrationMethod,
    QuantFormat as QuantFormat,
    QuantType as QuantType,
    StaticQuantConfig as StaticQuantConfig,
    quant_utils,
)
from onnxruntime.quantization.quant_utils import load_model_with_shape_infer, update_opset_version
from onnxruntime.quantization.quantize import check_static_quant_arguments as check_static_quant_arguments
from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry
from onnxruntime.quantization.tensor_quant_overrides import TensorQuantOverridesHelper

from kenosis_ort.checks import real, whole
from kenosis_ort.errors import OptionError

QUANTIZABLE_OPS: tuple[str, ...] = tuple(sorted({*QDQRegistry, *QLinearOpsRegistry}))

_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)


OVERRIDE_KEYS = (
    "quant_type", "axis", "symmetric", "reduce_range", "rmin", "rmax", "scale", "zero_point", "convert", "recv_nodes"
)  # fmt: skip
"""What an entry of ``TensorQuantOverrides`` may say."""


def read_override(
    name: str, given: Any, proto: onnx.ModelProto, activation_type: QuantType, weight_type: QuantType
) -> list[dict[str, Any]]:
    """The entry of ``TensorQuantOverrides`` for one tensor of the model, checked by stock's own rules.

    Data types may be given by name, as in a JSON file.

    Raises:
        OptionError: It makes no sense to stock, or its numbers are no grid and no range.
    """
    constants = {i.name: i for i in proto.graph.initializer}
    entries: list[dict[str, Any]] = []
    try:
        entries = [_read_entry(entry) for entry in given] if isinstance(given, list) else given
        valid, why = TensorQuantOverridesHelper({name: entries}).is_valid(constants, {name}, activation_type)
    except (AttributeError, TypeError, KeyError, IndexError, ValueError) as error:
        valid, why = False, f"{type(error).__name__}: {error}"
    if not valid:
        fix = "a list with one dictionary, or one for each channel, as stock ONNX Runtime documents it"
        raise OptionError(f"TensorQuantOverrides: {why}", where=f"tensor '{name}'", fix=fix)
    for entry in entries:
        _check_numbers(f"TensorQuantOverrides['{name}']", entry, weight_type if name in constants else activation_type)
    return entries


def _check_numbers(name: str, entry: Mapping[str, Any], default: QuantType) -> None:
    """Checks that scale, zero point and range are numbers that the tensor's type can have."""
    kind = entry.get("quant_type", default)
    if kind is QuantType.QFLOAT8E4M3FN is not default:  # its ranges are found by another method
        raise OptionError(f"{name}: no tensor alone can be {kind}", where=name, fix="another quant_type")
    arrays = {key: np.asarray(entry[key]) for key in ("scale", "zero_point", "rmin", "rmax") if key in entry}
    given = {key: array.item() if array.size == 1 else entry[key] for key, array in arrays.items()}
    for key, value in given.items():
        real(f"{name}['{key}']", value, above=0 if key == "scale" else None)
    if "zero_point" in given and kind is not QuantType.QFLOAT8E4M3FN:
        least, most = quant_utils.get_qmin_qmax_for_qType(kind.tensor_type)
        whole(f"{name}['zero_point']", given["zero_point"], least=int(least), most=int(most))
    if {"rmin", "rmax"} <= given.keys():
        real(f"{name}['rmax']", given["rmax"], least=given["rmin"])


def _read_entry(given: Mapping[str, Any]) -> dict[str, Any]:
    entry = dict(given)
    kind = entry.get("quant_type")
    if isinstance(kind, str):
        entry["quant_type"] = QuantType[kind]
    elif kind is not None and not isinstance(kind, QuantType):
        raise TypeError(f"quant_type={kind!r} is no QuantType")
    if "convert" in entry:
        entry["convert"] = _read_entry(entry["convert"])
    if "recv_nodes" in entry:
        entry["recv_nodes"] = set(entry["recv_nodes"])
    return entry


def stock_tensors(proto: onnx.ModelProto, op_types: Collection[str]) -> list[str]:
    """The tensors that stock observes: the float ends of every node of the given types, in graph order."""
    infos = {v.name: v for v in (*proto.graph.value_info, *proto.graph.output, *proto.graph.input)}
    constants = {i.name for i in proto.graph.initializer}
    found: dict[str, None] = {}
    for node in proto.graph.node:
        if node.op_type in op_types:
            for name in (*node.input, *node.output):
                info = infos.get(name)
                if info is not None and name not in constants and info.type.tensor_type.elem_type in _FLOATS:
                    found[name] = None
    return list(found)


def stock_model(
    proto: onnx.ModelProto, weight_type: Any, activation_type: Any, extra_options: Mapping[str, Any]
) -> Any:
    """A model prepared as stock does, shapes inferred and operator set raised where stock raises it."""
    from kenosis_ort.graph.outside import copy_model
    from kenosis_ort.storage.writing import Scratch

    with Scratch("stock") as folder:  # stock's own folder stays where the process is killed
        path = folder / "model.onnx"
        onnx.save_model(copy_model(proto), path, save_as_external_data=True)
        inferred = load_model_with_shape_infer(path)
    later = {
        "activation_type": activation_type,
        "tensor_quant_overrides": extra_options.get("TensorQuantOverrides"),
        "block_size": extra_options.get("BlockSize", 0),
    }
    parameters = inspect.signature(update_opset_version).parameters  # older ones take fewer
    return update_opset_version(inferred, weight_type, **{k: value for k, value in later.items() if k in parameters})


@contextlib.contextmanager
def four_bit_types() -> Iterator[None]:
    """Gives runtimes before 1.24 the 4-bit types that they look for in a module which newer onnx does not have."""
    types = quant_utils.ONNX_TYPE_TO_NP_TYPE
    ranges = [getattr(quant_utils, f"ONNX_INT_TYPE_{which}RANGE") for which in ("", "SYMMETRIC_", "REDUCED_")]
    tables = (types, *ranges)
    before = [dict(table) for table in tables]
    for elem_type, dtype in ((onnx.TensorProto.INT4, np.int8), (onnx.TensorProto.UINT4, np.uint8)):
        if types.get(elem_type, dtype) is None:
            types[elem_type] = np.dtype(dtype)
            for table in ranges:
                if elem_type in table:
                    table[elem_type] = tuple(bound.astype(dtype) for bound in table[elem_type])
    try:
        yield
    finally:
        for table, entries in zip(tables, before, strict=True):
            table.update(entries)
