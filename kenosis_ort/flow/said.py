"""What the caller's options have to say in the placement, option by option, for the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kenosis_ort.flow.request import EIGHT_BIT, Request

_EFFECTS: Final[Mapping[str, str]] = {
    "AddQDQPairToWeight": "weights stay float in the file, behind Q and DQ, and become integers when it is loaded",
    "BlockSize": "weights have a scale a block; linear layers read float data, for which their kernels are made",
    "DedicatedQDQPair": "every node that reads a quantized value has a Q and DQ of its own",
    "MinimumRealRange": "no range is narrower",
    "OpTypesToExcludeOutputQuantization": "the outputs of these operators carry no Q; what needs one stays float",
    "QDQKeepRemovableActivations": "Relu and Clip stay in the file, as always",
    "QDQOpTypePerChannelSupportToAxis": "weights of a MatMul by channel have their scales along this axis",
    "TensorQuantOverrides": "these tensors have the types and parameters given; nodes that no kernel fits run in float",
    "UseQDQContribOps": "Q and DQ are those of com.microsoft",
}


def said_by_option(request: Request) -> list[str]:
    """Returns a note for each option that has a say in the placement, with what it says."""
    said = {key: v for key, v in request.extra_options.items() if request.said_by_caller(f"extra_options.{key}")}
    effects = {f"extra_options['{key}']": effect for key, effect in _EFFECTS.items() if said.get(key)}
    if said.get("QuantizeBias", True) is False:
        effects["extra_options['QuantizeBias']"] = "biases stay float; Gemm has no integer kernel with one"
    if said.get("ForceQuantizeNoInputCheck"):
        effects["extra_options['ForceQuantizeNoInputCheck']"] = (
            "beside a list of operators it adds nothing"
            if request.op_types_named
            else "operators that move bytes are quantized behind float nodes too"
        )
    if request.op_types_named:
        effects["op_types_to_quantize"] = (
            "no other operators are quantized"
            if request.restricts_types
            else "it leaves out nothing that would be quantized, so it says nothing"
        )
    if request.nodes_to_quantize:
        effects["nodes_to_quantize"] = (
            "it leaves out nothing that would be quantized, so it says nothing"
            if request.names_all_nodes
            else "these nodes are quantized and no others"
        )
    for option, kind, why in (
        ("activation_type", request.activation_type, _why_float(request, request.activation_type.name, "activations")),
        ("weight_type", request.weight_type, _why_float(request, request.weight_type.name, "weights")),
    ):
        if kind not in EIGHT_BIT:
            effects[f"{option}=QuantType.{kind.name}"] = f"Q and DQ are placed as for 8 bits{why}"
    return [f"{option}: {effect}." for option, effect in effects.items()]


def _why_float(request: Request, kind: str, of: str) -> str:
    """Returns what the runtime makes of data types beyond 8 bits, as measured."""
    bits = "int16" if kind.endswith("16") else "int4"
    known = request.target.precisions.get(f"{bits}-{of}" if bits == "int16" else "int4-conv")
    return "" if known is None else f"; {known}"
