"""Activation ranges: from a table, from samples, or from made-up samples with the trust in them.

Ranges are carried over to a model whose weights a pass has changed, without its data: what the net computes stays, but
for the channels that were scaled, and their ranges follow from the ranges by channel that calibration collected,
exactly. Histograms do not follow; they are collected again, of the kept samples alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, Final

import onnx

from kenosis_ort.calibration.collector import Points, collect
from kenosis_ort.calibration.feeds import Part
from kenosis_ort.calibration.net_evidence import net_evidence, probe_feeds
from kenosis_ort.calibration.statistics import Rescaling, TensorStatistics
from kenosis_ort.calibration.synthetic import SyntheticReader
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.calibration.trust import CalibrationTrust, collect_with_trust
from kenosis_ort.errors import CalibrationError, warn_caller
from kenosis_ort.flow.builder import Builder
from kenosis_ort.flow.call import Call
from kenosis_ort.flow.request import calibration_config
from kenosis_ort.graph.outside import array_in
from kenosis_ort.passes.contract import WeightPass
from kenosis_ort.passes.recipe import PASSES
from kenosis_ort.quantizer.stock import CalibrationDataReader
from kenosis_ort.report.sections import TensorTrust, TrustSummary
from kenosis_ort.runtime.session import WHOLE_LIMIT


def calibrate(
    builder: Builder,
    reader: CalibrationDataReader | None,
    *,
    part: Part = MappingProxyType({}),
    channels: Mapping[str, int] = MappingProxyType({}),
    keep: int = 0,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> CalibrationTable:
    """The table of the samples; ``part`` and ``defaults`` as in `collect_on`, the others as in `Points`."""
    if reader is None:
        raise CalibrationError(
            "neither calibration_data_reader nor an existing calibration_cache_path was given",
            fix="pass a reader (ArrayReader, ImageFolderReader, SyntheticReader or your own), or recipe='data-free'",
        )
    run, executor, points = collect, builder.request.executor, _points(builder, channels, keep)
    if executor is not None and points.config.depends_on_order:
        warn_caller("A moving average depends on the order of the samples: it is calibrated here, not on the executor.")
    elif executor is not None:
        from kenosis_ort.cluster.sweep import collect_on  # loads asyncio

        run = partial(collect_on, executor, defaults=defaults)
    return run(builder.prepared.proto, reader, points, part=part, progress=builder.request.progress)


def _points(builder: Builder, channels: Mapping[str, int], keep: int = 0) -> Points:
    request, providers = builder.request, builder.request.calibration_providers or ()
    more: Mapping[str, Any] = {"providers": providers, "channels": channels, "keep": keep}
    return builder.points(builder.tensors, calibration_config(request), **more)


Observe = Callable[[Sequence[str]], CalibrationTable]
"""Collects statistics of tensors of the changed model."""


@dataclass(frozen=True)
class RewrittenNet:
    """A model whose weights passes change, with the same in forms for integers.

    Attributes:
        drafted: The model whose values passes speak of.
        model: It in forms for integers.
        tensors: The values of that whose ranges are needed.
    """

    drafted: onnx.ModelProto
    model: onnx.ModelProto
    tensors: Collection[str]

    @classmethod
    def of(cls, drafted: Builder, builder: Builder) -> RewrittenNet:
        """The net of a draft and of what became of it."""
        return cls(drafted.prepared.proto, builder.prepared.proto, builder.tensors)

    @cached_property
    def origins(self) -> dict[str, str]:
        """Names in the model before by value: a rewrite keeps a value's name, or that of the node that computes it."""
        before = {node.name: node for node in self.drafted.graph.node}
        known = [*(v.name for v in self.drafted.graph.input), *(name for n in before.values() for name in n.output)]
        found = dict(zip(known, known, strict=True))
        for node in self.model.graph.node:
            old = before.get(node.name)
            if old is not None and old.op_type == node.op_type:
                for new, name in zip(node.output, old.output, strict=False):
                    found.setdefault(new, name)
        return found

    def way_to(self, value: str) -> list[Any]:
        """What makes a value that a rewrite made: operators with their constants, and values from before."""
        makers = {name: node for node in self.model.graph.node for name in node.output}
        constants = {tensor.name: tensor for tensor in self.model.graph.initializer}
        waiting, seen, found = [value], {value}, list[Any]()
        while waiting:
            name = waiting.pop()
            node = makers.get(name)
            if name in self.origins or node is None:
                found.append(self.origins.get(name, name))
                continue
            known = (constants.get(name) for name in node.input)
            read = [None if t is None else (tuple(t.dims), hash(array_in(t).tobytes())) for t in known]
            found.append((node.op_type, read))
            more = [i for i in node.input if i and i not in seen and i not in constants]
            seen.update(more)
            waiting += more
        return found


def following_table(
    table: CalibrationTable,
    old: RewrittenNet,
    new: RewrittenNet,
    rescaled: Mapping[str, Rescaling] | None,
    observe: Observe,
    few: Observe | None,
) -> CalibrationTable:
    """The table of a net with changed weights; it has no part and no fingerprint.

    Args:
        table: The ranges of the weights as they came; tensors of the old net that it lacks have a type without a range.
        old: The net that the table is of.
        new: The same with changed weights.
        rescaled: What became of values, by their names where passes change it; None where any may have changed.
        observe: Collects what does not follow, over the samples of the table that are kept.
        few: Collects histograms of what was scaled, over as many as they need; None where they are not needed.
    """
    found: dict[str, TensorStatistics] = {}
    scaled: list[str] = []
    for name in new.tensors:
        if rescaled is None:
            break
        known, how = table.tensors.get(name), rescaled.get(new.origins.get(name, ""))
        if how is not None:
            source = table.tensors.get(how.source or name)
            follows = None if source is None else how.of(source)
            if follows is not None:
                found[name] = follows
                scaled.append(name)
        elif known is not None and (not rescaled or name in new.origins or _stays(name, old, new, rescaled)):
            found[name] = known
    missing = [n for n in new.tensors if n not in found and (n in table.tensors or n not in old.tensors)]
    if missing:
        seen = observe(tuple(new.tensors))
        found |= {name: seen.tensors[name] for name in missing if name in seen.tensors}
    if scaled and few is not None:
        seen = seen if missing else few(tuple(scaled))
        found |= {n: replace(found[n], histogram=seen.tensors[n].histogram) for n in scaled if n in seen.tensors}
    tensors = {name: found[name] for name in new.tensors if name in found}
    return replace(table, tensors=tensors, model_fingerprint=None, part=None)


def _stays(name: str, old: RewrittenNet, new: RewrittenNet, rescaled: Mapping[str, Rescaling]) -> bool:
    """Whether a value that a rewrite made is surely what it was: it reads the same values and constants."""
    before = old.way_to(name)
    return before == new.way_to(name) and not any(isinstance(part, str) and part in rescaled for part in before)


_ALL_OF_THEM: Final = tuple(kind() for kind in PASSES if issubclass(kind, WeightPass))


def channels_to_follow(drafted: Builder, builder: Builder, *, all_passes: bool) -> dict[str, int]:
    """The observed values whose channels a pass may scale, with the axis of their channels.

    Args:
        drafted: The net whose weights passes change.
        builder: The same in forms for integers.
        all_passes: Those of every recipe, for a table that is kept; else those of the request's.
    """
    request = builder.request
    if not may_change(drafted):
        return {}
    passes = _ALL_OF_THEM if all_passes else [each for each in request.passes if isinstance(each, WeightPass)]
    nodes, axes = drafted.adjustable, dict[str, int]()
    for each in passes:
        axes = {**each.scaled(drafted.prepared.graph, nodes=nodes, insert=request.inserts_smoothing), **axes}
    origins = RewrittenNet.of(drafted, builder).origins
    return {name: axes[origin] for name in builder.tensors if (origin := origins.get(name)) in axes}


def may_change(drafted: Builder) -> bool:
    """Whether passes can do anything for a net: it is ours to place, and can be run as a whole."""
    whole = len(drafted.prepared.proto.graph.node) <= WHOLE_LIMIT
    return drafted.request.stock_reason is None and whole and bool(drafted.plan.integer_nodes())


_UNSTABLE = 0.3  # spread of a range over seeds beyond which the report says so


def trust_summary(trust: CalibrationTrust) -> TrustSummary:
    """The trust as the report shows it, the least stable tensors first."""
    tensors, changes = sorted(trust.tensors.items(), key=lambda t: -t[1].spread), "its range changes with the seed"
    return TrustSummary(
        verdict=trust.verdict.value,
        reason="; ".join(trust.causes) or "every range is bounded by the net or the same for every seed",
        source="mixed" if trust.real_samples else "synthetic",
        advice="; ".join(trust.supply),
        tensors=tuple(
            TensorTrust(name, t.source.value, 1.0 - min(t.spread, 1.0), changes if t.spread > _UNSTABLE else "")
            for name, t in tensors
        ),
    )


def find_ranges(call: Call, drafted: Builder, builder: Builder) -> CalibrationTable:
    """The ranges of the weights as they came: from the table where there is one, else they go there.

    Args:
        call: What gathers on the way, samples and table among it; its samples are read.
        drafted: The net whose weights passes may change.
        builder: The same in forms for integers, whose ranges are needed.

    Raises:
        CalibrationError: There are neither samples nor a table, or they do not fit.
    """
    cache, data, cached = call.cache, call.data, None
    if cache is not None:
        config = calibration_config(builder.request)
        cached = cache.table_for(builder.prepared.proto, builder.tensors, config, data)
    if cached is not None:
        made_up = "The ranges are of made-up samples; the run that wrote the cache reported how far to trust them."
        call.notes += [made_up] if cached.made_up else []
        return cached
    table = _collected(call, drafted, builder)
    if cache is None:
        return table
    if cache.table is not None:
        cache.check_data(table.data_fingerprint)
        call.notes.append(
            "Calibrated again: the calibration cache is of an earlier version, which had changed the weights before."
        )
        return table
    replace(table, cached=None if data is None else data.cached).save(cache.path)
    if data is not None and len(data.cached):
        call.notes.append(
            f"The calibration cache holds {len(data.cached)} of the samples ({data.cached.bytes / 2**20:.1f} MB), so "
            "that it can take the reader's place. kenosis_ort.calibrate with keep_samples=False writes one without."
        )
    return table


def _collected(call: Call, drafted: Builder, builder: Builder) -> CalibrationTable:
    """The ranges; for made-up samples wider ones than seen where that is called for, with the trust in them."""
    config, data = calibration_config(builder.request), call.data
    reader = None if data is None else data.reader
    plain = builder.request.stock_reason is not None or config.is_chunked or config.strided
    channels = {} if plain else channels_to_follow(drafted, builder, all_passes=call.cache is not None)
    if plain or data is None or not isinstance(reader, SyntheticReader):
        part = {} if plain else call.part_to_fit(builder.prepared.proto)
        return calibrate(builder, data, part=part, channels=channels)
    libraries = builder.request.custom_op_libraries
    table, trust = collect_with_trust(
        builder.prepared.proto,
        data,
        _points(builder, channels),
        provenance=reader.provenance,
        samples=len(reader),
        evidence=net_evidence(call.loaded.proto, probe_feeds(reader), custom_op_libraries=libraries),
        progress=builder.request.progress,
    )
    call.trust = trust_summary(trust)
    return replace(table, made_up=call.trust.source == "synthetic")
