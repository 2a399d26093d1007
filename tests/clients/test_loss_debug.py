"""The runtime's own ``qdq_loss_debug`` on our files: it pairs weights and activations with the float ones by name."""

import math
from pathlib import Path

import onnx
import pytest
from onnxruntime.quantization import qdq_loss_debug as debug

from tests import models, planning
from tests.flow.support import quantized

SAME = "pads = [1, 1, 1, 1]"
STEM = """(float[1,3,16,16] x) => (y) <float[16,3,3,3] w, float[8,16,3,3] v> {{
    [stem] s = Conv <{}> (x, w) r = Relu (s) [second] y = Conv <pads = [1, 1, 1, 1]> (r, v) }}"""
BLOCK = """[expand{0}] e{0} = Conv (r{0}, we{0}) f{0} = Relu (e{0})
    [depthwise{0}] d{0} = Conv <group = 24, pads = [1, 1, 1, 1]> (f{0}, wd{0}) g{0} = Relu (d{0})
    [project{0}] p{0} = Conv (g{0}, wp{0}) r{1} = Relu (p{0})"""
WEIGHTS = ", ".join(f"float[24,16,1,1] we{i}, float[24,1,3,3] wd{i}, float[16,24,1,1] wp{i}" for i in range(2))
DEPTHWISE = f"""(float[1,4,16,16] x) => (y) <float[16,4,3,3] w, {WEIGHTS}, float[8,16,3,3] v> {{
    [stem] s = Conv <{SAME}> (x, w) r0 = Relu (s) {BLOCK.format(0, 1)} {BLOCK.format(1, 2)}
    [last] y = Conv <{SAME}> (r2, v) }}"""
LINEAR = """(float[N,T,16] x) => (float[N,T,16] y)
    <float[16,16] w0, float[1,1,16] b0, float[16,16] w1, float[1,1,16] b1> {
    m0 = MatMul (x, w0) a0 = Add (m0, b0) r0 = Relu (a0) m1 = MatMul (r0, w1) a1 = Add (m1, b1) y = Relu (a1) }"""
NETS = {
    "SpaceToDepth": lambda: planning.parse(STEM.format(f"strides = [2, 2], {SAME}")),
    "read a multiple of 4": lambda: planning.parse(STEM.format(SAME)),
    "depthwise": lambda: planning.parse(DEPTHWISE),
    "MatMul and Add became Gemm": lambda: planning.parse(LINEAR),
    "": models.two_input_detector,
}
"""Nets by what the notes say of the rewrite that they meet."""


@pytest.mark.parametrize("rewrite", NETS, ids=lambda r: r or "none")
def test_weights_and_activations_are_paired_and_compared(rewrite: str, tmp_path: Path) -> None:
    model = NETS[rewrite]()
    feeds = models.feeds(model, 3)
    float_path, path = tmp_path / "float.onnx", tmp_path / "q.onnx"
    onnx.save(model, float_path)
    report = quantized(model, path, feeds)
    assert any(rewrite in note for note in report.notes), report.notes

    errors = debug.compute_weight_error(debug.create_weight_matching(str(float_path), str(path)))
    assert errors
    assert all(map(math.isfinite, errors.values()))

    activations = []
    for source in (float_path, path):
        augmented = tmp_path / f"augmented_{source.name}"
        debug.modify_model_output_intermediate_tensors(str(source), str(augmented))
        activations.append(debug.collect_activations(str(augmented), models.FeedReader(feeds)))
    pairs = debug.create_activation_matching(activations[1], activations[0])
    assert pairs or rewrite.startswith("MatMul"), "there only reshaped values are quantized, which are new"
    for name, error in debug.compute_activation_error(pairs).items():
        assert min(error["qdq_err"], error["xmodel_err"]) > 10, name
