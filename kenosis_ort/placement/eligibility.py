"""Eligibility of nodes for integer kernels, and the bits of their values.

A node is held against the target's rules, by its operands, types and the caller's options; each predicate behind a
`Requirement` gives the reason why a node misses it. Weights have the bits of the node that reads them, activations
those of the node that computes them. What enters the graph has 8, as in the paper's model zoo, and so have constant
operands and tensors of which the caller dictates the parameters. Values that share their parameters share their bits,
the most that any of them asks for. Source: Pappalardo et al., "QONNX", 2022, table III.

Stage 6 keeps what is not picture, sound or text out of int8.

Flood-fill from secondary inputs (scale factors, image shapes, masks, states) and from everything shape-like:
a node all of whose data derives from them stays float, and so does the node where it meets the main data, which
is where the flood stops. Source: Kenosis paper, stage 6, "Non-vision tensor protection".

Nodes whose data, weights or products are too small or large for float32 scales stay float. An integer kernel multiplies
the scales of its data and its weights in float32. Where that underflows or overflows, as with weights near 1e-36, the
kernel and the int32 bias beside it compute on different grids.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from kenosis_ort.errors import OptionError, did_you_mean
from kenosis_ort.graph.constants import Is, having
from kenosis_ort.graph.qdq import exact_grid
from kenosis_ort.graph.view import CAPTURED, FLOAT, Consumer, GraphView, ir
from kenosis_ort.graph.walk import MAIN_DOMAINS
from kenosis_ort.options import BYTE, Widths
from kenosis_ort.placement.constraints import Constraints, channel_axis
from kenosis_ort.plan import Decision, EdgeRole, How, Kind, PlacementPlan
from kenosis_ort.targets.vocabulary import FusionRule, NodeClass, Requirement, Role

_PASS_THROUGH = having(Is.MOVE) | {"Cast", "Expand", "Gather", "Pad", "Slice", "Tile"}


def with_widths(plan: PlacementPlan, view: GraphView, widths: Widths, explicit: Collection[str] = ()) -> PlacementPlan:
    """The plan with the bits of every quantized edge.

    Args:
        plan: The plan.
        view: Its model.
        widths: What the caller wants.
        explicit: Names of tensors whose parameters are the caller's own.
    """
    if widths.are_bytes:
        return plan
    makers = {value.name: node for node in view.nodes for value in node.outputs}
    bits: dict[tuple[bool, str], int] = {}  # by whether it is a weight, and the value whose parameters it has
    asked: list[tuple[Decision, tuple[bool, str] | None]] = []
    for d in plan.decisions:
        weight, value = d.role is EdgeRole.WEIGHT, d.edge.value
        quantized = d.role is not EdgeRole.BIAS and d.how in (How.OWN, How.SHARED, How.DEQUANTIZED)
        key = (weight, value if weight else d.provider or value) if weight or quantized else None
        asked.append((d, key))
        if key is None:
            continue
        wanted = BYTE
        if value not in explicit and weight:
            wanted = widths.of(d.edge.consumer, weights=True)
        elif value not in explicit and value in makers:
            wanted = _of_output(makers[value], widths)
        bits[key] = max(wanted, bits.get(key, 0))
    return replace(plan, decisions=tuple(replace(d, bits=BYTE if key is None else bits[key]) for d, key in asked))


def _of_output(node: ir.Node, widths: Widths) -> int:
    """The bits of what a node computes.

    An activation function has those of the node in front where nothing is said of itself; what only moves a value has
    the value's.
    """
    passes_through, name = node.op_type in _PASS_THROUGH, str(node.name)
    if (passes_through or node.op_type in ("Relu", "Clip")) and name not in widths.by_node:
        source = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
        if source is not None or passes_through:
            return BYTE if source is None else _of_output(source, widths)
    return widths.of(name, weights=False)


def _constant_weight(view: GraphView, node: ir.Node) -> str | None:
    weight = node.inputs[1] if len(node.inputs) > 1 else None
    if weight is None or not weight.is_initializer():
        return "its second operand is not a constant weight"
    if weight.dtype != FLOAT:
        return f"its weight '{weight.name}' is {weight.dtype}, not float32"
    dims = view.dims(weight)
    if not dims or 0 in dims:
        return f"its weight '{weight.name}' is empty or a scalar"
    if not math.isfinite(view.largest(weight)):
        return f"its weight '{weight.name}' holds NaN or infinity"
    return None


def _constant_or_no_bias(view: GraphView, node: ir.Node) -> str | None:
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is None:
        return None
    if not bias.is_initializer():
        return f"its bias '{bias.name}' is not a constant"
    channels = _out_channels(view, node)
    rows = (1, channels) if node.op_type == "Gemm" else None
    if view.dims(bias) not in ((channels,), rows):
        return f"its bias '{bias.name}' is not a vector of one value a channel"
    if not math.isfinite(view.largest(bias)):
        return f"its bias '{bias.name}' holds NaN or infinity"
    return None


def _out_channels(view: GraphView, node: ir.Node) -> int | None:
    dims, axis = view.dims(node.inputs[1]) or (), channel_axis(node)
    channels = dims[axis] if axis < len(dims) else None
    groups = node.attributes.get_int("group", 1) if node.op_type == "ConvTranspose" else 1
    return None if channels is None else channels * groups


def _unit_alpha(_: GraphView, node: ir.Node) -> str | None:
    if node.attributes.get_float("alpha", 1.0) != 1.0:
        return "alpha is not 1: the runtime would run it in float"
    return None


def _no_trans_a(_: GraphView, node: ir.Node) -> str | None:
    return "its first operand is transposed" if node.attributes.get_int("transA", 0) else None


def _weight_rank_2(view: GraphView, node: ir.Node) -> str | None:
    weight = node.inputs[1]
    return "its weight is not a matrix" if weight is None or view.rank(weight) != 2 else None


def _resize_nearest(_: GraphView, node: ir.Node) -> str | None:
    mode = node.attributes.get_string("mode", "nearest")
    return f"{mode} interpolation runs in float" if mode != "nearest" else None


def _one_output(view: GraphView, node: ir.Node) -> str | None:
    used = [v for v in node.outputs[1:] if v.name and (view.consumers(v) or view.is_output(v))]
    return f"its further output '{used[0].name}' is used" if used else None


def _whole_pool(view: GraphView, node: ir.Node) -> str | None:
    if "dilations" in node.attributes:
        return "with dilations the integer pool does not load"
    dims = view.dims(node.outputs[0])
    if dims is None or len(dims) < 3 or any(d != 1 for d in dims[2:]):
        return "a pool over parts of the picture is no faster in integer"
    return None


def _constants(node: ir.Node) -> list[ir.Value]:
    return [value for value in node.inputs if value is not None and value.is_initializer()]


def _scalar_constant(view: GraphView, node: ir.Node) -> str | None:
    several = [v.name for v in _constants(node) if view.content(v).size != 1]
    return f"its constant operand '{several[0]}' holds several values, which one scale would blur" if several else None


def _exact_constant(view: GraphView, node: ir.Node) -> str | None:
    several = [v.name for v in _constants(node) if exact_grid(view.content(v)) is None]
    return f"its constant operand '{several[0]}' holds several values, which 8 bits would blur" if several else None


def _no_constant(_: GraphView, node: ir.Node) -> str | None:
    found = [v.name for v in _constants(node)]
    return f"its operand '{found[0]}' is constant" if found else None


def _clip_at_zero(view: GraphView, node: ir.Node) -> str | None:
    low, high = view.activation_bounds(node) or (None, None)
    return None if low == 0.0 and (high is None or high > 0.0) else "its bounds are not 0 and a positive constant"


_PREDICATES: Final[dict[Requirement, Callable[[GraphView, ir.Node], str | None]]] = {
    Requirement.CONSTANT_WEIGHT: _constant_weight,
    Requirement.CONSTANT_OR_NO_BIAS: _constant_or_no_bias,
    Requirement.UNIT_ALPHA: _unit_alpha,
    Requirement.NO_TRANS_A: _no_trans_a,
    Requirement.WEIGHT_RANK_2: _weight_rank_2,
    Requirement.RESIZE_NEAREST: _resize_nearest,
    Requirement.ONE_OUTPUT: _one_output,
    Requirement.WHOLE_POOL: _whole_pool,
    Requirement.SCALAR_CONSTANT: _scalar_constant,
    Requirement.EXACT_CONSTANT: _exact_constant,
    Requirement.NO_CONSTANT: _no_constant,
    Requirement.CLIP_AT_ZERO: _clip_at_zero,
}


_SECONDARY_NAME = re.compile(
    r"scale_?factor|im_?shape|image_?shape|im_?info|im_?scale|orig_?(target_)?size|mask|token_type|position|segment"
    r"|(^|[_./])(sr|h0|c0|hx|cx)$|sample_?rate|(^|[_./])len(gth)?s?$|_lengths?$|state|hidden|cache|past|mems",
    re.IGNORECASE,
)
_SHAPE_SOURCES = frozenset({"Shape", "Size", "NonZero", "ConstantOfShape", "EyeLike", "Range"})
# Inputs that steer an operator rather than feed it: what is computed for them alone stays float.
_STEERING = {
    operator: positions
    for positions, operators in (
        ((0,), "Where If"),
        ((0, 1), "Loop"),
        ((0, 1, 2), "OneHot Range"),
        ((0, 1, 2, 3, 4), "NonMaxSuppression"),
        ((1,), "CumSum Expand Gather GatherElements GatherND GridSample ReduceMax ReduceMean ReduceMin ReduceSum"),
        ((1,), "Reshape ScatterElements ScatterND Split Squeeze Tile TopK Trilu Unsqueeze Upsample"),
        ((1, 2), "Clip Dropout RoiAlign"),
        ((1, 2, 3), "Pad Resize"),
        ((1, 2, 3, 4), "Slice"),
    )
    for operator in operators.split()
}


def secondary_inputs(view: GraphView, primary: Sequence[str] | None) -> dict[str, str]:
    """The graph inputs that do not carry the data proper, name to reason.

    Args:
        view: The prepared model.
        primary: The caller's own list of primary inputs; None to tell by name and shape.

    Raises:
        OptionError: ``primary`` names an input that does not exist.
    """
    names = [str(v.name) for v in view.inputs]
    if primary is not None:
        for name in primary:
            if name not in names:
                what = f"primary_inputs names '{name}', which is no input of the model.{did_you_mean(name, names)}"
                raise OptionError(what, where="primary_inputs", fix=f"inputs are {names}")
        return {n: "not among the caller's primary_inputs" for n in names if n not in primary}
    found = {n: f"'{n}' is named like a secondary input" for n in names if _SECONDARY_NAME.search(n)}
    ranks = [view.rank(v) or 0 for v in view.inputs if str(v.name) not in found]
    highest = max(ranks, default=0)
    if highest >= 3:
        for v in view.inputs:
            dims = view.dims(v)
            small = dims is not None and len(dims) <= 2 and all(d is None or d <= 8 for d in dims[1:])
            if str(v.name) not in found and small:
                found[str(v.name)] = f"'{v.name}' is a small vector beside the {highest}-dimensional data"
    return found if len(found) < len(names) else {}


def protect(view: GraphView, primary: Sequence[str] | None) -> dict[str, str]:
    """The nodes that must stay float because of where their data comes from, node name to reason."""
    protected: dict[str, str] = {}
    by_name = secondary_inputs(view, primary)
    origin = {v: by_name[str(v.name)] for v in view.inputs if str(v.name) in by_name}  # why, by protected value
    for node in view.nodes:
        if node.op_type in _SHAPE_SOURCES:
            why = f"derives from a shape (by {node.op_type})"
        else:
            data = fed_by(view, node)
            tainted = [v for v in data if v in origin]
            if not tainted:
                continue
            why = origin[tainted[0]]
            if len(tainted) < len(data):
                protected[str(node.name)] = f"mixes main data with a protected tensor: {why}"
                continue
        protected[str(node.name)] = why
        for out in node.outputs:
            origin[out] = why
    steering: set[ir.Value] = set()
    for node in reversed(view.nodes):
        for out in node.outputs:
            uses = view.consumers(out)
            if uses and not view.is_output(out) and all(_steers(c, steering) for c in uses):
                steering.add(out)
        if node.outputs and steering.issuperset(node.outputs):
            protected.setdefault(str(node.name), "computes a shape, a bound or an index, not data")
    return protected


def _steers(reader: Consumer, steering: set[ir.Value]) -> bool:
    """Whether a value steers the node that reads it, or feeds what steers further ones."""
    if reader.index in _STEERING.get(reader.node.op_type, ()):
        return True
    outputs = reader.node.outputs
    return reader.index != CAPTURED and bool(outputs) and steering.issuperset(outputs)


def fed_by(view: GraphView, node: ir.Node) -> list[ir.Value]:
    """The non-constant values that feed (rather than steer) a node, those that its bodies read included."""
    steering = _STEERING.get(node.op_type, ())
    fed = [v for i, v in enumerate(node.inputs) if v is not None and i not in steering]
    return [v for v in (*fed, *view.captured_by(node)) if not v.is_initializer()]


_ATTENTION = "matmul-activations"


def classify(
    constraints: Constraints, protected: Mapping[str, str], nodes: Sequence[ir.Node] | None = None
) -> dict[str, NodeClass]:
    """Class of every main-graph node, by node name.

    Args:
        constraints: The caller's wishes.
        protected: Node name to reason for nodes that must stay float.
        nodes: Those to class; None for all.
    """
    classes = {}
    for node in constraints.view.nodes if nodes is None else nodes:
        rules = constraints.target.rules_of(node.op_type) or (None,)
        found = [_by_rule(constraints, protected, node, rule) for rule in rules]
        classes[str(node.name)] = next((c for c in found if c.role not in (Role.FLOAT, Role.ISLAND)), found[0])
    return classes


def _by_rule(
    constraints: Constraints, protected: Mapping[str, str], node: ir.Node, rule: FusionRule | None
) -> NodeClass:
    view, target = constraints.view, constraints.target
    data = tuple(v for v in node.inputs if v is not None and v.dtype == FLOAT and not v.is_initializer())
    if rule is None or (node.domain not in MAIN_DOMAINS and rule.role is not Role.ISLAND):
        named = not node.domain or node.op_type.startswith(f"{node.domain}.")
        reason = f"{target.name} has no integer kernel for {'' if named else f'{node.domain}.'}{node.op_type}"
        return NodeClass(node, Role.FLOAT, "unsupported-op", reason, data)
    # A cheap float operator stays transparent for the integer domain around it, whoever keeps it float.
    cheap = Role.FLOAT if rule.role in (Role.ANCHOR, Role.FLOAT) else Role.ISLAND
    wish = _stays_float(constraints, protected, node, rule)
    if wish is not None:
        return NodeClass(node, cheap, *wish, data)
    if rule.role in (Role.ISLAND, Role.FLOAT):
        return NodeClass(node, rule.role, rule.id, rule.why, data)
    # What the integer kernel would read as quantized data.
    positions = range(len(node.inputs)) if rule.data_inputs is None else rule.data_inputs
    read = [node.inputs[i] for i in positions if i < len(node.inputs)]
    data = tuple(v for v in read if v is not None and not (rule.role is Role.BINARY and v.is_initializer()))
    if not data or not all(v.dtype == FLOAT for v in (*data, *node.outputs[:1])):
        return NodeClass(node, Role.FLOAT, "not-float32", "its data is not known to be float32", data)
    if any(v.is_initializer() for v in data):
        return NodeClass(node, cheap, "constant-operand", "its data input is a constant", data)
    if view.opset() < rule.min_opset:
        reason = f"needs opset {rule.min_opset}, the model has {view.opset()}"
        return NodeClass(node, cheap, rule.id, reason, data)
    failed = _unmet(constraints, node, rule)
    if failed is not None:
        return NodeClass(node, cheap, *failed, data)
    return NodeClass(node, rule.role, rule.id, rule.why, data)


def _stays_float(
    constraints: Constraints, protected: Mapping[str, str], node: ir.Node, rule: FusionRule
) -> tuple[str, str] | None:
    """The rule and reason by which the caller, protection or verification keeps a node float.

    A shape operator whose output a body reads takes part even so: it changes no value, and in float, behind a DQ, the
    session dies of it (rule pass-through-into-body-dies).
    """
    name, options = str(node.name), constraints.options
    if rule.role is Role.PASS_THROUGH and any(map(constraints.view.is_captured, node.outputs)):
        return None
    wish = options.closed(name, node.op_type)
    vanishes = rule.role in (Role.ISLAND, Role.ACTIVATION)  # never quantized themselves
    if wish is not None and (name in options.nodes_to_exclude or not vanishes):
        return wish
    if name in constraints.requested or constraints.weights_only(node) is not None:
        return None
    if name in protected:
        return "protected-input", protected[name]
    return ("verified-float", options.keep_float[name]) if name in options.keep_float else None


def _unmet(constraints: Constraints, node: ir.Node, rule: FusionRule) -> tuple[str, str] | None:
    """The rule and reason by which no integer kernel fits a node, or what the caller says about its tensors."""
    for requirement in rule.requires:
        reason = _PREDICATES[requirement](constraints.view, node)
        if reason is not None:
            matmul = node.op_type == "MatMul" and requirement is Requirement.CONSTANT_WEIGHT
            return (_ATTENTION if matmul and _ATTENTION in dict(constraints.target.facts) else rule.id), reason
    clash = constraints.clashing_types(node)
    if clash is not None:
        return "caller-tensor-types", clash
    return constraints.weights_only(node) if rule.role is Role.ANCHOR else None


_LEAST, _MOST = 1e-30, 1e35  # what is left of float32 when 8-bit steps, sums and a product of scales are taken off


def beyond_scales(view: GraphView, plan: PlacementPlan, ranges: Mapping[str, tuple[float, float]]) -> dict[str, str]:
    """The integer nodes that have to stay float, with the reason.

    Args:
        view: The prepared model.
        plan: Its placement.
        ranges: Calibrated (low, high) by value name.
    """
    found: dict[str, str] = {}
    data: dict[str, float] = {}
    weights: dict[str, str] = {}
    integer = {n.node for n in plan.nodes if n.kind in (Kind.INTEGER, Kind.PASS_THROUGH)}
    for d in plan.decisions:
        node = d.edge.consumer
        if node not in integer or d.how not in (How.OWN, How.SHARED):
            continue
        if d.role is EdgeRole.WEIGHT:
            weights[node] = d.edge.value
        elif d.edge.value in ranges:
            largest = max(abs(end) for end in ranges[d.edge.value])
            data[node] = max(largest, data.get(node, 0.0))
            if not _fits(largest):
                found[node] = f"its data '{d.edge.value}' reaches {largest:.1e}: beyond what scales hold"
    stored = view.graph.initializers
    reach = {name: view.largest(stored[name]) for name in dict.fromkeys(weights.values()) if name in stored}
    for node, name in weights.items():
        largest = reach.get(name, 0.0)
        if not _fits(largest):
            found[node] = f"its weight '{name}' reaches {largest:.1e}: beyond what scales hold"
        elif not _fits(largest * data.get(node, 0.0)):
            found.setdefault(node, f"its data times its weight '{name}' is beyond what scales hold")
    return found


def _fits(largest: float) -> bool:
    return largest == 0.0 or _LEAST <= largest <= _MOST
