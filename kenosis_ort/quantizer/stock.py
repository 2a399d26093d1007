"""What the package takes over from ``onnxruntime.quantization`` as it is: enumerations, defaults, whole stages."""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Mapping
from typing import Any

import onnx
from onnxruntime.quantization import quantize_static as stock_quantize_static
from onnxruntime.quantization.calibrate import CalibrationDataReader, CalibrationMethod
from onnxruntime.quantization.quant_utils import (
    QuantFormat,
    QuantType,
    save_and_reload_model_with_shape_infer,
    update_opset_version,
)
from onnxruntime.quantization.quantize import StaticQuantConfig, check_static_quant_arguments
from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

QUANTIZABLE_OPS: tuple[str, ...] = tuple(sorted({*QDQRegistry, *QLinearOpsRegistry}))

_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)


def stock_tensors(proto: onnx.ModelProto, op_types: Collection[str]) -> list[str]:
    """Returns the tensors that stock observes: the float ends of every node of the given types, in graph order."""
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
    """Returns a model prepared as stock does, shapes inferred and operator set raised where stock raises it."""
    inferred = save_and_reload_model_with_shape_infer(proto)
    later = {
        "activation_type": activation_type,
        "tensor_quant_overrides": extra_options.get("TensorQuantOverrides"),
        "block_size": extra_options.get("BlockSize", 0),
    }
    return update_opset_version(inferred, weight_type, **_known(update_opset_version, later))


def _known(function: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that the installed version of a function takes; older ones take fewer."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in parameters}


def write_qoperator(proto: onnx.ModelProto, output: os.PathLike[str], reader: Any, **arguments: Any) -> None:
    """Writes the QOperator format with ONNX Runtime's own quantizer."""
    known = _known(stock_quantize_static, arguments)
    stock_quantize_static(proto, output, reader, quant_format=QuantFormat.QOperator, **known)


__all__ = [
    "QUANTIZABLE_OPS",
    "CalibrationDataReader",
    "CalibrationMethod",
    "QuantFormat",
    "QuantType",
    "StaticQuantConfig",
    "check_static_quant_arguments",
    "stock_model",
    "stock_tensors",
    "write_qoperator",
]
