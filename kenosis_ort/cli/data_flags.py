"""From ``--data`` and ``--synthetic`` to something that feeds are read from, and the machines that run them."""

from __future__ import annotations

import argparse
import glob
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kenosis_ort.cli import flags
from kenosis_ort.cli.screen import Screen
from kenosis_ort.errors import OptionError

if TYPE_CHECKING:
    from kenosis_ort.cluster import Cluster

_log = logging.getLogger(__name__)

DEFAULT_SYNTHETIC = 32
NAMES = (
    *("data", "synthetic", "seed", "batch_size", "input_range", "input_shape", "input_kind"),
    *("mean", "std", "input", "size", "layout", "scale", "channel_order", "resize", "fill", "limit"),
)
"""Names of the arguments about data; None or an empty list means not given."""
_OF_IMAGES = ("size", "layout", "scale", "channel_order", "resize", "fill", "limit")
_OF_PIXELS = ("mean", "std")  # of images and of made-up samples alike
_OF_MADE_UP = ("seed", "input_range", "input_shape", "input_kind")


def add_arguments(parser: argparse.ArgumentParser, *, title: str = "data") -> None:
    """Adds the arguments that say where data comes from."""
    source = parser.add_argument_group(title)
    source.add_argument(
        "--data",
        metavar="SOURCE",
        help="an .npz file with one array per input, an .npy file, a folder of such files, a pattern of them such as "
        "'day*.npz', a folder of images, or module:function, a function of yours without arguments that returns a "
        "reader, a dictionary of stacked arrays, or an iterable of feeds or arrays",
    )
    source.add_argument(
        "--synthetic",
        type=flags.positive,
        nargs="?",
        const=DEFAULT_SYNTHETIC,
        metavar="N",
        help=f"make N samples up (default {DEFAULT_SYNTHETIC}); with --data, beside those few real ones",
    )
    source.add_argument("--batch-size", type=flags.positive, help="samples per run (default: 1, or the model's own)")

    made_up = parser.add_argument_group("samples that are made up")
    made_up.add_argument("--seed", type=flags.whole, help="of the random numbers (default: 0)")
    made_up.add_argument(
        "--input-range",
        action="append",
        default=[],
        type=flags.input_range,
        metavar="[NAME=]LOW,HIGH",
        help="lowest and highest value of an input; without NAME what black and white pixels are",
    )
    made_up.add_argument(
        "--input-shape",
        action="append",
        default=[],
        type=flags.named_shape,
        metavar="NAME=1x3x224x224",
        help="shape of an input of dynamic shape",
    )
    made_up.add_argument(
        "--input-kind",
        action="append",
        default=[],
        type=flags.named_word,
        metavar="NAME=KIND",
        help="what an input is, e.g. image or token ids, where it cannot be told",
    )

    images = parser.add_argument_group("images, from a folder or made up")
    images.add_argument("--mean", type=flags.numbers, metavar="A,B,C", help="subtracted after scaling, per channel")
    images.add_argument("--std", type=flags.numbers, metavar="A,B,C", help="divided by, per channel")
    images.add_argument("--input", metavar="NAME", help="the input that takes the images (default: the only one)")
    images.add_argument("--size", type=flags.image_size, metavar="HxW", help="resize to (default: the input's size)")
    images.add_argument("--layout", choices=("NCHW", "NHWC"), help="default: read off the input's shape")
    images.add_argument("--scale", type=flags.number, help="multiplied to the pixels 0 to 255 first (default: 1/255)")
    images.add_argument("--channel-order", choices=("RGB", "BGR", "GRAY"))
    images.add_argument("--resize", choices=("stretch", "crop", "letterbox"))
    images.add_argument("--fill", type=flags.whole, metavar="0..255", help="value of letterbox bars (default: 114)")
    images.add_argument("--limit", type=flags.positive, metavar="N", help="use the first N images only")


def given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options about data that were given, and nothing else."""
    return {name: value for name in NAMES if (value := getattr(arguments, name)) not in (None, [])}


def make_reader(arguments: argparse.Namespace, model: Path) -> Any:
    """Reader, or another source of feeds, that the arguments ask for; None where they ask for none.

    Args:
        arguments: Holds what `add_arguments` added.
        model: The float model; its inputs fill in what is not given.

    Raises:
        CalibrationError: The source does not exist, or is neither arrays nor images, or does not fit the model.
        OptionError: An option does not go with the source.
    """
    if arguments.data is not None and arguments.synthetic is None:
        _refuse(arguments, _OF_MADE_UP, "goes with made-up samples", "add --synthetic, or leave it out")
    real = None if arguments.data is None else _from_source(arguments, model)
    return real if arguments.synthetic is None else _synthetic(arguments, model, real)


def make_eval_reader(arguments: argparse.Namespace, model: Path) -> Any:
    """Data of ``--eval-data``, read as ``--data`` is; None without the option. Raises as `make_reader`."""
    if arguments.eval_data is None:
        return None
    return _from_source(argparse.Namespace(**{**vars(arguments), "data": arguments.eval_data, "limit": None}), model)


def _from_source(arguments: argparse.Namespace, model: Path) -> Any:
    from kenosis_ort.calibration.images import ImageFolderReader
    from kenosis_ort.calibration.readers import ArrayReader, Shards
    from kenosis_ort.cli.sources import (
        call_function,
        fed_inputs,
        holds_images,
        image_keywords,
        names_function,
        only_input,
    )

    batch_size = arguments.batch_size or 1
    source = Path(arguments.data)
    if not source.exists() and names_function(arguments.data):
        name = arguments.input
        _refuse_for_arrays(arguments)
        return call_function(arguments.data, lambda: name or only_input(model), batch_size=batch_size)
    if not source.exists() and (parts := sorted(glob.glob(arguments.data))):
        _refuse_for_arrays(arguments)
        return Shards(parts, batch_size=batch_size)
    if holds_images(source):
        return ImageFolderReader(source, **image_keywords(arguments, model))
    _refuse_for_arrays(arguments)
    name = arguments.input
    if name is None and source.suffix.lower() == ".npy":
        name = only_input(model)
    reader = ArrayReader(source, batch_size=batch_size, input_name=name, inputs=fed_inputs(model))
    if reader.left_aside:
        _log.warning("left aside, no input of %s: %s of %s", model, ", ".join(reader.left_aside), source)
    return reader


def _refuse_for_arrays(arguments: argparse.Namespace) -> None:
    names = _OF_IMAGES if arguments.synthetic is not None else (*_OF_IMAGES, *_OF_PIXELS)
    _refuse(arguments, names, "goes with a folder of images", "leave it out: arrays are fed as they are")


def _refuse(arguments: argparse.Namespace, names: Iterable[str], what: str, fix: str) -> None:
    """Refuses options without effect; those of a recipe file about other data are ignored."""
    recalled = getattr(arguments, "recalled", ())
    for name in (name for name in given(arguments) if name in names and name not in recalled):
        option = f"--{name.replace('_', '-')}"
        raise OptionError(f"{option} {what}, and --data is something else.", where=arguments.data, fix=fix)


def _synthetic(arguments: argparse.Namespace, model: Path, real: Any) -> Any:
    from kenosis_ort.calibration.synthetic import SyntheticReader

    ranges = dict(arguments.input_range)
    return SyntheticReader(
        model,
        samples=arguments.synthetic,
        seed=arguments.seed or 0,
        kinds=dict(arguments.input_kind) or None,
        input_ranges={name: bounds for name, bounds in ranges.items() if name is not None} or None,
        input_range=ranges.get(None),
        input_shapes=dict(arguments.input_shape) or None,
        mean=arguments.mean,
        std=arguments.std,
        real=real,
    )


def add_machines(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that say where the float model runs."""
    where = parser.add_argument_group("many machines (needs the extra dask)")
    where.add_argument(
        "--dask",
        metavar="ADDRESS",
        help="run the float model over the samples on the workers of the Dask scheduler at host:port; local:N starts N "
        "workers on this machine, local one a processor",
    )
    where.add_argument(
        "--skip-bad-shards", action="store_true", help="leave data out that cannot be read or run, shard by shard"
    )


@contextmanager
def executor(arguments: argparse.Namespace, screen: Screen) -> Iterator[Cluster | None]:
    """Yields what ``--dask`` names, with shards reported on stderr; None where it names nothing.

    Raises:
        OptionError: It is spelled wrong, or Dask is not installed.
        ClusterError: Nobody answers.
    """
    if arguments.dask is None:
        yield None
        return
    from kenosis_ort.cluster import Cluster
    from kenosis_ort.cluster.client import BadShards, connected

    with connected(arguments.dask) as client:
        bad: BadShards = "skip" if arguments.skip_bad_shards else "stop"
        cluster = Cluster(client, bad_shards=bad, on_shard=lambda done: screen.tell(str(done)))
        if cluster.dashboard:
            screen.tell(f"dashboard: {cluster.dashboard}")
        yield cluster
