"""The contract of a pass: a frozen configuration that names the statistics it needs and turns one state into another.

A pass never evaluates itself. It returns a candidate, and the one runner (`kenosis_ort.passes.runner`) evaluates it on
samples that it was not fitted to, keeps or undoes it, and survives where it raises.

The net between two passes: the float model, what it is quantized to, and what passes changed on the way.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar

import numpy as np
import onnx

from kenosis_ort.calibration.feeds import Feed
from kenosis_ort.calibration.statistics import ChannelStatistics, Rescaling
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.graph import walk
from kenosis_ort.graph.outside import array_in, copy_with
from kenosis_ort.graph.view import GraphView, PreparedModel
from kenosis_ort.passes.evaluator import Evaluator, Score
from kenosis_ort.passes.recipe import PassSettings
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.runtime.session import HERE, WHOLE_LIMIT, Executor
from kenosis_ort.targets.proof import FusionReport

LEAST_HELD_OUT = 4
"""Samples that a change of ranges or weights is evaluated on."""

Overlay = Mapping[str, Mapping[str, onnx.TensorProto]]
"""Constants, by node and name, that take the place of the model's own where the node runs in integer.

Rounded weights and corrected biases make up for the error of int8 arithmetic. In a node that runs in float they make up
for an error that is not there: the first three nodes of MLPerf's ResNet-8 left float with their corrections have an
error of 0.00210, with their own biases of 0.00096.
"""


def materialize(model: onnx.ModelProto, overlay: Overlay, nodes: Collection[str] | None = None) -> onnx.ModelProto:
    """A copy with the constants that an overlay has for some nodes, None for all; the model where there are none."""
    found = (tensors for node, tensors in overlay.items() if nodes is None or node in nodes)
    own = {name: tensor for tensors in found for name, tensor in tensors.items()}
    return copy_with(model, own) if own else model


def overflown(overlay: Overlay) -> dict[str, str]:
    """The nodes whose corrections no float32 holds, with the reason: they run as they came."""
    return {
        node: f"its '{name}', once corrected, holds NaN or infinity"
        for node, tensors in overlay.items()
        for name, tensor in tensors.items()
        if not np.isfinite(array_in(tensor)).all()
    }


@dataclass(frozen=True)
class Build:
    """One quantized model with its plan and ranges.

    Attributes:
        float_model: The float model that was quantized: prepared, rewritten, perhaps equalized.
        table: The activation ranges.
        keep_float: Nodes left float beyond what the rules say, with the reason.
        plan: The placement; empty where stock's is used.
        quantized: The result, not written yet.
        fusion: The fusion proof; None without verification.
        notes: What the repair after verification did.
        corrections: What nodes in integer have in place of the float model's own constants.
    """

    float_model: onnx.ModelProto
    table: CalibrationTable
    keep_float: Mapping[str, str]
    plan: PlacementPlan
    quantized: onnx.ModelProto
    fusion: FusionReport | None = None
    notes: tuple[str, ...] = ()
    corrections: Overlay = field(default_factory=dict)

    @property
    def is_quantized(self) -> bool:
        """Whether anything in the model is quantized."""
        graphs = walk.all_graphs(self.quantized.graph)
        return any(node.op_type == "DequantizeLinear" for graph in graphs for node in graph.node)

    @property
    def pieces(self) -> int:
        """Number of pieces that the fusion proof cut the model into; 0 without a proof of a huge model."""
        return self.fusion.pieces if self.fusion is not None else int(len(self.quantized.graph.node) <= WHOLE_LIMIT)

    @property
    def is_whole(self) -> bool:
        """Whether the model is small enough to be run as a whole."""
        return self.pieces == 1


@dataclass(frozen=True)
class State:
    """State that a pass gets, and returns changed.

    Attributes:
        prepared: The float model. The first passes change its weights in ways that are exact in float; what those after
            them change is in ``build.corrections``.
        build: What it is quantized to; None for those first passes.
        rescaled: Values whose channels a pass has scaled, and how; by name.
        is_reported: `rescaled` says all that the passes made of the values; else any of them may have changed.
        uncorrected: The corrections of the build before those of its biases; None where these were not corrected, or
            where weights have changed since.
    """

    prepared: PreparedModel
    build: Build | None = None
    rescaled: Mapping[str, Rescaling] = field(default_factory=dict)
    is_reported: bool = True
    uncorrected: Overlay | None = None

    @property
    def built(self) -> Build:
        """The build, for passes that come after those that change weights."""
        assert self.build is not None
        return self.build

    def with_own_biases(self) -> State:
        """The state with the biases that were there before they were corrected; its build is not made anew."""
        if self.uncorrected is None:
            return self
        return replace(self, build=replace(self.built, corrections=self.uncorrected), uncorrected=None)

    def with_weights(self, model: onnx.ModelProto, notes: Sequence[str], rescaled: Mapping[str, Rescaling]) -> State:
        """The state with other weights, what was done, and what became of the values whose channels were scaled."""
        changed = changed_weights(self.prepared, model, notes)
        return replace(self, prepared=changed, rescaled={**self.rescaled, **rescaled})


def noted(state: State, notes: Sequence[str]) -> State:
    """A state with further notes for the report; one without a build takes none."""
    if not notes or state.build is None:
        return state
    return replace(state, build=replace(state.build, notes=(*state.build.notes, *notes)))


P = TypeVar("P", bound="Pass")

Statistics = Mapping[str, ChannelStatistics]


@dataclass(frozen=True)
class Context:
    """Context of a pass: samples, evaluator and builder.

    Attributes:
        fit: Samples to fit to.
        evaluator: Knows other samples; for passes that compare several candidates of their own.
        nodes: Names of the nodes whose weights passes may change.
        active: The passes of this run, by name: what one pass leaves to another it asks for here.
        forced: Names of those that the caller requires: applied without being evaluated.
        per_channel: Weights have a scale a channel.
        inserts_scales: A Mul may be inserted where nothing can take a scale.
        mixes: Float nodes may lie between integer ones; else the runtime takes the net whole.
        known: Statistics by channel that are better than those of the samples, as made-up ones need them.
        real_samples: Some samples are real.
        has_metric: The caller gave a metric: what is compared are not the outputs' errors.
        custom_op_libraries: Libraries with custom operators.
        executor: Does work that can be done apart; the evaluator's candidates run there.
        memory: What passes keep for later ones of the same net, under a name of theirs.
        build_of: Quantizes a state; one without a build with the ranges that its weights lead to.
        quantize: Quantizes with ranges, nodes left float (name to reason) and corrections, to compare candidates.
        prove: Quantizes likewise, with the fusion proof and its repair.
        plan: Plans the same, whatever the corrections, quantizing nothing.
        fitted_ranges: Returns the ranges of a calibrated state over the samples to fit to alone.
    """

    fit: Sequence[Feed]
    evaluator: Evaluator
    build_of: Callable[[State], Build]
    quantize: Callable[[CalibrationTable, Mapping[str, str], Overlay], Build]
    prove: Callable[[CalibrationTable, Mapping[str, str], Overlay], Build]
    plan: Callable[[CalibrationTable, Mapping[str, str]], PlacementPlan]
    fitted_ranges: Callable[[State], CalibrationTable]
    nodes: frozenset[str] = frozenset()
    active: Mapping[str, Pass] = field(default_factory=dict)
    forced: frozenset[str] = frozenset()
    per_channel: bool = True
    inserts_scales: bool = False
    mixes: bool = True
    known: Statistics = field(default_factory=dict)
    real_samples: bool = True
    has_metric: bool = False
    custom_op_libraries: tuple[str, ...] = ()
    executor: Executor = HERE
    memory: dict[str, Any] = field(default_factory=dict)

    def with_corrections(self, state: State, corrections: Overlay) -> State:
        """A calibrated state quantized with other corrections, which nothing is proved of."""
        build = state.built
        made = self.quantize(build.table, build.keep_float, corrections)
        return replace(state, build=replace(made, notes=build.notes), uncorrected=None)

    def with_placement(
        self, state: State, *, table: CalibrationTable | None = None, keep_float: Mapping[str, str] | None = None
    ) -> State:
        """A calibrated state quantized with other ranges or other nodes left float, and proved anew."""
        build = state.built
        keep = build.keep_float if keep_float is None else keep_float
        made = self.prove(table or build.table, keep, build.corrections)
        return replace(state, build=replace(made, notes=(*build.notes, *made.notes)))

    def after(self, name: str, state: State) -> State:
        """A state after another pass of this run; as it is without that one, or where it has nothing to offer."""
        other = self.active.get(name)
        found = None if other is None else other.apply(state, {}, self)
        return found.state if isinstance(found, Candidate) else state

    def score(self, state: State, evaluator: Evaluator | None = None) -> Score:
        """Error of a state on the held-out samples, or those of another evaluator."""
        by = evaluator or self.evaluator
        last: tuple[Callable[[], State | None], Evaluator, Score] | None = self.memory.get("score")
        if last is None or last[0]() is not state or last[1] is not by:
            last = self.memory["score"] = weakref.ref(state), by, by.score(self.build_of(state).quantized)
        return last[2]

    def with_more_to_fit(self) -> Context:
        """Three quarters of few samples to fit to, the rest to evaluate on: a mean needs many samples."""
        held_out = len(self.evaluator.feeds)
        if self.has_metric or held_out < 2 or len(self.fit) >= 2 * held_out:
            return self
        more, evaluator = self.evaluator.halved()
        return replace(self, fit=[*self.fit, *more], evaluator=evaluator)


@dataclass(frozen=True)
class Skipped:
    """A pass that has nothing to offer.

    Attributes:
        why: One sentence, for the report.
        notes: What the user has to know all the same.
    """

    why: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """A state that a pass offers.

    Attributes:
        state: It.
        what: What was done, a few words, for the report.
        decided: The pass has compared it on the held-out samples already.
        scores: Those that it compared, without and with it; None for the scores of the states.
    """

    state: State
    what: str = ""
    decided: bool = False
    scores: tuple[Score, Score] | None = None


@dataclass(frozen=True)
class Pass(PassSettings, ABC):
    """One accuracy pass; its fields are its settings, by the names that recipes use.

    Attributes:
        title: The subject of a sentence, e.g. ``Equalization``.
        before_calibration: It changes weights and not what the net computes, and its state has no build: see
            `WeightPass`.
        must_beat: It is kept only if it is better by more than so few samples would say by chance; else if it is
            better without any single one of them.
        least_held_out: Samples to evaluate on without which it is not tried.
        fits_means: It is fitted to as many samples as possible.
        chooses_ranges: It has nothing to do where the caller names a method for ranges.
        off: Values of its first setting with which it does nothing.
    """

    title: ClassVar[str]
    before_calibration: ClassVar[bool] = False
    must_beat: ClassVar[bool] = False
    least_held_out: ClassVar[int] = 1
    fits_means: ClassVar[bool] = False
    chooses_ranges: ClassVar[bool] = False
    off: ClassVar[tuple[Any, ...]] = (False,)

    @property
    def wanted(self) -> bool:
        """Whether its configuration makes it do anything: its first setting, if it has one, is not off."""
        return all(getattr(self, entry.name) not in self.off for entry in fields(self)[:1])

    def points(self, state: State, context: Context) -> Mapping[str, int]:
        """The values of the float model whose statistics by channel it needs, with the channel axis of each."""
        del state, context
        return {}

    @abstractmethod
    def apply(self, state: State, statistics: Statistics, context: Context) -> Candidate | Skipped:
        """A changed state to evaluate.

        Args:
            state: The net so far. Nothing in it may be changed.
            statistics: What `points` asked for, over the samples to fit to.
            context: Samples, and how to quantize.

        Raises:
            Exception: Any; the runner undoes the pass and tells of it.
        """

    @classmethod
    def of(cls: type[P], settings: Any) -> P:
        """The pass as a recipe configures it, whose settings have the names of the pass's fields."""
        return cls(**{entry.name: getattr(settings, entry.name) for entry in fields(cls)})


class WeightPass(Pass):
    """A pass that changes weights but not the outputs of the float net; its gain is predicted and has to be clear.

    It comes before the others. Ranges are those of the weights as they came: what it made of them it says in
    ``State.rescaled``. One that says nothing is believed nothing: all ranges are collected again, of the kept samples.
    """

    before_calibration: ClassVar[bool] = True
    must_beat: ClassVar[bool] = True
    least_held_out: ClassVar[int] = LEAST_HELD_OUT

    def scaled(self, graph: GraphView, *, nodes: Collection[str], insert: bool) -> Mapping[str, int]:
        """All values whose channels it may scale, with the axis of their channels.

        Args:
            graph: The prepared float model.
            nodes: Names of the nodes whose weights it may change.
            insert: A Mul may be inserted where nothing can take a scale.
        """
        del graph, nodes, insert
        return {}


def changed_weights(prepared: PreparedModel, model: onnx.ModelProto, notes: Sequence[str]) -> PreparedModel:
    """A prepared model with other weights."""
    return PreparedModel(model, (*prepared.notes, *notes), prepared.nodes)
