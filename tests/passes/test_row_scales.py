"""Rows of one size: exact in float, one range fit for all rows, and integer kernels behind."""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.graph.view import GraphView, PreparedModel
from kenosis_ort.passes.contract import Candidate, State
from kenosis_ort.passes.evaluator import Score
from kenosis_ort.passes.scale_rows import RowScales, row_noise, with_row_scales
from tests.flow.support import run
from tests.planning import parse, prepared

BODIES = {
    "matmul": "y = MatMul (x, w)", "matmul and bias": "m = MatMul (x, w)\n y = Add (m, b)",
    "two layers of one value": "a = MatMul (x, w)\n c = MatMul (x, v)\n y = Mul (a, c)",
    "gemm": "f = Reshape (x, flat)\n g = Gemm <transB = 1, beta = 0.5> (f, w, b)\n y = Reshape (g, back)",
    "its output is needed twice": "m = MatMul (x, w)\n r = Relu (m)\n y = Add (m, r)",
}  # fmt: skip
SHAPES = {"flat": np.array([-1, 32], np.int64), "back": np.array([2, -1, 32], np.int64)}


def net(body: str, *, opset: int = 17) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {k: (rng.standard_normal((32, 32)) / 6).astype(np.float32) for k in ("w", "v")}
    arrays |= {"b": rng.standard_normal(32).astype(np.float32), **SHAPES}
    used = {k: v for k, v in arrays.items() if re.search(rf"\b{k}\b", body)}
    text = f"net (float[2,len,32] i) => (float[2,len,32] y) {{ x = Mul (i, i)\n {body} }}"
    return prepared(parse(text, used, opset=opset))


def layers(model: onnx.ModelProto) -> set[str]:
    return {node.name for node in model.graph.node if node.op_type in ("MatMul", "Gemm")}


def read(model: onnx.ModelProto) -> list[str]:
    return list(dict.fromkeys(node.input[0] for node in model.graph.node if node.name in layers(model)))


@given(st.sampled_from(sorted(BODIES)), st.sampled_from([13, 17, 18, 21]), st.integers(1, 5), st.floats(0, 4))
def test_it_computes_the_same(body: str, opset: int, length: int, power: float) -> None:
    model = net(BODIES[body], opset=opset)
    found, values = with_row_scales(model, read(model), nodes=layers(model))
    onnx.checker.check_model(found)
    assert len(values) == 1
    assert {*values} <= {value.name for value in found.graph.value_info}
    names = [node.name for node in found.graph.node]
    assert len(set(names)) == len(names)
    rng = np.random.default_rng(length)
    rows = 10.0 ** rng.uniform(-power, power, (2, length, 1))
    x = (rng.standard_normal((2, length, 32)) * rows).astype(np.float32)
    x[0, 0] = 0.0
    (want,), (got,) = (run(m, [{"i": x}])[0] for m in (model, found))
    size = np.abs(want).max(axis=-1, keepdims=True)
    assert (np.abs(want - got) <= 1e-5 * size + 1e-12).all()


def outlying() -> np.ndarray:
    """Rows of which the first of each sample is thirty times the others."""
    x = np.random.default_rng(3).standard_normal((2, 16, 32)).astype(np.float32)
    x[:, 0] *= 30.0
    return x


@pytest.mark.parametrize(("errors", "tried", "scaled"), [
    ({0: 1.0, 4: 0.9}, [0, 4], 0), ({0: 1.0, 4: 0.5, 2: 0.6, 1: 1.5}, [0, 4, 2, 1], 2),
    ({0: 1.0, 4: 0.5, 2: 0.4, 1: 0.7}, [0, 4, 2, 1], 1),
], ids=["no gain", "half of them", "one of them"])  # fmt: skip
def test_fewer_values_are_tried_as_long_as_they_serve(errors: dict[int, float], tried: list[int], scaled: int) -> None:
    body = "".join(f"x{at} = Mul (x, x)\n m{at} = MatMul (x{at}, w)\n " for at in range(4))
    model = net(f"{body} s = Sum (m0, m1, m2, m3)\n y = Relu (s)")
    seen: list[int] = []

    def score(state: State) -> Score:
        seen.append(sum(node.op_type == "Reciprocal" for node in state.prepared.proto.graph.node))
        return Score(errors[seen[-1]], (errors[seen[-1]],) * 8)

    context: Any = SimpleNamespace(
        mixes=True, fit=[{"i": outlying()}], nodes=layers(model), custom_op_libraries=(), active={}, score=score
    )
    found = RowScales().apply(State(PreparedModel(model)), {}, context)
    assert seen == tried
    assert (found.what.split()[0] if isinstance(found, Candidate) else "0") == str(scaled)


def test_what_one_range_costs() -> None:
    """A row a thousand times the others hides them in one range and costs none of them in its own."""
    model = net(BODIES["matmul"])
    feeds = [{"i": (x := outlying())}]
    (noise,) = row_noise(GraphView(model), feeds, nodes=layers(model))
    assert noise.value == "x"
    assert noise.static > 0.5
    assert noise.by_row < 1e-4
    (even,) = row_noise(GraphView(model), [{"i": np.sign(x)}], nodes=layers(model))
    assert even.static == pytest.approx(even.by_row)


@pytest.mark.parametrize("nodes", [set(), {"another"}])
def test_only_named_layers(nodes: set[str]) -> None:
    model = net(BODIES["matmul"])
    assert not row_noise(GraphView(model), [{"i": np.ones((2, 3, 32), np.float32)}], nodes=nodes)
