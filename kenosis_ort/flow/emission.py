"""Formats of the result, and the int8 cache of a decoder.

The format of the result: limits of each format, checks of options, and the writing itself.

Inputs and outputs of a decoder that are its cache, and the scales that they get as int8.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import onnx
from onnx import TensorProto

from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.errors import OptionError
from kenosis_ort.formats.conventions import to_qcdq, to_qonnx
from kenosis_ort.formats.to_qop import to_qop
from kenosis_ort.graph.bodies import state_pairs, state_stem
from kenosis_ort.graph.load import load_model
from kenosis_ort.graph.outside import copy_model
from kenosis_ort.graph.walk import all_graphs
from kenosis_ort.options import EXPORT_FORMATS, INT8_CACHE, NARROW_FORMATS, Format
from kenosis_ort.passes.contract import Build
from kenosis_ort.placement.eligibility import BYTE, Widths
from kenosis_ort.quantizer.int8_cache import Cache, cache_scales, quantize_cache, scale_for
from kenosis_ort.quantizer.stock import QuantFormat, QuantType
from kenosis_ort.recipe import Recipe
from kenosis_ort.targets import Target

_FORMATS: Final = ("qdq", "qcdq")
_NAMED: Final = re.compile(r"past|present|cache|(?<![a-z])(key|value|kv|k|v)s?(?![a-z])")
_LEAST_RANK: Final = 3
"""Batch, tokens and channels; recurrent states have fewer, or other names."""


def check_kv_cache(source: str | os.PathLike[str], written: str, *, weights_alone: bool) -> None:
    """Checks the option about the cache against other options.

    Raises:
        OptionError: It is no word and no file, or does not go with the format or the recipe.
    """
    if written not in _FORMATS:
        raise OptionError(
            f"kv_cache goes with Q and DQ in the file, and format='{written}' has others",
            where="kv_cache",
            fix=f"format='{_FORMATS[0]}' or '{_FORMATS[1]}'",
        )
    if weights_alone:
        raise OptionError(
            "kv_cache needs ranges of the cache, and a recipe of weights alone finds none",
            where="kv_cache",
            fix="another recipe",
        )
    if source != INT8_CACHE and not Path(source).is_file():
        raise OptionError(
            f"kv_cache={os.fspath(source)!r} is neither '{INT8_CACHE}' nor a file",
            where="kv_cache",
            fix=f"kv_cache='{INT8_CACHE}', or the path of a file made with it",
        )


def find_caches(model: onnx.ModelProto, source: str | os.PathLike[str]) -> tuple[Cache, ...]:
    """The cache of a decoder, as names, types and ranks of its inputs and outputs tell.

    Args:
        model: The float model.
        source: ``int8``, or a file whose scales are taken.

    Raises:
        OptionError: The model has no float cache, what goes in and what comes out cannot be paired, or the file has
            no scale for some of it.
    """
    constants = {tensor.name for tensor in model.graph.initializer}
    inputs = {v.name for v in model.graph.input if v.name not in constants and _is_cache(v)}
    outputs = {v.name for v in model.graph.output if _is_cache(v)}
    if not inputs and not outputs:
        raise OptionError(
            "the model has no cache: no input or output of three dimensions or more in float32 is called past, "
            "present, cache, key or value",
            where="kv_cache",
            fix="leave it out, or export the decoder with its cache as inputs and outputs",
        )
    paired = {o: i for o, i in state_pairs(model).items() if i in inputs}
    left = sorted(inputs - set(paired.values()))
    grown = [name for name in left if _is_grown(model, name)]
    apart = sorted(outputs - paired.keys())
    if grown or (source == INT8_CACHE and apart):
        name = (grown or apart)[0]
        raise OptionError(
            f"the {'input' if grown else 'output'} '{name}' is of the cache, and no "
            f"{'output is its next' if grown else 'input is its last'} value by name, type and rank",
            where="kv_cache",
            fix="call them alike (past_key_values.0.key and present.0.key)"
            if grown
            else f"quantize the file that reads this cache with kv_cache='{INT8_CACHE}' first, and give its path here",
        )
    found = (
        *(Cache(past, present) for present, past in paired.items()),
        *(Cache(past, None) for past in left),
        *(Cache(None, present) for present in apart),
    )
    return found if source == INT8_CACHE else _with_scales_of(Path(source), found)


def with_scales(caches: Sequence[Cache], table: CalibrationTable) -> tuple[Cache, ...]:
    """Caches with the scales that they have by ranges, where they have none yet."""
    return tuple(
        replace(cache, scale=scale_for([table.range_of(name) for name in cache.names]))
        if cache.scale is None
        else cache
        for cache in caches
    )


def with_int8_cache(build: Build, caches: Sequence[Cache]) -> Build:
    """A build of another form than planned int8, its cache quantized likewise."""
    model = copy_model(build.quantized)
    quantize_cache(model, with_scales(caches, build.table))
    return replace(build, quantized=model)


def _with_scales_of(path: Path, caches: Sequence[Cache]) -> tuple[Cache, ...]:
    scales = {state_stem(name): scale for name, scale in _scales_in(path).items()}
    for cache in caches:
        if state_stem(cache.names[0]) not in scales:
            raise OptionError(
                f"the cache of '{path}' has nothing like '{cache.names[0]}'",
                where="kv_cache",
                fix="give the file that goes on with this one's cache",
            )
    return tuple(replace(cache, scale=scales[state_stem(cache.names[0])]) for cache in caches)


def _scales_in(path: Path) -> Mapping[str, float]:
    scales = cache_scales(load_model(path, ask_runtime=False).proto, str(path))
    if not scales:
        raise OptionError(
            f"'{path}' has no int8 cache", where="kv_cache", fix=f"make it with kv_cache='{INT8_CACHE}' first"
        )
    return scales


def _is_cache(value: onnx.ValueInfoProto) -> bool:
    tensor = value.type.tensor_type
    named = _NAMED.search(value.name.lower().replace("_", " "))
    return named is not None and tensor.elem_type == TensorProto.FLOAT and len(tensor.shape.dim) >= _LEAST_RANK


def _is_grown(model: onnx.ModelProto, name: str) -> bool:
    """Whether tokens are appended to an input."""
    return any(n.op_type == "Concat" and name in n.input for graph in all_graphs(model.graph) for n in graph.node)


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
