"""Files for Arm; where ``KENOSIS_ARM_PYTHON`` names a Python on Arm, what its runtime makes of them too.

That Python may be an emulated one; it needs onnxruntime, the package's dependencies, and this checkout on its path.
"""

import os
import subprocess
from functools import partial

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import QuantType

from benchmarks.arm import largest_difference, make, not_as_planned, prove_there, save_feeds
from kenosis_ort import preview
from kenosis_ort.targets import get_target
from kenosis_ort.targets.ort_cpu.rules import is_arm
from tests import models
from tests.targets.files import Written, net_of

PYTHON = os.environ.get("KENOSIS_ARM_PYTHON", "")
there = pytest.mark.skipif(not PYTHON, reason="KENOSIS_ARM_PYTHON names no Python on Arm")


written = partial(Written, target="arm")


PADS = "pads = [1,1,1,1]"
BRANCHES = net_of(
    f"""[stem] c = Conv <{PADS}> (x, w8_3_3_3) r = Relu (c) [a] d = Conv <{PADS}> (r, w8_8_3_3)
    [b] e = Conv <{PADS}> (r, w8_8_3_3b) f = Add (d, e) g = Add (f, r) [last] y = Conv <{PADS}> (g, w4_8_3_3)""",
    "1,3,8,8",
)
"""A value that two Convs and an Add read."""
NORM_IN_PARTS = """a = MatMul (x, w16_32) m = ReduceMean (a, last) d = Sub (a, m) q = Mul (d, d)
    s = ReduceMean (q, last) t = Add (s, tiny) r = Sqrt (t) n = Div (d, r) g = Mul (n, gain)
    b = Add (g, gain) y = MatMul (b, w32_4)"""


@pytest.mark.parametrize(("model", "options", "kind"), [
    (BRANCHES, {}, "int8"), (BRANCHES, {"weight_type": QuantType.QUInt8}, "uint8"),
    # The session here would make int8 values uint8, and refuses its own graph for it where a MatMul becomes a Gemm.
    (models.transformer_block(), {}, "int8"),
])  # fmt: skip
def test_activations_are_int8_unless_weights_are_uint8(model, options, kind, tmp_path):
    assert written(model, tmp_path, **options).types == {kind}


def test_a_value_has_one_pair_for_all_readers():
    assert preview(BRANCHES, target="arm").splits == {}


@pytest.mark.skipif(is_arm(os.uname().machine), reason="asked and timed on Arm itself")
def test_elsewhere_it_is_neither_proved_nor_timed():
    hooks = get_target("arm").hooks
    assert (hooks.prove, hooks.time) == (None, None)


def test_rule_arm_norm_stays_in_parts():
    gain = np.linspace(0.5, 1.5, 32, dtype=np.float32)
    model = net_of(NORM_IN_PARTS, "2,16", gain=gain, tiny=np.float32(1e-5), last=np.array([-1]))
    for target, is_one in (("arm", False), ("ort-cpu", True)):
        assert ("LayerNormalization" in {n.op_type for n in preview(model, target=target).nodes}) is is_one


@there
def test_rule_arm_int8_several_readers(tmp_path):
    path = written(BRANCHES, tmp_path).path
    save_feeds(path, models.feeds(BRANCHES, 1))
    kernels = prove_there(PYTHON, [path])[str(path)]["kernels"]
    assert [name for name in ("stem", "a", "b", "last") if not kernels[name][2]] == []


@there
def test_rule_arm_float16_refused(tmp_path):
    text = """<ir_version: 9, opset_import: ["" : 19]> g (float16[1,3,8,8] x) => (float16[1,8,6,6] y) {
      q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z) v = DequantizeLinear (w, s, z) c = Conv (d, v)
      r = QuantizeLinear (c, s, z) y = DequantizeLinear (r, s, z) }"""
    model, path = onnx.parser.parse_model(text), tmp_path / "half.onnx"
    for name, array in (("w", np.ones((8, 3, 3, 3), np.int8)), ("s", np.float16(0.1)), ("z", np.int8(0))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(model, path)
    code = f"import onnxruntime as o; o.InferenceSession({str(path)!r}, providers=['CPUExecutionProvider'])"
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "INVALID_GRAPH" in done.stderr or "NOT_IMPLEMENTED" in done.stderr


@there
def test_files_made_here_run_there_with_the_predicted_kernels(tmp_path):
    made = {name: make(name, tmp_path, promise=False) for name in ("residual_block", "mobile_block", "mlp")}
    found = prove_there(PYTHON, [path for path, _ in made.values()])
    for path, report in made.values():
        assert not_as_planned(report, found[str(path)]) == []
        assert largest_difference(path) < 0.02
