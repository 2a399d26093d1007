"""Peak memory of a whole call, in a process of its own, against a plain session of the same model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

_SIDE = 4096
_CHILD = """
import sys
import numpy as np
kind, source, out, side = sys.argv[1:]
feeds = [{"x": np.random.default_rng(i).normal(size=(4, int(side))).astype(np.float32)} for i in range(8)]
if kind == "plain":
    import onnxruntime as ort
    ort.InferenceSession(source, providers=["CPUExecutionProvider"]).run(None, feeds[0])
else:
    import kenosis_ort
    report = kenosis_ort.quantize_static(source, out, kenosis_ort.ArrayReader(feeds))
    assert report.fusion is not None and report.speed is not None
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:")))
"""


def peak(kind: str, source: Path, out: Path) -> float:
    """MiB."""
    command = [sys.executable, "-W", "ignore", "-c", _CHILD, kind, str(source), str(out), str(_SIDE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1]) / 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system tells no peak")
def test_one_large_weight_is_not_held_again_and_again(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((_SIDE, _SIDE), np.float32) / np.float32(_SIDE**0.5)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["m"], name="mm"), helper.make_node("Relu", ["m"], ["y"], name="r")],
        "one",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", _SIDE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", _SIDE])],
        [numpy_helper.from_array(weight, "w")],
    )
    source, out = tmp_path / "one.onnx", tmp_path / "out.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), source)
    size = source.stat().st_size / 2**20
    assert peak("quantize", source, out) <= peak("plain", source, out) + 4 * size + 300  # the promise
