"""From ``--data`` and ``--synthetic`` to something that feeds are read from, and the machines that run them.

Data is a folder, a file, a pattern of files, or a function of the caller's (``module:function``).
"""

from __future__ import annotations

import argparse
import glob
import importlib
import logging
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from kenosis_ort.calibration.archives import SUFFIXES as IMAGE_SUFFIXES, ImageFolderReader
from kenosis_ort.calibration.feeds import InputSpec, input_specs
from kenosis_ort.calibration.readers import ArrayReader, Shards
from kenosis_ort.cli import flags
from kenosis_ort.cli.screen import Screen
from kenosis_ort.errors import CalibrationError, OptionError, did_you_mean
from kenosis_ort.graph.load import load_model
from kenosis_ort.passes.recipe import is_recipe_file
from kenosis_ort.storage.writing import absolute

if TYPE_CHECKING:
    from kenosis_ort.cluster import Cluster

_log = logging.getLogger(__name__)
_OF_PIXELS = ("mean", "std")  # of images and of made-up samples alike
ARRAY_SUFFIXES = frozenset({".npy", ".npz"})
CHANNELS = (1, 3)

# -- readers


def make_reader(arguments: argparse.Namespace, model: Path, *, required: bool = False) -> Any:
    """Reader, or another source of feeds, that the arguments ask for; None where they ask for none.

    Args:
        arguments: Hold what `flags.data_groups` names.
        model: The float model; its inputs fill in what is not given.
        required: Having none is an error.

    Raises:
        CalibrationError: The source does not exist, or is neither arrays nor images, or does not fit the model.
        OptionError: An option does not go with the source.
    """
    if arguments.data is None and arguments.synthetic is None:
        if required:
            raise no_data()
        return None
    if arguments.synthetic is None:
        _refuse(arguments, flags.OF_MADE_UP, "goes with made-up samples", "add --synthetic, or leave it out")
    real = None if arguments.data is None else _from_source(arguments, model)
    if arguments.synthetic is None:
        return real
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


def no_data() -> CalibrationError:
    """Error of a call that needs data and got none."""
    return CalibrationError(
        "No calibration data was given.",
        fix="--data SOURCE with some 100 samples of yours, or --synthetic to make samples up, which is less accurate",
    )


def make_eval_reader(arguments: argparse.Namespace, model: Path) -> Any:
    """Data of ``--eval-data``, read as ``--data`` is; None without the option. Raises as `make_reader`."""
    if arguments.eval_data is None:
        return None
    return _from_source(argparse.Namespace(**{**vars(arguments), "data": arguments.eval_data, "limit": None}), model)


def _from_source(arguments: argparse.Namespace, model: Path) -> Any:
    source, batch_size = Path(arguments.data), arguments.batch_size or 1
    parts = [] if source.exists() else sorted(glob.glob(arguments.data))
    is_function = not source.exists() and names_function(arguments.data)
    if not is_function and not parts and holds_images(source):
        return _images(arguments, model, source)
    of_arrays = flags.OF_IMAGES if arguments.synthetic is not None else (*flags.OF_IMAGES, *_OF_PIXELS)
    _refuse(arguments, of_arrays, "goes with a folder of images", "leave it out: arrays are fed as they are")
    if parts:
        return Shards(parts, batch_size=batch_size)

    def only_input() -> str:
        return arguments.input or _only(_inputs(model)[0], "input", model).name

    if is_function:
        return call_function(arguments.data, only_input, batch_size=batch_size)
    reader = ArrayReader(
        source,
        batch_size=batch_size,
        input_name=only_input() if source.suffix.lower() == ".npy" else None,
        inputs=frozenset(spec.name for specs in _inputs(model) for spec in specs),
    )
    if reader.left_aside:
        _log.warning("left aside, no input of %s: %s of %s", model, ", ".join(reader.left_aside), source)
    return reader


def _refuse(arguments: argparse.Namespace, names: Iterable[str], what: str, fix: str) -> None:
    """Refuses options without effect; those of a recipe file about other data are ignored."""
    recalled = getattr(arguments, "recalled", ())
    for name in (name for name in flags.given_data(arguments) if name in names and name not in recalled):
        option = f"--{name.replace('_', '-')}"
        raise OptionError(f"{option} {what}, and --data is something else.", where=arguments.data, fix=fix)


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


# -- what a source is


def files_named(arguments: argparse.Namespace, folder: Path = Path()) -> list[tuple[str, Path]]:
    """What the arguments of quantize name as inputs, relative to a folder, but for the model, with what it is.

    Of a function of the caller's that is the file of its module; a pattern of files stays one.
    """
    named = [("a library of custom operators", path) for path in arguments.custom_op_libraries or ()]
    if is_recipe_file(arguments.recipe):
        named.append(("the recipe", arguments.recipe))
    for what, source in (("the calibration data", arguments.data), ("the evaluation data", arguments.eval_data)):
        if source is not None:
            found = _SPELLING.fullmatch(source) if not (folder / source).exists() else None
            module = "" if found is None else found["module"].removesuffix(".py") + ".py"
            named.append((what, module or source))
    return [(what, folder / path) for what, path in named]


def holds_images(source: Path) -> bool:
    """Whether the source is a folder of images rather than arrays.

    Raises:
        CalibrationError: It does not exist, is a file of another kind, or a folder with neither or both.
    """
    known = f"Known arrays: {', '.join(sorted(ARRAY_SUFFIXES))}; known images: {', '.join(sorted(IMAGE_SUFFIXES))}."
    arrays = images = False
    if not source.exists():
        folder = source.parent
        hint = did_you_mean(source.name, [entry.name for entry in folder.iterdir()]) if folder.is_dir() else ""
        what, fix = f"data does not exist.{hint}", "Check --data; a function of yours is written module:function."
    elif source.is_file():
        arrays = source.suffix.lower() in ARRAY_SUFFIXES
        what, fix = "data is a file of an unknown kind.", f"Give an .npz or .npy file, or a folder. {known}"
    else:
        arrays = any(entry.suffix.lower() in ARRAY_SUFFIXES for entry in source.iterdir())
        images = any(entry.suffix.lower() in IMAGE_SUFFIXES for entry in source.rglob("*"))
        what = f"folder holds {'both images and arrays' if images else 'neither images nor arrays'}."
        fix = f"Keep one kind. {known}"
    if images == arrays:
        raise CalibrationError(f"The calibration {what}", where=str(source), fix=fix)
    return images


def _inputs(model: Path) -> tuple[list[InputSpec], list[InputSpec]]:
    """The tensors that a caller has to feed, and the inputs with a default value; raises as `load_model`."""
    required, optional = input_specs(load_model(model, ask_runtime=False).proto)
    return [spec for spec in required if spec.dtype is not None], [*optional]


def _only(inputs: Sequence[InputSpec], kind: str, model: Path) -> InputSpec:
    if len(inputs) != 1:
        raise CalibrationError(
            f"The model has not one {kind} but {len(inputs)}: {', '.join(i.name for i in inputs) or 'none'}.",
            where=str(model),
            fix="Give --input NAME, or an .npz file with one array per input as --data.",
        )
    return inputs[0]


def image_input(model: Path, name: str | None) -> InputSpec:
    """The input that takes images.

    Args:
        model: The model file.
        name: The input's name; None for the only one of rank 4.

    Raises:
        CalibrationError: There is no such input, or more than one.
    """
    images = {entry.name: entry for entry in _inputs(model)[0] if len(entry.shape or ()) == 4}
    if name is None:
        return _only([*images.values()], "input that could take an image", model)
    if name not in images:
        what = f"'{name}' is no image input of the model.{did_you_mean(name, images)}"
        raise CalibrationError(what, where=str(model), fix=f"Inputs of rank 4: {', '.join(images) or 'none'}.")
    return images[name]


def _images(arguments: argparse.Namespace, model: Path, folder: Path) -> ImageFolderReader:
    """A reader of images as given, and for the rest as the model's image input tells."""
    entry = image_input(model, arguments.input)
    batch, *rest = (size if isinstance(size, int) else None for size in entry.shape or ())
    channels_last = rest[2] in CHANNELS and rest[0] not in CHANNELS
    layout = arguments.layout or ("NHWC" if channels_last else "NCHW")
    channels, sizes = (rest[0], rest[1:]) if layout == "NCHW" else (rest[2], rest[:2])
    size = arguments.size or tuple(sizes)
    if None in size:
        what = "The image input has no fixed height and width."
        raise CalibrationError(what, where=f"input '{entry.name}'", fix="Give --size HxW.")
    settings = {
        "layout": layout,
        "dtype": entry.dtype,
        "channel_order": arguments.channel_order or ("GRAY" if channels == 1 else None),
        **{name: getattr(arguments, name) for name in ("mean", "std", "scale", "resize", "fill", "limit")},
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    batch_size = arguments.batch_size or batch or 1
    return ImageFolderReader(folder, size=size, input_name=entry.name, batch_size=batch_size, **settings)


# -- functions of the caller's

_SPELLING = re.compile(r"(?P<module>[^:]+\.py|[A-Za-z_][\w.]*):(?P<name>[A-Za-z_]\w*)")
_RETURNS = (
    "return a calibration data reader, a dictionary of stacked arrays, one stacked array, or an iterable of feeds or "
    "of arrays"
)


def names_function(source: str) -> bool:
    """Whether a source is spelled ``module:function`` or ``file.py:function``."""
    return _SPELLING.fullmatch(source) is not None


def call_function(source: str, only_input: Callable[[], str], *, batch_size: int = 1) -> Any:
    """Calls the caller's function, without arguments, and returns its data as something to read feeds from.

    A dictionary by input name and a single array hold samples along axis 0. Anything else that can be iterated over
    yields feeds, or arrays that are fed as they are.

    Args:
        source: ``module:function``, found from the current folder and then as Python finds modules, or
            ``file.py:function``.
        only_input: Returns the name of the model's only input, for arrays without a name; raises where there are more.
        batch_size: Samples a feed for stacked arrays.

    Raises:
        CalibrationError: It cannot be imported, fails, or returns something else.
    """
    with _current_folder_first():
        function = _named(source, "--data", f"define it; it takes no arguments, and has to {_RETURNS}", called=True)
        with _blamed(source):
            data = function()
    if callable(getattr(data, "get_next", None)):
        return data
    if isinstance(data, np.ndarray):
        data = {only_input(): data}
    if isinstance(data, Mapping):
        return ArrayReader(data, batch_size=batch_size)
    if not isinstance(data, Iterable) or isinstance(data, (str, bytes)):
        what = f"the function returned {type(data).__name__}, which is no calibration data"
        raise CalibrationError(what, where=source, fix=_RETURNS)
    entries = _entries(data, source)
    first = next(entries, None)
    if first is None:
        raise CalibrationError("the function returned no samples", where=source, fix="yield at least one feed")
    entries = chain([first], entries)
    if isinstance(first, Mapping):
        return entries
    name = only_input()
    return ({name: np.asarray(entry)} for entry in entries)


def named_metric(source: str) -> Any:
    """Metric spelled ``module:name``; it is not called.

    Raises:
        CalibrationError: It cannot be imported, or there is none of that name.
    """
    with _current_folder_first():
        return _named(source, "--metric", "define it: metric(outputs, reference, indices), or an object to update")


def _named(source: str, option: str, fix: str, *, called: bool = False) -> Any:
    """Imported object of ``module:name`` or ``file.py:name``."""
    found = _SPELLING.fullmatch(source)
    if found is None:
        raise CalibrationError(f"'{source}' is not module:name", where=option, fix="for example loader:samples")
    name = found["module"]
    if not name.endswith(".py"):
        with _blamed(source, "run the command in the module's folder"):
            module: Any = importlib.import_module(name)
    elif not Path(name).is_file():
        raise CalibrationError("the Python file does not exist", where=name, fix=f"check {option}")
    else:
        with _blamed(source):
            module = SimpleNamespace(**runpy.run_path(name))
    named = getattr(module, found["name"], None)
    if named is None or (called and not callable(named)):
        hint = did_you_mean(found["name"], [name for name, value in vars(module).items() if callable(value)])
        what = f"'{found['module']}' has no function '{found['name']}'.{hint}"
        raise CalibrationError(what, where=source, fix=fix)
    return named


def _entries(data: Iterable[Any], source: str) -> Iterator[Any]:
    with _blamed(source):
        yield from data


@contextmanager
def _blamed(source: str, fix: str = "correct the function; -v shows the traceback") -> Iterator[None]:
    """Runs code of the caller's; what it raises becomes an error that names it, with the traceback in the log."""
    try:
        yield
    except Exception as error:
        _log.info("%s raised", source, exc_info=True)
        raise CalibrationError(f"{type(error).__name__}: {error}", where=source, fix=fix) from error


@contextmanager
def _current_folder_first() -> Iterator[None]:
    """Has Python find modules of the current folder first; code of the caller's may leave it for as long as it runs."""
    before, folder = list(sys.path), absolute(".")
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = before
        os.chdir(folder)
