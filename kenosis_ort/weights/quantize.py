"""Weights alone in blocks, from a float model to a file: checks, samples, and the report."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import onnx

from kenosis_ort.accuracy.outputs import OutputComparison, compare_outputs
from kenosis_ort.calibration.feeds import bytes_of, checked_feeds, input_specs, no_sample, split_feeds
from kenosis_ort.calibration.readers import source_files
from kenosis_ort.checks import flag, path as check_path, several, whole
from kenosis_ort.errors import OptionError, last_gate
from kenosis_ort.graph.files import check_written, weights_on_disk, write_model
from kenosis_ort.graph.load import load_model
from kenosis_ort.graph.outside import is_outside, length_of
from kenosis_ort.option_types import check_model
from kenosis_ort.rewrite import BLOCK_FORMS
from kenosis_ort.runtime.session import open_session
from kenosis_ort.storage.writing import absolute, room_is_needed
from kenosis_ort.weights import blocks
from kenosis_ort.weights.block_model import BlockLayer, weights_in_blocks

BITS: Final = (4, 8)
BLOCKS: Final = (16, 32, 64, 128, 256)
_LEVELS: Final = (0, 1, 4)
_MOST_FEEDS: Final = 128
_MOST_BYTES: Final = 2**28  # of feeds kept


@dataclass(frozen=True)
class WeightReport:
    """Report of the quantized weights.

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
    accuracy_level: int = blocks.INT8_PRODUCTS,
    custom_op_libraries: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> WeightReport:
    """Quantizes the weights of linear layers, MatMul and Gemm, and of embeddings, in blocks; activations stay float.

    With samples the weights are rounded so that the outputs of their layer change least (GPTQ, then coordinate descent,
    on grids that protect what matters, behind channels scaled for it, AWQ), without to nearest.

    Args:
        model_input: The float model; not changed.
        model_output: The file to write.
        calibration_data_reader: Samples, as for `quantize_static`; at most 128 are used.
        bits: 4 or 8.
        block_size: Weights that share a scale: 16, 32, 64, 128 or 256.
        symmetric: Without zero points.
        embeddings: Quantize look-ups of rows as well, to 8 bits where fewer cost the outputs more than 1 dB and where
            there are no samples (with `protect_sensitive`).
        protect_sensitive: 8 bits for the layers that cost the outputs most for their bytes, at most a tenth more bytes
            in all; without samples for those that lose much more (6 dB) than the others do.
        nodes_to_exclude: Names of nodes that stay float.
        accuracy_level: Of the kernel: 4 multiplies in 8 bits and is fastest; 0 and 1 multiply in float32.
        custom_op_libraries: Libraries with custom operators to register; none is loaded unasked.
        progress: Called with (linear layers done, linear layers in all).

    Returns:
        Layers, sizes, and the comparison with the float model.

    Raises:
        KenosisError: One of its subclasses; nothing was written.
    """
    check_model(model_input)
    output = absolute(check_path("model_output", model_output))
    source = None if isinstance(model_input, onnx.ModelProto) else Path(model_input)
    samples = [("the calibration data", file) for file in source_files(calibration_data_reader)]
    check_written(source, output, read=samples)
    _check_options(bits, block_size, accuracy_level)
    symmetric, embeddings = flag("symmetric", symmetric), flag("embeddings", embeddings)
    protect_sensitive = flag("protect_sensitive", protect_sensitive)
    excluded = set(several("nodes_to_exclude", nodes_to_exclude))
    libraries = tuple(several("custom_op_libraries", custom_op_libraries))
    loaded = load_model(model_input, custom_op_libraries=libraries, lazily=True)
    feeds = _feeds(loaded.proto, calibration_data_reader)
    fit, held_out = split_feeds(feeds)
    before = loaded.proto.ByteSize() + sum(length_of(t) for t in loaded.proto.graph.initializer if is_outside(t))
    with room_is_needed(), weights_on_disk(loaded.proto):
        made = weights_in_blocks(
            loaded.proto,
            fit or feeds,
            forms=BLOCK_FORMS,
            bits=bits,
            block_size=block_size,
            symmetric=symmetric,
            embeddings=embeddings,
            protect_sensitive=protect_sensitive,
            nodes_to_exclude=excluded,
            accuracy_level=accuracy_level,
            custom_op_libraries=libraries,
            progress=progress,
        )
        model = made.model
        # before the output is there, which may take the place of the float model that lies on disk
        compared = (
            compare_outputs(loaded.proto, model, held_out or feeds, custom_op_libraries=libraries) if feeds else ()
        )
        written = write_model(
            model, output, external_data=loaded.is_split, check=partial(open_session, custom_op_libraries=libraries)
        )
    notes = [*loaded.notes, *made.notes]
    if feeds and not held_out:
        notes.append(f"{len(feeds)} samples leave none to compare by that rounding did not see.")
    return WeightReport(made.layers, before, written, compared, tuple(notes))


def _check_options(bits: Any, block_size: Any, accuracy_level: Any) -> None:
    for name, value, among in (
        ("bits", bits, BITS), ("block_size", block_size, BLOCKS), ("accuracy_level", accuracy_level, _LEVELS),
    ):  # fmt: skip
        if whole(name, value) not in among:
            listed = ", ".join(map(str, among))
            raise OptionError(f"{name} must be one of {listed}, not {value}", where=name, fix=f"pass one of {listed}")


def _feeds(model: onnx.ModelProto, reader: Any) -> list[dict[str, Any]]:
    """Checked samples, few enough to be held in memory."""
    if reader is None:
        return []
    samples: list[dict[str, Any]] = []
    size = 0
    for feed in itertools.islice(checked_feeds(reader, input_specs(model)), _MOST_FEEDS):
        samples.append(feed)
        size += bytes_of(feed)
        if size > _MOST_BYTES:
            break
    if not samples:
        raise no_sample()
    return samples
