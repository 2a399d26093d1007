"""Weights of 4 or 8 bits in blocks, everything else float: for models that wait for their weights, as decoders do."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

from kenosis_ort.accuracy.layers import Layer, layers
from kenosis_ort.accuracy.patches import gather_moments
from kenosis_ort.calibration.feeds import check_feed, input_specs, sample_feeds
from kenosis_ort.checks import flag, several, whole
from kenosis_ort.checks import path as check_path
from kenosis_ort.errors import NothingToQuantizeError, OptionError, did_you_mean, last_gate
from kenosis_ort.graph.constants import meant_as_defaults
from kenosis_ort.graph.index import GraphIndex
from kenosis_ort.graph.load import load_model
from kenosis_ort.graph.prepare import prepare
from kenosis_ort.graph.save import write_model
from kenosis_ort.graph.session import open_session
from kenosis_ort.option_types import check_model
from kenosis_ort.passes.evaluator import split_feeds
from kenosis_ort.quantizer.linear_layers import LinearLayer
from kenosis_ort.rewrite import FLOAT_FORMS, OPTIONAL_FORMS, PREPARATION
from kenosis_ort.runtime.limits import runtime_limits
from kenosis_ort.storage.paths import absolute, check_apart
from kenosis_ort.verify.numerics import OutputComparison, compare_outputs
from kenosis_ort.weights.blocks import BlockGrid, Float64, UInt8, block_of
from kenosis_ort.weights.kernels import INT8_PRODUCTS, with_block_embeddings, with_block_weights
from kenosis_ort.weights.rounding import relative_error, round_in_blocks
from kenosis_ort.weights.sensitivity import FEEDS as SENSITIVITY_FEEDS
from kenosis_ort.weights.sensitivity import MOST_BYTES, much_worse, output_errors, worth_their_bytes

_log = logging.getLogger(__name__)

BITS: Final = (4, 8)
BLOCKS: Final = (16, 32, 64, 128, 256)
_LEVELS: Final = (0, 1, 4)
_MOST_FEEDS: Final = 128
_MOST_BYTES: Final = 2**28  # of feeds kept
_WIDEST: Final = 8192  # rows of a matrix; its moments take 8 bytes times the square
_MOMENT_BYTES: Final = 2**29  # of moments gathered in one pass


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
class WeightReport:
    """What was done.

    Attributes:
        layers: Linear layers, then embeddings, in graph order.
        bytes_before: Size of the float model.
        bytes_after: Size of the file.
        outputs: Comparison with the float model, on samples that rounding did not see; empty without samples.
        notes: What was done to the float model before, and what else is to be known, in sentences.
    """

    layers: tuple[BlockLayer, ...]
    bytes_before: int
    bytes_after: int
    outputs: tuple[OutputComparison, ...]
    notes: tuple[str, ...]


@last_gate
def quantize_weights(
    model_input: str | os.PathLike[str] | onnx.ModelProto,
    model_output: str | os.PathLike[str],
    calibration_data_reader: Any = None,
    *,
    bits: int = 4,
    block_size: int = 32,
    symmetric: bool = False,
    embeddings: bool = True,
    protect_sensitive: bool = True,
    nodes_to_exclude: Sequence[str] = (),
    accuracy_level: int = INT8_PRODUCTS,
    custom_op_libraries: Sequence[str] = (),
) -> WeightReport:
    """Quantizes the weights of linear layers, MatMul and Gemm, and of embeddings, in blocks; activations stay float.

    With samples the weights are rounded so that the outputs of their layer change least (GPTQ, then coordinate descent,
    on grids that protect what matters), without to nearest.

    Args:
        model_input: The float model; not changed.
        model_output: The file to write.
        calibration_data_reader: Samples, as for `quantize_static`; at most 128 are used.
        bits: 4 or 8.
        block_size: Weights that share a scale: 16, 32, 64, 128 or 256.
        symmetric: Without zero points.
        embeddings: Quantize look-ups of rows as well.
        protect_sensitive: 8 bits for the layers that cost the outputs most for their bytes, at most a tenth more bytes
            in all; without samples for those that lose much more (6 dB) than the others do.
        nodes_to_exclude: Names of nodes that stay float.
        accuracy_level: Of the kernel: 4 multiplies in 8 bits and is fastest; 0 and 1 multiply in float32.
        custom_op_libraries: Libraries with custom operators to register; none is loaded unasked.

    Returns:
        Layers, sizes, and the comparison with the float model.

    Raises:
        KenosisError: One of its subclasses; nothing was written.
    """
    check_model(model_input)
    output = absolute(check_path("model_output", model_output))
    if not isinstance(model_input, onnx.ModelProto):
        _check_apart(Path(model_input), output)
    _check_options(bits, block_size, accuracy_level)
    symmetric, embeddings = flag("symmetric", symmetric), flag("embeddings", embeddings)
    protect_sensitive = flag("protect_sensitive", protect_sensitive)
    excluded = set(several("nodes_to_exclude", nodes_to_exclude))
    libraries = tuple(several("custom_op_libraries", custom_op_libraries))
    loaded = load_model(model_input, custom_op_libraries=libraries)
    feeds = _feeds(loaded.proto, calibration_data_reader)
    fit, held_out = split_feeds(feeds)
    limits = runtime_limits()
    prepared = prepare(
        loaded.proto,
        preprocessed=False,
        min_opset=21,  # 4-bit tables of embeddings
        max_ir=limits.max_ir,
        max_opset=limits.max_opset,
        keep_inputs=meant_as_defaults(loaded.proto),
        rewrites=(*PREPARATION, *(form for form in FLOAT_FORMS if form not in OPTIONAL_FORMS)),
        custom_op_libraries=libraries,
    )
    _check_names(excluded, prepared.proto, prepared.nodes)
    excluded |= {now for name in excluded for now in prepared.nodes.get(name, ())}
    moments = _Moments(prepared.proto, fit or feeds, libraries)
    rounder = _Rounder(moments, bits, block_size, symmetric, excluded)
    model = with_block_weights(prepared.proto, rounder, accuracy_level=accuracy_level)
    if model is not None and protect_sensitive and bits < 8:
        rounder.sensitive = _sensitive(prepared.proto, rounder, fit or feeds, libraries)
        if rounder.sensitive:
            model = with_block_weights(prepared.proto, rounder, accuracy_level=accuracy_level)
    looked_up: tuple[str, ...] = ()
    if embeddings:
        model, looked_up = with_block_embeddings(model or prepared.proto, bits, block_size, excluded)
    done = [*rounder.done.values(), *(BlockLayer(name, bits, float("nan"), False) for name in looked_up)]
    if model is None or not done:
        raise NothingToQuantizeError(
            "no linear layer with constant weights of 16 rows and columns, and no embedding",
            fix="quantize_static quantizes convolutions",
        )
    written = write_model(model, output, external_data=loaded.is_split, check=lambda path: _loads(path, libraries))
    compared = compare_outputs(loaded.proto, model, held_out or feeds, custom_op_libraries=libraries) if feeds else ()
    notes = list(prepared.notes)
    if rounder.sensitive:
        notes.append(f"{len(rounder.sensitive)} layers that cost most for their bytes have 8 bits.")
    if feeds and not held_out:
        notes.append(f"{len(feeds)} samples leave none to compare by that rounding did not see.")
    return WeightReport(tuple(done), int(loaded.proto.ByteSize()), written, compared, tuple(notes))


def _loads(path: Path, custom_op_libraries: Sequence[str]) -> None:
    open_session(path, custom_op_libraries=custom_op_libraries)


def _check_apart(source: Path, output: Path) -> None:
    if source.resolve() != output.resolve():
        check_apart([("the output", output)], [("the float model", source)])


def _check_options(bits: Any, block_size: Any, accuracy_level: Any) -> None:
    for name, value, among in (
        ("bits", bits, BITS), ("block_size", block_size, BLOCKS), ("accuracy_level", accuracy_level, _LEVELS),
    ):  # fmt: skip
        if whole(name, value) not in among:
            raise OptionError(f"{name} must be one of {', '.join(map(str, among))}, not {value}", where=name)


def _check_names(excluded: set[str], model: onnx.ModelProto, now: Mapping[str, Any]) -> None:
    known = {node.name for node in model.graph.node} | now.keys()
    for name in sorted(excluded - known):
        raise OptionError(f"the model has no node '{name}'.{did_you_mean(name, known)}", where="nodes_to_exclude")


def _feeds(model: onnx.ModelProto, reader: Any) -> list[dict[str, Any]]:
    """Returns checked samples, few enough to be held in memory."""
    if reader is None:
        return []
    required, optional = input_specs(model)
    kept: list[dict[str, Any]] = []
    held = 0
    for sample, feed in enumerate(itertools.islice(sample_feeds(reader), _MOST_FEEDS)):
        kept.append(check_feed(feed, required, optional, sample))
        held += sum(int(getattr(value, "nbytes", 0)) for value in kept[-1].values())
        if held > _MOST_BYTES:
            break
    return kept


def _sensitive(
    model: onnx.ModelProto, rounder: _Rounder, feeds: Sequence[Mapping[str, Any]], libraries: Sequence[str]
) -> frozenset[str]:
    """Returns the layers that get 8 bits, once all are rounded to fewer."""
    own = {name: layer.error_db for name, layer in rounder.done.items()}
    if not feeds or 4 * sum(rounder.sizes.values()) * len(own) > MOST_BYTES:
        return much_worse(own)

    def alone(name: str) -> onnx.ModelProto | None:
        return with_block_weights(model, lambda layer, _: rounder.known(name) if layer.node.name == name else None)

    errors = output_errors(model, alone, own, feeds[:SENSITIVITY_FEEDS], custom_op_libraries=libraries)
    return worth_their_bytes(errors, rounder.sizes)


class _Moments:
    """Second moments of what layers read, gathered for some layers at a time: all of them need not fit into memory."""

    def __init__(self, model: onnx.ModelProto, feeds: Sequence[Mapping[str, Any]], libraries: Sequence[str]) -> None:
        self._model, self._feeds, self._libraries = model, feeds, libraries
        index = GraphIndex(model)
        found = layers(index) if feeds else ()
        self._todo = [layer for layer in found if not layer.is_convolution and layer.channels_in <= _WIDEST]
        self._known: dict[str, Float64] = {}

    def of(self, name: str) -> Float64 | None:
        """Returns the moments of a layer, (K, K); None where there are none."""
        if name not in self._known and any(layer.name == name for layer in self._todo):
            self._known = {}
            batch = list(self._batch(name))
            gathered = gather_moments(self._model, batch, self._feeds, custom_op_libraries=self._libraries)
            self._known = {layer: moments[0] for layer, moments in gathered.items()}
        return self._known.get(name)

    def _batch(self, first: str) -> Iterator[Layer]:
        """Yields a layer and those behind it that fit the budget."""
        held = 0
        for layer in itertools.dropwhile(lambda layer: layer.name != first, self._todo):
            size = 8 * layer.channels_in**2
            if held and held + size > _MOMENT_BYTES:
                return
            held += size
            yield layer


class _Rounder:
    """Chooses the integers of one layer after the other.

    Attributes:
        done: What was chosen, by node.
        sizes: Weights, by node.
        sensitive: Nodes that get 8 bits.
    """

    def __init__(self, moments: _Moments, bits: int, block: int, symmetric: bool, excluded: Collection[str]) -> None:
        self._moments, self._bits, self._block, self._symmetric = moments, bits, block, symmetric
        self._excluded = excluded
        self._chosen: dict[str, tuple[UInt8, BlockGrid]] = {}
        self.done: dict[str, BlockLayer] = {}
        self.sizes: dict[str, int] = {}
        self.sensitive: frozenset[str] = frozenset()

    def __call__(self, layer: LinearLayer, matrix: Float64) -> tuple[Float64, BlockGrid] | None:
        """Returns integers and grid of a layer, None where it is to stay float."""
        name = layer.node.name
        if name in self._excluded:
            return None
        bits = 8 if name in self.sensitive else self._bits
        if name in self._chosen and self.done[name].bits == bits:
            return self.known(name)
        moments = self._moments.of(name)
        block = block_of(len(matrix), self._block)
        try:
            found, grid = round_in_blocks(matrix, bits, block, moments, symmetric=self._symmetric)
        except np.linalg.LinAlgError as error:
            _log.info("'%s' is rounded to nearest: %s", name, error)
            moments = None
            found, grid = round_in_blocks(matrix, bits, block, None, symmetric=self._symmetric)
        error_db = 10.0 * np.log10(max(relative_error(matrix, found, grid, moments), 1e-30))
        self.done[name] = BlockLayer(name, bits, float(error_db), moments is not None)
        self._chosen[name], self.sizes[name] = (found.astype(np.uint8), grid), found.size
        return found, grid

    def known(self, name: str) -> tuple[Float64, BlockGrid]:
        """Returns the integers and grid that were chosen for a layer."""
        integers, grid = self._chosen[name]
        return integers.astype(np.float64), grid
