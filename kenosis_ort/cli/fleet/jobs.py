"""From a TOML file to jobs: a call of ``kenosis-ort quantize`` for each model, and a fingerprint of what it reads."""

from __future__ import annotations

import argparse
import contextlib
import glob
import hashlib
import io
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kenosis_ort.cli.parser import Parser
from kenosis_ort.cli.quantize_command import QUANTIZE
from kenosis_ort.cluster.worker import versions
from kenosis_ort.errors import ModelLoadError, OptionError, did_you_mean
from kenosis_ort.graph.external_data import external_files
from kenosis_ort.recipe import is_recipe_file, read_text
from kenosis_ort.storage.writing import absolute, check_apart, sha256_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_TABLES: Final = ("models", "defaults")
_NAME: Final = re.compile(r"[\w.-]+")
_NOT_A_MODELS: Final = frozenset({"json", "quiet", "verbose", "help", "help-all", "dask", "skip-bad-shards", "dry-run"})


@dataclass(frozen=True)
class Job:
    """One model to quantize.

    Attributes:
        name: Of its table in the file.
        arguments: Of ``kenosis-ort``.
        folder: The folder that they are relative to.
        model: The float model.
        output: The file to write.
        record: Where what came out is kept.
        reads: Files that the result depends on.
    """

    name: str
    arguments: tuple[str, ...]
    folder: Path
    model: Path
    output: Path
    record: Path
    reads: tuple[Path, ...]

    def fingerprint(self) -> str:
        """A SHA-256 over model, options, data and versions.

        Raises:
            OSError: A file cannot be read.
        """
        digest = hashlib.sha256(json.dumps([self.arguments, str(self.output), versions()], sort_keys=True).encode())
        for file in self.reads:
            digest.update(f"\0{file}\0".encode())
            digest.update(sha256_of(file).encode())
        return digest.hexdigest()


def read_jobs(file: Path, results: Path) -> list[Job]:
    """The jobs of a file.

    Args:
        file: TOML: a table ``[models.NAME]`` for each model, with ``model`` and any argument of ``kenosis-ort
            quantize`` by its name without dashes, and ``[defaults]`` for all of them. Paths are relative to the file.
        results: The folder for outputs that the file does not name, and for records.

    Raises:
        OptionError: The file cannot be read, or something in it is unknown; the message names where.
        ModelLoadError: A model does not exist.
        OutputError: Two models would be written to one file.
    """
    try:
        raw = tomllib.loads(read_text(file))
    except tomllib.TOMLDecodeError as error:
        raise OptionError(f"the file is not valid TOML: {error}", where=str(file)) from error
    for key in raw:
        if key not in _TABLES:
            raise OptionError(
                f"unknown table [{key}].{did_you_mean(key, _TABLES)}", where=str(file), fix="[models.NAME]"
            )
    models, defaults = raw.get("models", {}), raw.get("defaults", {})
    if not isinstance(models, Mapping) or not models or not isinstance(defaults, Mapping):
        raise OptionError("the file names no model", where=str(file), fix="[models.NAME] with model = 'net.onnx'")
    parser = Parser(prog="kenosis-ort quantize")
    QUANTIZE.add_arguments(parser)
    folder = absolute(file).parent
    jobs = [
        _job(name, settings, defaults, parser, folder, results, f"[models.{name}] of {file}")
        for name, settings in models.items()
    ]
    check_apart(
        [(f"the output of '{job.name}'", job.output) for job in jobs],
        [(f"the float model of '{job.name}'", job.model) for job in jobs],
    )
    return jobs


def _job(
    name: str,
    settings: Any,
    defaults: Mapping[str, Any],
    parser: argparse.ArgumentParser,
    folder: Path,
    results: Path,
    where: str,
) -> Job:
    if _NAME.fullmatch(name) is None:
        raise OptionError(f"'{name}' is no name for a model", where=where, fix="use letters, digits, '.', '_' and '-'")
    if not isinstance(settings, Mapping) or not isinstance(settings.get("model"), str):
        raise OptionError("it names no model", where=where, fix="model = 'net.onnx'")
    words = {**defaults, **settings}
    model = folder / str(words.pop("model"))
    output = folder / str(words.pop("out", results / f"{name}.int8.onnx"))
    if not model.is_file():
        raise ModelLoadError("The model file does not exist.", where=f"{model}, {where}", fix="Check the path.")
    arguments = (str(model), str(output), *_arguments(words, where))
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages), contextlib.redirect_stdout(messages):
            parsed = parser.parse_args(arguments)
    except SystemExit as error:
        text = messages.getvalue().strip().rpartition("error: ")[2]
        raise OptionError(" ".join(text.split()) or "it does not parse", where=where) from error
    if parsed.data is None and parsed.synthetic is None and parsed.calibration_cache_path is None:
        raise OptionError("it names no data", where=where, fix="data = 'samples.npz', or synthetic = 32")
    reads = dict.fromkeys(_files(parsed, model, folder))
    return Job(name, ("quantize", *arguments), folder, model, absolute(output), results / f"{name}.json", tuple(reads))


def _arguments(words: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yields words of a file as arguments."""
    for key, value in words.items():
        option = str(key).replace("_", "-")
        if option in _NOT_A_MODELS:
            raise OptionError(f"'{key}' is no setting of one model", where=where, fix="give it to kenosis-ort sweep")
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, bool):
                yield from [f"--{option}"] if each else []
            elif isinstance(each, (str, int, float)):
                yield f"--{option}={each}"
            else:
                raise OptionError(f"'{key}' is no string, number, truth value or list of those", where=where)


def _files(parsed: argparse.Namespace, model: Path, folder: Path) -> Iterator[Path]:
    """Yields the files that a call reads, as far as its arguments tell."""
    yield model
    yield from external_files(model)
    for named in (parsed.data, parsed.eval_data):
        if named is None:
            continue
        source = folder / named
        if source.is_dir():
            yield from sorted(path for path in source.rglob("*") if path.is_file())
        elif source.is_file():
            yield source
        elif matching := sorted(glob.glob(str(source))):
            yield from (Path(path) for path in matching)
        else:
            module = folder / named.partition(":")[0]
            yield from (path for path in (module, module.with_suffix(".py")) if path.is_file())
    if is_recipe_file(parsed.recipe) and (folder / parsed.recipe).is_file():
        yield folder / parsed.recipe
    yield from (folder / path for path in parsed.custom_op_libraries or () if (folder / path).is_file())
