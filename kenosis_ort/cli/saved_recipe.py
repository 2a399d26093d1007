"""The ``.recipe.toml`` beside an output, as the command reads and writes it.

The library reads ``[recipe]`` and ``[options]`` of it (`kenosis_ort.recipe_file`). The command's own are ``[data]``,
how samples were read or made up, in the words of its options, and ``[made]``, what came out, to tell whether it is the
same again.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kenosis_ort import __version__
from kenosis_ort.cli import data_flags
from kenosis_ort.cli.parser import Parser
from kenosis_ort.errors import OptionError, did_you_mean
from kenosis_ort.recipe_file import RecipeFile
from kenosis_ort.storage.writing import sha256_of

if TYPE_CHECKING:
    from kenosis_ort.report.model import QuantizationReport


@dataclass(frozen=True)
class Recalled:
    """Settings that a recipe file holds for the command.

    Attributes:
        data: Options about data, by argument.
        made: What came out; empty in a file that no output belongs to.
    """

    data: Mapping[str, Any]
    made: Mapping[str, Any]

    def fill(self, arguments: argparse.Namespace) -> None:
        """Sets the arguments about data that were not given; the source itself only where it was made up."""
        given = arguments.data is not None or arguments.synthetic is not None
        unsaid = {name for name in self.data if getattr(arguments, name) in (None, [])}
        arguments.recalled = unsaid - {"data", *(["synthetic"] if given else [])}
        for name in arguments.recalled:
            setattr(arguments, name, self.data[name])

    def same_output(self, model: Path, output: Path) -> bool | None:
        """Whether an output is the recorded one to the byte; None if it was made from another model."""
        if self.made.get("model_sha256") != sha256(model):
            return None
        return bool(self.made.get("output_sha256") == sha256(output))


def read(path: Path) -> Recalled:
    """Reads a recipe file; one that holds nothing but ``[recipe]`` is fine.

    Raises:
        OptionError: It is no recipe, or holds something unknown or of another kind.
    """
    file = RecipeFile.load(path)
    return Recalled(_data(file.data, str(path)), file.made)


def beside(output: Path) -> Path:
    """Where the recipe of an output is saved: ``model.int8.recipe.toml`` for ``model.int8.onnx``."""
    return output.with_suffix(".recipe.toml")


def write(
    path: Path, report: QuantizationReport, *, data_options: Mapping[str, Any], model: Path, output: Path
) -> None:
    """Writes the recipe of an output.

    Args:
        path: The file.
        report: Of the quantization.
        data_options: Options about data that were given.
        model: The float model.
        output: The file that was written.

    Raises:
        OutputError: The file cannot be written.
    """
    made = {
        "model": model.name,
        "model_sha256": sha256(model),
        "output": output.name,
        "output_sha256": sha256(output),
        "samples": report.calibration.samples,
        "versions": {"kenosis_ort": __version__, **report.versions},
    }
    words = {name: spelled(name, value) for name, value in data_options.items()}
    head = f"Makes {output.name} again: kenosis-ort quantize {model.name} --recipe {path.name}, with the same data."
    replace(report.recipe_file(), data=words, made=made).save(path, head=head)


def sha256(path: Path) -> str:
    """The SHA-256 of a model file, and of ``<file>.data`` behind it where there is one."""
    return sha256_of(*(part for part in (path, path.with_name(f"{path.name}.data")) if part.is_file()))


def _data(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Reads the ``[data]`` table with the command's own parser."""
    parser = Parser(prog=where)
    data_flags.add_arguments(parser)
    tokens = []
    for name, spelled in raw.items():
        if name not in data_flags.NAMES:
            hint = did_you_mean(name, data_flags.NAMES)
            raise OptionError(
                f"unknown setting '{name}' in [data].{hint}", where=where, fix=f"one of {[*data_flags.NAMES]}"
            )
        option = f"--{name.replace('_', '-')}"
        tokens += [f"{option}={text}" for text in (spelled if isinstance(spelled, list) else [spelled])]
    return data_flags.given(parser.parse_args(tokens))


def spelled(name: str, value: Any) -> Any:
    """An argument about data as it is written on the command line; whole numbers as they are."""
    if name == "size":
        return "x".join(map(str, value))
    if name == "input_range":
        return [(f"{key}=" if key is not None else "") + _numbers(bounds) for key, bounds in value]
    if name == "input_shape":
        return [f"{key}={'x'.join(map(str, sizes))}" for key, sizes in value]
    if name == "input_kind":
        return [f"{key}={kind}" for key, kind in value]
    return _numbers(value) if isinstance(value, tuple) else value


def _numbers(values: tuple[float, ...]) -> str:
    return ",".join(f"{value:.17g}" if float(f"{value:g}") != value else f"{value:g}" for value in values)
