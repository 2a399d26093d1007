"""The format of the result: limits of each format, checks of options, and the writing itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import onnx

from kenosis_ort.errors import OptionError
from kenosis_ort.formats.conventions import to_qcdq, to_qonnx
from kenosis_ort.formats.to_qop import to_qop
from kenosis_ort.options import EXPORT_FORMATS, NARROW_FORMATS, Format
from kenosis_ort.placement.widths import BYTE, Widths
from kenosis_ort.quantizer.stock import QuantFormat, QuantType
from kenosis_ort.recipe import Recipe
from kenosis_ort.targets import Target

_OPERATORS: Final = ("qop", "qop-clip")


def chosen_format(given: Format | None, quant_format: Any) -> Format:
    """The format that the caller asked for, by our option or by stock's.

    Raises:
        OptionError: The two contradict each other.
    """
    if quant_format is not QuantFormat.QOperator:
        return given or "qdq"
    if given not in (None, *_OPERATORS):
        raise OptionError(
            f"quant_format=QuantFormat.QOperator contradicts format={given!r}",
            where="format",
            fix="leave out one of them",
        )
    return given or "qop"


def with_bits(recipe: Recipe, weights: int | None, activations: int | None) -> tuple[Recipe, Widths]:
    """The recipe with the caller's bits, and these.

    Learned rounding is tried where weights have fewer bits than 8: there the rounding of each counts.
    """
    recipe = replace(
        recipe,
        weight_bits=recipe.weight_bits if weights is None else weights,
        activation_bits=recipe.activation_bits if activations is None else activations,
    )
    by_node = {name: (entry.get("weights"), entry.get("activations")) for name, entry in recipe.bits.items()}
    widths = Widths(recipe.weight_bits, recipe.activation_bits, by_node)
    if recipe.name == "fast" and min([recipe.weight_bits, *(w for w, _ in by_node.values() if w)]) < BYTE:
        recipe = replace(recipe, rounding="learned")
    return recipe, widths


def check_format(written: Format, target: Target, widths: Widths, *, per_channel: bool) -> None:
    """Checks that the format can say it, and that the target reads it; formats for other tools are not for a target.

    Raises:
        OptionError: It cannot, or does not.
    """
    narrow = [a for a in (widths.activations, *(a for _, a in widths.by_node.values())) if a is not None and a < BYTE]
    if narrow and written not in NARROW_FORMATS:
        raise OptionError(
            f"format='{written}' has activations of 8 bits, and activation_bits asks for {min(narrow)}",
            where="activation_bits",
            fix="pass format='qcdq' (the runtime's kernels), 'qop-clip' or 'qonnx'; weight_bits alone goes with any",
        )
    if written in EXPORT_FORMATS:
        return
    if written not in target.formats:
        raise OptionError(
            f"target '{target.name}' does not read files in format '{written}'",
            where="format",
            fix=f"one of {', '.join((*target.formats, *EXPORT_FORMATS))}",
        )
    if written in _OPERATORS and per_channel and target.operators_per_tensor:
        raise OptionError(
            f"target '{target.name}' computes something else, without a word, of a QLinearConv with scales by channel",
            where="format, per_channel",
            fix="pass per_channel=False, or format='qdq'",
        )


def check_widths(widths: Widths, *, activation: Any, weight: Any, options: Mapping[str, Any]) -> None:
    """Checks that no other option sets numbers of bits below 8.

    Raises:
        OptionError: A data type or another option contradicts them.
    """
    if widths.are_bytes:
        return
    why = None
    if activation not in (QuantType.QUInt8, QuantType.QInt8):
        why = f"activation_type=QuantType.{activation.name}"
    elif weight is not QuantType.QInt8:
        why = f"weight_type=QuantType.{weight.name}"
    for key, plain in (("ActivationSymmetric", False), ("WeightSymmetric", True), ("MinimumRealRange", 0)):
        if options.get(key, plain) not in (plain, None):
            why = f"extra_options['{key}']"
    for key in ("ActivationRestrictedAsymmetric", "BlockSize"):
        if options.get(key):
            why = f"extra_options['{key}']"
    if why is not None:
        raise OptionError(
            f"fewer bits than 8 are bytes of a smaller range, which {why} contradicts",
            where="weight_bits, activation_bits",
            fix="leave one of them out",
        )


def emitted(model: onnx.ModelProto, written: Format) -> onnx.ModelProto:
    """A quantized model in the format asked for.

    Args:
        model: In canonical form. Not changed.
        written: The format.
    """
    if written in _OPERATORS:
        return to_qop(model, clip=written == "qop-clip")
    if written == "qcdq-qonnx":
        return to_qcdq(model)
    return to_qonnx(model) if written == "qonnx" else model
