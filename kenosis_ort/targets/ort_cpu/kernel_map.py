"""Kernels of the optimized graph by the node of the model that they execute.

A kernel belongs to the source node whose token its name carries; an NCHWc kernel, which the runtime names after its
output value, to the node behind that value; any other kernel to the node that makes the same value in the model. A
source node without a kernel was absorbed, removed, or merged with an identical one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from kenosis_ort.graph.constants import base_op
from kenosis_ort.graph.qdq import DQ, QDQ_OPS, Q, SourceGraph, SourceNode
from kenosis_ort.targets.ort_cpu.kernel_graph import LAYOUT_OPS, KernelGraph, KernelNode

_NO_OPS: Final = frozenset(
    {"Identity", "Dropout", "Cast", "CastLike", "Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Expand",
     "Slice"}
)  # fmt: skip
_CLAMPS: Final = frozenset({"Relu", "Clip", "Min", "Max"})
# Kernels of their own operator that take a node in front of them into themselves.
_TAKEN_BY: Final = {"Conv": ("Pad",), "FusedConv": ("Pad",), "MaxPool": ("Pad",), "FusedMatMul": ("Mul", "Div")}
_INLINED: Final = ("_inlfunc_", "_token_")  # how the runtime starts the names of values inside an inlined function
_CONSTANT: Final = "constant: computed once at load"
_REQUANTIZED: Final = "redundant: the Q behind it clips as well; what is left is a requantization (DQ, Q)"
_CHAIN_LIMIT: Final = 16  # the longest pattern that the runtime fuses into one kernel, with room to spare


@dataclass
class NodeMapping:
    """Execution of one source node: by a kernel of its own, by another node's, or by neither.

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


class KernelMap:
    """The assignment for one model. ``entries`` holds one entry per compute node, in the model's order.

    Args:
        source: The model.
        kernels: The graph that the runtime made of it.
    """

    def __init__(self, source: SourceGraph, kernels: KernelGraph) -> None:
        self._source = source
        self._kernels = kernels
        self.entries: dict[int, NodeMapping] = {n.index: NodeMapping(n) for n in source.nodes if n.is_compute}
        self._owner: dict[int, SourceNode] = {}
        self._fused_values: dict[str, SourceNode] = {}
        self._same: dict[str, str] = {}
        self._quantizers = {k.token: k for k in kernels.nodes if k.op_type == Q and k.token is not None}
        self._claim_by_token()
        self._claim_by_value()
        self._settle_orphans()
        for entry in self.entries.values():
            if entry.into is not None:
                self.entries[entry.into.index].absorbed.append(entry.node)

    def overhead(self) -> Iterator[KernelNode]:
        """Yields the kernels that belong to no source node."""
        return (k for k in self._kernels.nodes if id(k) not in self._owner)

    # ---- kernels with an owner --------------------------------------------------------------------------------

    def _claim(self, node: SourceNode, kernel: KernelNode) -> None:
        entry = self.entries[node.index]
        base = base_op(node.op_type)
        if entry.kernel is None or (entry.kernel.base != base and kernel.base == base):
            entry.kernel = kernel
        self._owner[id(kernel)] = node

    def _claim_by_token(self) -> None:
        for kernel in self._kernels.nodes:
            if kernel.token in self.entries and kernel.op_type not in QDQ_OPS and kernel.token is not None:
                self._claim(self._source.nodes[kernel.token], kernel)

    def _claim_by_value(self) -> None:
        for kernel in self._kernels.nodes:
            node = self._source_of(kernel.nchwc_value, kernel) if kernel.nchwc_value else None
            if kernel.nchwc_value and node is not None:
                self._claim(node, kernel)
                self._fused_values[kernel.nchwc_value] = node
        for kernel in self._kernels.nodes:
            if id(kernel) in self._owner or kernel.op_type in LAYOUT_OPS:
                continue
            makers = [self._source.producer[v] for v in kernel.proto.output if v in self._source.producer]
            made = next((maker for maker in makers if maker.index in self.entries), None)
            if made is not None:
                self._claim(made, kernel)
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
                    self.entries[owner.index].inlined.insert(0, kernel)
                    return

    def _claim_body(self, last: KernelNode) -> None:
        """Assigns the kernels before the last one of a function's body to the same node."""
        pending = [last]
        while pending:
            kernel = pending.pop()
            for value in kernel.proto.input:
                above = self._kernels.producer.get(value)
                if above is not None and id(above) not in self._owner:
                    self._claim_inlined(above)
                    if id(above) in self._owner:
                        pending.append(above)

    def _source_of(self, value: str, kernel: KernelNode) -> SourceNode | None:
        """Walks up from a value to the unclaimed node of the kernel's operator that the runtime fused into it."""
        pending, seen = [value], set[str]()
        for _ in range(_CHAIN_LIMIT):
            following = []
            for name in pending:
                node = self._source.producer.get(name)
                if node is None or name in seen:
                    continue
                seen.add(name)
                if base_op(node.op_type) != kernel.base:
                    following += list(node.proto.input)
                elif node.index in self.entries and self.entries[node.index].kernel is None:
                    return node
            pending = following
        return None

    # ---- nodes without a kernel -------------------------------------------------------------------------------

    def _settle_orphans(self) -> None:
        orphans = [f for f in self.entries.values() if f.kernel is None]
        for entry in orphans:
            if all(self._is_constant(v) for v in entry.node.proto.input) or not self._source.computes_float(entry.node):
                entry.note = _CONSTANT
            else:
                self._settle_by_value(entry)
        left = [f for f in orphans if not _settled(f)]
        twins = self._twins({f.node.op_type for f in left})
        for entry in left:
            self._settle_as_twin(entry, twins)
        for entry in reversed(orphans):
            if not _settled(entry):
                self._settle_forward(entry)
        for entry in orphans:
            if not _settled(entry):
                self._settle_backward(entry)

    def _settle_by_value(self, entry: NodeMapping) -> None:
        """The node's value, or its quantized form, still exists: the kernel that computes it has absorbed the node."""
        body = self._inlined_before_q(entry.node)
        if body is not None:
            self._claim(entry.node, body)
            self._claim_body(body)
            return
        for value in self._own_values(entry.node):
            if value in self._kernels.initializers:
                entry.note = _CONSTANT
                return
            if value in self._fused_values and self._fused_values[value] is not entry.node:
                entry.into = self._fused_values[value]
                return
            kernel = self._kernels.producer.get(value)
            if kernel is None:
                continue
            if kernel.op_type == Q and entry.node.op_type in _CLAMPS:
                above = self._kernels.producer.get(kernel.proto.input[0])
                requantizes = above is not None and above.op_type == DQ
                entry.note = _REQUANTIZED if requantizes else "redundant: the Q behind it clips as well"
                return
            owner = self._owner_above(kernel)
            if owner is not None and owner is not entry.node and entry.node.op_type not in _NO_OPS:
                entry.into = owner
                return

    def _inlined_before_q(self, node: SourceNode) -> KernelNode | None:
        """The last kernel of a function operator's body in front of the Q behind it, if it is not claimed."""
        for reader in self._readers(node):
            kernel = self._quantizers.get(reader.index)
            above = None if kernel is None else self._kernels.producer.get(kernel.proto.input[0])
            if above is None or id(above) in self._owner or above.op_type in LAYOUT_OPS:
                continue
            if all(v.startswith(_INLINED) for v in above.proto.output if v):
                return above
        return None

    def _readers(self, node: SourceNode) -> Iterator[SourceNode]:
        return (reader for value in node.proto.output for reader in self._source.consumers.get(value, []))

    def _own_values(self, node: SourceNode) -> Iterator[str]:
        """Yields the values that a node makes, and their quantized forms."""
        yield from filter(None, node.proto.output)
        yield from (reader.proto.output[0] for reader in self._readers(node) if reader.op_type == Q)

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
        for entry in self.entries.values():
            if entry.kernel is not None and entry.node.op_type in op_types:
                found.setdefault(self._identity(entry.node), entry.node)
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
        """Identity of a value: for a scalar constant its content, else its name."""
        array = self._source.array(value) if value in self._source.initializers else None
        return value if array is None or array.size > 1 else (array.dtype.str, array.shape, array.tobytes())

    def _settle_as_twin(self, entry: NodeMapping, twins: dict[tuple[object, ...], SourceNode]) -> None:
        twin = twins.get(self._identity(entry.node))
        if twin is not None:
            entry.into = twin
            entry.note = f"identical to '{twin.label}', computed once"
            self._same.update(zip(entry.node.proto.output, twin.proto.output, strict=False))

    def _settle_forward(self, entry: NodeMapping) -> None:
        """The only reader runs as a kernel of several operators, or was itself absorbed by a known one."""
        for reader in self._readers(entry.node):
            target = self.entries.get(reader.index)
            if target is None:
                continue
            absorbs = target.kernel is not None and target.kernel.base != base_op(reader.op_type)
            takes_all = target.kernel is not None and entry.node.op_type in _TAKEN_BY.get(target.kernel.op_type, ())
            if absorbs or takes_all:
                entry.into = reader
                return
            if target.into is not None and entry.node.op_type not in _CLAMPS and target.into is not entry.node:
                entry.into = target.into
                return

    def _settle_backward(self, entry: NodeMapping) -> None:
        if entry.node.op_type in _NO_OPS:
            entry.note = "no operation left: folded into neighbouring layout operations"
            return
        makers = [self._maker(value) for value in entry.node.proto.input]
        targets = [self.entries[maker.index] for maker in makers if maker is not None and maker.index in self.entries]
        running = [t for t in targets if t.kernel is not None or t.into is not None]
        if not running:
            entry.note = "not in the optimized graph: computed at load or not needed"
            return
        best = max(running, key=lambda t: (_adds_a_sum(t.kernel), t.node.index))
        entry.into = best.node if best.kernel is not None else best.into

    def _maker(self, value: str) -> SourceNode | None:
        """The node that makes a value, or what is quantized there and dequantized."""
        maker = self._source.producer.get(value)
        if maker is None or maker.op_type != DQ:
            return maker
        quantizer = self._source.producer.get(maker.proto.input[0])
        return None if quantizer is None else self._source.producer.get(quantizer.proto.input[0])

    def _is_constant(self, value: str) -> bool:
        if not value or value in self._source.initializers:
            return True
        maker = self._source.producer.get(value)
        while maker is not None and maker.op_type in QDQ_OPS:
            value = maker.proto.input[0]
            if value in self._source.initializers:
                return True
            maker = self._source.producer.get(value)
        return maker is not None and maker.index in self.entries and self.entries[maker.index].note == _CONSTANT


def _settled(entry: NodeMapping) -> bool:
    return entry.kernel is not None or entry.into is not None or bool(entry.note)


def _adds_a_sum(kernel: KernelNode | None) -> bool:
    """Whether a float Conv kernel adds a second tensor to its result."""
    return kernel is not None and kernel.base == "Conv" and len(kernel.proto.input) == 4 and bool(kernel.proto.input[3])
