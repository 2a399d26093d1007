"""Names that the caller gives, and options that a target sets or refuses.

Options that a target sets where the caller gave none, and options that it refuses.

The caller's node and operator names against the model's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto

from kenosis_ort.errors import OptionError, did_you_mean, unknown_name
from kenosis_ort.flow.request import Request
from kenosis_ort.graph.opset import PreparedModel
from kenosis_ort.graph.walk import all_graphs
from kenosis_ort.quantizer.stock import QUANTIZABLE_OPS, QuantType, read_override
from kenosis_ort.targets import DataTypes, Role, Target

_OVERRIDES: Final = "TensorQuantOverrides"
_NEVER_LISTED: Final = frozenset({"Cast", "QuantizeLinear", "DequantizeLinear"})


def fit_names(proto: onnx.ModelProto, request: Request) -> Request:
    """The request with the named nodes and operator types fitted to the model.

    A name that fits nothing is complained of. A list that leaves out nothing which the target would quantize says
    nothing: `onnxruntime.quantization.get_qdq_config` names all operators of the model where its caller named none.

    Raises:
        OptionError: A name fits nothing, within `kenosis_ort.errors.strict_names`.
    """
    known = {node.name for graph in all_graphs(proto.graph) for node in graph.node}
    types = {node.op_type for graph in all_graphs(proto.graph) for node in graph.node}
    complaints = [
        unknown_name(
            f"{option} names '{name}', which is no node of the model.{did_you_mean(name, known)}",
            where=option,
            fix="use node names as in the model.",
        )
        for option, names in (
            ("nodes_to_quantize", request.nodes_to_quantize),
            ("nodes_to_exclude", request.nodes_to_exclude),
            ("recipe.bits", request.widths.by_node),
        )
        for name in names
        if name not in known
    ]
    if request.op_types_named and not types & set(request.op_types):
        unknown = request.op_types[0]
        complaints.append(
            unknown_name(
                f"op_types_to_quantize names '{unknown}', which is no operator of the model."
                f"{did_you_mean(unknown, types)}",
                where="op_types_to_quantize",
                fix=f"the model has {sorted(types)}.",
            )
        )
    options, unknown_tensors = _fit_overrides(proto, request)
    complaints += unknown_tensors
    return replace(
        request,
        extra_options=options,
        complaints=tuple(dict.fromkeys((*request.complaints, *complaints))),
        names_all_types=request.op_types_named and _all_types(proto, request),
        names_all_nodes=bool(request.nodes_to_quantize) and _all_nodes(proto, request),
    )


def _fit_overrides(proto: onnx.ModelProto, request: Request) -> tuple[Mapping[str, Any], list[str]]:
    """The extra options without overrides of tensors that the model does not have, and the complaints."""
    overrides = request.extra_options.get(_OVERRIDES)
    if not overrides or request.is_stock:
        return request.extra_options, []
    if not isinstance(overrides, Mapping):
        raise OptionError(f"{_OVERRIDES} is no dictionary", where="extra_options", fix="lists by tensor name")
    known = {name for node in proto.graph.node for name in (*node.input, *node.output) if name}
    weights = {n.input[1] for n in proto.graph.node if len(n.input) > 1 and _is_anchor(request, n.op_type)}
    weights &= {tensor.name for tensor in proto.graph.initializer}
    complaints = []
    read = {}
    for name, entries in overrides.items():
        if name in known:
            read[name] = read_override(name, entries, proto, request.activation_type)
            serve_override(request.target, name, read[name], weight=name in weights)
        else:
            complaints.append(
                unknown_name(
                    f"{_OVERRIDES} names '{name}', which is no tensor of the model.{did_you_mean(name, known)}",
                    where="extra_options",
                    fix="use tensor names as in the model.",
                )
            )
    return {**request.extra_options, _OVERRIDES: read}, complaints


def _all_types(proto: onnx.ModelProto, request: Request) -> bool:
    """Whether the list of operator types leaves out no operator that the target would quantize."""
    excluded = set(request.nodes_to_exclude)
    types = {node.op_type for node in proto.graph.node if node.name not in excluded} - _NEVER_LISTED
    missing = types - set(request.op_types)
    return missing.isdisjoint(QUANTIZABLE_OPS) or not any(_is_quantized(request, op_type) for op_type in missing)


def _all_nodes(proto: onnx.ModelProto, request: Request) -> bool:
    """Whether the list of nodes leaves out no node that the target would quantize."""
    named = {*request.nodes_to_quantize, *request.nodes_to_exclude}
    return not any(_is_quantized(request, n.op_type) for n in proto.graph.node if n.name not in named)


def _is_quantized(request: Request, op_type: str) -> bool:
    rule = request.target.rule(op_type)
    return rule is not None and rule.role not in (Role.FLOAT, Role.ISLAND)


def _is_anchor(request: Request, op_type: str) -> bool:
    return any(rule.role is Role.ANCHOR for rule in request.target.rules_of(op_type))


def renamed(names: Sequence[str], prepared: PreparedModel) -> list[str]:
    """The caller's node names as they are in the prepared model."""
    found: dict[str, None] = {}
    for name in names:
        found[name] = None
        found.update(dict.fromkeys(n for n in prepared.nodes.get(name, ()) if n.startswith(name)))
    return list(found)


def serve(
    target: Target,
    types: DataTypes,
    activation: QuantType,
    weight: QuantType,
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """The extra options that the target sets where the caller gave none.

    Args:
        target: The target.
        types: Its data types on the machine at hand.
        activation: Data type of activations.
        weight: Data type of weights.
        given: The caller's extra options.

    Raises:
        OptionError: The target cannot serve something that the caller asks for.
    """
    _check_type(target, "activation_type", activation, types.activations, types)
    _check_type(target, "weight_type", weight, types.weights, types)
    own: dict[str, Any] = dict(target.extra_options)
    if types.symmetric:
        _check_symmetric(target, given, "ActivationSymmetric")
        own["ActivationSymmetric"] = True
    if types.only_these and types.weight_symmetric:
        _check_symmetric(target, given, "WeightSymmetric")
    if target.bias == "float":
        own["QuantizeBias"] = False
    return {key: value for key, value in own.items() if key not in given}


def serve_override(target: Target, name: str, entries: Sequence[Mapping[str, Any]], *, weight: bool) -> None:
    """Refuses parameters of one tensor that the target cannot serve.

    Args:
        target: The target.
        name: The tensor.
        entries: What ``TensorQuantOverrides`` says of it.
        weight: It is a weight of a layer, else an activation or a constant among such.

    Raises:
        OptionError: Its type, or a zero point other than 0 where the target knows no other.
    """
    types = target.types
    if not types.only_these:
        return
    taken = types.weights if weight else (*types.activations, *types.weights, TensorProto.INT32)
    fixed = types.weight_symmetric if weight else types.symmetric
    for entry in (part for given in entries for part in (given, given.get("convert")) if part):
        kind = entry.get("quant_type")
        if kind is not None and kind.tensor_type not in taken:
            raise _not_taken(f"QuantType.{kind.name} for '{name}'", "TensorQuantOverrides", target, types, taken)
        if fixed and (entry.get("symmetric") is False or np.any(np.asarray(entry.get("zero_point", 0)))):
            raise OptionError(
                f"target '{target.name}' takes zero point 0 alone, and the entry of '{name}' says another",
                where="TensorQuantOverrides",
                fix="leave out 'symmetric' and 'zero_point' of that tensor",
            )


def _check_type(target: Target, option: str, kind: QuantType, taken: tuple[int, ...], types: DataTypes) -> None:
    if types.only_these and kind.tensor_type not in taken:
        raise _not_taken(f"{option}=QuantType.{kind.name}", option, target, types, taken)


def _not_taken(what: str, where: str, target: Target, types: DataTypes, taken: Sequence[int]) -> OptionError:
    names = ", ".join(f"QuantType.{known.name}" for known in QuantType if known.tensor_type in taken)
    return OptionError(
        f"target '{target.name}' does not take {what}: {types.why}",
        where=where,
        fix=f"leave it out, or pass {names}",
    )


def _check_symmetric(target: Target, given: Mapping[str, Any], option: str) -> None:
    if given.get(option) is False:
        raise OptionError(
            f"target '{target.name}' takes zero point 0 alone, and {option} is False",
            where="extra_options",
            fix=f"leave out {option}",
        )
