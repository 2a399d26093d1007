"""Assigns every source node to the kernel that executes it.

A kernel belongs to the source node whose token its name carries; an NCHWc kernel, which the runtime names after its
output value, to the node behind that value; any other kernel to the node that makes the same value in the model.
A source node without a kernel was absorbed, removed, or merged with an identical one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from kenosis_ort.graph.qdq import DQ, QDQ_OPS, Q, SourceGraph, SourceNode
from kenosis_ort.graph.source import base_op
from kenosis_ort.targets.ort_cpu.proof.kernels import LAYOUT_OPS, KernelGraph, KernelNode

_NO_OPS: Final = frozenset(
    {
        "Identity",
        "Dropout",
        "Cast",
        "CastLike",
        "Reshape",
        "Transpose",
        "Flatten",
        "Squeeze",
        "Unsqueeze",
        "Expand",
        "Slice",
    }
)
_CLAMPS: Final = frozenset({"Relu", "Clip", "Min", "Max"})
# Kernels of their own operator that take a node in front of them into themselves.
_TAKEN_BY: Final = {"Conv": ("Pad",), "FusedConv": ("Pad",), "MaxPool": ("Pad",), "FusedMatMul": ("Mul", "Div")}
_INLINED: Final = ("_inlfunc_", "_token_")  # how the runtime starts the names of values inside an inlined function
_CONSTANT: Final = "constant: computed once at load"
_REQUANTIZED: Final = "redundant: the Q behind it clips as well; what is left is a requantization (DQ, Q)"
_CHAIN_LIMIT: Final = 16  # the longest pattern that the runtime fuses into one kernel, with room to spare


@dataclass
class Fate:
    """What became of one source node: a kernel of its own, or another node's, or neither.

    Attributes:
        node: The source node.
        kernel: The kernel of its own.
        into: The node whose kernel executes it.
        note: What happened to it otherwise.
        absorbed: The nodes that its kernel executes as well.
        inlined: Further kernels of a function operator that the runtime replaced by its body.
    """

    node: SourceNode
    kernel: KernelNode | None = None
    into: SourceNode | None = None
    note: str = ""
    absorbed: list[SourceNode] = field(default_factory=list)
    inlined: list[KernelNode] = field(default_factory=list)


class Mapping:
    """The assignment for one model. ``fates`` holds one entry per compute node, in the model's order.

    Args:
        source: The model.
        kernels: The graph that the runtime made of it.
    """

    def __init__(self, source: SourceGraph, kernels: KernelGraph) -> None:
        self._source = source
        self._kernels = kernels
        self.fates: dict[int, Fate] = {n.index: Fate(n) for n in source.nodes if n.is_compute}
        self._owner: dict[int, SourceNode] = {}
        self._fused_values: dict[str, SourceNode] = {}
        self._same: dict[str, str] = {}
        self._quantizers = {k.token: k for k in kernels.nodes if k.op_type == Q and k.token is not None}
        self._claim_by_token()
        self._claim_by_value()
        self._settle_orphans()
        for fate in self.fates.values():
            if fate.into is not None:
                self.fates[fate.into.index].absorbed.append(fate.node)

    def overhead(self) -> Iterator[KernelNode]:
        """Yields the kernels that belong to no source node."""
        return (k for k in self._kernels.nodes if id(k) not in self._owner)

    # ---- kernels with an owner --------------------------------------------------------------------------------

    def _claim(self, node: SourceNode, kernel: KernelNode) -> None:
        fate = self.fates[node.index]
        base = base_op(node.op_type)
        if fate.kernel is None or (fate.kernel.base != base and kernel.base == base):
            fate.kernel = kernel
        self._owner[id(kernel)] = node

    def _claim_by_token(self) -> None:
        for kernel in self._kernels.nodes:
            if kernel.token in self.fates and kernel.op_type not in QDQ_OPS and kernel.token is not None:
                self._claim(self._source.nodes[kernel.token], kernel)

    def _claim_by_value(self) -> None:
        nchwc = [k for k in self._kernels.nodes if k.nchwc_value is not None]
        for kernel in nchwc:
            value = kernel.nchwc_value or ""
            node = self._source_of(value, kernel)
            if node is not None:
                self._claim(node, kernel)
                self._fused_values[value] = node
        for kernel in self._kernels.nodes:
            if id(kernel) in self._owner or kernel.op_type in LAYOUT_OPS:
                continue
            for value in kernel.proto.output:
                made = self._source.producer.get(value)
                if made is not None and made.index in self.fates:
                    self._claim(made, kernel)
                    break
        for kernel in reversed(self._kernels.nodes):
            self._claim_inlined(kernel)

    def _claim_inlined(self, kernel: KernelNode) -> None:
        """The body of a function operator (HardSwish, Mish) belongs to the node whose last kernel reads it."""
        if id(kernel) in self._owner or not all(v.startswith(_INLINED) for v in kernel.proto.output if v):
            return
        for value in kernel.proto.output:
            for reader in self._kernels.consumers.get(value, []):
                owner = self._owner.get(id(reader))
                if owner is not None:
                    self._owner[id(kernel)] = owner
                    self.fates[owner.index].inlined.insert(0, kernel)
                    return

    def _claim_body(self, last: KernelNode) -> None:
        """Gives what feeds the last kernel of a function's body to the same node."""
        front = [last]
        while front:
            kernel = front.pop()
            for value in kernel.proto.input:
                above = self._kernels.producer.get(value)
                if above is not None and id(above) not in self._owner:
                    self._claim_inlined(above)
                    if id(above) in self._owner:
                        front.append(above)

    def _source_of(self, value: str, kernel: KernelNode) -> SourceNode | None:
        """Walks up from a value to the unclaimed node of the kernel's operator that the runtime fused into it."""
        front, seen = [value], set[str]()
        for _ in range(_CHAIN_LIMIT):
            following = []
            for name in front:
                node = self._source.producer.get(name)
                if node is None or name in seen:
                    continue
                seen.add(name)
                if (
                    base_op(node.op_type) == kernel.base
                    and node.index in self.fates
                    and self.fates[node.index].kernel is None
                ):
                    return node
                if base_op(node.op_type) != kernel.base:
                    following += list(node.proto.input)
            front = following
        return None

    # ---- nodes without a kernel -------------------------------------------------------------------------------

    def _settle_orphans(self) -> None:
        orphans = [f for f in self.fates.values() if f.kernel is None]
        for fate in orphans:
            if all(self._is_constant(v) for v in fate.node.proto.input) or not self._source.computes_float(fate.node):
                fate.note = _CONSTANT
            else:
                self._settle_by_value(fate)
        left = [f for f in orphans if not _settled(f)]
        twins = self._twins({f.node.op_type for f in left})
        for fate in left:
            self._settle_as_twin(fate, twins)
        for fate in reversed(orphans):
            if not _settled(fate):
                self._settle_forward(fate)
        for fate in orphans:
            if not _settled(fate):
                self._settle_backward(fate)

    def _settle_by_value(self, fate: Fate) -> None:
        """The node's value, or its quantized form, still exists: whoever makes it has absorbed the node."""
        body = self._inlined_before_q(fate.node)
        if body is not None:
            self._claim(fate.node, body)
            self._claim_body(body)
            return
        for value in self._own_values(fate.node):
            if value in self._kernels.initializers:
                fate.note = _CONSTANT
                return
            if value in self._fused_values and self._fused_values[value] is not fate.node:
                fate.into = self._fused_values[value]
                return
            kernel = self._kernels.producer.get(value)
            if kernel is None:
                continue
            if kernel.op_type == Q and fate.node.op_type in _CLAMPS:
                above = self._kernels.producer.get(kernel.proto.input[0])
                requantizes = above is not None and above.op_type == DQ
                fate.note = _REQUANTIZED if requantizes else "redundant: the Q behind it clips as well"
                return
            owner = self._owner_above(kernel)
            if owner is not None and owner is not fate.node and fate.node.op_type not in _NO_OPS:
                fate.into = owner
                return

    def _inlined_before_q(self, node: SourceNode) -> KernelNode | None:
        """Returns the last kernel of a function operator's body in front of the Q behind it, if nobody owns it."""
        for value in node.proto.output:
            for reader in self._source.consumers.get(value, []):
                kernel = self._quantizers.get(reader.index)
                above = None if kernel is None else self._kernels.producer.get(kernel.proto.input[0])
                if above is None or id(above) in self._owner or above.op_type in (*QDQ_OPS, *LAYOUT_OPS):
                    continue
                if all(v.startswith(_INLINED) for v in above.proto.output if v):
                    return above
        return None

    def _own_values(self, node: SourceNode) -> Iterator[str]:
        for value in node.proto.output:
            if value:
                yield value
        for value in node.proto.output:
            for reader in self._source.consumers.get(value, []):
                if reader.op_type == Q:
                    yield reader.proto.output[0]

    def _owner_above(self, kernel: KernelNode) -> SourceNode | None:
        """Walks up through kernels without an owner."""
        for _ in range(_CHAIN_LIMIT):
            owner = self._owner.get(id(kernel))
            above = self._kernels.producer.get(kernel.proto.input[0]) if kernel.proto.input else None
            if owner is not None or above is None:
                return owner
            kernel = above
        return None

    def _twins(self, op_types: set[str]) -> dict[tuple[object, ...], SourceNode]:
        found: dict[tuple[object, ...], SourceNode] = {}
        for fate in self.fates.values():
            if fate.kernel is not None and fate.node.op_type in op_types:
                found.setdefault(self._identity(fate.node), fate.node)
        return found

    def _identity(self, node: SourceNode) -> tuple[object, ...]:
        inputs: list[object] = []
        for value in node.proto.input:
            dq = self._source.dq_of(value)
            names = tuple(dq.proto.input) if dq is not None else (value,)
            inputs.append(tuple(self._content(self._same.get(name, name)) for name in names))
        attributes = tuple(sorted(a.SerializeToString(deterministic=True) for a in node.proto.attribute))
        return (node.proto.domain, node.op_type, node.graph, tuple(inputs), attributes)

    def _content(self, value: str) -> object:
        """Returns what makes a value what it is: for a scalar constant its content, else its name."""
        array = self._source.array(value) if self._source.is_initializer(value) else None
        return value if array is None or array.size > 1 else (array.dtype.str, array.shape, array.tobytes())

    def _settle_as_twin(self, fate: Fate, twins: dict[tuple[object, ...], SourceNode]) -> None:
        twin = twins.get(self._identity(fate.node))
        if twin is not None:
            fate.into = twin
            fate.note = f"identical to '{twin.label}', computed once"
            self._same.update(zip(fate.node.proto.output, twin.proto.output, strict=False))

    def _settle_forward(self, fate: Fate) -> None:
        """The only reader runs as a kernel of several operators, or was itself absorbed by a known one."""
        readers = [r for v in fate.node.proto.output for r in self._source.consumers.get(v, [])]
        for reader in readers:
            target = self.fates.get(reader.index)
            if target is None:
                continue
            absorbs = target.kernel is not None and target.kernel.base != base_op(reader.op_type)
            takes_all = target.kernel is not None and fate.node.op_type in _TAKEN_BY.get(target.kernel.op_type, ())
            if absorbs or takes_all:
                fate.into = reader
                return
            if target.into is not None and fate.node.op_type not in _CLAMPS and target.into is not fate.node:
                fate.into = target.into
                return

    def _settle_backward(self, fate: Fate) -> None:
        if fate.node.op_type in _NO_OPS:
            fate.note = "no operation left: folded into neighbouring layout operations"
            return
        candidates = []
        for value in fate.node.proto.input:
            maker = self._source.producer.get(value)
            if maker is not None and maker.op_type == DQ:
                quantizer = self._source.producer.get(maker.proto.input[0])
                maker = self._source.producer.get(quantizer.proto.input[0]) if quantizer is not None else None
            target = None if maker is None else self.fates.get(maker.index)
            if target is not None and (target.kernel is not None or target.into is not None):
                candidates.append(target)
        if candidates:
            best = max(candidates, key=lambda t: (_adds_a_sum(t.kernel), t.node.index))
            fate.into = best.node if best.kernel is not None else best.into
            return
        fate.note = "not in the optimized graph: computed at load or not needed"

    def _is_constant(self, value: str) -> bool:
        if not value or self._source.is_initializer(value):
            return True
        maker = self._source.producer.get(value)
        while maker is not None and maker.is_qdq:
            value = maker.proto.input[0]
            if self._source.is_initializer(value):
                return True
            maker = self._source.producer.get(value)
        return maker is not None and maker.index in self.fates and self.fates[maker.index].note == _CONSTANT


def _settled(fate: Fate) -> bool:
    return fate.kernel is not None or fate.into is not None or bool(fate.note)


def _adds_a_sum(kernel: KernelNode | None) -> bool:
    """Returns whether a float Conv kernel adds a second tensor to its result."""
    return kernel is not None and kernel.base == "Conv" and len(kernel.proto.input) == 4 and bool(kernel.proto.input[3])
