from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from kenosis_ort.rewrite import drop_identity
from tests.graph.build import assert_same, model, ops, ready, value

X = {"x": np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)}


def dropped(proto, **options):
    return ready(proto, rewrites=[drop_identity], **options)


def chain(*steps, outputs=("y",), weights=None):
    nodes = [helper.make_node(op, [*inputs], [output], name=f"n{i}") for i, (op, inputs, output) in enumerate(steps)]
    return model(nodes, [value("x", [2, 3])], [value(name, [2, 3]) for name in outputs], weights)


def check(proto, expected, **options):
    prepared = dropped(proto, **options)
    assert ops(prepared.proto) == expected
    assert_same(proto, prepared.proto, X, rtol=0)
    return prepared


def test_copies_inside_the_graph_go():
    proto = chain(("Identity", ["x"], "a"), ("Relu", ["a"], "b"), ("Identity", ["b"], "c"), ("Neg", ["c"], "y"))
    prepared = check(proto, ["Relu", "Neg"])
    assert prepared.nodes == {"n0": (), "n2": ()}


def test_the_producer_takes_over_an_outputs_name():
    check(chain(("Relu", ["x"], "a"), ("Identity", ["a"], "b"), ("Identity", ["b"], "y")), ["Relu"])


def test_an_output_that_only_copies_a_needed_value_stays():
    proto = chain(("Relu", ["x"], "a"), ("Identity", ["a"], "y"), ("Neg", ["a"], "z"), outputs=("y", "z"))
    check(proto, ["Relu", "Identity", "Neg"])
    check(chain(("Identity", ["x"], "y")), ["Identity"])
    check(chain(("Relu", ["x"], "a"), ("Identity", ["a"], "y"), outputs=("a", "y")), ["Relu", "Identity"])


def test_what_joins_or_adds_one_value_alone_goes():
    join = helper.make_node("Concat", ["a"], ["b"], axis=1, name="n1")
    nodes = [helper.make_node("Relu", ["x"], ["a"], name="n0"), join, helper.make_node("Neg", ["b"], ["y"], name="n2")]
    check(model(nodes, [value("x", [2, 3])], [value("y", [2, 3])]), ["Relu", "Neg"])
    check(chain(("Relu", ["x"], "a"), ("Max", ["a"], "b"), ("Sum", ["b"], "c"), ("Neg", ["c"], "y")), ["Relu", "Neg"])
    both = helper.make_node("Concat", ["x", "x"], ["y"], axis=1, name="both")
    check(model([both], [value("x", [2, 3])], [value("y", [2, 6])]), ["Concat"])
    # A cache that is handed on is read as it came.
    cache = chain(("Sum", ["x"], "a"), ("Relu", ["a"], "y"))
    assert check(cache, ["Relu"]).proto.graph.node[0].input[0] == "x"


def test_dropout_in_inference_goes_and_in_training_stays():
    weights = {"r": np.float32(0.5), "off": np.array(False), "on": np.array(True)}
    check(chain(("Dropout", ["x", "r"], "a"), ("Relu", ["a"], "y"), weights=weights), ["Relu"])
    check(chain(("Dropout", ["x", "r", "off"], "a"), ("Relu", ["a"], "y"), weights=weights), ["Relu"])
    training = chain(("Dropout", ["x", "r", "on"], "a"), ("Relu", ["a"], "y"), weights=weights)
    assert ops(dropped(training).proto) == ["Dropout", "Relu"]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["Identity", "Neg"]), st.integers(0, 9)), min_size=1, max_size=10), st.data())
def test_any_graph_of_copies_computes_the_same(steps, data):
    """Nodes read any earlier value, several values are outputs."""
    names = ["x"]
    nodes = []
    for op, at in steps:
        nodes.append(helper.make_node(op, [names[at % len(names)]], [f"v{len(names)}"]))
        names.append(f"v{len(names)}")
    outputs = data.draw(st.lists(st.sampled_from(names[1:]), min_size=1, unique=True))
    kept = data.draw(st.lists(st.sampled_from(names[1:]), max_size=2))
    proto = model(nodes, [value("x", [2, 3])], [value(name, [2, 3]) for name in outputs])
    prepared = dropped(proto, keep_values=kept).proto
    assert_same(proto, prepared, X, rtol=0)
    assert set(kept) <= {name for node in prepared.graph.node for name in node.output}
    assert all(v.type.tensor_type.elem_type == TensorProto.FLOAT for v in prepared.graph.value_info)
