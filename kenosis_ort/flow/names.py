"""The caller's node and operator names against the model's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import onnx

from kenosis_ort.errors import OptionError, did_you_mean, unknown_name
from kenosis_ort.flow.request import Request
from kenosis_ort.flow.target_options import serve_override
from kenosis_ort.graph.prepare import PreparedModel
from kenosis_ort.graph.walk import all_graphs
from kenosis_ort.quantizer.stock import QUANTIZABLE_OPS, read_override
from kenosis_ort.targets import Role

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
