"""From ``--data`` and ``--synthetic`` to a calibration reader."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kenosis_ort.calibration.readers import ArrayReader, ImageFolderReader
from kenosis_ort.calibration.synthetic import SyntheticReader
from kenosis_ort.errors import CalibrationError, did_you_mean
from kenosis_ort.graph.load import load_model

IMAGE_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})
ARRAY_SUFFIXES = frozenset({".npy", ".npz"})
DEFAULT_SYNTHETIC = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that say where calibration data comes from."""
    group = parser.add_argument_group("calibration data (one of --data and --synthetic)")
    source = group.add_mutually_exclusive_group(required=True)
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
    group.add_argument("--batch-size", type=_positive, default=1, help="samples per run (default: 1)")

    images = parser.add_argument_group("folders of images")
    images.add_argument("--input", metavar="NAME", help="the input that takes the image (default: the only one)")
    images.add_argument("--size", type=_size, metavar="HxW", help="resize to this (default: the input's size)")
    images.add_argument("--layout", choices=("NCHW", "NHWC"), help="default: read off the input's shape")
    images.add_argument("--mean", type=_numbers, metavar="A,B,C", help="subtracted after scaling, per channel")
    images.add_argument("--std", type=_numbers, metavar="A,B,C", help="divided by, per channel")
    images.add_argument("--scale", type=float, help="multiplied to the pixels from 0 to 255 first")
    images.add_argument("--channel-order", choices=("RGB", "BGR"))
    images.add_argument("--resize", choices=("stretch", "crop", "letterbox"))
    images.add_argument("--limit", type=_positive, metavar="N", help="use the first N images only")


def make_reader(arguments: argparse.Namespace) -> Any:
    """Returns the reader that the arguments ask for.

    Raises:
        CalibrationError: The source does not exist, or is neither arrays nor images.
    """
    if arguments.synthetic is not None:
        return SyntheticReader(arguments.model, samples=arguments.synthetic, seed=arguments.seed)
    source: Path = arguments.data
    if holds_images(source):
        return ImageFolderReader(source, **_image_keywords(arguments))
    return ArrayReader(source, batch_size=arguments.batch_size)


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
    suffixes = {entry.suffix.lower() for entry in source.iterdir() if entry.is_file()}
    images, arrays = bool(suffixes & IMAGE_SUFFIXES), bool(suffixes & ARRAY_SUFFIXES)
    if images == arrays:
        what = "both images and arrays" if images else "neither images nor arrays"
        raise CalibrationError(
            f"The calibration folder holds {what}.", where=str(source), fix=f"Keep one kind. {known}"
        )
    return images


def _image_keywords(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the reader's keywords: what was said, and the rest read off the model's image input."""
    name, shape = image_input(arguments.model, arguments.input)
    layout = arguments.layout or ("NHWC" if shape[3] in (1, 3, 4) and shape[1] not in (1, 3, 4) else "NCHW")
    size = arguments.size or ((shape[2], shape[3]) if layout == "NCHW" else (shape[1], shape[2]))
    if None in size:
        raise CalibrationError(
            "The image input has no fixed height and width.", where=f"input '{name}'", fix="Give --size HxW."
        )
    said = {
        "mean": arguments.mean,
        "std": arguments.std,
        "scale": arguments.scale,
        "channel_order": arguments.channel_order,
        "resize": arguments.resize,
        "limit": arguments.limit,
    }
    return {
        "input_name": name,
        "size": size,
        "layout": layout,
        "batch_size": arguments.batch_size,
        **{key: value for key, value in said.items() if value is not None},
    }


def image_input(model: Path, name: str | None) -> tuple[str, tuple[int | None, ...]]:
    """Returns the name and the shape (4 sizes, None for a dynamic one) of the input that takes images.

    Args:
        model: The model file.
        name: The input's name; None for the only one of rank 4.

    Raises:
        CalibrationError: There is no such input, or more than one.
    """
    graph = load_model(model).proto.graph
    weights = {initializer.name for initializer in graph.initializer}
    inputs = {
        value.name: tuple(d.dim_value if d.HasField("dim_value") else None for d in value.type.tensor_type.shape.dim)
        for value in graph.input
        if value.name not in weights
    }
    images = {key: shape for key, shape in inputs.items() if len(shape) == 4}
    if name is None:
        if len(images) == 1:
            return next(iter(images.items()))
        what = f"The model has {len(images)} inputs that could take an image ({', '.join(images) or 'none of rank 4'})."
        raise CalibrationError(what, where=str(model), fix="Give --input NAME, or arrays as --data.")
    if name in images:
        return name, images[name]
    raise CalibrationError(
        f"'{name}' is no image input of the model.{did_you_mean(name, images)}",
        where=str(model),
        fix=f"Its inputs: {', '.join(inputs)}.",
    )


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
