"""The public calls that take a model to quantize."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import onnx
from typing_extensions import Unpack

from kenosis_ort.checks import MOST_THREADS, flag, path as check_path, real, whole, word
from kenosis_ort.errors import ArgumentTypeError, OptionError, OutputError, callers_own, last_gate
from kenosis_ort.options import UNSET, Format, Keywords, Placement, Speed
from kenosis_ort.quantizer.stock import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    StaticQuantConfig,
)
from kenosis_ort.storage.writing import absolute
from kenosis_ort.targets import DEFAULT_TARGET

if TYPE_CHECKING:  # what a call needs is imported when it is made: a program's start is not slower by it
    from kenosis_ort.accuracy.metric import Metric
    from kenosis_ort.calibration.table import CalibrationTable
    from kenosis_ort.flow.request import Progress, Request
    from kenosis_ort.interop import Conversion
    from kenosis_ort.option_types import RecipeFile
    from kenosis_ort.passes.recipe import Recipe
    from kenosis_ort.plan import PlacementPlan
    from kenosis_ort.report.evidence import LayerTime
    from kenosis_ort.report.quantization_report import QuantizationReport
    from kenosis_ort.targets import Target
    from kenosis_ort.targets.profile import HostProfile
else:  # for `typing.get_type_hints`
    Metric = CalibrationTable = Progress = Request = Conversion = PlacementPlan = Recipe = RecipeFile = Any
    LayerTime = QuantizationReport = Target = HostProfile = Any

_PROFILED_FEEDS: Final = 4


@last_gate
def quantize_static(
    model_input: str | os.PathLike[str] | onnx.ModelProto,
    model_output: str | os.PathLike[str],
    calibration_data_reader: CalibrationDataReader | None = None,
    quant_format: Any = UNSET,
    op_types_to_quantize: Sequence[str] | None = None,
    per_channel: Any = UNSET,
    reduce_range: Any = UNSET,
    activation_type: Any = UNSET,
    weight_type: Any = UNSET,
    nodes_to_quantize: Sequence[str] | None = None,
    nodes_to_exclude: Sequence[str] | None = None,
    use_external_data_format: Any = UNSET,
    calibrate_method: Any = UNSET,
    calibration_providers: Sequence[Any] | None = None,
    extra_options: Mapping[str, Any] | None = None,
    calibration_cache_path: str | os.PathLike[str] | None = None,
    *,
    recipe: str | os.PathLike[str] | Recipe | RecipeFile = "fast",
    accuracy_budget: float | None = None,
    metric: Metric | None = None,
    eval_reader: CalibrationDataReader | None = None,
    target: Any = UNSET,
    format: Format | None = None,  # noqa: A002 - the field's word
    speed: Speed | None = None,
    placement: Placement | None = None,
    custom_op_libraries: Any = UNSET,
    progress: Progress | None = None,
    **further: Unpack[Keywords],
) -> QuantizationReport:
    """Quantizes a float model to INT8 in place of ``onnxruntime.quantization.quantize_static``.

    The parameters up to ``calibration_cache_path`` are stock's, in stock's order and with stock's meaning. Where
    the caller says nothing about data types, this machine decides: uint8 activations and int8 weights per channel
    on x86-64 (7-bit weights where 8-bit products saturate), int8 for both on Arm.

    Args:
        model_input: Path of the float model, or the model itself (not changed).
        model_output: Path to write; written only once the result is known to load, and only if it is no file that is
            read. It may be the path of ``model_input``, which it then replaces, as stock does.
        calibration_data_reader: Yields feeds (input name to array); read once. May be None with a cache.
        quant_format: A ``QuantFormat``: QDQ, the default, or QOperator, which is ``format="qop"``.
        op_types_to_quantize: Operator types to quantize, None for all.
        per_channel: Weight scales by output channel.
        reduce_range: 7-bit weights.
        activation_type: Data type of activations, a ``QuantType``.
        weight_type: Data type of weights, a ``QuantType``.
        nodes_to_quantize: Names of the only nodes to quantize.
        nodes_to_exclude: Names of nodes that stay float, in the runtime too.
        use_external_data_format: Write weights to ``<model_output>.data``; automatic above 2 GiB. Where such a pair is
            replaced on a file system without hard links, they go to ``<model_output>.<16 hex digits>.data``.
        calibrate_method: How activation ranges follow from the data, a ``CalibrationMethod``; left out, the recipe
            decides.
        calibration_providers: Execution providers for calibration, the CPU's by default.
        extra_options: Stock's ``extra_options``; an unknown key is ignored with a warning.
        calibration_cache_path: Calibration table to reuse, or to write if it does not exist. It switches no pass off;
            one of another model, other options or other data than the reader's, or an edited one, is refused.
        recipe: What is done for accuracy: ``"fast"``, ``"accurate"``, ``"strict"``, ``"data-free"``, ``"plain"``,
            ``"tiny"``, ``"weight-only-4"``, ``"weight-only-8"``, a `Recipe`, or the path of a TOML file or what
            `QuantizationReport.recipe_file` returns, whose options hold where the call says nothing else. Passes are
            without effect where the caller dictates the placement.
        accuracy_budget: Loss allowed in what is measured, e.g. 0.005 for half a point of top-1 with a metric that
            knows labels; given, nodes are left float until it holds, whatever the recipe.
        metric: The task's own measure, more is better: ``metric(outputs, reference, indices) -> float``, sequences of
            outputs by name, one entry a feed, and the numbers of the feeds in their reader, by which labels are looked
            up; the same without ``indices``; or an object with ``update(outputs, reference, index)``, ``compute()`` and
            ``reset()``. None measures what the outputs are for: agreement of classes, overlap of masks, and so on.
        eval_reader: Held-out data of yours, never calibrated on and used whole: what is lost is measured on it. None
            measures on calibration samples that are held out.
        target: Runtime that the result is placed for: the name of one that comes with the package, ``"ort-cpu"`` by
            default, or a `kenosis_ort.targets.Target` of your own.
        format: How the result is written: ``"qdq"``; ``"qop"``, operators of integers; ``"qcdq"``, Q, Clip of
            integers and DQ for 2 to 8 bits; ``"qop-clip"``, operators of integers with Clip; ``"qcdq-qonnx"``, QCDQ
            with float weights in front of their Q, as QONNX' tools read it; ``"qonnx"``, ``Quant`` nodes. What the
            latter two say is not for the runtime's kernels, so that nothing is timed and no layer is left float for
            speed.
        speed: How much measuring goes into the promise that the result is not slower than the float model: a `Speed`.
        placement: What is quantized where, beside stock's own options about it: a `Placement`.
        custom_op_libraries: Libraries with custom operators to register; none is loaded unasked.
        progress: Called with (samples done, samples in all or None) during calibration.
        further: More keywords, and the fields of both groups one by one: `kenosis_ort.options.Keywords`.

    Returns:
        The report: plan, fusion proof, calibration, sizes, notes and warnings.

    Raises:
        KenosisError: One of its subclasses; nothing was written.
    """
    called = locals()
    from kenosis_ort.calibration.readers import in_shards, source_files
    from kenosis_ort.flow.file_checks import check_files
    from kenosis_ort.flow.resolve import request_of
    from kenosis_ort.flow.run import run
    from kenosis_ort.passes.recipe import is_recipe_file

    request = request_of(called, inspect.signature(quantize_static))
    host = further.get("host")
    check_files(
        Path(model_input) if isinstance(model_input, (str, os.PathLike)) else None,
        request.output,
        cache=request.cache_path,
        read=[
            *([("the recipe", Path(recipe))] if is_recipe_file(recipe) else []),
            *([("the host profile", Path(host))] if isinstance(host, (str, os.PathLike)) else []),
            *(("the evaluation data", file) for file in source_files(eval_reader)),
        ],
        reader=calibration_data_reader,
    )
    if eval_reader is not None and eval_reader is calibration_data_reader:
        raise OptionError(
            "eval_reader is the reader that calibration reads",
            where="eval_reader",
            fix="pass a reader of other samples: what is calibrated on tells nothing about what is lost",
        )
    return run(model_input, request, in_shards(calibration_data_reader))


@last_gate
def quantize(
    model_input: str | os.PathLike[str] | onnx.ModelProto,
    model_output: str | os.PathLike[str],
    quant_config: StaticQuantConfig,
    **extras: Any,
) -> QuantizationReport:
    """Quantizes with a ``StaticQuantConfig``, in place of ``onnxruntime.quantization.quantize``.

    A config cannot say whether a value was chosen or left at stock's default. Where both data types are stock's
    defaults they count as left open, and so do ``per_channel``, ``reduce_range`` and ``use_external_data_format`` where
    they are False, QDQ as ``quant_format`` and MinMax as ``calibrate_method``; to request these, call
    `quantize_static`.

    Args:
        model_input: As `quantize_static`.
        model_output: As `quantize_static`.
        quant_config: Stock's configuration object.
        extras: Keyword-only parameters of `quantize_static`.

    Raises:
        OptionError: Another kind of configuration.
    """
    if not isinstance(quant_config, StaticQuantConfig):
        raise OptionError(
            f"quantize takes a StaticQuantConfig, not {type(quant_config).__name__}",
            where="quant_config",
            fix="for dynamic quantization call onnxruntime.quantization.quantize",
        )
    c = quant_config
    types_open = c.activation_type == QuantType.QInt8 and c.weight_type == QuantType.QInt8
    stated = {
        "calibration_data_reader": c.calibration_data_reader,
        "quant_format": UNSET if c.quant_format is QuantFormat.QDQ else c.quant_format,
        "op_types_to_quantize": c.op_types_to_quantize,
        "per_channel": c.per_channel or UNSET,
        "reduce_range": c.reduce_range or UNSET,
        "activation_type": UNSET if types_open else c.activation_type,
        "weight_type": UNSET if types_open else c.weight_type,
        "nodes_to_quantize": c.nodes_to_quantize,
        "nodes_to_exclude": c.nodes_to_exclude,
        "use_external_data_format": c.use_external_data_format or UNSET,
        "calibrate_method": UNSET if c.calibrate_method == CalibrationMethod.MinMax else c.calibrate_method,
        "calibration_providers": c.calibration_providers,
        "extra_options": c.extra_options,
        "calibration_cache_path": getattr(c, "calibration_cache_path", None),
    }
    for name in stated.keys() & extras.keys():
        raise OptionError(f"the configuration says {name}, and so does the call", where=name, fix="say it in one")
    return quantize_static(model_input, model_output, **stated, **extras)


@last_gate
def convert(
    model: str | os.PathLike[str] | onnx.ModelProto,
    out: str | os.PathLike[str],
    to: str = "qdq",
    *,
    custom_op_libraries: Sequence[str] = (),
) -> Conversion:
    """Converts a quantized model from one format to another.

    QONNX (of the qonnx package, Brevitas, QKeras and FINN), QCDQ, QDQ and quantized operators are read, told apart by
    what is in the file. Inputs and outputs keep their names. The outputs of the result are compared with those of the
    model as it came, on inputs made up for it.

    Args:
        model: Path of the quantized model, or the model itself (not changed).
        out: Path to write; written only once the result is known to load and to compute what the model does.
        to: ``"qdq"``: Q, Clip of integers for fewer than 8 bits, DQ, in the form that ONNX Runtime's integer kernels
            take. ``"qop"``: quantized operators, with Clip for fewer bits, for the same kernels. ``"qcdq"``: float
            weights in front of Q, Clip and DQ, as other tools read it. ``"qonnx"``: Quant nodes, for FINN, hls4ml and
            the qonnx package. ``"float"``: the float model behind it; weights are those that the integers stand for,
            and each quantizer of an activation becomes a Clip to its range, since what it cuts off (often it is the
            only Relu) belongs to what the model computes.
        custom_op_libraries: Libraries with custom operators to register; none is loaded unasked.

    Returns:
        What was read and written, and how the outputs compare.

    Raises:
        KenosisError: One of its subclasses; nothing was written. What a format cannot express is an
            `UnsupportedModelError` that names the node and what it says.
    """
    from kenosis_ort.interop import convert_model

    return convert_model(model, out, to, custom_op_libraries=custom_op_libraries)


@last_gate
def preview(model_input: str | os.PathLike[str] | onnx.ModelProto, **options: Any) -> PlacementPlan:
    """The placement that `quantize_static` would begin with, before calibration; writes nothing.

    Args:
        model_input: As `quantize_static`.
        options: Options of `quantize_static`.

    Raises:
        KenosisError: As `quantize_static`, as far as no data is needed.
    """
    from kenosis_ort.flow.preview import plan_only

    return plan_only(model_input, _previewed(model_input, options))


@last_gate
def calibrate(
    model_input: str | os.PathLike[str] | onnx.ModelProto,
    table_path: Any,
    calibration_data_reader: Any = None,
    *,
    keep_samples: bool = True,
    **options: Any,
) -> CalibrationTable:
    """The calibration table that `quantize_static` takes as ``calibration_cache_path``.

    ``calibrate(model, table_path, data)`` writes it too, ``calibrate(model, data)`` does not.

    The table takes the reader's place: with it alone the result is that of the reader. Tables of several data sets can
    be merged, see `CalibrationTable.merge`; of parts of one, in whatever order, the result is that of the whole. With
    ``executor`` the shards of the data are run where the client's workers are; the table is the same to the bit.

    Args:
        model_input: As `quantize_static`.
        table_path: The file to write; it must not exist. Left out where no file is wanted.
        calibration_data_reader: As `quantize_static`, or `kenosis_ort.Shards`, or a list of what these are made of.
        keep_samples: The table holds up to 64 of the samples, as they are, in at most 64 MiB, for the passes that need
            data. Without, it holds statistics only; what needs samples is then left out, and the report says so, unless
            the reader is passed beside the table.
        options: Options of `quantize_static`; they have to be the same there.

    Raises:
        KenosisError: As `quantize_static`; nothing was written.
    """
    from kenosis_ort.calibration.readers import in_shards
    from kenosis_ort.flow.preview import calibrate_only
    from kenosis_ort.graph.files import check_destination

    keep_samples = flag("keep_samples", keep_samples)
    path = None
    if calibration_data_reader is None:
        calibration_data_reader = table_path
    else:
        path = absolute(check_path("table_path", table_path))
        if os.path.exists(path):
            raise OutputError(
                "the calibration table exists already", where=str(path), fix="name another file or delete it"
            )
        check_destination(path)
    request = _previewed(model_input, {**options, "calibration_cache_path": path})
    return calibrate_only(model_input, request, in_shards(calibration_data_reader), keep_samples=keep_samples)


@last_gate
def measure_host(
    *,
    target: str | Target = DEFAULT_TARGET,
    threads: int = 1,
    budget_s: float = 30.0,
    name: str = "",
    keep: bool = True,
    progress: Progress | None = None,
) -> HostProfile:
    """Measures what the kernels of a target's runtime cost on this machine.

    Files that are made here later are laid out for it; `HostProfile.save` writes it for use elsewhere.

    Args:
        target: The runtime, as for `quantize_static`.
        threads: Threads of a session, as in deployment; 0 for the runtime's default.
        budget_s: Seconds it may take.
        name: What reports call the machine; the processor's name where it is empty.
        keep: It is kept in the user's cache for later calls, by processor, runtime version and threads.
        progress: Called with (probes done, probes in all).

    Returns:
        The profile; what could not be measured is scaled from the nearest one that comes with the package.

    Raises:
        OptionError: The target's kernels cannot be measured here, or an option is wrong.
    """
    from kenosis_ort.targets import get_target
    from kenosis_ort.targets.profile import keep_profile
    from kenosis_ort.tuning.measure import measure_profile

    is_kept = flag("keep", keep)
    profile = measure_profile(
        get_target(target),
        threads=whole("threads", threads, most=MOST_THREADS),
        budget_s=real("budget_s", budget_s, above=0),
        name=word("name", name),
        progress=None if progress is None else callers_own(progress),
    )
    if is_kept:
        keep_profile(profile)
    return profile


@last_gate
def layer_times(
    model: str | os.PathLike[str] | onnx.ModelProto,
    feeds: CalibrationDataReader | None = None,
    *,
    budget_s: float = 5.0,
    **options: Any,
) -> tuple[LayerTime, ...]:
    """Kernel of each layer, its path for the stored weights, and its time.

    A float model is estimated, as `quantize_static` would lay it out for a machine; a quantized one, of any
    origin, as the runtime runs it here, by the runtime's profiler in fresh sessions, medians.

    Args:
        model: The model; not changed.
        feeds: What a quantized model is run on, at most a few; made up after its inputs where there are none.
        budget_s: Seconds that its timed runs may take.
        options: Options of `quantize_static`; for a quantized model ``target``, ``threads`` and
            ``custom_op_libraries`` alone.

    Returns:
        One entry for each layer with a kernel of its own, and one without a name for all that is between layers.

    Raises:
        KenosisError: As `quantize_static`, as far as no data is needed, or `verify_fusion`.
        OptionError: An option says nothing of a model that is quantized already.
    """
    from kenosis_ort.calibration.feeds import sample_feeds
    from kenosis_ort.calibration.synthetic.reader import SyntheticReader
    from kenosis_ort.flow.preview import planned_layers, running_layers
    from kenosis_ort.graph.summary import summarize

    request = _previewed(model, options)
    if summarize(model).is_float:
        return planned_layers(model, request)
    if strange := sorted(options.keys() - {"target", "threads", "custom_op_libraries"}):
        raise OptionError(
            f"the model is quantized already, so {strange[0]} says nothing",
            where=strange[0],
            fix="leave it out, or name the float model",
        )
    source = SyntheticReader(model, samples=_PROFILED_FEEDS) if feeds is None else feeds
    few, seconds = list(islice(sample_feeds(source), _PROFILED_FEEDS)), real("budget_s", budget_s, above=0)
    return running_layers(model, request, few, budget_s=seconds, target=options.get("target"))


def _previewed(model_input: Any, options: Mapping[str, Any]) -> Request:
    """The request for a call that writes no model."""
    from kenosis_ort.flow.resolve import request_of

    signature = inspect.signature(quantize_static)
    try:
        bound = signature.bind(model_input, f"{os.sep}preview.onnx", **options)
    except TypeError as error:
        raise ArgumentTypeError(str(error), where="options", fix="give options of quantize_static") from error
    bound.apply_defaults()
    return request_of(bound.arguments, signature)
