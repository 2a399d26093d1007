"""The caller's node and operator names against the model's."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from kenosis_ort.errors import OptionError, did_you_mean
from kenosis_ort.flow.request import Request
from kenosis_ort.graph.prepare import PreparedModel


def check_names(proto: onnx.ModelProto, request: Request) -> None:
    """Checks that the named nodes and operator types exist.

    Raises:
        OptionError: One does not, with the closest one that does.
    """
    known = {node.name for node in proto.graph.node}
    types = {node.op_type for node in proto.graph.node}
    for option, names in (
        ("nodes_to_quantize", request.nodes_to_quantize),
        ("nodes_to_exclude", request.nodes_to_exclude),
    ):
        for name in names:
            if name not in known:
                raise OptionError(
                    f"{option} names '{name}', which is no node of the model.{did_you_mean(name, known)}",
                    where=option,
                    fix="use node names as in the model",
                )
    if request.op_types_named and not types & set(request.op_types):
        unknown = request.op_types[0]
        raise OptionError(
            f"op_types_to_quantize names '{unknown}', which is no operator of the model.{did_you_mean(unknown, types)}",
            where="op_types_to_quantize",
            fix=f"the model has {sorted(types)}",
        )


def renamed(names: Sequence[str], prepared: PreparedModel) -> list[str]:
    """Returns the caller's node names as they are in the prepared model."""
    found: dict[str, None] = {}
    for name in names:
        found[name] = None
        found.update(dict.fromkeys(n for n in prepared.nodes.get(name, ()) if n.startswith(name)))
    return list(found)
