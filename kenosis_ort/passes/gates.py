"""A float model in which each quantization of a quantized model can be switched on and off, run by run.

Every DequantizeLinear of the quantized model, with the QuantizeLinear in front of it, becomes an ``If`` on one entry
of an extra boolean input: either the quantized value, from the very scales, zero points and integers of the quantized
model, or the float one. So one session, loaded once, shows what any set of quantized tensors does to the outputs.
``If`` computes one side only and is two to three times faster than computing both and choosing with ``Where``.

The sensitivity of the outputs to one tensor is the error of quantizing it, all others float. Quantization noise from
different tensors adds up nearly independently, so that what a set of tensors costs is close to the sum of what its
members cost. Where only the worst are wanted, sets are halved as long as they matter: k bad tensors among n are found
in about ``2 k log2(n / k)`` runs instead of n. Source: single-tensor quantization as in HAWQ and in ONNX Runtime's
debugging guide; the halving is adaptive group testing (Dorfman 1943).
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort.accuracy.metric import OutputError
from kenosis_ort.errors import UnsupportedModelError
from kenosis_ort.graph.outside import array_in, copy_model
from kenosis_ort.graph.walk import all_names, attribute_float, reserve_name
from kenosis_ort.plan import EdgeRole, How, PlacementPlan
from kenosis_ort.runtime.session import HERE, Array, Closing, Executor

_Q, _DQ = "QuantizeLinear", "DequantizeLinear"
_BARRIERS = 4  # nodes between a float value and its Q that the float model does not have


class GateKind(str, Enum):
    """Kind of tensor that a gate quantizes."""

    ACTIVATION = "activation"
    WEIGHT = "weight"
    BIAS = "bias"
    CONSTANT = "constant"  # a constant operand of an elementwise operator


@dataclass(frozen=True)
class Gate:
    """One quantized tensor.

    Attributes:
        index: Position in the vector of gates.
        kind: What it is.
        value: Its name in the float model.
        consumers: Names of the nodes that read it quantized, in graph order; "" stands for the graph's outputs.
        group: Activations of one group have the same parameters, so that quantizing one of them again behind another
            changes nothing; weight and bias of a node are one group as well.
    """

    index: int
    kind: GateKind
    value: str
    consumers: tuple[str, ...]
    group: str


class GatedModel(Closing):
    """The gated model in a runtime session. Use it as a context manager, or call `close`.

    The session holds the weights twice, in float and as integers; those of models beyond 64 MB are mapped from a
    temporary file. Neither model is kept.

    Args:
        float_model: The model that was quantized: prepared, with the node names of the quantized one. Not changed.
        quantized: What was made of it. Not changed.
        custom_op_libraries: Libraries with custom operators to register.
        executor: Runs it.

    Raises:
        UnsupportedModelError: The two models do not belong together, or nothing is quantized.
        VerificationError: The runtime does not load the gated model.
    """

    def __init__(
        self,
        float_model: onnx.ModelProto,
        quantized: onnx.ModelProto,
        *,
        custom_op_libraries: Sequence[str] = (),
        executor: Executor = HERE,
    ) -> None:
        build = _Build(float_model, quantized)
        self.gates, self._input = tuple(build.gates), build.input
        self.output_names = tuple(v.name for v in float_model.graph.output)
        self._runner = executor.open(build.model, threads=1, custom_op_libraries=custom_op_libraries)

    def close(self) -> None:
        """Removes the temporary file, if there is one."""
        self._runner.close()

    def on_in(self, plan: PlacementPlan) -> frozenset[int]:
        """The gates that a plan quantizes, of those that there are.

        A value that some consumers read quantized and others in float counts as quantized.
        """
        activations = {value for value, _ in plan.quantized_values()}
        constants = {
            (d.edge.value, d.edge.consumer)
            for d in plan.decisions
            if d.role is not EdgeRole.OUTPUT and d.how in (How.OWN, How.SHARED, How.DERIVED)
        }
        return frozenset(
            gate.index
            for gate in self.gates
            if (
                gate.value in activations
                if gate.kind is GateKind.ACTIVATION
                else any((gate.value, consumer) in constants for consumer in gate.consumers)
            )
        )

    def outputs(
        self, feeds: Sequence[Mapping[str, Any]], sets: Iterable[Collection[int]]
    ) -> Iterator[list[dict[str, Array]]]:
        """Yields the graph's outputs by name for all feeds, for one set of gates after the other.

        Args:
            feeds: Values by input name.
            sets: Indices of the gates that quantize; the others hand on the float value.

        Raises:
            VerificationError: The runtime refuses a feed.
        """
        every = range(len(self.gates))
        fed = ({**feed, self._input: np.isin(every, [*on])} for on in sets for feed in feeds)
        results = self._runner.runs(fed, self.output_names)
        while chunk := list(itertools.islice(results, len(feeds))):
            yield chunk


class _Build:
    """Makes the gated model; node and value names of the quantized model stay.

    Attributes:
        model: The gated model.
        gates: Its gates.
        input: Name of the input that takes them, bool of shape (gates,).
    """

    def __init__(self, float_model: onnx.ModelProto, quantized: onnx.ModelProto) -> None:
        self._float_nodes = {node.name: node for node in float_model.graph.node}
        self._float_constants = {t.name: t for t in float_model.graph.initializer}
        self._float_values = {v.name for v in float_model.graph.input} | {
            name for node in float_model.graph.node for name in node.output
        }
        self.model = copy_model(quantized)
        graph = self.model.graph
        self._taken = all_names(self.model)
        self._constants = {t.name: t for t in graph.initializer}
        self._producers = {name: node for node in graph.node for name in node.output}
        self._readers: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
        for node in graph.node:
            for index, name in enumerate(node.input):
                self._readers.setdefault(name, []).append((node, index))
        self._outputs = {v.name for v in graph.output}
        self.input = reserve_name("kenosis_gates", self._taken)
        self.gates: list[Gate] = []
        self._switches: list[str] = []
        self._added: dict[str, str] = {}
        nodes = [made for node in list(graph.node) for made in self._replace(node)]
        if not self.gates:
            raise UnsupportedModelError(
                "the model holds no DequantizeLinear: nothing can be switched", fix="pass a model in the QDQ format"
            )
        self._finish(nodes)

    def _replace(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        if node.op_type == _Q and all(r.op_type == _DQ for r, _ in self._readers.get(node.output[0], ())):
            return  # it moves into the branches of its gates
        if node.op_type != _DQ or (not self._readers.get(node.output[0]) and node.output[0] not in self._outputs):
            yield node
            return
        quantizer = self._producers.get(node.input[0])
        if quantizer is None and node.input[0] in self._constants:
            yield self._gate_constant(node)
        elif quantizer is not None and quantizer.op_type == _Q:
            yield self._gate_activation(quantizer, node)
        else:
            yield node  # integers that the model computes itself

    def _gate_activation(self, quantizer: onnx.NodeProto, node: onnx.NodeProto) -> onnx.NodeProto:
        value = self._float_name(quantizer.input[0], node.output[0])
        return self._switch(GateKind.ACTIVATION, value, quantizer.input[1], node, [quantizer, node], quantizer.input[0])

    def _gate_constant(self, node: onnx.NodeProto) -> onnx.NodeProto:
        reader, index = self._readers[node.output[0]][0]
        twin = self._float_nodes.get(reader.name)
        value = str(twin.input[index]) if twin is not None and index < len(twin.input) else ""
        tensor = self._float_constants.get(value)
        if twin is None or tensor is None:
            raise UnsupportedModelError(
                f"the float model has no constant for input {index} of '{reader.name}'",
                where=f"node '{node.name}'",
                fix="give the very model that was quantized",
            )
        kind = GateKind.BIAS if self._constants[node.input[0]].data_type == TensorProto.INT32 else GateKind.WEIGHT
        if kind is GateKind.WEIGHT and reader.op_type in ("Add", "Mul", "Sub", "Div", "Concat", "Where"):
            kind = GateKind.CONSTANT
        before, after = (attribute_float(each, "beta", 1.0) for each in (twin, reader))  # a Gemm's factor on its bias
        base = self._float_constant(tensor, node, before / after if kind is GateKind.BIAS else 1.0)
        return self._switch(kind, value, self._group_of(reader, kind, node), node, [node], base)

    def _group_of(self, reader: onnx.NodeProto, kind: GateKind, node: onnx.NodeProto) -> str:
        """The weight's DQ output as group of a weight and of the biases that belong to it."""
        if kind is GateKind.BIAS and reader.op_type == "Add":  # the bias of the MatMul in front of it
            makers = [self._producers.get(name) for name in reader.input]
            reader = next((m for m in makers if m is not None and m.op_type == "MatMul"), reader)
        return str(reader.input[1] if kind is GateKind.BIAS and len(reader.input) > 1 else node.output[0])

    def _float_constant(self, tensor: onnx.TensorProto, node: onnx.NodeProto, factor: float) -> str:
        """Adds a float constant of the shape that it has in the quantized model; returns its name."""
        dims = list(self._constants[node.input[0]].dims)
        key = f"{tensor.name}\0{dims}\0{factor}"
        if key not in self._added:
            added = self.model.graph.initializer.add()
            if factor == 1.0:
                added.CopyFrom(tensor)
                del added.dims[:]
                added.dims.extend(dims)
            else:
                real = array_in(tensor).reshape(dims)
                added.CopyFrom(numpy_helper.from_array((real * factor).astype(real.dtype)))
            added.name = reserve_name(f"{tensor.name}_float", self._taken)
            self._added[key] = added.name
        return self._added[key]

    def _float_name(self, source: str, dequantized: str) -> str:
        """The float model's name of what a pair quantizes, looking through a barrier in front of it."""
        name = source
        for _ in range(_BARRIERS):
            for candidate in (dequantized, name):
                if candidate in self._float_values:
                    return candidate
            maker = self._producers.get(name)
            twin = self._float_nodes.get(maker.name) if maker is not None else None
            if maker is None or not maker.input:
                break
            if twin is not None:
                return list(map(str, twin.output))[list(maker.output).index(name)]
            name = str(maker.input[0])
        raise UnsupportedModelError(
            f"the float model has no value for '{dequantized}'", fix="give the very model that was quantized"
        )

    def _switch(
        self,
        kind: GateKind,
        value: str,
        group: str,
        node: onnx.NodeProto,
        body: Sequence[onnx.NodeProto],
        base: str,
    ) -> onnx.NodeProto:
        """The ``If`` that replaces a DQ; its gate is recorded."""
        result = node.output[0]
        index = len(self.gates)
        readers = dict.fromkeys(r.name for r, _ in self._readers.get(result, ()))
        consumers = (*readers, *([""] if result in self._outputs else []))
        self.gates.append(Gate(index, kind, value, consumers, group))
        elem_type = self._constants[node.input[1]].data_type if node.input[1] in self._constants else TensorProto.FLOAT
        branches = []
        for on in (True, False):
            out = reserve_name(f"{result}_{'on' if on else 'off'}", self._taken)
            inner = self._branch(body, base, out) if on else [helper.make_node("Identity", [base], [out])]
            info = helper.make_tensor_value_info(out, elem_type, None)
            branches.append(helper.make_graph(inner, out, [], [info]))
        switch = reserve_name(f"{self.input}_{index}", self._taken)
        self._switches.append(switch)
        name = reserve_name(f"{node.name}_gate", self._taken)
        return helper.make_node("If", [switch], [result], name=name, then_branch=branches[0], else_branch=branches[1])

    def _branch(self, body: Sequence[onnx.NodeProto], base: str, out: str) -> list[onnx.NodeProto]:
        nodes = []
        for number, node in enumerate(body):
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            if len(body) == 2:
                between = f"{out}_integers"
                copy.input[0] = base if number == 0 else between
                copy.output[0] = between if number == 0 else out
            else:
                copy.output[0] = out
            nodes.append(copy)
        return nodes

    def _finish(self, nodes: Sequence[onnx.NodeProto]) -> None:
        graph = self.model.graph
        count = len(self.gates)
        graph.input.append(helper.make_tensor_value_info(self.input, TensorProto.BOOL, [count]))
        name = reserve_name(f"{self.input}_split", self._taken)
        lengths = reserve_name(f"{self.input}_lengths", self._taken)
        split = helper.make_node("Split", [self.input, lengths], self._switches, name=name, axis=0)
        graph.initializer.append(numpy_helper.from_array(np.ones(count, np.int64), lengths))
        holder = onnx.GraphProto()
        holder.node.extend([split, *nodes])
        del graph.node[:]
        graph.node.MergeFrom(holder.node)
        del graph.value_info[:]


_SURELY = 4.0  # a set that is expected to cost this many times the limit is halved without a run
_MOST_TOGETHER = 10.0  # times the whole error; parts cost more where each of them drowns the output


Errors = Callable[[Sequence[frozenset[int]]], Sequence[float]]
"""Errors at the outputs with the gates of each set on, all others off."""


class TensorSensitivity(NamedTuple):
    """Error that quantizing one tensor causes.

    Attributes:
        value: Name in the float model; of activations with shared parameters, the first.
        kind: What it is; a weight stands for its bias as well.
        gates: Indices of its gates: one, or those of a group that is quantized together.
        consumers: Nodes that read it quantized.
        error: Output error with only this quantized; 0 for none.
        exact: Whether it was measured alone; otherwise it is its share of a set that hardly matters.
    """

    value: str
    kind: GateKind
    gates: frozenset[int]
    consumers: tuple[str, ...]
    error: float
    exact: bool = True


def errors_of(gated: GatedModel, feeds: Sequence[Mapping[str, Any]], error: OutputError) -> Errors:
    """The measure of sets of gates.

    Args:
        gated: The gated model.
        feeds: Calibration feeds; a handful is enough to rank.
        error: The error at the outputs.
    """
    (reference,) = gated.outputs(feeds, [()])
    return lambda sets: [float(error(outputs, reference)) for outputs in gated.outputs(feeds, sets)]


def tensor_sensitivity(
    gates: Sequence[Gate], errors: Errors, *, on: frozenset[int], cutoff: float
) -> tuple[TensorSensitivity, ...]:
    """Measures the worst tensors by halving sets.

    Args:
        gates: Of the gated model.
        errors: Measures sets of them.
        on: Gates to look at.
        cutoff: Sets that cost at most this share of the whole error are not taken apart.

    Returns:
        One entry per group of gates, the worst first.
    """
    units, known = _units(gates, on), dict[frozenset[int], float]()
    if not units:
        return ()
    known[on] = whole = errors([on])[0]
    floor = cutoff * whole
    found: dict[frozenset[int], TensorSensitivity] = {}
    parts = [(units, whole)]  # with the error that is expected of all of them together
    while parts:  # what a round asks for may be measured at the same time; sets that surely cost a lot are not
        asked = [_together(part) for part, expected in parts if len(part) == 1 or expected <= _SURELY * floor]
        asked = [gates for gates in asked if gates not in known]
        known |= zip(asked, errors(asked), strict=True)
        smaller = []
        if sum(known.get(_together(part), expected) for part, expected in parts) > _MOST_TOGETHER * whole:
            floor = math.inf  # errors that do not add up rank nothing
        for part, expected in parts:
            count, error = len(part), known.get(_together(part), expected)
            if count == 1 or error <= floor:
                found |= {unit.gates: unit._replace(error=error / count, exact=count == 1) for unit in part}
            else:
                halves = part[: count // 2], part[count // 2 :]
                smaller += [(half, error * len(half) / count) for half in halves]
        parts = smaller
    return tuple(sorted((found[unit.gates] for unit in units), key=lambda t: -t.error))


def _together(units: Sequence[TensorSensitivity]) -> frozenset[int]:
    return frozenset().union(*(unit.gates for unit in units))


def _units(gates: Sequence[Gate], on: frozenset[int]) -> list[TensorSensitivity]:
    """The groups of gates that are measured together, in graph order."""
    groups: dict[str, list[Gate]] = {}
    for gate in gates:
        if gate.index in on:
            groups.setdefault(gate.group, []).append(gate)
    units = []
    for members in groups.values():
        first = next((g for g in members if g.kind is not GateKind.BIAS), members[0])
        consumers = tuple(dict.fromkeys(name for g in members for name in g.consumers))
        units.append(TensorSensitivity(first.value, first.kind, frozenset(g.index for g in members), consumers, 0.0))
    return units
