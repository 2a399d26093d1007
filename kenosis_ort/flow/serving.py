"""What a target makes of a call's options: what it sets where nothing is said, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kenosis_ort.errors import OptionError
from kenosis_ort.quantizer.stock import QuantType
from kenosis_ort.targets import DataTypes, Target


def serve(
    target: Target,
    types: DataTypes,
    activation: QuantType,
    weight: QuantType,
    said: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the extra options that the target sets where the caller said nothing.

    Args:
        target: The target.
        types: Its data types on the machine at hand.
        activation: Data type of activations.
        weight: Data type of weights.
        said: The caller's extra options.

    Raises:
        OptionError: The target cannot serve something that the caller asks for.
    """
    _check_type(target, "activation_type", activation, types.activations, types)
    _check_type(target, "weight_type", weight, types.weights, types)
    own: dict[str, Any] = dict(target.extra_options)
    if types.symmetric:
        _check_symmetric(target, said, "ActivationSymmetric")
        own["ActivationSymmetric"] = True
    if types.only_these and types.weight_symmetric:
        _check_symmetric(target, said, "WeightSymmetric")
    if target.bias == "float":
        own["QuantizeBias"] = False
    return {key: value for key, value in own.items() if key not in said}


def _check_type(target: Target, option: str, kind: QuantType, taken: tuple[int, ...], types: DataTypes) -> None:
    if types.only_these and kind.tensor_type not in taken:
        names = ", ".join(f"QuantType.{known.name}" for known in QuantType if known.tensor_type in taken)
        raise OptionError(
            f"target '{target.name}' does not take {option}=QuantType.{kind.name}: {types.why}",
            where=option,
            fix=f"leave it out, or pass {names}",
        )


def _check_symmetric(target: Target, said: Mapping[str, Any], option: str) -> None:
    if said.get(option) is False:
        raise OptionError(
            f"target '{target.name}' takes zero point 0 alone, and {option} is False",
            where="extra_options",
            fix=f"leave out {option}",
        )
