"""What the machine decides where the caller says nothing, and what happens where the caller insists."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import CalibrationMethod, QuantType

from kenosis_ort import KenosisWarning, Stages, quantize_static
from kenosis_ort.passes.evaluator import Score
from kenosis_ort.runtime.limits import Machine
from kenosis_ort.targets import DataTypes
from kenosis_ort.targets.ort_cpu.rules import for_this_machine, is_arm
from tests import models
from tests.flow.support import Made, chosen, make, own_warnings, quantized
from tests.processor import ARM, NO_VNNI, VNNI, Pretend
from tests.quantizer.test_exact_products import clipping_layers

INT8 = {"activation_type": QuantType.QInt8}
NAIVE = Stages(placement=False)
FLOAT8: dict[str, Any] = dict.fromkeys(("activation_type", "weight_type"), QuantType.QFLOAT8E4M3FN)
FLOAT8 |= {"calibrate_method": CalibrationMethod.Distribution}
FLOAT8_RUNS = pytest.mark.since("1.24")  # before, the runtime makes a QLinearConv of it, which takes no such type


def test_types_follow_the_host_and_not_the_probe(tmp_path: Path, pretend: Pretend) -> None:
    files = []
    for host in (VNNI, NO_VNNI, ARM):
        pretend(host)
        made, kind = make(models.mobile_block(), tmp_path), QuantType.QInt8 if host is ARM else QuantType.QUInt8
        usual = {"activation_type": kind, "weight_type": QuantType.QInt8, "per_channel": True, "reduce_range": False}
        assert chosen(made.report).items() >= {name: (value, "host default") for name, value in usual.items()}.items()
        weights = made.held["depthwise_w_quantized"]
        assert (weights.dtype, np.abs(weights).max()) == (np.int8, 127)  # depthwise: its kernel adds no pairs
        assert made.held["depthwise_w_scale"].shape == (weights.shape[0],)
        kinds = {zero_point.dtype for _, zero_point in made.grids.values()}
        assert kinds == {np.dtype(np.int8 if host is ARM else np.uint8)}
        files.append(made.out.read_bytes())
    assert files[0] == files[1]


@pytest.mark.parametrize(("options", "said"), [
    ({"weight_type": QuantType.QUInt8}, {"per_channel": (False, "host default")}),
    ({"activation_type": QuantType.QUInt8.tensor_type.real}, {"activation_type": (QuantType.QUInt8, "caller")}),
    ({"reduce_range": True}, {"reduce_range": (True, "caller"), "per_channel": (True, "host default")}),
    ({"stages": Stages.none()}, dict.fromkeys(("per_channel", "reduce_range"), (False, "stock default"))),
    ({"stages": Stages.none()}, {"activation_type": (QuantType.QInt8, "stock default")}),
    pytest.param(FLOAT8, {"reduce_range": (False, "host default")}, marks=FLOAT8_RUNS),
    pytest.param({**FLOAT8, "stages": NAIVE}, {"reduce_range": (False, "host default")}, marks=FLOAT8_RUNS),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::kenosis_ort.KenosisWarning")  # accuracy is not the question
def test_other_defaults(tmp_path: Path, pretend: Pretend, options: dict[str, Any], said: dict[str, Any]) -> None:
    pretend(NO_VNNI)
    assert chosen(quantized(models.residual_block(), tmp_path / "out.onnx", **options)).items() >= said.items()


@pytest.mark.parametrize("options", [{"stages": Stages(weights=False)}, {"extra_options": {"WeightSymmetric": False}}])
def test_weights_by_stocks_scales_get_seven_bits(tmp_path: Path, options: dict[str, Any]) -> None:
    made = make(models.residual_block(), tmp_path, **options)
    assert chosen(made.report)["reduce_range"] == (True, "host default")
    assert made.db() > 25
    wide = quantized(models.residual_block(), made.out, weight_type=QuantType.QUInt8, **options)
    assert not chosen(wide)["reduce_range"][0]


# ---- insisting on int8 ----------------------------------------------------------------------------------------


@pytest.mark.x86_only
@pytest.mark.parametrize("net", ["residual_block", "silu_net", "concat_net", "two_input_detector", "net_with_if"])
def test_int8_on_x64_with_branches_runs_in_integer(tmp_path: Path, pretend: Pretend, net: str) -> None:
    """Stock's file and a plain placement run Convs around such a value in float."""
    pretend(VNNI)
    unsigned = make(models.ALL[net](), tmp_path / "u8.onnx", activation_type=QuantType.QUInt8)
    signed = make(models.ALL[net](), tmp_path, **INT8)
    assert signed.report.warnings == unsigned.report.warnings == ()
    assert signed.heavy == unsigned.heavy
    assert signed.db() == pytest.approx(unsigned.db(), abs=0.5)
    assert {zero_point.dtype for _, zero_point in signed.grids.values()} == {np.dtype(np.int8)}


@pytest.mark.x86_only
def test_int8_on_x64_with_branches_warns_once_at_the_callers_line(tmp_path: Path, pretend: Pretend) -> None:
    pretend(VNNI)
    model, out = models.concat_net(), tmp_path / "out.onnx"
    with pytest.warns(KenosisWarning) as caught:
        report = quantize_static(model, out, models.reader(model), promise=False, stages=NAIVE, **INT8)
    (text,) = own_warnings(list(caught))
    assert caught[0].filename == __file__
    slow = [name for name, integer in Made(model, [], out, report).heavy.items() if not integer]
    assert slow
    assert all(part in text for part in (f"{len(slow)} Convs", f"'{slow[0]}'", "Fix: activation_type=QuantType.QUInt8"))
    assert report.warnings == (text,)
    assert chosen(report)["activation_type"] == (QuantType.QInt8, "caller")


@pytest.mark.parametrize(("build", "host", "options"), [
    (lambda: models.conv_relu_chain(4), VNNI, INT8), (models.concat_net, ARM, INT8), (models.concat_net, VNNI, {}),
    (lambda: models.conv_relu_chain(4), VNNI, {**INT8, "nodes_to_exclude": ["conv2"]}),
    (lambda: models.conv_relu_chain(4), VNNI, {**INT8, "protect_outputs": "float"}),
], ids=["no branch on x64", "branches on Arm", "nothing said", "kept float", "output kept float"])  # fmt: skip
def test_int8_without_harm_does_not_warn(tmp_path: Path, pretend: Pretend, build: Any, host: Any, options: Any) -> None:
    pretend(host)
    made = make(build(), tmp_path, **options)
    assert not [w for w in made.report.warnings if "QInt8" in w]
    if len(options) > 1:
        assert made.heavy["conv2"] is False


# ---- the probe ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("host", "arm"), [
    *((replace(VNNI, family=family), True) for family in ("aarch64", "arm64", "ARM64")), (ARM, True),
    *((replace(VNNI, family=family), False) for family in ("x86_64", "AMD64")), (NO_VNNI, False),
])  # fmt: skip
def test_types_and_reasons_follow_the_family_and_the_probe(pretend: Pretend, host: Machine, arm: bool) -> None:
    pretend(host)
    found = for_this_machine(DataTypes())
    assert is_arm(host.family) == arm == (found.activation == onnx.TensorProto.INT8) == (not found.single_reader)
    assert found.saturates == ("clipped there" in found.why) == (host is NO_VNNI)


# ---- weights whose pairs may clip: for a machine that the caller names, and where held-out samples gain by them --


@pytest.mark.parametrize(("machine", "named", "gains"), [
    (VNNI, "vnni", True), (VNNI, "amx", True), (VNNI, None, True),  # not without the caller's word
    (NO_VNNI, "vnni", True), (VNNI, "vnni", False),  # the gain cannot be measured, there is none
])  # fmt: skip
def test_weights_that_may_clip(tmp_path: Path, pretend: Pretend, machine: Machine, named: Any, gains: bool) -> None:
    pretend(machine)
    model = models.residual_block()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Score, "beats", lambda *_: gains)
        made = make(model, tmp_path, models.feeds(model, 16), recipe="fast", **({"host": named} if named else {}))
    taken = machine is VNNI and named is not None and gains
    notes = " ".join(made.report.notes)
    processors = [e.value for e in made.written.metadata_props if e.key == "kenosis_ort.processors"]
    assert bool(clipping_layers(made.written)) == taken
    assert not taken or processors == ["with VNNI"]
    assert (f"for processors with VNNI, as '{named}'" in notes) == taken
    assert ("cannot be measured" in notes) == (machine is NO_VNNI)
    assert named or not processors
