"""Nodes that run in integer and values that carry Q/DQ, as far as decided before ranges are known.

The integer domain is found by two sweeps over the graph.

Forward, a value is *available* in integer if it comes out of an integer anchor, or of cheap operators fed by
such values only. Backward, it is *demanded* if an integer node reads it. A light operator runs in integer where
all it reads is available and what it writes is demanded; so transformers keep norms, attention, residual stream
and activations in float and quantize the inputs of linear layers only, while a convolutional net is integer from
the first Conv to the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kenosis_ort.graph.view import CAPTURED, FLOAT, Consumer, GraphView, ir
from kenosis_ort.placement.absorption import Absorption
from kenosis_ort.placement.constraints import WEIGHTS_ONLY, Constraints, constrain
from kenosis_ort.placement.eligibility import classify, fed_by, protect
from kenosis_ort.plan import PlacementOptions
from kenosis_ort.targets.model import Target
from kenosis_ort.targets.vocabulary import NodeClass, Role

_GATES = ("Swish", "QuickGelu", "HardSwish", "Gelu", "FastGelu", "Mish")
"""Products of a value with a function of it; spelled out as such, stock quantizes what they read."""
_LIGHT = (Role.BINARY, Role.UNARY, Role.CONCAT, Role.PASS_THROUGH)


class Domain:
    """Nodes that run in integer.

    Args:
        target: The runtime.
        classes: What each node could become.
        absorption: Which activations vanish.
        base: The same before some nodes were left float; None for none. Heads that it keeps float stay so: with less
            integer work beside them they would hold too much of it, and no range of theirs was calibrated.

    Attributes:
        integer: Names of the nodes that run in integer.
        float_output: Names of the integer anchors whose output stays float.
        last_anchors: Names of the anchors behind which no other anchor lies, mapped to True if kept float by policy.
        between: Names of the float nodes that lie between integer kernels: another form of them could be integer.
        refused: Names of anchors that the caller's words leave float, with the reason.
    """

    def __init__(
        self, target: Target, classes: Mapping[str, NodeClass], absorption: Absorption, base: Domain | None = None
    ) -> None:
        self.classes, self.absorption, self.constraints = classes, absorption, absorption.constraints
        self.view, self.target, self.options = absorption.view, target, self.constraints.options
        self._outputs_take_int8 = self.options.protect_outputs in (None, "int8")
        self._readers = {value: self.view.consumers(value) for node in self.view.nodes for value in node.outputs}
        self._outputs = frozenset(self.view.graph.outputs)
        self.float_output: set[str] = set()
        self.last_anchors: dict[str, bool] = {}
        self.between: set[str] = set()
        self.refused: dict[str, str] = {}
        if self.target.whole:
            self.integer = {name for name, c in classes.items() if c.role in (Role.ANCHOR, *_LIGHT) and c.data}
            return
        anchors = {name for name, c in classes.items() if c.role is Role.ANCHOR}
        self.last_anchors = self._last_anchors(anchors, {} if base is None else base.last_anchors)
        requested = self.constraints.requested
        anchors -= {name for name, stays_float in self.last_anchors.items() if stays_float and name not in requested}
        self.integer = self._settled(anchors, anchors)
        for name in self._without_output_q():
            if self._may_write_float(classes[name].node):
                self.float_output.add(name)
            else:
                self.refused[name] = "its kernel needs a Q on its output (OpTypesToExcludeOutputQuantization)"
        if self.refused or self.constraints.free:
            readers, anchors = anchors, anchors - self.refused.keys()
            self.integer = self._settled(anchors, readers)
        self.between = self._between(self._available(anchors), anchors)

    def _settled(self, anchors: set[str], readers: set[str]) -> set[str]:
        """The nodes that run in integer, the given anchors among them; notes which anchors write float.

        Args:
            anchors: The heavy nodes that run in integer.
            readers: Those for whose sake light nodes before them do; more, where the caller refuses some the Q of
                their output.
        """
        mixed = self.target.float_where == "mixed"
        if mixed:
            self._write_float(anchors, self._feeds_integer_only(anchors))
        available = self._available(anchors)
        demanded = self._demanded(readers, available)
        if not mixed:
            self._write_float(anchors, demanded)
        light = {name: c for name, c in self.classes.items() if c.role in _LIGHT and self._ready(c, available)}
        return anchors | {name for name, c in light.items() if not demanded.isdisjoint(c.node.outputs)}

    def _write_float(self, anchors: set[str], read: set[ir.Value]) -> None:
        """Notes the anchors that may write float and whose output is not among values that integer kernels read."""
        for node in (self.classes[name].node for name in anchors):
            carries = any(str(v.name) in self.constraints.values for v in node.outputs)
            if not carries and node.outputs[0] not in read and self._may_write_float(node):
                self.float_output.add(str(node.name))

    def _between(self, available: set[ir.Value], anchors: set[str]) -> set[str]:
        """The float nodes all of whose data comes out of integer kernels and whose result reaches one again."""
        found: set[str] = set()
        reaching: set[ir.Value | None] = set()
        for node in reversed(self.view.nodes):
            c = self.classes[str(node.name)]
            if reaching.isdisjoint(node.outputs) and str(node.name) not in anchors:
                continue
            if str(node.name) in anchors:
                reaching.update(node.inputs[:1])
            elif c.role is not Role.FLOAT:
                reaching.update(c.data)
            rule = self.target.rule(node.op_type)
            by_rule = rule is not None and c.rule == rule.id  # not kept float by the caller or by protection
            if by_rule and c.role is Role.ISLAND and c.data and available.issuperset(c.data):
                found.add(str(node.name))
        return found

    def _without_output_q(self) -> list[str]:
        """The integer anchors on whose output the caller wants no Q, and which nobody reads through one either."""
        found = []
        for name in sorted(self.integer - self.float_output) if self.constraints.free else ():
            activation = self.absorption.by_producer.get(name)
            value = (self.classes[name].node if activation is None else activation).outputs[0]
            readers = [c.node for c in self.view.consumers(value) if c.index != CAPTURED]
            read = any(str(node.name) in self.integer or node.op_type in _GATES for node in readers)
            if self.classes[name].role is Role.ANCHOR and str(value.name) in self.constraints.free and not read:
                found.append(name)
        return found

    def _may_write_float(self, node: ir.Node) -> bool:
        """Whether the integer kernel of an anchor may write float."""
        listed = node.op_type in self.target.float_output
        return listed and self.target.hooks.writes_float(self.view, node, self.options)

    def _ready(self, c: NodeClass, available: set[ir.Value]) -> bool:
        """Whether all that a light node reads is available; a small gate of a product may be quantized for it."""
        missing = [v for v in c.data if v not in available]
        if not missing:
            return True
        if c.role is not Role.BINARY or len(missing) == len(c.data):
            return False
        whole = self.view.elements(c.node.outputs[0])
        return all(0 < self.view.elements(v) * 8 <= whole for v in missing)

    def _available(self, anchors: set[str]) -> set[ir.Value]:
        available: set[ir.Value] = set()
        writes = anchors - self.float_output
        for value in self.view.inputs:
            first = (str(c.node.name) for c in self.view.consumers(value) if c.index == 0)
            if value.dtype == FLOAT and not anchors.isdisjoint(first):
                available.add(value)
        for node in self.view.nodes:
            c = self.classes[str(node.name)]
            if c.role is Role.ANCHOR:
                reached = str(node.name) in writes
            elif c.role in _LIGHT:
                reached = bool(c.data) and self._ready(c, available)
            else:
                reached = c.role is not Role.FLOAT and bool(c.data) and available.issuperset(c.data)
            if reached:
                available.update(node.outputs)
        return available

    def _demanded(self, anchors: set[str], available: set[ir.Value]) -> set[ir.Value]:
        demanded: set[ir.Value] = set()

        def asks(reader: Consumer) -> bool:
            c = self.classes[str(reader.node.name)]
            if reader.index == CAPTURED:
                return False
            if reader.index == 0 and str(reader.node.name) in anchors:
                return True
            is_light = c.role in _LIGHT and self._ready(c, available)
            onward = is_light or str(reader.node.name) in self.absorption.by_activation
            return onward and not demanded.isdisjoint(reader.node.outputs)

        for node in reversed(self.view.nodes):
            c = self.classes[str(node.name)]
            passes = c.role is Role.PASS_THROUGH
            if node.op_type in self.target.eager and self._is_eager(c, anchors, available):
                demanded.update(node.outputs)
            for value in node.outputs:
                readers, is_output = self._readers[value], value in self._outputs
                # Without a Q behind it the runtime moves DQ over a shape operator, and dies where a body reads that.
                moved = passes and (is_output or any(c.index == CAPTURED for c in readers))
                if moved or (is_output and self._outputs_take_int8) or any(map(asks, readers)):
                    demanded.add(value)
        return demanded

    def _is_eager(self, c: NodeClass, anchors: set[str], available: set[ir.Value]) -> bool:
        """Whether a light node stands right behind an integer anchor, or a sum of integers."""
        producer = c.data[0].producer() if c.data else None
        if c.role is not Role.UNARY or producer is None or not self._ready(c, available):
            return False
        return str(producer.name) in anchors or producer.op_type == "Add"

    def _feeds_integer_only(self, anchors: set[str]) -> set[ir.Value]:
        """The values all of whose readers, through shapes and absorbed activations, are integer anchors."""
        feeds: set[ir.Value] = set()

        def is_integer(reader: Consumer, value: ir.Value) -> bool:
            inside = reader.index != CAPTURED
            if inside and self.absorption.shortcuts.get(str(reader.node.name)) is value:
                return True
            taken = inside and str(reader.node.name) in self.absorption.by_activation
            through = taken or self.classes[str(reader.node.name)].role is Role.PASS_THROUGH
            onward = through and feeds.issuperset(reader.node.outputs)
            return (reader.index == 0 or taken) and (str(reader.node.name) in anchors or onward)

        for node in reversed(self.view.nodes):
            for value in node.outputs:
                readers = self._readers[value]
                ends_well = self._outputs_take_int8 if value in self._outputs else bool(readers)
                if ends_well and all(is_integer(reader, value) for reader in readers):
                    feeds.add(value)
        return feeds

    def _last_anchors(self, anchors: set[str], before: Mapping[str, bool]) -> dict[str, bool]:
        """The anchors behind which no anchor lies, and whether the output policy keeps each float."""
        reaches: set[ir.Value | None] = set()  # values from which an anchor can be reached
        last_anchors: dict[str, bool] = {}
        for node in reversed(self.view.nodes):
            onward = not reaches.isdisjoint(node.outputs)
            is_anchor = str(node.name) in anchors
            if is_anchor and not onward:
                last_anchors[str(node.name)] = False
            if is_anchor or onward:
                reaches.update(node.inputs, self.view.captured_by(node))
        convs = [name for name in last_anchors if self.classes[name].node.op_type not in self.target.float_output]
        keep = self.options.protect_outputs == "float"
        if self.options.protect_outputs == "auto":
            work = {name: self.view.multiply_accumulates(self.classes[name].node) for name in anchors}
            most = self.target.head_float_share * sum(work.values())
            keep = len(convs) < len(anchors) and sum(work[name] for name in convs) <= most
        return {name: before.get(name, False) or (keep and name in convs) for name in last_anchors}


class Assignment:
    """Classes of the nodes of one model on one target under one set of options.

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
        carrying: Names of the nodes that read and write through Q/DQ, whatever kernel the runtime has for them.
        written: The values behind each of these on which its Q sits, by name: behind the activation it absorbs.
        shortcuts: The values from elsewhere that kernels add in integer, by the name of the Add.
        quantized: The values that carry Q/DQ, by name.
    """

    def __init__(
        self, view: GraphView, target: Target, options: PlacementOptions, base: Assignment | None = None
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
        before = None if base is None else base.domain
        self.domain: Domain = Domain(target, self.classes, self.absorption, before)
        again = dict(target.hooks.reclass_integers(view, self.classes, self.domain.integer))
        if again != self.classes:
            self.classes = again
            self.domain = Domain(target, again, self.absorption, before)
        # What carries Q and DQ.
        self.biased = self._matmul_biases()
        self.absorbed = {name for name, producer in self.absorption.by_activation.items() if self._takes_in(producer)}
        self.requested = self._find_requested()
        self.carrying = self.domain.integer | self.requested.keys()
        self.written = {str(n.name): self._q_values(n) for n in view.nodes if str(n.name) in self.carrying}
        self.shortcuts = self._find_shortcuts()
        self.quantized = self._find_quantized()
        # An activation that could not vanish but lies between quantized values: Q on both sides of it.
        for node in view.nodes:
            if str(node.name) in self.absorption.by_activation and str(node.name) not in self.absorbed:
                self.absorption.limits.pop(str(node.outputs[0].name), None)

    def _class_activations(self) -> None:
        """Classes what kernels take in as activations; on a target of integers alone, the others as operators."""
        taken = {name: self.classes[name] for name in self.absorption.by_activation}
        self.classes.update({name: replace(c, role=Role.ACTIVATION) for name, c in taken.items()})
        if self.target.whole:
            apart = {n: c for n, c in self.classes.items() if c.role is Role.ACTIVATION and self._is_apart(c)}
            self.classes.update({name: replace(c, role=Role.UNARY) for name, c in apart.items()})

    def data(self, node: ir.Node) -> tuple[ir.Value, ...]:
        """The values that a node reads through Q/DQ."""
        if str(node.name) in self.constraints.requested and str(node.name) not in self.domain.integer:
            return tuple(v for v in fed_by(self.view, node) if v.dtype == FLOAT)
        return self.classes[str(node.name)].data

    def _q_values(self, node: ir.Node) -> list[ir.Value]:
        """The values behind an integer node on which its Q sits: behind the activation it absorbs."""
        if str(node.name) in self.domain.float_output:
            return []
        activation = self.absorption.by_producer.get(str(node.name))
        if activation is not None and str(activation.name) in self.absorbed:
            return [activation.outputs[0]]
        return [v for v in node.outputs if v.name and v.dtype == FLOAT]

    def _find_shortcuts(self) -> dict[str, ir.Value]:
        """The values from elsewhere that kernels add in integer; one that writes float adds it in float."""
        into, writes_float = self.absorption.by_activation, self.domain.float_output
        known = {name: value for name, value in self.absorption.shortcuts.items() if name in self.absorbed}
        return {name: value for name, value in known.items() if str(into[name].name) not in writes_float}

    def owned_by_integer(self, value: ir.Value) -> bool:
        """Whether the value comes out of an integer kernel (through the activation it absorbs)."""
        producer = value.producer()
        if producer is None or str(value.name) in self.constraints.values:
            return str(value.name) in self.constraints.values
        if str(producer.name) in self.absorbed:
            producer = self.absorption.by_activation[str(producer.name)]
        elif str(producer.name) not in self.carrying:
            return False
        return str(producer.name) not in self.domain.float_output

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
            if bias is not None and self.view.is_row_bias(node, bias) and self.constraints.bias_follows(node):
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
            if str(node.name) in self.carrying:
                free = self.constraints.free if str(node.name) in self.requested else ()
                found += [*self.data(node), *(v for v in self.written[str(node.name)] if str(v.name) not in free)]
            else:
                found.append(self.shortcuts.get(str(node.name)))
        values = (*self.view.inputs, *(out for node in self.view.nodes for out in node.outputs))
        found += [value for value in values if str(value.name) in self.constraints.values]
        return {str(value.name): value for value in found if value is not None}
