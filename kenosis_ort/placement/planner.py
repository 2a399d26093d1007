"""Makes the placement plan: one decision an edge, one a node, before the graph is touched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import onnx_ir as ir

from kenosis_ort.graph.operators import LAYERS
from kenosis_ort.graph.view import CAPTURED, GraphView
from kenosis_ort.options import PlacementOptions
from kenosis_ort.placement.absorption import Absorption, find_absorbable
from kenosis_ort.placement.constraints import Constraints, constrain
from kenosis_ort.placement.domain import Domain, integer_domain
from kenosis_ort.placement.eligibility import WEIGHTS_ONLY, classify
from kenosis_ort.placement.protection import fed_by, protect
from kenosis_ort.placement.saturation import saturation_limits
from kenosis_ort.placement.sharing import Range, ScaleGroups
from kenosis_ort.plan import Decision, Edge, How, Kind, NodeDecision, PlacementPlan, RangeLimit, Role
from kenosis_ort.targets import model as targets
from kenosis_ort.targets.model import NodeClass

_SIGNED = (ir.DataType.INT8, ir.DataType.INT16, ir.DataType.INT4)
_WIDE = (ir.DataType.UINT16, ir.DataType.INT16)


class Planner:
    """Plans one model under one set of options; what does not depend on ranges is worked out once.

    Args:
        view: The prepared model.
        target: The runtime's table.
        options: The caller's wishes.
    """

    def __init__(self, view: GraphView, target: targets.Target, options: PlacementOptions) -> None:
        self.view = view
        self.target = target
        self.options = options
        self.constraints: Constraints = constrain(view, target, options)
        protects = options.protect_inputs and not target.whole
        protected = protect(view, options.primary_inputs) if protects else {}
        classes = classify(view, target, self.constraints, protected)
        named = {name: c for name, c in classes.items() if name in self.constraints.insisted}
        placed = classes if target.reclass is None else target.reclass(view, classes)
        self.classes: dict[str, NodeClass] = {**placed, **named}
        self.absorption: Absorption = find_absorbable(view, target, self.constraints, self.classes)
        taken = {name: self.classes[name] for name in self.absorption.by_activation}
        self.classes.update({name: replace(c, role=targets.Role.ACTIVATION) for name, c in taken.items()})
        if target.whole:
            apart = {n: c for n, c in self.classes.items() if c.role is targets.Role.ACTIVATION and self._is_apart(c)}
            self.classes.update({name: replace(c, role=targets.Role.UNARY) for name, c in apart.items()})
        self.domain: Domain = integer_domain(view, target, self.constraints, self.classes, self.absorption)
        again = self.classes
        if target.reclass_integers is not None:
            again = dict(target.reclass_integers(view, self.classes, self.domain.integer))
        if again != self.classes:
            self.classes = again
            self.domain = integer_domain(view, target, self.constraints, again, self.absorption)
        self.biased = self._matmul_biases()
        self.absorbed = {name for name, producer in self.absorption.by_activation.items() if self._takes_in(producer)}
        self.insisted = self._insisted()
        self.quantized: dict[str, ir.Value] = {}  # values that get Q/DQ
        self._collect_quantized()
        self.own_grids = self._find_own_grids()
        self.limits = tuple(limit for name, limit in self.absorption.limits.items() if name in self.quantized)
        self.saturations = saturation_limits(view, self.quantized.values())
        self.spared: tuple[str, ...] = ()
        if target.clips_slowly:
            narrowed, self.saturations = (
                self.saturations,
                tuple(filter(None, map(self._clipping_little, self.saturations))),
            )
            self.spared = tuple(limit.value for limit in narrowed if limit not in self.saturations)
        self._begin({})

    def _clipping_little(self, limit: RangeLimit) -> RangeLimit | None:
        """Returns a limit that an integer kernel seldom clips at: below 0, where half of the values may be, far off."""
        if limit.low != 0.0 or not self._is_integer(self.quantized[limit.value].producer()):
            return limit
        return None if limit.high is None else replace(limit, low=-limit.high)

    def _begin(self, ranges: Mapping[str, Range]) -> None:
        self.groups = ScaleGroups(ranges, self.absorption.limits, self.target.concat_share_limit)
        self.decisions: list[Decision] = []
        self.nodes: list[NodeDecision] = []
        self._by_value: dict[str, list[Decision]] = {}

    @property
    def held(self) -> set[str]:
        """The nodes that touch what the caller speaks about: no pass changes their weights, no rewrite their form."""
        return self.constraints.held(self.view)

    def integer_candidates(self) -> set[str]:
        """Returns the nodes that a rewrite for integer kernels may change: integer anchors, and what lies between."""
        anchors = {name for name in self.domain.integer if self.classes[name].role is targets.Role.ANCHOR}
        return anchors | self.domain.between

    def plan(self, ranges: Mapping[str, Range] | None = None) -> PlacementPlan:
        """Returns the plan.

        Args:
            ranges: Calibrated (low, high) by value name. None before calibration: the plan then names every value that
                may carry a Q, and so has to be observed.
        """
        self._begin(ranges or {})
        self._share_scales()
        for node in self.view.nodes:
            self._decide_node(node)
        self._decide_outputs()
        kept = self._grids_kept() if ranges and self.target.moves_keep_grid else {}
        self.decisions = [_read_as_is(d, kept) for d in map(self._with_grid, self.decisions)]
        for d in self.decisions:
            self._by_value.setdefault(d.edge.value, []).append(d)
        return PlacementPlan(
            target=self.target.name,
            decisions=tuple(self.decisions),
            nodes=tuple(self.nodes),
            limits=self.limits,
            saturations=tuple(s for s in self.saturations if self.groups.members(s.value) == [s.value]),
            grids=self._grids(),
            barriers=self._barriers(),
            splits=self._splits(),
            spared=tuple(value for value in self.spared if self.groups.members(value) == [value]),
            notes=self._notes(),
        )

    def _notes(self) -> tuple[str, ...]:
        names = ", ".join(f"'{name}'" for name in self.own_grids)
        if not (names and self.options.activation_symmetric):
            return ()
        return (f"ActivationSymmetric is not kept for {names}: kernels of {self.target.name} write zero point 0 there",)

    def _is_apart(self, c: NodeClass) -> bool:
        """Tells whether an activation has a kernel of its own: nothing takes it in, nor would but for verification."""
        producer = c.data[0].producer() if c.data else None
        kept = producer is not None and str(producer.name) in self.options.keep_float
        return str(c.node.name) not in self.absorption.by_activation and not kept

    # -- which values carry Q/DQ -------------------------------------------------------------------------------

    def _is_integer(self, node: ir.Node | None) -> bool:
        return node is not None and str(node.name) in self.domain.integer

    def _takes_in(self, producer: ir.Node) -> bool:
        """Tells whether an integer kernel takes in what stands behind it; where Q is needed for that, with one."""
        name = str(producer.name)
        clamps = self.absorption.by_producer[name].op_type in self.target.clamps
        return name in self.domain.integer and not (clamps and name in self.domain.float_output)

    def _shortcut(self, node: ir.Node) -> ir.Value | None:
        """Returns the value from elsewhere that a kernel adds in integer; one that writes float adds it in float."""
        name = str(node.name)
        if name not in self.absorbed or str(self.absorption.by_activation[name].name) in self.domain.float_output:
            return None
        return self.absorption.shortcuts.get(name)

    def _carries(self, node: ir.Node | None) -> bool:
        """Tells whether a node reads and writes through Q/DQ, whatever kernel the runtime has for it."""
        return node is not None and (str(node.name) in self.domain.integer or str(node.name) in self.insisted)

    def _insisted(self) -> dict[str, str]:
        """Returns the nodes that are quantized because the caller insists, with the option that says so."""
        gone = self.domain.integer | self.absorbed | self.biased.keys()
        return {
            name: why
            for name, why in self.constraints.insisted.items()
            if name not in gone and self.classes[name].rule != WEIGHTS_ONLY and self._data(self.classes[name].node)
        }

    def _data(self, node: ir.Node) -> tuple[ir.Value, ...]:
        """Returns the values that a node reads through Q/DQ."""
        if str(node.name) in self.constraints.insisted and str(node.name) not in self.domain.integer:
            return tuple(v for v in fed_by(self.view, node) if self.view.is_float32(v))
        return self.classes[str(node.name)].data

    def _q_values(self, node: ir.Node) -> list[ir.Value]:
        """Returns the values behind an integer node on which its Q sits: behind the activation it absorbs."""
        if str(node.name) in self.domain.float_output:
            return []
        activation = self.absorption.by_producer.get(str(node.name))
        if activation is not None and str(activation.name) in self.absorbed:
            return [activation.outputs[0]]
        return [v for v in node.outputs if v.name and self.view.is_float32(v)]

    def _collect_quantized(self) -> None:
        for node in self.view.nodes:
            if self._carries(node):
                insisted = str(node.name) in self.insisted
                written = [v for v in self._q_values(node) if not (insisted and str(v.name) in self.constraints.free)]
                for value in (*self._data(node), *written):
                    self.quantized.setdefault(str(value.name), value)
            else:
                shortcut = self._shortcut(node)
                if shortcut is not None:
                    self.quantized.setdefault(str(shortcut.name), shortcut)
        for value in (*self.view.inputs, *(out for node in self.view.nodes for out in node.outputs)):
            if str(value.name) in self.constraints.values:
                self.quantized.setdefault(str(value.name), value)
        # An activation that could not vanish but lies between quantized values: Q on both sides of it.
        for node in self.view.nodes:
            if str(node.name) in self.absorption.by_activation and str(node.name) not in self.absorbed:
                self.absorption.limits.pop(str(node.outputs[0].name), None)

    def _share_scales(self) -> None:
        for node in self.view.nodes:
            c = self.classes[str(node.name)]
            if not self._carries(node):
                continue
            if c.role is targets.Role.PASS_THROUGH:
                for out in self._q_values(node):
                    self._tie(str(out.name), str(c.data[0].name))
            elif c.role is targets.Role.CONCAT:
                for out in self._q_values(node):
                    if self.groups.root(str(out.name)) in self.constraints.values:
                        continue
                    for value in dict.fromkeys(str(v.name) for v in c.data):
                        if self.groups.root(value) in {*self.constraints.values, *self.own_grids}:
                            continue
                        if (
                            self.target.whole
                            or self.groups.may_share(value, str(out.name), self._read_beside(node)) is None
                        ):
                            self.groups.tie(value, str(out.name))

    def _tie(self, value: str, provider: str) -> None:
        """Gives two values the same parameters: the caller's own where one of them has such."""
        if self.groups.root(value) in self.constraints.values:
            value, provider = provider, value
        self.groups.tie(value, provider)

    def _read_beside(self, concat: ir.Node) -> Callable[[str], bool]:
        def read_beside(name: str) -> bool:
            value = self.quantized[name]
            return self.view.is_output(value) or any(
                c.node is not concat
                and (c.index == CAPTURED or self.classes[str(c.node.name)].role is not targets.Role.PASS_THROUGH)
                for c in self.view.consumers(value)
            )

        return read_beside

    # -- decisions ----------------------------------------------------------------------------------------------

    def _matmul_biases(self) -> dict[str, tuple[ir.Node, int]]:
        """Returns the Adds that only put a bias on an integer MatMul: Add name to (MatMul, bias position)."""
        found: dict[str, tuple[ir.Node, int]] = {}
        for name in self.domain.integer if self.target.matmul_bias else ():
            node = self.classes[name].node
            if node.op_type != "MatMul" or str(node.outputs[0].name) in self.constraints.values:
                continue
            consumer = self.view.sole_consumer(node.outputs[0])
            if consumer is None or consumer.node.op_type != "Add":
                continue
            bias = consumer.node.inputs[1 - consumer.index]
            if bias is not None and self.view.is_row_bias(node, bias) and self._bias_follows(node):
                found[str(consumer.node.name)] = (node, 1 - consumer.index)
        return found

    def _decide_node(self, node: ir.Node) -> None:
        name = str(node.name)
        c = self.classes[name]
        if name in self.biased:
            kind, rule, reason = Kind.ABSORBED, "matmul-add-int32-bias", "its bias joins the MatMul before it as int32"
        elif name in self.absorbed:
            kind, rule = Kind.ABSORBED, c.rule
            into = "requantization" if node.op_type in self.target.clamps else "kernel"
            reason = f"vanishes into the {into} of '{self.absorption.by_activation[name].name}'"
        elif self._is_integer(node):
            passes = c.role is targets.Role.PASS_THROUGH
            kind, rule, reason = (Kind.PASS_THROUGH if passes else Kind.INTEGER), c.rule, c.reason
            missing = self.constraints.without_kernel(self.view, node, self._natural_axis(node))
            if missing is not None:
                kind, rule, reason = Kind.FLOAT, "caller-types", missing
        elif name in self.insisted:
            kind, rule, reason = Kind.FLOAT, "caller-insists", f"quantized all the same: {self.insisted[name]}"
        elif c.rule == WEIGHTS_ONLY:
            kind = Kind.FLOAT if name in self.options.keep_float else Kind.INTEGER
            rule, reason = c.rule, self.options.keep_float.get(name, c.reason)
        else:
            kind, (rule, reason) = Kind.FLOAT, self._why_float(node, c)
        self.nodes.append(NodeDecision(name, node.op_type, kind, rule, reason))
        for index, value in enumerate(node.inputs):
            if value is not None and self.view.is_float32(value):
                self._decide_edge(node, c, index, value)
        for value in self.view.captured_by(node):
            if self.view.is_float32(value) and not self.view.is_constant(value):
                edge = Edge(str(value.name), name, CAPTURED)
                self.decisions.append(self._float_read(edge, value, Role.ACTIVATION))

    def _why_float(self, node: ir.Node, c: NodeClass) -> tuple[str, str]:
        name = str(node.name)
        if c.role is targets.Role.ANCHOR and self.domain.heads.get(name):
            return "output-protection", "computes a graph output; the output policy keeps it float"
        if name in self.domain.refused:
            return "caller-float-output", self.domain.refused[name]
        if c.role is targets.Role.ACTIVATION and name in self.absorption.refused:
            return c.rule, f"does not vanish: {self.absorption.refused[name]}"
        if c.role in (targets.Role.ISLAND, targets.Role.FLOAT, targets.Role.ANCHOR):
            return c.rule, c.reason
        return "integer-domain", "it is not fed by integer kernels only, or nothing behind it runs in integer"

    def _decide_edge(self, node: ir.Node, c: NodeClass, index: int, value: ir.Value) -> None:
        name, edge = str(node.name), Edge(str(value.name), str(node.name), index)
        carries = self._carries(node) and edge.value in self.quantized
        if self.view.is_constant(value):
            self._decide_constant(node, c, edge)
            return
        if carries and any(value is v for v in self._data(node)):
            self.decisions.append(self._quantized(edge, Role.ACTIVATION, c.rule, f"'{name}' reads integers"))
            return
        if value is self._shortcut(node):
            reason = f"the shortcut that the kernel of '{self.absorption.by_activation[name].name}' adds"
            self.decisions.append(self._quantized(edge, Role.ACTIVATION, c.rule, reason))
            return
        self.decisions.append(self._float_read(edge, value, Role.ACTIVATION))

    def _decide_constant(self, node: ir.Node, c: NodeClass, edge: Edge) -> None:
        integer, insisted = self._is_integer(node), str(node.name) in self.insisted
        weighted = (integer and c.role is targets.Role.ANCHOR) or (insisted and node.op_type in LAYERS)
        how, role, rule, reason = How.FLOAT, Role.WEIGHT, c.rule, "belongs to a float node"
        axis: int | None = None
        scale_from: tuple[str, str] | None = None
        beta = 1.0
        name = str(node.name)
        if name in self.biased and edge.index == self.biased[name][1]:
            matmul = self.biased[name][0]
            how, role, rule = How.DERIVED, Role.BIAS, "matmul-add-int32-bias"
            reason, scale_from = "int32 at input_scale * weight_scale", _scale_from(matmul)
        elif (weighted or c.rule == WEIGHTS_ONLY) and edge.index == 1:
            how, reason, axis = How.OWN, "weights of an integer kernel", self._weight_axis(node)
        elif edge.value in self.constraints.overrides and (integer or insisted):
            how, reason = How.OWN, "the caller's own parameters (TensorQuantOverrides)"
            axis = self.constraints.overrides.axis(edge.value)
        elif weighted and edge.index == 2 and self._bias_follows(node) and self._reads_quantized(node):
            how, role, reason = How.DERIVED, Role.BIAS, "int32 at input_scale * weight_scale"
            scale_from, beta = _scale_from(node), self.view.attribute_float(node, "beta", 1.0)
        elif weighted and edge.index == 2:
            role, reason = Role.BIAS, "the bias stays float"
        elif (integer and c.role is targets.Role.BINARY) or (insisted and self._is_binary(node)):
            how, role, reason = How.OWN, Role.ACTIVATION, "exact operand of an integer kernel"
        self.decisions.append(Decision(edge, role, how, rule, reason, None, axis, scale_from, beta))

    def _bias_follows(self, node: ir.Node) -> bool:
        """Tells whether the bias of a node becomes int32 where its data is quantized."""
        axis = self._natural_axis(node)
        own = None if axis is None else self.constraints.weight_axis(self.view, node, axis)
        return self.options.quantize_bias and axis is not None and own in (None, axis)

    def _reads_quantized(self, node: ir.Node) -> bool:
        return node.inputs[0] is not None and str(node.inputs[0].name) in self.quantized

    def _is_binary(self, node: ir.Node) -> bool:
        rule = self.target.rule(node.op_type)
        return rule is not None and rule.role is targets.Role.BINARY

    def _natural_axis(self, node: ir.Node) -> int | None:
        """Returns the axis of output channels of a node's weight, None for a node without weights."""
        weight = node.inputs[1] if len(node.inputs) > 1 and node.op_type in LAYERS else None
        return _channel_axis(self.view, node) if weight is not None and self.view.is_constant(weight) else None

    def _weight_axis(self, node: ir.Node) -> int | None:
        """Returns the axis of a weight's scales, None for one scale; one answer for all nodes that share a weight."""
        if (
            self.options.block_size and self.classes[str(node.name)].rule == WEIGHTS_ONLY
        ):  # along the axis that the kernel sums over
            return 1 - _channel_axis(self.view, node) if node.op_type in ("Gemm", "MatMul") else 0
        weight = node.inputs[1]
        assert weight is not None
        axes = {
            self.constraints.weight_axis(self.view, c.node, self._natural_axis(c.node))
            for c in self.view.consumers(weight)
            if c.index == 1 and (self._carries(c.node) or self.classes[str(c.node.name)].rule == WEIGHTS_ONLY)
        }
        return axes.pop() if len(axes) == 1 else None

    def _quantized(self, edge: Edge, role: Role, rule: str, reason: str) -> Decision:
        root = self.groups.root(edge.value)
        if root == edge.value:
            return Decision(edge, role, How.OWN, rule, reason)
        return Decision(edge, role, How.SHARED, rule, f"{reason}, with the parameters of '{root}'", provider=root)

    def _float_read(self, edge: Edge, value: ir.Value, role: Role) -> Decision:
        if str(value.name) not in self.quantized:
            return Decision(edge, role, How.FLOAT, "not-quantized", "neither side needs integers")
        if self._owned_by_integer(value):
            root = self.groups.root(edge.value)
            reason = "the integer kernel before it writes integers only"
            provider = None if root == edge.value else root
            return Decision(edge, role, How.DEQUANTIZED, "integer-producer", reason, provider)
        return Decision(edge, role, How.FLOAT, "float-producer", "reads the float value beside its Q")

    def _owned_by_integer(self, value: ir.Value) -> bool:
        """Tells whether the value comes out of an integer kernel (through the activation it absorbs)."""
        producer = value.producer()
        if producer is None:
            return str(value.name) in self.constraints.values
        if str(value.name) in self.constraints.values:
            return True
        if str(producer.name) in self.absorbed:
            return str(self.absorption.by_activation[str(producer.name)].name) not in self.domain.float_output
        return self._carries(producer) and str(producer.name) not in self.domain.float_output

    def _decide_outputs(self) -> None:
        for index, value in enumerate(self.view.outputs):
            if self.view.is_float32(value):
                edge = Edge(str(value.name), "", index)
                producer = value.producer()
                if str(value.name) in self.quantized and producer is not None and self._owned_by_integer(value):
                    rule = self.classes[str(producer.name)].rule
                    decision = self._quantized(edge, Role.OUTPUT, rule, "comes out of an integer kernel")
                else:
                    decision = self._float_read(edge, value, Role.OUTPUT)
                self.decisions.append(decision)

    def _with_grid(self, decision: Decision) -> Decision:
        """Returns a decision with the integer type and symmetry that its value is read in."""
        said, value = self.constraints.overrides, decision.edge.value
        if decision.how is How.FLOAT:
            return decision
        if decision.how is How.DERIVED:
            return replace(decision, dtype=_type_name(ir.DataType.INT32), symmetric=True)
        root = decision.provider or value
        weight = decision.role is Role.WEIGHT
        dtype = said.weight_type(value) if weight else said.type_read(root, decision.edge.consumer)
        symmetric = said.symmetric(root)
        if symmetric is None and weight:
            symmetric = self.options.weight_symmetric
            symmetric = ir.DataType(dtype) in _SIGNED if symmetric is None else symmetric
        elif symmetric is None:
            symmetric = self.options.activation_symmetric and not self.view.constant(value)
            symmetric = symmetric and root not in self.own_grids  # their kernels write from their own zero point
        return replace(decision, dtype=_type_name(dtype), symmetric=symmetric)

    def _grids_kept(self) -> dict[str, str]:
        """Returns the values that lie on a grid without Q of their own, for they are moved bytes, with what moved them.

        Before calibration nothing is known about which Concats share their grid: all values are observed then.
        """
        kept: dict[str, str] = {}
        for node in self.view.nodes:
            moves = self.classes[str(node.name)].role in (targets.Role.PASS_THROUGH, targets.Role.CONCAT)
            if not moves or not self._is_integer(node):
                continue
            read = {self.groups.root(str(v.name)) for v in self._data(node)}
            for value in self._q_values(node):
                name = str(value.name)
                if name in self.quantized and name not in self.constraints.values and read == {self.groups.root(name)}:
                    kept[name] = str(node.name)
        return kept

    def _find_own_grids(self) -> dict[str, tuple[float, float] | None]:
        """Returns the values whose kernels write on a grid of their own, with its range where that is one alone."""
        found: dict[str, tuple[float, float] | None] = {}
        rules = {rule.id: rule for rule in self.target.rules if rule.own_grid or rule.wide_output}
        for name in sorted(self.domain.integer):
            rule = rules.get(self.classes[name].rule)
            value = str(self.classes[name].node.outputs[0].name)
            is_wide = ir.DataType(self.constraints.overrides.type_of(value)) in _WIDE
            if rule is not None and rule.own_grid and not is_wide:
                self.constraints.overrides.refuse_offset(value, rule.why)
            if rule is not None and not self.constraints.overrides.has_scale(value):
                ends = rule.wide_output if is_wide else None
                found.update({value: ends} if rule.own_grid or ends is not None else {})
        return found

    def _grids(self) -> tuple[RangeLimit, ...]:
        """Returns the ranges of those of one alone, and of Concats that read any: none may saturate what it reads."""
        found = {name: ends for name, ends in self.own_grids.items() if ends is not None}
        ranges = self.groups.ranges
        for name in self.domain.integer if self.own_grids and ranges else ():
            c = self.classes[name]
            root = self.groups.root(str(c.node.outputs[0].name))
            read = [r for v in c.data if (r := self.groups.root(str(v.name))) in self.own_grids and r != root]
            if c.role is targets.Role.CONCAT and read and root in ranges:
                ends = [found.get(value) or ranges[value] for value in (root, *read) if value in ranges]
                found[root] = min(low for low, _ in ends), max(high for _, high in ends)
        return tuple(RangeLimit(name, *ends) for name, ends in sorted(found.items()))

    def _barriers(self) -> tuple[str, ...]:
        if self.target.barriers is None:
            return ()
        placed = targets.Placed(
            view=self.view,
            integer=self.domain.integer,
            float_output=self.domain.float_output,
            absorbed=self.absorbed,
            biased=self.biased,
            insisted=self.insisted,
            quantized=self.quantized,
            decisions=self._by_value,
        )
        return self.target.barriers(placed)

    def _splits(self) -> dict[str, bool]:
        """Returns the quantized values with several readers, where the runtime wants one each.

        Source: rules int8-activation-branch-float and int8-branches-behind-barrier.
        """
        if not self.options.splits_readers:
            return {}
        found = {}
        for name, value in self.quantized.items():
            reads = [d for d in self._by_value.get(name, ()) if d.how is not How.FLOAT]
            if len(reads) > 1 and not self.constraints.overrides.converts(name):
                found[name] = self._owned_by_integer(value)
        return found


def _read_as_is(decision: Decision, kept: Mapping[str, str]) -> Decision:
    """Returns a decision to read a value as it is where an operator moved it there from a grid."""
    mover = kept.get(decision.edge.value)
    if mover is None or decision.how is How.FLOAT:
        return decision
    reason = f"'{mover}' moves bytes: it is on their grid already"
    return replace(
        decision, how=How.FLOAT, rule="moves-keep-grid", reason=reason, provider=None, dtype="", symmetric=False
    )


def _scale_from(node: ir.Node) -> tuple[str, str]:
    data, weight = node.inputs[0], node.inputs[1]
    assert data is not None
    assert weight is not None
    return str(data.name), str(weight.name)


def _channel_axis(view: GraphView, node: ir.Node) -> int:
    if node.op_type == "ConvTranspose":
        return 1
    if node.op_type == "Conv" or view.attribute_int(node, "transB", 0):
        return 0
    return 1


def _type_name(element_type: int) -> str:
    return ir.DataType(element_type).name.lower()
