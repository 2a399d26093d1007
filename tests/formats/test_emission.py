"""The public call with formats and bits: what is written, what runs, what is refused before a sample is read."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from kenosis_ort import KenosisWarning, OptionError, Recipe, quantize_static, verify_fusion
from kenosis_ort.accuracy.side_by_side import Pairing
from kenosis_ort.accuracy.value_grids import read_grids
from kenosis_ort.errors import InternalError
from kenosis_ort.formats.conventions import to_qonnx
from kenosis_ort.formats.tensors import quantizers_of
from kenosis_ort.passes.recipe import RECIPES
from tests import models
from tests.flow.support import Untouched, changed
from tests.formats.qonnx import operators
from tests.formats.test_to_qop import check_same

FEEDS = 24
pytestmark = pytest.mark.filterwarnings("ignore:output .* keeps only:kenosis_ort.errors.KenosisWarning")


def net() -> onnx.ModelProto:
    """Conv, Relu, Conv, Relu6, residual Add, pool, Gemm: of everything that bits have a say in."""
    net = models.Net(seed=5)
    x = net.input("x", [1, 3, 12, 12])
    a = net.op("Relu", [net.conv(x, 3, 8, name="stem")])
    b = net.op("Clip", [net.conv(a, 8, 8, name="second"), 0.0, 6.0])
    c = net.op("Add", [a, net.conv(b, 8, 8, name="third")])
    pooled = net.op("Flatten", [net.op("GlobalAveragePool", [net.op("Relu", [c])])])
    return net.of(net.op("Gemm", [pooled, net.weight((8, 4)), np.zeros(4)], name="head"))


def written(tmp_path: Path, **options: Any) -> onnx.ModelProto:
    model = net()
    out = tmp_path / "out.onnx"
    report = quantize_static(model, out, models.FeedReader(models.feeds(model, FEEDS)), **options)
    assert not report.is_float
    return onnx.load(out)


@pytest.mark.parametrize("bits", [2, 3, 4, 5])
def test_values_keep_to_their_bits_and_run_on_the_integer_kernels(tmp_path: Path, bits: int) -> None:
    made = written(tmp_path, format="qcdq", weight_bits=bits, activation_bits=bits, recipe="plain")
    weights = [t for t in quantizers_of(made) if t.constant is not None and t.quantizer.bits <= 8]
    assert {t.quantizer.bits for t in weights} == {bits}
    for tensor in weights:
        assert tensor.constant is not None
        integers = onnx.numpy_helper.to_array(tensor.constant)
        assert integers.dtype == np.int8
        assert tensor.quantizer.bounds[0] <= integers.min()
        assert integers.max() <= tensor.quantizer.bounds[1]
    entering, *inner = (t.quantizer.bits for t in quantizers_of(made) if t.quantize is not None)
    assert (entering, set(inner)) == (8, {bits})
    proof = verify_fusion(tmp_path / "out.onnx")
    assert all(k.integer for k in proof.kernels if k.op_type in ("Conv", "Gemm"))


def test_bits_by_node(tmp_path: Path) -> None:
    by_node = {"second": {"weights": 8}, "third": {"activations": 6}}
    recipe = replace(RECIPES["plain"], weight_bits=4, activation_bits=4, bits=by_node)
    tensors = quantizers_of(written(tmp_path, format="qcdq", recipe=recipe))
    found = {t.real or t.integers: t.quantizer.bits for t in tensors if t.quantizer.bits <= 8}
    assert sorted(b for name, b in found.items() if name.endswith("_quantized")) == [4, 4, 4, 8]
    assert found["third_out"] == 6
    assert found["relu_1_out"] == 4


@pytest.mark.parametrize("bits", [8, 4])
def test_all_formats_are_of_one_state(tmp_path: Path, bits: int) -> None:
    narrow = {"weight_bits": bits, "activation_bits": bits, "recipe": "plain", "promise": False, "tune": "off"}
    first = written(tmp_path, format="qcdq", **narrow)
    operated = written(tmp_path, format="qop-clip", **narrow)
    check_same(first, operated, models.feeds(net(), 3))
    spelled = written(tmp_path, format="qcdq-qonnx", **narrow)
    check_same(first, spelled, models.feeds(net(), 3))
    exported = written(tmp_path, format="qonnx", **narrow)
    assert {n.domain for n in exported.graph.node} == {"", "qonnx.custom_op.general"}
    assert not {"QuantizeLinear", "DequantizeLinear"} & operators(exported).keys()


def test_eight_bits_as_operators_are_the_default_s_results(tmp_path: Path) -> None:
    plain, operated = (written(tmp_path, format=f, promise=False) for f in ("qdq", "qop"))
    check_same(plain, operated, models.feeds(net(), 3))
    assert operators(operated)["QLinearConv"] == 3
    proof = verify_fusion(tmp_path / "out.onnx")
    assert "4 of 4 Conv/Gemm/MatMul on integer kernels" in str(proof)
    assert (proof.integer_share(), proof.silently_quantized()) == (1.0, ())


@pytest.mark.parametrize(("options", "text"), [
    ({"weight_bits": 0}, "weight_bits=0.*from 2 to 8"),
    ({"activation_bits": 300, "format": "qonnx"}, "activation_bits=300.*from 2 to 8"),
    ({"format": "onnxq"}, "format='onnxq'"),
    ({"activation_bits": 4}, "format='qdq' has activations of 8 bits.*qcdq"),
    ({"activation_bits": 4, "quant_format": "QOperator"}, "format='qop' has activations of 8 bits"),
    ({"format": "qcdq", "quant_format": "QOperator"}, "contradicts"),
    ({"weight_bits": 4, "extra_options": {"WeightSymmetric": False}}, "WeightSymmetric.*contradicts"),
    ({"recipe": Recipe(activation_bits=3)}, "asks for 3"),
])  # fmt: skip
def test_what_cannot_be_said_is_refused_before_a_sample_is_read(tmp_path, options, text):
    with pytest.raises(OptionError, match=text):
        quantize_static(net(), tmp_path / "out.onnx", Untouched(), **options)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_computes_something_else_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: onnx.ModelProto) -> onnx.ModelProto:
        made = to_qonnx(model)
        return changed(made, **{t.name: 60 for t in made.graph.initializer if t.name.endswith("quant_scale")})

    monkeypatch.setattr("kenosis_ort.formats.conventions.to_qonnx", broken)
    reader = models.FeedReader(models.feeds(net(), 4))
    with pytest.raises(InternalError, match="in format 'qonnx' is off by"):
        quantize_static(net(), tmp_path / "out.onnx", reader, format="qonnx", recipe="plain")
    assert not list(tmp_path.iterdir())


def test_comparison_and_report_see_the_bits(tmp_path: Path) -> None:
    made = written(tmp_path, format="qcdq", weight_bits=4, activation_bits=3, recipe="plain")
    pair = next(p for p in Pairing(net(), made).activations() if p.name == "relu_1_out")
    assert pair.grid is not None
    assert pair.grid.range == (0.0, pytest.approx(7 * pair.grid.scale.item()))
    grids = read_grids(net(), made)
    assert (grids["relu_1_out"].bits, grids["relu_1_out"].bounds) == (3, (0, 7))
    assert {grid.bits for grid in grids.values() if grid.stored is not None} == {4}


@pytest.mark.parametrize("wrong", [{"conv": {"weights": 1}}, {"conv": {"weight": 4}}, {"conv": 4}])
def test_bits_of_recipes_are_checked(wrong: Any) -> None:
    with pytest.raises(OptionError):
        Recipe(bits=wrong)


def test_bits_of_no_node_are_told(tmp_path: Path) -> None:
    recipe = replace(RECIPES["plain"], bits={"secondd": {"weights": 4}})
    with pytest.warns(KenosisWarning, match=r"recipe\.bits names 'secondd', which is no node.*'second'"):
        written(tmp_path, format="qcdq", recipe=recipe, promise=False)


def test_exports_hold_no_rewrite_for_one_runtime_s_kernels(tmp_path: Path) -> None:
    assert "Pad" in operators(written(tmp_path, format="qcdq", recipe="plain", promise=False, tune="off"))
    exported = written(tmp_path, format="qonnx", recipe="plain")
    assert "Pad" not in operators(exported)
