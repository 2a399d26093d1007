"""Inputs and outputs of a decoder that are its cache, and the scales that they get as int8."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import onnx
from onnx import TensorProto

from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.errors import OptionError
from kenosis_ort.graph.load import load_model
from kenosis_ort.graph.outside import copy_model
from kenosis_ort.graph.states import state_pairs, state_stem
from kenosis_ort.graph.walk import all_graphs
from kenosis_ort.options import INT8_CACHE
from kenosis_ort.passes.contract import Build
from kenosis_ort.quantizer.int8_cache import Cache, cache_scales, quantize_cache, scale_for

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
