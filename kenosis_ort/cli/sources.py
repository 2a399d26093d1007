"""From ``--data`` and ``--synthetic`` to something that feeds are read from, and the machines that run them.

Data is a folder, a file, a pattern of files, or a function of the caller's (``module:function``).
"""

from __future__ import annotations

import argparse
import glob
import importlib
import importlib.util
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from kenosis_ort.calibration.archives import SUFFIXES as IMAGE_SUFFIXES
from kenosis_ort.calibration.archives import ImageFolderReader
from kenosis_ort.calibration.feeds import InputSpec, input_specs
from kenosis_ort.calibration.readers import ArrayReader, Shards
from kenosis_ort.cli import flags
from kenosis_ort.cli.screen import Screen
from kenosis_ort.errors import CalibrationError, OptionError, did_you_mean
from kenosis_ort.graph.load import load_model

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
    if arguments.data is not None and arguments.synthetic is None:
        _refuse(arguments, flags.OF_MADE_UP, "goes with made-up samples", "add --synthetic, or leave it out")
    real = None if arguments.data is None else _from_source(arguments, model)
    return real if arguments.synthetic is None else _synthetic(arguments, model, real)


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
    name, batch_size = arguments.input, arguments.batch_size or 1
    source = Path(arguments.data)
    parts = [] if source.exists() else sorted(glob.glob(arguments.data))
    is_function = not source.exists() and names_function(arguments.data)
    if not is_function and not parts and holds_images(source):
        return ImageFolderReader(source, **image_keywords(arguments, model))
    of_arrays = flags.OF_IMAGES if arguments.synthetic is not None else (*flags.OF_IMAGES, *_OF_PIXELS)
    _refuse(arguments, of_arrays, "goes with a folder of images", "leave it out: arrays are fed as they are")
    if is_function:
        return call_function(arguments.data, lambda: name or only_input(model), batch_size=batch_size)
    if parts:
        return Shards(parts, batch_size=batch_size)
    if name is None and source.suffix.lower() == ".npy":
        name = only_input(model)
    reader = ArrayReader(
        source,
        batch_size=batch_size,
        input_name=name,
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


def _inputs(model: Path) -> tuple[list[InputSpec], list[InputSpec]]:
    """The tensors that a caller has to feed, and the inputs with a default value; raises as `load_model`."""
    required, optional = input_specs(load_model(model, ask_runtime=False).proto)
    return [spec for spec in required if spec.dtype is not None], [*optional]


def only_input(model: Path) -> str:
    """The name of the model's only input.

    Raises:
        CalibrationError: There is no input, or more than one.
    """
    return _only(_inputs(model)[0], "input", model).name


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
        raise CalibrationError(
            f"'{name}' is no image input of the model.{did_you_mean(name, images)}",
            where=str(model),
            fix=f"Inputs of rank 4: {', '.join(images) or 'none'}.",
        )
    return images[name]


def _only(inputs: Sequence[InputSpec], kind: str, model: Path) -> InputSpec:
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
    batch, *rest = (size if isinstance(size, int) else None for size in entry.shape or ())
    channels_last = rest[2] in CHANNELS and rest[0] not in CHANNELS
    layout = arguments.layout or ("NHWC" if channels_last else "NCHW")
    channels, sizes = (rest[0], rest[1:]) if layout == "NCHW" else (rest[2], rest[:2])
    size = arguments.size or tuple(sizes)
    if None in size:
        raise CalibrationError(
            "The image input has no fixed height and width.", where=f"input '{entry.name}'", fix="Give --size HxW."
        )
    spoken = {name: getattr(arguments, name) for name in ("mean", "std", "scale", "resize", "fill", "limit")}
    spoken["channel_order"] = arguments.channel_order or ("GRAY" if channels == 1 else None)
    return {
        "size": size,
        "input_name": entry.name,
        "layout": layout,
        "batch_size": arguments.batch_size or batch or 1,
        "dtype": entry.dtype,
        **{key: value for key, value in spoken.items() if value is not None},
    }


# -- functions of the caller's

_SPELLING = re.compile(r"(?P<module>[^:]+\.py|[A-Za-z_][\w.]*):(?P<function>[A-Za-z_]\w*)")
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
        data = _guarded(function, source)
    return _feeds(data, source, only_input, batch_size)


def named_metric(source: str) -> Any:
    """Metric spelled ``module:name``; it is not called.

    Raises:
        CalibrationError: It cannot be imported, or there is none of that name.
    """
    with _current_folder_first():
        return _named(source, "--metric", "define it: metric(outputs, reference, indices), or an object to update")


def _named(source: str, option: str, fix: str, *, called: bool = False) -> Any:
    found = _SPELLING.fullmatch(source)
    if found is None:
        raise CalibrationError(f"'{source}' is not module:name", where=option, fix="for example loader:samples")
    module = _module(found["module"], source)
    named = getattr(module, found["function"], None)
    if named is None or (called and not callable(named)):
        public = [name for name, value in vars(module).items() if callable(value)]
        raise CalibrationError(
            f"'{found['module']}' has no function '{found['function']}'.{did_you_mean(found['function'], public)}",
            where=source,
            fix=fix,
        )
    return named


def _feeds(data: Any, source: str, only_input: Callable[[], str], batch_size: int) -> Any:
    if callable(getattr(data, "get_next", None)):
        return data
    if isinstance(data, np.ndarray):
        data = {only_input(): data}
    if isinstance(data, Mapping):
        return ArrayReader(data, batch_size=batch_size)
    if not isinstance(data, Iterable) or isinstance(data, (str, bytes)):
        raise CalibrationError(
            f"the function returned {type(data).__name__}, which is no calibration data", where=source, fix=_RETURNS
        )
    rest = iter(data)
    first = _guarded(lambda: next(rest, None), source)
    if first is None:
        raise CalibrationError("the function returned no samples", where=source, fix="yield at least one feed")
    entries = chain([first], _guarded_rest(rest, source))
    if isinstance(first, Mapping):
        return entries
    name = only_input()
    return ({name: np.asarray(entry)} for entry in entries)


def _module(name: str, source: str) -> ModuleType:
    if not name.endswith(".py"):
        found: ModuleType = _guarded(
            lambda: importlib.import_module(name), source, fix="run the command in the module's folder"
        )
        return found
    path = Path(name)
    if not path.is_file():
        raise CalibrationError("the Python file does not exist", where=name, fix="check --data")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise CalibrationError("the file cannot be imported", where=name, fix="name a Python file")
    module, loader = importlib.util.module_from_spec(spec), spec.loader
    _guarded(lambda: loader.exec_module(module), source)
    return module


def _guarded(call: Callable[[], Any], source: str, *, fix: str | None = None) -> Any:
    """Calls code of the caller's; what it raises becomes an error that names it, with the traceback in the log."""
    try:
        return call()
    except Exception as error:
        _log.info("%s raised", source, exc_info=True)
        raise CalibrationError(
            f"{type(error).__name__}: {error}", where=source, fix=fix or "correct the function; -v shows the traceback"
        ) from error


def _guarded_rest(rest: Iterator[Any], source: str) -> Iterator[Any]:
    end = object()
    while (entry := _guarded(lambda: next(rest, end), source)) is not end:
        yield entry


@contextmanager
def _current_folder_first() -> Iterator[None]:
    before = list(sys.path)
    sys.path.insert(0, str(Path.cwd()))
    try:
        yield
    finally:
        sys.path[:] = before
