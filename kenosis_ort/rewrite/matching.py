"""Shared parts of rules that collapse several nodes into one: look-ups, the check that a pattern is closed, the edit.

A pattern is *closed* if nothing outside it needs what its inner nodes compute: no other node, no body of control
flow, no graph output, no value that the caller names. Only then may the inner nodes go. The last node of a
pattern stays in its place, under its name and with the name of its output, and becomes the new operator.

Edits that add nodes and constants beside those of `Matcher`: a node becomes another, new ones go around it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import onnx
import onnx.helper
import onnx.numpy_helper

from kenosis_ort.graph.constants import GraphIndex, replace_nodes
from kenosis_ort.graph.opset import RewriteResult
from kenosis_ort.graph.outside import array_in
from kenosis_ort.graph.walk import MAIN_DOMAINS, reserve_name

_SHOWN = 3
_FLOAT32 = onnx.TensorProto.FLOAT


class NotCollapsibleError(Exception):
    """Carries the reason why a near match stays as it is; never leaves ``rewrite``."""


class Matcher:
    """One rule's view of a model: the index of its nodes, types and shapes, and the book of what was done.

    Args:
        model: The model to change, its types and shapes inferred.
        keep_values: Values that must keep existing with their meaning.
    """

    def __init__(self, model: onnx.ModelProto, keep_values: Collection[str]) -> None:
        self.model = model
        self.index = GraphIndex(model, keep_values)
        self.merged: dict[str, str] = {}
        self.done = 0
        self._refused: dict[str, str] = {}
        graph = model.graph
        self._types = {v.name: v.type.tensor_type for v in (*graph.input, *graph.value_info, *graph.output)}

    # -- look-ups -----------------------------------------------------------------------------------------------

    def nodes(self, *op_types: str) -> list[onnx.NodeProto]:
        """The main graph's nodes of these operators of the default domain, in order."""
        return [n for n in self.index.nodes if n.op_type in op_types and n.domain in MAIN_DOMAINS]

    def is_gone(self, node: onnx.NodeProto) -> bool:
        """Whether the node went into another one."""
        return node.name in self.merged

    def producer(self, value: str, *op_types: str) -> onnx.NodeProto | None:
        """The node of the default domain that computes the value, if it is one of these operators."""
        node = self.index.producers.get(value)
        return node if node is not None and node.op_type in op_types and node.domain in MAIN_DOMAINS else None

    def readers(self, value: str, *op_types: str) -> list[onnx.NodeProto]:
        """The nodes of these operators of the default domain that read the value, each once."""
        found = {id(n): n for n in self.index.readers.get(value, ())}
        return [n for n in found.values() if n.op_type in op_types and n.domain in MAIN_DOMAINS]

    def array(self, value: str) -> npt.NDArray[np.generic] | None:
        """The content of a constant, None if the value is not constant."""
        tensor = self.index.constant(value)
        return None if tensor is None else array_in(tensor)

    def scalar(self, value: str) -> float | None:
        """The one finite number that a constant holds, whatever its rank; None if it is something else."""
        tensor = self.index.constant(value)
        if tensor is None or any(dim != 1 for dim in tensor.dims):
            return None
        number = float(array_in(tensor).reshape(-1)[0])
        return number if np.isfinite(number) else None

    def rank(self, value: str) -> int | None:
        """The rank of a value, None if it is not known."""
        shape = self.symbols(value)
        return None if shape is None else len(shape)

    def dims(self, value: str) -> tuple[int | None, ...] | None:
        """The shape of a value with None for dimensions that are not known, None without a rank."""
        shape = self.symbols(value)
        return None if shape is None else tuple(size if isinstance(size, int) else None for size in shape)

    def symbols(self, value: str) -> tuple[int | str | None, ...] | None:
        """The shape of a value with names for open dimensions, None for those that are not known at all."""
        tensor = self._types.get(value)
        if tensor is None or not tensor.HasField("shape"):
            return None
        return tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in tensor.shape.dim)

    def element_type(self, value: str) -> int | None:
        """The type of a value's elements, an ``onnx.TensorProto.DataType``; None if it is not known."""
        tensor = self._types.get(value)
        return tensor.elem_type if tensor is not None and tensor.elem_type else None

    # -- checks -------------------------------------------------------------------------------------------------

    def require_float32(self, value: str) -> None:
        """Raises where the value is not known to be float32, the type that the collapsed operators are fast in."""
        tensor = self._types.get(value)
        if tensor is None or tensor.elem_type != _FLOAT32:
            raise NotCollapsibleError(f"'{value}' is not known to be float32")

    def require_closed(
        self, inner: Collection[onnx.NodeProto], last: onnx.NodeProto, *, save: Collection[onnx.NodeProto] = ()
    ) -> None:
        """Raises where something outside the pattern, ``save`` some nodes, needs what an inner node computes."""
        members = {id(node) for node in (*inner, last, *save)}
        for node in inner:
            for value in node.output:
                outside = any(id(reader) not in members for reader in self.index.readers.get(value, ()))
                if value and (outside or self.index.is_pinned(value)):
                    raise NotCollapsibleError(f"'{value}' is needed elsewhere")

    def require_no_growth(self, value: str, constants: Collection[str]) -> None:
        """Raises where a constant operand may give the result more dimensions than ``value`` has."""
        most = max((len(self.index.constants[name].dims) for name in constants), default=0)
        rank = self.rank(value)
        if most and (rank is None or rank < most):
            raise NotCollapsibleError(f"a constant has more dimensions than '{value}' is known to have")

    # -- edits --------------------------------------------------------------------------------------------------

    def collapse(
        self,
        inner: Collection[onnx.NodeProto],
        last: onnx.NodeProto,
        op_type: str,
        inputs: Sequence[str],
        *,
        domain: str = "",
        attributes: Mapping[str, float | int] | None = None,
    ) -> None:
        """Takes the inner nodes out and makes the last one ``op_type``, reading ``inputs``; counts as one change."""
        for node in inner:
            self.index.remove(node)
            self.merged[node.name] = last.name
        self.rewrite(last, op_type, inputs, domain=domain, attributes=attributes)
        self.done += 1

    def rewrite(
        self,
        node: onnx.NodeProto,
        op_type: str,
        inputs: Sequence[str],
        *,
        domain: str = "",
        attributes: Mapping[str, float | int] | None = None,
    ) -> None:
        """Makes a node another operator that reads ``inputs`` and writes the same value."""
        for value in node.input:
            if value:
                self.index.release(node, value)
        del node.input[:]
        node.input.extend(inputs)
        for value in inputs:
            self.index.readers.setdefault(value, []).append(node)
        del node.attribute[:]
        node.attribute.extend(onnx.helper.make_attribute(name, v) for name, v in (attributes or {}).items())
        node.op_type, node.domain = op_type, domain
        if domain and domain not in {entry.domain for entry in self.model.opset_import}:
            self.model.opset_import.add(domain=domain, version=1)

    def refuse(self, node: onnx.NodeProto, reason: str | NotCollapsibleError) -> None:
        """Notes that a near match ending or beginning at ``node`` stays, and why."""
        self._refused.setdefault(node.name, str(reason))

    def finish(self, did: str, stays: str) -> RewriteResult:
        """Commits the edits and returns the result.

        Args:
            did: What one change is, for a count before it: "SiLU activations became QuickGelu".
            stays: What one near match is: "SiLU activations stay as Sigmoid and Mul".
        """
        self.index.commit()
        notes = [f"{self.done} {did}."] if self.done else []
        refused = {name: reason for name, reason in self._refused.items() if name not in self.merged}
        if refused:
            shown = "; ".join(f"'{name}': {reason}" for name, reason in list(refused.items())[:_SHOWN])
            notes.append(f"{len(refused)} {stays} ({shown}{'; ...' if len(refused) > _SHOWN else ''}).")
        return RewriteResult(notes=tuple(notes), merged={gone: self._survivor(by) for gone, by in self.merged.items()})

    def _survivor(self, name: str) -> str:
        """The node that does the work of a node that may have gone into yet another one."""
        while name in self.merged:
            name = self.merged[name]
        return name


def other_operand(node: onnx.NodeProto, value: str) -> str | None:
    """The operand of a two-operand node that is not ``value``, None unless exactly one of them is."""
    if len(node.input) != 2 or (node.input[0] == value) == (node.input[1] == value):
        return None
    return str(node.input[1] if node.input[0] == value else node.input[0])


Attribute = int | float | Sequence[int]


class Editor(Matcher):
    """One rule's view of a model to which it adds nodes.

    Args:
        model: The model to change, its nodes named, its types and shapes inferred.
        keep_values: Values that must keep existing with their meaning.
    """

    def __init__(self, model: onnx.ModelProto, keep_values: Collection[str]) -> None:
        super().__init__(model, keep_values)
        self._taken = {node.name for node in self.index.nodes}
        self._own = {id(node) for node in self.index.nodes}  # which the index holds
        self._before: dict[str, list[onnx.NodeProto]] = {}
        self._behind: dict[str, list[onnx.NodeProto]] = {}

    def add_constant(self, array: npt.NDArray[np.generic], base: str) -> str:
        """Stores a new constant; returns its name."""
        name = self.index.fresh_name(base)
        self.index.graph.initializer.append(onnx.numpy_helper.from_array(np.ascontiguousarray(array), name))
        self.index.constants[name] = self.index.graph.initializer[-1]
        return name

    def become(
        self,
        node: onnx.NodeProto,
        op_type: str,
        inputs: Sequence[str],
        attributes: Mapping[str, Attribute] | None = None,
        *,
        inner: Collection[onnx.NodeProto] = (),
    ) -> None:
        """Turns a node into another operator in its place, under its name and with its output; ``inner`` goes."""
        self.collapse(inner, node, op_type, inputs)
        node.attribute.extend(onnx.helper.make_attribute(name, value) for name, value in (attributes or {}).items())

    def insert_before(
        self, node: onnx.NodeProto, op_type: str, inputs: Sequence[str], *, output: str = "", **attributes: Attribute
    ) -> str:
        """Puts a new node in front of a node, which does not read it yet; returns the value that it writes.

        Args:
            node: The node; of several new ones in front of it, the last is the nearest.
            op_type: The operator, of the default domain.
            inputs: What it reads.
            output: What it writes; a new value by default.
            attributes: Its attributes.
        """
        new = self._new(node, op_type, inputs, output or self.index.fresh_name(f"{node.name}_{op_type}_output"))
        new.attribute.extend(onnx.helper.make_attribute(name, number) for name, number in attributes.items())
        self._before.setdefault(node.name, []).append(new)
        return str(new.output[0])

    def insert_split(self, node: onnx.NodeProto, value: str, count: int) -> list[str]:
        """Puts a Split of a value's last dimension into equal parts in front of a node; returns the parts."""
        first = self.insert_before(node, "Split", [value], axis=-1, num_outputs=count)
        split = self.index.producers[first]
        for _ in range(count - 1):
            split.output.append(self.index.fresh_name(f"{split.name}_output"))
            self.index.producers[split.output[-1]] = split
        return list(split.output)

    def insert_behind(self, node: onnx.NodeProto, op_type: str, operand: str) -> None:
        """Gives the output of a node to a new node of two operands, which reads what the node computes now."""
        output = node.output[0]
        value = self.index.fresh_name(f"{node.name}_output")
        new = onnx.helper.make_node(op_type, [value, operand], [output], name=self.node_name(f"{node.name}_{op_type}"))
        node.output[0] = value
        self.index.producers[value] = node
        self.index.producers[output] = new
        self.index.readers[value] = [new]
        self.index.readers.setdefault(operand, []).append(new)
        self._behind.setdefault(node.name, []).append(new)

    def take_output(self, node: onnx.NodeProto) -> tuple[str, str]:
        """Makes a node write a new value; returns that and the one it wrote, which another node has to write now."""
        output, value = node.output[0], self.index.fresh_name(f"{node.name}_output")
        node.output[0] = value
        self.index.producers.pop(output)
        self.index.producers[value] = node
        return value, output

    def append_behind(self, node: onnx.NodeProto, op_type: str, inputs: Sequence[str], *, output: str = "") -> str:
        """Puts a new node behind a node and those already put there; returns the value that it writes."""
        new = self._new(node, op_type, inputs, output or self.index.fresh_name(f"{node.name}_{op_type}_output"))
        self._behind.setdefault(node.name, []).append(new)
        return str(new.output[0])

    def _new(self, node: onnx.NodeProto, op_type: str, inputs: Sequence[str], output: str) -> onnx.NodeProto:
        """A new node, known to the index and called after another one."""
        new = onnx.helper.make_node(op_type, inputs, [output], name=self.node_name(f"{node.name}_{op_type}"))
        for name in inputs:
            self.index.readers.setdefault(name, []).append(new)
        self.index.producers[output] = new
        return new

    def drop_unread(self, values: Collection[str], survivor: onnx.NodeProto) -> None:
        """Removes the nodes of which nothing is read any more, from some values upwards.

        Args:
            values: Where to begin.
            survivor: The node that does their work now.
        """
        waiting = list(values)
        while waiting:
            node = self.index.producers.get(waiting.pop())
            if node is None or node.name in self.merged or id(node) not in self._own:
                continue
            if any(self.index.readers.get(value) or self.index.is_pinned(value) for value in node.output if value):
                continue
            waiting += [name for name in node.input if name]
            self.index.remove(node)
            self.merged[node.name] = survivor.name

    def node_name(self, base: str) -> str:
        """A node name that the model does not use yet, and reserves it."""
        return reserve_name(base, self._taken)

    def finish(self, did: str, stays: str) -> RewriteResult:
        """Commits the edits and returns the result, see `Matcher.finish`."""
        result = super().finish(did, stays)
        if self._before or self._behind:
            ordered: list[onnx.NodeProto] = []
            for node in self.model.graph.node:
                ordered += [*self._before.get(node.name, ()), node, *self._behind.get(node.name, ())]
            replace_nodes(self.model.graph, ordered)
        return result
