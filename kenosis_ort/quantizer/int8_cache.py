"""Keys and values of a decoder's cache as int8: a quarter of the bytes; attention reads them turned back to float.

A cache enters as an input (``past``), grows by a token and leaves as an output (``present``). Both get one scale ``s``,
and the zero point 0, so that an empty or zeroed cache stays what it is. This is done in two steps:

- `quantize_cache` puts Q and DQ behind ``past`` and before ``present``; the interface stays float. Where ``present`` is
  a Concat of ``past`` and what is new, integers are concatenated: ``Q(concat(DQ(p), n)) = concat(p, Q(n))``, because
  ``Q(DQ(p)) = p``, so that a cache is never rounded twice.
- `open_cache` takes off the outer Q of ``past`` and the outer DQ of ``present``: the integers are the interface.

The file in between computes exactly what the last one does, from caches in float; comparisons and passes see that one.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort.errors import ModelLoadError
from kenosis_ort.graph.constants import replace_nodes
from kenosis_ort.graph.qdq import DQ, Q
from kenosis_ort.graph.walk import MAIN_DOMAINS, all_graphs, all_names, read_names, rename_all, reserve_name

_REORDERING: Final = frozenset(
    {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Expand", "Identity"}
)
"""Operators that only move the numbers of their first input, and do so with integers too."""
_KEY: Final = "kenosis_ort.kv_cache"
_LEVELS: Final = 127
_LARGEST: Final = float(np.finfo(np.float32).max)


class Cache(NamedTuple):
    """One tensor of a cache.

    Attributes:
        past: The input that brings it; None where another file reads what this one computes.
        present: The output that it leaves by; None where it is read only, as keys of an encoder are.
        scale: Of its integers; None as long as it is not known.
    """

    past: str | None
    present: str | None
    scale: float | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the cache's input and output, as far as there are."""
        return tuple(name for name in (self.past, self.present) if name is not None)


def scale_for(ranges: Sequence[tuple[float, float]]) -> float:
    """The scale of int8 with zero point 0 that holds all ranges; 1 where these are empty."""
    largest = max((abs(end) for pair in ranges for end in pair), default=0.0)
    scale = np.float32(largest / _LEVELS)
    return float(scale) if np.isfinite(scale) and scale > 0 else 1.0


def with_scales(caches: Sequence[Cache], range_of: Callable[[str], tuple[float, float]]) -> tuple[Cache, ...]:
    """Caches with the scales that they have by ranges, where they have none yet."""
    ranges = ([range_of(name) for name in cache.names] for cache in caches)
    return tuple(
        cache._replace(scale=cache.scale or scale_for(seen)) for cache, seen in zip(caches, ranges, strict=True)
    )


def quantize_cache(model: onnx.ModelProto, caches: Sequence[Cache]) -> None:
    """Puts Q and DQ at the inputs and outputs of a cache, in place; the scales go into the metadata.

    Args:
        model: The model, in topological order.
        caches: With their scales; the model has their inputs and outputs.
    """
    graph = model.graph
    taken = all_names(model)
    constants = [numpy_helper.from_array(np.int8(0), reserve_name("kv_cache_zero_point", taken))]
    joined = {name: node.input for node in graph.node if node.op_type == "Concat" for name in node.output}
    grown = {c.present: c for c in caches if c.past and c.present and c.past in joined.get(c.present, ())}
    real = {c.past: reserve_name(f"{c.past}_dequantized", taken) for c in caches if c.past}
    raw = {c.present: reserve_name(f"{c.present}_float", taken) for c in caches if c.present and c.present not in grown}
    integers = {name: reserve_name(f"{name}_int8", taken) for cache in caches for name in cache.names}
    _rename_inside(graph, {**real, **raw})
    grids: dict[str, tuple[str, str]] = {}
    before, behind = [], {}
    # Q and DQ for each input and output of the cache.
    for cache in caches:
        scale = numpy_helper.from_array(np.float32(cache.scale), reserve_name(f"{cache.names[0]}_scale", taken))
        constants.append(scale)
        grids.update(dict.fromkeys(cache.names, (scale.name, constants[0].name)))
        if cache.past is not None:
            before += [_node(Q, cache.past, integers[cache.past], grids[cache.past], taken)]
            before += [_node(DQ, integers[cache.past], real[cache.past], grids[cache.past], taken)]
        if cache.present is not None:
            made = _node(DQ, integers[cache.present], cache.present, grids[cache.present], taken)
            rounds = cache.present in raw
            source = raw.get(cache.present, cache.present)
            quantized = [_node(Q, source, integers[cache.present], grids[cache.present], taken)] if rounds else []
            behind[source] = [*quantized, made]
    # Nodes in order; a cache that grows is concatenated in integers.
    nodes = list(before)
    for node in graph.node:
        cache_of = next((grown[name] for name in node.output if name in grown), None)
        if cache_of is not None and cache_of.past and cache_of.present:
            nodes += _concatenate_integers(node, cache_of, real[cache_of.past], integers, grids, taken)
            nodes += behind[cache_of.present]
            continue
        nodes.append(node)
        nodes += [added for name in node.output for added in behind.get(name, ())]
    graph.initializer.extend(constants)
    own = {scale for scale, _ in grids.values()}
    caches_read = {node.name for node in nodes if node.op_type == DQ and node.input[1] in own}
    replace_nodes(graph, _dequantized_late(graph, nodes, caches_read, taken))
    scales = {name: cache.scale for cache in caches for name in cache.names}
    model.metadata_props.append(onnx.StringStringEntryProto(key=_KEY, value=json.dumps(scales)))


def open_cache(model: onnx.ModelProto, caches: Sequence[Cache]) -> None:
    """Makes the integers of a cache the model's inputs and outputs, in place.

    Args:
        model: What `quantize_cache` made.
        caches: The same as there.
    """
    graph = model.graph
    pasts = {cache.past for cache in caches if cache.past}
    presents = {cache.present for cache in caches if cache.present}
    outer = {n.input[0]: n for n in graph.node if n.op_type == Q and n.input[0] in pasts}
    last = {n.output[0]: n for n in graph.node if n.op_type == DQ and n.output[0] in presents}
    taken = all_names(model)
    names: dict[str, str] = {node.output[0]: name for name, node in outer.items()}
    for name, node in last.items():
        names[node.input[0]], names[name] = name, reserve_name(f"{name}_dequantized", taken)
    _rename_inside(graph, names)
    read = {name for nested in all_graphs(graph) for node in nested.node for name in read_names(node)}
    unread = [node for name, node in last.items() if names[name] not in read]
    for node in (*outer.values(), *unread):
        graph.node.remove(node)
    scales = {node.input[1] for node in (*outer.values(), *last.values())}
    caches_read = {node.name for node in graph.node if node.op_type == DQ and node.input[1] in scales}
    replace_nodes(graph, _dequantized_late(graph, list(graph.node), caches_read, all_names(model)))
    ends = pasts | presents
    for value in (*graph.input, *graph.output):
        if value.name in ends:
            value.type.tensor_type.elem_type = TensorProto.INT8


def _dequantized_late(
    graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto], wanted: Collection[str], taken: set[str]
) -> list[onnx.NodeProto]:
    """Nodes in order, with DQs of a cache behind what only moves its numbers: integers are transposed and reshaped.

    The session's optimizer does the same by a Q and a DQ of its own, and makes the Q of a DQ without zero point one of
    uint8, which cuts off all that is negative (ONNX Runtime up to 1.32: 10 dB where 41 are left).

    Args:
        graph: The main graph.
        nodes: Its nodes to be, in topological order.
        wanted: Names of DQs.
        taken: Names of values and nodes; grows.
    """
    outputs = {value.name for value in graph.output}
    integers = {n.output[0]: n for n in nodes if n.name in wanted}  # by the float value, its DQ
    found: list[onnx.NodeProto] = []
    for node in nodes:
        moved = integers.get(node.input[0]) if node.op_type in _REORDERING and node.domain in MAIN_DOMAINS else None
        if moved is None:
            found.append(node)
            continue
        result, mover, late = node.output[0], onnx.NodeProto(), onnx.NodeProto()
        mover.CopyFrom(node)
        mover.input[0], mover.output[0] = moved.input[0], reserve_name(f"{result}_int8", taken)
        late.CopyFrom(moved)
        late.name, late.input[0], late.output[0] = reserve_name(f"{result}_{DQ}", taken), mover.output[0], result
        integers[result] = late
        found += [mover, late]
    read = {name for node in found for name in read_names(node)} | outputs
    return [n for n in found if n.op_type != DQ or n.output[0] not in integers or n.output[0] in read]


def cache_scales(model: onnx.ModelProto, where: str = "the model") -> Mapping[str, float]:
    """The scales of a model's int8 cache by the names of its inputs and outputs; none where it has no such.

    Args:
        model: What `quantize_cache` made, or any other.
        where: What an error calls it.

    Raises:
        ModelLoadError: The metadata, which anybody may have written, holds anything but positive numbers by name.
    """
    text = next((entry.value for entry in model.metadata_props if entry.key == _KEY), "{}")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    scales = found.values() if isinstance(found, dict) else (0,)
    if not all(type(scale) in (int, float) and 0 < scale <= _LARGEST for scale in scales):  # a bool is none
        what = "its scales of the cache are no positive numbers by name"
        raise ModelLoadError(what, where=f"{where}, metadata {_KEY}", fix="make the file anew with kv_cache='int8'")
    return {name: float(scale) for name, scale in found.items()}


def _rename_inside(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Renames values, and leaves the graph's inputs and outputs what they are called."""
    ends = [(value, value.name) for value in (*graph.input, *graph.output)]
    rename_all(graph, names)
    for value, name in ends:
        value.name = name


def _concatenate_integers(
    node: onnx.NodeProto,
    cache: Cache,
    past: str,
    integers: Mapping[str, str],
    grids: Mapping[str, tuple[str, str]],
    taken: set[str],
) -> list[onnx.NodeProto]:
    """A Concat of the integers of a cache, behind Q of what else it reads."""
    assert cache.past is not None
    assert cache.present is not None
    nodes, inputs = [], []
    for name in node.input:
        if name == past:
            inputs.append(integers[cache.past])
            continue
        inputs.append(reserve_name(f"{name}_int8", taken))
        nodes.append(_node(Q, name, inputs[-1], grids[cache.past], taken))
    grown = onnx.NodeProto()
    grown.CopyFrom(node)
    grown.input[:], grown.output[:] = inputs, [integers[cache.present]]
    return [*nodes, grown]


def _node(kind: str, source: str, result: str, grid: Sequence[str], taken: set[str]) -> onnx.NodeProto:
    """Q, or DQ without its zero point, which is 0.

    A DQ that has one is passed on by the session's optimizer, behind an Unsqueeze for one, as a Q of int8 whose zero
    point the optimizer then makes uint8: from operator set 21 on it refuses that itself (ONNX Runtime on x86-64).
    """
    inputs = [source, *(grid if kind == Q else grid[:1])]
    return helper.make_node(kind, inputs, [result], name=reserve_name(f"{result}_{kind}", taken))
