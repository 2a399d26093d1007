"""Why a node runs in float: read from the model's Q/DQ nodes, by the fusion conditions of onnxruntime's CPU provider.

Each condition was measured on onnxruntime 1.31.1; the tests prove every cause on the installed runtime.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
from onnx import TensorProto

from kenosis_ort.graph.constants import HEAVY
from kenosis_ort.graph.qdq import DQ, Q, QuantParams, SourceGraph, SourceNode
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.targets.proof import Cause, Why, why_planned_float

_FLOAT_BY_NAME: Final = frozenset({"FusedConv", "FusedGemm", "FusedMatMul"})
_BINARY: Final = frozenset({"Add", "Mul"})
_UNARY: Final = frozenset({"Sigmoid", "LeakyRelu", "Softmax", "AveragePool", "GlobalAveragePool"})
_VARIADIC: Final = frozenset({"Concat", "Where"})
_SAME_SCALE: Final = frozenset(
    {"MaxPool", "ReduceMax", "ReduceMin", "Reshape", "Transpose", "Flatten", "Slice", "Gather", "Squeeze", "Unsqueeze",
     "Expand", "Tile", "DepthToSpace", "SpaceToDepth", "Resize", "Split"}
)  # fmt: skip
_CLAMPS: Final = frozenset({"Relu", "Clip"})
INTEGER_OPS: Final = HEAVY | _BINARY | _UNARY | _VARIADIC | _SAME_SCALE | {"ArgMax"}
_WIDE: Final = frozenset({TensorProto.UINT16, TensorProto.INT16})
_NARROW: Final = frozenset({TensorProto.UINT4, TensorProto.INT4})
_SINCE: Final = {"MaxPool": 12, "ReduceMax": 12, "ReduceMin": 12}  # opset from which the operator takes 8-bit data
_PASS_THROUGH_LIMIT: Final = 8  # operators that move bytes only, one behind the other
_BIAS_TOLERANCE: Final = 0.02  # relative; 2 % off fuses, 5 % off does not


def why_float(node: SourceNode, graph: SourceGraph, plan: PlacementPlan | None, *, fused: str | None = None) -> Why:
    """The reason, one sentence, and its class.

    Args:
        node: The node that runs in float.
        graph: The model.
        plan: The plan behind the model, if there is one.
        fused: Type of the kernel where the runtime made one kernel of several operators.
    """
    why = why_planned_float(node, plan)
    if why is not None:
        return why
    if fused is not None:
        return f"the runtime fused it into {fused}, which has no integer kernel", Cause.UNSUPPORTED_OP
    if node.op_type in _CLAMPS:
        return _clamp(node, graph)
    if node.op_type in _FLOAT_BY_NAME:
        return f"com.microsoft.{node.op_type} is a float operator that the runtime never quantizes", Cause.PROTECTED
    if node.op_type not in INTEGER_OPS:
        return f"the runtime has no integer kernel for {node.op_type}", Cause.UNSUPPORTED_OP
    needed = _SINCE.get(node.op_type, 0)
    if graph.opset < needed:
        return f"{node.op_type} takes quantized data from opset {needed} on, the model is of {graph.opset}", Cause.OPSET
    mode = node.attribute("mode", "nearest") if node.op_type == "Resize" else "nearest"
    if mode != "nearest":
        return f"mode is {mode}; only nearest runs on integers", Cause.UNSUPPORTED_ATTRIBUTE
    of_heavy = [_attributes, _bias] if node.op_type in HEAVY else []
    checks: list[Callable[[SourceNode, SourceGraph], Why | None]] = [_inputs, *of_heavy, _output, _scales, _signed]
    for check in checks:
        found = check(node, graph)
        if found is not None:
            return found
    return (
        f"its inputs and outputs are quantized, yet {node.op_type} was not fused: no known rule explains it",
        Cause.UNKNOWN,
    )


# ---- inputs -------------------------------------------------------------------------------------------------------


def _data_inputs(node: SourceNode) -> list[tuple[int, str]]:
    values = list(enumerate(node.proto.input))
    if node.op_type in HEAVY | _BINARY:
        values = values[:2]
    elif node.op_type == "Where":
        values = values[1:3]
    elif node.op_type != "Concat":
        values = values[:1]
    return [(index, value) for index, value in values if value]


def _inputs(node: SourceNode, graph: SourceGraph) -> Why | None:
    kinds: set[int | None] = set()
    for index, value in _data_inputs(node):
        dq = graph.dq_of(value)
        weight = node.op_type in HEAVY and index == 1
        if dq is None:
            if weight and value in graph.initializers:
                return f"its weights '{value}' are float", Cause.FLOAT_WEIGHT
            if value in graph.initializers:
                return f"its constant input {index} '{value}' is float, without DQ", Cause.FLOAT_INPUT
            maker = graph.producer.get(value)
            by = "" if maker is None else f"{maker.op_type} '{maker.label}' makes it, and no Q stands between"
            return f"its input {index} '{value}' is float: {by or 'a graph input without Q'}", Cause.FLOAT_INPUT
        params = graph.params(dq)
        if params.elem_type in _WIDE:
            return f"its input {index} '{value}' is quantized to 16 bit", Cause.SIXTEEN_BIT
        if params.elem_type in _NARROW:
            return f"its input {index} '{value}' is quantized to 4 bit", Cause.WEIGHT_TYPE
        if dq.proto.input[0] in graph.initializers:
            if not weight and node.op_type in _BINARY and params.elem_type == TensorProto.INT8:
                return f"its constant input {index} '{value}' is int8, not uint8", Cause.TYPE_MISMATCH
        elif params.scale is not None and params.scale.size > 1:
            return f"its input {index} '{value}' is quantized per channel", Cause.UNSUPPORTED_ATTRIBUTE
        if not weight:
            kinds.add(params.elem_type)
    if len(kinds) > 1:
        return "its inputs are quantized to different types", Cause.TYPE_MISMATCH
    return None


def _attributes(node: SourceNode, _: SourceGraph) -> Why | None:
    if node.op_type != "Gemm":
        return None
    has_bias = len(node.proto.input) > 2 and bool(node.proto.input[2])
    why = ""
    if node.attribute("transA", 0):
        why = "transA is set, which the integer kernel does not take"
    elif has_bias and float(node.attribute("alpha", 1.0)) != 1.0:
        why = "alpha is not 1 and there is a bias"
    elif has_bias and float(node.attribute("beta", 1.0)) != 1.0:
        why = "beta is not 1"
    return (why, Cause.UNSUPPORTED_ATTRIBUTE) if why else None


def _bias(node: SourceNode, graph: SourceGraph) -> Why | None:
    if node.op_type == "MatMul" or len(node.proto.input) < 3 or not node.proto.input[2]:
        return None
    value = node.proto.input[2]
    dq = graph.dq_of(value)
    if dq is None:
        why = _output(node, graph)
        return None if why is None else (f"its bias '{value}' is float, and {why[0]}", Cause.BIAS_TYPE)
    params = graph.params(dq)
    if params.elem_type != TensorProto.INT32:
        return f"its bias '{value}' is not int32", Cause.BIAS_TYPE
    data, weight = graph.dq_of(node.proto.input[0]), graph.dq_of(node.proto.input[1])
    if node.op_type != "Conv" or data is None or weight is None:
        return None
    a, b = graph.params(data).scale, graph.params(weight).scale
    if a is None or b is None or params.scale is None:
        return None
    expected = a.ravel() * b.ravel()
    if params.scale.size not in (1, expected.size) or np.any(
        np.abs(params.scale.ravel() / expected - 1) > _BIAS_TOLERANCE
    ):
        return f"the scale of its int32 bias '{value}' is not input scale x weight scale", Cause.BIAS_SCALE
    return None


# ---- outputs ------------------------------------------------------------------------------------------------------


def _output(node: SourceNode, graph: SourceGraph) -> Why | None:
    for value in node.proto.output:
        if not value:
            continue
        readers = graph.consumers.get(value, [])
        is_output = value in graph.outputs
        if not readers:
            if is_output:
                return f"its output '{value}' is a graph output without Q", Cause.GRAPH_OUTPUT
            continue
        if is_output:
            return f"its output '{value}' is also a graph output, in float", Cause.SECOND_CONSUMER
        quantizers = [r for r in readers if r.op_type == Q]
        if len(readers) > 1:
            if len(quantizers) == len(readers):
                return f"its output '{value}' has {len(readers)} different Q nodes", Cause.SECOND_CONSUMER
            names = ", ".join(f"{r.op_type} '{r.label}'" for r in readers if r.op_type != Q)
            return f"its output '{value}' has {len(readers)} consumers, {names} among them", Cause.SECOND_CONSUMER
        reader = readers[0]
        if reader.op_type == Q:
            if graph.params(reader).elem_type in _WIDE:
                return f"its output '{value}' is quantized to 16 bit", Cause.SIXTEEN_BIT
            continue
        if reader.op_type in _CLAMPS:
            found = _clamp_behind(reader, graph)
            if found is not None:
                return found
            continue
        if node.op_type == "MatMul" and reader.op_type == "Add" and _adds_constant(reader, value, graph):
            return _matmul_bias(reader, value, graph)
        return (
            f"no Q on its output '{value}': {reader.op_type} '{reader.label}' reads it, which is not absorbed",
            Cause.FLOAT_OUTPUT,
        )
    return None


def _adds_constant(add: SourceNode, value: str, graph: SourceGraph) -> bool:
    others = [v for v in add.proto.input if v != value]
    return len(others) == 1 and (others[0] in graph.initializers or graph.is_dq_constant(others[0]))


def _matmul_bias(add: SourceNode, value: str, graph: SourceGraph) -> Why:
    """Why MatMul + Add(bias), which the runtime turns into one Gemm, stays float."""
    behind = _output(add, graph)
    bias = next(v for v in add.proto.input if v != value)
    if behind is None:
        return f"the runtime did not join it with Add '{add.label}' into an integer Gemm", Cause.FLOAT_OUTPUT
    if bias in graph.initializers:
        return f"Add '{add.label}' behind it adds a float bias, and {behind[0]}", Cause.BIAS_TYPE
    return f"Add '{add.label}' behind it: {behind[0]}", behind[1]


def _clamp_behind(clamp: SourceNode, graph: SourceGraph) -> Why | None:
    """Why a Relu or Clip behind a node is not absorbed into its requantization; None if it is absorbable."""
    what = f"{clamp.op_type} '{clamp.label}' behind it"
    value = clamp.proto.output[0]
    readers = graph.consumers.get(value, [])
    if value in graph.outputs and not readers:
        return f"{what} is a graph output without Q", Cause.GRAPH_OUTPUT
    if value in graph.outputs:
        return f"{what} is also a graph output, in float", Cause.SECOND_CONSUMER
    if any(r.op_type != Q for r in readers):
        names = ", ".join(f"{r.op_type} '{r.label}'" for r in readers if r.op_type != Q)
        return f"{what} has no Q: {names} reads it in float", Cause.FLOAT_OUTPUT
    if len(readers) != 1:
        return f"{what} has {len(readers)} consumers", Cause.SECOND_CONSUMER
    return _not_redundant(clamp, graph.params(readers[0]), graph, what)


def _not_redundant(clamp: SourceNode, q: QuantParams, graph: SourceGraph, what: str) -> Why | None:
    if q.scale is None or q.zero_point is None or q.elem_type is None:
        return f"the scale behind {what} is not constant", Cause.ACTIVATION
    if q.elem_type in _WIDE:
        return f"{what} is quantized to 16 bit", Cause.SIXTEEN_BIT
    if q.scale.size != 1:
        return f"{what} is quantized per channel", Cause.UNSUPPORTED_ATTRIBUTE
    low, high = (-128, 127) if q.elem_type == TensorProto.INT8 else (0, 255)
    scale, zero = float(q.scale.ravel()[0]), int(q.zero_point.ravel()[0])
    if clamp.op_type == "Relu":
        if zero != low:
            return (f"{what} is not absorbable: the zero point of its Q is {zero}, not {low}", Cause.ACTIVATION)
        return None
    bounds = clip_bounds(clamp, graph)
    if bounds is None:
        return f"the bounds of {what} are not constant", Cause.ACTIVATION
    if q.scale.ndim:
        return f"{what} is not absorbable: the scale of its Q has shape {list(q.scale.shape)}, not []", Cause.ACTIVATION
    if np.rint(bounds[0] / scale) + zero > low or np.rint(bounds[1] / scale) + zero < high:
        reach = f"{(low - zero) * scale:.4g} to {(high - zero) * scale:.4g}"
        limits = f"{bounds[0]:.4g} to {bounds[1]:.4g}"
        return f"{what} is not absorbable: its Q reaches from {reach}, beyond its bounds {limits}", Cause.ACTIVATION
    return None


def clip_bounds(clamp: SourceNode, graph: SourceGraph) -> tuple[float, float] | None:
    """The bounds of a Clip (attributes or constant inputs, also behind DQ), None if they are not constant."""
    found = []
    for index, name in ((1, "min"), (2, "max")):
        default = -np.inf if name == "min" else np.inf
        value = clamp.attribute(name, default)
        if len(clamp.proto.input) > index and clamp.proto.input[index]:
            array = graph.array(clamp.proto.input[index])
            if array is None or array.size != 1:
                return None
            value = array.ravel()[0]
        found.append(float(value))
    return found[0], found[1]


def _clamp(node: SourceNode, graph: SourceGraph) -> Why:
    """Why a Relu or Clip has a float kernel of its own."""
    maker = graph.producer.get(node.proto.input[0])
    readers = graph.consumers.get(node.proto.output[0], [])
    if not any(r.op_type == Q for r in readers):
        return f"no Q on its output '{node.proto.output[0]}'", Cause.FLOAT_OUTPUT
    found = _clamp_behind(node, graph)
    if found is not None:
        return found
    if maker is not None and maker.op_type != DQ and len(graph.consumers.get(node.proto.input[0], [])) > 1:
        return f"'{node.proto.input[0]}' has other consumers", Cause.SECOND_CONSUMER
    return f"'{node.proto.input[0]}' is float and its producer is not an integer kernel", Cause.FLOAT_INPUT


# ---- scales and types ---------------------------------------------------------------------------------------------


def _output_q(value: str, graph: SourceGraph) -> SourceNode | None:
    for _ in range(3):
        readers = graph.consumers.get(value, [])
        if len(readers) != 1:
            return None
        if readers[0].op_type == Q:
            return readers[0]
        if readers[0].op_type not in _CLAMPS:
            return None
        value = readers[0].proto.output[0]
    return None


def _scales(node: SourceNode, graph: SourceGraph) -> Why | None:
    dq = graph.dq_of(node.proto.input[0]) if node.proto.input else None
    if dq is None:
        return None
    inside = graph.params(dq)
    for value in node.proto.output:
        quantizer = _output_q(value, graph) if value else None
        if quantizer is None:
            continue
        outside = graph.params(quantizer)
        if node.op_type in _SAME_SCALE and not inside.same(outside):
            what = f"the scale or zero point of its output '{value}' differs from its input's"
            return f"{what}; {node.op_type} runs on integers only where they are the same", Cause.SCALE_MISMATCH
        if node.op_type != "Where" and inside.elem_type != outside.elem_type:
            return f"its input and its output '{value}' are quantized to different types", Cause.TYPE_MISMATCH
    return None


def _signed(node: SourceNode, graph: SourceGraph) -> Why | None:
    values = [graph.dq_of(v) for _, v in _data_inputs(node)]
    quantized = [dq.proto.input[0] for dq in values if dq is not None]
    quantized += [q.proto.output[0] for v in node.proto.output if (q := _output_q(v, graph)) is not None]
    for value in quantized:
        if graph.types.get(value) == TensorProto.INT8 and value not in graph.initializers and _branches(value, graph):
            return (
                f"'{value}' is int8 with several consumers, which the runtime does not turn into uint8 on x86-64",
                Cause.SIGNED_BRANCH,
            )
    return None


def _branches(value: str, graph: SourceGraph) -> bool:
    """Whether a quantized value has several consumers, looking through operators that move bytes only."""
    for _ in range(_PASS_THROUGH_LIMIT):
        readers = [n for r in graph.consumers.get(value, []) for n in graph.consumers.get(r.proto.output[0], [])]
        if len(readers) != 1:
            return len(readers) > 1
        quantizer = _output_q(readers[0].proto.output[0], graph) if readers[0].op_type in _SAME_SCALE else None
        if quantizer is None:
            return False
        value = quantizer.proto.output[0]
    return False
