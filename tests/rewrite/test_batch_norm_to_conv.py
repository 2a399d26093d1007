from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from kenosis_ort.rewrite import batch_norm_to_conv
from tests.graph.build import model, value
from tests.rewrite.forms import check, refused, untouched

RNG = np.random.default_rng(0)
X = {"x": RNG.normal(size=(2, 3, 4, 5)).astype(np.float32)}


def norm_weights(channels, rng=RNG):
    return {
        "g": rng.normal(size=channels).astype(np.float32),
        "b": rng.normal(size=channels).astype(np.float32),
        "m": rng.normal(size=channels).astype(np.float32),
        "v": rng.uniform(0.1, 4, channels).astype(np.float32),
    }


def norm(*, x=("N", 3, "H", "W"), weights=None, op="BatchNormalization", **attributes):
    outputs = attributes.pop("outputs", ["y"])
    nodes = [helper.make_node(op, ["x", "g", "b", "m", "v"], outputs, name="bn", **attributes)]
    given = norm_weights(3) if weights is None else weights
    return model(nodes, [value("x", x)], [value("y", [None] * len(x or "1234"))], given)


def chain(*steps, x=("N", 3, "H", "W"), outputs=("y",)):
    """Steps of (operator, constant, whether the constant comes first); the last writes ``y``."""
    nodes, weights, at = [], {}, "x"
    for number, (op, constant, first) in enumerate(steps):
        name = f"k{number}"
        out = "y" if number == len(steps) - 1 else f"s{number}"
        nodes.append(helper.make_node(op, [name, at] if first else [at, name], [out], name=f"n{number}"))
        weights[name] = np.asarray(constant, np.float32)
        at = out
    return model(nodes, [value("x", x)], [value(name, x) for name in outputs], weights)


@settings(deadline=None)
@given(
    channels=st.integers(1, 9),
    size=st.tuples(st.integers(2, 3), st.integers(4, 5), st.integers(4, 5)),
    epsilon=st.sampled_from([None, 1e-5, 1e-3, 0.5]),
    opset=st.sampled_from([13, 15, 17]),
    seed=st.integers(0, 2**16),
)
def test_any_norm(channels, size, epsilon, opset, seed):
    rng = np.random.default_rng(seed)
    attributes = {} if epsilon is None else {"epsilon": epsilon}
    nodes = [helper.make_node("BatchNormalization", ["x", "g", "b", "m", "v"], ["y"], name="bn", **attributes)]
    shape = [size[0], channels, *size[1:]]
    proto = model(
        nodes,
        [value("x", ["N", channels, "H", "W"])],
        [value("y", ["N", channels, "H", "W"])],
        norm_weights(channels, rng),
        opset=opset,
    )
    prepared = check(batch_norm_to_conv, proto, {"x": rng.normal(size=shape).astype(np.float32)}, ["Conv"])
    (conv,) = prepared.proto.graph.node
    assert (conv.name, list(conv.output)) == ("bn", ["y"])
    assert {i.name for i in prepared.proto.graph.initializer} == {"bn_weight", "bn_bias"}


@settings(deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["Mul", "Div", "Add", "Sub"]),
            st.sampled_from([(), (1,), (1, 1, 1), (3, 1, 1), (1, 3, 1, 1)]),
            st.booleans(),
        ),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 2**16),
)
def test_any_chain(steps, seed):
    rng = np.random.default_rng(seed)
    steps = [
        (op, rng.uniform(0.5, 2, shape) * rng.choice([-1, 1], shape), first and op != "Div")
        for op, shape, first in steps
    ]
    joined = any(np.size(constant) > 1 for _, constant, _ in steps)
    prepared = check(batch_norm_to_conv, chain(*steps), X, ["Conv"] if joined else [op for op, _, _ in steps])
    last = prepared.proto.graph.node[-1]
    assert (last.name, last.output[0]) == (f"n{len(steps) - 1}", "y")
    if joined:
        assert prepared.nodes == {f"n{at}": (last.name,) for at in range(len(steps) - 1)}


CHANNEL = np.array([1.5, -2, 3], np.float32).reshape(3, 1, 1)


def test_a_chain_ends_where_its_values_are_needed():
    check(
        batch_norm_to_conv,
        chain(("Mul", CHANNEL, False), ("Add", CHANNEL, False), outputs=("y", "s0")),
        X,
        ["Conv"] * 2,
    )
    proto = chain(("Mul", CHANNEL, False), ("Add", CHANNEL, False))
    check(batch_norm_to_conv, proto, X, ["Conv"] * 2, keep_values=["s0"])
    check(batch_norm_to_conv, chain(("Mul", CHANNEL, False), ("Add", np.ones((4, 5)), False)), X, ["Conv", "Add"])
    check(batch_norm_to_conv, chain(("Mul", CHANNEL, False), ("Div", CHANNEL, True)), X, ["Conv", "Div"])


def test_scalars_and_variables_are_no_candidates():
    untouched(batch_norm_to_conv, chain(("Mul", 2.0, False), ("Add", [1.0], False)))
    untouched(
        batch_norm_to_conv,
        model([helper.make_node("Mul", ["x", "x"], ["y"])], [value("x", [1, 3, 4, 4])], [value("y", [1, 3, 4, 4])]),
    )


def with_variable(proto, name):
    del proto.graph.initializer[[i.name for i in proto.graph.initializer].index(name)]
    proto.graph.input.append(value(name, [3]))
    return proto


@pytest.mark.parametrize(
    ("proto", "reason"),
    [
        (norm(training_mode=1, outputs=["y", "rm", "rv"]), "training mode"),
        (with_variable(norm(), "m"), "not constant"),
        (norm(x=("N", 3, "L")), "3 dimensions"),
        (norm(x=None), "rank of 'x' is not known"),
        (norm(weights={**norm_weights(3), "v": np.array([1, -4, 1], np.float32)}), "not finite"),
        (chain(("Mul", CHANNEL, False), x=("N", "C", 4, 4)), "channel count of 'x' is not known"),
        (chain(("Mul", np.ones((1, 1, 5)), False)), "is not one number a channel"),
        (chain(("Mul", CHANNEL, False), x=("N", 1, 4, 4)), "is not one number a channel"),
        (chain(("Div", CHANNEL, True)), "divides by its input"),
        (chain(("Div", CHANNEL * 0, False)), "not finite"),
    ],
)
def test_what_stays_and_why(proto, reason):
    refused(batch_norm_to_conv, proto, reason)
