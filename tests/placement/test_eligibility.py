"""What each rule of the target makes of a single node, and which nodes are integer together."""

import numpy as np
import pytest

from kenosis_ort.errors import OptionError
from kenosis_ort.placement.assignment import Assignment
from kenosis_ort.placement.constraints import constrain
from kenosis_ort.placement.eligibility import classify, protect, secondary_inputs
from kenosis_ort.placement.planner import Planner
from kenosis_ort.plan import Kind, PlacementOptions
from kenosis_ort.targets import Role
from kenosis_ort.targets.ort_cpu import ORT_CPU
from tests import models
from tests.planning import parse, plan_of, view_of

CONV = "kernel_shape=[3,3], pads=[1,1,1,1]"
CONV_NET = f"net (float[1,3,8,8] x) => (y) <float[4,3,3,3] w, float[4] b> {{ y = Conv <{CONV}> (x, w, b) }}"


def classes_of(model, weights=None, *, protected=None, **options):
    """Returns the class of each node."""
    return classify(constrain(view_of(model, weights), ORT_CPU, PlacementOptions(**options)), protected or {})


def only(text, weights=None, **options):
    """Returns (role, rule, reason) of the last node."""
    c = list(classes_of(text, weights, **options).values())[-1]
    return c.role, c.rule, c.reason


@pytest.mark.parametrize(("net", "rule", "said"), [
    ("float[1,3,8,8] x, float[4,3,1,1] w) => (y) { y = Conv (x, w) }", "conv-integer", "constant weight"),
    ("float[1,3,8,8] x, float[4] b) => (y) <float[4,3,1,1] w> { y = Conv (x, w, b) }", "conv-integer",
     "not a constant"),
    ("float[2,3] x) => (y) <float[3,4] w> { y = Gemm <alpha = 0.5> (x, w) }", "gemm-integer", "alpha"),
    ("float[3,2] x) => (y) <float[3,4] w> { y = Gemm <transA = 1> (x, w) }", "gemm-integer", "transposed"),
    *((f"float[2,3] x) => (y) <float[3,4] w, {bias} b> {{ y = Gemm (x, w, b) }}", "gemm-integer",
       "one value a channel") for bias in ("float[2,4]", "float[1]")),
    ("float[2,3] x, float[3,4] v) => (y) { y = MatMul (x, v) }", "matmul-activations", "constant weight"),
    ("float[2,3] x) => (y) <float[3] w> { y = MatMul (x, w) }", "matmul-integer", "not a matrix"),
    ("float[2,5,3] x) => (y) <float[2,3,4] w> { y = MatMul (x, w) }", "matmul-integer", "not a matrix"),
    ("int32[2,3] x) => (int32[2,4] y) <int32[3,4] w> { y = MatMul (x, w) }", "not-float32", "float32"),
    ("float[1,3] x) => (y) { y = Softmax (x) }", "softmax-lut", "QLinearSoftmax"),
    ("float[1,3] x) => (y) { y = Round (x) }", "unsupported-op", "no integer kernel for Round"),
    ("float[1,3] x) => (float[1,3] y) { y = com.microsoft.Rfft (x) }", "unsupported-op", "com.microsoft.Rfft"),
])  # fmt: skip
def test_what_forbids_the_integer_kernel(net, rule, said):
    role, found, reason = only(f"({net}")
    assert (role, found, said in reason) == (Role.FLOAT, rule, True), reason


@pytest.mark.parametrize(("weight", "said"), [
    (np.full((3, 4), np.nan), "holds NaN or infinity"), (np.full((3, 4), np.inf), "holds NaN or infinity"),
    (np.zeros((3, 0)), "empty or a scalar"),
])  # fmt: skip
def test_weights_that_have_no_scale(weight, said):
    found = only("(float[2,3] x) => (y) { y = MatMul (x, w) }", {"w": weight.astype(np.float32)})
    assert (found[0], said in found[2]) == (Role.FLOAT, True), found


@pytest.mark.parametrize(("node", "constant", "role"), [
    *((f"{op} (x, k)", operand, Role.BINARY) for op in ("Add", "Mul") for operand in (2.0, [2.0])),
    # A constant by channel is quantized if nothing is lost.
    ("Add (x, k)", [[[[1.0]], [[1.5]], [[2.25]]]], Role.ISLAND),
    ("Mul (x, k)", [[[[1.0]], [[1.5]], [[2.25]]]], Role.BINARY),
    *((f"{op} (x, k)", [[[[1.0]], [[3.1416]], [[2.7183]]]], Role.ISLAND) for op in ("Add", "Mul")),
    ('Resize <mode = "nearest"> (x, , k)', [1, 1, 2, 2], Role.PASS_THROUGH),
    ('Resize <mode = "linear"> (x, , k)', [1, 1, 2, 2], Role.ISLAND),
])  # fmt: skip
def test_what_a_constant_and_a_mode_allow(node, constant, role):
    assert only(f"(float[1,3,8,8] x) => (y) {{ y = {node} }}", {"k": np.array(constant, np.float32)})[0] is role


def test_maxpool_whose_indices_are_read_stays_float():
    text = "net (float[1,3,8,8] x) => (y, int64[1,3,7,7] i) { y, i = MaxPool <kernel_shape = [2,2]> (x) }"
    assert (only(text)[0], "'i' is used" in only(text)[2]) == (Role.ISLAND, True)


def test_the_callers_wishes():
    assert only(CONV_NET)[:2] == (Role.ANCHOR, "conv-integer")
    assert only(CONV_NET, nodes_to_exclude=frozenset({"Conv_y"}))[:2] == (Role.FLOAT, "caller-excluded")
    assert only(CONV_NET, op_types=frozenset({"MatMul"}))[:2] == (Role.FLOAT, "caller-op-types")
    assert only(CONV_NET, op_types=frozenset({"Conv"}))[0] is Role.ANCHOR
    assert only(CONV_NET, keep_float={"Conv_y": "it runs in float"})[1:] == ("verified-float", "it runs in float")
    assert only(CONV_NET, protected={"Conv_y": "a mask"})[1:] == ("protected-input", "a mask")


def test_a_relu_needs_no_mention_in_the_callers_op_types():
    relu = "net (float[1,3] x) => (y) { y = Relu (x) }"
    assert only(relu, op_types=frozenset({"Conv"}))[0] is Role.ACTIVATION
    assert only(relu, nodes_to_exclude=frozenset({"Relu_y"}))[0] is Role.ISLAND
    add = "net (float[1,3] x, float[1,3] z) => (y) { y = Add (x, z) }"
    assert only(add, nodes_to_exclude=frozenset({"Add_y"}))[0] is Role.ISLAND, "the integer domain goes on around it"


def test_a_shape_operator_before_a_body_takes_part_even_if_excluded():
    """The session dies of a float one (rule pass-through-into-body-dies)."""
    text = """net (float[1,4] x, bool f) => (y) { r = Reshape (x, s) y = If (f) <
        then_branch = t () => (float[2,2] a) { a = Neg(r) }, else_branch = e () => (float[2,2] b) { b = Tanh(r) }> }"""
    wish = frozenset({"Reshape_r"})
    assert classes_of(text, {"s": np.array([2, 2])}, nodes_to_exclude=wish)["Reshape_r"].role is Role.PASS_THROUGH


def test_data_are_the_values_that_the_kernel_would_read_quantized():
    c = classes_of("net (float[1,3] x, float[1,3] z) => (y) { y = Concat <axis = 0> (x, z, x) }")["Concat_y"]
    assert ([v.name for v in c.data], [v.name for v in classes_of(CONV_NET)["Conv_y"].data]) == (["x", "z", "x"], ["x"])


def test_a_pool_runs_on_bytes_from_operator_set_12_on():
    text = """net (float[1,4,8,8] x) => (float[1,4,4,4] y) <float[4,4,1,1] w, float[4,4,1,1] v> {
        c = Conv (x, w)  p = MaxPool <kernel_shape = [2,2], strides = [2,2]> (c)  y = Conv (p, v) }"""
    pools = [plan_of(parse(text, opset=opset), min_opset=opset).by_node["MaxPool_p"] for opset in (11, 12)]
    assert [node.kind for node in pools] == [Kind.FLOAT, Kind.PASS_THROUGH]
    assert pools[0].reason == "needs opset 12, the model has 11"


# ---- which nodes are integer: availability forward, demand backward, heads, the output policy, protected inputs -----


def domain_of(model, weights=None, **options):
    given = {"protect_inputs": False, **options}
    return Assignment(view_of(model, weights), ORT_CPU, PlacementOptions(**given)).domain


def net(body):
    return f"net (float[1,4,8,8] x, bool when) => (y) <float[4,4,1,1] w, float[4,4,1,1] v> {{ {body} }}"


def linear(op, body, shape="2,4"):
    return f"net (float[{shape}] x) => (y) <float[4,4] w, float[4,4] m, float[4] b> {{ {op} {body} }}"


INTEGER = {
    "a light node between anchors is integer": (
        "c = Conv (x, w) s = Sigmoid (c) y = Conv (s, v)", "Conv_c Sigmoid_s Conv_y", ""),
    "behind the last anchor it is float: nothing demands integers": (
        "c = Conv (x, w) y = Sigmoid (c)", "Conv_c", "Sigmoid_y"),
    "before the first anchor it is float": ("s = Sigmoid (x) y = Conv (s, v)", "Conv_y", "Sigmoid_s"),
    "unless the input is quantized anyway": (
        "s = Sigmoid (x) c = Conv (x, w) a = Add (c, s) y = Conv (a, v)", "Sigmoid_s Conv_c Add_a Conv_y", ""),
    "a sum of an integer and a float branch is float": (
        "c = Conv (x, w) f = Softmax (c) a = Add (c, f) y = Conv (a, v)", "Conv_c Conv_y", "Add_a"),
    "a small float gate, as of SE, is quantized for the product": (
        "c = Conv (x, w) p = GlobalAveragePool (c) g = Softmax <axis = 1> (p) a = Mul (c, g) y = Conv (a, v)",
        "Mul_a", "",
    ),
    "islands are transparent": ("c = Conv (x, w) t = Tanh (c) a = Add (c, t) y = Conv (a, v)", "Add_a", "Tanh_t"),
    "heavy float nodes are not": (
        "c = Conv (x, w) t = ArgMax <axis = 1> (c) k = Cast <to = 1> (t) a = Add (c, k) y = Conv (a, v)", "", "Add_a"),
    # The runtime dies of a DQ in front of them (rule pass-through-into-body-dies).
    "shape operators before a body move bytes": (
        """c = Conv (x, w) r = Flatten (c) y = If (when) <then_branch = t () => (float[1,256] a) { a = Neg (r) },
           else_branch = e () => (float[1,256] b) { b = Abs (r) }>""", "Flatten_r", ""
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INTEGER)
def test_light_nodes(name):
    body, integer, stays_float = INTEGER[name]
    found = domain_of(net(body)).integer
    assert set(integer.split()) <= found
    assert found.isdisjoint(stays_float.split())


@pytest.mark.parametrize("policy", ["auto", "float", "int8", None])
def test_shape_operators_at_an_output_move_bytes(policy):
    """One DQ at the end, in front of the output."""
    found = domain_of(net("c = Conv (x, w) d = Conv (c, v) y = Flatten (d)"), protect_outputs=policy)
    assert ("Flatten_y" in found.integer) == (policy != "float")


# ---- anchors that write float ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("behind", "floats"), [
    ("y = Identity (p)", True), ("y = Tanh (p)", True), ("y = MatMul (p, m)", False), ("y = Relu (p)", True),
    ("r = Relu (p) y = MatMul (r, m)", False), ("r = Reshape (p, s) y = MatMul (r, m)", False),
    ("t = Tanh (p) n = Neg (p) y = Add (t, n)", True), ("q = MatMul (p, m) y = Add (p, q)", True),
    ("r = Relu (p) y = Softmax (r)", False),
])  # fmt: skip
@pytest.mark.parametrize("op", ["MatMul", "Gemm"])
def test_gemm_and_matmul_write_float_unless_only_integer_kernels_read_it(op, behind, floats):
    found = domain_of(linear(f"p = {op} (x, w)", behind), {"s": np.array([2, 4])})
    assert (f"{op}_p" in found.float_output) == floats


@pytest.mark.parametrize(("shape", "other", "merged"), [("2,4", "x", True), ("2,3,4", "x", False), ("2,4", "b", False)])
def test_a_matmul_that_the_session_would_merge_into_a_float_gemm_writes_integers(shape, other, merged):
    """Rule matmul-residual-float-gemm: in two dimensions, with an Add that is no bias."""
    found = domain_of(linear("p = MatMul (x, w)", f"y = Add (p, {other})", shape))
    assert ("MatMul_p" in found.float_output) == (not merged)


@pytest.mark.parametrize(("policy", "floats"), [("auto", {"MatMul_y"}), ("int8", set()), (None, set())])
def test_int8_outputs_are_stocks(policy, floats):
    assert domain_of(linear("y = MatMul (x, w)", ""), protect_outputs=policy).float_output == floats


# ---- heads ------------------------------------------------------------------------------------------------------


def test_heads_are_the_anchors_behind_which_no_anchor_lies():
    assert set(domain_of(models.two_input_detector()).last_anchors) == {"box_head", "score_head"}
    assert set(domain_of(models.net_with_if()).last_anchors) == {"conv1"}
    assert domain_of(net("y = Conv (x, w)")).last_anchors == {"Conv_y": False}, "auto never keeps the only Conv float"


@pytest.mark.parametrize(("policy", "stays"), [("float", True), ("int8", False), (None, False)])
def test_the_policy_decides_about_conv_heads_and_not_about_gemms(policy, stays):
    found = domain_of(models.concat_net(), protect_outputs=policy)
    assert (found.last_anchors, "head" in found.integer) == ({"head": stays}, not stays)
    assert "fc2" in domain_of(models.mlp(), protect_outputs=policy).integer


@pytest.mark.parametrize(("channels", "stays"), [(8, True), (512, False)])
def test_auto_keeps_a_conv_head_float_where_it_costs_next_to_nothing(channels, stays):
    """Of the multiply-accumulates the head has 0.3 % or 18 %."""
    text = f"""net (float[1,16,64,64] x) => (y) <float[64,16,3,3] w, float[{channels},64,1,1] v> {{
      c = Conv <{CONV}> (x, w) p = AveragePool <kernel_shape = [4,4], strides = [4,4]> (c) y = Conv (p, v) }}"""
    assert domain_of(text).last_anchors == {"Conv_y": stays}


# ---- scale factors, masks, ids and shapes keep out of int8, and so does the node where they meet the data ------------


def secondary(declared, primary=None):
    """The secondary inputs of a net with these inputs."""
    body = " ".join(f"y{i} = Neg ({each.split()[-1]})" for i, each in enumerate(declared.split(", ")))
    return list(secondary_inputs(view_of(f"({declared}) => (y0) {{ {body} }}"), primary))


SECONDARY = """scale_factor im_shape image_shape im_info attention_mask token_type_ids position_ids sr h0 c0 state
    hidden_state past_key_values cache_k orig_target_sizes x_lengths"""
PRIMARY = "image x input pixel_values audio src features tokens"


@pytest.mark.parametrize(("declared", "found"), [
    *((f"float[1,3,8,8] image, float[1,2] {name}", [name]) for name in SECONDARY.split()),
    *((f"float[1,3,8,8] {name}", []) for name in PRIMARY.split()),
    ("float[1,3,8,8] picture, float[1,2] extra, float[1,64] embedding", ["extra"]),  # small beside a picture
    ("float[1,4] a, float[1,2] b", []),  # two matrices
    ("float[1,3,8,8] mask", []),  # never all of them
])  # fmt: skip
def test_inputs_are_secondary_by_name_or_as_small_vectors(declared, found):
    assert secondary(declared) == found


def test_the_callers_word_counts():
    declared = "float[1,3,8,8] image, float[1,3,8,8] mask"
    assert (secondary(declared, ["mask"]), secondary(declared, ["image", "mask"])) == (["image"], [])
    with pytest.raises(OptionError, match=r"'imge'.*Did you mean 'image'"):
        secondary(declared, ["imge"])


@pytest.mark.parametrize(("text", "found", "why"), [
    # The flood of a mask stops where it meets the data.
    ("(float[1,3,8,8] x, float[1,1,1,8] mask) => (y) { h = Mul (mask, half) a = Add (x, h) y = Neg (a) }",
     "Mul_h Add_a", "mixes main data with a protected tensor"),
    ("""(float[1,C,8,8] x) => (float[D] y, float[1,C,8,8] z)
        { s = Shape (x) f = Cast <to = 1> (s) y = Mul (f, half) z = Neg (x) }""", "Shape_s Cast_f Mul_y", ""),
    # The bound of a Clip is computed from the data: the chain to it is float, the data are not protected.
    ("(float[1,3,8,8] x) => (y) { m = ReduceMax <keepdims = 0> (x) h = Mul (m, half) y = Clip (x, zero, h) }",
     "Mul_h ReduceMax_m", "computes a shape, a bound or an index, not data"),
    # What steers and feeds is data.
    ("(float[1,3,8,8] x) => (y, z) { m = ReduceMax <keepdims = 0> (x) y = Clip (x, zero, m) z = Neg (m) }", "", ""),
], ids=["mask", "shape", "bound", "both"])  # fmt: skip
def test_what_only_steers_stays_float(text, found, why):
    known = {name: np.float32(value) for name, value in (("half", 0.5), ("zero", 0)) if name in text}
    protected = protect(view_of(text, known), None)
    assert [*protected] == found.split()
    assert not protected or why in [*protected.values()][-1]


@pytest.mark.parametrize("left", ["Conv_r", "Conv_p Conv_c"])
def test_a_head_that_is_kept_float_stays_so_when_others_are_left_float(left):
    """Nothing else is observed. Without Conv_r, Conv_c is a head; without Conv_p and Conv_c, the heads are all work."""
    body = f"p = Conv <{CONV}> (x, w) a = GlobalAveragePool (p) y = Conv (a, u)"
    body += f" c = Conv <{CONV}> (p, w) b = GlobalAveragePool (c) r = Conv (b, u)"
    view = view_of(f"net (float[1,4,8,8] x) => (y, r) <float[4,4,3,3] w, float[4,4,1,1] u> {{ {body} }}")
    planner = Planner(view, ORT_CPU, PlacementOptions(protect_inputs=False))
    first, again = planner.plan(), planner.plan({}, dict.fromkeys(left.split(), "slow"))
    assert [p.by_node["Conv_y"].rule for p in (first, again)] == ["output-protection"] * 2
