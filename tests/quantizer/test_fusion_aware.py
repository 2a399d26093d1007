"""The quantizer performs the plan to the letter, checked edge by edge; and how the quantized model is sorted."""

from collections import Counter
from importlib.metadata import version

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st
from onnx import TensorProto, helper, numpy_helper, parser
from onnxruntime.quantization import CalibrationMethod, QuantType
from onnxruntime.quantization.calibrate import TensorsData
from onnxruntime.quantization.onnx_model import ONNXModel

from kenosis_ort import Stages, UnsupportedModelError, verify_fusion
from kenosis_ort.graph.constants import replace_nodes
from kenosis_ort.graph.outside import copy_model
from kenosis_ort.graph.qdq import integer_bounds
from kenosis_ort.graph.walk import captured_names, subgraphs
from kenosis_ort.plan import EdgeRole, How
from kenosis_ort.quantizer.fusion_aware import FusionAwareQDQQuantizer, ModelWithBodies, sort_nodes_as_stock
from kenosis_ort.quantizer.grids import absorbs
from tests import models
from tests.clients.support import worst_db
from tests.flow.support import changed, run
from tests.planning import prepared, quantize


class Performed:
    """Checks a quantized model against the float model and the plan behind it.

    Args:
        model: The prepared float model.
        quantized: What the quantizer made of it.
        plan: The plan.
    """

    def __init__(self, model, quantized, plan):
        self.model, self.quantized, self.plan = model, quantized, plan
        self.nodes = {node.name: node for node in quantized.graph.node}
        self.float_nodes = {node.name: node for node in model.graph.node}
        self.producer = {name: node for node in quantized.graph.node for name in node.output if name}
        self.float_producer = {name: node.name for node in model.graph.node for name in node.output if name}
        self.constants = {i.name: numpy_helper.to_array(i) for i in quantized.graph.initializer}
        self.float_constants = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
        self.used_pairs: set[str] = set()  # names of the Q and DQ nodes that the plan accounts for
        self.grids: dict[str, tuple[str, str]] = {}  # names of scale and zero point by value

    def check(self):
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

    def _check_nodes(self):
        made_by = self.quantized.producer_name, self.quantized.producer_version
        assert made_by == ("kenosis_ort", version("kenosis-ort"))
        assert len(self.nodes) == len(self.quantized.graph.node), "two nodes have one name"
        added = Counter(n.op_type for n in self.quantized.graph.node if n.name not in self.float_nodes)
        assert added["Max"] == len(self.plan.barriers)
        assert set(added) <= {"QuantizeLinear", "DequantizeLinear", "Max"}
        decided = {(d.edge.consumer, d.edge.index) for d in self.plan.decisions}
        for name, before in self.float_nodes.items():
            kept = [(n.op_type, len(n.input), len(n.output), [*subgraphs(n)]) for n in (before, self.nodes[name])]
            assert kept[0] == kept[1]
            for index, value in enumerate(before.input):
                if (name, index) not in decided:
                    assert self.nodes[name].input[index] == value, f"'{name}' input {index} is in no decision"
        assert [v.name for v in self.quantized.graph.output] == [v.name for v in self.model.graph.output]
        assert [v.name for v in self.quantized.graph.input] == [v.name for v in self.model.graph.input]

    def _check_edge(self, d):
        is_named = d.role is EdgeRole.OUTPUT or d.edge.index < 0
        name = d.edge.value if is_named else self.nodes[d.edge.consumer].input[d.edge.index]
        if d.how is How.FLOAT:
            self._check_is_float_value(d, name)
        elif d.edge.value in self.float_constants:
            self._check_constant(d, name)
        else:
            assert d.how in (How.OWN, How.SHARED, How.DEQUANTIZED)
            self._check_pair(d, name)

    def _check_is_float_value(self, d, name):
        """The consumer reads the value itself: the same constant, the same input, or the same node's output."""
        if name in self.producer:
            assert self.producer[name].name == self.float_producer[d.edge.value], f"{d.edge} reads '{name}'"
        else:
            assert name == d.edge.value
            np.testing.assert_array_equal(self.constants.get(name), self.float_constants.get(name))

    def _dq(self, d, name):
        dq = self.producer.get(name)
        assert getattr(dq, "op_type", "no node's output") == "DequantizeLinear", f"{d.edge} reads '{name}', not a DQ"
        self.used_pairs.add(dq.name)
        return dq

    def _check_pair(self, d, name):
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
        self._check_is_float_value(d, source)
        scale, zero_point = (self.constants[i] for i in q.input[1:])
        assert scale.shape == zero_point.shape == (), "Clip is absorbed with rank-0 parameters only"
        assert (scale.dtype, scale > 0) == (np.float32, True)
        self.grids[d.edge.value] = (q.input[1], q.input[2])

    def _check_constant(self, d, name):
        """A weight or bias lies within half a step of the grid that its role asks for, a scalar on it."""
        dq = self._dq(d, name)
        values, scale, zero_point = (self.constants[i] for i in dq.input)
        real = self.float_constants[d.edge.value].astype(np.float64)
        if d.role not in (EdgeRole.WEIGHT, EdgeRole.BIAS):
            assert (values.shape, scale.shape, zero_point.shape) == (real.shape, (), ())
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
            assert (scale.shape, helper.get_node_attr_value(dq, "axis")) == ((real.shape[d.axis],), d.axis)
            step = step.reshape([-1 if axis == d.axis else 1 for axis in range(real.ndim)])
        else:
            assert scale.shape == ()
        assert (np.abs(values * step - real) <= step * (0.5 + 1e-6)).all(), "a step, or the bias overflowed"

    def _check_grid_of_products(self, d, scale):
        """The scales of a bias are the products of those that its integer kernel reads."""
        consumer = self.nodes[d.edge.consumer]
        if consumer.op_type == "Add":  # behind the MatMul whose scales the bias follows
            consumer = self.producer[consumer.input[1 - d.edge.index]]
        x, w = (self.producer[consumer.input[i]] for i in (0, 1))
        grid = self.constants[x.input[1]] * self.constants[w.input[1]]
        np.testing.assert_array_equal(scale, grid)
        assert scale.dtype == grid.dtype == np.float32
        if consumer.op_type == "Gemm":
            beta = [a.f for a in consumer.attribute if a.name == "beta"]
            assert beta in ([], [1.0]), "beta was multiplied into the bias"

    def _check_groups_and_limits(self):
        by_group = {}
        for value, d in self.plan.quantized_values():
            if value in self.grids:
                by_group.setdefault(d.provider or value, set()).add(self.grids[value])
        assert all(len(found) == 1 for found in by_group.values()), "one group, one scale"
        assert len(set().union(*by_group.values())) == len(by_group), "two groups, two scales"
        for limit in self.plan.limits:
            if limit.value in self.grids:
                scale, zero_point = (self.constants[name] for name in self.grids[limit.value])
                bounds = integer_bounds(8, signed=zero_point.dtype == np.int8)
                assert absorbs(float(scale), int(zero_point), limit, bounds), limit


def checked(model, **options):
    done = quantize(model, **options)
    Performed(done.model, done.quantized, done.plan).check()
    return done


def constant(done, name):
    return {i.name: numpy_helper.to_array(i) for i in done.quantized.graph.initializer}[name]


@pytest.mark.parametrize(
    "options", [{"per_channel": False}, {"reduce_range": True}, {"activation_type": TensorProto.INT8}]
)
def test_every_edge_is_as_decided_in_other_types(options):
    """Any net of the usual types is tried in `tests.contracts.test_any_net`."""
    for name in ("residual_block", "mobile_block", "mlp", "concat_net"):
        done = checked(models.ALL[name](), **options)
        assert worst_db(done.model, done.quantized, list(done.feeds)) > 10


def test_a_shared_bias_gets_a_private_copy_where_scales_differ_and_none_where_they_agree():
    done = checked("""net (float[1,4,8,8] x) => (y, z) <float[4,4,1,1] w, float[4,4,1,1] v, float[4] b> {
        c = Conv (x, w, b) r = Relu (c) y = Conv (r, v, b) z = Conv (r, v, b) }""")
    readers = {n.name: n.input[2] for n in done.quantized.graph.node if n.op_type == "Conv"}
    assert readers["Conv_y"] == readers["Conv_z"] != readers["Conv_c"]
    counted = [sum(n.input[0].startswith(name) for n in done.quantized.graph.node) for name in ("b", "v_quantized")]
    assert counted == [2, 1]


def test_a_bias_that_a_float_node_reads_too_stays_beside_its_int32_form():
    text = "net (float[1,4,8,8] x) => (y, z) <float[4,4,1,1] w, float[4] b> { y = Conv (x, w, b) z = Tanh (b) }"
    done = quantize(text)
    assert (constant(done, "b_quantized").dtype, constant(done, "b").dtype) == (np.int32, np.float32)


LARGE_BIAS = "net (float[1,1,4,4] x) => (y) <float[2,1,1,1] w, float[2] b> { y = Conv (x, w, b) }"
LARGE = {"w": np.array([[[[1e-9]]], [[[0.5]]]]), "b": np.array([3.0, 3.0])}


@pytest.mark.parametrize("per_channel", [True, False])
def test_a_bias_that_would_overflow_widens_the_weights(per_channel):
    done = checked(LARGE_BIAS, weights=LARGE, per_channel=per_channel)
    np.testing.assert_allclose(constant(done, "b_quantized") * constant(done, "b_scale"), [3.0, 3.0], rtol=1e-4)
    assert np.abs(constant(done, "b_quantized")).max() <= 2**30
    assert worst_db(done.model, done.quantized, list(done.feeds)) > 35


def test_widening_is_switched_off_with_the_bias_stage():
    done = quantize(LARGE_BIAS, weights=LARGE, stages=Stages(bias=False))
    assert abs(int(constant(done, "b_quantized")[0])) >= 2**31 - 1


@pytest.mark.parametrize("gemm", ["<beta = 0.5> (x, w, b)", "<beta = -1.0> (x, w, b)", "(x, w)", "(x, w, )"])
def test_gemm_beta_moves_into_the_bias_which_may_be_left_out(gemm):
    done = checked(f"net (float[2,4] x) => (y) <float[4,3] w, float[3] b> {{ y = Gemm {gemm} }}")
    (node,) = (n for n in done.quantized.graph.node if n.op_type == "Gemm")
    assert [a.f for a in node.attribute if a.name == "beta"] == [1.0] * ("beta" in gemm)
    assert [k.kernel for k in verify_fusion(done.quantized).kernels] == ["com.microsoft.QGemm"]
    assert worst_db(done.model, done.quantized, list(done.feeds)) > 30


# ---- scalars ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("real", [2.0, -2.0, 0.0, 0.5, 1e-6, 300.0])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1, 1)])
def test_a_scalar_operand_is_exact_keeps_its_shape_and_is_float_for_float_nodes(real, shape):
    text = """net (float[1,4,8,8] x) => (y, z) <float[4,4,1,1] w, float[4,4,1,1] v> {
        c = Conv (x, w) m = Mul (c, k) y = Conv (m, v) [sub] z = Sub (x, k) }"""
    done = checked(text, weights={"k": np.full(shape, real, np.float32)})
    assert constant(done, "k_quantized").shape == shape
    assert [n.input[1] for n in done.quantized.graph.node if n.name == "sub"] == ["k"]
    run(done.quantized, done.feeds[:1])


# ---- parameters ---------------------------------------------------------------------------------------------------


def test_a_group_s_parameters_absorb_the_activations_of_all_its_members():
    """The range of the Concat lies inside both Clips' bounds, its 2/255 would still bring them back to life."""
    text = """net (float[1,4,8,8] x) => (y) <float[4,4,1,1] w, float[4,4,1,1] v, float[4,8,1,1] u> {
        a = Conv (x, w) p = Clip (a, low, high) b = Conv (x, v) q = Clip (b, low, high) c = Concat <axis = 1> (p, q)
        y = Conv (c, u) }"""
    done = checked(text, weights={"low": np.float32(-1), "high": np.float32(1)})
    assert {d.provider for v, d in done.plan.quantized_values() if v in "pq"} == {"c"}
    assert verify_fusion(done.quantized).by_node["Conv_a"].absorbed == ("Clip_p",)


def test_a_value_beyond_all_saturation_has_a_range():
    """A Conv that is always below -8 in front of a SiLU."""
    text = """net (float[1,4,8,8] x) => (y) <float[4,4,1,1] w, float[4] b, float[4,4,1,1] v> {
        c = Conv (x, w, b) s = Sigmoid (c) m = Mul (c, s) y = Conv (m, v) }"""
    done = checked(text, weights={"b": np.full(4, -60.0)})
    assert constant(done, "c_scale") == pytest.approx(8 / 255, rel=1e-5)


def test_a_missing_range_and_broken_weights_are_errors_that_name_them():
    done = quantize(models.mlp())
    ranges = {name: np.float32(done.table.range_of(name)) for name in done.table.tensors}
    broken = changed(done.model, fc1_w=np.nan)
    without = {name: ends for name, ends in ranges.items() if name != "relu0_out"}
    for model, known, named in ((done.model, without, "'relu0_out'"), (broken, ranges, "'fc1_w'")):
        table = TensorsData(CalibrationMethod.MinMax, {name: tuple(ends) for name, ends in known.items()})
        types = QuantType.QInt8, QuantType.QUInt8
        quantizer = FusionAwareQDQQuantizer(
            copy_model(model), True, False, *types, table, [], [], [], {}, plan=done.plan
        )
        with pytest.raises(UnsupportedModelError, match=named):
            quantizer.quantize_model()


# ---- what edits a quantized model: lists of numbers, the order of nodes, what is taken out --------------------------


@st.composite
def graphs(draw):
    """Draws a graph in any order of definition, with repeated and left-out inputs."""
    values, nodes = ["x", "z", "w0", "w1"], []
    for i in range(draw(st.integers(1, 8))):
        inputs = draw(st.lists(st.sampled_from(["", *values]), max_size=3))
        outputs = [f"v{i}", *([f"u{i}"] if draw(st.booleans()) else [])]
        nodes.append(helper.make_node("Op", inputs, outputs, name=f"n{i}", domain="test"))
        values += outputs
    inputs = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in ("z", "x", "w1")]
    constants = [numpy_helper.from_array(np.float32([0]), name) for name in ("w1", "w0")]
    return helper.make_model(helper.make_graph(draw(st.permutations(nodes)), "g", inputs, inputs[:1], constants))


@given(graphs())
def test_nodes_are_sorted_as_stock_sorts_them(model):
    stock = ONNXModel(copy_model(model))
    stock.topological_sort()
    sort_nodes_as_stock(model.graph)
    assert [n.SerializeToString() for n in model.graph.node] == [n.SerializeToString() for n in stock.nodes()]


def test_a_body_s_reads_count_as_the_owner_s_in_sorting_too():
    model = prepared(models.net_with_if())
    assert sorted(n.name for n in ModelWithBodies(model).input_name_to_nodes()["conv0_out"]) == ["if", "relu0"]
    replace_nodes(model.graph, list(model.graph.node)[::-1])
    sort_nodes_as_stock(model.graph)
    onnx.checker.check_model(model)


def test_a_cycle_is_an_error_that_names_a_node():
    graph = parser.parse_graph("g (float[1] x) => (float[1] b) { [first] a = Add (x, b) [second] b = Neg (a) }")
    with pytest.raises(ValueError, match="'first'"):
        sort_nodes_as_stock(graph)
