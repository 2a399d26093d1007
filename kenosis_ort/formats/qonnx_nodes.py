"""QONNX' operators: what a node of them says, what it computes, and the same in ONNX's own operators.

``Quant(x, scale, zero_point, bit_width)`` is ``scale * (round(clamp(x / scale + zero_point)) - zero_point)``, in
float32 and with all parameters broadcast to ``x``. ``BipolarQuant(x, scale)`` is ``scale`` where ``x >= 0``, else
``-scale``. ``Trunc`` takes the low bits off a quantized value, as behind the sum of an average pool.
Source: Pappalardo et al., "QONNX", 2022, table II, and what the `qonnx` package 1.0.0 executes.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.errors import UnsupportedModelError
from kenosis_ort.formats.tensors import Draft
from kenosis_ort.graph.constants import constant_value
from kenosis_ort.graph.outside import array_in, copy_model
from kenosis_ort.graph.qdq import integer_bounds
from kenosis_ort.graph.walk import all_graphs, all_nodes, attribute, opset_of, subgraphs

QONNX: Final = "qonnx.custom_op.general"
DOMAINS: Final = frozenset({QONNX, "onnx.brevitas", "finn.custom_op.general"})
"""Where the operators live: QONNX' own domain, that of Brevitas' exports, and that of FINN before QONNX was."""

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
    """What a Quant node with constant parameters says.

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


def refuse(node: onnx.NodeProto, clause: str, fix: str | None = None) -> NoReturn:
    """Raises an `UnsupportedModelError` that names a node."""
    raise UnsupportedModelError(clause[0].upper() + clause[1:] + ".", where=label(node), fix=fix)


def is_qonnx(node: onnx.NodeProto) -> bool:
    """Whether a node is of one of QONNX' domains, whatever its operator."""
    return node.domain in DOMAINS or node.domain == CHANNELS_LAST


def base_name(node: onnx.NodeProto) -> str:
    """Prefix of the names of nodes that replace a node."""
    return str(node.name or node.output[0])


def label(node: onnx.NodeProto) -> str:
    """Name of a node in messages."""
    return f"node '{node.name or next(iter(node.output), '')}' ({node.op_type})"


def check_nodes(model: onnx.ModelProto) -> None:
    """Checks the form of all nodes of QONNX' domains: known operators, their inputs and attributes.

    Raises:
        UnsupportedModelError: One is not of the form that QONNX gives it, or stands in a body or function.
    """
    if sum(map(is_qonnx, all_nodes(model))) > sum(map(is_qonnx, model.graph.node)):
        bodies = (body for node in model.graph.node for body in subgraphs(node))
        nested = (node for body in bodies for graph in all_graphs(body) for node in graph.node)
        inside = (node for function in model.functions for node in function.node)
        found = next((node for node in (*nested, *inside) if is_qonnx(node)), model.graph.node[0])
        refuse(found, "it stands in a body of control flow or in a function of the model")
    for node in model.graph.node:
        if not is_qonnx(node) or node.domain == CHANNELS_LAST:
            continue
        if node.op_type not in INPUTS:
            known = ", ".join(sorted(INPUTS))
            refuse(node, f"the operator has no counterpart in other formats (known are {known})")
        forms = INPUTS[node.op_type]
        if len(node.input) not in map(len, forms) or not all(node.input):
            wanted = " or ".join(
                f"{len(form)} ({', '.join(name.replace(' ', '_') for name in form)})" for form in forms
            )
            refuse(node, f"it has {sum(map(bool, node.input))} inputs; it takes {wanted}")
        if len(node.output) != 1 or not node.output[0]:
            refuse(node, f"it has {len(node.output)} outputs, of which one has to have a name")
        if node.op_type in QUANT:
            flag(node, "signed")
            flag(node, "narrow")
        if node.op_type != "BipolarQuant":
            rounding_of(node)


def flag(node: onnx.NodeProto, name: str, default: bool | None = None) -> bool:
    """An attribute that is 0 or 1."""
    found = attribute(node, name)
    if found is None:
        if default is None:
            refuse(node, f"it lacks the attribute '{name}'")
        return default
    if found.type != onnx.AttributeProto.INT or found.i not in (0, 1):
        refuse(node, f"its attribute '{name}' is neither 0 nor 1")
    return bool(found.i)


def rounding_of(node: onnx.NodeProto) -> str:
    """Rounding mode of a node, by QONNX' name."""
    found = attribute(node, "rounding_mode")
    default = "FLOOR" if node.op_type == "Trunc" else "ROUND"
    name = default if found is None else found.s.decode("utf-8", "replace").upper()
    if name not in _ROUNDING:
        refuse(node, f"rounding_mode '{name}' is unknown (known are {', '.join(sorted(_ROUNDING))})")
    return name


def grid_of(node: onnx.NodeProto, draft: Draft) -> QuantGrid:
    """QuantGrid of a Quant node.

    Raises:
        UnsupportedModelError: A parameter is computed from data, or is no scale, zero point or bit width.
    """
    given = parameters(node, draft)
    if not np.isfinite(given["zero point"]).all():
        refuse(node, "its zero point is not finite")
    bits, signed, narrow = width(given["bit width"]), flag(node, "signed"), flag(node, "narrow")
    return QuantGrid(given["scale"], given["zero point"], bits, signed, narrow, rounding_of(node))


def parameters(node: onnx.NodeProto, draft: Draft) -> dict[str, Float]:
    """The constant inputs of a node in float32 by what they are, see `INPUTS`; scales and bit widths are checked.

    Raises:
        UnsupportedModelError: One is computed from data, or is no scale or bit width.
    """
    names = next(form for form in INPUTS[node.op_type] if len(form) == len(node.input))
    found = {name: _parameter(node, at, name, draft) for at, name in enumerate(names) if at}
    for name, values in found.items():
        if name.endswith("scale"):
            _check_scale(node, values)
        elif name.endswith("width"):
            _check_bits(node, values)
    return found


def width(values: Float) -> int:
    """The bits that a checked bit width says."""
    return int(values.reshape(-1)[0])


def _parameter(node: onnx.NodeProto, position: int, name: str, draft: Draft) -> Float:
    """A constant input of a node in float32."""
    found = draft.array(node.input[position])
    if found is None:
        refuse(
            node,
            f"its {name} '{node.input[position]}' is computed from data",
            "export it with static scales, zero points and bit widths",
        )
    if found.dtype.kind not in "fiu" or not found.size:
        refuse(node, f"its {name} holds no numbers")
    return np.asarray(found, np.float32)


def _check_scale(node: onnx.NodeProto, scale: Float) -> None:
    """Checks that a scale is finite and above zero."""
    if not (np.isfinite(scale).all() and (scale > 0).all()):
        worst = scale.reshape(-1)[int(np.argmin(np.where(np.isfinite(scale), scale, -np.inf)))]
        refuse(node, f"a scale has to be finite and above zero; one is {worst:g}")


def _check_bits(node: onnx.NodeProto, given: Float) -> None:
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
    copy = copy_model(model)
    draft = Draft(copy)
    spelling = Spelling(draft)
    for node in copy.graph.node:
        if node.domain not in DOMAINS:
            draft.nodes.append(node)
        elif node.op_type in QUANT:
            spelling.quant(node)
        elif node.op_type == "BipolarQuant":
            spelling.bipolar(node, node.output[0])
        else:
            spelling.trunc(node, node.output[0])
    drop_imports(copy, DOMAINS)
    return draft.finish()


class Spelling:
    """Writes QONNX' operators in those of ONNX, at the end of a draft.

    Args:
        draft: Where the nodes go.
    """

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._has_round = not 0 < opset_of(draft.model) < 11
        self._constants = {
            node.output[0]: tensor
            for node in draft.graph.node
            if node.op_type == "Constant" and node.output and (tensor := constant_value(node)) is not None
        }

    def quant(self, node: onnx.NodeProto) -> None:
        """Writes a Quant."""
        x, scale, zero_point, width = node.input
        add, base = self._draft.add, base_name(node)
        signed, narrow = flag(node, "signed"), flag(node, "narrow")
        steps = add("Add", [add("Div", [x, scale], base), zero_point], base)
        known = self._known(width)
        if known is not None and np.all(known == 1) and signed:
            whole = self._sign(steps, self._number(1, base), base)
        else:
            low, high = self._bounds(width, base, signed=signed, narrow=narrow)
            clamped = add("Min", [add("Max", [steps, low], base), high], base)
            whole = self._rounded(clamped, rounding_of(node), base)
        add("Mul", [add("Sub", [whole, zero_point], base), scale], base, output=node.output[0])

    def bipolar(self, node: onnx.NodeProto, output: str) -> str:
        """Writes a BipolarQuant; returns the value it computes, ``output`` if that is given."""
        return self._sign(node.input[0], node.input[1], base_name(node), output)

    def trunc(self, node: onnx.NodeProto, output: str) -> str:
        """Writes a Trunc, of four parameters or (since version 2 of the domain) five; returns the value it computes."""
        add, base = self._draft.add, base_name(node)
        x, scale, zero_point, width = node.input[:4]
        second = len(node.input) == 6
        steps = add("Add", [add("Div", [x, scale], base), zero_point], base)
        whole = self._rounded(steps, "ROUND", base)
        if second:
            ratio = add("Log", [add("Div", [node.input[4], scale], base)], base)
            exponent = self._rounded(add("Div", [ratio, self._number(math.log(2), base)], base), "ROUND", base)
        else:
            exponent = add("Sub", [width, node.input[4]], base)
        factor = add("Pow", [self._number(2, base), exponent], base)
        short = add("Div", [whole, factor], base)
        if second:
            signed, narrow = flag(node, "signed", True), flag(node, "narrow", False)
            low, high = self._bounds(node.input[5], base, signed=signed, narrow=narrow)
            short = add("Min", [add("Max", [short, low], base), high], base)
        short = self._rounded(short, rounding_of(node), base)
        zero = add("Div", [zero_point, factor], base) if second else zero_point
        return add("Mul", [add("Sub", [short, zero], base), node.input[4] if second else scale], base, output=output)

    def _known(self, name: str) -> npt.NDArray[Any] | None:
        stored = self._constants.get(name)
        return array_in(stored) if stored is not None else self._draft.array(name)

    def _number(self, value: float, base: str) -> str:
        return self._draft.constant(np.asarray(value, np.float32), f"{base}_number")

    def _bounds(self, width: str, base: str, *, signed: bool, narrow: bool) -> tuple[str, str]:
        """The values that hold the least and the largest integer; the width may be any value."""
        add = self._draft.add
        exponent = add("Sub", [width, self._number(1, base)], base) if signed else width
        power = add("Pow", [self._number(2, base), exponent], base)
        if signed:
            low = add("Sub", [self._number(float(narrow), base), power], base)
            return low, add("Sub", [power, self._number(1, base)], base)
        return self._number(0, base), add("Sub", [power, self._number(1.0 + narrow, base)], base)

    def _sign(self, x: str, size: str, base: str, output: str = "") -> str:
        add = self._draft.add
        negative = add("Less", [x, self._number(0, base)], base)
        return add("Where", [negative, add("Neg", [size], base), size], base, output=output)

    def _rounded(self, x: str, rounding: str, base: str) -> str:
        add = self._draft.add
        if rounding in HALF_EVEN:
            if self._has_round:
                return add("Round", [x], base)
            magic = self._draft.constant(_MAGIC, f"{base}_magic")
            return add("Sub", [add("Add", [x, magic], base), magic], base)
        if rounding in ("CEIL", "FLOOR"):
            return add(rounding.capitalize(), [x], base)
        size, sign = add("Abs", [x], base), add("Sign", [x], base)
        if rounding == "UP":
            size = add("Ceil", [size], base)
        elif rounding in ("DOWN", "ROUND_TO_ZERO"):
            size = add("Floor", [size], base)
        else:
            up = rounding == "HALF_UP"
            shifted = add("Add" if up else "Sub", [size, self._number(0.5, base)], base)
            size = add("Floor" if up else "Ceil", [shifted], base)
        return add("Mul", [sign, size], base)


def drop_imports(model: onnx.ModelProto, domains: Collection[str]) -> None:
    """Takes domains off the model's list of operator sets, in place."""
    for at in range(len(model.opset_import) - 1, -1, -1):
        if model.opset_import[at].domain in domains:
            del model.opset_import[at]
