"""The quantizer performs the plan to the letter, checked edge by edge; and what edits the quantized model."""

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper, parser
from onnxruntime.quantization import CalibrationMethod, QuantType
from onnxruntime.quantization.calibrate import TensorsData
from onnxruntime.quantization.onnx_model import ONNXModel

from kenosis_ort.errors import UnsupportedModelError
from kenosis_ort.graph.constants import replace_nodes
from kenosis_ort.graph.outside import copy_model
from kenosis_ort.options import Stages
from kenosis_ort.quantizer.fusion_aware import FusionAwareQDQQuantizer, ModelWithBodies, sort_nodes_as_stock
from kenosis_ort.verify import verify_fusion
from tests import models
from tests.clients.support import worst_db
from tests.flow.support import changed, run
from tests.planning import Outcome, prepared, quantize
from tests.quantizer.performed import Performed


def checked(model: onnx.ModelProto | str, **options: Any) -> Outcome:
    done = quantize(model, **options)
    Performed(done.model, done.quantized, done.plan).check()
    return done


def constant(done: Outcome, name: str) -> Any:
    return {i.name: numpy_helper.to_array(i) for i in done.quantized.graph.initializer}[name]


@pytest.mark.parametrize(
    "options", [{"per_channel": False}, {"reduce_range": True}, {"activation_type": TensorProto.INT8}]
)
def test_every_edge_is_as_decided_in_other_types(options: dict[str, Any]) -> None:
    """Any net of the usual types is tried in `tests.contracts.test_any_net`."""
    for name in ("residual_block", "mobile_block", "mlp", "concat_net"):
        done = checked(models.ALL[name](), **options)
        assert worst_db(done.model, done.quantized, list(done.feeds)) > 10


def test_a_shared_bias_gets_a_private_copy_where_scales_differ_and_none_where_they_agree() -> None:
    done = checked("""net (float[1,4,8,8] x) => (y, z) <float[4,4,1,1] w, float[4,4,1,1] v, float[4] b> {
        c = Conv (x, w, b) r = Relu (c) y = Conv (r, v, b) z = Conv (r, v, b) }""")
    assert sum(n.input[0].startswith("b") for n in done.quantized.graph.node) == 2
    readers = {n.name: n.input[2] for n in done.quantized.graph.node if n.op_type == "Conv"}
    assert readers["Conv_y"] == readers["Conv_z"] != readers["Conv_c"]
    stored_once = [n.input[0] for n in done.quantized.graph.node if n.input[0].startswith("v")]
    assert stored_once == ["v_quantized"]


def test_a_bias_that_a_float_node_reads_too_stays_beside_its_int32_form() -> None:
    done = quantize(
        "net (float[1,4,8,8] x) => (y, z) <float[4,4,1,1] w, float[4] b> { y = Conv (x, w, b) z = Tanh (b) }"
    )
    assert (constant(done, "b_quantized").dtype, constant(done, "b").dtype) == (np.int32, np.float32)


LARGE_BIAS = "net (float[1,1,4,4] x) => (y) <float[2,1,1,1] w, float[2] b> { y = Conv (x, w, b) }"
LARGE = {"w": np.array([[[[1e-9]]], [[[0.5]]]]), "b": np.array([3.0, 3.0])}


@pytest.mark.parametrize("per_channel", [True, False])
def test_a_bias_that_would_overflow_widens_the_weights(per_channel: bool) -> None:
    done = checked(LARGE_BIAS, weights=LARGE, per_channel=per_channel)
    np.testing.assert_allclose(constant(done, "b_quantized") * constant(done, "b_scale"), [3.0, 3.0], rtol=1e-4)
    assert np.abs(constant(done, "b_quantized")).max() <= 2**30
    assert worst_db(done.model, done.quantized, list(done.feeds)) > 35


def test_widening_is_switched_off_with_the_bias_stage() -> None:
    done = quantize(LARGE_BIAS, weights=LARGE, stages=Stages(bias=False))
    assert abs(int(constant(done, "b_quantized")[0])) >= 2**31 - 1


@pytest.mark.parametrize("gemm", ["<beta = 0.5> (x, w, b)", "<beta = -1.0> (x, w, b)", "(x, w)", "(x, w, )"])
def test_gemm_beta_moves_into_the_bias_which_may_be_left_out(gemm: str) -> None:
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


def test_a_group_s_parameters_absorb_the_activations_of_all_its_members() -> None:
    """The range of the Concat lies inside both Clips' bounds, its 2/255 would still bring them back to life."""
    text = """net (float[1,4,8,8] x) => (y) <float[4,4,1,1] w, float[4,4,1,1] v, float[4,8,1,1] u> {
        a = Conv (x, w) p = Clip (a, low, high) b = Conv (x, v) q = Clip (b, low, high) c = Concat <axis = 1> (p, q)
        y = Conv (c, u) }"""
    done = checked(text, weights={"low": np.float32(-1), "high": np.float32(1)})
    assert {d.provider for v, d in done.plan.quantized_values() if v in "pq"} == {"c"}
    assert verify_fusion(done.quantized).by_node["Conv_a"].absorbed == ("Clip_p",)


def test_a_value_beyond_all_saturation_has_a_range() -> None:
    """A Conv that is always below -8 in front of a SiLU."""
    text = """net (float[1,4,8,8] x) => (y) <float[4,4,1,1] w, float[4] b, float[4,4,1,1] v> {
        c = Conv (x, w, b) s = Sigmoid (c) m = Mul (c, s) y = Conv (m, v) }"""
    done = checked(text, weights={"b": np.full(4, -60.0)})
    assert constant(done, "c_scale") == pytest.approx(8 / 255, rel=1e-5)


def test_a_missing_range_and_broken_weights_are_errors_that_name_them() -> None:
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
def graphs(draw: st.DrawFn) -> onnx.ModelProto:
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
def test_nodes_are_sorted_as_stock_sorts_them(model: onnx.ModelProto) -> None:
    stock = ONNXModel(copy_model(model))
    stock.topological_sort()
    sort_nodes_as_stock(model.graph)
    assert [n.SerializeToString() for n in model.graph.node] == [n.SerializeToString() for n in stock.nodes()]


def test_a_body_s_reads_count_as_the_owner_s_in_sorting_too() -> None:
    model = prepared(models.net_with_if())
    assert sorted(n.name for n in ModelWithBodies(model).input_name_to_nodes()["conv0_out"]) == ["if", "relu0"]
    replace_nodes(model.graph, list(model.graph.node)[::-1])
    sort_nodes_as_stock(model.graph)
    onnx.checker.check_model(model)


def test_a_cycle_is_an_error_that_names_a_node() -> None:
    graph = parser.parse_graph("g (float[1] x) => (float[1] b) { [first] a = Add (x, b) [second] b = Neg (a) }")
    with pytest.raises(ValueError, match="'first'"):
        sort_nodes_as_stock(graph)
