"""A target: the table of a runtime, and how the runtime is asked.

A target is one `Target`: a `Table` of plain data, and `Hooks` for what a table cannot say: how the runtime is asked
which kernel runs each node and how a model is opened to be timed, and what is done to plans and files beyond the rules.
Planning, repair, tuning and the promise read nothing else about the runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from kenosis_ort.runtime.session import Runner
from kenosis_ort.targets.vocabulary import DataTypes, Table

if TYPE_CHECKING:
    from kenosis_ort.graph.view import GraphView, ir
    from kenosis_ort.plan import Decision, PlacementOptions, PlacementPlan
    from kenosis_ort.targets.profile import CostTable, HostProfile, Probe
    from kenosis_ort.targets.proof import FusionReport, PatternReport
    from kenosis_ort.targets.vocabulary import NodeClass


DYNAMIC, WEIGHT_ONLY = "dynamic", "weight-only"
"""Forms beside the planned one: ranges of activations found as they run; weights alone in few bits."""


@dataclass(frozen=True)
class TimedRuntime:
    """Timing of models on a target's runtime.

    Attributes:
        open: Opens a model, given as a path or serialized: ``open(source, *, threads, custom_op_libraries)``.
        opener: Does once what all openings of one model share, and is called like `open`; None where they share
            nothing. What the function that it returns opens runs as fast as what `open` opens.
        in_calling_thread: With one thread it runs in the thread that calls it, whose processor time then times it.
        clock: The seconds that all its runs took so far, where it measures them itself, as in a process of its own.
        other_forms: Forms beside the planned one that the runtime has kernels for.
    """

    open: Callable[..., Runner]
    opener: Callable[..., Callable[[], Runner]] | None = None
    in_calling_thread: bool = False
    clock: Callable[[], float] | None = None
    other_forms: tuple[str, ...] = ()


@dataclass(frozen=True)
class Placed:
    """A placement in which a target looks for values that need a barrier.

    Attributes:
        view: The prepared model.
        integer: Names of the nodes that run in integer.
        float_output: Names of those whose output stays float.
        absorbed: Names of the nodes that kernels take in.
        biased: Names of the Adds that become the bias of a MatMul.
        requested: Names of the nodes that are quantized for the caller's sake.
        quantized: The values that carry Q/DQ, by name.
        decisions: How each value is read, by name.
    """

    view: GraphView
    integer: Collection[str]
    float_output: Collection[str]
    absorbed: Collection[str]
    biased: Collection[str]
    requested: Collection[str]
    quantized: Mapping[str, ir.Value]
    decisions: Mapping[str, Sequence[Decision]]


@dataclass(frozen=True)
class Hooks:
    """Functions of a target, for what a table cannot say; by default nothing is changed, asked or timed.

    Attributes:
        prove: Asks the runtime which kernels execute each node of a model, given as path, bytes or `ModelProto`:
            ``prove(model, *, plan=None, custom_op_libraries=(), threads=1)``. None where it cannot be asked: nothing is
            proved or repaired then.
        time: How a model is timed on the runtime; None where it cannot be: nothing is timed then.
        why_unasked: Why the runtime cannot be asked here, where it cannot.
        conform: Holds a model, with the folder of its external data, against the patterns of the runtime's document;
            the target's name is for the report. None without such.
        probes: Nets that tell what kernels cost on the machine at hand; None where that cannot be measured.
        data_types: The data types for the machine at hand.
        reclass: The classes by node name with places made float where float is better, before the integer domain.
        reclass_integers: Likewise after it, seeing which nodes would run in integer.
        writes_float: Whether the integer kernel of an anchor of `Target.float_output` may write float at this place.
        refine: A finished plan with weights stored as the kernels of a machine like them best, but for those of the
            names given.
        spell: Writes nodes of a quantized model in the form that its integer kernels know, in place.
        barriers: The values that need a node between what makes them and their Q, so that the runtime leaves the former
            alone.
    """

    prove: Callable[..., FusionReport] | None = None
    time: TimedRuntime | None = None
    why_unasked: str = ""
    conform: Callable[[onnx.ModelProto, Path | None, str], PatternReport] | None = None
    probes: Callable[[], Iterable[Probe]] | None = None
    data_types: Callable[[DataTypes], DataTypes] = lambda types: types
    reclass: Callable[[GraphView, Mapping[str, NodeClass]], Mapping[str, NodeClass]] = lambda _, classes: classes
    reclass_integers: Callable[[GraphView, Mapping[str, NodeClass], Collection[str]], Mapping[str, NodeClass]] = (
        lambda _, classes, *__: classes
    )
    writes_float: Callable[[GraphView, ir.Node, PlacementOptions], bool] = lambda *_: True
    refine: Callable[[PlacementPlan, GraphView, Collection[str], CostTable], PlacementPlan] = lambda plan, *_: plan
    spell: Callable[[onnx.ModelProto, PlacementPlan], None] = lambda *_: None
    barriers: Callable[[Placed], tuple[str, ...]] = lambda _: ()


@dataclass(frozen=True)
class Target(Table):
    """A runtime: its table, whose attributes it has, and what it takes beside one.

    Attributes:
        static_shapes: It takes models without symbolic dimensions alone.
        float_forms: Names of the float-equivalent rewrites that suit it; None for all.
        kernel_forms: Names of the rewrites for integer kernels that suit it; None for all.
        min_opset: Least operator set of its files, for operators that suit it.
        own_forms: Its own rewrites of the same kind (`kenosis_ort.rewrite.rule.Rule`), performed behind those.
        formats: Formats that it reads, of ``qdq``, ``qop``, ``qcdq``, ``qop-clip``.
        operators_per_tensor: Of operators of integers it reads one weight scale alone, whatever the file says.
        precisions: What becomes of data types beyond 8 bits, a sentence each: ``int16-activations``,
            ``int16-weights``, ``int4-conv``, ``float8``.
        costs: What its kernels cost; None where that was not measured.
        profiles: Machines that costs are known of: the nearest to the one that a file is made for is taken.
        session_entries: Configuration entries with which the onnxruntime at hand computes as the target's runtime does.
        loads_in_ort: Stock onnxruntime loads and runs its files, so that they can be checked and compared with it.
        hooks: How its runtime is asked, and what is done beyond the table.
    """

    static_shapes: bool = False
    float_forms: tuple[str, ...] | None = None
    kernel_forms: tuple[str, ...] | None = None
    min_opset: int = 0
    own_forms: tuple[Any, ...] = ()
    formats: tuple[str, ...] = ("qdq",)
    operators_per_tensor: bool = False
    precisions: Mapping[str, str] = field(default_factory=dict)
    costs: CostTable | None = None
    profiles: tuple[HostProfile, ...] = ()
    session_entries: Mapping[str, str] = field(default_factory=dict)
    loads_in_ort: bool = True
    hooks: Hooks = Hooks()

    @property
    def unasked(self) -> str:
        """Why the runtime cannot be asked, in words for a report."""
        return self.hooks.why_unasked or f"target '{self.name}' has no runtime here"

    def data_types(self) -> DataTypes:
        """The data types for the machine at hand."""
        return self.hooks.data_types(self.types)
