"""Which Relu and Clip may vanish, with what bounds; and bounds beyond which no consumer sees a difference."""

import numpy as np
import onnx
import pytest

from kenosis_ort.graph.view import GraphView
from kenosis_ort.placement.absorption import Absorption, SeenAs, saturation_limits, seen_as, values_of_own_scale
from kenosis_ort.placement.constraints import constrain
from kenosis_ort.placement.eligibility import classify
from kenosis_ort.placement.planner import Planner
from kenosis_ort.plan import PlacementOptions, RangeLimit
from kenosis_ort.targets.ort_cpu import ORT_CPU
from tests.planning import parse, view_of


def absorption(text, weights=None, **options):
    wishes = constrain(view_of(text, weights), ORT_CPU, PlacementOptions(**options))
    return Absorption(wishes, classify(wishes, {}))


def conv_then(behind, outputs="y"):
    return f"net (float[1,3,8,8] x) => ({outputs}) <float[4,3,1,1] w> {{ c = Conv (x, w)\n {behind} }}"


BOUNDS = {"zero": 0, "six": 6, "one": 1, "low": -1, "high": 2, "three": 3, "largest": np.finfo(np.float32).max}
BOUNDS = {name: np.float32(bound) for name, bound in BOUNDS.items()}
CONCAT = "Concat <axis = 0> (x, x)"
IF = """z = If (f) <then_branch = t () => (float[1,4,8,8] a) { a = Neg (c) },
                   else_branch = e () => (float[1,4,8,8] b) { b = Abs (c) }>"""


@pytest.mark.parametrize(("activation", "low", "high"), [
    ("Relu (c)", 0.0, None), ("Clip (c, zero, six)", 0.0, 6.0), ("Clip (c, zero)", 0.0, None),
    ("Clip (c, , six)", None, 6.0), ("Clip (c, low, one)", -1.0, 1.0),
    ("Clip (c, zero, largest)", 0.0, None),  # as exporters write a one-sided Clip
])  # fmt: skip
def test_an_activation_behind_a_conv_vanishes(activation, low, high):
    found, name = absorption(conv_then(f"y = {activation}"), BOUNDS), f"{activation.split()[0]}_y"
    assert (found.limits, found.refused) == ({"y": RangeLimit("y", low, high)}, {})
    assert (found.by_producer["Conv_c"].name, found.by_activation[name].name) == (name, "Conv_c")


@pytest.mark.parametrize("producer", ["Gemm (x, w)", "MatMul (x, w)", "Add (x, x)", "Mul (x, x)", CONCAT])
def test_other_producers(producer):
    text = f"(float[2,4] x) => (y) <float[4,4] w> {{ c = {producer} y = Relu (c) }}"
    assert list(absorption(text).limits) == ["y"]


@pytest.mark.parametrize(("text", "options", "said"), [
    (conv_then("y = Relu (c) z = Neg (c)", "y, z"), {}, "second consumer"),
    (conv_then(f"y = Relu (c) f = Cast <to = 9> (one) {IF}", "y, z"), {}, "second consumer"),
    (conv_then("y = Relu (c)", "y, c"), {}, "output of the graph"),
    (conv_then("y = Clip (c, one, six)"), {}, "leave out 0"),
    (conv_then("m = ReduceMax <keepdims = 0> (x) y = Clip (c, zero, m)"), {}, "computed at run time"),
    ("(float[1,3] x) => (y) { y = Relu (x) }", {}, "no requantization"),
    (conv_then("p = MaxPool <kernel_shape = [2,2]> (c) y = Relu (p)"), {}, "no requantization"),
    (conv_then("s = Sigmoid (c) y = Relu (s)"), {}, "no requantization"),
    (conv_then("y = Relu (c)"), {"nodes_to_exclude": frozenset({"Conv_c"})}, "no requantization"),
    (conv_then("y = Relu (c)"), {"activation_symmetric": True}, "symmetric"),
])  # fmt: skip
def test_refusals(text, options, said):
    found = absorption(text, BOUNDS, **options)
    assert (found.limits, [said in reason for reason in found.refused.values()]) == ({}, [True])


# ---- what all consumers see ------------------------------------------------------------------------------------------


def limits(behind, outputs="y"):
    """What all consumers of ``c`` together see; outputs of types that ONNX does not infer say theirs."""
    if "microsoft" in behind:
        outputs = f"float[1,4,8,8] {outputs}"
    opset = 24 if "= Swish" in behind else 18 if "Mish" in behind else 17
    view = view_of(parse(conv_then(behind, outputs), {**BOUNDS, "k": 1}, opset=opset))
    found = [*saturation_limits(view, view.nodes[0].outputs)]
    assert {limit.value for limit in found} <= {"c"}
    return [(limit.low, limit.high) for limit in found]


SWISH = pytest.mark.since("1.24")  # whose onnx has the operator
HARD = "HardSigmoid <alpha = 0.1666667, beta = 0.5>"


@pytest.mark.parametrize(("behind", "outputs", "found"), [
    ("y = Sigmoid (c)", "y", (-8.0, 8.0)), ("y = Tanh (c)", "y", (-4.0, 4.0)), ("y = HardSwish (c)", "y", (-3.0, None)),
    ("y = HardSigmoid (c)", "y", (-2.5, 2.5)), (f"y = {HARD} (c)", "y", (-3.0, 3.0)),
    ("y = Relu (c)", "y", (0.0, None)), ("y = Erf (c)", "y", (-3.0, 3.0)), ("y = Mish (c)", "y", (-9.0, None)),
    ("y = com.microsoft.Gelu (c)", "y", (-4.5, None)), ("y = Softplus (c)", "y", (-8.0, None)),
    ("y = Elu (c)", "y", (-7.0, None)), ("y = Selu (c)", "y", (-7.0, None)),
    ("y = Celu <alpha = 2.0> (c)", "y", (-14.0, None)), ("y = Clip (c, low, high)", "y", (-1.0, 2.0)),
    ("y = Clip (c, low)", "y", (-1.0, None)), ("s = Sigmoid (c) y = Mul (c, s)", "y", (-8.0, None)),
    ("s = Sigmoid (c) y = Mul (s, c)", "y", (-8.0, None)), (f"s = {HARD} (c) y = Mul (c, s)", "y", (-3.0, None)),
    ("y = com.microsoft.QuickGelu <alpha = 1.0> (c)", "y", (-8.0, None)),
    ("y = com.microsoft.QuickGelu (c)", "y", (-8.0 / 1.702, None)),
    pytest.param("y = Swish <alpha = 2.0> (c)", "y", (-4.0, None), marks=SWISH),
    pytest.param("y = Swish (c)", "y", (-8.0, None), marks=SWISH),
    pytest.param("y = Swish <alpha = -1.0> (c)", "y", None, marks=SWISH),
    # A bounded sum as a gate, HardSwish times 6: the product vanishes below -3, the sum sees nothing beyond 3.
    ("a = Add (c, three) b = Clip (a, zero, six) y = Mul (c, b)", "y", (-3.0, None)),
    ("a = Add (c, three) y = Clip (a, zero, six)", "y", (-3.0, 3.0)),
    # Several consumers take the wider bound on each side.
    ("y = Sigmoid (c) z = Tanh (c)", "y, z", (-8.0, 8.0)), ("y = Sigmoid (c) z = HardSwish (c)", "y, z", (-8.0, None)),
    # What saturates a Concat saturates its parts.
    ("j = Concat <axis = 1> (c, c) y = Relu (j)", "y", (0.0, None)),
    ("j = Concat <axis = 1> (x, c) y = Relu (j)", "y", (0.0, None)),
    ("b = Abs (c) j = Concat <axis = 1> (b, c) y = Relu (j)", "y", None),
    ("j = Concat <axis = 1> (x, c) y = Relu (j)", "y, j", None),
    ("j = Concat <axis = 1> (x, c) r = Relu (j) y = Add (j, r)", "y", None),
    # A consumer sees the difference.
    ("y = Sigmoid (c) z = Neg (c)", "y, z", None), ("y = Sigmoid (c)", "y, c", None), ("y = Neg (c)", "y", None),
    ("s = Sigmoid (x) r = ReduceMean (s) y = Mul (c, r)", "y", None), ("s = Tanh (c) y = Mul (c, s)", "y", None),
    ("y = HardSigmoid <alpha = -0.2> (c)", "y", None), ("y = Elu <alpha = 50.0> (c)", "y", None),
    ("b = ReduceMin <keepdims = 0> (x) y = Clip (c, b)", "y", None),
    ("y = Clip (c, high, low)", "y", None),  # no number lies between
    (f"y = Sigmoid (c) f = Cast <to = 9> (k) {IF}", "y, z", None),
])  # fmt: skip
def test_what_all_consumers_together_see(behind, outputs, found):
    assert limits(behind, outputs) == ([] if found is None else [pytest.approx(found)])


@pytest.mark.parametrize(("behind", "opset", "axes"), [
    ("y = Softmax (c)", 17, (-1,)), ("y = Softmax <axis = 1> (c)", 17, (1,)),
    ("y = Softmax <axis = 2> (c)", 11, (2, 3)), ("r = Reshape (c, shape)\n y = Softmax <axis = 2> (r)", 17, (-1,)),
    ("y = Sigmoid (c)", 17, None), ("s = Softmax (c)\n y = Add (s, c)", 17, None),
    ("r = Reshape (c, shape)\n y = Softmax <axis = 0> (r)", 17, None),
])  # fmt: skip
def test_what_a_softmax_sees(behind, opset, axes):
    for outputs, expected in (("y", axes), ("y, c", None)):
        text = f"(float[1,4,8,8] c0) => ({outputs}) <int64[3] shape> {{ c = Neg (c0)\n {behind} }}"
        model = parse(text, {"shape": [4, 8, 8]}, opset=opset)  # preparation would raise the operator set
        view = GraphView(onnx.shape_inference.infer_shapes(model))
        found = seen_as(view, view.nodes[0].outputs).get("c")
        assert (found.axes if found is not None and found.axes else None) == expected


@pytest.mark.parametrize("mask", [-1e9, -np.inf, np.finfo(np.float32).min, -1e4])
def test_a_mask_in_front_of_a_softmax_does_not_count(mask):
    rng = np.random.default_rng(0)
    scores = rng.normal(0, 3, (2, 4, 9, 9)).astype(np.float32)
    masked = np.where(np.tril(np.ones((9, 9), bool)), scores, np.float32(mask))
    counted = SeenAs(axes=(-1,))(masked)
    assert -40 < counted.min() < counted.max() - 16 == masked.max() - 16
    assert (counted == np.maximum(masked, counted)).all()


PADS = {"pads": [0, 0, 1, 1, 0, 0, 1, 1]}


@pytest.mark.parametrize(("value", "found"), [(-np.inf, True), (-1e9, True), (0.0, False)])
def test_padding_in_front_of_a_maxpool(value, found):
    text = "net (float[1,4,8,8] x) => (y) { c = Pad (x, pads, fill)\n y = MaxPool <kernel_shape = [2,2]> (c) }"
    view = view_of(text, {**PADS, "fill": np.float32(value)})
    assert seen_as(view, view.nodes[0].outputs) == ({"c": SeenAs(filling=value)} if found else {})
    padded = np.pad(np.arange(1, 5, dtype=np.float32).reshape(1, 1, 2, 2), 1, constant_values=value)
    assert SeenAs(filling=value)(padded).min() == 1.0 if found else True


def test_seen_values_keep_type_and_empty_arrays():
    both = SeenAs(-1.0, 1.0, (-1,))
    assert (both(np.zeros((0, 3))).size, both(np.full((1, 3), 9, np.float16)).dtype) == (0, np.float16)


def test_only_values_of_their_own_scale():
    text = """net (float[1,3,8,8] x) => (y) <float[4,3,3,3] w, float[4,4,1,1] v> {
        c = Conv <kernel_shape = [3,3], pads = [1,1,1,1]> (x, w)\n p = Pad (c, pads, fill)
        m = MaxPool <kernel_shape = [3,3], strides = [2,2]> (p)\n r = Transpose <perm = [0,1,3,2]> (m)
        d = Conv <kernel_shape = [1,1]> (r, v)\n s = Sigmoid (d)\n g = Mul (d, s)
        e = Conv <kernel_shape = [1,1]> (g, v)\n y = Neg (e) }"""
    view = view_of(text, {**PADS, "fill": np.float32(-np.inf)})
    plan = Planner(view, ORT_CPU, PlacementOptions(protect_outputs="int8")).plan()
    assert {str(v.name) for v in values_of_own_scale(view, plan)} & {"x", "d", "m", "r"} == {"x", "d"}
    assert seen_as(view, values_of_own_scale(view, plan)).get("d") == SeenAs(-8.0, None)
