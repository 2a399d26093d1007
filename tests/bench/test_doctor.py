"""What the doctor finds: limits, data types and their kernels, and what to fix."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto

from kenosis_ort.bench import doctor
from kenosis_ort.bench.doctor import FLOAT32, KernelSpeed, examine, kernel_speeds
from kenosis_ort.runtime.limits import RuntimeLimits, runtime_limits
from tests.models import session
from tests.processor import VNNI, X86, Pretend

INTEGER = ("uint8 x int8", "int8 x int8", "uint8 x uint8")


def test_each_type_of_each_operator_is_timed():
    done: list[tuple[int, int | None]] = []
    found = kernel_speeds(budget_s=0.2, progress=lambda *count: done.append(count))
    assert done
    speeds = {(s.operator, s.types): s for s in found}
    assert len(speeds) == 12
    for speed in found:
        assert speed.microseconds, (speed.operator, speed.types, speed.reason)
        assert speed.verdict in ("baseline", "fast", "no gain", "slow")
        assert speed.types != FLOAT32 or (speed.ratio, speed.verdict) == (1, "baseline")
    for operator in ("Conv", "MatMul") if X86 else ():
        assert {speeds[operator, types].kernel for types in INTEGER} == {f"QLinear{operator}"}
        assert speeds[operator, "uint16 x int8"].kernel == operator
        assert "16 bit" in speeds[operator, "uint16 x int8"].reason


@pytest.mark.x86_only
def test_int8_activations_are_measured_as_int8(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def record(source: bytes, **_: Any) -> ort.InferenceSession:
        return session(onnx.load_from_string(source), saved=tmp_path / f"{len([*tmp_path.iterdir()])}.onnx")

    monkeypatch.setattr(doctor, "open_session", record)
    kernel_speeds(budget_s=0.1)
    types = set()
    for model in map(onnx.load, tmp_path.iterdir()):
        kinds = {t.name: TensorProto.DataType.Name(t.data_type).lower() for t in model.graph.initializer}
        nodes = [node for node in model.graph.node if node.op_type.startswith("QLinear")]
        types |= {(n.op_type, f"{kinds[n.input[2]]} x {kinds[n.input[5]]}") for n in nodes}
    assert types == {(f"QLinear{operator}", kind) for operator in ("Conv", "MatMul") for kind in INTEGER}


@pytest.mark.parametrize(("flags", "saturates", "said"), [
    (("avx2",), True, "AVX2: products of 8 bits are added in 16 and clipped there"),
    (("avx2", "avx512f"), True, "AVX-512 without VNNI: products of 8 bits are added in 16"),
    (("avx2", "avx_vnni"), False, "VNNI: products of 8 bits are added in 32."),
    (("asimddp",), False, "Arm: products of 8 bits are added in 32."),
    ((), True, "A processor of unknown class: products of 8 bits are added in 16"),
])  # fmt: skip
def test_the_class_of_the_processor_is_named(pretend: Pretend, flags: tuple[str, ...], saturates: bool, said: str):
    pretend(replace(VNNI, features=flags, saturates=saturates))
    notes = [str(note) for note in examine(flags=flags, budget_s=0).notes]
    assert any(note.startswith(said) for note in notes)
    assert not any("7 bits" in note for note in notes)


def test_what_does_not_run_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "open_session", Mock(side_effect=RuntimeError("no such kernel")))
    assert {(s.verdict, "no such kernel" in s.reason) for s in kernel_speeds(budget_s=0.1)} == {("refused", True)}


def test_the_examination_is_plain_data():
    found = examine(flags=("avx2",), budget_s=0)
    assert (found.speeds, found.max_opset) == ((), runtime_limits().max_opset)
    assert found.versions["onnxruntime"] == ort.__version__
    assert "CPUExecutionProvider" in found.providers
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["flags"] == ["avx2"]
    assert any("no 8-bit dot product" in str(note) for note in found.notes)


def test_a_runtime_much_older_than_onnx_and_no_fast_integer_type_are_worth_a_note(monkeypatch: pytest.MonkeyPatch):
    limits = RuntimeLimits(max_ir=8, max_opset=onnx.defs.onnx_opset_version() - 5, version="1.0")
    slow = (KernelSpeed("Conv", "uint8 x int8", "QLinearConv", 2.0, 0.5, "slow"),)
    monkeypatch.setattr(doctor, "runtime_limits", lambda: limits)
    monkeypatch.setattr(doctor, "kernel_speeds", lambda **_: slow)
    found = examine(budget_s=1)
    assert any("onnxruntime 1.0 reads up to" in str(p) and "upgrade onnxruntime" in p.fix for p in found.notes)
    assert any("IR version" in str(note) for note in found.notes)
    assert any("No 8-bit type is faster" in str(note) for note in found.notes)
