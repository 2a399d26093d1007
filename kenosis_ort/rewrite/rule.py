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

from collections.abc import Callable, Collection, Iterable
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.graph.constants import HasOperator
from kenosis_ort.graph.live import Attributes, Inputs, LiveGraph, RewriteResult
from kenosis_ort.graph.view import ir, optional
from kenosis_ort.graph.walk import MAIN_DOMAINS, known_as, opset_of

FloatArray = npt.NDArray[np.float64]

PADDED: Final = "_padded"
"""Stands behind the names of values and weights that a rewrite gives another shape."""

_SHOWN = 3
_PICTURE_RANK = 4
_FLOAT32 = onnx.TensorProto.FLOAT
T = TypeVar("T")


class NotCollapsibleError(Exception):
    """Carries the reason why a near match stays as it is; never leaves a rule."""


def refuse_if(condition: object, reason: str) -> None:
    """Raises where something keeps a near match from collapsing.

    Raises:
        NotCollapsibleError: The condition is true; with the reason.
    """
    if condition:
        raise NotCollapsibleError(reason)


def known(value: T | None, reason: str) -> T:
    """A value that a pattern cannot do without.

    Raises:
        NotCollapsibleError: It is None; with the reason.
    """
    if value is None:
        raise NotCollapsibleError(reason)
    return value


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
        writes: The operator that it writes, without leave to quantize which it has to stay away; empty for any.
        raises_to: The operator set that it raises a model to; 0 where it leaves that as it is.
    """

    __name__: str

    def __init__(
        self,
        change: Callable[..., None],
        operators: tuple[str, ...],
        did: str,
        stays: str,
        *,
        least_opset: int = 0,
        whole: bool = False,
        backwards: bool = False,
        writes: str = "",
        raises_to: int = 0,
    ) -> None:
        self.change, self.operators = change, operators
        self.did, self.stays, self.least_opset = did, stays, least_opset
        self.whole, self.backwards = whole, backwards
        self.writes, self.raises_to = writes, raises_to
        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(self, name, getattr(change, name))

    def __call__(
        self,
        model: "onnx.ModelProto | Editor",
        *,
        keep_values: Collection[str] = (),
        nodes: Collection[str] | None = None,
    ) -> RewriteResult:
        """Applies the rule to a model, in place.

        Args:
            model: The model, its nodes named, its types and shapes inferred; or the editor of one, for a row of rules,
                behind which `LiveGraph.write` is to be called.
            keep_values: Values that must keep existing with their meaning.
            nodes: Names of the nodes that may change; None for all of them.
        """
        named = None if nodes is None else frozenset(nodes)
        proto, present = (model.proto, model.graph) if isinstance(model, Editor) else (model, model.graph.node)
        found = (named is None or n.name in named for n in present if _is_one_of(n, self.operators))
        if (self.operators and not any(found)) or (self.least_opset and opset_of(proto) < self.least_opset):
            return RewriteResult()
        editor = model if isinstance(model, Editor) else Editor(model)
        editor.open_book(keep_values, named)
        if self.whole:
            self.change(editor)
        else:
            candidates = editor.find(*self.operators)
            for node in reversed(candidates) if self.backwards else candidates:
                if editor.may_change(node) and node.graph is editor.graph:  # else it went into another one
                    try:
                        self.change(editor, node)
                    except NotCollapsibleError as reason:
                        editor.refuse(node, reason)
        result = editor.close_book(self.did, self.stays)
        if editor is not model:
            editor.write()
        return result


def rule(*operators: str, did: str, stays: str = "", **how: Any) -> Callable[[Callable[..., None]], Rule]:
    """Makes a `Rule` of the function below it; ``how`` are the arguments of `Rule` by name."""
    return lambda change: Rule(change, operators, did, stays, **how)


def _is_one_of(node: HasOperator, operators: Collection[str]) -> bool:
    return node.op_type in operators and (
        node.domain in MAIN_DOMAINS or known_as(node.domain, node.op_type) in operators
    )


class Editor(LiveGraph):
    """A model under rules: look-ups, edits, checks, and the book of what the present rule did.

    Args:
        proto: The model, its nodes named, its types and shapes inferred.
    """

    def __init__(self, proto: onnx.ModelProto) -> None:
        super().__init__(proto)
        self.open_book((), None)

    def open_book(self, keep_values: Collection[str], named: Collection[str] | None) -> None:
        """Begins a rule.

        Args:
            keep_values: Values that must keep existing with their meaning.
            named: Names of the nodes that may change; None for all of them.
        """
        self.begin(keep_values)
        self.merged: dict[str, str] = {}
        self.notes: list[str] = []
        self.done = 0
        self._named = named
        self._refused: dict[str, str] = {}

    # -- look-ups -----------------------------------------------------------------------------------------------

    def find(self, *operators: str) -> list[ir.Node]:
        """The main graph's nodes of these operators, in order."""
        return [node for node in self.nodes if _is_one_of(node, operators)]

    def may_change(self, node: ir.Node | onnx.NodeProto) -> bool:
        """Whether the caller lets the node change."""
        return self._named is None or node.name in self._named

    def producer(self, value: ir.Value | None, *operators: str) -> ir.Node | None:
        """The node that computes the value, if it is one of these operators."""
        node = None if value is None else value.producer()
        return node if node is not None and _is_one_of(node, operators) else None

    def readers_of(self, value: ir.Value, *operators: str) -> list[ir.Node]:
        """The nodes of these operators that read the value, each once."""
        return [node for node in dict.fromkeys(self.readers(value)) if _is_one_of(node, operators)]

    def scalar(self, value: ir.Value | None) -> float | None:
        """The one finite number that a constant holds, whatever its rank; None if it is something else."""
        tensor = self.constant(value)
        array = self.array(value) if tensor is not None and all(dim == 1 for dim in tensor.dims) else None
        number = None if array is None else float(array.reshape(-1)[0])
        return number if number is not None and np.isfinite(number) else None

    # -- checks -------------------------------------------------------------------------------------------------

    def require_float32(self, value: ir.Value) -> None:
        """Raises where the value is not known to be float32, the type that the collapsed operators are fast in."""
        refuse_if(self.element_type(value) != _FLOAT32, f"'{value.name}' is not known to be float32")

    def require_private(self, value: ir.Value) -> None:
        """Raises where more than one node of the main graph needs the value."""
        refuse_if(not self.is_private(value), f"'{value.name}' is needed elsewhere")

    def require_closed(self, inner: Collection[ir.Node], last: ir.Node, *, save: Collection[ir.Node] = ()) -> None:
        """Raises where something outside the pattern, ``save`` some nodes, needs what an inner node computes."""
        members = {*inner, last, *save}
        for node in inner:
            for value in node.outputs:
                outside = any(reader not in members for reader in self.readers(value))
                refuse_if(value.name and (outside or self.is_pinned(value)), f"'{value.name}' is needed elsewhere")

    def require_no_growth(self, value: ir.Value, constants: Iterable[ir.Value | None]) -> None:
        """Raises where a constant operand may give the result more dimensions than ``value`` has."""
        tensors = filter(None, map(self.constant, constants))
        most = max((len(tensor.dims) for tensor in tensors), default=0)
        rank = self.rank(value)
        if most and (rank is None or rank < most):
            raise NotCollapsibleError(f"a constant has more dimensions than '{value.name}' is known to have")

    def picture(self, value: ir.Value) -> Picture:
        """The shape of a float32 value of four dimensions.

        Raises:
            NotCollapsibleError: Its type or rank is another one, or not known.
        """
        self.require_float32(value)
        dims = known(self.dims(value), f"the rank of '{value.name}' is not known")
        refuse_if(len(dims) != _PICTURE_RANK, f"'{value.name}' has {len(dims)} dimensions, not {_PICTURE_RANK}")
        refuse_if(0 in dims[1:], f"'{value.name}' is empty")
        return Picture(*dims[1:])

    # -- edits --------------------------------------------------------------------------------------------------

    def become(
        self,
        node: ir.Node,
        operator: str,
        inputs: Inputs,
        attributes: Attributes | None = None,
        *,
        inner: Iterable[ir.Node] = (),
        domain: str = "",
    ) -> None:
        """Turns the last node of a pattern into ``operator``, in its place; ``inner`` goes. Counts as one change."""
        self.drop(inner, node.name or "")
        self.rewrite(node, operator, inputs, attributes, domain=domain)
        self.done += 1

    def drop(self, nodes: Iterable[ir.Node], survivor: str | None = "") -> None:
        """Takes nodes out whose work another node does now, "" for none."""
        for node in nodes:
            self.remove(node)
            self.merged[node.name or ""] = survivor or ""

    def drop_unread(self, values: Iterable[ir.Value | None], survivor: str | None) -> None:
        """Removes the nodes of which nothing is read any more, from some values upwards.

        Args:
            values: Where to begin.
            survivor: The node that does their work now, "" for none.
        """
        waiting = list(values)
        while waiting:
            value = waiting.pop()
            node = None if value is None else value.producer()
            if node is None or node.graph is not self.graph or node not in self._own:
                continue
            if any(output.uses() or self.is_pinned(output) for output in node.outputs if output.name):
                continue
            waiting += node.inputs
            self.drop([node], survivor)

    # -- the book -----------------------------------------------------------------------------------------------

    def refuse(self, node: ir.Node, reason: str | NotCollapsibleError) -> None:
        """Notes that a near match ending or beginning at ``node`` stays, and why."""
        self._refused.setdefault(node.name or "", str(reason))

    def close_book(self, did: str, stays: str) -> RewriteResult:
        """Ends a rule and returns its result, see `Rule` for the two texts."""
        self.settle()
        notes = [*self.notes, *([f"{self.done} {did}."] if self.done else [])]
        refused = [f"'{name}': {reason}" for name, reason in self._refused.items() if name not in self.merged]
        if refused:
            more = ["..."] if len(refused) > _SHOWN else []
            notes.append(f"{len(refused)} {stays} ({'; '.join(refused[:_SHOWN] + more)}).")
        return RewriteResult(notes=tuple(notes), merged={gone: self._survivor(by) for gone, by in self.merged.items()})

    def _survivor(self, name: str) -> str:
        """The node that does the work of a node that may have gone into yet another one."""
        while name in self.merged:
            name = self.merged[name]
        return name


def other_operand(node: ir.Node, value: ir.Value | None) -> ir.Value | None:
    """The operand of a two-operand node that is not ``value``, None unless exactly one of them is."""
    others = [read for read in node.inputs if read is not value]
    return others[0] if len(node.inputs) == 2 and len(others) == 1 else None


def operand(node: ir.Node, position: int) -> ir.Value:
    """An input that the operator cannot do without.

    Raises:
        NotCollapsibleError: The node has none there.
    """
    return known(optional(node, position), f"it lacks its input {position}")
