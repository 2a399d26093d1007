"""The command quantize, and the ``.recipe.toml`` that it saves beside an output.

The library reads ``[recipe]`` and ``[options]`` of it (`kenosis_ort.recipe_file`). The command's own are ``[data]``,
how samples were read or made up, in the words of its options, and ``[made]``, what came out, to tell whether it is the
same again.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from kenosis_ort import __version__
from kenosis_ort.cli import data_flags, exits, flags
from kenosis_ort.cli.flags import in_shell_words
from kenosis_ort.cli.parser import Command, Parser
from kenosis_ort.cli.screen import Screen, check_model
from kenosis_ort.errors import CalibrationError, KenosisWarning, OptionError, did_you_mean, strict_names
from kenosis_ort.storage.writing import absolute, sha256_of

if TYPE_CHECKING:
    from kenosis_ort.report.quantization_report import QuantizationReport


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
    from kenosis_ort.recipe_file import RecipeFile

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


# -- quantize

_FIRST = (
    *("--data", "--synthetic", "--recipe", "--accuracy-budget", "--target", "--exclude", "--report", "--dry-run"),
    *("--eval-data", "--metric", "--json", "-q", "-v"),
)


def _quantize_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="the float model")
    parser.add_argument(
        "out", type=Path, nargs="?", metavar="OUT", help="the file to write (default: MODEL with the suffix .int8.onnx)"
    )
    data_flags.add_arguments(parser, title="calibration data")
    flags.add_arguments(parser)
    data_flags.add_machines(parser)
    if isinstance(parser, Parser):
        parser.show_first(*_FIRST)


def _quantize(arguments: argparse.Namespace, screen: Screen) -> int:
    """Performs the command and returns its exit code."""
    check_model(arguments.model)
    saved = _saved_recipe(arguments)
    words = flags.given(arguments)
    if arguments.dry_run:
        return _dry_run(arguments, words, screen)
    names = {"recipe": _recipe_path(arguments, _output(arguments)), "report": arguments.report}
    paths = {name: None if path is None else absolute(path) for name, path in names.items()}
    model, output = absolute(arguments.model), absolute(_output(arguments))
    called = flags.with_absolute_paths(flags.to_api(words))
    _check_files(arguments, output, paths)
    _make_up_if_the_recipe_says_so(arguments, words)
    data_options = data_flags.given(arguments)
    reader = data_flags.make_reader(arguments, arguments.model)
    _check_files(arguments, output, paths, reader)
    cache = arguments.calibration_cache_path
    if reader is None and not (cache is not None and Path(cache).is_file()):
        raise no_data()
    called["eval_reader"] = data_flags.make_eval_reader(arguments, arguments.model)
    if arguments.metric is not None:
        from kenosis_ort.cli.sources import named_metric

        called["metric"] = named_metric(arguments.metric)
    with data_flags.executor(arguments, screen) as executor:
        called["executor"] = executor
        made = _call(model, output, reader, called, screen, pictured=paths["report"] is not None)
    report = replace(made, model_input=str(arguments.model), model_output=str(_output(arguments)))
    if paths["recipe"] is not None:
        write(paths["recipe"], report, data_options=data_options, model=model, output=output)
    if paths["report"] is not None:
        report.save_html(paths["report"])
    same = None if saved is None else saved.same_output(model, output)
    _show(report, screen, full=arguments.full, files=names, same=same)
    short = report.left_float() or (arguments.strict and report.is_float)
    return exits.NOT_INTEGER if short else exits.SUCCESS


def _output(arguments: argparse.Namespace) -> Path:
    out: Path = arguments.out or default_output(arguments.model)
    return out


def default_output(model: Path) -> Path:
    """The name of the output where none is given: ``model.int8.onnx`` beside ``model.onnx``."""
    return model.with_name(f"{model.name.removesuffix('.onnx')}.int8.onnx")


def no_data() -> CalibrationError:
    """The error for a call that needs data and got none."""
    return CalibrationError(
        "No calibration data was given.",
        fix="--data SOURCE with some 100 samples of yours, or --synthetic to make samples up, which is less accurate",
    )


def _saved_recipe(arguments: argparse.Namespace) -> Recalled | None:
    if arguments.recipe is None or not arguments.recipe.endswith(".toml"):
        return None

    saved = read(Path(arguments.recipe))
    saved.fill(arguments)
    return saved


def _recipe_path(arguments: argparse.Namespace, output: Path) -> Path | None:
    if arguments.no_save_recipe:
        return None
    path: Path = arguments.save_recipe or beside(output)
    used = arguments.recipe is not None and path.exists() and Path(arguments.recipe).exists()
    return None if used and path.samefile(arguments.recipe) else path


def _check_files(
    arguments: argparse.Namespace, output: Path, paths: Mapping[str, Path | None], reader: Any = None
) -> None:
    from kenosis_ort.flow.finish import check_files
    from kenosis_ort.graph.save import check_destination

    further = {"the recipe to save": paths["recipe"], "the report": paths["report"]}
    written = [(role, path) for role, path in further.items() if path is not None]
    check_files(
        arguments.model,
        output,
        cache=arguments.calibration_cache_path,
        written=written,
        read=_files_read(arguments),
        reader=reader,
        in_place=False,
    )
    for path in (output, *(path for _, path in written)):
        check_destination(path)


def _files_read(arguments: argparse.Namespace) -> list[tuple[str, Path]]:
    """The files that the arguments name as inputs, but for the model."""
    from kenosis_ort.recipe import is_recipe_file

    files = [("a library of custom operators", Path(path)) for path in arguments.custom_op_libraries or ()]
    if is_recipe_file(arguments.recipe):
        files.append(("the recipe", Path(arguments.recipe)))
    for what, named in (("the calibration data", arguments.data), ("the evaluation data", arguments.eval_data)):
        if named is not None:
            source = Path(named)
            files.append((what, source if source.exists() else Path(named.rpartition(":")[0])))
    return files


def _make_up_if_the_recipe_says_so(arguments: argparse.Namespace, words: Mapping[str, Any]) -> None:
    from kenosis_ort.recipe_file import resolve

    synthetic = resolve(words.get("recipe", "fast")).recipe.synthetic
    sources = (arguments.data, arguments.synthetic, arguments.calibration_cache_path)
    if synthetic and all(source is None for source in sources):
        arguments.synthetic = synthetic


def _call(
    model: Path, output: Path, reader: Any, called: Mapping[str, Any], screen: Screen, *, pictured: bool
) -> QuantizationReport:
    import warnings

    from kenosis_ort.api import quantize_static

    evidence: Literal["full", "none"] = "full" if pictured else "none"  # only the HTML report shows it
    with screen.progress("calibrating") as progress, warnings.catch_warnings(), strict_names():
        warnings.simplefilter("ignore", KenosisWarning)  # the report holds them
        return quantize_static(model, output, reader, progress=progress, evidence=evidence, **called)


def _show(
    report: QuantizationReport, screen: Screen, *, full: bool, files: Mapping[str, Path | None], same: bool | None
) -> None:
    from kenosis_ort.report.text import render_report

    written = {name: str(path) for name, path in files.items() if path is not None}
    warned = tuple(map(in_shell_words, report.warnings))
    trust = None if report.trust is None else replace(report.trust, advice=in_shell_words(report.trust.advice))
    screen.result(
        lambda: {**report.to_dict(), "files": written, "same_as_recorded": same},
        lambda: render_report(replace(report, warnings=warned, trust=trust), full=full),
    )
    if screen.quiet and not screen.as_json:
        for text in warned:
            screen.warn(text)
    for name, path in written.items():
        screen.note(f"{name}: {path}")
    if same is not None:
        screen.note(
            "The output is the recorded one, byte for byte."
            if same
            else "The output is not the recorded one: other data, versions, or a choice that timing made differently."
        )


def _dry_run(arguments: argparse.Namespace, words: Mapping[str, Any], screen: Screen) -> int:
    from kenosis_ort.api import preview
    from kenosis_ort.cli import dry_run

    with strict_names():
        plan = preview(arguments.model, **flags.to_api(words))
    screen.result(
        lambda: dry_run.to_data(plan, arguments.model),
        lambda: dry_run.render(plan, arguments.model, full=arguments.full),
    )
    return exits.SUCCESS


QUANTIZE: Final = Command(
    "quantize a float model to INT8",
    "MODEL [OUT] (--data SOURCE | --synthetic [N]) [options]",
    r"""Quantizes MODEL to the file OUT (MODEL.int8.onnx unless it is named), from data
of yours (--data) or from made-up data (--synthetic). Whatever is not given is
chosen for this machine's runtime. OUT.recipe.toml, saved beside it, makes the
same model again from the same data.

  kenosis-ort quantize model.onnx --data samples.npz
  kenosis-ort quantize model.onnx --data photos/ --mean 0.485,0.456,0.406 \
                       --std 0.229,0.224,0.225 --report report.html
  kenosis-ort quantize model.onnx out.onnx --data loader:samples --recipe accurate
  kenosis-ort quantize model.onnx --synthetic
  kenosis-ort quantize model.onnx --dry-run
  kenosis-ort quantize model.onnx again.onnx --data samples.npz \
                       --recipe model.int8.recipe.toml
""",
    _quantize_arguments,
    _quantize,
    one="done, but the fusion proof shows float kernels where integer ones were planned; with --strict also where the "
    "file holds a float model",
)
