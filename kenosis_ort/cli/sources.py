"""Samples in a folder or file, and settings of images that the model's inputs imply."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx import helper

from kenosis_ort.calibration.images import SUFFIXES as IMAGE_SUFFIXES
from kenosis_ort.cli.data import ARRAY_SUFFIXES
from kenosis_ort.errors import CalibrationError, did_you_mean
from kenosis_ort.graph.load import load_model

CHANNELS = (1, 3)


def holds_images(source: Path) -> bool:
    """Whether the source is a folder of images rather than arrays.

    Raises:
        CalibrationError: It does not exist, is a file of another kind, or a folder with neither or both.
    """
    known = f"Known arrays: {', '.join(sorted(ARRAY_SUFFIXES))}; known images: {', '.join(sorted(IMAGE_SUFFIXES))}."
    if not source.exists():
        folder = source.parent
        hint = did_you_mean(source.name, [entry.name for entry in folder.iterdir()]) if folder.is_dir() else ""
        raise CalibrationError(
            f"The calibration data does not exist.{hint}",
            where=str(source),
            fix="Check --data; a function of yours is written module:function.",
        )
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
    """The inputs that a caller has to feed.

    Raises:
        ModelLoadError: The file is no readable model.
    """
    graph = load_model(model, ask_runtime=False).proto.graph
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


def fed_inputs(model: Path) -> frozenset[str]:
    """Names of all inputs, those with a default value too.

    Raises:
        ModelLoadError: The file is no readable model.
    """
    return frozenset(value.name for value in load_model(model, ask_runtime=False).proto.graph.input)


def only_input(model: Path) -> str:
    """The name of the model's only input.

    Raises:
        CalibrationError: There is no input, or more than one.
    """
    return _only(tensor_inputs(model), "input", model).name


def image_input(model: Path, name: str | None) -> TensorInput:
    """The input that takes images.

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


def image_keywords(arguments: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Keywords of a reader of images: those given, and the rest read off the model's image input.

    Raises:
        CalibrationError: No image input, or one of dynamic size and no ``--size``.
    """
    entry = image_input(model, arguments.input)
    batch, *rest = entry.shape
    channels_last = rest[2] in CHANNELS and rest[0] not in CHANNELS
    layout = arguments.layout or ("NHWC" if channels_last else "NCHW")
    channels, sizes = (rest[0], rest[1:]) if layout == "NCHW" else (rest[2], rest[:2])
    size = arguments.size or tuple(sizes)
    if None in size:
        raise CalibrationError(
            "The image input has no fixed height and width.", where=f"input '{entry.name}'", fix="Give --size HxW."
        )
    spoken = {
        "mean": arguments.mean,
        "std": arguments.std,
        "scale": arguments.scale,
        "channel_order": arguments.channel_order or ("GRAY" if channels == 1 else None),
        "resize": arguments.resize,
        "fill": arguments.fill,
        "limit": arguments.limit,
    }
    return {
        "size": size,
        "input_name": entry.name,
        "layout": layout,
        "batch_size": arguments.batch_size or batch or 1,
        "dtype": entry.dtype,
        **{key: value for key, value in spoken.items() if value is not None},
    }
