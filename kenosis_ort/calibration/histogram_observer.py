"""The observer of the histogram methods: tensors leave the runtime one sample at a time and are binned at once."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from kenosis_ort.calibration.config import CalibrationConfig
from kenosis_ort.calibration.histogram import HistogramBuilder
from kenosis_ort.calibration.observers import as_array, non_finite
from kenosis_ort.calibration.segments import cut, estimate_bytes
from kenosis_ort.calibration.session import ObservedModel, run
from kenosis_ort.calibration.statistics import TensorStatistics

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Stage:
    """One part of the graph, ready to run."""

    session: ort.InferenceSession
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    last_use: frozenset[str]  # inputs that no later stage reads


class HistogramObserver:
    """Histograms of all elements of the observed tensors.

    Args:
        model: The model.
        proto: The model with its shape annotations.
        computed: Tensors that nodes compute, in graph order, with their numpy types.
        fed: Graph inputs to observe, with their numpy types.
        types: Element types of all values, 0 for what is no tensor.
        config: Settings.
        threads: Number of threads that bin; 0 for one a processor.
    """

    def __init__(
        self,
        model: ObservedModel,
        proto: onnx.ModelProto,
        computed: Mapping[str, str],
        fed: Mapping[str, str],
        types: Mapping[str, int],
        config: CalibrationConfig,
        threads: int,
    ) -> None:
        self._model = model
        self._proto = proto
        self._computed = list(computed)
        self._fed = list(fed)
        self._dtypes = {**computed, **fed}
        self._types = types
        self._budget = config.fetch_budget
        self._builders = {name: HistogramBuilder() for name in self._dtypes}
        self._threads = threads or _processors()
        self._stages: list[_Stage] = []
        self._planned_bytes = -1
        self.session = model.session(self._computed, keep_outputs=not self._computed)

    def observe(self, feed: dict[str, Any], sample: int) -> None:
        self._plan(feed, sample)
        bad = self._bin({name: as_array(feed[name]) for name in self._fed if name in feed})
        values: dict[str, Any] = dict(feed)
        for stage in self._stages:
            outputs = run(stage.session, stage.outputs, {n: values[n] for n in stage.inputs if n in values}, sample)
            results = dict(zip(stage.outputs, outputs, strict=True))
            del outputs
            bad += self._bin({name: array for name, array in results.items() if name in self._dtypes})
            if bad:
                raise non_finite(bad, sample)
            for name in stage.last_use:
                values.pop(name, None)
            if stage is not self._stages[-1]:
                values.update(results)
        if bad:
            raise non_finite(bad, sample)

    def _bin(self, arrays: dict[str, Any]) -> list[str]:
        """Bins arrays, several at a time; returns the names of those with NaN or infinity, in order."""
        names = sorted(arrays, key=lambda name: -arrays[name].size)
        if self._threads == 1 or len(names) < 2:
            fine = [self._builders[name].add(arrays[name]) for name in names]
        else:
            with ThreadPoolExecutor(self._threads) as pool:
                fine = list(pool.map(lambda name: self._builders[name].add(arrays[name]), names))
        broken = {name for name, good in zip(names, fine, strict=True) if not good}
        return [name for name in arrays if name in broken]

    def _plan(self, feed: Mapping[str, Any], sample: int) -> None:
        """Cuts the graph into stages for feeds of this size; again only when a larger one comes."""
        size = sum(getattr(as_array(value), "nbytes", 0) for value in feed.values() if not isinstance(value, list))
        if size <= self._planned_bytes:
            return
        self._planned_bytes = size
        sizes = estimate_bytes(self._proto, feed, set(self._computed))
        unsized = [name for name in self._computed if name not in sizes]
        if unsized:
            sizes.update(self._measure(unsized, feed, sample))
        if sum(sizes.values()) > self._budget:
            untyped = [n for node in self._proto.graph.node for n in node.output if n and n not in self._types]
            self._types = {**self._types, **self._model.ask_types(untyped)}
        parts = cut(self._proto, self._computed, sizes, self._types, self._budget)
        if len(parts) == 1:
            inputs = tuple(
                arg.name for arg in (*self.session.get_inputs(), *self.session.get_overridable_initializers())
            )
            outputs = tuple(arg.name for arg in self.session.get_outputs())
            self._stages = [_Stage(self.session, inputs, outputs, frozenset())]
            return
        _log.info("observed tensors of one sample exceed %d bytes: %d parts", self._budget, len(parts))
        self._stages = []
        for index, part in enumerate(parts):
            later = {name for rest in parts[index + 1 :] for name in rest.inputs}
            gone = frozenset(name for name in part.inputs if name not in later)
            self._stages.append(_Stage(self._model.segment(part), tuple(part.inputs), part.outputs, gone))

    def _measure(self, names: Sequence[str], feed: Mapping[str, Any], sample: int) -> dict[str, int]:
        """Returns the sizes in bytes of tensors, by a run that returns nothing else."""
        outputs = [f"kenosis_calibration_size/{index}" for index in range(len(names))]
        nodes = [helper.make_node("Size", [n], [o], name=o) for n, o in zip(names, outputs, strict=True)]
        counts = run(self._model.session(outputs, nodes), outputs, dict(feed), sample)
        return {
            name: int(count) * np.dtype(self._dtypes[name]).itemsize for name, count in zip(names, counts, strict=True)
        }

    def close_chunk(self) -> None:
        """Does nothing: histograms do not depend on chunks."""

    def statistics(self) -> dict[str, TensorStatistics]:
        out: dict[str, TensorStatistics] = {}
        for name, builder in self._builders.items():
            if builder.count:
                out[name] = TensorStatistics(
                    low=builder.low,
                    high=builder.high,
                    count=builder.count,
                    dtype=self._dtypes[name],
                    mean=builder.total / builder.count,
                    histogram=builder.finish(),
                )
            else:
                out[name] = TensorStatistics(0.0, 0.0, 0, self._dtypes[name], histogram=builder.finish())
        return out


def _processors() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
