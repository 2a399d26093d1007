"""The caller's words, fitted to a model: what must be quantized, what must not, and what is left for the plan.

A word about a node or a tensor is kept to the letter. A node that the caller names although the target leaves it float
is *insisted* on: Q/DQ go around it whether the runtime has an integer kernel for it or not. A tensor with parameters
of the caller's own carries Q/DQ with these. Everything else is placed as if no option were given.

``TensorQuantOverrides``, read for placement: which tensors have types and parameters of the caller's own.

The quantizer computes the parameters with stock's arithmetic; what counts here is whether the runtime finds an integer
kernel, and whether an activation still vanishes, with the parameters that the caller wants.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import onnx

from kenosis_ort.errors import OptionError
from kenosis_ort.graph.constants import LAYERS
from kenosis_ort.graph.view import CAPTURED, FLOAT, GraphView, ir
from kenosis_ort.plan import Decision, EdgeRole, PlacementOptions
from kenosis_ort.targets.vocabulary import Role, Table

_LIMITS: Final[dict[int, tuple[int, int]]] = {onnx.TensorProto.UINT8: (0, 255), onnx.TensorProto.INT8: (-128, 127)}

Entry = Mapping[str, Any]


class Overrides(dict[str, tuple[Entry, ...]]):
    """The caller's overrides by tensor name.

    Args:
        entries: ``extra_options['TensorQuantOverrides']``: a list by tensor, one entry or one a channel.
        activation_type: ONNX element type of activations without an entry.
        weight_type: That of weights.
    """

    def __init__(self, entries: Mapping[str, Sequence[Entry]], *, activation_type: int, weight_type: int) -> None:
        super().__init__({name: tuple(given) for name, given in entries.items() if given})
        self._activation_type = activation_type
        self._weight_type = weight_type

    def type_of(self, name: str) -> int:
        """The element type that an activation's Q writes."""
        return _element_type(self._first(name).get("quant_type"), self._activation_type)

    def type_read(self, name: str, consumer: str) -> int:
        """The element type that a node reads of an activation, after a conversion if there is one."""
        convert = self._first(name).get("convert")
        if not convert or consumer not in convert.get("recv_nodes", (consumer,)):
            return self.type_of(name)
        return _element_type(convert.get("quant_type"), self._activation_type)

    def converts(self, name: str) -> bool:
        """Whether some consumers read an activation in another type than it is written in."""
        return bool(self._first(name).get("convert"))

    def weight_type(self, name: str) -> int:
        """The element type of a weight."""
        return _element_type(self._first(name).get("quant_type"), self._weight_type)

    def grids(self, decisions: Iterable[Decision]) -> list[tuple[int, bool | None]]:
        """Element types in which tensors are read, and whether the caller wants no offset, None for no word."""
        found = list[tuple[int, bool | None]]()
        for d in decisions:
            root, is_weight = d.provider or d.edge.value, d.role is EdgeRole.WEIGHT
            kind = self.weight_type(d.edge.value) if is_weight else self.type_read(root, d.edge.consumer)
            symmetric = self._first(root).get("symmetric")
            found.append((kind, None if symmetric is None else bool(symmetric)))
        return found

    def has_scale(self, name: str) -> bool:
        """Whether the caller gives a tensor its scale."""
        return "scale" in self._first(name)

    def refuse_offset(self, name: str, why: str) -> None:
        """Raises where the caller wants another zero point than 0 for a tensor.

        Args:
            name: The tensor.
            why: What the runtime's kernel does with one.

        Raises:
            OptionError: The caller does.
        """
        entry = self._first(name)
        if entry.get("symmetric") or np.any(np.asarray(entry.get("zero_point", 0))):
            what = f"the entry of '{name}' asks for another zero point than 0: {why}"
            fix = "leave out 'symmetric' and 'zero_point' of that tensor"
            raise OptionError(what, where="TensorQuantOverrides", fix=fix)

    def axis(self, name: str) -> int | None:
        """The channel axis that the caller gives a weight."""
        axis = self._first(name).get("axis")
        return None if axis is None else int(axis)

    def same(self, one: str, other: str) -> bool:
        """Whether two tensors have the same entries."""
        return repr(self.get(one)) == repr(self.get(other))

    def absorb(self, name: str, low: float | None, high: float | None) -> bool:
        """Whether a Relu or Clip of these bounds vanishes in front of a Q with the caller's parameters."""
        entry = self._first(name)
        if entry.get("symmetric") or self.converts(name) or self.type_of(name) not in _LIMITS:
            return False
        if "scale" not in entry:
            least, most = entry.get("rmin"), entry.get("rmax")
            below = low is None or least is None or float(least) >= low
            return below and (high is None or most is None or float(most) <= high)
        qmin, qmax = _LIMITS[self.type_of(name)]
        scale, zero_point = np.float32(np.asarray(entry["scale"]).item()), int(np.asarray(entry["zero_point"]).item())
        below = low is None or np.float32(qmin - zero_point) * scale >= np.float32(low)
        return bool(below and (high is None or np.float32(qmax - zero_point) * scale <= np.float32(high)))

    def _first(self, name: str) -> Entry:
        return self[name][0] if name in self else {}


def _element_type(given: Any, default: int) -> int:
    return default if given is None else int(getattr(given, "tensor_type", given))


LINEAR: Final = ("Gemm", "MatMul")
WEIGHTS_ONLY: Final = "caller-weights-only"
"""The rule by which a linear layer is quantized in its weights alone."""
_NEVER_NAMED: Final = ("Cast", "QuantizeLinear", "DequantizeLinear", "If", "Loop", "Scan")
_LATENT: Final = frozenset(
    {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Resize", "MaxPool", "AveragePool", "Slice", "Pad",
     "Split", "Gather", "GatherElements", "Where", "TopK"}
)  # fmt: skip
"""Operators that ``ForceQuantizeNoInputCheck`` quantizes behind float nodes too."""


@dataclass(frozen=True)
class Constraints:
    """Constraints of the caller on the nodes and values of a model.

    Attributes:
        view: The prepared model.
        target: The runtime's table.
        options: The words.
        overrides: Types and parameters of single tensors.
        requested: Names of nodes that are quantized whatever the target says, with the option that says so.
        values: Names of activations that carry Q/DQ whatever the plan says.
        free: Names of activations that carry none.
        providers: For a value that shares its parameters, through operators that move bytes, with one of ``values``:
            that one.
        torn: Names of operators that move bytes between values of different parameters of the caller's own.
    """

    view: GraphView
    target: Table
    options: PlacementOptions
    overrides: Overrides
    requested: Mapping[str, str]
    values: frozenset[str]
    free: frozenset[str]
    providers: Mapping[str, str] = field(default_factory=dict)
    torn: frozenset[str] = frozenset()

    def provider(self, value: str) -> str | None:
        """The value of the caller's own parameters that a value would have to share, None if there is none."""
        return value if value in self.values else self.providers.get(value)

    def constrained(self) -> set[str]:
        """The nodes whose weights and neighbours stay as they are: they touch tensors of the caller's own."""
        ends = {str(n.name): {str(v.name) for v in (*n.inputs, *n.outputs) if v is not None} for n in self.view.nodes}
        touching = {name for name, values in ends.items() if any(v in self.overrides for v in values)}
        return touching | set(self.requested)

    def weights_only(self, node: ir.Node) -> tuple[str, str] | None:
        """Rule and reason why a linear layer is quantized in its weights alone, for kernels that quantize the data.

        Source: rows int4-weights and blocked-int8-weights of `kenosis_ort.targets.ort_cpu.rules`.
        """
        weight = node.inputs[1] if node.op_type in LINEAR and len(node.inputs) > 1 else None
        if weight is None or not weight.is_initializer() or self.view.rank(weight) != 2:
            return None
        if self.options.block_size:
            return WEIGHTS_ONLY, f"weights in blocks of {self.options.block_size} have kernels with float data only"
        if self.overrides.weight_type(str(weight.name)) in (ir.DataType.INT4, ir.DataType.UINT4):
            return WEIGHTS_ONLY, "4-bit weights have kernels with float data only"
        return None

    def clashing_types(self, node: ir.Node) -> str | None:
        """Reason why an integer kernel cannot run on the types that the caller gives the tensors around a node."""
        if not self.overrides:
            return None
        name, expected = str(node.name), self.options.activation_type
        if name in self.torn:
            return "TensorQuantOverrides gives what it reads and what it writes different parameters"
        types = [(v, self.overrides.type_read(v, name)) for v in _activations(node.inputs)]
        types += [(v, self.overrides.type_of(v)) for v in _activations(node.outputs)]
        if self.options.mixes_types and len({kind for _, kind in types}) == 1:
            return None
        odd = next((value for value, kind in types if kind != expected), None)
        return None if odd is None else f"TensorQuantOverrides gives '{odd}' a type that the other tensors do not have"

    def without_kernel(self, node: ir.Node) -> str | None:
        """Reason why a node that is quantized as the caller says runs in float, None if it may run in integer.

        Args:
            node: A node that reads and writes integers.
        """
        options, natural_axis = self.options, _natural_axis(node)
        if options.activation_type not in options.kernel_activations:
            return "the runtime has no integer kernels for activations of the type that the caller asks for"
        if str(node.name) in options.keep_float and str(node.name) in self.requested:
            return options.keep_float[str(node.name)]
        weight = node.inputs[1] if natural_axis is not None else None  # the data of a Conv may be constant as well
        if weight is None:
            return None
        if self.overrides.weight_type(str(weight.name)) not in options.kernel_weights:
            return "the runtime has no integer kernels for weights of the type that the caller asks for"
        axis = self.weight_axis(node)
        if axis is not None and axis != natural_axis:
            return f"the runtime has no integer kernel for weights by channel of axis {axis}, which the caller asks for"
        return None

    def bias_follows(self, node: ir.Node) -> bool:
        """Whether the bias of a node becomes int32 where its data is quantized."""
        axis = _natural_axis(node)
        return self.options.quantize_bias and axis is not None and self.weight_axis(node) in (None, axis)

    def weight_axis(self, node: ir.Node) -> int | None:
        """The axis of a weight's scales, None for one scale."""
        weight = node.inputs[1]
        if weight is None or not weight.is_initializer():
            return None
        name, rank = str(weight.name), len(weight.shape or ()) or 1
        # All groups of a ConvTranspose would share the scales of one, beside an int32 bias that has one a channel.
        groups = node.attributes.get_int("group", 1) if node.op_type == "ConvTranspose" else 1
        is_ambiguous = groups > 1 and self.options.quantize_bias
        if name in self.overrides:
            axis = self.overrides.axis(name)
        elif not self.options.per_channel or node.op_type in self.options.per_tensor or is_ambiguous:
            axis = None
        else:
            axis = self.options.matmul_axis if node.op_type == "MatMul" else None
            axis = _natural_axis(node) if axis is None else axis
        return None if axis is None or not -rank <= axis < rank else axis % rank


def channel_axis(node: ir.Node) -> int:
    """The axis of output channels of a layer's weight."""
    if node.op_type == "ConvTranspose":
        return 1
    if node.op_type == "Conv" or node.attributes.get_int("transB", 0) != 0:
        return 0
    return 1


def _natural_axis(node: ir.Node) -> int | None:
    """The axis of output channels of a node's weight, None for a node without weights."""
    weight = node.inputs[1] if len(node.inputs) > 1 and node.op_type in LAYERS else None
    return channel_axis(node) if weight is not None and weight.is_initializer() else None


def constrain(view: GraphView, target: Table, options: PlacementOptions) -> Constraints:
    """Constraints by the caller's options for a model."""
    overrides = Overrides(options.overrides, activation_type=options.activation_type, weight_type=options.weight_type)
    reasons = ((str(node.name), _requested(target, options, overrides, node)) for node in view.nodes)
    requested = {name: why for name, why in reasons if why is not None}
    values = frozenset(_overridden(view, options, overrides))
    free = {str(v.name) for node in view.nodes if node.op_type in options.float_outputs for v in node.outputs if v.name}
    providers, torn = _shared(view, target, overrides, values)
    return Constraints(view, target, options, overrides, requested, values, frozenset(free - values), providers, torn)


def _shared(
    view: GraphView, target: Table, overrides: Overrides, values: frozenset[str]
) -> tuple[dict[str, str], frozenset[str]]:
    """Owners of shared parameters, by value, through operators that move bytes; and the nodes that would share two."""
    if not values:
        return {}, frozenset()
    found = {value: value for value in values}
    torn: set[str] = set()
    movers = [n for n in view.nodes if (rule := target.rule(n.op_type)) and rule.role is Role.PASS_THROUGH and n.inputs]
    for sweep in (movers, movers[::-1]):
        for node in sweep:
            ends = [*_activations(node.inputs[:1]), *_activations(node.outputs)]
            own = {found[v] for v in ends if v in found}
            if any(overrides.converts(v) for v in own) or any(not overrides.same(a, b) for a in own for b in own):
                torn.add(str(node.name))
            elif own and str(node.name) not in torn:
                found.update({v: min(own) for v in ends if v not in found})
    return found, frozenset(torn)


def _requested(target: Table, options: PlacementOptions, overrides: Overrides, node: ir.Node) -> str | None:
    """The option by which the caller wants a node quantized whatever the target says."""
    if options.closed(str(node.name), node.op_type) is not None or node.op_type in _NEVER_NAMED:
        return None
    if options.nodes is not None:
        return "named in the caller's nodes_to_quantize"
    rule = target.rule(node.op_type)
    if options.op_types is not None and (rule is None or rule.role in (Role.ISLAND, Role.FLOAT)):
        return f"the caller's op_types_to_quantize names {node.op_type}"
    if options.force_latent and node.op_type in _LATENT:
        return "ForceQuantizeNoInputCheck"
    constants = [v for v in node.inputs if v is not None and v.is_initializer() and v.dtype == FLOAT]
    if any(str(v.name) in overrides for v in constants):
        return "TensorQuantOverrides says how its weight is quantized"
    return None


def _overridden(view: GraphView, options: PlacementOptions, overrides: Overrides) -> Iterator[str]:
    """Yields the activations with parameters of the caller's own, as far as a node beside them may be quantized."""
    if not overrides:
        return
    for value in (*view.inputs, *(out for node in view.nodes for out in node.outputs)):
        if str(value.name) not in overrides or value.dtype != FLOAT or value.is_initializer():
            continue
        beside = [*(c.node for c in view.consumers(value) if c.index != CAPTURED), value.producer()]
        if any(n is not None and options.closed(str(n.name), n.op_type) is None for n in beside):
            yield str(value.name)


def _activations(values: Iterable[ir.Value | None]) -> Iterator[str]:
    for value in values:
        if value is not None and value.name and value.dtype == FLOAT and not value.is_initializer():
            yield str(value.name)
