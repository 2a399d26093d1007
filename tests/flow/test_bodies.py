"""Bodies of If, Loop and Scan: in integers with the net, or float where they cost the outputs more than the rest."""

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import QuantType, quantize_static as stock

from kenosis_ort.api import preview
from kenosis_ort.flow.builder import BodyBuilder
from kenosis_ort.graph.walk import all_graphs, opset_of
from tests import models, planning
from tests.flow import control
from tests.flow.support import good, make, proof, quality

RNG = np.random.default_rng(0)
IN_INTEGERS = {"extra_options": {"EnableSubgraph": True}}


def rates(*said):
    return [{"x": RNG.normal(size=(2, 3, 16, 16)).astype(np.float32), "rate": np.array(r)} for r in said]


def rows(*shape):
    return [{"x": RNG.normal(size=shape).astype(np.float32)} for _ in range(3)]


def checked(model, folder, feeds, **options):
    """Quantizes, bodies whatever they cost unless told otherwise."""
    made = good(model, folder, feeds, least=28, **{**IN_INTEGERS, **options})
    onnx.checker.check_model(made.written)
    return made


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_both_branches_of_an_if(tmp_path, stored, outside, nested):
    model = control.two_rates(stored=stored, outside=outside, nested=nested)
    made = checked(model, tmp_path, rates(16000, 8000, 16000, 8000))
    assert len(made.heavy) == 6 + outside + 2 * nested
    float_layers = {name for name, integer in made.heavy.items() if not integer}
    assert ["other" in name for name in float_layers] == [True] * nested  # the inner branch that no sample takes
    assert {made.report.plan.by_node[name].kind.value for name in made.heavy.keys() - float_layers} == {"integer"}
    assert any(k.graph and k.absorbed_into for k in proof(made.report).kernels)  # Relu within a body
    assert made.integer == {k.node for k in proof(made.report).kernels if k.integer}
    if outside:  # the shared float weight has no reader left
        weights = [t for t in made.written.graph.initializer if len(t.dims) == 4]
        assert all(t.data_type == onnx.TensorProto.INT8 for t in weights)
    if outside and not nested:
        shared = [t for g in all_graphs(made.written.graph) for t in g.initializer if list(t.dims) == [16, 16, 3, 3]]
        assert len(shared) == 3, "one for both branches, and the second Conv of each"


@pytest.mark.parametrize(("options", "reason", "notes"), [
    ({}, "there is no Conv, Gemm or MatMul in it", 0),
    ({"nodes_to_exclude": ["c1", "c2"]}, "no node of it can be quantized", 2),
    ({"extra_options": {"EnableSubgraph": False}}, "extra_options['EnableSubgraph'] is off", 0),
])  # fmt: skip
def test_nodes_of_bodies_without_integers_are_told_with_their_reason(tmp_path, options, reason, notes):
    layer = ("c", "Conv (y, w)") if options else ("n", "Neg (y)")
    bodies = ", ".join(
        f"{tag}_branch = g{n} () => (float[1,8,4,4] o{n}) {{"
        f" [{layer[0]}{n}] t{n} = {layer[1]} [r{n}] o{n} = Relu (t{n}) }}"
        for n, tag in ((1, "then"), (2, "else"))
    )
    model = planning.parse(f"""(float[1,8,4,4] x, bool b) => (float[1,8,4,4] z) <float[8,8,1,1] w> {{
        [conv] y = Conv (x, w) [if] z = If (b) <{bodies}> }}""")
    feeds = [{"x": RNG.normal(size=(1, 8, 4, 4)).astype(np.float32), "b": np.array(b)} for b in (True, False) * 2]
    made = make(model, tmp_path, feeds, promise=False, **options)
    for plan in (made.report.plan, preview(model, **options)):
        assert plan.by_node["conv"].kind.value == "integer"
        for name in (f"{node}{n}" for node in (layer[0], "r") for n in (1, 2)):
            assert (plan.by_node[name].kind.value, reason in plan.by_node[name].reason) == ("float", True)
    assert sum("stays float" in note for note in made.report.notes) == notes


def test_a_branch_that_no_sample_takes_stays_float_and_is_told(tmp_path):
    made = checked(control.two_rates(), tmp_path, rates(16000, 16000))
    assert made.heavy == {name: name.startswith("then") for name in made.heavy}
    (note,) = [n for n in made.report.notes if "stays float" in n]
    assert note == "The else_branch of 'm_if_1' stays float: no calibration sample ran it."
    missed = next(name for name, integer in made.heavy.items() if not integer)
    assert "no calibration sample ran it" in made.report.plan.explain(missed)
    assert "no calibration sample ran it" in next(k.reason for k in proof(made.report).kernels if k.node == missed)


@pytest.mark.parametrize(("model", "feeds"), [
    (control.loop(), [{**feed, "n": np.array(4)} for feed in rows(4, 32)]), (control.loop(4), rows(4, 32)),
    (control.scan(), rows(1, 6, 24)),
], ids=["loop", "of constant steps", "scan"])  # fmt: skip
def test_loops_are_calibrated_over_all_iterations(tmp_path, model, feeds):
    heavy = checked(model, tmp_path, feeds).heavy
    assert all(heavy.values())
    assert len(heavy) == sum(n.op_type == "MatMul" for graph in all_graphs(model.graph) for n in graph.node)


def test_with_the_defaults(tmp_path):
    options = {"recipe": "fast", "promise": True, "tune": "model"}
    made = checked(control.two_rates(outside=True), tmp_path, rates(16000, 8000) * 4, **options)
    assert all(made.heavy.values())
    named = {p.reason.rpartition("; in ")[2] for p in made.report.passes}
    assert named >= {f"the {b}_branch of 'm_if_3'" for b in ("then", "else")}


ATTENTION = """net (float[B,S,32] x, bool again) => (float[B,S,32] y)
    <float[32,32] wq, float[32,32] wk, float[32,32] wv> {
    y = If (again) <
        then_branch = attention () => (float[B,S,32] a) {
            q = MatMul (x, wq)\n k = MatMul (x, wk)\n v = MatMul (x, wv)
            turned = Transpose <perm = [0, 2, 1]> (k)
            scores = MatMul (q, turned)\n shares = Softmax <axis = -1> (scores)\n a = MatMul (shares, v) },
        else_branch = linear () => (float[B,S,32] b) { c = MatMul (x, wv)\n b = Relu (c) }> }"""


@pytest.mark.since("1.24")  # before, the runtime quantizes no operator set that has Attention
@pytest.mark.parametrize("swapped", [False, True])
def test_attention_in_a_branch_raises_the_operator_set_of_all(tmp_path, swapped):
    text = ATTENTION.replace("then_", "_").replace("else_", "then_").replace(" _", " else_") if swapped else ATTENTION
    feeds = [{"x": RNG.normal(size=(1, 9, 32)).astype(np.float32), "again": np.array(n % 2 > 0)} for n in range(6)]
    made = checked(planning.parse(text), tmp_path, feeds)
    assert [n.op_type for g in all_graphs(made.written.graph) for n in g.node].count("Attention") == 1
    assert (opset_of(made.written), sum(made.heavy.values())) == (23, 4)


def test_what_the_caller_leaves_float_in_bodies_and_of_them(tmp_path):
    data, model = rates(16000, 8000), control.two_rates(stored=True)
    name = next(n for n in make(model, tmp_path, data).heavy if n.startswith("then_conv"))
    layers = make(model, tmp_path, data, nodes_to_exclude=[name]).heavy
    assert {n for n, integer in layers.items() if not integer} == {name}
    off = make(control.two_rates(outside=True), tmp_path, data, extra_options={"EnableSubgraph": False})
    assert {name for name, integer in off.heavy.items() if integer} == {"m_conv_0"}


def test_a_plan_without_data_knows_bodies():
    plan = preview(control.two_rates(outside=True, nested=True))
    assert sum(n.kind.value == "integer" and n.op_type in ("Conv", "Gemm") for n in plan.nodes) == 9


# ---- bodies that cost much ------------------------------------------------------------------------------------

LOOP = """g (float[N,32] x) => (float[N,16] y) {{
    n = Constant <value_int = {steps}> ()\n c = Constant <value = bool {{1}}> ()
    a = MatMul (x, w0)\n b = Relu (a)
    h = Loop (n, c, b) <body = step (int64 i, bool on, float[N,32] s) => (bool go, float[N,32] next) {{
        go = Identity (on)\n t = MatMul (s, w1)\n u = Add (t, b1)\n next = Tanh (u) }}>
    y = MatMul (h, w2) }}"""
SCAN = """g (float[12,N,32] x, float[N,32] h0, float[N,32] c0) => (float[12,N,16] y) {
    e = MatMul (x, w0)\n r = Relu (e)
    hT, cT, o = Scan <num_scan_inputs = 1, scan_input_directions = [1], scan_output_directions = [1],
        body = step (float[N,32] h, float[N,32] c, float[N,32] row)
        => (float[N,32] hn, float[N,32] cn, float[N,32] on) {
        u = MatMul (h, w1)\n v = MatMul (row, w3)\n t = Add (u, v)\n gate = Sigmoid (t)\n new = Tanh (t)
        cg = Mul (gate, c)\n cn = Add (cg, new)\n ct = Tanh (cn)\n hn = Mul (gate, ct)\n on = Identity (hn) }>
        (h0, c0, r)
    y = MatMul (o, w2) }"""
NESTED = """g (float[N,32] x, float q) => (float[N,16] y) {{
    a = MatMul (x, w0)\n b = {act} (a)\n half = Constant <value_float = 0.5> ()\n on = Greater (q, half)
    h = If (on) <
        then_branch = first () => (float[N,32] o1) {{ t1 = MatMul (b, w1)\n o1 = Relu (t1) }},
        else_branch = other () => (float[N,32] o2) {{
            less = Constant <value_float = 0.25> ()\n rare = Less (q, less)
            o2 = If (rare) <
                then_branch = second () => (float[N,32] o3) {{ t3 = MatMul (b, w3)\n o3 = Relu (t3) }},
                else_branch = third () => (float[N,32] o4) {{ t4 = MatMul (b, w5)\n o4 = Tanh (t4) }}> }}>
    y = MatMul (h, w2) }}"""
TEXTS = {
    "loop": LOOP.format(steps=4), "long loop": LOOP.format(steps=12),
    "scan": SCAN, "nested": NESTED.format(act="Tanh"),
}  # fmt: skip


def net(text, seed=0):
    rng = np.random.default_rng(seed)
    weights = {f"w{i}": rng.normal(size=(32, 16 if i in (2, 4) else 32)) / 32**0.5 for i in range(6)}
    weights["b1"] = rng.normal(0, 0.1, 32)
    return planning.parse(text, {name: v.astype(np.float32) for name, v in weights.items() if f" {name})" in text})


def samples(model, count, seed):
    """Samples of four rows and of different loudness; states are small, a number is between 0 and 1."""
    rng, found = np.random.default_rng(seed), models.feeds(model, count, seed=seed, dims={"N": 4})
    for feed in found:
        for name, value in feed.items():
            loud = rng.uniform(0.6, 1.4) * (1 if name == "x" else 0.1)
            feed[name] = np.asarray(value * loud if value.ndim else rng.uniform(), np.float32)
    return found


def costly(model, folder, **options):
    return make(model, folder, samples(model, 24, seed=1), **options)


def notes_of(made):
    return [note for note in made.report.notes if "stays float: in integers it costs the outputs" in note]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", TEXTS)
def test_never_below_the_best_of_stock(tmp_path, name, seed):
    model = net(TEXTS[name], seed)
    onnx.save(model, tmp_path / "float.onnx")
    unseen, best = samples(model, 24, seed=1000 + seed), -np.inf
    u8 = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8, "per_channel": True}
    for said in ({}, {**u8, "reduce_range": True}):
        stock(tmp_path / "float.onnx", tmp_path / "stock.onnx", models.FeedReader(samples(model, 24, seed=1)), **said)
        outputs = range(len(model.graph.output))
        best = max(best, min(quality(model, tmp_path / "stock.onnx", unseen, output=i) for i in outputs))
    assert best > 15  # stock's file is worth a comparison
    for recipe in ("fast", "plain"):
        assert costly(model, tmp_path, recipe=recipe).db(unseen) > best - 0.3


def test_the_report_says_what_a_body_would_cost(tmp_path):
    made = costly(net(TEXTS["long loop"]), tmp_path, recipe="fast")
    (note,) = notes_of(made)
    assert note.startswith("The body of 'Loop_h' stays float: in integers it costs the outputs ")
    assert note.endswith(" dB on 12 samples.")
    assert sorted(made.heavy.values()) == [False, True, True]
    inside = next(node for node, integer in made.heavy.items() if not integer)
    assert "it is in the body of 'Loop_h': in integers it costs" in made.report.plan.explain(inside)
    undone = [p for p in made.report.passes if "; in the body of 'Loop_h'" in p.reason]
    assert {(p.kept, p.reason.endswith(", which stays float")) for p in undone} == {(False, True)}
    assert len([p for p in made.report.passes if p.name == "ranges"]) == 2  # of the body and, anew, of the net
    insisted = costly(made.model, tmp_path, **IN_INTEGERS)
    assert all(insisted.heavy.values())
    assert notes_of(insisted) == []


def test_of_two_bodies_the_one_that_costs_little_runs_in_integers(tmp_path):
    """The first loop's result hardly counts beside the second's."""
    second = """    little = Constant <value_float = 0.003> ()\n g0 = Mul (h, little)\n k = Add (b, g0)
    h2 = Loop (n, c, k) <body = two (int64 i2, bool on2, float[N,32] s2) => (bool go2, float[N,32] next2) {
        go2 = Identity (on2)\n t2 = MatMul (s2, w3)\n next2 = Tanh (t2) }>
    y = MatMul (h2, w2) }"""
    made = costly(net(TEXTS["loop"].replace("    y = MatMul (h, w2) }", second)), tmp_path)
    (note,) = notes_of(made)
    assert note.startswith("The body of 'Loop_h2' stays float")
    assert {name for name, integer in made.heavy.items() if not integer} == {"MatMul_t2"}


def test_bodies_are_tried_with_ranges_of_other_samples(tmp_path, monkeypatch):
    """A branch that few samples take has ranges that the next sample leaves; its own samples do not show that."""
    model = net(NESTED.format(act="Relu"), seed=2)
    seen = []
    real = BodyBuilder.seeing

    def counted(self, outer):
        seen.append(len(list(outer())))
        return real(self, outer)

    monkeypatch.setattr(BodyBuilder, "seeing", counted)
    unseen = samples(model, 24, seed=1002)
    ours = costly(model, tmp_path, recipe="fast").db(unseen)
    assert max(seen) == 12  # of 24
    assert ours > costly(model, tmp_path, recipe="fast", extra_options={"EnableSubgraph": False}).db(unseen) - 4
