"""Weights of 4 or 8 bits in blocks, everything else float: for models that wait for their weights, as decoders do.

Those layers get 8 bits whose own rounding costs the outputs most for the bytes that it saves. Each layer alone is put
on its grid and the outputs are compared on a few samples; such errors nearly add up. The value projections of a Llama
with grouped queries hold 4 % of its weights and make 14 % of the error. Without samples, or where that is too much to
run, a layer is measured by the error of its own weights or outputs.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.accuracy.error import find_uses, output_error
from kenosis_ort.errors import NothingToQuantizeError, OptionError, callers_own, did_you_mean
from kenosis_ort.graph.bodies import state_pairs
from kenosis_ort.graph.constants import meant_as_defaults
from kenosis_ort.graph.view import GraphView, PreparedModel
from kenosis_ort.passes.input_moments import gather_moments
from kenosis_ort.passes.layers import Layer, layers
from kenosis_ort.quantizer.linear_layers import LinearLayer, linear_layers
from kenosis_ort.rewrite.prepare import prepare
from kenosis_ort.rewrite.rule import Rule
from kenosis_ort.runtime.session import open_session
from kenosis_ort.storage.spool import Spool
from kenosis_ort.weights import blocks
from kenosis_ort.weights.block_rounding import relative_error, round_in_blocks, weigh_channels
from kenosis_ort.weights.blocks import BlockGrid, Float64, UInt8, block_of, nearest

Feed = Mapping[str, Any]
_log = logging.getLogger(__name__)

BLOCK: Final = 32
_EMBEDDING_COST: Final = 10**0.1  # 1 dB
_WIDEST: Final = 8192  # rows of a matrix; its moments take 8 bytes times the square
_MOMENT_BYTES: Final = 2**29  # of moments gathered in one pass
_SENSITIVITY_FEEDS: Final = 4
_MOST_BYTES: Final = 2**34
"""Float weights times layers, beyond which a model for each layer takes too long."""
_EXTRA: Final = 0.1  # of the bytes of all layers
_WORTH: Final = 1.5  # times what a byte saves on average
_MUCH_WORSE: Final = 4.0  # times the middle layer's error: 6 dB


@dataclass(frozen=True)
class BlockLayer:
    """One linear layer or embedding.

    Attributes:
        node: Its name.
        bits: Of a weight.
        error_db: Noise of its output against its signal on calibration samples, of its weights without; NaN for
            embeddings.
        rounded: Rounding followed calibration samples.
    """

    node: str
    bits: int
    error_db: float
    rounded: bool


@dataclass(frozen=True)
class BlockModel:
    """A model with weights in blocks.

    Attributes:
        model: It.
        layers: Linear layers, then embeddings, in graph order.
        notes: What was done, in sentences.
    """

    model: onnx.ModelProto
    layers: tuple[BlockLayer, ...]
    notes: tuple[str, ...]


def weights_in_blocks(
    model: onnx.ModelProto,
    feeds: Sequence[Mapping[str, Any]],
    *,
    forms: Sequence[Rule],
    bits: int,
    block_size: int = BLOCK,
    symmetric: bool = False,
    embeddings: bool = True,
    protect_sensitive: bool = True,
    nodes_to_exclude: Collection[str] = (),
    accuracy_level: int = blocks.INT8_PRODUCTS,
    custom_op_libraries: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> BlockModel:
    """A copy of a float model with weights in blocks; ``forms`` are its rewrites, the others as of `quantize_weights`.

    Raises:
        NothingToQuantizeError: It has neither such layers nor an embedding.
        OptionError: A name is that of no node.
    """
    prepared, excluded = _prepared(model, forms, nodes_to_exclude, custom_op_libraries)
    moments = _Moments(prepared.proto, feeds, custom_op_libraries)
    rounder = _Rounder(moments, bits, block_size, symmetric, excluded, progress)
    model = prepared.proto
    if feeds and bits < 8:
        model, moments.factors = weigh_channels(model, moments.of, rounder.error, excluded)
    made = blocks.with_block_weights(model, rounder, accuracy_level=accuracy_level)
    if made is not None and protect_sensitive and bits < 8:
        rounder.sensitive = _sensitive(model, rounder, feeds, custom_op_libraries)
        if rounder.sensitive:
            made = blocks.with_block_weights(model, rounder, accuracy_level=accuracy_level)
    looked_up: tuple[str, ...] = ()
    embedding_bits = bits
    if embeddings:
        linear = made or model
        if protect_sensitive and bits < 8:
            embedding_bits = _embedding_bits(model, linear, rounder, feeds, custom_op_libraries)
        made, looked_up = blocks.with_block_embeddings(linear, embedding_bits, block_size, excluded)
    done = [*rounder.done.values(), *(BlockLayer(name, embedding_bits, float("nan"), False) for name in looked_up)]
    if made is None or not done:
        raise _nothing()
    notes = list(prepared.notes)
    if moments.factors:
        notes.append(f"Channels that matter are scaled in front of {len(moments.factors)} layers (AWQ).")
    if rounder.sensitive:
        notes.append(f"{len(rounder.sensitive)} layers that cost most for their bytes have 8 bits.")
    if looked_up and embedding_bits > bits:
        notes.append(f"Embeddings have 8 bits: {bits} cost the outputs more, or no samples tell.")
    return BlockModel(made, tuple(done), tuple(notes))


def _embedding_bits(
    model: onnx.ModelProto, linear: onnx.ModelProto, rounder: _Rounder, feeds: Sequence[Feed], libraries: Sequence[str]
) -> int:
    """Bits of tables that are looked up: 8 where fewer cost the outputs more than 1 dB, and where no samples tell.

    Args:
        model: The float model.
        linear: The same with its linear layers in blocks.
        rounder: Of the linear layers.
        feeds: Samples.
        libraries: With custom operators to register.
    """
    if not feeds:
        return 8

    def embedded(name: str) -> onnx.ModelProto:
        return blocks.with_block_embeddings(linear, int(name), rounder.block, rounder.excluded)[0]

    some, few = feeds[:_SENSITIVITY_FEEDS], str(rounder.bits)
    errors = output_errors(model, embedded, (few, "8"), some, custom_op_libraries=libraries)
    return rounder.bits if errors[few] <= _EMBEDDING_COST * errors["8"] else 8


def nodes_in_blocks(
    model: onnx.ModelProto,
    *,
    forms: Sequence[Rule],
    nodes_to_exclude: Collection[str] = (),
    custom_op_libraries: Sequence[str] = (),
) -> tuple[onnx.ModelProto, frozenset[str]]:
    """A float model as `weights_in_blocks` prepares it, and the names of the nodes whose weights it quantizes.

    Raises:
        NothingToQuantizeError: There is none.
        OptionError: A name is that of no node.
    """
    prepared, excluded = _prepared(model, forms, nodes_to_exclude, custom_op_libraries)
    found = {*linear_layers(prepared.proto), *blocks.embeddings_for_blocks(prepared.proto, BLOCK)} - excluded
    if not found:
        raise _nothing()
    return prepared.proto, frozenset(found)


def _prepared(
    model: onnx.ModelProto, forms: Sequence[Rule], nodes_to_exclude: Collection[str], libraries: Sequence[str]
) -> tuple[PreparedModel, set[str]]:
    """The model in our forms, and the names in it of the nodes that stay float."""
    prepared = prepare(
        model,
        preprocessed=False,
        min_opset=21,  # 4-bit tables of embeddings
        keep_inputs=meant_as_defaults(model),
        rewrites=forms,
        custom_op_libraries=libraries,
    )
    excluded = set(nodes_to_exclude)
    known = {node.name for node in prepared.proto.graph.node} | prepared.nodes.keys()
    for name in sorted(excluded - known):
        raise OptionError(
            f"the model has no node '{name}'.{did_you_mean(name, known)}",
            where="nodes_to_exclude",
            fix="use node names as in the model",
        )
    return prepared, excluded | {now for name in excluded for now in prepared.nodes.get(name, ())}


def _nothing() -> NothingToQuantizeError:
    return NothingToQuantizeError(
        "no linear layer with constant weights of 16 rows and columns, and no embedding",
        fix="quantize_static quantizes convolutions",
    )


def _sensitive(
    model: onnx.ModelProto, rounder: _Rounder, feeds: Sequence[Mapping[str, Any]], libraries: Sequence[str]
) -> frozenset[str]:
    """The layers that get 8 bits, once all are rounded to fewer."""
    own = {name: layer.error_db for name, layer in rounder.done.items()}
    if not feeds or 4 * sum(rounder.sizes.values()) * len(own) > _MOST_BYTES:
        return much_worse(own)

    def alone(name: str) -> onnx.ModelProto | None:
        return blocks.with_block_weights(model, lambda layer: rounder.known(name) if layer.name == name else None)

    errors = output_errors(model, alone, own, feeds[:_SENSITIVITY_FEEDS], custom_op_libraries=libraries)
    return worth_their_bytes(errors, rounder.sizes)


class _Moments:
    """Second moments of the inputs of layers, gathered for some layers at a time: all of them need not fit into memory.

    Attributes:
        factors: What channels were divided by after their moments were gathered, by layer.
    """

    def __init__(self, model: onnx.ModelProto, feeds: Sequence[Mapping[str, Any]], libraries: Sequence[str]) -> None:
        self._model, self._feeds, self._libraries = model, feeds, libraries
        found = layers(GraphView(model)) if feeds else ()
        self._todo = [layer for layer in found if not layer.is_convolution and layer.channels_in <= _WIDEST]
        self._known: dict[str, Float64] = {}
        self.factors: dict[str, Float64] = {}

    def of(self, name: str) -> Float64 | None:
        """The moments of a layer, (K, K); None where there are none."""
        if name not in self._known and any(layer.name == name for layer in self._todo):
            self._known = {}
            batch = list(self._batch(name))
            gathered = gather_moments(self._model, batch, self._feeds, custom_op_libraries=self._libraries)
            self._known = {layer: moments[0] for layer, moments in gathered.items()}
        found, factors = self._known.get(name), self.factors.get(name)
        return found if found is None or factors is None else found / np.outer(factors, factors)

    def _batch(self, first: str) -> Iterator[Layer]:
        """Yields a layer and those behind it that fit the budget."""
        stored = 0
        for layer in itertools.dropwhile(lambda layer: layer.name != first, self._todo):
            size = 8 * layer.channels_in**2
            if stored and stored + size > _MOMENT_BYTES:
                return
            stored += size
            yield layer


@dataclass
class _Rounder:
    """Chooses the integers of one layer after the other.

    Attributes:
        moments: Of what layers read.
        bits: Of a weight, but for those of `sensitive`.
        block: Rows of a block.
        symmetric: Zero points stand in the middle.
        excluded: Names of nodes that stay float.
        progress: Called with (layers done, layers in all).
        done: What was chosen, by node.
        sizes: Weights, by node.
        sensitive: Nodes that get 8 bits.
    """

    moments: _Moments
    bits: int
    block: int
    symmetric: bool
    excluded: Collection[str]
    progress: Callable[[int, int], None] | None
    done: dict[str, BlockLayer] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    sensitive: frozenset[str] = frozenset()
    _chosen: dict[str, int] = field(default_factory=dict)
    _spool: Spool = field(default_factory=Spool)

    def __call__(self, layer: LinearLayer) -> tuple[UInt8, BlockGrid] | None:
        """Integers and grid of a layer, None where it is to stay float."""
        name = layer.name
        if name in self.excluded:
            return None
        bits = 8 if name in self.sensitive else self.bits
        if name in self._chosen and self.done[name].bits == bits:
            return self.known(name)
        matrix, moments = layer.matrix, self.moments.of(name)
        followed = None if moments is None else self._followed(matrix, bits, moments)
        if followed is None:
            _log.info("'%s' is rounded to nearest", name)
            moments, followed = None, nearest(matrix, bits, block_of(len(matrix), self.block), symmetric=self.symmetric)
        found, grid = followed
        error_db = 10.0 * np.log10(max(relative_error(matrix, found, grid, moments), 1e-30))
        self.done[name] = BlockLayer(name, bits, float(error_db), moments is not None)
        self._chosen[name], self.sizes[name] = len(self._spool), found.size
        self._spool.append({"integers": found, **vars(grid)})
        if self.progress is not None and name not in self.sensitive:
            callers_own(self.progress)(*layer.place)
        return found, grid

    def error(self, matrix: npt.NDArray[np.floating[Any]], moments: Float64) -> float:
        """The relative error of a layer's output with its matrix rounded to follow some moments."""
        found = self._followed(matrix, self.bits, moments)
        return math.inf if found is None else relative_error(matrix, *found, moments)

    def _followed(
        self, matrix: npt.NDArray[np.floating[Any]], bits: int, moments: Float64
    ) -> tuple[UInt8, BlockGrid] | None:
        """Integers and grid of a matrix that follow moments; None where these are not those of any data."""
        real, block = matrix.astype(np.float64), block_of(len(matrix), self.block)
        try:
            found, grid = round_in_blocks(real, bits, block, moments, symmetric=self.symmetric)
        except np.linalg.LinAlgError:
            return None
        return found.astype(np.uint8), grid

    def known(self, name: str) -> tuple[UInt8, BlockGrid]:
        """The integers and grid that were chosen for a layer."""
        stored = self._spool[self._chosen[name]]
        return stored.pop("integers"), BlockGrid(**stored)


# ---- the layers that get 8 bits -------------------------------------------------------------------------------------


def output_errors(
    model: onnx.ModelProto,
    alone: Callable[[str], onnx.ModelProto | None],
    layers: Iterable[str],
    feeds: Sequence[Feed],
    *,
    custom_op_libraries: Sequence[str] = (),
) -> dict[str, float]:
    """The error of the outputs with each layer alone on its grid, relative to the signal.

    States that are fed back are left out where there are other outputs: their effect shows there.

    Args:
        model: The float model.
        alone: Returns it with one layer rounded.
        layers: Names of nodes.
        feeds: A few samples.
        custom_op_libraries: Libraries with custom operators to register.
    """
    states = state_pairs(model)

    def run(candidate: onnx.ModelProto) -> list[dict[str, Any]]:
        with open_session(candidate, custom_op_libraries=custom_op_libraries) as runner:
            return [runner.answer(feed) for feed in feeds]

    reference = run(model)
    uses = find_uses(reference)
    measured = {n: use for n, use in uses.items() if n not in states.keys() | set(states.values())} or uses
    found = {}
    for name in layers:
        made = alone(name)
        found[name] = 0.0 if made is None else float(output_error(run(made), reference, uses=measured))
    return found


def worth_their_bytes(errors: Mapping[str, float], sizes: Mapping[str, int]) -> frozenset[str]:
    """The layers that get 8 bits: the dearest by byte, a tenth of all bytes at most.

    Args:
        errors: Of the outputs, by layer.
        sizes: Weights of a layer.
    """
    left = _EXTRA * sum(sizes.values())
    average = sum(errors.values()) / max(sum(sizes.values()), 1)
    chosen = set()
    for name in sorted(errors, key=lambda name: (-errors[name] / sizes[name], name)):
        if errors[name] / sizes[name] > _WORTH * average and sizes[name] <= left:
            chosen.add(name)
            left -= sizes[name]
    return frozenset(chosen)


def much_worse(errors_db: Mapping[str, float]) -> frozenset[str]:
    """The layers whose error is far above the middle one's."""
    if len(errors_db) < 3:
        return frozenset()
    powers: Float64 = 10 ** (np.array(list(errors_db.values())) / 10)
    return frozenset(n for n, power in zip(errors_db, powers, strict=True) if power > _MUCH_WORSE * np.median(powers))
