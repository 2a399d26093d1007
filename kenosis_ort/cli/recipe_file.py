"""The ``.recipe.toml`` beside an output: recipe, options and data hints that make the same model again.

``[recipe]`` is what `kenosis_ort.recipe.Recipe` reads; the tables beside it are the command's own:
``[options]`` holds options of `kenosis_ort.quantize_static` by name, those that this machine decided included;
``[data]`` holds how samples were read or made up, in the words of the command's options;
``[made]`` says what came out, and with which versions, to tell whether it is the same again.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import tomli_w

from kenosis_ort import __version__
from kenosis_ort.cli import data
from kenosis_ort.cli.options import FORMATS, HOST_CHOICES, METHODS, TYPES, type_word
from kenosis_ort.cli.parser import Parser
from kenosis_ort.errors import OptionError, did_you_mean
from kenosis_ort.recipe import SCHEMA, Recipe
from kenosis_ort.storage.writing import write_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from kenosis_ort.report.model import QuantizationReport

_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "activation_type": tuple(TYPES),
    "weight_type": tuple(TYPES),
    "format": tuple(FORMATS),
    "calibrate_method": tuple(METHODS),
    "tune": ("off", "model", "measure"),
    "protect_outputs": ("auto", "float", "int8"),
}
_KINDS: Final[Mapping[str, tuple[type, ...]]] = {
    **dict.fromkeys(_CHOICES, (str,)),
    **dict.fromkeys(("per_channel", "reduce_range", "use_external_data_format", "verify", "promise"), (bool,)),
    **dict.fromkeys(("nodes_to_exclude", "nodes_to_quantize", "op_types_to_quantize", "primary_inputs"), (list,)),
    "rewrites": (bool, list),
    "custom_op_libraries": (list,),
    "extra_options": (dict,),
    "target": (str,),
    "tune_budget_s": (float, int),
    "threads": (int,),
}
_BLOCK: Final = 1 << 20


@dataclass(frozen=True)
class RecipeFile:
    """What a recipe file holds.

    Attributes:
        path: The file.
        recipe: The accuracy passes.
        options: Options of `kenosis_ort.quantize_static` in the shell's words.
        data: What was said about data, by argument.
        made: What came out; empty in a file that no output belongs to.
    """

    path: Path
    recipe: Recipe
    options: Mapping[str, Any]
    data: Mapping[str, Any]
    made: Mapping[str, Any]

    def fill(self, arguments: argparse.Namespace) -> None:
        """Sets the arguments about data that were not said; the source itself only where it was made up."""
        given = arguments.data is not None or arguments.synthetic is not None
        unsaid = {name for name in self.data if getattr(arguments, name) in (None, [])}
        arguments.recalled = unsaid - {"data", *(["synthetic"] if given else [])}
        for name in arguments.recalled:
            setattr(arguments, name, self.data[name])

    def same_output(self, model: Path, output: Path) -> bool | None:
        """Tells whether an output is the recorded one to the byte; None if it was made from another model."""
        if self.made.get("model_sha256") != sha256(model):
            return None
        return bool(self.made.get("output_sha256") == sha256(output))


def read(path: Path) -> RecipeFile:
    """Reads a recipe file; one that holds nothing but ``[recipe]`` is fine.

    Raises:
        OptionError: It is no recipe, or holds an unknown option or one of another kind.
    """
    recipe = Recipe.load(path)
    raw = tomllib.loads(path.read_text(encoding="utf-8"))
    tables = {name: raw.get(name, {}) for name in ("options", "data", "made")}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise OptionError(f"{name} = {table!r} is no table", where=str(path), fix=f"write it as [{name}]")
    options = tables["options"]
    for name, value in options.items():
        _check_option(name, value, str(path))
    return RecipeFile(path, recipe, options, _data(tables["data"], str(path)), tables["made"])


def beside(output: Path) -> Path:
    """Returns where the recipe of an output is saved: ``model.int8.recipe.toml`` for ``model.int8.onnx``."""
    return output.with_suffix(".recipe.toml")


def write(
    path: Path,
    report: QuantizationReport,
    *,
    words: Mapping[str, Any],
    said_of_data: Mapping[str, Any],
    model: Path,
    output: Path,
) -> None:
    """Writes the recipe of an output.

    Args:
        path: The file.
        report: Of the quantization.
        words: The options that were in force, in the shell's words.
        said_of_data: What was said about data.
        model: The float model.
        output: The file that was written.

    Raises:
        OutputError: The file cannot be written.
    """
    recipe = report.recipe or Recipe()
    tables = {
        "schema": SCHEMA,
        "recipe": recipe.to_dict(),
        "options": frozen(words, report),
        "data": {name: spelled(name, value) for name, value in said_of_data.items()},
        "made": {
            "model": model.name,
            "model_sha256": sha256(model),
            "output": output.name,
            "output_sha256": sha256(output),
            "samples": report.calibration.samples,
            "versions": {"kenosis_ort": __version__, **report.versions},
        },
    }
    head = f"# Makes {output.name} again: kenosis-ort quantize {model.name} --recipe {path.name}, with the same data.\n"
    write_text(path, head + tomli_w.dumps(tables), "the recipe")


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a model file, and of ``<file>.data`` behind it where there is one."""
    digest = hashlib.sha256()
    for part in (path, path.with_name(f"{path.name}.data")):
        if part.is_file():
            with part.open("rb") as file:
                while block := file.read(_BLOCK):
                    digest.update(block)
    return digest.hexdigest()


def frozen(words: Mapping[str, Any], report: QuantizationReport) -> dict[str, Any]:
    """Returns the options that make the same bytes again, the machine's choices fixed; the recipe has those of timing.

    Where nothing was timed, nothing is timed the next time either.
    """
    options = {name: word for name, word in words.items() if name in _KINDS}
    for name in HOST_CHOICES:
        if name in report.options:
            options[name] = type_word(report.options[name].value)
    if report.recipe is None or report.recipe.speed is None:
        options["promise"] = False
        if options.get("tune") == "measure":
            for name in ("tune", "tune_budget_s"):
                options.pop(name, None)
    return options


def _check_option(name: str, value: Any, where: str) -> None:
    kinds = _KINDS.get(name)
    if kinds is None:
        raise OptionError(
            f"unknown option '{name}' in a recipe file.{did_you_mean(name, _KINDS)}",
            where=where,
            fix=f"one of {[*_KINDS]}",
        )
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise OptionError(f"[options] {name} = {value!r} is of the wrong kind", where=where, fix=f"give a {wanted}")
    choices = _CHOICES.get(name)
    if choices is not None and value not in choices:
        raise OptionError(
            f"[options] {name} = {value!r} is unknown.{did_you_mean(str(value), choices)}",
            where=where,
            fix=f"one of {', '.join(choices)}",
        )


def _data(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Reads the ``[data]`` table with the command's own parser."""
    parser = Parser(prog=where)
    data.add_arguments(parser)
    tokens = []
    for name, spelled in raw.items():
        if name not in data.SAID:
            hint = did_you_mean(name, data.SAID)
            raise OptionError(f"unknown setting '{name}' in [data].{hint}", where=where, fix=f"one of {[*data.SAID]}")
        option = f"--{name.replace('_', '-')}"
        tokens += [f"{option}={text}" for text in (spelled if isinstance(spelled, list) else [spelled])]
    return data.said(parser.parse_args(tokens))


def spelled(name: str, value: Any) -> Any:
    """Returns an argument about data as it is written on the command line; whole numbers as they are."""
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
