import numpy as np
import onnx

from kenosis_ort.graph.view import CAPTURED, GraphView
from kenosis_ort.graph.walk import known_as
from tests import models
from tests.planning import parse, prepared


def view(text: str) -> GraphView:
    return GraphView(prepared(parse(text, {"zero": np.float32(0)})))


def test_consumers_and_the_sole_one() -> None:
    v = view("net (float[1,3] x) => (y, z, o) { a = Neg (x) o = Abs (x) y = Relu (a) b = Abs (o) z = Add (b, b) }")
    a, o, b = (v.node(n).outputs[0] for n in ("Neg_a", "Abs_o", "Abs_b"))
    assert [(c.node.name, c.index) for c in v.consumers(v.inputs[0])] == [("Neg_a", 0), ("Abs_o", 0)]
    assert v.sole_consumer(a).node.name == "Relu_y"
    assert v.sole_consumer(o) is None, "an output of the graph"
    assert v.sole_consumer(b) is None, "read twice by one node"
    assert v.is_output(o)
    assert not v.is_output(a)
    assert v.node("no such node") is None


def test_what_a_body_reads_is_consumed_by_its_owner() -> None:
    v = GraphView(prepared(models.net_with_if()))
    conv, relu = v.node("conv0").outputs[0], v.node("relu0").outputs[0]
    assert ("if", CAPTURED) in [(c.node.name, c.index) for c in v.consumers(conv)]
    assert [x.name for x in v.captured_by(v.node("if"))] == ["conv0_out"]
    assert v.sole_consumer(relu).node.name == "add"
    alone = GraphView(prepared(models.net_with_if(capture_conv=False)))
    assert alone.sole_consumer(alone.node("relu0").outputs[0]) is None


def test_what_a_nested_body_reads_is_consumed_by_the_outermost_owner() -> None:
    inner = "(float[1,3] q) { q = Abs (a) }"
    branch = f"r () => (float[1,3] p) {{ p = If (f) <then_branch = t () => {inner}, else_branch = e () => {inner}> }}"
    v = view(f"""net (float[1,3] x, bool f) => (y) {{
      a = Neg (x)
      y = If (f) <then_branch = {branch}, else_branch = {branch}>
    }}""")
    a = v.nodes[0].outputs[0]
    assert [(c.node, c.index) for c in v.consumers(a)] == [(v.nodes[1], CAPTURED)]
    assert v.is_pinned(a)
    assert v.sole_consumer(a) is None
    assert not v.is_output(a)
    assert {value.name for value in v.captured_by(v.nodes[1])} == {"f", "a"}


def test_shapes_constants_and_operator_sets() -> None:
    v = view("net (float[N,3] x) => (float[N,3] y) <float[3,2] w> { y = MatMul (x, w) }")
    (x,), w = v.inputs, v.nodes[0].inputs[1]
    assert (v.dims(x), v.rank(x), v.is_float32(x), v.content(w).shape) == ((None, 3), 2, True, (3, 2))
    assert [v.is_constant(value) for value in (x, w, None)] == [False, True, False]
    assert v.opset() == 17


def test_operators_of_other_domains_go_by_their_full_names() -> None:
    """A rule about Relu must not take a custom Relu for one, and bound its range from below by 0."""
    names = {("own", "Relu"): "own.Relu", ("com.microsoft", "Pad"): "com.microsoft.Pad"}
    names |= {("com.microsoft", "Gelu"): "Gelu", ("com.microsoft", "BiasGelu"): "BiasGelu", ("", "Relu"): "Relu"}
    assert {(domain, op): known_as(domain, op) for domain, op in names} == names
    model = parse("net (float[1,3] x) => (y) { y = Relu (x) }")
    model.graph.node[0].domain = "own"
    model.opset_import.add(domain="own", version=1)
    v = GraphView(model)
    assert [node.op_type for node in v.nodes] == ["own.Relu"]
    assert model.graph.node[0].op_type == "Relu"


def test_types_of_maps_are_read_past_and_kept() -> None:
    model = parse("net (float[1,3] x) => (y) { y = Relu (x) }")
    scalar = onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, [])
    described = onnx.helper.make_sequence_type_proto(onnx.helper.make_map_type_proto(onnx.TensorProto.INT64, scalar))
    model.graph.output.append(onnx.helper.make_value_info("z", described))
    model.graph.node.add(op_type="ZipMap", domain="ai.onnx.ml", input=["y"], output=["z"], name="zip")
    before = model.SerializeToString(deterministic=True)
    assert [o.name for o in GraphView(model).outputs] == ["y", "z"]
    assert model.SerializeToString(deterministic=True) == before
