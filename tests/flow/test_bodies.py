"""Bodies of If, Loop and Scan, from the public call to the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from kenosis_ort import verify_fusion
from kenosis_ort.api import preview
from kenosis_ort.graph.walk import all_graphs, opset_of
from kenosis_ort.verify import check_bias_alignment
from tests.flow import control
from tests.flow.support import proof, quality, quantized
from tests.models import Feed
from tests.planning import parse
from tests.verify.faults import check_quantization

RNG = np.random.default_rng(0)


def rates(*said: int) -> list[Feed]:
    return [{"x": RNG.normal(size=(2, 3, 16, 16)).astype(np.float32), "rate": np.array(r)} for r in said]


def checked(model: onnx.ModelProto, folder: Path, feeds: list[Feed], **options: object):
    """Quantizes, bodies whatever they cost unless told otherwise, and checks quality, proof, names and grids."""
    out = folder / "out.onnx"
    options = {"extra_options": {"EnableSubgraph": True}, **options}
    report = quantized(model, out, feeds, **options)
    for i in range(len(model.graph.output)):
        assert quality(model, out, feeds, output=i) > 28
    assert report.warnings == ()
    made = onnx.load(out)
    onnx.checker.check_model(made)
    assert check_bias_alignment(made) == []
    assert check_quantization(made) == []
    names = [n.name for graph in all_graphs(made.graph) for n in graph.node]
    assert len(set(names)) == len(names)
    return report


def heavy(report) -> dict[str, bool]:
    """Which layers run on integer kernels, bodies included."""
    layers = ("Conv", "Gemm", "MatMul")
    return {k.node: k.integer for k in proof(report).kernels if k.op_type in layers}


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_both_branches_of_an_if(tmp_path: Path, stored: bool, outside: bool, nested: bool) -> None:
    model = control.two_rates(stored=stored, outside=outside, nested=nested)
    report = checked(model, tmp_path, rates(16000, 8000, 16000, 8000))
    float_layers = {name for name, integer in heavy(report).items() if not integer}
    assert len(heavy(report)) == 6 + outside + 2 * nested
    assert all("other" in name for name in float_layers)  # the inner branch that no sample takes
    assert len(float_layers) == nested
    kinds = {n.node: n.kind.value for n in report.plan.nodes}
    assert {kinds[name] for name in heavy(report)} == ({"integer", "float"} if nested else {"integer"})
    assert any(k.graph and k.absorbed_into for k in proof(report).kernels)  # Relu within a body
    if outside:  # the shared float weight has no reader left
        stored_floats = [t for t in onnx.load(tmp_path / "out.onnx").graph.initializer if len(t.dims) == 4]
        assert all(t.data_type == onnx.TensorProto.INT8 for t in stored_floats)


def test_a_branch_that_no_sample_takes_stays_float_and_is_told(tmp_path: Path) -> None:
    report = checked(control.two_rates(), tmp_path, rates(16000, 16000))
    assert heavy(report) == {name: name.startswith("then") for name in heavy(report)}
    (note,) = [n for n in report.notes if "stays float" in n]
    assert note == "The else_branch of 'mIf1' stays float: no calibration sample ran it."
    missed = next(name for name, integer in heavy(report).items() if not integer)
    assert "no calibration sample ran it" in report.plan.explain(missed)
    assert "no calibration sample ran it" in next(k.reason for k in proof(report).kernels if k.node == missed)


@pytest.mark.parametrize("steps", [None, 4])
def test_a_loop_is_calibrated_over_all_iterations(tmp_path: Path, steps: int | None) -> None:
    model = control.loop(steps)
    feeds = [{"x": RNG.normal(size=(4, 32)).astype(np.float32)} for _ in range(3)]
    feeds = feeds if steps else [{**f, "n": np.array(4)} for f in feeds]
    report = checked(model, tmp_path, feeds)
    assert len(heavy(report)) == 3
    assert all(heavy(report).values())


def test_a_scan(tmp_path: Path) -> None:
    feeds = [{"x": RNG.normal(size=(1, 6, 24)).astype(np.float32)} for _ in range(3)]
    assert all(heavy(checked(control.scan(), tmp_path, feeds)).values())


def test_with_the_defaults(tmp_path: Path) -> None:
    report = checked(
        control.two_rates(outside=True), tmp_path, rates(16000, 8000) * 4, recipe="fast", promise=True, tune="model"
    )
    assert all(heavy(report).values())
    assert {p.reason.rpartition("; in ")[2] for p in report.passes} >= {
        f"the {b}_branch of 'mIf3'" for b in ("then", "else")
    }


ATTENTION = """net (float[B,S,32] x, bool again) => (float[B,S,32] y)
    <float[32,32] wq, float[32,32] wk, float[32,32] wv> {
    y = If (again) <
        then_branch = attention () => (float[B,S,32] a) {
            q = MatMul (x, wq)\n k = MatMul (x, wk)\n v = MatMul (x, wv)
            turned = Transpose <perm = [0, 2, 1]> (k)
            scores = MatMul (q, turned)\n shares = Softmax <axis = -1> (scores)\n a = MatMul (shares, v) },
        else_branch = linear () => (float[B,S,32] b) { c = MatMul (x, wv)\n b = Relu (c) }> }"""


@pytest.mark.parametrize("swapped", [False, True])
def test_attention_in_a_branch_raises_the_operator_set_of_all(tmp_path: Path, swapped: bool) -> None:
    weights = {name: RNG.normal(size=(32, 32)).astype(np.float32) / 6 for name in ("wq", "wk", "wv")}
    text = ATTENTION.replace("then_", "_").replace("else_", "then_").replace(" _", " else_") if swapped else ATTENTION
    model = parse(text, weights, opset=17)
    feeds = [{"x": RNG.normal(size=(1, 9, 32)).astype(np.float32), "again": np.array(n % 2 > 0)} for n in range(6)]
    report = checked(model, tmp_path, feeds)
    made = onnx.load(tmp_path / "out.onnx")
    assert [n.op_type for g in all_graphs(made.graph) for n in g.node].count("Attention") == 1
    assert opset_of(made) == 23
    assert sum(heavy(report).values()) == 4


def test_a_weight_that_two_branches_read_is_stored_once(tmp_path: Path) -> None:
    report = checked(control.two_rates(outside=True), tmp_path, rates(16000, 8000))
    assert all(heavy(report).values())
    made = onnx.load(tmp_path / "out.onnx")
    shared = [t for g in all_graphs(made.graph) for t in g.initializer if list(t.dims) == [16, 16, 3, 3]]
    branches = [a.g for n in made.graph.node if n.op_type == "If" for a in n.attribute]
    read = [{name for node in g.node for name in node.input} for g in branches]
    assert len(shared) == 3  # one for both, and the second Conv of each
    assert len([t for t in shared if all(t.name in names for names in read)]) == 1


def test_excluded_layers_of_a_body_stay_float(tmp_path: Path) -> None:
    model = control.two_rates(stored=True)
    first = quantized(model, tmp_path / "first.onnx", rates(16000, 8000))
    name = next(n for n in heavy(first) if n.startswith("then") and "Conv" in n)
    report = quantized(model, tmp_path / "out.onnx", rates(16000, 8000), nodes_to_exclude=[name])
    assert {n for n, integer in heavy(report).items() if not integer} == {name}


def test_a_caller_may_leave_bodies_float(tmp_path: Path) -> None:
    options = {"extra_options": {"EnableSubgraph": False}}
    report = quantized(control.two_rates(outside=True), tmp_path / "out.onnx", rates(16000, 8000), **options)
    assert {name for name, integer in heavy(report).items() if integer} == {"mConv0"}


def test_a_plan_without_data_knows_bodies() -> None:
    plan = preview(control.two_rates(outside=True, nested=True))
    assert sum(n.kind.value == "integer" and n.op_type in ("Conv", "Gemm") for n in plan.nodes) == 9


def test_the_written_file_proves_the_same(tmp_path: Path) -> None:
    report = checked(control.two_rates(), tmp_path, rates(16000, 8000))
    again = verify_fusion(tmp_path / "out.onnx")
    assert {k.node for k in again.kernels if k.integer} == {k.node for k in proof(report).kernels if k.integer}
