"""Valid models with surprising names, sizes, values or shapes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from kenosis_ort import quantize_static
from kenosis_ort.runtime.limits import runtime_limits
from tests import models
from tests.flow.support import heavy, proof, quality, quantized, run, session
from tests.models import Feed, Net


def good(
    model: onnx.ModelProto, folder: Path, feeds: list[Feed] | None = None, least: float = 30, **options: Any
) -> dict[str, bool]:
    """Quantizes, checks quality and proof, and returns which heavy nodes run on integer kernels."""
    out = folder / "out.onnx"
    samples = feeds or models.feeds(model)
    report = quantized(model, out, samples, **options)
    for i in range(len(model.graph.output)):
        assert quality(model, out, samples, output=i) > least
    assert report.left_float() == ()
    assert proof(report).silently_quantized() == ()
    assert report.warnings == ()
    return heavy(report)


# ---- names ----------------------------------------------------------------------------------------------------


def renamed(model: onnx.ModelProto, names: Mapping[str, str]) -> onnx.ModelProto:
    """Returns the model with values and initializers renamed."""
    for tensor in model.graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for node in model.graph.node:
        for field in (node.input, node.output):
            for i, name in enumerate(field):
                field[i] = names.get(name, name)
    return model


COLLISIONS = {
    "initializers": {
        "stem_b": "conv1_w_scale",
        "conv1_b": "x_scale",
        "conv2_b": "x_zero_point",
        "head_b": "x_quantized",
    },
    "integers": {"stem_b": "conv1_w_quantized", "conv1_b": "conv2_w_zero_point"},
    "values": {"conv1_out": "x_QuantizeLinear_Output", "relu1_out": "x_DequantizeLinear_Output"},
    "outputs": {"conv1_out": "head_out_QuantizeLinear_Input", "relu1_out": "conv1_w_DequantizeLinear_Output"},
    "scales": {"conv1_out": "stem_relu_out_scale", "relu1_out": "stem_relu_out_zero_point"},
}


@pytest.mark.parametrize("policy", ["auto", "int8"])
@pytest.mark.parametrize("names", COLLISIONS.values(), ids=COLLISIONS)
def test_values_named_like_what_quantization_adds(tmp_path: Path, names: dict[str, str], policy: Any) -> None:
    """A Mul's factor called ``x_scale`` must not become the scale of ``x``."""
    model = renamed(models.residual_block(), names)
    assert all(good(model, tmp_path, protect_outputs=policy).values())


def test_nodes_named_like_what_quantization_adds(tmp_path: Path) -> None:
    model = models.residual_block()
    for node, name in zip(model.graph.node, ("x_QuantizeLinear", "conv1_w_DequantizeLinear"), strict=False):
        node.name = name
    assert all(good(model, tmp_path).values())


def test_a_factor_named_like_the_scale_of_its_input(tmp_path: Path) -> None:
    net = Net()
    y = net.conv(net.input("x", [1, 3, 8, 8]), 3, 4, name="conv0", out="y")
    y = net.op("Mul", [y, net.const(3.0, "y_scale")], name="scaled")
    net.output(net.conv(y, 4, 4, name="conv1"), [1, 4, 8, 8])
    assert all(good(net.model(), tmp_path).values())


def test_a_bias_named_like_the_copy_of_another(tmp_path: Path) -> None:
    """The bias ``b`` is needed on two grids; the second copy must not take the place of the bias ``b_1``."""
    net = Net()
    x = net.input("x", [1, 4, 8, 8])
    b, other = net.const(net.rng.normal(0, 1, 4), "b"), net.const(net.rng.normal(0, 5, 4), "b_1")
    for i, (value, bias) in enumerate([(x, b), (net.op("Mul", [x, net.const(40.0)], name="big"), b), (x, other)]):
        y = net.op("Conv", [value, net.weight((4, 4, 3, 3), name=f"w{i}"), bias], name=f"conv{i}", pads=[1] * 4)
        net.output(y, [1, 4, 8, 8])
    assert all(good(net.model(), tmp_path, least=25).values())


def test_one_initializer_as_weight_and_as_bias(tmp_path: Path) -> None:
    net = Net()
    x = net.op("Relu", [net.gemm(net.input("x", [1, 1]), 1, 4, name="first")], name="relu")
    v = net.const(net.rng.normal(0, 1, (1, 4)), "v")
    y = net.op("Gemm", [x, v, net.const([0.5], "c")], name="as_weight", transB=1)
    net.output(net.op("Gemm", [y, net.const(np.full((1, 4), 0.7), "u"), v], name="as_bias"), [1, 4])
    assert all(good(net.model(), tmp_path).values())


# ---- domains, functions, shapes -------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["nodes", "import"])
def test_the_main_domain_by_its_other_name(tmp_path: Path, where: str) -> None:
    model = models.residual_block()
    if where == "nodes":
        for node in model.graph.node:
            node.domain = "ai.onnx"
    else:
        model.opset_import[0].domain = "ai.onnx"
    assert all(good(model, tmp_path).values())


def test_local_functions(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    one, two = (", ".join(f"{v:.3f}" for v in rng.normal(0, 0.5, n)) for n in (12, 16))
    text = f"""
        <ir_version: 8, opset_import: ["": 17, "local": 1]>
        g (float[1,3,8,8] x) => (float[1,4,8,8] y)
          <float[4,3,1,1] w = {{{one}}}, float[4,4,1,1] w2 = {{{two}}}>
        {{ a = Conv(x, w)  b = local.silu(a)  y = Conv(b, w2) }}
        <domain: "local", opset_import: ["": 17]>
        silu (u) => (v) {{ s = Sigmoid(u)  v = Mul(u, s) }}
    """
    found = good(parser.parse_model(text), tmp_path)
    assert len(found) == 2
    assert all(found.values())


def net_with_defaults(*listed: str) -> onnx.ModelProto:
    """A net whose initializers named here are inputs too."""
    net = Net()
    y = net.op("Mul", [net.conv(net.input("x", [1, 3, 8, 8]), 3, 4, name="a"), net.const(2.0, "factor")], name="scaled")
    net.output(net.conv(y, 4, 4, name="b"), [1, 4, 8, 8])
    model = net.model()
    stored = {t.name: t for t in model.graph.initializer}
    for name in listed or stored:
        kind, dims = stored[name].data_type, list(stored[name].dims)
        model.graph.input.append(onnx.helper.make_tensor_value_info(name, kind, dims))
    return model


def defaults_of(path: Path) -> set[str]:
    return {value.name for value in session(path).get_overridable_initializers()}


def test_a_default_that_is_meant_to_be_overridden_stays_an_input(tmp_path: Path) -> None:
    model = net_with_defaults("factor")
    assert all(good(model, tmp_path, [{"x": np.ones((1, 3, 8, 8), np.float32)}]).values())
    assert defaults_of(tmp_path / "out.onnx") == {"factor"}


def test_a_default_that_the_data_feed_stays_an_input(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    feeds = [{"x": rng.normal(size=(1, 3, 8, 8)).astype(np.float32), "factor": np.float32(i)} for i in range(1, 4)]
    feeds = [{name: np.asarray(value) for name, value in feed.items()} for feed in feeds]
    assert all(good(net_with_defaults(), tmp_path, feeds).values())
    assert defaults_of(tmp_path / "out.onnx") == {"factor"}


def test_weights_that_are_listed_as_inputs_become_constants(tmp_path: Path) -> None:
    feeds = [{"x": np.random.default_rng(0).normal(size=(1, 3, 8, 8)).astype(np.float32)}]
    for model in (net_with_defaults(), net_with_defaults("a_w", "factor")):
        assert all(good(model, tmp_path, feeds).values())
        assert not defaults_of(tmp_path / "out.onnx")


def test_sizes_that_the_model_leaves_open_get_no_made_up_names(tmp_path: Path) -> None:
    net = Net()
    y = net.conv(net.op("Relu", [net.conv(net.input("x", ["n", 3, 8, 8]), 3, 4, name="a")]), 4, 4, name="b")
    found = net.op("NonZero", [net.op("Greater", [y, net.const(0.5)])])
    net.output(y, ["n", 4, 8, 8])
    model = net.model()
    model.graph.output.append(onnx.helper.make_tensor_value_info(found, onnx.TensorProto.INT64, None))
    report = quantized(model, tmp_path / "out.onnx")
    shapes = [[o.shape for o in session(m).get_outputs()] for m in (model, tmp_path / "out.onnx")]
    assert shapes == [[["n", 4, 8, 8], [4, None]]] * 2
    assert report.warnings == ()


@pytest.mark.parametrize("dims", [1, 3])
def test_convs_of_other_dimensions(tmp_path: Path, dims: int) -> None:
    net = Net()
    size = [6] * dims
    pads = {"pads": [1] * 2 * dims}
    y = net.op("Conv", [net.input("x", [1, 3, *size]), net.weight((4, 3, *[3] * dims))], name="conv0", **pads)
    y = net.op("Relu", [y], name="relu")
    net.output(net.op("Conv", [y, net.weight((4, 4, *[3] * dims))], name="conv1", **pads), [1, 4, *size])
    assert all(good(net.model(), tmp_path).values())


def test_weights_that_are_inputs_or_computed(tmp_path: Path) -> None:
    net = Net()
    y = net.op("Conv", [net.input("x", [1, 3, 8, 8]), net.input("w", [4, 3, 1, 1])], name="fed")
    net.output(net.conv(y, 4, 4, name="constant"), [1, 4, 8, 8])
    assert good(net.model(), tmp_path) == {"fed": False, "constant": True}


def test_unused_inputs_initializers_and_nodes(tmp_path: Path) -> None:
    net = Net()
    y = net.conv(net.input("x", [1, 3, 8, 8]), 3, 4, name="conv0")
    net.input("unused", [1, 2])
    net.const(np.ones(3), "unused_constant")
    net.op("Relu", [y], name="dead_end")
    net.output(net.conv(y, 4, 4, name="conv1"), [1, 4, 8, 8])
    assert all(good(net.model(), tmp_path).values())


@pytest.mark.parametrize("opset", [18, 19, 20, 22, 23, 24])
def test_later_opsets(tmp_path: Path, opset: int) -> None:
    if opset > runtime_limits().max_opset:
        pytest.skip("newer than the runtime")
    assert all(good(models.residual_block(opset=opset), tmp_path).values())


# ---- values ---------------------------------------------------------------------------------------------------


def zero(name: str) -> onnx.ModelProto:
    model = models.residual_block()
    for tensor in model.graph.initializer:
        if tensor.name == name:
            tensor.CopyFrom(numpy_helper.from_array(np.zeros_like(numpy_helper.to_array(tensor)), name))
    return model


@pytest.mark.parametrize("name", ["conv1_w", "conv1_b", "stem_w", "head_w"])
def test_weights_of_zero(tmp_path: Path, name: str) -> None:
    assert all(good(zero(name), tmp_path, least=25).values())


@pytest.mark.parametrize("factor", [0.0, 1e-38, 1e-20, 1e20, 1e30])
def test_inputs_of_any_magnitude(tmp_path: Path, factor: float) -> None:
    model = models.residual_block()
    feeds = [{"x": (f["x"] * factor).astype(np.float32)} for f in models.feeds(model)]
    assert all(is_integer or factor == 1e-38 for is_integer in good(model, tmp_path, feeds).values())


def test_batches_of_nothing(tmp_path: Path) -> None:
    net = Net()
    y = net.op("Relu", [net.conv(net.input("x", ["N", 3, 8, 8]), 3, 4, name="conv0")], name="relu")
    net.output(net.conv(y, 4, 4, name="conv1"), ["N", 4, 8, 8])
    model = net.model()
    nothing = {"x": np.zeros((0, 3, 8, 8), np.float32)}
    assert all(good(model, tmp_path, [*models.feeds(model, 3), nothing]).values())


# ---- magnitudes at the ends of float32 ----------------------------------------------------------------------------


def scaled_net(first: float, second: float, biases: float, dead: float = 1.0) -> onnx.ModelProto:
    """Two Convs and a Gemm whose weights are of these magnitudes; every other channel times ``dead``."""
    rng = np.random.default_rng(0)
    text = """<ir_version: 8, opset_import: ["": 17]> net (float[1,3,12,12] x) => (float[1,4] y) {
      a = Conv <pads = [1,1,1,1]> (x, w1, b1)   r = Relu (a)   c = Conv <pads = [1,1,1,1]> (r, w2, b2)
      s = Relu (c)   p = GlobalAveragePool (s)   f = Flatten (p)   y = Gemm (f, w3, b3) }"""
    arrays = {
        "w1": rng.normal(size=(8, 3, 3, 3)) * 0.2 * first,
        "w2": rng.normal(size=(8, 8, 3, 3)) * 0.1 * second,
        "w3": rng.normal(size=(8, 4)),
        "b1": rng.normal(size=8) * biases,
        "b2": rng.normal(size=8) * biases,
        "b3": rng.normal(size=4),
    }
    for name in ("w2", "b1"):
        arrays[name][::2] *= dead
    model: onnx.ModelProto = parser.parse_model(text)
    for node in model.graph.node:
        node.name = node.output[0]
    model.graph.initializer.extend(numpy_helper.from_array(a.astype(np.float32), n) for n, a in arrays.items())
    return model


@pytest.mark.parametrize(
    ("magnitudes", "integer"),
    [
        ((1.0, 1e-36, 1.0), {"a", "y"}),
        ((1.0, 1.0, 1e-40), {"a", "c", "y"}),
        ((1.0, 1.0, 1.0, 1e-36), {"a", "c", "y"}),
        ((1.0, 1.0, 1e-36, 1e-42), {"a", "c", "y"}),
        ((1e-20, 1e-20, 1e-20), {"a", "y"}),
        ((1e36, 1e-36, 1.0), {"y"}),
        ((0.0, 1.0, 1.0), {"a", "c", "y"}),
    ],
)
def test_weights_at_the_ends_of_float32(tmp_path: Path, magnitudes: tuple[float, ...], integer: set[str]) -> None:
    model = scaled_net(*magnitudes)
    feeds = models.feeds(model, 4)
    report = quantized(model, tmp_path / "out.onnx", feeds)
    assert {name for name, is_integer in heavy(report).items() if is_integer} == integer
    assert quality(model, tmp_path / "out.onnx", feeds) > 30
    if len(integer) == 1:
        assert "beyond what scales hold" in report.plan.explain("c")


@pytest.mark.parametrize("kind", ["zipmap", "sequence", "optional"])
def test_outputs_that_are_no_tensors_are_compared(tmp_path: Path, kind: str) -> None:
    """A classifier's ZipMap, a list of tensors of several sizes: the report says how good they are."""
    net = Net()
    x = net.input("x", [1, 8])
    scores = net.gemm(net.op("Relu", [net.gemm(x, 8, 16, name="a")]), 16, 4, name="b")
    tensor = onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, None)
    if kind == "zipmap":
        made = net.op("ZipMap", [net.op("Softmax", [scores])], domain="ai.onnx.ml", classlabels_int64s=[3, 1, 2, 0])
        scalar = onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, [])
        described = onnx.helper.make_sequence_type_proto(
            onnx.helper.make_map_type_proto(onnx.TensorProto.INT64, scalar)
        )
    elif kind == "sequence":
        made, described = net.op("SequenceConstruct", [scores, x]), onnx.helper.make_sequence_type_proto(tensor)
    else:
        made, described = net.op("Optional", [scores]), onnx.helper.make_optional_type_proto(tensor)
    net.output(scores, [1, 4])
    model = net.model()
    model.opset_import.add(domain="ai.onnx.ml", version=3)
    model.graph.output[0].CopyFrom(onnx.helper.make_value_info(made, described))
    out = tmp_path / "out.onnx"
    report = quantized(model, out, models.feeds(model, 8), recipe="fast")
    assert report.warnings == ()
    assert [o.name for o in report.outputs] == [made]
    assert 25 < report.outputs[0].sqnr_db < 80
    found, expected = (run(m, models.feeds(model, 1))[0][0] for m in (out, model))
    assert type(found) is type(expected)


@pytest.mark.parametrize("recipe", ["plain", "fast"])
def test_outputs_that_are_drawn_at_random_are_not_compared(tmp_path: Path, recipe: str) -> None:
    net = Net()
    x = net.input("x", [1, 8])
    y = net.gemm(net.op("Relu", [net.gemm(x, 8, 16, name="a")]), 16, 4, name="b")
    z = net.op("Add", [net.op("RandomNormalLike", [y], scale=5.0), y])
    net.output(y, [1, 4])
    net.output(z, [1, 4])
    report = quantized(net.model(), tmp_path / "out.onnx", models.feeds(net.model(), 8), recipe=recipe)
    assert report.warnings == ()
    assert [o.name for o in report.outputs] == [y]
    assert any("is random" in note for note in report.notes)
    assert all(heavy(report).values())


@pytest.mark.parametrize("island", [False, True])
def test_a_net_that_is_quantized_in_part_has_its_rest_quantized(tmp_path: Path, island: bool) -> None:
    rng = np.random.default_rng(0)
    wide = [rng.standard_normal((16, 16)).astype(np.float32) / 4 for _ in range(2)]
    weights = {
        "w1": wide[0],
        "w2": wide[1],
        "s": np.float32(0.04),
        "z": np.uint8(128),
        "q": rng.integers(-127, 128, (16, 16)).astype(np.int8),
        "ws": np.float32(0.004),
        "wz": np.int8(0),
    }
    helper = onnx.helper
    inside = [
        helper.make_node("DequantizeLinear", ["aq", "s", "z"], ["ad"], name="ad"),
        helper.make_node("DequantizeLinear", ["q", "ws", "wz"], ["wd"], name="wd"),
        helper.make_node("MatMul", ["ad", "wd"], ["b"], name="mid"),
    ]
    if island:
        inside = [
            helper.make_node("QLinearMatMul", ["aq", "s", "z", "q", "ws", "wz", "s", "z"], ["bq"], name="mid"),
            helper.make_node("DequantizeLinear", ["bq", "s", "z"], ["b"], name="bd"),
        ]
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["a"], name="first"),
        helper.make_node("QuantizeLinear", ["a", "s", "z"], ["aq"], name="aq"),
        *inside,
        helper.make_node("MatMul", ["b", "w2"], ["y"], name="last"),
    ]
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [4, 16]) for name in "xy"]
    held = [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    feeds = [{"x": rng.standard_normal((4, 16)).astype(np.float32)} for _ in range(8)]
    report = quantize_static(model, tmp_path / "out.onnx", models.FeedReader(feeds), promise=False)
    assert heavy(report)["first"]
    assert heavy(report)["last"]
    assert quality(model, tmp_path / "out.onnx", feeds) > 20
