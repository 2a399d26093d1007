from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from kenosis_ort.rewrite import sum_to_add
from tests.graph.build import assert_same, model, value
from tests.rewrite.forms import check

SHAPES = [(2, 3, 4), (1, 3, 4), (3, 1), (4,), ()]


def total(shapes, kind=TensorProto.FLOAT):
    names = [f"x{at}" for at in range(len(shapes))]
    nodes = [helper.make_node("Sum", names, ["y"], name="sum")]
    inputs = [value(name, shape, kind) for name, shape in zip(names, shapes, strict=True)]
    return model(nodes, inputs, [value("y", np.broadcast_shapes(*shapes), kind)])


@settings(deadline=None)
@given(shapes=st.lists(st.sampled_from(SHAPES), min_size=2, max_size=5), seed=st.integers(0, 2**16))
def test_any_sum_is_the_same_to_the_bit(shapes, seed):
    rng = np.random.default_rng(seed)
    proto = total(shapes)
    feeds = {f"x{at}": rng.normal(size=shape).astype(np.float32) for at, shape in enumerate(shapes)}
    prepared = check(sum_to_add, proto, feeds, ["Add"] * (len(shapes) - 1))
    assert_same(proto, prepared.proto, feeds, rtol=0)
    last = prepared.proto.graph.node[-1]
    assert (last.name, last.output[0]) == ("sum", "y")
    assert len({node.name for node in prepared.proto.graph.node}) == len(shapes) - 1


def test_one_value_twice():
    proto = model([helper.make_node("Sum", ["x", "x"], ["y"], name="sum")], [value("x", [2])], [value("y", [2])])
    check(sum_to_add, proto, {"x": np.ones(2, np.float32)}, ["Add"])
