from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kenosis_ort.rewrite import residual_to_sum, spell_norm
from tests.graph.build import ready
from tests.rewrite.forms import Graph, assert_formed, assert_refused
from tests.rewrite.test_collapse_layer_norm import norm
from tests.targets.qdq import kernels

SIZE = 8
OPERATORS = {True: "LayerNormalization", False: "SimplifiedLayerNormalization"}


def scaled(*, opset, centred, square, inverse, flip=False, epsilon=1e-5, shape=(2, 3, SIZE), first="Abs", **more):
    g = Graph(shape, opset=opset, **more)
    shift = np.linspace(-1, 1, SIZE) if centred else None
    x = g.op(first, "x")
    y = norm(
        g, x, centred=centred, square=square, inverse=inverse, flip=flip, epsilon=epsilon,
        scale=np.linspace(0.5, 1.5, SIZE), shift=shift,
    )  # fmt: skip
    return g, y


def data(seed=0, magnitude=1.0, shape=(2, 3, SIZE)):
    return (np.random.default_rng(seed).normal(size=shape) * magnitude).astype(np.float32)


@settings(deadline=None)
@given(
    form=st.sampled_from([(13, True), (16, True), (13, False), (17, False), (18, False), (21, False)]),
    square=st.sampled_from(["pow", "mul"]),
    inverse=st.sampled_from(["div", "reciprocal", "one over"]),
    flip=st.booleans(),
    epsilon=st.sampled_from([1e-5, 1e-12, 0.5]),
    magnitude=st.sampled_from([0.1, 1.0, 1e3]),
    seed=st.integers(0, 2**16),
)
def test_every_spelling_computes_the_same_and_becomes_the_runtimes_operator(
    form, square, inverse, flip, epsilon, magnitude, seed
):
    opset, centred = form
    g, y = scaled(opset=opset, centred=centred, square=square, inverse=inverse, flip=flip, epsilon=epsilon)
    result = assert_formed(g.model(y), spell_norm, None, data(seed, magnitude))
    assert OPERATORS[centred] in [k.op_type for k in kernels(result.proto)]
    said = any("spelled as the runtime knows them" in note for note in result.notes)
    assert said == ((square, inverse) not in (("pow", "div"), ("pow", "one over")))


@pytest.mark.parametrize(("opset", "centred"), [(17, True), pytest.param(23, False, marks=pytest.mark.since("1.24"))])
def test_norms_that_have_an_operator_are_left_to_it(opset, centred):
    g, y = scaled(opset=opset, centred=centred, square="mul", inverse="reciprocal")
    assert_refused(g.model(y), spell_norm, None)


@pytest.mark.parametrize("inverse", ["div", "reciprocal"])
def test_a_residual_in_front_of_a_norm_in_arithmetic_is_added_by_sum(inverse):
    g = Graph((2, 3, SIZE), opset=13)
    x = g.op("Add", g.op("Relu", "x"), g.op("Neg", "x"))
    y = norm(g, x, inverse=inverse, scale=np.ones(SIZE), shift=np.zeros(SIZE))
    proto = g.model(y)
    joined = "SkipLayerNormalization"
    assert joined in [k.op_type for k in kernels(ready(proto, rewrites=[spell_norm]).proto)]
    result = ready(proto, rewrites=[spell_norm, residual_to_sum]).proto
    found = [k.op_type for k in kernels(result)]
    assert joined not in found
    assert {"Sum", "LayerNormalization"} <= set(found)
