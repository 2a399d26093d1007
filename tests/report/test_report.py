"""The report is pure data that round-trips JSON, and tells one honest outcome in text, whatever the names hold."""

import dataclasses
import json
import math
import re
from enum import Enum
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

import kenosis_ort
from kenosis_ort.options import OptionChoice
from kenosis_ort.passes.journal import PassOutcome
from kenosis_ort.plan import Kind, NodeDecision, PlacementPlan
from kenosis_ort.report import evidence as reasons
from kenosis_ort.report.evidence import OpTime, OpTimes, explain_kernel, explain_plan, layer_times
from kenosis_ort.report.facts import SpeedCandidate, SpeedSummary
from kenosis_ort.report.html.page import cards
from kenosis_ort.report.text import MAX_FLOAT_ROWS, render_fusion, render_report, to_text
from kenosis_ort.storage.data import format_bytes
from kenosis_ort.targets.proof import Cause, KernelReport, Status
from tests import models, planning
from tests.report.samples import compared, full_report, fusion, kernel, plan, report, speed


def text_of(shown, *, full=False):
    return to_text(render_report(shown, full=full))


def lacking(text, *expected):
    return [part for part in expected if part not in text]


# -- as data


class Shade(Enum):
    DARK = 3


@pytest.mark.parametrize("original", [report(), full_report(), report(fusion=None)], ids=["bare", "full", "unproved"])
def test_json_has_every_field_under_its_name(original):
    raw = json.loads(original.to_json())
    assert raw == original.to_dict()
    assert raw.keys() == {"schema", "verdict", *(f.name for f in dataclasses.fields(original))}
    absent = {f.name for f in dataclasses.fields(original) if getattr(original, f.name) is None}
    assert {name for name, value in raw.items() if value is None} == absent
    assert [n["node"] for n in raw["plan"]["nodes"]] == [n.node for n in original.plan.nodes]
    for name in ("trust", "evidence"):
        part = getattr(original, name)
        assert raw[name] == (None if part is None else json.loads(json.dumps(dataclasses.asdict(part)))), name
    assert not reasons.ReportEvidence()


@given(st.floats(allow_nan=False))
def test_any_number_survives_json(db):
    text = report(outputs=[compared(str(each), each) for each in (db, math.inf, math.nan)]).to_json()
    assert lacking(text, "Infinity", "NaN") == ["Infinity", "NaN"]
    assert [o["sqnr_db"] for o in json.loads(text)["outputs"]][1:] == ["inf", "nan"]
    assert float(json.loads(text)["outputs"][0]["sqnr_db"]) == db


@pytest.mark.parametrize(("value", "plain"), [
    (Shade.DARK, "DARK"), (Path("a/b"), "a/b"), ({"k": (1, Shade.DARK)}, {"k": [1, "DARK"]}),
    ({Shade.DARK: {2, 1}}, {"DARK": [1, 2]}), (float("inf"), "inf"), (None, None), (True, True),
    (len, "builtin_function_or_method"),
])  # fmt: skip
def test_option_values_become_plain_data(value, plain):
    raw = report(options={"option": OptionChoice(value, "caller")}).to_dict()
    assert raw["options"] == {"option": {"value": plain, "source": "caller"}}


def test_repr_is_one_short_line_ratios_are_safe_and_it_is_frozen():
    assert re.fullmatch(r"<QuantizationReport 'out.onnx'.*>", repr(report()))
    assert [report(size_before=100, size_after=after).size_ratio for after in (0, 25)] == [0, 4]
    assert report(seconds={"a": 1.0, "b": 0.5}).total_seconds == 1.5
    with pytest.raises(dataclasses.FrozenInstanceError):
        report().target = "other"


def test_the_change_of_a_pass_and_the_form_taken_are_found():
    for before, after, change in ((0.5, 0.25, -0.5), (None, 1.0, None), (0.0, 1.0, None)):
        assert PassOutcome("p", True, before, after).change == change
    assert (speed().taken.name, speed().sentence()) == ("int8-first-float", "first node float: 1.50x")
    assert (SpeedSummary().taken, SpeedSummary().sentence()) == (None, "")


@pytest.mark.parametrize(("basis", "verdict", "standing"), [
    ("measured", "faster", "good"), ("measured", "no difference", "good"), ("measured", "slower", "bad"),
    ("measured", "too noisy", "watch"), ("estimated", "", "watch"), ("estimated", "slower", "watch"),
])  # fmt: skip
def test_the_card_of_speed_is_good_where_it_was_measured_and_not_slower(basis, verdict, standing):
    form = SpeedCandidate("int8", status="taken", ratio=1.5, low=1.25, high=1.75, milliseconds=2.0, verdict=verdict)
    (card,) = (c for c in cards(report(speed=SpeedSummary((form,), basis=basis))) if c.name == "speed")
    assert (card.standing, card.label) == (standing, ", ".join(filter(None, (basis, verdict))))
    assert "(1.25 to 1.75), 2.00 ms a run" in card.sentence


# -- the verdict

HEAD = kernel("head", integer=False, status="float", reason="protected")
LOST = kernel("a", integer=False, status="absorbed")


def test_a_verdict_counts_what_the_runtime_still_computes_and_compares_it_with_the_plan():
    proof = fusion(kernel("a"), kernel("b"), kernel("folded", status="removed", integer=False))
    assert report(fusion=proof).verdict() == "2 of 2 Conv/Gemm/MatMul run on integer kernels."
    assert "1 planned as integer run in float" in report(fusion=fusion(kernel("a"), HEAD)).verdict()
    as_planned = report(fusion=fusion(kernel("a"), HEAD), plan=plan("a"))
    assert (as_planned.verdict()[-33:], as_planned.left_float()) == ("the others stay float as planned.", ())
    assert report(fusion=fusion(LOST), plan=plan("a")).left_float() == (LOST,), "absorbed into a float kernel"
    assert "no Conv, Gemm or MatMul" in report(fusion=fusion(kernel("x", op_type="Add"))).verdict()
    proof = fusion(kernel("fc", op_type="Gemm", kernel="QGemm"), float_kernel("lstm", "LSTM", ""))
    assert reasons.fusion_verdict(proof) == "1 of 1 Conv/Gemm/MatMul run on integer kernels; 1 LSTM in float."


# -- as text


def test_text_shows_verdict_sizes_kernels_reasons_and_messages():
    text = text_of(report())
    assert not lacking(
        text,
        "1 of 2 Conv/Gemm/MatMul run on integer kernels; 1 planned as integer run in float",
        *("in.onnx -> out.onnx", "4.0 MB -> 1.0 MB (4.00x smaller)", "minmax, 8 samples, 5 tensors, 0.25 s"),
        *("ort-cpu (onnxruntime 1.2.3)", "logits 31.2 dB", "com.microsoft.QLinearConv", "1 Relu", "no Q on its output"),
        *("2 Transpose", "note: opset raised from 9 to 13", "warning: one [odd] thing"),
        "calibrate 0.25, quantize 0.50; total 0.75",
    )
    assert ["host default" in shown for shown in (text, text_of(report(), full=True))] == [False, True]
    assert not lacking(text_of(report(fusion=None)), "without a fusion proof", "(not asked)")
    for after, said in ((500, "2.00x smaller"), (1220, "1.22x larger"), (1000, "the same size")):
        assert f"({said})" in text_of(report(size_before=1000, size_after=after))


def test_text_tells_passes_forms_and_trust():
    assert not lacking(
        text_of(full_report()),
        *("speed        1.50x (1.25 to 1.75) of the float model, faster", "trust        usable", "recipe       fast"),
        *("0.02 -> 0.015", "-25.0 %", "undone", "skipped", "only 0.80x", "and 1 form that did not have to be tried"),
        *("the pools were merged", "what would help: ten real samples", "a: unstable"),
    )
    full = text_of(full_report(), full=True)
    assert lacking(full, "the float model", "\x1b") == ["\x1b"]
    assert all(line == line.rstrip() for line in full.splitlines())


def float_kernel(node, op_type, reason):
    return kernel(node, op_type=op_type, kernel=op_type, integer=False, status="float", reason=reason)


def test_float_nodes_are_grouped_by_reason_with_broken_and_heavy_ones_first():
    light = [float_kernel(f"add{i}", "Add", "elementwise") for i in range(20)]
    proof = fusion(*light, float_kernel("gemm0", "Gemm", "protected"), float_kernel("conv0", "Conv", "second consumer"))
    text = to_text(render_fusion(proof, plan=plan("conv0")))
    assert text.index("second consumer") < text.index("protected") < text.index("elementwise")
    assert lacking(text, "20 Add", "add0, add1, add2, ...", "add3") == ["add3"]
    assert not lacking(to_text(render_fusion(proof, plan=plan("conv0"), full=True)), *(f"add{i}" for i in range(20)))


def test_a_long_list_of_reasons_is_cut_and_counted():
    nodes = [float_kernel(f"n{i}", "Add", f"reason {i}.") for i in range(MAX_FLOAT_ROWS + 3)]
    last, next_one = (f"reason {MAX_FLOAT_ROWS - i}." for i in (1, 0))
    assert lacking(to_text(render_fusion(fusion(*nodes))), "and 3 nodes more", last, next_one) == [next_one]


@pytest.mark.parametrize("name", ["layer[0]/conv", "[bold]x[/bold]", "a:b\\[c]", "[/]"])
def test_names_are_never_read_as_markup_and_silently_quantized_nodes_are_named(name):
    assert to_text(render_fusion(fusion(float_kernel(name, "Conv", f"reads {name}")))).count(name) == 2
    assert name in to_text(render_fusion(fusion(kernel(name, silently_quantized=True))))


def test_bytes_have_decimal_units():
    texts = {0: "0 B", 999: "999 B", 1000: "1.0 kB", 999_960: "1.0 MB", 30_600_000: "30.6 MB", 2_500_000_000: "2.5 GB"}
    assert {count: format_bytes(count) for count in texts} == texts


# -- text and page


def test_attention_layers_are_told_as_one_block():
    node = NodeDecision("layer", "Attention", Kind.FLOAT, "own", "float")
    softmax = NodeDecision("other", "Softmax", Kind.FLOAT, "own", "float")
    why = "1 attentions stay as products and Softmax ('other': its scale is -1)."
    assert report().attention() == ""
    one = report(plan=PlacementPlan("ort-cpu", nodes=(node, softmax)), fusion=None)
    assert one.attention() == "1 attention layer is one operator."
    nodes = (node, dataclasses.replace(node, node="second"), softmax)
    two = report(plan=PlacementPlan("ort-cpu", nodes=nodes), notes=("x", why), fusion=None)
    told = "2 attention layers are one operator each."
    assert (two.attention(), told in text_of(two)) == (f"{told} {why}", True)
    assert report(notes=(why,)).attention() == why
    assert (f"<b>Attention:</b> {told}" in two.to_html(), "<b>Attention:</b>" in report().to_html()) == (True, False)


def test_an_int8_cache_is_told_in_both_forms():
    made = report(cache={"past": 0.5, "present": 0.5, "past_1": 0.125}, fusion=None)
    told = "3 inputs and outputs are int8, scales 0.125 to 0.5, in the metadata."
    assert (made.int8_cache(), report().int8_cache()) == (told, "")
    assert (told in text_of(made), f"<b>Cache:</b> {told}" in made.to_html()) == (True, True)


# -- kernel, path and time of each layer

TIMED = [("stem", "Conv", "QLinearConv", 0.02), ("stem", "Conv", "Transpose", 0.005)]
TIMED += [("stem_relu", "Relu", "Relu", 0.001), ("x_quantize", "QuantizeLinear", "QuantizeLinear", 0.003)]
TIMES = OpTimes((), tuple(OpTime(*each) for each in TIMED))
PROOF = fusion(
    kernel("stem", path="direct"),
    kernel("stem_relu", op_type="Relu", kernel="", status="absorbed"),
    kernel("deep", path="matrix product"),
)
LAYERS = layer_times(PROOF, {"stem": ("Conv", 30.0), "stem_relu": ("Relu", 0.0)}, 7.0, TIMES)


def test_each_kernel_once_and_what_is_between_them_last():
    assert (
        reasons.LayerTime("stem", "Conv", "com.microsoft.QLinearConv", "direct", 30.0, 25.0),
        reasons.LayerTime("deep", "Conv", "com.microsoft.QLinearConv", "matrix product", None, None),
        reasons.LayerTime("", "between layers", "", "", 7.0, 4.0),
    ) == LAYERS
    estimated = layer_times(None, {"a": ("Conv", 3.0), "b": ("Relu", 0.0)}, None, None)
    assert estimated == (reasons.LayerTime("a", "Conv", estimated_us=3.0),), "without a proof the estimate alone"
    assert (layer_times(None, {}, None, None), reasons.kernels_in_words(())) == ((), "")
    assert "\nkernels " not in text_of(report())


def test_text_json_and_page_hold_the_layers():
    made = report(layers=LAYERS, host="'vnni' (a processor), measured here", fusion=PROOF)
    text = text_of(made, full=True)
    told = "Convs: 1 on the direct kernel, 1 on the matrix product kernel, estimated 37 us a run"
    assert not lacking(" ".join(text.split()), told, "25.0 us", "Layers")
    assert ("Layers" in text_of(made), made.to_dict()["layers"][0]["path"]) == (False, "direct")
    laid_out = "This file is laid out for &#39;vnni&#39; (a processor), measured here."
    assert not lacking(made.to_html(), laid_out, "matrix product", "30.0 µs")


# -- explanations: every remedy is of a rule, reason or cause that exists, and says what would change a node


def test_every_rule_and_reason_with_a_remedy_exists_and_causes_have_one_but_for_those_without_any():
    package = Path(kenosis_ort.__file__).parent
    deciding = (path for room in ("placement", "targets", "flow") for path in (package / room).rglob("*.py"))
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (package / "plan.py", *deciding))
    assert not lacking(sources, *(f'"{rule}"' for rule in reasons._BY_RULE), *reasons._BY_REASON)
    hopeless = {Cause.NONE, Cause.PROTECTED, Cause.UNSUPPORTED_OP, Cause.UNSUPPORTED_ATTRIBUTE, Cause.UNKNOWN}
    assert set(reasons._BY_CAUSE) == {cause.value for cause in set(Cause) - hopeless}


def test_a_plan_is_explained_node_by_node():
    model = models.residual_block()
    plans = (kenosis_ort.preview(model, nodes_to_exclude=nodes) for nodes in ((), ["conv1"]))
    integer, kept = ({e.node: e for e in explain_plan(plan)}["conv1"] for plan in plans)
    assert (kept.kind, kept.rule, kept.is_heavy) == ("float", "caller-excluded", True)
    assert ("nodes_to_exclude" in kept.remedy, integer.remedy) == (True, "")
    assert any(line.startswith("input 1") for line in integer.inputs)
    assert str(integer).startswith("Conv 'conv1': integer, by conv-integer\n  ")
    assert integer.to_dict()["inputs"] == integer.inputs


def test_a_node_that_misses_a_requirement_is_told_what_it_misses():
    model = planning.parse("""(float[1,3,8,8] x, float[4,4,1,1] fed) => (y) <float[4,3,1,1] w> {
        [conv] c = Conv (x, w) [dynamic] y = Conv (c, fed) }""")
    missed = {e.node: e for e in explain_plan(kenosis_ort.preview(model, primary_inputs=["x", "fed"]))}["dynamic"]
    assert (missed.kind, "not a constant" in missed.reason, "initializer" in missed.remedy) == ("float", True, True)


@pytest.mark.parametrize(("kernel", "status", "reason", "remedy"), [
    (("QLinearConv", True, ("r",), None, ""), Status.INTEGER, "runs as QLinearConv with r", ""),
    (("Conv", False, (), None, "16 bit"), Status.FLOAT, "16 bit", "8-bit"),
    (("", False, (), None, "computed at load"), Status.REMOVED, "computed at load", ""),
])  # fmt: skip
def test_a_kernel_is_explained(kernel, status, reason, remedy):
    cause = Cause.SIXTEEN_BIT if status is Status.FLOAT else Cause.NONE
    explained = explain_kernel(KernelReport("c", "Conv", *kernel, status, cause))
    assert (explained.reason, explained.kind, bool(explained.remedy)) == (reason, status.value, bool(remedy))
    assert remedy in explained.remedy
