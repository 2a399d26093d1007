"""Tells whether a quantized model is what its plan says, edge by edge."""

from collections import Counter
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from kenosis_ort.graph.walk import captured_names, subgraphs
from kenosis_ort.plan import Decision, EdgeRole, How, PlacementPlan
from kenosis_ort.quantizer.grids import absorbs

Array = npt.NDArray[Any]


class Performed:
    """Checks a quantized model against the float model and the plan behind it.

    Args:
        model: The prepared float model.
        quantized: What the quantizer made of it.
        plan: The plan.
    """

    def __init__(self, model: onnx.ModelProto, quantized: onnx.ModelProto, plan: PlacementPlan) -> None:
        self.model, self.quantized, self.plan = model, quantized, plan
        self.nodes = {node.name: node for node in quantized.graph.node}
        self.float_nodes = {node.name: node for node in model.graph.node}
        self.producer = {name: node for node in quantized.graph.node for name in node.output if name}
        self.float_producer = {name: node.name for node in model.graph.node for name in node.output if name}
        self.constants = {i.name: numpy_helper.to_array(i) for i in quantized.graph.initializer}
        self.float_constants = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
        self.inputs = {v.name for v in quantized.graph.input}
        self.used_pairs: set[str] = set()  # names of the Q and DQ nodes that the plan accounts for
        self.grids: dict[str, tuple[str, str]] = {}  # names of scale and zero point by value

    def check(self) -> None:
        """Raises AssertionError at the first edge that is not as decided."""
        onnx.checker.check_model(self.quantized)
        self._check_nodes()
        for d in self.plan.decisions:
            self._check_edge(d)
        self._check_groups_and_limits()
        pairs = {n.name for n in self.quantized.graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")}
        assert pairs == self.used_pairs, f"not in the plan: {pairs - self.used_pairs}"
        read = {name for node in self.quantized.graph.node for name in (*node.input, *captured_names(node))}
        read |= {v.name for v in self.quantized.graph.output}
        assert set(self.constants) <= read, "an initializer is left that nothing reads"

    def _check_nodes(self) -> None:
        made_by = self.quantized.producer_name, self.quantized.producer_version
        assert made_by == ("kenosis_ort", version("kenosis-ort"))
        names = [node.name for node in self.quantized.graph.node]
        assert len(names) == len(set(names))
        added = Counter(n.op_type for n in self.quantized.graph.node if n.name not in self.float_nodes)
        assert added["Max"] == len(self.plan.barriers)
        assert set(added) <= {"QuantizeLinear", "DequantizeLinear", "Max"}
        for name, before in self.float_nodes.items():
            after = self.nodes[name]
            assert (after.op_type, len(after.input), len(after.output)) == (
                before.op_type, len(before.input), len(before.output)
            )  # fmt: skip
            bodies = [b.SerializeToString(deterministic=True) for b in subgraphs(after)]
            assert bodies == [b.SerializeToString(deterministic=True) for b in subgraphs(before)]
        decided = {(d.edge.consumer, d.edge.index) for d in self.plan.decisions}
        for name, before in self.float_nodes.items():
            for index, value in enumerate(before.input):
                if (name, index) not in decided:
                    assert self.nodes[name].input[index] == value, f"'{name}' input {index} is in no decision"
        assert [v.name for v in self.quantized.graph.output] == [v.name for v in self.model.graph.output]
        assert [v.name for v in self.quantized.graph.input] == [v.name for v in self.model.graph.input]

    def _read_name(self, d: Decision) -> str:
        if d.role is EdgeRole.OUTPUT or d.edge.index < 0:
            return d.edge.value
        return str(self.nodes[d.edge.consumer].input[d.edge.index])

    def _check_edge(self, d: Decision) -> None:
        name = self._read_name(d)
        if d.how is How.FLOAT:
            self._check_is_float_value(d, name)
        elif d.edge.value in self.float_constants:
            self._check_constant(d, name)
        else:
            assert d.how in (How.OWN, How.SHARED, How.DEQUANTIZED)
            self._check_pair(d, name)

    def _check_is_float_value(self, d: Decision, name: str) -> None:
        """The consumer reads the value itself: the same constant, the same input, or the same node's output."""
        if d.edge.value in self.float_constants:
            assert name == d.edge.value
            np.testing.assert_array_equal(self.constants[name], self.float_constants[name])
        elif name in self.inputs:
            assert name == d.edge.value
        else:
            assert self.producer[name].name == self.float_producer[d.edge.value], f"{d.edge} reads '{name}'"

    def _dq(self, d: Decision, name: str) -> onnx.NodeProto:
        dq = self.producer.get(name)
        assert dq is not None, f"{d.edge} reads '{name}', not a DQ"
        assert dq.op_type == "DequantizeLinear", f"{d.edge} reads {dq.op_type}"
        self.used_pairs.add(dq.name)
        return dq

    def _check_pair(self, d: Decision, name: str) -> None:
        dq = self._dq(d, name)
        q = self.producer[dq.input[0]]
        assert q.op_type == "QuantizeLinear"
        self.used_pairs.add(q.name)
        assert list(q.input[1:]) == list(dq.input[1:]), "Q and DQ of one value name the same parameters"
        source = q.input[0]
        if d.edge.value in self.plan.barriers:
            barrier = self.producer[source]
            assert (barrier.op_type, len(barrier.input)) == ("Max", 1)
            source = barrier.input[0]
        if source in self.inputs:
            assert source == d.edge.value
        else:
            assert self.producer[source].name == self.float_producer[d.edge.value]
        scale, zero_point = (self.constants[i] for i in q.input[1:])
        assert scale.shape == zero_point.shape == (), "Clip is absorbed with rank-0 parameters only"
        assert scale.dtype == np.float32
        assert scale > 0
        self.grids[d.edge.value] = (q.input[1], q.input[2])

    def _check_constant(self, d: Decision, name: str) -> None:
        """A weight or bias lies within half a step of the grid that its role asks for, a scalar on it."""
        dq = self._dq(d, name)
        values, scale, zero_point = (self.constants[i] for i in dq.input)
        real = self.float_constants[d.edge.value].astype(np.float64)
        if d.role not in (EdgeRole.WEIGHT, EdgeRole.BIAS):
            assert values.shape == real.shape
            assert scale.shape == zero_point.shape == ()
            exact = (values.astype(np.float64) - int(zero_point)) * float(scale)
            np.testing.assert_allclose(exact, real, rtol=1e-6)
            return
        assert not zero_point.any(), "symmetric"
        assert values.dtype == zero_point.dtype == (np.int32 if d.role is EdgeRole.BIAS else np.int8)
        step = scale.astype(np.float64)
        if d.role is EdgeRole.BIAS:
            self._check_grid_of_products(d, scale)
            real = real.reshape(values.shape) * d.beta
        elif d.axis is not None:
            assert scale.shape == (real.shape[d.axis],)
            assert onnx.helper.get_node_attr_value(dq, "axis") == d.axis
            step = step.reshape([-1 if axis == d.axis else 1 for axis in range(real.ndim)])
        else:
            assert scale.shape == ()
        assert (np.abs(values * step - real) <= step * (0.5 + 1e-6)).all(), "a step, or the bias overflowed"

    def _check_grid_of_products(self, d: Decision, scale: Array) -> None:
        """The scales of a bias are the products of those that its integer kernel reads."""
        consumer = self._integer_reader(d)
        x, w = (self.producer[consumer.input[i]] for i in (0, 1))
        grid = self.constants[x.input[1]] * self.constants[w.input[1]]
        np.testing.assert_array_equal(scale, grid)
        assert scale.dtype == grid.dtype == np.float32
        if consumer.op_type == "Gemm":
            beta = [a.f for a in consumer.attribute if a.name == "beta"]
            assert beta in ([], [1.0]), "beta was multiplied into the bias"

    def _integer_reader(self, d: Decision) -> onnx.NodeProto:
        """Returns the node whose scales the bias follows: the reader, or the MatMul before an Add."""
        consumer = self.nodes[d.edge.consumer]
        if consumer.op_type != "Add":
            return consumer
        (other,) = (name for i, name in enumerate(consumer.input) if i != d.edge.index)
        return self.producer[other]

    def _check_groups_and_limits(self) -> None:
        by_group: dict[str, set[tuple[str, str]]] = {}
        for value, d in self.plan.quantized_values():
            if value in self.grids:
                by_group.setdefault(d.provider or value, set()).add(self.grids[value])
        assert all(len(found) == 1 for found in by_group.values()), "one group, one scale"
        assert len(set().union(*by_group.values())) == len(by_group), "two groups, two scales"
        for limit in self.plan.limits:
            if limit.value in self.grids:
                scale, zero_point = (self.constants[name] for name in self.grids[limit.value])
                assert absorbs(float(scale), int(zero_point), limit, signed=zero_point.dtype == np.int8), limit
