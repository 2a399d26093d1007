"""A decoder's cache as int8: inputs and outputs of integers, at scales that the file tells."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from kenosis_ort import ClosedLoopReader, ModelLoadError, OptionError, PipelineReader, calibrate, plan, quantize_static
from kenosis_ort.quantizer.int8_cache import Cache, cache_scales, open_cache, quantize_cache
from tests.flow.support import run, sqnr_db
from tests.models import normal, session
from tests.planning import parse

LAYER = """
    x = Gather (table, input_ids)  queries = MatMul (x, wq)  keys = MatMul (x, wk)  values = MatMul (x, wv)
    q4 = Reshape (queries, heads)  k4 = Reshape (keys, heads)  v4 = Reshape (values, heads)
    q = Transpose <perm = [0, 2, 1, 3]> (q4)  k = Transpose <perm = [0, 2, 1, 3]> (k4)
    v = Transpose <perm = [0, 2, 1, 3]> (v4)"""
ATTEND = """
    turned = Transpose <perm = [0, 1, 3, 2]> ({k})  products = MatMul (q, turned)  scaled = Mul (products, factor)
    shares = Softmax <axis = -1> (scaled)  mixed = MatMul (shares, {v})
    together = Transpose <perm = [0, 2, 1, 3]> (mixed)  flat = Reshape (together, width)
    out = MatMul (flat, wo)  y = Add (x, out)  logits = MatMul (y, head)"""
WEIGHTS = """float[12,16] table, float[16,16] wq, float[16,16] wk, float[16,16] wv, float[16,16] wo, float[16,12] head,
    int64[4] heads = {0, 0, 2, 8}, int64[3] width = {0, 0, 16}, float factor = {0.35}"""
DECODER = f"""decoder (int64[B,T] input_ids, float[B,2,P,8] past_0_key, float[B,2,P,8] past_0_value)
    => (float[B,T,12] logits, float[B,2,Q,8] present_0_key, float[B,2,Q,8] present_0_value) <{WEIGHTS}> {{ {LAYER}
    present_0_key = Concat <axis = 2> (past_0_key, k)  present_0_value = Concat <axis = 2> (past_0_value, v)
    {ATTEND.format(k="present_0_key", v="present_0_value")} }}"""
FIRST = f"""first (int64[B,T] input_ids)
    => (float[B,T,12] logits, float[B,2,Q,8] present_0_key, float[B,2,Q,8] present_0_value) <{WEIGHTS}> {{ {LAYER}
    {ATTEND.format(k="k", v="v")}  present_0_key = Identity (k)  present_0_value = Identity (v) }}"""
CACHE = ("past_0_key", "present_0_key"), ("past_0_value", "present_0_value")


def decoder():
    """A layer of attention with two heads; each of its weights is a MatMul's that is worth integers."""
    return parse(DECODER)


def prompts(count=8):
    rng = np.random.default_rng(1)
    return [{"input_ids": rng.integers(0, 12, (1, 5))} for _ in range(count)]


def calibration():
    return PipelineReader({"decoder": decoder()}, prompts(), tokens=6, threads=1)["decoder"]


def quantized(model, out, data=None, **options):
    return quantize_static(model, out, data or calibration(), recipe="plain", promise=False, **options)


def generated(path, tokens, *, rounded=None):
    """The logits of each step with its own cache; ``rounded`` puts Q and DQ of it between two steps."""
    model = session(path)
    kinds = {i.name: np.int8 if i.type == "tensor(int8)" else np.float32 for i in model.get_inputs()}
    cache = {past: np.zeros((1, 2, 0, 8), kinds[past]) for past, _ in CACHE}
    names, found = ["logits", *(present for _, present in CACHE)], []
    for token in tokens:
        logits, *made = model.run(names, {"input_ids": np.array([[token]]), **cache})
        found.append(logits)
        for (past, _), value in zip(CACHE, made, strict=True):
            if rounded is not None:
                scale = np.float32(rounded[past])
                value = np.clip(np.rint(value / scale), -128, 127).astype(np.float32) * scale
            cache[past] = value
    return found


TOKENS = [3, 7, 1, 0, 11, 4, 4, 9]


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """The decoder with a cache of integers."""
    quantized(decoder(), out := tmp_path_factory.mktemp("decoder") / "opened.onnx", kv_cache="int8")
    return out


def rounding(model, scales):
    """The decoder with new keys and values rounded where they are made."""
    graph, nodes = model.graph, []
    for node in graph.node:
        made = node.output[0]
        if node.op_type == "Concat" and made in scales:
            grid = [f"{made}_s", f"{made}_z"]
            for name, value in zip(grid, (np.float32(scales[made]), np.int8(0)), strict=True):
                graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
            nodes.append(onnx.helper.make_node("QuantizeLinear", [node.input[1], *grid], [f"{made}_q"]))
            nodes.append(onnx.helper.make_node("DequantizeLinear", [f"{made}_q", *grid], [f"{made}_dq"]))
            node.input[1] = f"{made}_dq"
        nodes.append(node)
    graph.CopyFrom(onnx.helper.make_graph(nodes, "g", graph.input, graph.output, graph.initializer))
    return model


@pytest.mark.parametrize("most", [17, 20, 21, None])
def test_generation_with_an_int8_cache(tmp_path, most):
    """Equal, to the bit, to the file with a float cache whose new keys and values are rounded where they are made."""
    plain, opened = tmp_path / "float.onnx", tmp_path / "int8.onnx"
    quantized(decoder(), plain, max_opset=most)
    report = quantized(decoder(), opened, kv_cache="int8", max_opset=most)
    written, scales = onnx.load(opened), dict(report.cache)
    kinds = {v.name: v.type.tensor_type.elem_type for v in (*written.graph.input, *written.graph.output)}
    ends = [name for pair in CACHE for name in pair]
    assert {kinds.pop(name) for name in ends} == {onnx.TensorProto.INT8}
    assert kinds["logits"] == onnx.TensorProto.FLOAT
    assert scales == dict(cache_scales(written))
    assert all(scales[past] == scales[present] for past, present in CACHE)
    assert all(n.output[0] in ends for n in written.graph.node if n.op_type == "Concat"), "integers are concatenated"
    assert not [n for n in written.graph.node if n.op_type == "QuantizeLinear" and n.input[0] in ends]
    assert "are int8, scales" in str(report)
    got, near = (np.concatenate(generated(path, TOKENS)) for path in (opened, plain))
    assert sqnr_db(near, got) > 30
    onnx.save(rounding(onnx.load(plain), scales), plain)
    np.testing.assert_array_equal(got, np.concatenate(generated(plain, TOKENS, rounded=scales)))


def test_the_cache_is_read_by_the_tools_that_read_a_float_one(tmp_path, opened):
    reader = PipelineReader({"decoder": opened}, prompts(1), tokens=3, threads=1)["decoder"]
    feeds = [*iter(reader.get_next, None)]
    assert [feed["past_0_key"].shape[2] for feed in feeds] == [0, 5, 6]
    assert {feed["past_0_key"].dtype for feed in feeds} == {np.dtype(np.int8)}
    tokens = [{"input_ids": np.array([[token]])} for token in TOKENS]
    *_, last = iter(ClosedLoopReader(opened, tokens, threads=1).get_next, None)
    assert last["past_0_value"].shape == (1, 2, 7, 8)
    assert last["past_0_value"].any()
    data = ClosedLoopReader(decoder(), tokens, threads=1)
    assert quantized(decoder(), tmp_path / "again.onnx", data=data, kv_cache="int8").cache


def test_a_table_takes_the_place_of_the_reader(tmp_path, opened):
    table, out = tmp_path / "table.json", tmp_path / "out.onnx"
    calibrate(decoder(), table, calibration(), kv_cache="int8")
    quantize_static(decoder(), out, calibration_cache_path=table, kv_cache="int8", recipe="plain", promise=False)
    assert out.read_bytes() == opened.read_bytes()


def test_the_decoder_of_the_first_tokens_takes_the_scales_of_the_other(tmp_path, opened):
    first, scales = tmp_path / "first.onnx", cache_scales(onnx.load(opened))
    report = quantized(parse(FIRST), first, data=prompts(), kv_cache=opened)
    assert dict(report.cache) == {present: scales[past] for past, present in CACHE}
    got, want = (run(m, [{"input_ids": np.array([TOKENS])}])[0][1] for m in (first, parse(FIRST)))
    assert got.dtype == np.int8
    assert sqnr_db(want, got * np.float32(scales["past_0_key"])) > 30


def test_caches_that_bodies_and_attention_read_only(tmp_path):
    """A cache that passes through an If, and one that another file made and nothing is appended to."""
    text = f"""merged (int64[B,T] input_ids, bool[1] use_cache_branch, float[B,2,P,8] past_0_key,
        float[B,2,S,8] past_0_encoder_value)
        => (float[B,T,12] logits, float[B,2,Q,8] present_0_key) <{WEIGHTS}> {{ {LAYER}
        present_0_key = If (use_cache_branch) <
        then_branch = more () => (float[B,2,Q,8] grown) {{ grown = Concat <axis = 2> (past_0_key, k) }},
        else_branch = first () => (float[B,2,Q,8] begun) {{ begun = Identity (k) }}>
        memory = ReduceMean <axes = [2], keepdims = 1> (past_0_encoder_value)  seen = Add (v, memory)
        {ATTEND.format(k="k", v="seen")} }}"""
    feeds = [{"input_ids": np.array([[token]]), "use_cache_branch": np.array([token > 1])} for token in range(12)]
    for seed, feed in enumerate(feeds):
        feed |= {"past_0_key": normal((1, 2, 3, 8), seed), "past_0_encoder_value": normal((1, 2, 4, 8), 50 + seed)}
    out = tmp_path / "merged.onnx"
    scales = quantized(parse(text), out, data=feeds, kv_cache="int8").cache
    assert scales.keys() == {"past_0_key", "past_0_encoder_value", "present_0_key"}
    assert scales["past_0_key"] == scales["present_0_key"] != scales["past_0_encoder_value"]
    integers = {n: np.clip(np.rint(v / np.float32(scales[n])), -128, 127).astype(np.int8)
                for n, v in feeds[5].items() if n in scales}  # fmt: skip
    got = session(out).run(["present_0_key"], {**feeds[5], **integers})[0]
    np.testing.assert_array_equal(got[:, :, :3], integers["past_0_key"])
    assert got.shape[2] == 4


@pytest.mark.parametrize("opset", [17, pytest.param(23, marks=pytest.mark.since("1.24"))])
def test_the_runtime_loads_what_moves_a_cache_about(opset):
    """Keys that are repeated for groups are behind an Unsqueeze, through which the session's optimizer moves DQ."""
    text = """net (float[1,2,P,8] past, float[1,2,T,8] k, float[1,2,T,8] q)
        => (float[1,2,Q,8] present, float[1,2,2,T,Q] y)  <int64[1] groups = {2}, int64[5] repeats = {1, 1, 2, 1, 1}> {
        present = Concat <axis = 2> (past, k)  lifted = Unsqueeze (present, groups)  wide = Expand (lifted, repeats)
        turned = Transpose <perm = [0, 1, 2, 4, 3]> (wide)  queries = Unsqueeze (q, groups)
        y = MatMul (queries, turned) }"""
    model, caches = parse(text, opset=opset), [Cache("past", "present", 0.03)]
    feed = {"k": normal((1, 2, 3, 8), 0), "q": normal((1, 2, 3, 8), 1)}
    past = np.arange(-40, 40, dtype=np.int8).reshape(1, 2, 5, 8)
    quantize_cache(model, caches)
    want = run(model, [{**feed, "past": past * np.float32(0.03)}])[0]
    open_cache(model, caches)
    got = run(model, [{**feed, "past": past}])[0]
    np.testing.assert_array_equal(got[0][:, :, :5], past)
    np.testing.assert_array_equal(got[0] * np.float32(0.03), want[0])
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-5)


MORE = DECODER.replace("present_0_key", "longer").replace("[B,2,Q,8] longer", "[B,2,Q,8] present_1_key")
MORE = MORE.rstrip(" }") + " present_1_key = Abs (longer) }"
NO_CACHE = f"net (int64[B,T] input_ids) => (float[B,T,16] queries) <{WEIGHTS}> {{ {LAYER} }}"


@pytest.mark.parametrize(("text", "options", "message"), [
    (DECODER, {"kv_cache": "int4"}, "neither 'int8' nor a file"),
    (DECODER, {"kv_cache": "none.onnx"}, "neither 'int8' nor a file"),
    (FIRST, {}, "the output 'present_0_key' is of the cache"),
    (MORE, {}, "the input 'past_0_key' is of the cache, and no out"),
    (NO_CACHE, {}, "the model has no cache"), (FIRST, {"kv_cache": "other.onnx"}, "has no int8 cache"),
    (DECODER, {"format": "qop"}, "format='qop'"), (DECODER, {"recipe": "weight-only-8"}, "weights alone"),
])  # fmt: skip
def test_what_cannot_be(tmp_path, monkeypatch, text, options, message):
    monkeypatch.chdir(tmp_path)
    onnx.save(decoder(), "other.onnx")
    data = prompts() if text in (FIRST, NO_CACHE) else calibration()
    with pytest.raises(OptionError, match=message):
        quantize_static(parse(text), "q.onnx", data, **{"kv_cache": "int8", "promise": False, **options})
    assert not Path("q.onnx").exists()


def test_another_form_has_the_cache_that_was_asked_for(tmp_path, monkeypatch):
    """Where the promise delivers the float model, its interface is that of the others, and no object is changed."""
    model, out = decoder(), tmp_path / "q.onnx"
    before = model.SerializeToString()

    def nothing_is_faster(call, builder, build, *rest):
        return replace(build, plan=plan.PlacementPlan("ort-cpu"), quantized=model), True

    monkeypatch.setattr("kenosis_ort.flow.speed.delivered", nothing_is_faster)
    report = quantized(model, out, kv_cache="int8")
    assert model.SerializeToString() == before
    assert dict(report.cache) == dict(cache_scales(onnx.load(out)))
    assert len(generated(out, TOKENS)) == len(TOKENS)


@pytest.mark.parametrize("text", [
    "[", "[]", "5", '{"past": "a"}', '{"past": -1}', '{"past": 0}', '{"past": 1e999}', '{"past": null}', "[" * 9999,
])  # fmt: skip
def test_scales_that_a_file_got_from_elsewhere_are_checked(text):
    model = onnx.ModelProto(metadata_props=[onnx.StringStringEntryProto(key="kenosis_ort.kv_cache", value=text)])
    with pytest.raises(ModelLoadError, match=r"no positive numbers by name.*a\.onnx, metadata kenosis_ort.kv_cache"):
        cache_scales(model, "a.onnx")
