"""What holds of files made for every target that comes with the package, whatever its table says."""

import importlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import QuantType
from onnxruntime.quantization import quantize_static as stock

from kenosis_ort import Stages, quantize_static
from kenosis_ort.errors import OptionError, VerificationError
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.runtime.session import configured, open_session
from kenosis_ort.targets import TARGETS, Target
from tests import models
from tests.contracts.test_own_target import OWN
from tests.flow.support import run, sqnr_db
from tests.oracle.compare import differences
from tests.processor import SATURATES

each_target = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
each_model = pytest.mark.parametrize("name", models.ALL)


@pytest.mark.filterwarnings("ignore:.* not run on integers on target")
@pytest.mark.parametrize("target", [*TARGETS.values(), OWN], ids=lambda target: target.name)
@each_model
def test_a_net_of_every_family(target: Target, name: str, tmp_path: Path) -> None:
    model, out = models.ALL[name](), tmp_path / "out.onnx"
    report = quantize_static(
        model, out, models.reader(model, 6), target=target, recipe="plain", promise=False, verify=False
    )
    assert report.target == report.plan.target == target.name
    assert report.plan.integer_nodes()
    assert PlacementPlan.from_json(report.plan.to_json()) == report.plan
    types = {onnx.TensorProto.DataType.Name(t).lower() for t in target.data_types().activations}
    assert {d.dtype for d in report.plan.decisions} <= {"", "int32", "int8", *types}
    if not target.loads_in_ort:
        return
    feeds = models.feeds(model, 4)
    exact = target.types.largest_pair is not None or not SATURATES  # else its files are for other kernels than these
    with configured(target.session_entries):
        session = open_session(out, optimize=exact)
    ran = [session.run(None, feed) for feed in feeds]
    for want, got in zip(itertools.chain(*run(model, feeds)), itertools.chain(*ran), strict=True):
        if want.dtype.kind == "f":
            assert sqnr_db(want, got) > 8


@each_target
def test_without_stages_it_is_stock(target: Target, tmp_path: Path) -> None:
    model, (source, theirs, ours) = models.residual_block(), (tmp_path / f"{name}.onnx" for name in "fso")
    onnx.save(model, source)
    stock(source, theirs, models.reader(model, 4))
    quantize_static(source, ours, models.reader(model, 4), target=target, stages=Stages.none())
    assert differences(onnx.load(theirs), onnx.load(ours)) == []


UINT8 = {"quant_type": QuantType.QUInt8}
WIDE = {"quant_type": QuantType.QInt16}


OVERRIDE = "takes? .*'conv0_(out|w)'|not take .*'conv0_(out|w)'"


def entry(name: str, **said: Any) -> dict[str, Any]:
    return {"extra_options": {"TensorQuantOverrides": {name: [said]}}}


@pytest.mark.parametrize(("target", "said", "words"), [
    *((target, entry("conv0_w", **UINT8), OVERRIDE) for target in ("onednn", "tensorrt")),
    ("tensorrt", entry("conv0_out", **UINT8), OVERRIDE), ("tensorrt", entry("conv0_out", symmetric=False), OVERRIDE),
    ("tensorrt", entry("conv0_out", scale=np.float32(0.1), zero_point=np.int8(3)), OVERRIDE),
    ("qnn", entry("conv0_out", **WIDE), OVERRIDE),
    ("onednn", entry("conv0_out", **UINT8, convert={**WIDE, "recv_nodes": {"relu1"}}), OVERRIDE),
    ("onednn", {"weight_type": QuantType.QUInt8}, "weight_type"),
    ("qnn", {"activation_type": QuantType.QInt8}, "does not take"),
    ("qnn", {"weight_type": QuantType.QInt16}, "does not take"),
    ("tensorrt", {"activation_type": QuantType.QUInt8}, "int8 with zero point 0 alone"),
    ("tensorrt", {"weight_type": QuantType.QUInt8}, "int8 with zero point 0 alone"),
])  # fmt: skip
def test_types_without_kernels_are_refused_before_calibration(target: str, said: dict[str, Any], words: str) -> None:
    """The runtime would refuse the file, or compute something else; the reader is empty and would say so if asked."""
    with pytest.raises(OptionError, match=f"target '{target}'.* {words}|{words}"):
        quantize_static(models.conv_relu_chain(2), "never.onnx", models.FeedReader([]), target=target, **said)


@pytest.mark.parametrize("module", ["onednn.openvino_proof", "ort_web", "qnn.htp_proof"])
def test_libraries_of_operators_for_onnxruntime_are_refused_elsewhere(module: str) -> None:
    prove = importlib.import_module(f"kenosis_ort.targets.{module}").prove
    with pytest.raises(VerificationError, match="leave custom_op_libraries out"):
        prove(models.mlp(), custom_op_libraries=["lib.so"])


@pytest.mark.parametrize("target", ["ort-cpu", "arm", "ort-web"])
def test_an_override_is_kept_where_the_runtime_runs_it_in_float(target: str, tmp_path: Path) -> None:
    model, said = models.conv_relu_chain(8), entry("conv0_out", **WIDE)
    settled = {"recipe": "plain", "promise": False, "verify": False, **said}
    report = quantize_static(model, tmp_path / "o.onnx", models.reader(model, 2), target=target, **settled)
    assert {d.dtype for d in report.plan.by_value["conv0_out"]} <= {"int16", ""}
