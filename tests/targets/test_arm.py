"""Files for Arm; where ``KENOSIS_ARM_PYTHON`` names a Python on Arm, what its runtime makes of them too.

That Python may be an emulated one; it needs onnxruntime, the package's dependencies, and this checkout on its path.
"""

from __future__ import annotations

import os
import subprocess
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from onnxruntime.quantization import QuantType

from benchmarks.arm import largest_difference, make, not_as_planned, prove_there, save_feeds
from kenosis_ort import preview
from kenosis_ort.targets import get_target
from kenosis_ort.targets.ort_cpu.rules import is_arm
from tests import models
from tests.models import Net
from tests.targets.files import DQ, Q, Written

PYTHON = os.environ.get("KENOSIS_ARM_PYTHON", "")
there = pytest.mark.skipif(not PYTHON, reason="KENOSIS_ARM_PYTHON names no Python on Arm")


written = partial(Written, target="arm")


def branches() -> onnx.ModelProto:
    """A value that two Convs and an Add read."""
    net = Net()
    x = net.op("Relu", [net.conv(net.input("x", [1, 3, 8, 8]), 3, 8, name="stem")])
    y = net.op("Add", [net.conv(x, 8, 8, name="a"), net.conv(x, 8, 8, name="b")])
    net.output(net.conv(net.op("Add", [y, x]), 8, 4, name="last"), [1, 4, 8, 8])
    return net.model()


def norm_in_parts() -> onnx.ModelProto:
    net = Net()
    x = net.op("MatMul", [net.input("x", [2, 16]), net.weight((16, 32), name="w")])
    d = net.op("Sub", [x, net.op("ReduceMean", [x], axes=[-1])])
    v = net.op("ReduceMean", [net.op("Mul", [d, d])], axes=[-1])
    y = net.op("Div", [d, net.op("Sqrt", [net.op("Add", [v, net.const(np.float32(1e-5))])])])
    y = net.op("Mul", [y, net.const(np.linspace(0.5, 1.5, 32, dtype=np.float32))])
    y = net.op("Add", [y, net.const(np.zeros(32, np.float32))])
    net.output(net.op("MatMul", [y, net.weight((32, 4), name="v")]), [2, 4])
    return net.model()


def test_activations_are_int8_with_one_pair_for_all_readers(tmp_path: Path) -> None:
    assert written(branches(), tmp_path).types == {"int8"}
    assert preview(branches(), target="arm").splits == {}


def test_uint8_weights_go_with_uint8_activations(tmp_path: Path) -> None:
    assert written(branches(), tmp_path, weight_type=QuantType.QUInt8).types == {"uint8"}


def test_nothing_is_float16_behind_q_and_dq(tmp_path: Path) -> None:
    model = branches()
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    made = written(model, tmp_path)
    scales = [made.constants[n.input[1]] for n in made.model.graph.node if n.op_type in (Q, DQ)]
    assert {scale.dtype.name for scale in scales} == {"float32"}


@pytest.mark.skipif(is_arm(os.uname().machine), reason="asked and timed on Arm itself")
def test_elsewhere_it_is_neither_proved_nor_timed() -> None:
    assert get_target("arm").hooks.prove is None
    assert get_target("arm").hooks.time is None


def test_rule_arm_norm_stays_in_parts() -> None:
    assert "LayerNormalization" not in {n.op_type for n in preview(norm_in_parts(), target="arm").nodes}
    assert "LayerNormalization" in {n.op_type for n in preview(norm_in_parts()).nodes}


@there
def test_rule_arm_int8_several_readers(tmp_path: Path) -> None:
    path = written(branches(), tmp_path).path
    save_feeds(path, models.feeds(branches(), 1))
    kernels = prove_there(PYTHON, [path])[str(path)]["kernels"]
    assert [name for name in ("stem", "a", "b", "last") if not kernels[name][2]] == []


@there
def test_rule_arm_float16_refused(tmp_path: Path) -> None:
    text = """<ir_version: 9, opset_import: ["" : 19]> g (float16[1,3,8,8] x) => (float16[1,8,6,6] y) {
      q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z) v = DequantizeLinear (w, s, z) c = Conv (d, v)
      r = QuantizeLinear (c, s, z) y = DequantizeLinear (r, s, z) }"""
    model, path = onnx.parser.parse_model(text), tmp_path / "half.onnx"
    for name, array in (("w", np.ones((8, 3, 3, 3), np.int8)), ("s", np.float16(0.1)), ("z", np.int8(0))):
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.save(model, path)
    code = f"import onnxruntime as o; o.InferenceSession({str(path)!r}, providers=['CPUExecutionProvider'])"
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "INVALID_GRAPH" in done.stderr or "NOT_IMPLEMENTED" in done.stderr


@there
def test_files_made_here_run_there_with_the_predicted_kernels(tmp_path: Path) -> None:
    made = {name: make(name, tmp_path, promise=False) for name in ("residual_block", "mobile_block", "mlp")}
    found = prove_there(PYTHON, [path for path, _ in made.values()])
    for path, report in made.values():
        assert not_as_planned(report, found[str(path)]) == []
        assert largest_difference(path) < 0.02


def test_what_x86_64_does_to_int8_values_is_switched_off_where_files_are_judged(tmp_path: Path) -> None:
    """The session here would make int8 values uint8, and refuses its own graph for it where a MatMul becomes a Gemm."""
    assert written(models.transformer_block(), tmp_path).types == {"int8"}
