"""The main graph of a model for changes in linear time: `onnx_ir` objects, written back to the protobuf they came from.

Nodes and values are those of `onnx_ir`: ``value.producer()``, ``node.inputs``, ``node.attributes``. What ONNX leaves
open is settled here once: which values bodies of control flow or the caller need, which constants callers may
override, which names are free, and that a constant goes with its last reader.

The content of constants stays in tensors of ONNX, wherever their bytes lie (`graph.outside`). Nothing reaches the
protobuf before `write`: protobuf frees nothing that is overwritten, so that a weight changed twice in place would be
held three times.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.graph.constants import drop_stale_value_info, replace_nodes
from kenosis_ort.graph.outside import copy_without_weights, put_outside
from kenosis_ort.graph.view import GraphView, holds_map, ir, optional
from kenosis_ort.graph.walk import reserve_name

Attribute = int | float | str | Sequence[int]
Attributes = Mapping[str, Attribute]
Inputs = Sequence[ir.Value | None]
Outputs = ir.Value | Sequence[ir.Value] | None


@dataclass(frozen=True)
class RewriteResult:
    """Result of a float rewrite.

    Attributes:
        notes: Sentences for the report.
        merged: For each node that is gone, the name of the node that now does its work ("" for none).
    """

    notes: tuple[str, ...] = ()
    merged: dict[str, str] = field(default_factory=dict)


class LiveGraph(GraphView):
    """Look-ups and edits of a main graph.

    Args:
        proto: The model, its nodes named, its types and shapes inferred. It changes when `write` is called.
        copied: The model stays as it is: `write` makes a copy, in which each constant is copied once, as it is then.

    Attributes:
        proto: The model; the copy behind `write`.
        nodes: Its nodes as they were when `begin` was called; those removed since are among them.
    """

    def __init__(self, proto: onnx.ModelProto, *, copied: bool = False) -> None:
        self._copied = copied
        super().__init__(proto)

    def reopen(self) -> None:
        """Reads the protobuf again, after something else than this object changed it."""
        super().reopen()
        self._stored_nodes: dict[ir.Node, onnx.NodeProto] = dict(zip(self.graph, self.proto.graph.node, strict=True))
        self._rewritten: set[ir.Node] = set()
        made = (output for body in self._owners for node in body for output in node.outputs)
        given = (value for body in self._owners for value in (*body.inputs, *body.initializers.values()))
        self._body_names = {value.name or "" for value in (*made, *given)}
        self._changed: set[str] = set()
        self._stale: set[str] = set()
        self._renamed: dict[str, ir.Value] = {}
        self._is_edited = False  # beyond what the sets above tell
        self.begin(self.keep_values)

    def read_types(self) -> None:
        """Takes the types and shapes that the protobuf declares, which is up to date; a view of it from then on."""
        infos = (*self.proto.graph.value_info, *self.proto.graph.output)
        declared = {info.name: info for info in infos if not holds_map(info.type)}
        for output in (output for node in self.graph for output in node.outputs):
            output.type = output.shape = None
            info = declared.get(output.name or "")
            if info is not None:
                ir.serde.deserialize_value_info_proto(info, output)
        self._by_name.clear()
        self._largest.clear()
        self.begin(())

    def begin(self, keep_values: Collection[str]) -> None:
        """Begins a row of edits: names that are in use now are not given to anything new before the next one."""
        self.keep_values = frozenset(keep_values)
        self.nodes = list(self.graph)
        graph = self.graph
        self._names = {value.name or "" for value in (*graph.inputs, *graph.outputs, *graph.initializers.values())}
        self._names |= {output.name or "" for node in self.nodes for output in node.outputs} | self._body_names
        self._node_names = {node.name or "" for node in self.nodes}
        self._own = frozenset(self.nodes)
        self._last_behind: dict[ir.Node, ir.Node] = {}
        self._stored: dict[str, None] = {}  # new constants of `store_array`, which come last
        self._released: dict[str, ir.Value] = {}

    def symbols(self, value: ir.Value | None) -> tuple[int | str | None, ...] | None:
        """The shape of a value with names for open dimensions, None for those that are not known at all."""
        if value is None or value.shape is None:
            return None
        return tuple(size if isinstance(size, int) else size.value or None for size in value.shape)

    def element_type(self, value: ir.Value | None) -> int | None:
        """The type of a value's elements, an ``onnx.TensorProto.DataType``; None if it is not known."""
        kind = None if value is None else value.type
        return int(kind.dtype) if type(kind) is ir.TensorType else None

    # -- edits --------------------------------------------------------------------------------------------------

    def fresh_name(self, base: str) -> str:
        """A value name that the model does not use yet, and reserves it."""
        return reserve_name(base, self._names)

    def add_constant(self, array: npt.ArrayLike, base: str) -> ir.Value:
        """Stores a new constant."""
        return self.register(onnx.numpy_helper.from_array(np.ascontiguousarray(array), self.fresh_name(base)))

    def store_array(self, node: ir.Node, position: int, array: npt.NDArray[np.generic], base: str) -> None:
        """Makes an array the node's constant input at ``position``.

        A constant that only this input reads is replaced, under its own name where its shape stays: tools that compare
        a quantized model with the float one pair weights by name. One that others read as well is left to them, and
        the node gets a private one named after ``base``, as does one of another shape.
        """
        tensor = onnx.numpy_helper.from_array(np.ascontiguousarray(array))
        old = optional(node, position)
        present = self.constant(old)
        pinned = old is not None and (old.is_graph_output() or self.is_captured(old))
        alone = present is not None and not pinned and self.readers(old) == [node]
        if old is not None and present is not None and alone and list(present.dims) == list(tensor.dims):
            self._replace(old, tensor)
            return
        tensor.name = self.fresh_name(base)
        self._stored[tensor.name] = None
        value = self.register(tensor)
        self.read(node, position, value)

    def replace_array(self, constant: ir.Value, array: npt.NDArray[np.generic]) -> None:
        """Gives a constant other content, of the same shape."""
        self._replace(constant, onnx.numpy_helper.from_array(np.ascontiguousarray(array)))

    def _replace(self, constant: ir.Value, tensor: onnx.TensorProto) -> None:
        tensor.name = constant.name or ""
        self._tensors[tensor.name] = put_outside(tensor)
        self._changed.add(tensor.name)
        self._largest.pop(constant, None)

    def register(self, tensor: onnx.TensorProto) -> ir.Value:
        """Stores a new constant under the tensor's name."""
        tensor = put_outside(tensor)
        content = ir.serde.deserialize_tensor(tensor)
        value = ir.Value(
            name=tensor.name, type=ir.TensorType(content.dtype), shape=ir.Shape(list(tensor.dims)), const_value=content
        )
        self.graph.register_initializer(value)
        self._tensors[tensor.name] = tensor
        self._changed.add(tensor.name)
        return value

    def add_initializer(self, tensor: onnx.TensorProto, instead_of: ir.Value) -> None:
        """Makes a tensor the constant that stands in the place of a removed node's output, under its name."""
        value = self.register(tensor)
        instead_of.replace_all_uses_with(value, replace_graph_outputs=True)

    def read(self, node: ir.Node, position: int, value: ir.Value | None) -> None:
        """Makes a node read another value, None for nothing, at a position."""
        if len(node.inputs) <= position:
            node.resize_inputs(position + 1)
        old = node.inputs[position]
        node.replace_input_with(position, value)
        self._release(old)
        self._is_edited = True

    def remove(self, node: ir.Node) -> None:
        """Removes a node; its outputs must have been taken over by another one, or be read no more."""
        for position in range(len(node.inputs)):
            self.read(node, position, None)
        self.graph.remove(node)
        self._is_edited = True

    def move_before(self, node: ir.Node, other: ir.Node) -> None:
        """Puts a node, whose output nothing in between reads, in front of another one behind it."""
        self.graph.remove(node)
        self.graph.insert_before(other, node)
        self._is_edited = True

    def redirect(self, old: ir.Value, new: ir.Value) -> None:
        """Makes every node of the main graph that reads ``old`` read ``new`` instead."""
        for node, position in old.uses():
            if node.graph is self.graph:
                node.replace_input_with(position, new)
        self._release(old)
        self._is_edited = True

    def hand_over(self, value: ir.Value, base: str = "") -> ir.Value:
        """The name, type and readers of a value as one that no node makes yet; the value itself gets a fresh name."""
        taken = ir.Value(name=value.name, type=value.type, shape=value.shape)
        value.replace_all_uses_with(taken, replace_graph_outputs=True)
        maker = value.producer()
        value.name = self.fresh_name(base or f"{'' if maker is None else maker.name}_output")
        value.type = value.shape = None
        return taken

    def take_over_output(self, node: ir.Node, output: ir.Value, *, position: int = 0) -> None:
        """Makes an output of ``node`` the value that a removed node made: under its name, for its readers."""
        own = node.outputs[position]
        output.replace_all_uses_with(own, replace_graph_outputs=True)
        own.name, own.type, own.shape = output.name, output.type, output.shape
        self._is_edited = True

    def rename_grown(self, value: ir.Value, base: str, *, axis: int, size: int) -> None:
        """Gives a value, which is not pinned, a fresh name and another size along an axis."""
        old, value.name = value.name, self.fresh_name(base)
        if value.shape is not None:
            value.shape = ir.Shape([size if at == axis else dim for at, dim in enumerate(value.shape)])
        self._renamed[old or ""] = value

    def forget_shape(self, value: ir.Value) -> None:
        """Has a value's shape inferred anew."""
        value.shape = None
        self._stale.add(value.name or "")

    def rewrite(
        self, node: ir.Node, operator: str, inputs: Inputs, attributes: Attributes | None = None, *, domain: str = ""
    ) -> None:
        """Makes a node another operator that reads ``inputs`` and writes the same value."""
        for position in range(len(node.inputs)):
            self.read(node, position, None)
        node.resize_inputs(len(inputs))
        for position, value in enumerate(inputs):
            node.replace_input_with(position, value)
        node.attributes.clear()
        for name, value_of in (attributes or {}).items():
            node.attributes.add(ir.convenience.convert_attribute(name, value_of))
        node.op_type, node.domain = operator, domain
        self.graph.opset_imports.setdefault(domain, 1)
        self._rewritten.add(node)

    def set_attribute(self, node: ir.Node, name: str, value: Attribute | None) -> None:
        """Gives a node an attribute, or takes it away; None for the latter."""
        if value is None:
            node.attributes.pop(name, None)
        else:
            node.attributes.add(ir.convenience.convert_attribute(name, value))
        self._rewritten.add(node)

    def insert_before(
        self,
        node: ir.Node,
        operator: str,
        inputs: Inputs,
        *,
        output: Outputs = None,
        base: str = "",
        **attributes: Attribute,
    ) -> ir.Value:
        """Puts a new node in front of a node, which does not read it yet; returns the value that it writes.

        Args:
            node: The node; of several new ones in front of it, the last is the nearest.
            operator: The operator, of the default domain.
            inputs: What it reads.
            output: What it writes, one value or several, see `hand_over`; a new value by default.
            base: Its name, where that is free; by default it is called after the node.
            attributes: Its attributes.
        """
        new = self._new(node, operator, inputs, output, attributes, base)
        self.graph.insert_before(node, new)
        return new.outputs[0]

    def insert_split(self, node: ir.Node, value: ir.Value, count: int) -> list[ir.Value]:
        """Puts a Split of a value's last dimension into equal parts in front of a node; returns the parts."""
        split = self.insert_before(node, "Split", [value], axis=-1, num_outputs=count).producer()
        assert split is not None
        split.resize_outputs(count)
        for output in split.outputs[1:]:
            output.name = self.fresh_name(f"{split.name}_output")
        return list(split.outputs)

    def append_behind(
        self,
        node: ir.Node,
        operator: str,
        inputs: Inputs,
        *,
        output: Outputs = None,
        base: str = "",
        nearest: bool = False,
        **attributes: Attribute,
    ) -> ir.Value:
        """Puts a new node behind a node and those already put there, or in front of these; see `insert_before`."""
        new = self._new(node, operator, inputs, output, attributes, base)
        last = self._last_behind.setdefault(node, node)
        self.graph.insert_after(node if nearest else last, new)
        if last is node or not nearest:
            self._last_behind[node] = new
        return new.outputs[0]

    def _new(
        self, node: ir.Node, operator: str, inputs: Inputs, output: Outputs, attributes: Attributes, base: str = ""
    ) -> ir.Node:
        """A new node, called after another one or by a name of its own."""
        written = [output] if isinstance(output, ir.Value) else list(output or ())
        written = written or [ir.Value(name=self.fresh_name(f"{node.name}_{operator}_output"))]
        name = reserve_name(base or f"{node.name}_{operator}", self._node_names)
        made = [ir.convenience.convert_attribute(key, value) for key, value in attributes.items()]
        self._is_edited = True
        return ir.Node("", operator, inputs, made, outputs=written, name=name)

    def _release(self, value: ir.Value | None) -> None:
        """Notes that a constant may have lost its last reader."""
        if value is not None and value.is_initializer():
            self._released[value.name or ""] = value

    # -- the protobuf -------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Ends a row of edits: constants that lost their last reader go, new ones stand in order."""
        stored = self.graph.initializers
        for name, value in self._released.items():
            if name in stored and not value.uses() and not value.is_graph_output() and not value.is_graph_input():
                del stored[name]
        for name in self._stored:
            if name in stored:
                stored[name] = stored.pop(name)
        self._released.clear()
        self._stored.clear()

    @property
    def has_edits(self) -> bool:
        """Whether something was edited that `write` has not brought to the protobuf yet."""
        return self._is_edited or bool(self._changed or self._rewritten or self._renamed or self._stale)

    def write(self) -> onnx.ModelProto:
        """Brings the protobuf up to date and returns it."""
        if not self.has_edits:
            return self.proto
        self.settle()
        if self._copied:
            self.proto = copy_without_weights(self.proto)
            self._stored_nodes = dict(zip(self._stored_nodes, self.proto.graph.node, strict=True))
            self._copied = False
        graph, stored = self.proto.graph, self.graph.initializers
        replace_nodes(graph, [self._as_proto(node) for node in self.graph])
        self._stored_nodes = dict(zip(self.graph, graph.node, strict=True))
        self._rewritten.clear()
        known = {tensor.name: at for at, tensor in enumerate(graph.initializer)}
        for name in stored:
            if name in self._changed or name not in known:
                tensor = graph.initializer[known[name]] if name in known else graph.initializer.add()
                tensor.CopyFrom(self._tensors.pop(name))  # what was replaced is let go one by one
        for name in sorted(known.keys() - stored.keys(), key=known.__getitem__, reverse=True):
            del graph.initializer[known[name]]
        present = {entry.domain for entry in self.proto.opset_import}
        for domain, version in self.graph.opset_imports.items():
            if domain and domain not in present:
                self.proto.opset_import.add(domain=domain, version=version)
        for info in graph.value_info if self._renamed else ():
            if info.name in self._renamed:
                info.CopyFrom(ir.to_proto(self._renamed[info.name]))
        if self._stale:
            drop_stale_value_info(self.proto, self._stale)
        self._tensors = {tensor.name: tensor for tensor in graph.initializer}
        self._changed.clear()
        self._stale.clear()
        self._renamed.clear()
        self._is_edited = False
        return self.proto

    def _as_proto(self, node: ir.Node) -> onnx.NodeProto:
        """A node as ONNX stores it; of one that was there, what nothing changed is as it was."""
        stored = self._stored_nodes.get(node)
        if stored is None:
            return ir.serde.serialize_node(node)
        for names, values in ((stored.input, node.inputs), (stored.output, node.outputs)):
            now = ["" if value is None else value.name or "" for value in values]
            if now != list(names):
                names[:] = now
        if node in self._rewritten:
            stored.op_type, stored.domain, stored.name = node.op_type, node.domain, node.name or ""
            del stored.attribute[:]
            stored.attribute.extend(map(ir.serde.serialize_attribute, node.attributes.values()))
        return stored
