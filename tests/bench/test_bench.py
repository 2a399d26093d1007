"""Timing side by side and by operator, and what the doctor finds, with real sessions; nothing depends on speed."""

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import kenosis_ort
from kenosis_ort import CalibrationError, OptionError, VerificationError
from kenosis_ort.bench import doctor, harness
from kenosis_ort.bench.doctor import FLOAT32, KernelSpeed, examine, kernel_speeds
from kenosis_ort.bench.kernel_times import profile_ops
from kenosis_ort.flow.finish import with_measurements
from kenosis_ort.report.gathering import gather_evidence
from kenosis_ort.runtime.machine import RuntimeLimits, runtime_limits
from tests.flow.support import make
from tests.models import FeedReader, conv_relu_chain, feeds, mlp, net_with_if, residual_block
from tests.planning import parse
from tests.processor import VNNI, X86

QUICK = {"rounds": 2, "budget_s": 0.3, "warmup": 1}


def quick(models, given=None, **keywords):
    return kenosis_ort.bench(models, given, **{**QUICK, **keywords})


CHAIN = conv_relu_chain(2)
DATA = feeds(CHAIN)
X = DATA[0]["x"]
WITHOUT_KERNEL = conv_relu_chain(2)
"""The same input as the chain's, and nothing that the runtime loads."""
WITHOUT_KERNEL.graph.node[0].op_type = "NoSuchOperator"
TWO = [{"x": np.zeros((2, 6), np.float32)}]


def refusing(rows):
    """A model that loads and runs only with batches of so many rows."""
    return parse(f"(float[n,6] x) => (float[{rows},6] y) <int64[2] s = {{{rows}, 6}}> {{ y = Reshape (x, s) }}")


def test_paths_bytes_and_protos(tmp_path):
    before, paths = CHAIN.SerializeToString(), [tmp_path / folder / "m.onnx" for folder in ("a", "b")]
    for path in paths:
        path.parent.mkdir()
        onnx.save_model(CHAIN, path)
    report = quick([paths[0], str(paths[0]), before, CHAIN], DATA)
    assert [t.name for t in report.models] == ["m.onnx", "m.onnx (2)", "model 3", "model 4"]
    assert (report.baseline, report.left_out, report.models[0].ratio) == ("m.onnx", (), 1)
    assert CHAIN.SerializeToString() == before
    assert [t.size for t in report.models] == [paths[0].stat().st_size] * 3 + [CHAIN.ByteSize()]
    for timing in report.models:
        assert 0 < timing.p50_ms <= timing.p95_ms <= timing.p99_ms
        assert timing.runs_per_second > 0 < timing.load_ms
        assert timing.runs >= len(timing.round_ms) == report.rounds
        assert timing.ratio_low <= timing.ratio <= timing.ratio_high
    assert [t.name for t in quick(paths, DATA).models] == [str(p) for p in paths], "told apart by their paths"


def test_one_model_alone_with_a_reader_or_made_up_data():
    reader = FeedReader(feeds(CHAIN, 5))
    quick(CHAIN, reader)
    assert reader.get_next() is not None, "it is read no further than needed"
    report = quick(CHAIN)
    assert len(report.models) == 1
    assert report.notes[0].startswith("made-up data: input")
    assert quick(CHAIN.SerializeToString()).notes[0] == report.notes[0]
    assert quick(parse("() => (float[4] y) <float[4] c> { y = Neg (c) }")).models[0].runs > 0, "or without inputs"


def test_external_data_counts(tmp_path):
    outside = tmp_path / "outside.onnx"
    onnx.save_model(mlp(), outside, save_as_external_data=True, location="w.bin", size_threshold=0)
    bare = onnx.load_model(outside, load_external_data=False)
    assert "external data" in quick([mlp(), bare], feeds(mlp())).left_out[0].reason
    size = outside.stat().st_size + (tmp_path / "w.bin").stat().st_size
    assert [t.size for t in quick([mlp(), outside], feeds(mlp())).models] == [mlp().ByteSize(), size]


@pytest.mark.parametrize(("broken", "reason"), [
    (b"no model", ""), (WITHOUT_KERNEL, ""), (Path("no/such/model.onnx"), ""), (refusing(3), "does not run"),
])  # fmt: skip
def test_a_model_that_does_not_load_or_run_is_named_and_left_out(broken, reason):
    report = quick({"good": refusing(2), "broken": broken, "also good": refusing(2)}, TWO)
    assert [t.name for t in report.models] == ["good", "also good"]
    assert [gone.name for gone in report.left_out] == ["broken"]
    assert report.left_out[0].reason
    assert reason in report.left_out[0].reason
    assert "left out: broken" in str(report)


REFUSED = [
    (b"no model", DATA, {}, VerificationError, "the model cannot be timed"),
    ("no/such/model.onnx", None, {}, VerificationError, r"the model cannot be timed.*does not exist"),
    ([WITHOUT_KERNEL, CHAIN], DATA, {}, VerificationError, "the baseline model cannot be timed"),
    ([refusing(3), refusing(2)], TWO, {}, VerificationError, "does not run"),
    ([CHAIN, net_with_if()], DATA, {}, OptionError, "different inputs"),
    *((models, None, {}, OptionError, "model") for models in ([], {}, [42])),
    (CHAIN, [{"x": X, "xx": X}], {}, CalibrationError, "Did you mean"),
    (CHAIN, [{}], {}, CalibrationError, "lacks the input 'x'"),
    (CHAIN, [{"x": X.astype(np.uint8)}], {}, CalibrationError, r"expected float32 .* uint8 .*model 'model 1'"),
    (CHAIN, [{"x": X[0]}], {}, CalibrationError, "wrong shape"),
    (CHAIN, [], {}, CalibrationError, "no feed"),
    (CHAIN, DATA, {"baseline": "model 2"}, OptionError, "Did you mean 'model 1'"),
    *((CHAIN, DATA, {name: -1}, OptionError, name) for name in ("threads", "rounds", "warmup", "budget_s", "baseline")),
    *((CHAIN, DATA, {name: 0}, OptionError, name) for name in ("rounds", "budget_s")),
    (CHAIN, DATA, {"budget_s": float("nan")}, OptionError, "budget_s"),
    (CHAIN, DATA, {"baseline": 1}, OptionError, "baseline"),
]


@pytest.mark.parametrize(("models", "data", "options", "kind", "text"), REFUSED)
def test_what_is_refused(models, data, options, kind, text):
    """The only model or the baseline that does not run, other inputs, no model, feeds that do not fit, options."""
    with pytest.raises(kind, match=text):
        quick(models, data, **options)


def test_json_and_text():
    report = quick({"a": CHAIN, "b": CHAIN, "c": CHAIN}, DATA, baseline="b")
    assert report.models[0].verdict is harness.Verdict.NOISY
    assert any("too few" in note for note in report.notes)
    raw = json.loads(report.to_json())
    assert raw == json.loads(json.dumps(report.to_dict()))
    assert (raw["schema"], raw["models"][0]["verdict"]) == (1, str(harness.Verdict.NOISY))
    assert all(text in str(report) for text in ("baseline", "one thread"))
    assert ([*report.by_name], report.by_name["b"].ratio) == (["a", "b", "c"], 1)
    assert report.compare("a").ratio == report.by_name["a"].ratio
    assert report.compare("b", "c").ratio == pytest.approx(1 / report.compare("c", "b").ratio)
    with pytest.raises(OptionError, match="no model 'd'"):
        report.compare("d")


# ---- times by operator, told by the model's own nodes ---------------------------------------------------------------


def test_every_conv_is_timed_once_under_its_own_name(tmp_path):
    model = residual_block()
    few, before = feeds(model, 2), model.SerializeToString()
    onnx.save(model, tmp_path / "m.onnx")
    for source in (model, before, tmp_path / "m.onnx"):
        times = profile_ops(source, few, runs=3)
        assert sorted(t.node for t in times if t.op_type == "Conv") == ["conv1", "conv2", "stem"]
        assert all(t.milliseconds >= 0 for t in times)
    assert model.SerializeToString() == before
    assert profile_ops(model, few, runs=50, budget_s=0.0), "at least one run counts"


def test_kernels_behind_and_inside_a_body_are_told_by_their_nodes():
    model = net_with_if()
    told = {t.node: t.op_type for t in profile_ops(model, feeds(model, 1), runs=1)}
    nodes = {n.name: n.op_type for n in model.graph.node} | {"then_tanh": "Tanh", "else_neg": "Neg"}
    assert {name: nodes[name] for name in told if name in nodes} == {n: op for n, op in told.items() if n in nodes}
    assert {"conv0", "conv1", "else_neg"} <= set(told)


def test_wrong_feeds_and_none_are_errors():
    for model, given, kind, text in (
        (CHAIN, [], CalibrationError, "no feed"),
        (CHAIN, [{"nothing": 1}], VerificationError, "refuses a feed"),
        (WITHOUT_KERNEL, DATA[:1], VerificationError, "does not load"),
    ):
        with pytest.raises(kind, match=text):
            profile_ops(model, given)


def test_evidence_of_a_net_with_a_body(tmp_path):
    model, few = net_with_if(), feeds(net_with_if(), 3)
    made = make(model, tmp_path, few, rewrites=False)
    held = gather_evidence(model, made.written)
    assert with_measurements(held, model, made.written, []) is held, "without feeds nothing is run"
    found = with_measurements(held, model, made.written, few, runs=2)
    of_the_net = {d.node for d in made.report.plan.nodes if d.rule != "body-without-integers"}
    assert {n.name for n in found.graph.nodes} >= of_the_net >= {"conv0", "if"}
    assert all((found.layers, found.times.before, found.times.after))


# ---- what the doctor finds: limits, data types and their kernels, and what to fix -----------------------------------


INTEGER = ("uint8 x int8", "int8 x int8", "uint8 x uint8")


def test_each_type_of_each_operator_is_timed():
    done = []
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


@pytest.mark.parametrize(("flags", "saturates", "said"), [
    (("avx2",), True, "AVX2: products of 8 bits are added in 16 and clipped there"),
    (("avx2", "avx512f"), True, "AVX-512 without VNNI: products of 8 bits are added in 16"),
    (("avx2", "avx_vnni"), False, "VNNI: products of 8 bits are added in 32."),
    (("asimddp",), False, "Arm: products of 8 bits are added in 32."),
    ((), True, "A processor of unknown class: products of 8 bits are added in 16"),
])  # fmt: skip
def test_the_class_of_the_processor_is_named(pretend, flags, saturates, said):
    pretend(replace(VNNI, features=flags, saturates=saturates))
    notes = examine(flags=flags, budget_s=0).notes
    assert any(note.startswith(said) for note in notes)
    assert not any("7 bits" in note for note in notes)


def test_what_does_not_run_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(doctor, "open_session", Mock(side_effect=RuntimeError("no such kernel")))
    assert {(s.verdict, "no such kernel" in s.reason) for s in kernel_speeds(budget_s=0.1)} == {("refused", True)}


def test_the_examination_is_plain_data():
    found = examine(flags=("avx2",), budget_s=0)
    assert (found.speeds, found.max_opset) == ((), runtime_limits().max_opset)
    assert found.versions["onnxruntime"] == ort.__version__
    assert "CPUExecutionProvider" in found.providers
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["flags"] == ["avx2"]
    assert any("no 8-bit dot product" in note for note in found.notes)


def test_a_runtime_much_older_than_onnx_and_no_fast_integer_type_are_worth_a_note(monkeypatch):
    limits = RuntimeLimits(max_ir=8, max_opset=onnx.defs.onnx_opset_version() - 5, version="1.0")
    slow = (KernelSpeed("Conv", "uint8 x int8", "QLinearConv", 2.0, 0.5, "slow"),)
    monkeypatch.setattr(doctor, "runtime_limits", lambda: limits)
    monkeypatch.setattr(doctor, "kernel_speeds", lambda **_: slow)
    found = examine(budget_s=1)
    assert any("onnxruntime 1.0 reads up to" in note and "Fix: upgrade onnxruntime" in note for note in found.notes)
    assert any("IR version" in note for note in found.notes)
    assert any("No 8-bit type is faster" in note for note in found.notes)
