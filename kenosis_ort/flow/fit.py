"""A call with its model open, and its request fitted to that: names, inputs that stay open, a decoder's cache."""

import logging
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto

from kenosis_ort.calibration.feeds import Feed, sample_feeds
from kenosis_ort.errors import CalibrationError, OptionError, did_you_mean, unknown_name
from kenosis_ort.flow import preparation, target_options
from kenosis_ort.flow.call import Call
from kenosis_ort.flow.request import Request, not_taken, runs_float
from kenosis_ort.flow.samples import KeepingReader
from kenosis_ort.graph import bodies, constants, walk
from kenosis_ort.graph.files import weights_on_disk
from kenosis_ort.graph.load import LoadedModel, check_not_quantized, load_model
from kenosis_ort.options import INT8_CACHE
from kenosis_ort.quantizer import int8_cache, stock
from kenosis_ort.targets import Role, Target

_log = logging.getLogger(__name__)

_OVERRIDES: Final = "TensorQuantOverrides"
_NEVER_LISTED: Final = frozenset({"Cast", "QuantizeLinear", "DequantizeLinear"})


def fitted(proto: onnx.ModelProto, request: Request) -> Request:
    """The request fitted to the model that it is about: its names, and stock's placement where the model dictates it.

    Raises:
        OptionError: As `fit_names`.
        AlreadyQuantizedError: The model is quantized.
    """
    request = fit_names(proto, request)
    if not request.is_stock and not request.recipe.weight_only:
        check_not_quantized(proto)
        if request.stock_reason is None and any(node.op_type == "DequantizeLinear" for node in proto.graph.node):
            request = request.with_stock_placement("the model brings quantized weights of its own")
    return request if request.kv_cache is None else replace(request, caches=find_caches(proto, request.kv_cache))


def fit_names(proto: onnx.ModelProto, request: Request) -> Request:
    """The request with the named nodes and operator types fitted to the model.

    A name that fits nothing is complained of. A list that leaves out nothing which the target would quantize says
    nothing: `onnxruntime.quantization.get_qdq_config` names all operators of the model where its caller named none.

    Raises:
        OptionError: A name fits nothing, within `kenosis_ort.errors.strict_names`.
    """
    known = {node.name for graph in walk.all_graphs(proto.graph) for node in graph.node}
    types = {node.op_type for graph in walk.all_graphs(proto.graph) for node in graph.node}
    complaints = [
        _unknown(option, name, "node", known)
        for option, names in (
            ("nodes_to_quantize", request.nodes_to_quantize),
            ("nodes_to_exclude", request.nodes_to_exclude),
            ("recipe.bits", request.widths.by_node),
        )
        for name in names
        if name not in known
    ]
    if request.op_types_named and not types & set(request.op_types):
        fix = f"the model has {sorted(types)}."
        complaints.append(_unknown("op_types_to_quantize", request.op_types[0], "operator", types, fix=fix))
    options, ignored = _fit_overrides(proto, request)
    named = {*request.nodes_to_quantize, *request.nodes_to_exclude}
    others = (node.op_type for node in walk.nodes_within(proto.graph.node) if node.name not in named)
    complaints += ignored
    return replace(
        request,
        extra_options=options,
        complaints=tuple(dict.fromkeys((*request.complaints, *complaints))),
        names_all_types=request.op_types_named and _all_types(proto, request),
        names_all_nodes=bool(request.nodes_to_quantize) and all(runs_float(request.target, op) for op in others),
    )


def _fit_overrides(proto: onnx.ModelProto, request: Request) -> tuple[Mapping[str, Any], list[str]]:
    """The extra options with overrides as they are read, and complaints of what is ignored in them.

    Raises:
        OptionError: They make no sense, or name a tensor that the model does not have.
    """
    overrides = request.extra_options.get(_OVERRIDES)
    if not overrides or request.is_stock:
        return request.extra_options, []
    if not isinstance(overrides, Mapping):
        raise OptionError(f"{_OVERRIDES} is no dictionary", where="extra_options", fix="lists by tensor name")
    known = {name for node in proto.graph.node for name in (*node.input, *node.output) if name}
    known |= {value.name for value in (*proto.graph.input, *proto.graph.initializer)}  # that nothing reads
    types, nodes = {n.op_type for n in proto.graph.node}, {n.name for n in proto.graph.node}
    anchors = {t for t in types if any(rule.role is Role.ANCHOR for rule in request.target.rules_of(t))}
    weights = {n.input[1] for n in proto.graph.node if len(n.input) > 1 and n.op_type in anchors}
    weights &= {tensor.name for tensor in proto.graph.initializer}
    complaints = []
    read = dict[str, Any]()
    for name, given in overrides.items():
        if name not in known:
            raise OptionError(
                f"{_OVERRIDES} names '{name}', which is no tensor of the model.{did_you_mean(name, known)}",
                where="extra_options",
                fix="use tensor names as in the model",
            )
        entries = stock.read_override(name, given, proto, request.activation_type, request.weight_type)
        _serve_override(request.target, name, entries, weight=name in weights)
        read |= {name: entries} if entries else {}
        for entry in (part for each in entries for part in (each, each.get("convert") or {})):
            words = [str(word) for word in entry if word not in stock.OVERRIDE_KEYS]
            complaints += [_unknown(_OVERRIDES, word, "setting", stock.OVERRIDE_KEYS) for word in words]
            others = [node for node in entry.get("recv_nodes", ()) if node not in nodes]
            complaints += [_unknown(_OVERRIDES, node, "node", nodes) for node in others]
    return {**request.extra_options, _OVERRIDES: read}, complaints


def _unknown(option: str, name: str, kind: str, known: Collection[str], *, where: str = "", fix: str = "") -> str:
    """The complaint about a name that fits nothing in the model."""
    what = f"{option} names '{name}', which is no {kind} of the model.{did_you_mean(name, known)}"
    return unknown_name(what, where=where or option, fix=fix or f"use {kind} names as in the model.")


def _all_types(proto: onnx.ModelProto, request: Request) -> bool:
    """Whether the list of operator types leaves out no operator that the target would quantize.

    Bodies of operators that are listed are not looked at: `get_qdq_config` lists the types of the main graph.
    """
    listed, excluded = set(request.op_types), set(request.nodes_to_exclude)
    others = walk.nodes_within(node for node in proto.graph.node if node.op_type not in listed)
    missing = {node.op_type for node in others if node.name not in excluded} - listed - _NEVER_LISTED
    return missing.isdisjoint(stock.QUANTIZABLE_OPS) or all(runs_float(request.target, op) for op in missing)


def _serve_override(target: Target, name: str, entries: Sequence[Mapping[str, Any]], *, weight: bool) -> None:
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
            raise not_taken(f"QuantType.{kind.name} for '{name}'", _OVERRIDES, target, types, taken)
        if fixed and (entry.get("symmetric") is False or np.any(np.asarray(entry.get("zero_point", 0)))):
            raise OptionError(
                f"target '{target.name}' takes zero point 0 alone, and the entry of '{name}' says another",
                where=_OVERRIDES,
                fix="leave out 'symmetric' and 'zero_point' of that tensor",
            )


def with_open_defaults(proto: onnx.ModelProto, request: Request, data: KeepingReader | None) -> Request:
    """The request with the inputs of a default value that stay inputs: those that are fed, or meant to be."""
    listed = constants.default_inputs(proto)
    if not listed:
        return request
    fed = {name for feed in ([] if data is None else data.peek(1)) for name in feed}
    return replace(request, open_defaults=frozenset(listed) & {*constants.meant_as_defaults(proto), *fed})


_NAMED: Final = re.compile(r"past|present|cache|(?<![a-z])(key|value|kv|k|v)s?(?![a-z])")
_LEAST_RANK: Final = 3
"""Batch, tokens and channels; recurrent states have fewer, or other names."""


def find_caches(model: onnx.ModelProto, source: str | os.PathLike[str]) -> tuple[int8_cache.Cache, ...]:
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
    paired = {o: i for o, i in bodies.state_pairs(model).items() if i in inputs}
    left = sorted(inputs - set(paired.values()))
    nodes = (node for graph in walk.all_graphs(model.graph) for node in graph.node)
    appended_to = {name for node in nodes if node.op_type == "Concat" for name in node.input}
    grown = [name for name in left if name in appended_to]
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
        *(int8_cache.Cache(past, present) for present, past in paired.items()),
        *(int8_cache.Cache(past, None) for past in left),
        *(int8_cache.Cache(None, present) for present in apart),
    )
    return found if source == INT8_CACHE else _with_scales_of(Path(source), found)


def _with_scales_of(path: Path, caches: Sequence[int8_cache.Cache]) -> tuple[int8_cache.Cache, ...]:
    known = int8_cache.cache_scales(load_model(path, ask_runtime=False).proto, str(path))
    scales = {bodies.state_stem(name): scale for name, scale in known.items()}
    for cache in caches:
        if bodies.state_stem(cache.names[0]) not in scales:
            what, fix = f"'{path}' has no int8 cache", f"make it with kv_cache='{INT8_CACHE}' first"
            if scales:
                what = f"the cache of '{path}' has nothing like '{cache.names[0]}'"
                fix = "give the file that goes on with this one's cache"
            raise OptionError(what, where="kv_cache", fix=fix)
    return tuple(cache._replace(scale=scales[bodies.state_stem(cache.names[0])]) for cache in caches)


def _is_cache(value: onnx.ValueInfoProto) -> bool:
    tensor = value.type.tensor_type
    named = _NAMED.search(value.name.lower().replace("_", " "))
    return named is not None and tensor.elem_type == TensorProto.FLOAT and len(tensor.shape.dim) >= _LEAST_RANK


@contextmanager
def opened(source: str | os.PathLike[str] | onnx.ModelProto, request: Request) -> Iterator[Call]:
    """A call with its model as target and caller let it be, and the request fitted to it.

    The weights of a large model stay on disk, and so do those that are made of them inside.

    Args:
        source: The float model.
        request: What the caller wants.

    Raises:
        KenosisError: The model is not usable, or the request does not fit it.
    """
    start = time.perf_counter()
    loaded = load_model(source, custom_op_libraries=request.custom_op_libraries, lazily=True)
    with weights_on_disk(loaded.proto):
        call = Call(loaded=loaded, request=request, size_before=loaded.file_bytes, made_up=partial(_made_up, loaded))
        call.notes += loaded.notes
        if request.target.static_shapes and not request.is_stock:
            call.loaded, notes = preparation.with_static_shapes(call.loaded, request.target.name)
            call.notes += notes
        if request.max_opset is not None:
            call.loaded, notes = preparation.with_lowered_opset(call.loaded, preparation.highest_opset(request))
            call.notes += notes
        call.seconds["load"] = time.perf_counter() - start
        with call.stage("profile"):
            request = call.attempt("The host profile", partial(target_options.with_own_profile, request), request)
        call.request = fitted(call.loaded.proto, request)
        call.warnings += call.request.complaints
        yield call


def _made_up(loaded: LoadedModel) -> list[Feed]:
    from kenosis_ort.calibration.synthetic.reader import SyntheticReader  # few calls make samples up

    try:
        return list(sample_feeds(SyntheticReader(loaded, samples=1)))
    except CalibrationError as error:
        _log.info("no sample made up: %s", error)
        return []
