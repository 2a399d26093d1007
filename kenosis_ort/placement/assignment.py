"""Which nodes run in integer and which values carry Q/DQ: what the placement rests on before ranges are known.

Stage 6: keeps what is not picture, sound or text out of int8.

Flood-fill from secondary inputs (scale factors, image shapes, masks, states) and from everything shape-like:
a node all of whose data derives from them stays float, and so does the node where it meets the main data, which
is where the flood stops. Source: Kenosis paper, stage 6, "Non-vision tensor protection".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from kenosis_ort.errors import OptionError, did_you_mean
from kenosis_ort.graph.constants import LAYERS
from kenosis_ort.graph.view import CAPTURED, Consumer, GraphView, ir
from kenosis_ort.options import PlacementOptions
from kenosis_ort.placement.absorption import Absorption
from kenosis_ort.placement.constraints import Constraints, constrain
from kenosis_ort.placement.domain import Domain
from kenosis_ort.placement.eligibility import WEIGHTS_ONLY, classify
from kenosis_ort.targets import model as targets
from kenosis_ort.targets.model import NodeClass

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
    origin = {id(v): by_name[str(v.name)] for v in view.inputs if str(v.name) in by_name}  # why, by protected value
    for node in view.nodes:
        if node.op_type in _SHAPE_SOURCES:
            why = f"derives from a shape (by {node.op_type})"
        else:
            data = fed_by(view, node)
            tainted = [v for v in data if id(v) in origin]
            if not tainted:
                continue
            why = origin[id(tainted[0])]
            if len(tainted) < len(data):
                protected[str(node.name)] = f"mixes main data with a protected tensor: {why}"
                continue
        protected[str(node.name)] = why
        for out in node.outputs:
            origin[id(out)] = why
    steering: set[int] = set()
    for node in reversed(view.nodes):
        for out in node.outputs:
            uses = view.consumers(out)
            if uses and not view.is_output(out) and all(_steers(c, steering) for c in uses):
                steering.add(id(out))
        if node.outputs and all(id(v) in steering for v in node.outputs):
            protected.setdefault(str(node.name), "computes a shape, a bound or an index, not data")
    return protected


def _steers(reader: Consumer, steering: set[int]) -> bool:
    """Whether a value steers the node that reads it, or feeds what steers further ones."""
    if reader.index in _STEERING.get(reader.node.op_type, ()):
        return True
    outputs = reader.node.outputs
    return reader.index != CAPTURED and bool(outputs) and all(id(v) in steering for v in outputs)


def fed_by(view: GraphView, node: ir.Node) -> list[ir.Value]:
    """The non-constant values that feed (rather than steer) a node, those that its bodies read included."""
    steering = _STEERING.get(node.op_type, ())
    fed = [v for i, v in enumerate(node.inputs) if v is not None and i not in steering]
    return [v for v in (*fed, *view.captured_by(node)) if not view.is_constant(v)]


class Assignment:
    """What each node of one model is on one target under one set of options.

    Args:
        view: The prepared model.
        target: The runtime's table.
        options: The caller's wishes.
        base: The assignment of the same view under the same options but with an empty ``keep_float``; None for none.
            What does not depend on that is taken from it.

    Attributes:
        protected: Nodes that stay float because of where their data comes from, with the reason.
        by_rules: Each node's class by the target's rules alone, by name.
        constraints: What the caller asks for of single nodes and values.
        classes: Each node's class, by name.
        absorption: Which activations and shortcuts kernels would take in.
        domain: The nodes that run in integer.
        biased: Adds that only put a bias on an integer MatMul: Add name to (MatMul, bias position).
        absorbed: Names of the nodes that do vanish into an integer kernel.
        requested: Nodes that are quantized because the caller insists, with the option that says so.
        quantized: The values that carry Q/DQ, by name.
    """

    def __init__(
        self, view: GraphView, target: targets.Target, options: PlacementOptions, base: Assignment | None = None
    ) -> None:
        self.view, self.target, self.options = view, target, options
        # What each node could become by the rules, the caller's words and the data that reach it.
        if base is None:
            protects = options.protect_inputs and not target.whole
            self.protected: dict[str, str] = protect(view, options.primary_inputs) if protects else {}
            self.constraints: Constraints = constrain(view, target, options)
            self.by_rules = classify(self.constraints, self.protected)
        else:
            self.protected, self.constraints = base.protected, replace(base.constraints, options=options)
            left = [node for node in view.nodes if str(node.name) in options.keep_float]
            self.by_rules = {**base.by_rules, **classify(self.constraints, self.protected, left)}
        named = {name: c for name, c in self.by_rules.items() if name in self.constraints.requested}
        self.classes: dict[str, NodeClass] = {**target.hooks.reclass(view, self.by_rules), **named}
        # What kernels take in, and which nodes run in integer then.
        self.absorption = Absorption(self.constraints, self.classes)
        self._class_activations()
        self.domain = Domain(self.classes, self.absorption)
        again = dict(target.hooks.reclass_integers(view, self.classes, self.domain.integer))
        if again != self.classes:
            self.classes = again
            self.domain = Domain(again, self.absorption)
        # What carries Q and DQ.
        self.biased = self._matmul_biases()
        self.absorbed = {name for name, producer in self.absorption.by_activation.items() if self._takes_in(producer)}
        self.requested = self._find_requested()
        self.quantized = self._find_quantized()
        # An activation that could not vanish but lies between quantized values: Q on both sides of it.
        for node in view.nodes:
            if str(node.name) in self.absorption.by_activation and str(node.name) not in self.absorbed:
                self.absorption.limits.pop(str(node.outputs[0].name), None)

    def _class_activations(self) -> None:
        """Classes what kernels take in as activations; on a target of integers alone, the others as operators."""
        taken = {name: self.classes[name] for name in self.absorption.by_activation}
        self.classes.update({name: replace(c, role=targets.Role.ACTIVATION) for name, c in taken.items()})
        if self.target.whole:
            apart = {n: c for n, c in self.classes.items() if c.role is targets.Role.ACTIVATION and self._is_apart(c)}
            self.classes.update({name: replace(c, role=targets.Role.UNARY) for name, c in apart.items()})

    def is_integer(self, node: ir.Node | None) -> bool:
        """Whether a node runs in integer."""
        return node is not None and str(node.name) in self.domain.integer

    def carries(self, node: ir.Node | None) -> bool:
        """Whether a node reads and writes through Q/DQ, whatever kernel the runtime has for it."""
        return node is not None and (str(node.name) in self.domain.integer or str(node.name) in self.requested)

    def data(self, node: ir.Node) -> tuple[ir.Value, ...]:
        """The values that a node reads through Q/DQ."""
        if str(node.name) in self.constraints.requested and str(node.name) not in self.domain.integer:
            return tuple(v for v in fed_by(self.view, node) if self.view.is_float32(v))
        return self.classes[str(node.name)].data

    def q_values(self, node: ir.Node) -> list[ir.Value]:
        """The values behind an integer node on which its Q sits: behind the activation it absorbs."""
        if str(node.name) in self.domain.float_output:
            return []
        activation = self.absorption.by_producer.get(str(node.name))
        if activation is not None and str(activation.name) in self.absorbed:
            return [activation.outputs[0]]
        return [v for v in node.outputs if v.name and self.view.is_float32(v)]

    def shortcut(self, node: ir.Node) -> ir.Value | None:
        """The value from elsewhere that a kernel adds in integer; one that writes float adds it in float."""
        name = str(node.name)
        if name not in self.absorbed or str(self.absorption.by_activation[name].name) in self.domain.float_output:
            return None
        return self.absorption.shortcuts.get(name)

    def owned_by_integer(self, value: ir.Value) -> bool:
        """Whether the value comes out of an integer kernel (through the activation it absorbs)."""
        producer = value.producer()
        if producer is None or str(value.name) in self.constraints.values:
            return str(value.name) in self.constraints.values
        if str(producer.name) in self.absorbed:
            producer = self.absorption.by_activation[str(producer.name)]
        elif not self.carries(producer):
            return False
        return str(producer.name) not in self.domain.float_output

    def natural_axis(self, node: ir.Node) -> int | None:
        """The axis of output channels of a node's weight, None for a node without weights."""
        weight = node.inputs[1] if len(node.inputs) > 1 and node.op_type in LAYERS else None
        return channel_axis(node) if weight is not None and self.view.is_constant(weight) else None

    def bias_follows(self, node: ir.Node) -> bool:
        """Whether the bias of a node becomes int32 where its data is quantized."""
        axis = self.natural_axis(node)
        own = None if axis is None else self.constraints.weight_axis(node, axis)
        return self.options.quantize_bias and axis is not None and own in (None, axis)

    def _is_apart(self, c: NodeClass) -> bool:
        """Whether an activation has a kernel of its own: nothing takes it in, nor would but for verification."""
        producer = c.data[0].producer() if c.data else None
        stays_float = producer is not None and str(producer.name) in self.options.keep_float
        return str(c.node.name) not in self.absorption.by_activation and not stays_float

    def _takes_in(self, producer: ir.Node) -> bool:
        """Whether an integer kernel takes in what stands behind it; where Q is needed for that, with one."""
        name = str(producer.name)
        clamps = self.absorption.by_producer[name].op_type in self.target.clamps
        return name in self.domain.integer and not (clamps and name in self.domain.float_output)

    def _matmul_biases(self) -> dict[str, tuple[ir.Node, int]]:
        """The Adds that only put a bias on an integer MatMul: Add name to (MatMul, bias position)."""
        found: dict[str, tuple[ir.Node, int]] = {}
        for name in self.domain.integer if self.target.matmul_bias else ():
            node = self.classes[name].node
            if node.op_type != "MatMul" or str(node.outputs[0].name) in self.constraints.values:
                continue
            consumer = self.view.sole_consumer(node.outputs[0])
            if consumer is None or consumer.node.op_type != "Add":
                continue
            bias = consumer.node.inputs[1 - consumer.index]
            if bias is not None and self.view.is_row_bias(node, bias) and self.bias_follows(node):
                found[str(consumer.node.name)] = (node, 1 - consumer.index)
        return found

    def _find_requested(self) -> dict[str, str]:
        """The nodes that are quantized because the caller insists, with the option that says so."""
        gone = self.domain.integer | self.absorbed | self.biased.keys()
        left = {name: why for name, why in self.constraints.requested.items() if name not in gone}
        classes = {name: self.classes[name] for name in left}
        return {n: why for n, why in left.items() if classes[n].rule != WEIGHTS_ONLY and self.data(classes[n].node)}

    def _find_quantized(self) -> dict[str, ir.Value]:
        found: list[ir.Value | None] = []
        for node in self.view.nodes:
            if self.carries(node):
                free = self.constraints.free if str(node.name) in self.requested else ()
                found += [*self.data(node), *(v for v in self.q_values(node) if str(v.name) not in free)]
            else:
                found.append(self.shortcut(node))
        values = (*self.view.inputs, *(out for node in self.view.nodes for out in node.outputs))
        found += [value for value in values if str(value.name) in self.constraints.values]
        return {str(value.name): value for value in found if value is not None}


def channel_axis(node: ir.Node) -> int:
    """The axis of output channels of a layer's weight."""
    if node.op_type == "ConvTranspose":
        return 1
    if node.op_type == "Conv" or node.attributes.get_int("transB", 0) != 0:
        return 0
    return 1
