"""From ``--data`` and ``--synthetic`` to a calibration reader."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kenosis_ort.calibration.readers import ArrayReader, ImageFolderReader
from kenosis_ort.calibration.synthetic import SyntheticReader
from kenosis_ort.errors import CalibrationError

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
