"""Options that a target sets where the caller gave none, and options that it refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import TensorProto

from kenosis_ort.errors import OptionError
from kenosis_ort.quantizer.stock import QuantType
from kenosis_ort.targets import DataTypes, Target


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
