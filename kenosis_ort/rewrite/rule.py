"""A rewrite as data, and the editor through which it changes a model.

A rewrite leaves what the float model computes as it is. It is a `Rule`: the operators that it looks at, and a function
of one such node that matches a pattern around it, checks whether the pattern may go, and replaces it. Where it only
nearly matches, the function raises `NotCollapsibleError` with the reason, which the report tells. What all rules need
stands here once: which nodes the caller lets change, values that keep their meaning, constants that others read as
well, values that bodies of control flow capture, the notes, and the map of merged nodes.

A pattern is *closed* if nothing outside it needs what its inner nodes compute: no other node, no body of control
flow, no graph output, no value that the caller names. Only then may the inner nodes go. The last node of a
pattern stays in its place, under its name and with the name of its output, and becomes the new operator.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
import onnx.helper
import onnx.numpy_helper

from kenosis_ort.graph.constants import GraphIndex, replace_nodes
from kenosis_ort.graph.opset import RewriteResult
from kenosis_ort.graph.outside import array_in
from kenosis_ort.graph.walk import MAIN_DOMAINS, known_as, opset_of, reserve_name

FloatArray = npt.NDArray[np.float64]
Attribute = int | float | Sequence[int]
Attributes = Mapping[str, Attribute]

PADDED: Final = "_padded"
"""Stands behind the names of values and weights that a rewrite gives another shape."""

_SHOWN = 3
_PICTURE_RANK = 4
_FLOAT32 = onnx.TensorProto.FLOAT


class NotCollapsibleError(Exception):
    """Carries the reason why a near match stays as it is; never leaves a rule."""


class Picture(NamedTuple):
    """The shape of a value ``[N, C, H, W]``; None where it is not known before a run."""

    channels: int | None
    height: int | None
    width: int | None


class Rule:
    """A rewrite: ``(model, *, keep_values=(), nodes=None) -> RewriteResult``, in place.

    Args:
        change: Changes one node of the operators, or raises `NotCollapsibleError`; its name and docstring are the
            rule's, and the docstring holds the algebra.
        operators: Names of the operators, as `known_as` has them; none for a rule that looks for itself.
        did: What became of nodes, behind their number: "SiLU activations became QuickGelu".
        stays: The same of near matches: "SiLU activations stay as Sigmoid and Mul".
        least_opset: Operator set below which nothing is done.
        whole: ``change`` is a function of the editor alone, called once.
        backwards: The last node comes first.
    """

    __name__: str

    def __init__(
        self,
        change: Callable[..., None],
        operators: tuple[str, ...],
        did: str,
        stays: str,
        *,
        least_opset: int,
        whole: bool,
        backwards: bool,
    ) -> None:
        self.change = change
        self.operators = operators
        self.did, self.stays = did, stays
        self.least_opset = least_opset
        self.whole, self.backwards = whole, backwards
        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(self, name, getattr(change, name))

    def __call__(
        self, model: onnx.ModelProto, *, keep_values: Collection[str] = (), nodes: Collection[str] | None = None
    ) -> RewriteResult:
        """Applies the rule to a model, in place.

        Args:
            model: The model, its nodes named, its types and shapes inferred.
            keep_values: Values that must keep existing with their meaning.
            nodes: Names of the nodes that may change; None for all of them.
        """
        named = None if nodes is None else frozenset(nodes)
        found = (named is None or n.name in named for n in model.graph.node if _is_one_of(n, self.operators))
        if (self.operators and not any(found)) or (self.least_opset and opset_of(model) < self.least_opset):
            return RewriteResult()
        editor = Editor(model, keep_values, named)
        if self.whole:
            self.change(editor)
        else:
            candidates = editor.find(*self.operators)
            for node in reversed(candidates) if self.backwards else candidates:
                if editor.may_change(node) and not editor.is_gone(node):
                    try:
                        self.change(editor, node)
                    except NotCollapsibleError as reason:
                        editor.refuse(node, reason)
        return editor.finish(self.did, self.stays)


def rule(
    *operators: str, did: str, stays: str = "", least_opset: int = 0, whole: bool = False, backwards: bool = False
) -> Callable[[Callable[..., None]], Rule]:
    """Makes a `Rule` of the function below it."""
    return lambda change: Rule(change, operators, did, stays, least_opset=least_opset, whole=whole, backwards=backwards)


def _is_one_of(node: onnx.NodeProto, operators: Collection[str]) -> bool:
    return node.op_type in operators and (
        node.domain in MAIN_DOMAINS or known_as(node.domain, node.op_type) in operators
    )


class Editor(GraphIndex):
    """One rule's view of a model: the index of its nodes, types and shapes, edits, and the book of what was done.

    Args:
        model: The model to change, its nodes named, its types and shapes inferred.
        keep_values: Values that must keep existing with their meaning.
        named: Names of the nodes that may change; None for all of them.
    """

    def __init__(
        self, model: onnx.ModelProto, keep_values: Collection[str] = (), named: Collection[str] | None = None
    ) -> None:
        super().__init__(model, keep_values)
        self.merged: dict[str, str] = {}
        self.notes: list[str] = []
        self.done = 0
        self._named = named
        self._refused: dict[str, str] = {}
        self._open()

    def _open(self) -> None:
        graph = self.graph
        self._types = {v.name: v.type.tensor_type for v in (*graph.input, *graph.value_info, *graph.output)}
        self._taken = {node.name for node in self.nodes}
        self._own = {id(node) for node in self.nodes}  # which the index holds
        self._before: dict[str, list[onnx.NodeProto]] = {}
        self._behind: dict[str, list[onnx.NodeProto]] = {}

    def reopen(self) -> None:
        """Indexes the model again, after something else than the editor changed it."""
        self._refused.clear()
        self.__dict__.pop("opset", None)
        super().__init__(self.model, self.keep_values)
        self._open()

    # -- look-ups -----------------------------------------------------------------------------------------------

    @cached_property
    def opset(self) -> int:
        """The version of the main operator set."""
        return opset_of(self.model)

    def find(self, *operators: str) -> list[onnx.NodeProto]:
        """The main graph's nodes of these operators, in order."""
        return [node for node in self.nodes if _is_one_of(node, operators)]

    def may_change(self, node: onnx.NodeProto) -> bool:
        """Whether the caller lets the node change."""
        return self._named is None or node.name in self._named

    def is_gone(self, node: onnx.NodeProto) -> bool:
        """Whether the node went into another one."""
        return node.name in self.merged

    def producer(self, value: str, *operators: str) -> onnx.NodeProto | None:
        """The node that computes the value, if it is one of these operators."""
        node = self.producers.get(value)
        return node if node is not None and _is_one_of(node, operators) else None

    def readers_of(self, value: str, *operators: str) -> list[onnx.NodeProto]:
        """The nodes of these operators that read the value, each once."""
        found = {id(n): n for n in self.readers.get(value, ())}
        return [node for node in found.values() if _is_one_of(node, operators)]

    def array(self, value: str) -> npt.NDArray[np.generic] | None:
        """The content of a constant, None if the value is not constant."""
        tensor = self.constant(value)
        return None if tensor is None else array_in(tensor)

    def scalar(self, value: str) -> float | None:
        """The one finite number that a constant holds, whatever its rank; None if it is something else."""
        tensor = self.constant(value)
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
        if self.element_type(value) != _FLOAT32:
            raise NotCollapsibleError(f"'{value}' is not known to be float32")

    def require_private(self, value: str) -> None:
        """Raises where more than one node of the main graph needs the value."""
        if not self.is_private(value):
            raise NotCollapsibleError(f"'{value}' is needed elsewhere")

    def require_closed(
        self, inner: Collection[onnx.NodeProto], last: onnx.NodeProto, *, save: Collection[onnx.NodeProto] = ()
    ) -> None:
        """Raises where something outside the pattern, ``save`` some nodes, needs what an inner node computes."""
        members = {id(node) for node in (*inner, last, *save)}
        for node in inner:
            for value in node.output:
                outside = any(id(reader) not in members for reader in self.readers.get(value, ()))
                if value and (outside or self.is_pinned(value)):
                    raise NotCollapsibleError(f"'{value}' is needed elsewhere")

    def require_no_growth(self, value: str, constants: Collection[str]) -> None:
        """Raises where a constant operand may give the result more dimensions than ``value`` has."""
        most = max((len(self.constants[name].dims) for name in constants), default=0)
        rank = self.rank(value)
        if most and (rank is None or rank < most):
            raise NotCollapsibleError(f"a constant has more dimensions than '{value}' is known to have")

    def picture(self, value: str) -> Picture:
        """The shape of a float32 value of four dimensions.

        Raises:
            NotCollapsibleError: Its type or rank is another one, or not known.
        """
        self.require_float32(value)
        dims = self.dims(value)
        if dims is None:
            raise NotCollapsibleError(f"the rank of '{value}' is not known")
        if len(dims) != _PICTURE_RANK:
            raise NotCollapsibleError(f"'{value}' has {len(dims)} dimensions, not {_PICTURE_RANK}")
        if 0 in dims[1:]:
            raise NotCollapsibleError(f"'{value}' is empty")
        return Picture(*dims[1:])

    # -- edits --------------------------------------------------------------------------------------------------

    def become(
        self,
        node: onnx.NodeProto,
        operator: str,
        inputs: Sequence[str],
        attributes: Attributes | None = None,
        *,
        inner: Iterable[onnx.NodeProto] = (),
        domain: str = "",
    ) -> None:
        """Turns the last node of a pattern into ``operator``, in its place; ``inner`` goes. Counts as one change."""
        self.drop(inner, node.name)
        self.rewrite(node, operator, inputs, attributes, domain=domain)
        self.done += 1

    def drop(self, nodes: Iterable[onnx.NodeProto], survivor: str = "") -> None:
        """Takes nodes out whose work another node does now, "" for none."""
        for node in nodes:
            self.remove(node)
            self.merged[node.name] = survivor

    def rewrite(
        self,
        node: onnx.NodeProto,
        operator: str,
        inputs: Sequence[str],
        attributes: Attributes | None = None,
        *,
        domain: str = "",
    ) -> None:
        """Makes a node another operator that reads ``inputs`` and writes the same value."""
        for value in node.input:
            if value:
                self.release(node, value)
        del node.input[:]
        node.input.extend(inputs)
        for value in inputs:
            self.readers.setdefault(value, []).append(node)
        del node.attribute[:]
        node.attribute.extend(onnx.helper.make_attribute(name, value) for name, value in (attributes or {}).items())
        node.op_type, node.domain = operator, domain
        if domain and domain not in {entry.domain for entry in self.model.opset_import}:
            self.model.opset_import.add(domain=domain, version=1)

    def read(self, node: onnx.NodeProto, position: int, value: str) -> None:
        """Makes a node read another value in the place of one that it reads."""
        old, node.input[position] = node.input[position], value
        self.readers.setdefault(value, []).append(node)
        self.release(node, old)

    def add_constant(self, array: npt.ArrayLike, base: str) -> str:
        """Stores a new constant; returns its name."""
        name = self.fresh_name(base)
        self.graph.initializer.append(onnx.numpy_helper.from_array(np.ascontiguousarray(array), name))
        self.constants[name] = self.graph.initializer[-1]
        return name

    def store_array(self, node: onnx.NodeProto, position: int, array: npt.NDArray[np.generic], suffix: str) -> None:
        """Makes an array the node's constant input at ``position``, see `store_constant`.

        Args:
            node: The node.
            position: Of the input, which it may not have yet.
            array: The content.
            suffix: Stands behind the name of the present constant where the new one needs a name of its own.
        """
        base = node.input[position] if position < len(node.input) else ""
        self.store_constant(node, position, onnx.numpy_helper.from_array(np.ascontiguousarray(array)), base + suffix)

    def insert_before(
        self, node: onnx.NodeProto, operator: str, inputs: Sequence[str], *, output: str = "", **attributes: Attribute
    ) -> str:
        """Puts a new node in front of a node, which does not read it yet; returns the value that it writes.

        Args:
            node: The node; of several new ones in front of it, the last is the nearest.
            operator: The operator, of the default domain.
            inputs: What it reads.
            output: What it writes; a new value by default.
            attributes: Its attributes.
        """
        new = self._new(node, operator, inputs, output)
        new.attribute.extend(onnx.helper.make_attribute(name, number) for name, number in attributes.items())
        self._before.setdefault(node.name, []).append(new)
        return str(new.output[0])

    def insert_split(self, node: onnx.NodeProto, value: str, count: int) -> list[str]:
        """Puts a Split of a value's last dimension into equal parts in front of a node; returns the parts."""
        first = self.insert_before(node, "Split", [value], axis=-1, num_outputs=count)
        split = self.producers[first]
        for _ in range(count - 1):
            split.output.append(self.fresh_name(f"{split.name}_output"))
            self.producers[split.output[-1]] = split
        return list(split.output)

    def insert_behind(self, node: onnx.NodeProto, operator: str, *operands: str) -> None:
        """Gives the output of a node to a new node, which reads what the node computes now and the operands."""
        value, output = self.take_output(node)
        self.append_behind(node, operator, [value, *operands], output=output)

    def take_output(self, node: onnx.NodeProto) -> tuple[str, str]:
        """Makes a node write a new value; returns that and the one it wrote, which another node has to write now."""
        output, value = node.output[0], self.fresh_name(f"{node.name}_output")
        node.output[0] = value
        self.producers.pop(output)
        self.producers[value] = node
        return value, output

    def append_behind(self, node: onnx.NodeProto, operator: str, inputs: Sequence[str], *, output: str = "") -> str:
        """Puts a new node behind a node and those already put there; returns the value that it writes."""
        new = self._new(node, operator, inputs, output)
        self._behind.setdefault(node.name, []).append(new)
        return str(new.output[0])

    def _new(self, node: onnx.NodeProto, operator: str, inputs: Sequence[str], output: str) -> onnx.NodeProto:
        """A new node, known to the index and called after another one."""
        output = output or self.fresh_name(f"{node.name}_{operator}_output")
        name = reserve_name(f"{node.name}_{operator}", self._taken)
        new = onnx.helper.make_node(operator, inputs, [output], name=name)
        for value in inputs:
            self.readers.setdefault(value, []).append(new)
        self.producers[output] = new
        return new

    def drop_unread(self, values: Collection[str], survivor: str) -> None:
        """Removes the nodes of which nothing is read any more, from some values upwards.

        Args:
            values: Where to begin.
            survivor: The node that does their work now, "" for none.
        """
        waiting = list(values)
        while waiting:
            node = self.producers.get(waiting.pop())
            if node is None or node.name in self.merged or id(node) not in self._own:
                continue
            if any(self.readers.get(value) or self.is_pinned(value) for value in node.output if value):
                continue
            waiting += [name for name in node.input if name]
            self.drop([node], survivor)

    # -- the book -----------------------------------------------------------------------------------------------

    def refuse(self, node: onnx.NodeProto, reason: str | NotCollapsibleError) -> None:
        """Notes that a near match ending or beginning at ``node`` stays, and why."""
        self._refused.setdefault(node.name, str(reason))

    def finish(self, did: str, stays: str) -> RewriteResult:
        """Commits the edits and returns the result, see `Rule` for the two texts."""
        self.commit()
        if self._before or self._behind:
            ordered: list[onnx.NodeProto] = []
            for node in self.graph.node:
                ordered += [*self._before.get(node.name, ()), node, *self._behind.get(node.name, ())]
            replace_nodes(self.graph, ordered)
        notes = [*self.notes, *([f"{self.done} {did}."] if self.done else [])]
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
