"""Any small net: what is made of it is what the plan says, loads, and computes what the float model computes."""

import tempfile
import warnings
from pathlib import Path

import numpy as np
import onnx
from hypothesis import HealthCheck, assume, given, settings, strategies as st

from kenosis_ort import plan, quantize_static, verify_fusion
from tests import models, planning
from tests.fuzz.gentle import add_output, loosen_interface, move_weight, reroute
from tests.fuzz.seeds import SEEDS, seed_feeds, seed_model
from tests.graph.build import run
from tests.quantizer.random_nets import nets
from tests.quantizer.test_fusion_aware import Performed

HEAVY = ("Conv", "Gemm", "MatMul")


@settings(derandomize=True, suppress_health_check=list(HealthCheck))
@given(nets(), st.data())
def test_every_edge_is_as_decided_and_integer_nodes_are_integer(model, data):
    names = [node.name for node in planning.prepared(model).graph.node]
    done = planning.quantize(
        model,
        nodes_to_exclude=frozenset(data.draw(st.lists(st.sampled_from(names), max_size=2))),
        protect_outputs=data.draw(st.sampled_from(["auto", "float", "int8", None])),
        per_channel=data.draw(st.booleans()),
    )
    Performed(done.model, done.quantized, done.plan).check()
    assert verify_fusion(done.quantized, plan=done.plan).avoidable(done.plan) == ()


@st.composite
def structures(draw):
    """A seed of the fuzzer, wired and stored otherwise, of open sizes; its numbers are as sound as they were."""
    name = draw(st.sampled_from(sorted(SEEDS.keys() - {"digits", "external", "quantized"})))
    model, dice = seed_model(name), draw(st.randoms(use_true_random=False))
    for change in draw(st.lists(st.sampled_from([reroute, move_weight, loosen_interface, add_output]), max_size=4)):
        change(model, dice)
    feeds = seed_feeds(name)
    try:
        run(model, feeds[0])
    except Exception:  # any class of the runtime's
        assume(False)
    return model, feeds


@settings(derandomize=True, suppress_health_check=list(HealthCheck))
@given(nets().map(lambda model: (model, models.feeds(model, 3))) | structures())
def test_the_public_call(case):
    model, feeds = case
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # random nets may well be of poor quality
        out = Path(folder) / "out.onnx"
        report = quantize_static(model, out, models.FeedReader(feeds))
        quantized = onnx.load(out)
        assert [p.name for p in Path(folder).iterdir()] == ["out.onnx"]
    names = [value.name for value in model.graph.output]
    assert [value.name for value in quantized.graph.output] == names
    for name, want, got in zip(names, run(model, feeds[0]), run(quantized, feeds[0]), strict=True):
        assert (want.dtype, want.ndim) == (got.dtype, got.ndim)
        if want.dtype.kind == "f" and want.shape == got.shape:  # how many rows there are may depend on the numbers
            assert np.isfinite(got).all()
            noise = np.linalg.norm((want - got).astype(np.float64))
            is_close = noise <= 0.5 * np.linalg.norm(want.astype(np.float64)) + 1e-3
            assert is_close or f"'{name}'" in " ".join(report.warnings)  # that random nets may well earn
    planned = [n.node for n in report.plan.nodes if n.kind is plan.Kind.INTEGER and n.op_type in HEAVY]
    integer = {kernel.node: kernel.integer for kernel in report.fusion.kernels}  # of bodies too
    assert [n for n in planned if not integer[n]] == []
