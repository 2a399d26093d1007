"""The report says for each layer which kernel and path runs it, and how long by estimate and as measured."""

from __future__ import annotations

from kenosis_ort.report import QuantizationReport
from kenosis_ort.report.evidence import LayerTime, OpTime, OpTimes, kernels_in_words, layer_times
from kenosis_ort.report.text import render_report, to_text
from tests.report.samples import fusion, kernel, report

TIMES = OpTimes(
    (),
    (
        OpTime("stem", "Conv", "QLinearConv", 0.02),
        OpTime("stem", "Conv", "Transpose", 0.005),
        OpTime("stem_relu", "Relu", "Relu", 0.001),
        OpTime("x_quantize", "QuantizeLinear", "QuantizeLinear", 0.003),
    ),
)
PROOF = fusion(
    kernel("stem", path="direct"),
    kernel("stem_relu", op_type="Relu", kernel="", status="absorbed"),
    kernel("deep", path="matrix product"),
)
LAYERS = layer_times(PROOF, {"stem": ("Conv", 30.0), "stem_relu": ("Relu", 0.0)}, 7.0, TIMES)


def test_each_kernel_once_and_what_is_between_them_last() -> None:
    assert (
        LayerTime("stem", "Conv", "com.microsoft.QLinearConv", "direct", 30.0, 25.0),
        LayerTime("deep", "Conv", "com.microsoft.QLinearConv", "matrix product", None, None),
        LayerTime("", "between layers", "", "", 7.0, 4.0),
    ) == LAYERS


def test_without_a_proof_the_estimate_alone() -> None:
    found = layer_times(None, {"a": ("Conv", 3.0), "b": ("Relu", 0.0)}, None, None)
    assert found == (LayerTime("a", "Conv", estimated_us=3.0),)
    assert layer_times(None, {}, None, None) == ()


def test_text_json_and_page_hold_them() -> None:
    made = report(layers=LAYERS, host="'vnni' (a processor), measured here", fusion=PROOF)
    text = to_text(render_report(made, full=True))
    assert "Convs: 1 on the direct kernel, 1 on the matrix product kernel, estimated 37 us a run" in " ".join(
        text.split()
    )
    assert "25.0 us" in text
    assert "Layers" not in to_text(render_report(made))
    assert QuantizationReport.from_json(made.to_json()).layers == LAYERS
    assert made.to_dict()["layers"][0]["path"] == "direct"
    page = made.to_html()
    assert "This file is laid out for &#39;vnni&#39; (a processor), measured here." in page
    assert "matrix product" in page
    assert "30.0 µs" in page


def test_nothing_is_said_where_nothing_is_known() -> None:
    assert kernels_in_words(()) == ""
    assert "\nkernels " not in to_text(render_report(report()))
