"""QONNX' operators: what a node of them says, what it computes, and the same in ONNX's own operators.

``Quant(x, scale, zero_point, bit_width)`` is ``scale * (round(clamp(x / scale + zero_point)) - zero_point)``, in
float32 and with all parameters broadcast to ``x``. ``BipolarQuant(x, scale)`` is ``scale`` where ``x >= 0``, else
``-scale``. ``Trunc`` takes the low bits off a quantized value, as behind the sum of an average pool.

``Conv``, ``MaxPool`` and ``BatchNormalization`` of the domain ``qonnx.custom_op.channels_last`` read and write values
of shape (N, ..., C); Conv's weights are (O, ..., I). They become ONNX's own between two Transposes. All else about them
is as in ONNX. When it loads the model the runtime moves the Transposes together and drops those that cancel out.

Source: Pappalardo et al., "QONNX", 2022, table II, and what the `qonnx` package 1.0.0 executes.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.errors import ModelLoadError, UnsupportedModelError
from kenosis_ort.formats.tensors import Edits
from kenosis_ort.graph.constants import QONNX_DOMAINS, constant_value, replace_entries
from kenosis_ort.graph.live import LiveGraph
from kenosis_ort.graph.outside import array_in, copy_model
from kenosis_ort.graph.qdq import integer_bounds
from kenosis_ort.graph.view import GraphView, ir, required
from kenosis_ort.graph.walk import all_graphs, all_nodes, subgraphs

CHANNELS_LAST: Final = "qonnx.custom_op.channels_last"

QUANT: Final = frozenset({"Quant", "IntQuant"})
_QUANT_INPUTS = ("x", "scale", "zero point", "bit width")
INPUTS: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = {
    "Quant": (_QUANT_INPUTS,),
    "IntQuant": (_QUANT_INPUTS,),
    "BipolarQuant": (("x", "scale"),),
    "Trunc": (
        ("x", "scale", "zero point", "input bit width", "output bit width"),
        ("x", "scale", "zero point", "input bit width", "output scale", "output bit width"),
    ),
}
"""What the inputs of each operator are, in each form that it has."""

_MOST_BITS: Final = 32
_MAGIC: Final = np.float32(1.5 * 2**23)  # adding and subtracting it rounds a float32 below 2**22 half to even

Float = npt.NDArray[np.float32]

_ROUNDING: Final[Mapping[str, Callable[[Any], Any]]] = {
    "ROUND": np.round,
    "HALF_EVEN": np.round,
    "CEIL": np.ceil,
    "FLOOR": np.floor,
    "UP": lambda v: np.sign(v) * np.ceil(np.abs(v)),
    "DOWN": np.fix,
    "ROUND_TO_ZERO": np.fix,
    "HALF_UP": lambda v: np.sign(v) * np.floor(np.abs(v) + np.float32(0.5)),
    "HALF_DOWN": lambda v: np.sign(v) * np.ceil(np.abs(v) - np.float32(0.5)),
}
HALF_EVEN: Final = frozenset({"ROUND", "HALF_EVEN"})
"""The names of the one way of rounding that QuantizeLinear has."""


@dataclass(frozen=True, eq=False)
class QuantGrid:
    """Parameters of a Quant node whose parameters are constant.

    Attributes:
        scale: float32, of the shape that the file gives it.
        zero_point: float32, likewise.
        bits: Width of the integers, 1 to 32.
        signed: Integers may be negative.
        narrow: The range is one short.
        rounding: One of QONNX' names, in capitals.
    """

    scale: Float
    zero_point: Float
    bits: int
    signed: bool
    narrow: bool
    rounding: str = "ROUND"

    @property
    def shape(self) -> tuple[int, ...]:
        """The common shape of scale and zero point."""
        return np.broadcast_shapes(self.scale.shape, self.zero_point.shape)

    def integers(self, x: Float) -> Float:
        """Integers that represent constants, computed as QONNX does, in float32."""
        steps: Float = (x / self.scale + self.zero_point).astype(np.float32)
        if self.bits == 1 and self.signed:
            return np.where(steps >= 0, 1, -1).astype(np.float32)
        low, high = integer_bounds(self.bits, signed=self.signed, narrow=self.narrow)
        clamped = np.minimum(np.maximum(steps, np.float32(low)), np.float32(high))
        return np.asarray(_ROUNDING[self.rounding](clamped), np.float32)


def refuse(node: ir.Node, clause: str, fix: str | None = None) -> NoReturn:
    """Raises an `UnsupportedModelError` that names a node."""
    raise UnsupportedModelError(clause[0].upper() + clause[1:] + ".", where=label(node), fix=fix)


def is_qonnx(node: onnx.NodeProto) -> bool:
    """Whether a node is of one of QONNX' domains, whatever its operator."""
    return node.domain in QONNX_DOMAINS or node.domain == CHANNELS_LAST


def operator_of(node: ir.Node) -> str:
    """The operator of a node without its domain."""
    return node.op_type.removeprefix(f"{node.domain}.")


def base_name(node: ir.Node) -> str:
    """Prefix of the names of nodes that replace a node."""
    return node.name or next((value.name or "" for value in node.outputs), "")


def label(node: ir.Node) -> str:
    """Name of a node in messages."""
    return f"node '{base_name(node)}' ({operator_of(node)})"


def check_nodes(model: onnx.ModelProto) -> None:
    """Checks the form of all nodes of QONNX' domains: known operators, their inputs and attributes.

    Raises:
        UnsupportedModelError: One is not of the form that QONNX gives it, or stands in a body or function.
        ModelLoadError: A value of the graph is made twice.
    """
    found = [node for node in all_nodes(model) if is_qonnx(node)]
    if not found:
        return
    if len(found) > sum(map(is_qonnx, model.graph.node)):
        bodies = (body for node in model.graph.node for body in subgraphs(node))
        nested = (node for body in bodies for graph in all_graphs(body) for node in graph.node)
        inside = (node for function in model.functions for node in function.node)
        first = next((node for node in (*nested, *inside) if is_qonnx(node)), found[0])
        outputs = [ir.Value(name=name) for name in first.output]
        inner = ir.Node(first.domain, first.op_type, [], outputs=outputs, name=first.name)
        refuse(inner, "it stands in a body of control flow or in a function of the model")
    try:
        nodes = GraphView(model).nodes
    except ir.serde.SerdeError as error:  # the runtime has not looked at the model yet
        what = f"The graph cannot be read: {error.__cause__ or error}"
        raise ModelLoadError(what, fix="Export the model again with a current exporter.") from error
    for node in nodes:
        if node.domain not in QONNX_DOMAINS:
            continue
        operator = operator_of(node)
        if operator not in INPUTS:
            known = ", ".join(sorted(INPUTS))
            refuse(node, f"the operator has no counterpart in other formats (known are {known})")
        given = [value for value in node.inputs if value is not None]
        forms = INPUTS[operator]
        if len(node.inputs) not in map(len, forms) or len(given) < len(node.inputs):
            named = [[name.replace(" ", "_") for name in form] for form in forms]
            wanted = " or ".join(f"{len(names)} ({', '.join(names)})" for names in named)
            refuse(node, f"it has {len(given)} inputs; it takes {wanted}")
        if len(node.outputs) != 1 or not node.outputs[0].name:
            refuse(node, f"it has {len(node.outputs)} outputs, of which one has to have a name")
        if operator in QUANT:
            flag(node, "signed")
            flag(node, "narrow")
        if operator != "BipolarQuant":
            rounding_of(node)


def flag(node: ir.Node, name: str, default: bool | None = None) -> bool:
    """An attribute that is 0 or 1."""
    found = node.attributes.get(name)
    if found is None:
        if default is None:
            refuse(node, f"it lacks the attribute '{name}'")
        return default
    if found.type != ir.AttributeType.INT or found.value not in (0, 1):
        refuse(node, f"its attribute '{name}' is neither 0 nor 1")
    return bool(found.value)


def rounding_of(node: ir.Node) -> str:
    """Rounding mode of a node, by QONNX' name."""
    default = "FLOOR" if operator_of(node) == "Trunc" else "ROUND"
    found = node.attributes.get("rounding_mode")
    name = default if found is None else str(found.value).upper()
    if name not in _ROUNDING:
        refuse(node, f"rounding_mode '{name}' is unknown (known are {', '.join(sorted(_ROUNDING))})")
    return name


def grid_of(node: ir.Node, live: LiveGraph) -> QuantGrid:
    """QuantGrid of a Quant node.

    Raises:
        UnsupportedModelError: A parameter is computed from data, or is no scale, zero point or bit width.
    """
    given = parameters(node, live)
    if not np.isfinite(given["zero point"]).all():
        refuse(node, "its zero point is not finite")
    bits, signed, narrow = width(given["bit width"]), flag(node, "signed"), flag(node, "narrow")
    return QuantGrid(given["scale"], given["zero point"], bits, signed, narrow, rounding_of(node))


def parameters(node: ir.Node, live: LiveGraph) -> dict[str, Float]:
    """The constant inputs of a node in float32 by what they are, see `INPUTS`; scales and bit widths are checked.

    Raises:
        UnsupportedModelError: One is computed from data, or is no scale or bit width.
    """
    names = next(form for form in INPUTS[operator_of(node)] if len(form) == len(node.inputs))
    found = {name: _parameter(node, at, name, live) for at, name in enumerate(names) if at}
    for name, values in found.items():
        if name.endswith("scale") and not (np.isfinite(values).all() and (values > 0).all()):
            worst = values.reshape(-1)[int(np.argmin(np.where(np.isfinite(values), values, -np.inf)))]
            refuse(node, f"a scale has to be finite and above zero; one is {worst:g}")
        if name.endswith("width"):
            _check_bits(node, values)
    return found


def width(values: Float) -> int:
    """The bits that a checked bit width says."""
    return int(values.reshape(-1)[0])


def _parameter(node: ir.Node, position: int, name: str, live: LiveGraph) -> Float:
    """A constant input of a node in float32."""
    value = required(node, position)
    found = live.array(value)
    if found is None:
        fix = "export it with static scales, zero points and bit widths"
        refuse(node, f"its {name} '{value.name}' is computed from data", fix)
    if found.dtype.kind not in "fiu" or not found.size:
        refuse(node, f"its {name} holds no numbers")
    return np.asarray(found, np.float32)


def _check_bits(node: ir.Node, given: Float) -> None:
    """Checks that a bit width is one whole number from 1 to 32."""
    values = np.unique(given)
    if values.size != 1:
        refuse(node, f"its bit width differs by channel ({values.min():g} to {values.max():g})")
    bits = float(values[0])
    if not math.isfinite(bits) or bits != round(bits):
        refuse(node, f"its bit width {bits:g} is no whole number")
    if not 1 <= bits <= _MOST_BITS:
        refuse(node, f"its bit width {bits:g} is not from 1 to {_MOST_BITS}")


def spell_out(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model in which Quant, BipolarQuant and Trunc are written in ONNX's own operators.

    It computes what the model says, and any runtime loads it: the gate that every model passes, and the reference
    that results are compared with. All values keep their names. Nothing but Python looks at the model here.

    Args:
        model: A model that `check_nodes` passed; not changed.
    """
    if not any(map(is_qonnx, model.graph.node)):
        return copy_model(model)
    live = Edits(model)
    for node in live.nodes:
        if node.domain in QONNX_DOMAINS:
            spelling, operator = Spelling(live, node), operator_of(node)
            spell = {"BipolarQuant": spelling.bipolar, "Trunc": spelling.trunc}.get(operator, spelling.quant)
            live.replace(node, spell())
    spelled = live.finish()
    drop_imports(spelled, QONNX_DOMAINS)
    return spelled


class Spelling:
    """Writes one of QONNX' operators in those of ONNX, in front of its node.

    Args:
        live: The model.
        node: The node; it stays.
    """

    def __init__(self, live: Edits, node: ir.Node) -> None:
        self._live = live
        self._node = node
        self._base = base_name(node)

    def quant(self) -> ir.Value:
        """The value of a Quant."""
        node, add = self._node, self._add
        x, scale, zero_point, width = node.inputs
        signed, narrow = flag(node, "signed"), flag(node, "narrow")
        steps = add("Add", add("Div", x, scale), zero_point)
        known = self._known(width)
        if known is not None and np.all(known == 1) and signed:
            whole = self._sign(steps, self._number(1))
        else:
            low, high = self._bounds(width, signed=signed, narrow=narrow)
            whole = self._rounded(add("Min", add("Max", steps, low), high), rounding_of(node))
        return add("Mul", add("Sub", whole, zero_point), scale)

    def bipolar(self) -> ir.Value:
        """The value of a BipolarQuant."""
        return self._sign(self._node.inputs[0], self._node.inputs[1])

    def trunc(self) -> ir.Value:
        """The value of a Trunc, of four parameters or (since version 2 of the domain) five."""
        node, add = self._node, self._add
        x, scale, zero_point, width = node.inputs[:4]
        second = len(node.inputs) == 6
        whole = self._rounded(add("Add", add("Div", x, scale), zero_point), "ROUND")
        if second:
            ratio = add("Log", add("Div", node.inputs[4], scale))
            exponent = self._rounded(add("Div", ratio, self._number(math.log(2))), "ROUND")
        else:
            exponent = add("Sub", width, node.inputs[4])
        factor = add("Pow", self._number(2), exponent)
        short = add("Div", whole, factor)
        if second:
            signed, narrow = flag(node, "signed", True), flag(node, "narrow", False)
            low, high = self._bounds(node.inputs[5], signed=signed, narrow=narrow)
            short = add("Min", add("Max", short, low), high)
        short = self._rounded(short, rounding_of(node))
        zero = add("Div", zero_point, factor) if second else zero_point
        return add("Mul", add("Sub", short, zero), node.inputs[4] if second else scale)

    def _add(self, operator: str, *inputs: ir.Value | None) -> ir.Value:
        return self._live.add(self._node, operator, inputs, self._base)

    def _number(self, value: float) -> ir.Value:
        return self._live.store(np.asarray(value, np.float32), f"{self._base}_number")

    def _known(self, value: ir.Value | None) -> npt.NDArray[Any] | None:
        """The content of a constant, or of what a node Constant writes."""
        maker = None if value is None else value.producer()
        if maker is None:
            return self._live.array(value)
        stored = constant_value(ir.to_proto(maker)) if maker.op_type == "Constant" else None
        return None if stored is None else array_in(stored)

    def _bounds(self, width: ir.Value | None, *, signed: bool, narrow: bool) -> tuple[ir.Value, ir.Value]:
        """The values that hold the least and the largest integer; the width may be any value."""
        add, number = self._add, self._number
        exponent = add("Sub", width, number(1)) if signed else width
        power = add("Pow", number(2), exponent)
        if signed:
            return add("Sub", number(float(narrow)), power), add("Sub", power, number(1))
        return number(0), add("Sub", power, number(1.0 + narrow))

    def _sign(self, x: ir.Value | None, size: ir.Value | None) -> ir.Value:
        negative = self._add("Less", x, self._number(0))
        return self._add("Where", negative, self._add("Neg", size), size)

    def _rounded(self, x: ir.Value, rounding: str) -> ir.Value:
        add = self._add
        if rounding in HALF_EVEN:
            if not 0 < self._live.opset() < 11:
                return add("Round", x)
            magic = self._live.store(_MAGIC, f"{self._base}_magic")
            return add("Sub", add("Add", x, magic), magic)
        if rounding in ("CEIL", "FLOOR"):
            return add(rounding.capitalize(), x)
        size, sign = add("Abs", x), add("Sign", x)
        if rounding == "UP":
            size = add("Ceil", size)
        elif rounding in ("DOWN", "ROUND_TO_ZERO"):
            size = add("Floor", size)
        else:
            up = rounding == "HALF_UP"
            size = add("Floor" if up else "Ceil", add("Add" if up else "Sub", size, self._number(0.5)))
        return add("Mul", sign, size)


def drop_imports(model: onnx.ModelProto, domains: Collection[str]) -> None:
    """Takes domains off the model's list of operator sets, in place."""
    replace_entries(model, "opset_import", [entry for entry in model.opset_import if entry.domain not in domains])


_CHANNELS_LAST_OPERATORS = frozenset({"Conv", "MaxPool", "BatchNormalization"})


def to_channels_first(model: onnx.ModelProto) -> None:
    """Puts ONNX's operators and Transposes in the place of the channels-last ones, in place.

    Nothing but Python looks at the model here.

    Raises:
        UnsupportedModelError: Another operator of the domain, or the rank of its data is not known.
    """
    if not any(node.domain == CHANNELS_LAST for node in model.graph.node):
        return
    live = Edits(model, copied=False)
    for node in live.nodes:
        if node.domain != CHANNELS_LAST:
            continue
        operator = operator_of(node)
        if operator not in _CHANNELS_LAST_OPERATORS or len(node.outputs) != 1 or not node.inputs:
            known = ", ".join(sorted(_CHANNELS_LAST_OPERATORS))
            clause = (
                f"the channels-last operator has no counterpart in other formats (known are {known}, with one output)"
            )
            refuse(node, clause, "leave the model in the format that it has, or export it with channels first")
        base, rank = base_name(node), _rank(node, live)
        first, last = [0, rank - 1, *range(1, rank - 1)], [0, *range(2, rank), 1]
        inputs = list(node.inputs)
        for at in range(2 if operator == "Conv" else 1):
            inputs[at] = live.add(node, "Transpose", [inputs[at]], base, perm=first)
        live.put(node, operator, inputs)
        value = node.outputs[0]
        output = live.hand_over(value, f"{base}_channels_first")
        live.add(node, "Transpose", [value], base, behind=True, output=output, perm=last)
    live.finish()
    drop_imports(model, (CHANNELS_LAST,))


def _rank(node: ir.Node, live: Edits) -> int:
    kernel = node.attributes.get("kernel_shape")
    if kernel is not None and kernel.type == ir.AttributeType.INTS and kernel.value:
        return len(kernel.value) + 2
    for value in (node.inputs[0], node.outputs[0]):
        rank = live.rank(value)
        if rank is not None and rank > 1:
            return rank
    fix = "declare the shapes of the values, as qonnx' InferShapes does, or give kernel_shape"
    refuse(node, "the rank of the data of a channels-last operator is not known", fix)
