"""Pairs of tensors: the float model's tensor for each quantized tensor of a QDQ model.

By name first: quantizers keep the names of values or add a suffix. Where an activation was absorbed (its node is gone
and Q clips instead), the tensor stands for what the activation wrote. Where a rewrite changed the net, a tensor
without a counterpart is left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import onnx

from kenosis_ort.accuracy.grids import GridReader, ValueGrid
from kenosis_ort.graph.qdq import DQ, Q

_ABSORBED = ("Relu", "Clip")
_SUFFIXES = ("_QuantizeLinear_Input", "_DequantizeLinear_Output", "_barrier")
_LOOKED_THROUGH = 4  # nodes between a float value and its Q that only the quantized model has


@dataclass(frozen=True)
class Pair:
    """One activation.

    Attributes:
        name: Its name in the float model.
        quantized: Name of the dequantized value in the quantized model.
        node: Name of the node that makes it there, "" for graph inputs.
        grid: What it can hold; None where scale or zero point are no constants, or there are several.
    """

    name: str
    quantized: str
    node: str
    grid: ValueGrid | None


@dataclass(frozen=True)
class WeightPair:
    """One constant.

    Attributes:
        name: Its name in the float model.
        node: The node that reads it.
        grid: What it holds.
    """

    name: str
    node: str
    grid: ValueGrid


class Pairing:
    """Matches two models.

    Args:
        float_model: The float model. Not changed.
        quantized: A QDQ model made of it, by whatever quantizer. Not changed.
    """

    def __init__(self, float_model: onnx.ModelProto, quantized: onnx.ModelProto) -> None:
        self._float_nodes = {node.name: node for node in float_model.graph.node if node.name}
        self.float_readers: dict[str, list[onnx.NodeProto]] = {}
        for node in float_model.graph.node:
            for name in node.input:
                self.float_readers.setdefault(name, []).append(node)
        self._float_outputs = {v.name for v in float_model.graph.output}
        self._float_values = {v.name for v in float_model.graph.input}
        self._float_values |= {name for node in float_model.graph.node for name in node.output if name}
        self.float_constants = {t.name: t for t in float_model.graph.initializer}
        self._grids = GridReader(quantized)
        self._producers = self._grids.producers
        self._readers: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
        for node in self._grids.nodes:
            for index, name in enumerate(node.input):
                self._readers.setdefault(name, []).append((node, index))
        self.quantized_count = 0

    def activations(self) -> Iterator[Pair]:
        """Yields the quantized activations that have a counterpart, each once, in the quantized model's order."""
        seen: set[str] = set()
        for node in self._grids.nodes:
            quantizer = self._quantizer(node) if node.op_type == DQ else None
            if quantizer is None:
                continue
            self.quantized_count += 1
            name = self._float_name(quantizer.input[0], node.output[0])
            if name is None or name in seen:
                continue
            seen.add(name)
            maker, grid = self._maker(quantizer.input[0]), self._grids.grid(quantizer)
            known = None if grid is None or grid.scale.size > 1 else grid
            yield Pair(name, node.output[0], maker.name if maker is not None else "", known)

    def weights(self) -> Iterator[WeightPair]:
        """Yields the quantized constants that have a counterpart."""
        seen: set[str] = set()
        for node in self._grids.nodes:
            if node.op_type != DQ or node.input[0] not in self._grids.constants:
                continue
            for reader, index in self._readers.get(node.output[0], ()):
                name, grid = self._float_constant(reader, index, node), self._grids.grid(node)
                if name is not None and grid is not None and name not in seen:
                    seen.add(name)
                    yield WeightPair(name, reader.name, grid)

    def before(self, pair: Pair) -> set[str]:
        """The dequantized values that a quantized value was computed from, the nearest on each way."""
        quantizer = self._quantizer(self._producers[pair.quantized])
        assert quantizer is not None  # `activations` found it
        found: set[str] = set()
        pending, seen = [str(quantizer.input[0])], set[str]()
        while pending:
            name = pending.pop()
            maker = self._producers.get(name)
            if maker is None or name in seen:
                continue
            seen.add(name)
            if maker.op_type == DQ:
                if maker.input[0] in self._producers:
                    found.add(name)
                continue
            pending += list(maker.input)
        return found

    def _quantizer(self, dequantizer: onnx.NodeProto) -> onnx.NodeProto | None:
        """The Q in front of a DQ, before the Clip of integers that is between them below 8 bits."""
        node = self._producers.get(dequantizer.input[0])
        if node is not None and node.op_type == "Clip":
            node = self._producers.get(node.input[0])
        return node if node is not None and node.op_type == Q else None

    def _maker(self, name: str) -> onnx.NodeProto | None:
        """The node that computes a value, looking through barriers and activations that are its own."""
        node = self._producers.get(name)
        for _ in range(_LOOKED_THROUGH):
            above = self._producers.get(node.input[0]) if node is not None and node.input else None
            own = node is not None and (node.op_type in _ABSORBED or node.name not in self._float_nodes)
            if not own or above is None or above.op_type == DQ:
                return node
            node = above
        return node

    def _float_name(self, source: str, dequantized: str) -> str | None:
        name = source
        for _ in range(_LOOKED_THROUGH):
            for candidate in (dequantized, name, *(name.removesuffix(s) for s in _SUFFIXES)):
                if candidate in self._float_values:
                    return self._behind_absorbed(candidate)
            node = self._producers.get(name)
            if node is None or len(node.input) != 1:
                return None
            name = str(node.input[0])
        return None

    def _behind_absorbed(self, name: str) -> str:
        """Output of the activation that reads the value in the float model and is gone in the other."""
        readers = self.float_readers.get(name, [])
        if len(readers) == 1 and readers[0].op_type in _ABSORBED and name not in self._float_outputs:
            written = str(readers[0].output[0])
            if written not in self._producers and f"{written}{_SUFFIXES[0]}" not in self._producers:
                return written
        return name

    def _float_constant(self, reader: onnx.NodeProto, index: int, node: onnx.NodeProto) -> str | None:
        twin = self._float_nodes.get(reader.name)
        candidates = [twin.input[index]] if twin is not None and index < len(twin.input) else []
        candidates += [node.input[0].removesuffix("_quantized"), node.output[0].removesuffix(_SUFFIXES[1])]
        return next((c for c in candidates if c in self.float_constants), None)
