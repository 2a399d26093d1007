"""Ranges carried over to a model whose weights a pass has changed, without its data.

What the net computes stays, but for the channels that were scaled: their ranges follow from the ranges by channel that
calibration collected, exactly. Histograms do not follow; they are collected again, of the kept samples alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx

from kenosis_ort.calibration.channels import Rescaling
from kenosis_ort.calibration.fingerprint import model_fingerprint
from kenosis_ort.calibration.statistics import TensorStatistics
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.graph.outside import array_in

Observe = Callable[[Sequence[str]], CalibrationTable]
"""Collects statistics of tensors of the changed model."""


class Kinship:
    """Which values of a model in forms for integers are which of the model that it was made from.

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
        """Returns the value's name in the model before; None where a rewrite made it."""
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
        """Returns the table of a model with changed weights; it has no part.

        Args:
            changed: In forms for integers.
            drafted: Before these.
            tensors: Whose ranges are needed.
            rescaled: What became of values, by their names in `drafted`; None where any may have changed.
            observe: Collects what does not follow, over the samples of the table that are kept.
            few: Collects histograms of what was scaled, over as many as they need; None where they are not needed.
        """
        kinship, before = Kinship(drafted, changed), Kinship(self.drafted, self.rewritten)
        found: dict[str, TensorStatistics] = {}
        scaled: list[str] = []
        for name in tensors:
            if rescaled is None:
                break
            known, how = self.table.tensors.get(name), rescaled.get(kinship.of(name) or "")
            if how is not None:
                source = self.table.tensors.get(how.source or name)
                follows = None if source is None else how.of(source)
                if follows is not None:
                    found[name] = follows
                    scaled.append(name)
            elif known is not None and (not rescaled or kinship.of(name) or _stays(name, kinship, before, rescaled)):
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


def _stays(name: str, now: Kinship, before: Kinship, rescaled: Mapping[str, Rescaling]) -> bool:
    """Tells whether a value that a rewrite made is surely what it was: it reads the same values and constants."""
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
