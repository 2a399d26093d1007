"""The passes that change weights, between calibration and all else: their ranges follow from those collected before.

Ranges carried over to a model whose weights a pass has changed, without its data.

What the net computes stays, but for the channels that were scaled: their ranges follow from the ranges by channel that
calibration collected, exactly. Histograms do not follow; they are collected again, of the kept samples alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Final

import numpy as np
import onnx

from kenosis_ort.accuracy.channel_statistics import batch_norm_statistics
from kenosis_ort.accuracy.layers import with_biases
from kenosis_ort.calibration.cached_samples import feed_digest, model_fingerprint
from kenosis_ort.calibration.collector import collect
from kenosis_ort.calibration.observer import Rescaling
from kenosis_ort.calibration.statistics import TensorStatistics
from kenosis_ort.calibration.synthetic import SyntheticReader
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.flow.accuracy import NO_SAMPLES, context_of, divide
from kenosis_ort.flow.builder import Builder
from kenosis_ort.flow.call import Call, Divided
from kenosis_ort.flow.finish import check_rewritten
from kenosis_ort.flow.layouts import Layout, LayoutDraft
from kenosis_ort.flow.request import Request
from kenosis_ort.flow.samples import KeepingReader, feeds_wanted, rows_of
from kenosis_ort.graph.model_session import WHOLE_LIMIT
from kenosis_ort.graph.outside import array_in
from kenosis_ort.passes.contract import Build, Context, State, Statistics, WeightPass
from kenosis_ort.passes.evaluator import LEAST_FEEDS, Feed, some_of
from kenosis_ort.passes.registry import PASSES
from kenosis_ort.passes.runner import PassRunner
from kenosis_ort.quantizer.stock import CalibrationDataReader

Observe = Callable[[Sequence[str]], CalibrationTable]
"""Collects statistics of tensors of the changed model."""


class ValueOrigins:
    """Names of values of a rewritten model in the model that it was made from.

    A rewrite keeps the name of a value, or that of the node that computes it.

    Args:
        drafted: The model before, whose values passes speak of.
        rewritten: The model in forms for integers.
    """

    def __init__(self, drafted: onnx.ModelProto, rewritten: onnx.ModelProto) -> None:
        graph = drafted.graph
        outputs = {node.name: (node.op_type, node.output) for node in graph.node}
        self._known = {name for _, names in outputs.values() for name in names} | {v.name for v in graph.input}
        self._makers = {name: node for node in rewritten.graph.node for name in node.output}
        self._outputs = outputs
        self.constants = {tensor.name: tensor for tensor in rewritten.graph.initializer}

    def of(self, value: str) -> str | None:
        """The value's name in the model before; None where a rewrite made it."""
        if value in self._known:
            return value
        node = self._makers.get(value)
        op_type, names = self._outputs.get("" if node is None else node.name, ("", ()))
        at = list(node.output).index(value) if node is not None and node.op_type == op_type else len(names)
        return str(names[at]) if at < len(names) else None

    def way_to(self, value: str) -> Iterator[onnx.NodeProto | str]:
        """Yields the nodes that compute a value that a rewrite made, and the values from before where they begin."""
        waiting, seen = [value], {value}
        while waiting:
            name = waiting.pop()
            before = self.of(name)
            node = self._makers.get(name)
            if before is not None or node is None:
                yield name if before is None else before
                continue
            yield node
            more = [i for i in node.input if i and i not in seen and i not in self.constants]
            seen.update(more)
            waiting += more


@dataclass(frozen=True)
class Carrier:
    """A calibration table and the model that it is of.

    Attributes:
        table: The ranges of the weights as they came.
        drafted: The model that passes change.
        rewritten: The same in forms for integers, which the table is of.
        asked: Tensors that were observed; those of them that the table lacks are of a type that has no range.
    """

    table: CalibrationTable
    drafted: onnx.ModelProto
    rewritten: onnx.ModelProto
    asked: Collection[str]

    def to(
        self,
        changed: onnx.ModelProto,
        drafted: onnx.ModelProto,
        tensors: Collection[str],
        rescaled: Mapping[str, Rescaling] | None,
        observe: Observe,
        few: Observe | None,
    ) -> CalibrationTable:
        """The table of a model with changed weights; it has no part.

        Args:
            changed: In forms for integers.
            drafted: Before these.
            tensors: Whose ranges are needed.
            rescaled: What became of values, by their names in `drafted`; None where any may have changed.
            observe: Collects what does not follow, over the samples of the table that are kept.
            few: Collects histograms of what was scaled, over as many as they need; None where they are not needed.
        """
        origins, before = ValueOrigins(drafted, changed), ValueOrigins(self.drafted, self.rewritten)
        found: dict[str, TensorStatistics] = {}
        scaled: list[str] = []
        for name in tensors:
            if rescaled is None:
                break
            known, how = self.table.tensors.get(name), rescaled.get(origins.of(name) or "")
            if how is not None:
                source = self.table.tensors.get(how.source or name)
                follows = None if source is None else how.of(source)
                if follows is not None:
                    found[name] = follows
                    scaled.append(name)
            elif known is not None and (not rescaled or origins.of(name) or _stays(name, origins, before, rescaled)):
                found[name] = known
        missing = [n for n in tensors if n not in found and (n in self.table.tensors or n not in self.asked)]
        if missing:
            seen = observe(tuple(tensors))
            found |= {name: seen.tensors[name] for name in missing if name in seen.tensors}
        if scaled and few is not None:
            seen = seen if missing else few(tuple(scaled))
            found |= {n: replace(found[n], histogram=seen.tensors[n].histogram) for n in scaled if n in seen.tensors}
        tensors_found = {name: found[name] for name in tensors if name in found}
        return replace(self.table, tensors=tensors_found, model_fingerprint=model_fingerprint(changed), part=None)


def _stays(name: str, now: ValueOrigins, before: ValueOrigins, rescaled: Mapping[str, Rescaling]) -> bool:
    """Whether a value that a rewrite made is surely what it was: it reads the same values and constants."""
    old = list(before.way_to(name))
    new = list(now.way_to(name))
    if len(old) != len(new):
        return False
    for a, b in zip(old, new, strict=True):
        if isinstance(a, str) or isinstance(b, str):
            if a != b or b in rescaled:
                return False
        elif a.op_type != b.op_type or len(a.input) != len(b.input):
            return False
        else:
            for x, y in zip(a.input, b.input, strict=True):
                if (x in before.constants) != (y in now.constants):
                    return False
                if x in before.constants and not _same(before.constants[x], now.constants[y]):
                    return False
    return True


def _same(a: onnx.TensorProto, b: onnx.TensorProto) -> bool:
    return list(a.dims) == list(b.dims) and bool(np.array_equal(array_in(a), array_in(b)))


_ENOUGH: Final = 24
"""Samples for histograms of what a pass has scaled: what the fast recipe fits to where a reader has single samples."""
_ALL_OF_THEM: Final = tuple(kind() for kind in PASSES if issubclass(kind, WeightPass))


def channels_to_follow(drafted: LayoutDraft, layout: Layout, *, all_passes: bool) -> dict[str, int]:
    """The observed values whose channels a pass may scale, with the axis of their channels.

    Args:
        drafted: The model that passes change.
        layout: The same in forms for integers.
        all_passes: Those of every recipe, for a table that is kept; else those of the request's.
    """
    request = layout.builder.request
    if not _may_change(drafted, request):
        return {}
    passes = _ALL_OF_THEM if all_passes else [each for each in request.passes if isinstance(each, WeightPass)]
    model, nodes, axes = drafted.builder.prepared.proto, drafted.adjustable, dict[str, int]()
    for each in passes:
        axes = {**each.scaled(model, nodes=nodes, insert=request.inserts_smoothing), **axes}
    origins = ValueOrigins(model, layout.builder.prepared.proto)
    found = {name: axes.get(origins.of(name) or "") for name in layout.tensors}
    return {name: axis for name, axis in found.items() if axis is not None}


def with_weight_passes(
    call: Call,
    drafted: LayoutDraft,
    layout: Layout,
    table: CalibrationTable,
    reader: CalibrationDataReader | None,
    data: KeepingReader | None,
) -> tuple[Layout, CalibrationTable]:
    """Layout and ranges with weights changed for integers, where that is better on calibration samples.

    Args:
        call: What gathers on the way.
        drafted: The model that passes change.
        layout: The same in forms for integers.
        table: Its ranges.
        reader: Where samples come from; made-up ones say less about channels than BatchNormalizations do.
        data: The reader around it, with the kept samples.

    Raises:
        VerificationError: The prepared model does not compute what the original does.
    """
    request, prepared = call.request, drafted.builder.prepared
    if not _may_change(drafted, request):
        return layout, table
    feeds: list[Feed] = [] if data is None else [*data.some(feeds_wanted(request))]
    passes = [each for each in request.passes if each.before_calibration]
    if passes and not feeds:
        call.notes.append(f"Equalization and SmoothQuant were not tried: {NO_SAMPLES}")
    ranges = _Ranges(call, drafted, layout, table, feeds)
    state = State(prepared)
    if passes and feeds:

        def change() -> State:
            context = replace(ranges.context(), known=_known(call, reader))
            return PassRunner(context, call.attempt, call.passes).run(passes, state)

        with call.stage("equalize"):
            state = call.attempt("The change of weights", change, state)
    changed = state.prepared
    if request.recipe.bias_correction and sum(map(rows_of, feeds)) >= LEAST_FEEDS:

        def with_movable_biases() -> onnx.ModelProto:
            return with_biases(changed.proto, nodes=set(drafted.adjustable)).model

        model = call.attempt("Adding biases", with_movable_biases, changed.proto)
        changed = changed if model is changed.proto else replace(changed, proto=model)

    def with_ranges() -> tuple[Layout, CalibrationTable]:
        completed = layout if changed is prepared else drafted.complete(changed)
        with call.stage("equalize"):
            return completed, ranges.final(completed, replace(state, prepared=changed))

    if changed is not prepared or request.passes:
        layout, table = call.attempt("The change of weights", with_ranges, (layout, table))
    if feeds and request.verify and (layout.builder.prepared.notes or layout.builder.prepared is not changed):
        with call.stage("check"):
            check_rewritten(call, layout.builder.prepared.proto, _known_to_the_reference(call) or feeds[0])
    return layout, table


@dataclass(frozen=True)
class _Ranges:
    """Ranges of a model with whatever weights, from those of the weights as they came.

    Candidates get the ranges of the samples that passes are fitted to. Those of all samples would hold what is held
    out, and hide that channels made alike leave less room for data beyond the ranges seen.
    """

    call: Call
    drafted: LayoutDraft
    layout: Layout
    table: CalibrationTable
    feeds: Sequence[Feed]

    def context(self) -> Context:
        """The context of passes whose states have no build yet."""
        drafted, prepared = self.drafted, self.drafted.builder.prepared

        def on(model: onnx.ModelProto) -> Builder:
            return drafted.complete(replace(prepared, proto=model)).builder

        def build_of(state: State) -> Build:
            if state.prepared is prepared:
                return self.layout.builder.quantize(self.fitted)
            completed = drafted.complete(state.prepared)
            needs_histograms = self.table.method != "minmax" or not self.layout.builder.request.widths.are_bytes
            few = self._few(completed) if needs_histograms else None
            return completed.builder.quantize(self._transfer(self.fitted, completed, state, few))

        return replace(context_of(self.call, self._divided, on), build_of=build_of, nodes=frozenset(drafted.adjustable))

    def final(self, layout: Layout, state: State) -> CalibrationTable:
        """The ranges of a layout over all samples, and as its part those of the samples to fit to."""
        keeps = self.table.config.keeps_histogram
        few = self._few(layout) if keeps else None
        found = self._transfer(self.table, layout, state, few)
        wanted = layout.builder.request.chooses_ranges and keeps and not self.table.made_up and len(self.feeds) > 0
        if not wanted or not self._divided.held_out:
            return found
        return replace(found, part=self._transfer(self.fitted, layout, state, few))

    @cached_property
    def fitted(self) -> CalibrationTable:
        """Ranges of the weights as they came over the samples to fit to: those of the sweep, where it foresaw these."""
        fit, part = self._divided.fit, self.table.part
        if part is not None and part.data_fingerprint == f"{sum(map(feed_digest, fit)) % 2**256:064x}":
            return part
        return self._collected(self.layout, fit, self.layout.tensors)

    @cached_property
    def _divided(self) -> Divided:
        return divide(self.call, self.drafted.builder.prepared.proto, self.feeds)

    def _transfer(self, table: CalibrationTable, layout: Layout, state: State, few: Observe | None) -> CalibrationTable:
        base = self.drafted.builder.prepared.proto, self.layout.builder.prepared.proto, self.layout.tensors
        feeds = self.feeds if table is self.table else self._divided.fit
        return Carrier(table, *base).to(
            layout.builder.prepared.proto,
            state.prepared.proto,
            layout.tensors,
            state.rescaled if state.is_reported else None,
            partial(self._collected, layout, feeds),
            few,
        )

    def _few(self, layout: Layout) -> Observe:
        """Collector of histograms over a few of the samples to fit to, once for the same tensors."""
        return cache(lambda tensors: self._collected(layout, some_of(self._divided.fit, _ENOUGH), tensors))

    def _collected(self, layout: Layout, feeds: Sequence[Feed], tensors: Sequence[str]) -> CalibrationTable:
        return collect(
            layout.builder.prepared.proto,
            feeds,
            tensors=tensors,
            config=replace(self.table.config, strided=None, max_intermediate_outputs=None),
            custom_op_libraries=self.call.request.custom_op_libraries,
            seen_as=layout.builder.seen_as(),
            channels=channels_to_follow(self.drafted, self.layout, all_passes=False),
        )


def _known_to_the_reference(call: Call) -> Feed | None:
    """A sample whose outputs are at hand, and of one row where batches were taken apart; None without any."""
    return call.divided.held_out[0] if call.divided is not None and call.divided.held_out else None


def _known(call: Call, reader: CalibrationDataReader | None) -> Statistics:
    return batch_norm_statistics(call.loaded.proto) if isinstance(reader, SyntheticReader) else {}


def _may_change(drafted: LayoutDraft, request: Request) -> bool:
    """Whether passes can do anything for a model: it is ours to place, and can be run as a whole."""
    whole = len(drafted.builder.prepared.proto.graph.node) <= WHOLE_LIMIT
    return request.stock_reason is None and whole and bool(drafted.plan.integer_nodes())
