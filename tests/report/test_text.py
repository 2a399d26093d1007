"""The text says the verdict, the numbers and the reasons, whatever characters the names hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kenosis_ort.plan import Kind, NodeDecision, PlacementPlan
from kenosis_ort.report.explanation import fusion_verdict
from kenosis_ort.report.text import MAX_FLOAT_ROWS, format_bytes, render_fusion, render_report, to_text
from tests.report.samples import fusion, kernel, plan, report


def test_report_shows_verdict_sizes_kernels_reasons_and_messages():
    text = to_text(render_report(report()))
    for expected in (
        "1 of 2 Conv/Gemm/MatMul run on integer kernels; 1 planned as integer run in float",
        "in.onnx -> out.onnx",
        "4.0 MB -> 1.0 MB (4.00x smaller)",
        "minmax, 8 samples, 5 tensors, 0.25 s",
        "ort-cpu (onnxruntime 1.2.3)",
        "logits 31.2 dB",
        "com.microsoft.QLinearConv",
        "1 Relu",
        "no Q on its output",
        "2 Transpose",
        "note: opset raised from 9 to 13",
        "warning: one [odd] thing",
        "calibrate 0.25, quantize 0.50; total 0.75",
    ):
        assert expected in text, text


@pytest.mark.parametrize(("after", "said"), [(500, "2.00x smaller"), (1220, "1.22x larger"), (1000, "the same size")])
def test_a_size_that_grows_is_called_larger(after: int, said: str):
    shown = replace(report(), size_before=1000, size_after=after)
    assert f"({said})" in to_text(render_report(shown))


def test_a_verdict_names_recurrent_layers_that_run_in_float():
    lstm = kernel("lstm", op_type="LSTM", kernel="LSTM", integer=False, status="float")
    assert fusion_verdict(fusion(kernel("fc", op_type="Gemm", kernel="QGemm"), lstm)) == (
        "1 of 1 Conv/Gemm/MatMul run on integer kernels; 1 LSTM in float."
    )


def test_plain_text_holds_no_escape_codes_and_no_trailing_blanks():
    text = to_text(render_report(report(), full=True))
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_options_are_shown_on_request_with_who_chose_them():
    assert "host default" not in to_text(render_report(report()))
    assert "host default" in to_text(render_report(report(), full=True))


def test_without_a_proof_the_report_says_so():
    text = to_text(render_report(report(fusion=None)))
    assert "without a fusion proof" in text
    assert "(not asked)" in text


def float_kernel(node: str, op_type: str, reason: str):
    return kernel(node, op_type=op_type, kernel=op_type, integer=False, status="float", reason=reason)


def test_float_nodes_are_grouped_by_reason_with_broken_and_heavy_ones_first():
    light = [float_kernel(f"add{i}", "Add", "elementwise") for i in range(20)]
    proof = fusion(*light, float_kernel("gemm0", "Gemm", "protected"), float_kernel("conv0", "Conv", "second consumer"))
    text = to_text(render_fusion(proof, plan=plan("conv0")))
    assert text.index("second consumer") < text.index("protected") < text.index("elementwise")
    assert "20 Add" in text
    assert "add0, add1, add2, ..." in text
    assert "add3" not in text
    full = to_text(render_fusion(proof, plan=plan("conv0"), full=True))
    assert all(f"add{i}" in full for i in range(20))


def test_a_long_list_of_reasons_is_cut_and_counted():
    nodes = [float_kernel(f"n{i}", "Add", f"reason {i}.") for i in range(MAX_FLOAT_ROWS + 3)]
    text = to_text(render_fusion(fusion(*nodes)))
    assert "and 3 nodes more" in text
    assert f"reason {MAX_FLOAT_ROWS - 1}." in text
    assert f"reason {MAX_FLOAT_ROWS}." not in text


@pytest.mark.parametrize("name", ["layer[0]/conv", "[bold]x[/bold]", "a:b\\[c]", "[/]"])
def test_names_are_never_read_as_markup(name: str):
    node = kernel(name, integer=False, kernel="Conv", status="float", reason=f"reads {name}")
    assert to_text(render_fusion(fusion(node))).count(name) == 2


def test_silently_quantized_nodes_are_named():
    text = to_text(render_fusion(fusion(kernel("left_out", silently_quantized=True))))
    assert "left_out" in text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_960, "1.0 MB"),
        (30_600_000, "30.6 MB"),
        (2_500_000_000, "2.5 GB"),
    ],
)
def test_format_bytes(count: int, text: str):
    assert format_bytes(count) == text


def test_attention_layers_are_told_as_one_block():
    node = NodeDecision("layer", "Attention", Kind.FLOAT, "own", "float")
    softmax = NodeDecision("other", "Softmax", Kind.FLOAT, "own", "float")
    why = "1 attentions stay as products and Softmax ('other': its scale is -1)."
    assert report().attention() == ""
    one = report(plan=PlacementPlan("ort-cpu", nodes=(node, softmax)), fusion=None)
    assert one.attention() == "1 attention layer is one operator."
    two = report(
        plan=PlacementPlan("ort-cpu", nodes=(node, replace(node, node="second"), softmax)),
        notes=("x", why),
        fusion=None,
    )
    assert two.attention() == f"2 attention layers are one operator each. {why}"
    assert "2 attention layers are one operator each." in to_text(render_report(two))
    assert report(notes=(why,)).attention() == why
    page = two.to_html()
    assert "<b>Attention:</b> 2 attention layers are one operator each." in page
    assert "<b>Attention:</b>" not in report().to_html()


def test_an_int8_cache_is_told_in_both_forms():
    made = report(cache={"past": 0.5, "present": 0.5, "past_1": 0.125}, fusion=None)
    assert made.int8_cache() == "3 inputs and outputs are int8, scales 0.125 to 0.5, in the metadata."
    assert made.int8_cache() in to_text(render_report(made))
    assert f"<b>Cache:</b> {made.int8_cache()}" in made.to_html()
    assert report().int8_cache() == ""
