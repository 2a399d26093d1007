"""From ``--data`` and ``--synthetic`` to a calibration reader."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx import helper

from kenosis_ort.calibration.images import SUFFIXES as IMAGE_SUFFIXES
from kenosis_ort.calibration.reader_base import IndexedReader
from kenosis_ort.calibration.readers import ArrayReader, ImageFolderReader
from kenosis_ort.calibration.synthetic import SyntheticReader
from kenosis_ort.errors import CalibrationError, did_you_mean
from kenosis_ort.graph.load import load_model
from kenosis_ort.quantizer.stock import CalibrationMethod

ARRAY_SUFFIXES = frozenset({".npy", ".npz"})
METHODS = {method.name.lower(): method for method in CalibrationMethod}
CHANNELS = (1, 3)
DEFAULT_SYNTHETIC = 32


def add_arguments(
    parser: argparse.ArgumentParser,
    *,
    title: str = "calibration data (one of --data and --synthetic)",
    required: bool = True,
) -> None:
    """Adds the arguments that say where data comes from."""
    group = parser.add_argument_group(title)
    source = group.add_mutually_exclusive_group(required=required)
    source.add_argument(
        "--data",
        type=Path,
        metavar="SOURCE",
        help="an .npz file with one array per input, an .npy file, a folder of such files, or a folder of images",
    )
    source.add_argument(
        "--synthetic",
        type=_positive,
        nargs="?",
        const=DEFAULT_SYNTHETIC,
        metavar="N",
        help=f"make N samples up (default {DEFAULT_SYNTHETIC}); real data is better",
    )
    group.add_argument("--seed", type=int, default=0, help="of the synthetic data (default: 0)")
    group.add_argument("--batch-size", type=_positive, help="samples per run (default: 1, or the model's own)")

    images = parser.add_argument_group("folders of images")
    images.add_argument("--input", metavar="NAME", help="the input that takes the images (default: the only one)")
    images.add_argument("--size", type=_size, metavar="HxW", help="resize to this (default: the input's size)")
    images.add_argument("--layout", choices=("NCHW", "NHWC"), help="default: read off the input's shape")
    images.add_argument("--mean", type=_numbers, metavar="A,B,C", help="subtracted after scaling, per channel")
    images.add_argument("--std", type=_numbers, metavar="A,B,C", help="divided by, per channel")
    images.add_argument("--scale", type=float, help="multiplied to the pixels from 0 to 255 first (default: 1/255)")
    images.add_argument("--channel-order", choices=("RGB", "BGR", "GRAY"))
    images.add_argument("--resize", choices=("stretch", "crop", "letterbox"))
    images.add_argument("--fill", type=int, metavar="0..255", help="pixel value of letterbox bars (default: 114)")
    images.add_argument("--limit", type=_positive, metavar="N", help="use the first N images only")


def make_reader(arguments: argparse.Namespace) -> IndexedReader:
    """Returns the reader that the arguments ask for.

    Raises:
        CalibrationError: The source does not exist, or is neither arrays nor images.
    """
    if arguments.synthetic is not None:
        return SyntheticReader(arguments.model, samples=arguments.synthetic, seed=arguments.seed)
    source: Path = arguments.data
    if holds_images(source):
        return ImageFolderReader(source, **_image_keywords(arguments))
    name = arguments.input
    if name is None and source.suffix.lower() == ".npy":
        name = _only(tensor_inputs(arguments.model), "input", arguments.model).name
    return ArrayReader(source, batch_size=arguments.batch_size or 1, input_name=name)


def holds_images(source: Path) -> bool:
    """Returns whether the source is a folder of images rather than arrays.

    Raises:
        CalibrationError: It does not exist, is a file of another kind, or a folder with neither or both.
    """
    known = f"Known arrays: {', '.join(sorted(ARRAY_SUFFIXES))}; known images: {', '.join(sorted(IMAGE_SUFFIXES))}."
    if not source.exists():
        raise CalibrationError("The calibration data does not exist.", where=str(source), fix="Check --data.")
    if source.is_file():
        if source.suffix.lower() not in ARRAY_SUFFIXES:
            raise CalibrationError(
                "The calibration data is a file of an unknown kind.",
                where=str(source),
                fix=f"Give an .npz or .npy file, or a folder. {known}",
            )
        return False
    arrays = any(entry.suffix.lower() in ARRAY_SUFFIXES for entry in source.iterdir())
    images = any(entry.suffix.lower() in IMAGE_SUFFIXES for entry in source.rglob("*"))
    if images == arrays:
        what = "both images and arrays" if images else "neither images nor arrays"
        raise CalibrationError(
            f"The calibration folder holds {what}.", where=str(source), fix=f"Keep one kind. {known}"
        )
    return images


@dataclass(frozen=True)
class TensorInput:
    """A graph input: name, shape (None for a dynamic size) and numpy type."""

    name: str
    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]


def tensor_inputs(model: Path) -> list[TensorInput]:
    """Returns the inputs that a caller has to feed.

    Raises:
        ModelLoadError: The file is no readable model.
    """
    graph = load_model(model).proto.graph
    weights = {initializer.name for initializer in graph.initializer}
    return [
        TensorInput(
            name=value.name,
            shape=tuple(d.dim_value if d.HasField("dim_value") else None for d in value.type.tensor_type.shape.dim),
            dtype=helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type),
        )
        for value in graph.input
        if value.name not in weights and value.type.HasField("tensor_type")
    ]


def image_input(model: Path, name: str | None) -> TensorInput:
    """Returns the input that takes images.

    Args:
        model: The model file.
        name: The input's name; None for the only one of rank 4.

    Raises:
        CalibrationError: There is no such input, or more than one.
    """
    images = {entry.name: entry for entry in tensor_inputs(model) if len(entry.shape) == 4}
    if name is None:
        return _only(list(images.values()), "input that could take an image", model)
    if name not in images:
        raise CalibrationError(
            f"'{name}' is no image input of the model.{did_you_mean(name, images)}",
            where=str(model),
            fix=f"Inputs of rank 4: {', '.join(images) or 'none'}.",
        )
    return images[name]


def _only(inputs: Sequence[TensorInput], kind: str, model: Path) -> TensorInput:
    if len(inputs) != 1:
        raise CalibrationError(
            f"The model has not one {kind} but {len(inputs)}: {', '.join(i.name for i in inputs) or 'none'}.",
            where=str(model),
            fix="Give --input NAME, or an .npz file with one array per input as --data.",
        )
    return inputs[0]


def _image_keywords(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the reader's keywords: what was said, and the rest read off the model's image input."""
    entry = image_input(arguments.model, arguments.input)
    batch, *rest = entry.shape
    channels_last = rest[2] in CHANNELS and rest[0] not in CHANNELS
    layout = arguments.layout or ("NHWC" if channels_last else "NCHW")
    channels, sizes = (rest[0], rest[1:]) if layout == "NCHW" else (rest[2], rest[:2])
    size = arguments.size or tuple(sizes)
    if None in size:
        raise CalibrationError(
            "The image input has no fixed height and width.", where=f"input '{entry.name}'", fix="Give --size HxW."
        )
    said = {
        "mean": arguments.mean,
        "std": arguments.std,
        "scale": arguments.scale,
        "channel_order": arguments.channel_order or ("GRAY" if channels == 1 else None),
        "resize": arguments.resize,
        "fill": arguments.fill,
        "limit": arguments.limit,
    }
    return {
        "input_name": entry.name,
        "size": size,
        "layout": layout,
        "batch_size": arguments.batch_size or batch or 1,
        "dtype": entry.dtype,
        **{key: value for key, value in said.items() if value is not None},
    }


def _size(text: str) -> tuple[int, int]:
    height, times, width = text.lower().partition("x")
    if not times or not height.isdigit() or not width.isdigit() or not int(height) or not int(width):
        raise argparse.ArgumentTypeError(f"'{text}' is not HxW, e.g. 224x224")
    return int(height), int(width)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of numbers like 0.485,0.456,0.406") from None


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 0")
    return int(text)
