"""State of a call before calibration, and its calibration cache.

Everything before calibration: checks, preparation, rewrites, and the plan as far as it needs no data.

Kernel, path and time of each layer: by estimate before there is a file, of the file as the runtime runs it.

The calibration cache of a quantization: used where it belongs, refused where not, written for the next run.

A table is of the weights as they came, and holds samples beside the ranges: passes that change weights say what becomes
of ranges, and those that need data have it. So a run with a table does what one with the reader does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import onnx

from kenosis_ort.bench.op_times import profile_in_fresh_sessions
from kenosis_ort.calibration.cached_samples import model_fingerprint
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.errors import CalibrationCacheError, CalibrationError, NothingToQuantizeError
from kenosis_ort.flow import preparation, steps
from kenosis_ort.flow.builder import Builder, Stage, untimed
from kenosis_ort.flow.request import Request
from kenosis_ort.flow.samples import KeepingReader
from kenosis_ort.flow.steps import calibration_config
from kenosis_ort.flow.target_options import fit_names, renamed
from kenosis_ort.graph.constants import HEAVY
from kenosis_ort.graph.load import LoadedModel, check_not_quantized, load_model
from kenosis_ort.graph.opset import PreparedModel
from kenosis_ort.graph.view import GraphView
from kenosis_ort.placement.cost import estimate
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.report.evidence import LayerTime, OpTimes, layer_times
from kenosis_ort.storage.writing import is_possible
from kenosis_ort.targets import Target
from kenosis_ort.targets.proof import FusionReport
from kenosis_ort.verify import verify_fusion

_FIX = "Delete the cache file, or name another one, so that calibration runs again."


class CalibrationCache:
    """One cache file.

    Args:
        path: The file; read if it exists.

    Attributes:
        table: What the file holds; None where it is still to be written.
        is_used: The ranges are the table's, so that nothing was calibrated.

    Raises:
        CalibrationCacheError: The file is damaged, or no calibration table, or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_used = False
        with self._refusing():
            self.table = CalibrationTable.load(path) if os.path.exists(path) else None
            if self.table is None:
                _check_writable(path)

    def table_for(self, layout: Layout, data: KeepingReader | None) -> CalibrationTable | None:
        """The table for a model, after its data are found to be those at hand.

        Args:
            layout: The model whose ranges are needed, and the tensors.
            data: The samples at hand, or those of the table; read to their end where the table is returned.

        Returns:
            The table; None where there is none yet, or one of changed weights, and the reader is at hand.

        Raises:
            CalibrationCacheError: The table is of another model, other options or other data.
        """
        table = self.table
        has_reader = data is not None and data.is_whole
        if table is None or (table.outdated and has_reader):
            return None
        if table.outdated:
            raise self._refusal(
                "The calibration cache is of an earlier version, which had changed the weights before calibration."
            )
        with self._refusing():
            fingerprint = model_fingerprint(layout.builder.prepared.proto)
            table.check_matches(fingerprint, replace(calibration_config(layout.builder.request), sketch=False))
            missing = [t for t in layout.tensors if t not in table]
            if missing:
                raise CalibrationError(
                    f"the calibration cache lacks {len(missing)} tensors, '{missing[0]}' among them",
                    fix="delete the cache, or pass the options that it was made with",
                )
        if data is not None:
            found = data.read_all()
            if has_reader:
                self.check_data(f"{found:064x}")
        self.is_used = True
        return table

    def check_data(self, fingerprint: str | None) -> None:
        """Checks that the data at hand are the table's.

        Raises:
            CalibrationCacheError: They are others.
        """
        known = None if self.table is None else self.table.data_fingerprint
        if None not in (known, fingerprint) and known != fingerprint:
            raise self._refusal("The calibration cache was produced from other data.")

    def keep(self, table: CalibrationTable) -> None:
        """Writes the table for the next run.

        Raises:
            CalibrationError: The file cannot be written.
        """
        table.save(self.path)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except CalibrationError as error:
            raise CalibrationCacheError(error.what, where=str(self.path), fix=error.fix or _FIX) from error

    def _refusal(self, what: str) -> CalibrationCacheError:
        return CalibrationCacheError(what, where=str(self.path), fix=_FIX)


def _check_writable(path: Path) -> None:
    """Checks, before any sample is read, that a file can be written once all are."""
    folder = next(parent for parent in path.parents if os.path.exists(parent))
    if not is_possible(path) or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise CalibrationError("The calibration cache cannot be written.", fix="Name a file in a folder of yours.")


Failed = preparation.Failed


@dataclass(frozen=True)
class Layout:
    """Graph, plan and wanted statistics before calibration.

    Attributes:
        builder: The prepared and rewritten model; its request says where stock's placement has to do.
        plan: The placement as far as it needs no ranges; empty for stock's.
        tensors: Activations whose ranges are needed.
    """

    builder: Builder
    plan: PlacementPlan
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class LayoutDraft:
    """A prepared model with its first plan, before its weights and its form are changed for integers.

    Attributes:
        builder: The prepared model.
        plan: The placement that it would get; empty for stock's.
        failed: Called with the name of a rewrite that failed and was left out.
        adjustable: Names of the nodes that run in integer, but for those whose tensors the caller speaks about: passes
            may change their weights.
    """

    builder: Builder
    plan: PlacementPlan
    failed: Failed
    adjustable: frozenset[str] = frozenset()

    def complete(self, prepared: PreparedModel) -> Layout:
        """The layout of the model, in forms that suit integer kernels.

        Args:
            prepared: The draft's model, perhaps with other weights.

        Raises:
            NothingToQuantizeError: Nothing in it can be quantized.
        """
        builder, plan, request = self.builder, self.plan, self.builder.request
        planner = builder.planner()
        rewritten = prepared
        if planner is not None:
            with builder.stage("rewrite"):
                found = preparation.rewrite_for_integers(prepared, planner, request, builder.excluded, self.failed)
            rewritten = found or prepared
        if rewritten is not builder.prepared:
            builder = replace(builder, prepared=rewritten)
            with builder.stage("plan"):
                plan = steps.make_plan(builder.planner(), request)
        tensors = tuple(builder.tensors_to_observe(plan))
        if not tensors and not plan.quantizes() and not builder.quantizes_bodies:
            raise nothing_to_quantize(request.stock_reason or "nothing matches the options")
        return Layout(builder, plan, tensors)


def draft(
    loaded: LoadedModel,
    request: Request,
    stage: Stage = untimed,
    failed: Failed = preparation.raise_again,
) -> LayoutDraft:
    """Prepares and plans a model.

    Args:
        loaded: The model.
        request: What the caller wants.
        stage: Times a named stage.
        failed: Called with the name of a rewrite that failed and was left out.

    Raises:
        KenosisError: The model or the names in the request are not usable.
        NothingToQuantizeError: No node can run in integer.
    """
    request = fit_names(loaded.proto, request)
    if not request.is_stock:
        check_not_quantized(loaded.proto)
        if request.stock_reason is None and _has_dequantized_weights(loaded):
            request = request.with_stock_placement("the model brings quantized weights of its own")
    return draft_of(loaded.proto, request, stage, failed)


def draft_of(
    proto: onnx.ModelProto,
    request: Request,
    stage: Stage = untimed,
    failed: Failed = preparation.raise_again,
) -> LayoutDraft:
    """Prepares and plans a model that `draft` has checked, or a body of one.

    Raises:
        NothingToQuantizeError: No node can run in integer.
    """
    with stage("prepare"):
        prepared = preparation.prepare_model(proto, request, failed)
    excluded, named = (renamed(names, prepared) for names in (request.nodes_to_exclude, request.nodes_to_quantize))
    by_node = {n: bits for name, bits in request.widths.by_node.items() for n in renamed([name], prepared)}
    request = replace(request, widths=replace(request.widths, by_node=by_node))
    builder = Builder(prepared, request, excluded, named, stage)
    with stage("plan"):
        planner = builder.planner()
        plan = steps.make_plan(planner, request)
    if planner is not None and not plan.quantizes() and not builder.quantizes_bodies:
        raise nothing_to_quantize(f"no node can run in integer on {request.target.name}: {_why_nothing(plan)}")
    constrained = set() if planner is None else planner.constrained
    return LayoutDraft(builder, plan, failed, frozenset(plan.integer_nodes()) - constrained)


def layout_of(loaded: LoadedModel, request: Request) -> Layout:
    """The layout of a model whose weights, and whose bodies of control flow, stay as they are.

    Raises:
        KenosisError: As `draft` and `LayoutDraft.complete`; a rewrite that fails raises.
        NothingToQuantizeError: Nothing in the main graph can be quantized.
    """
    made = draft(loaded, request)
    layout = made.complete(made.builder.prepared)
    if not layout.tensors:
        raise nothing_to_quantize("its layers are in bodies of control flow")
    return layout


def nothing_to_quantize(why: str) -> NothingToQuantizeError:
    """The error for a model of which nothing is left to quantize."""
    return NothingToQuantizeError(
        f"no node of the model can be quantized ({why})",
        fix="check op_types_to_quantize, nodes_to_quantize and nodes_to_exclude; deploy the float model otherwise",
    )


def _has_dequantized_weights(loaded: LoadedModel) -> bool:
    return any(node.op_type == "DequantizeLinear" for node in loaded.proto.graph.node)


def _why_nothing(plan: PlacementPlan) -> str:
    heavy = [n for n in plan.nodes if n.op_type in HEAVY]
    return f"'{heavy[0].node}' ({heavy[0].op_type}): {heavy[0].reason}" if heavy else "no Conv, Gemm or MatMul"


Source = str | os.PathLike[str] | onnx.ModelProto
_RUNS: Final = 30


def layers_of(
    view: GraphView, plan: PlacementPlan, target: Target, fusion: FusionReport | None, times: OpTimes | None = None
) -> tuple[LayerTime, ...]:
    """The layers of a model as planned.

    Args:
        view: The prepared model.
        plan: Its placement.
        target: With the costs of the machine that the file is made for, where it has any.
        fusion: What the runtime made of the file; None where it was not asked.
        times: What was measured; None where nothing was.
    """
    if target.costs is None or not target.costs.shows_times:
        return layer_times(fusion, {}, None, times)
    cost = estimate(view, plan, target.costs)
    between = cost.run_us + sum(cost.borders_us.values())
    return layer_times(fusion, {n.node: (n.op_type, n.planned_us) for n in cost.nodes}, between, times)


def planned_layers(source: Source, request: Request) -> tuple[LayerTime, ...]:
    """The layers of a float model as a call would lay them out, before calibration; none without a plan.

    Args:
        source: The float model.
        request: Of the call.
    """
    layout = layout_of(load_model(source, custom_op_libraries=request.custom_op_libraries), request)
    view = layout.builder.view
    return () if view is None or not layout.plan else layers_of(view, layout.plan, layout.builder.request.target, None)


def running_layers(
    source: Source,
    feeds: Sequence[Mapping[str, Any]],
    *,
    threads: int,
    budget_s: float,
    custom_op_libraries: Sequence[str],
    target: str | Target | None,
) -> tuple[LayerTime, ...]:
    """The layers of a quantized model as the runtime runs them, measured.

    Args:
        source: The quantized model, of any origin.
        feeds: What it is run on.
        threads: Threads of a session.
        budget_s: Seconds of running.
        custom_op_libraries: Libraries with custom operators to register.
        target: Whose runtime is asked; None for the one that the file says.
    """
    fusion = verify_fusion(source, custom_op_libraries=custom_op_libraries, threads=threads, target=target)
    times = profile_in_fresh_sessions(
        source, feeds, threads=threads, runs=_RUNS, budget_s=budget_s, custom_op_libraries=custom_op_libraries
    )
    return layer_times(fusion, {}, None, OpTimes((), times, threads, _RUNS))
