"""Made-up data: what inputs are for, their scale and shapes, and states that come back from the model."""

from functools import partial

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort.calibration.feeds import Known
from kenosis_ort.calibration.synthetic import InputKind, SyntheticReader, drawing, kinds, stem
from kenosis_ort.calibration.synthetic.pixels import WAYS
from kenosis_ort.calibration.synthetic.reader import SAMPLES_A_SEQUENCE, STEPS_A_SAMPLE
from kenosis_ort.errors import CalibrationError
from tests import models
from tests.calibration.support import swept
from tests.calibration.test_computed_feeds import DECODER
from tests.planning import parse

F, I64, U8, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.UINT8, TensorProto.BOOL


def model_of(*inputs, domain=""):
    """A model whose first input goes through one node, of ONNX' own or not."""
    node = helper.make_node("Identity", [inputs[0][0]], ["out"], domain=domain)
    values = [helper.make_tensor_value_info(*each) for each in inputs]
    graph = helper.make_graph([node], "g", values, [helper.make_empty_tensor_value_info("out")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


@pytest.mark.parametrize("net", sorted(models.ALL.keys() - {"net_with_if"}))
def test_every_shared_net_gets_data_that_it_takes(net):
    model = models.ALL[net]()
    reader = SyntheticReader(model, samples=3)
    assert (swept(model, reader).samples, len(reader.assumptions)) == (3, len(model.graph.input))


def test_the_seed_and_the_number_decide():
    model = models.two_input_detector()
    a, b, c = (SyntheticReader(model, samples=2, seed=s) for s in (1, 1, 2))
    np.testing.assert_equal([b.feed(0), b.feed(1)], [a.feed(0), a.feed(1)])
    for other in (c.feed(0), a.feed(1)):
        assert not np.array_equal(a.feed(0)["image"], other["image"])


def test_what_can_be_one_thing_only():
    inputs = [("image", F, [1, 3, 40, 60]), ("scale_factor", F, [1, 2]), ("im_shape", F, [1, 2]), ("sr", I64, [])]
    inputs += [("position_ids", I64, [1, 6]), ("token_type_ids", I64, [1, 6]), ("attention_mask", BOOL, [1, 6])]
    feed = SyntheticReader(model_of(*inputs, ("state", F, [1, 8])), samples=1).feed(0)
    of_image = {"scale_factor": [[1, 1]], "im_shape": [[40, 60]], "sr": 16_000, "state": [[0] * 8]}
    of_tokens = {"position_ids": [[*range(6)]], "token_type_ids": [[0] * 6], "attention_mask": [[True] * 6]}
    assert {name: array.tolist() for name, array in feed.items() if name != "image"} == {**of_image, **of_tokens}


def test_tokens_stay_within_the_table():
    model = parse("""g (int32[batch,seq] input_ids, int64[batch,seq] attention_mask) => (float[batch,seq,4] y)
        <float[17,4] table> { wide = Cast <to = 7> (input_ids)  y = Gather (table, wide) }""")
    padded = SyntheticReader(model, samples=8)
    feeds = [padded.feed(i) for i in range(8)]
    ids = feeds[0]["input_ids"]
    assert (ids.dtype, ids.shape) == (np.int32, feeds[0]["attention_mask"].shape)
    assert (ids.min() >= 0, ids.max() < 17, len(np.unique(ids)) > 5) == (True, True, True)
    assert len({int(f["attention_mask"].sum()) for f in feeds}) > 3
    assert all(not f["input_ids"][f["attention_mask"] == 0].any() for f in feeds)
    assert SyntheticReader(model, samples=1).feed(0)["attention_mask"].all()
    long = SyntheticReader(model, samples=1, input_shapes={"input_ids": (2, 9)}).feed(0)
    assert {a.shape for a in long.values()} == {(2, 9)}


def test_tokens_are_told_behind_casts_of_floats_and_selected_rows():
    model = parse("""g (float[batch,seq] letters, int64[2,seq] pairs) =>
        (float[batch,seq,4] a, float[seq,4] b, float[1,seq,4] c)
        <float[30,4] table, float[20,4] wide, float[9,4] narrow, int64 first = {0}> {
        ids = Cast <to = 7> (letters)  a = Gather (table, ids)  row = Gather (pairs, first)  b = Gather (wide, row)
        head, tail = Split <axis = 0> (pairs)  c = Gather (narrow, tail) }""")
    feed = SyntheticReader(model, samples=1, input_shapes={"letters": (2, 40)}).feed(0)
    assert (feed["letters"].dtype, feed["letters"].max() < 30, feed["letters"].max() > 9) == (np.float32, True, True)
    assert (feed["letters"] == np.rint(feed["letters"])).all()
    assert (feed["pairs"].min() >= 0, feed["pairs"].max() < 9) == (True, True)


@pytest.mark.parametrize(("op", "constant", "top"), [
    ("Sub", 127.5, 255.0), ("Div", 255.0, 255.0), ("Mul", 1 / 255, 255.0), ("Sub", 0.5, 1.0),
])  # fmt: skip
def test_the_range_follows_the_graph_own_normalization(op, constant, top):
    text = f"g (float[1,3,32,32] image) => (float[1,3,32,32] y) <float k> {{ y = {op} (image, k) }}"
    reader = SyntheticReader(parse(text, {"k": np.float32(constant)}), samples=1)
    image = reader.feed(0)["image"]
    assert image.min() >= 0
    assert 0.6 * top < image.max() <= top
    assert reader.provenance.known["image"] is Known.GRAPH


def test_pixels_in_bytes_and_inputs_that_a_range_makes_known():
    assert SyntheticReader(model_of(("image", U8, [1, 30, 30, 3])), samples=1).feed(0)["image"].max() > 200
    reader = SyntheticReader(model_of(("ids", I64, [1, 50])), input_ranges={"ids": (3, 9)})
    assert set(np.unique(reader.feed(0)["ids"])) <= set(range(3, 10))
    flag = SyntheticReader(model_of(("flag", BOOL, [])), input_ranges={"flag": (1, 1)})
    assert flag.feed(0)["flag"].item() is True


def test_dynamic_sizes_are_tried_until_the_model_runs():
    fixed, odd = (
        parse(f"g (float[1,n] audio) => (float[1,m] y) <int64[2] to = {{1, {size}}}> {{ y = Reshape (audio, to) }}")
        for size in (512, 331)
    )
    assert SyntheticReader(fixed, samples=1).feed(0)["audio"].shape == (1, 512)
    with pytest.raises(CalibrationError, match="input_shapes"):
        SyntheticReader(odd, samples=1)


# ---- what inputs are for ---------------------------------------------------------------------------------------------


CASES = {
    InputKind.IMAGE: [("data", F, [1, 3, 224, 224]), ("data", F, ["N", 224, 224, 3]), ("x", F, ["N", 1, 28, 28]),
                      ("lr", F, ["N", 1, "H", "W"]), ("x", F, [3, 64, 64]), ("x", U8, [1, 240, 320, 3])],
    InputKind.FEATURES: [("mfcc", F, ["N", 1, 49, 10]), ("x", F, ["N", 640]), ("x", F, [1, 64, 7, 7])],
    InputKind.SERIES: [("x", F, ["N", 80, "T"])],
    InputKind.AUDIO: [("audio", F, [1, "n"]), ("x", F, [1, 16000]), ("x", F, [1, 1, "n"]),
                      ("pcm", TensorProto.INT16, [1, "n"])],
    InputKind.STATE: [("h0", F, [1, 1, 8]), ("encoder_state", F, [1, 8])],
    InputKind.PAST: [("past_key_values.0.key", F, ["b", 4, "past", 8])],
    InputKind.MASK: [("attention_mask", I64, ["b", "s"]), ("padding_mask", BOOL, [1, 9])],
    InputKind.POSITIONS: [("position_ids", I64, [1, 9])], InputKind.SEGMENTS: [("tokenTypeIds", I64, [1, 9])],
    InputKind.SAMPLE_RATE: [("sr", I64, [])], InputKind.LENGTH: [("text_lengths", I64, [1])],
    InputKind.SCALE: [("scale_factor", F, [1, 2])],
    InputKind.IMAGE_SIZE: [("im_shape", F, [1, 2]), ("orig_target_sizes", I64, [1, 2])],
    InputKind.BOOLEAN: [("use_cache_branch", BOOL, [1])],
    None: [("mystery", I64, [1, 4]), ("x", F, []), ("x", F, [1, 2, 3, 4, 5]), ("text", TensorProto.STRING, [1])],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "given"), [(kind, each) for kind, inputs in CASES.items() for each in inputs])
def test_names_types_and_shapes(kind, given):
    (info,), (name, _, shape) = kinds.classify(model_of(given)), given
    assert info.kind is kind
    if kind is not None and not any(isinstance(d, str) for d in shape[1:]):
        made = SyntheticReader(model_of(given), samples=2).feed(1)[name]
        assert made.dtype == info.dtype
        assert made.shape == tuple(1 if isinstance(d, str) else d for d in shape)


def test_a_matrix_tells_features_from_sound_and_their_number():
    model = parse("g (float[N,M] x) => (float[N,3] y) <float[12,3] w> { y = MatMul (x, w) }")
    assert kinds.classify(model)[0].kind is InputKind.FEATURES
    assert SyntheticReader(model).feed(0)["x"].shape == (1, 12)


def test_a_conv_tells_the_channels():
    model = parse("g (float[N,C,H,W] x) => (float[N,4,I,J] y) <float[4,1,3,3] w> { y = Conv (x, w) }")
    assert SyntheticReader(model, samples=1).feed(0)["x"].shape == (1, 1, 224, 224)


def test_additive_masks():
    model = parse("(float[2,1,1,8] attention_mask) => (y) { y = Add (attention_mask, attention_mask) }")
    masks = [SyntheticReader(model, samples=8).feed(i)["attention_mask"] for i in range(8)]
    assert set(np.unique(masks)) == {-10_000.0, 0.0}
    assert all((mask[:, 0, 0, 0] == 0).all() for mask in masks)


IMAGE, MYSTERY = ("image", F, [1, 3, 8, 8]), ("mystery", I64, [1, 4])
REAL = [{"image": np.zeros((1, 3, 8, 8), np.float32)}]


@pytest.mark.parametrize(("inputs", "wishes", "says"), [
    ([IMAGE, MYSTERY], {}, "input 'mystery'.*looks nothing up.*kinds={"),
    ([IMAGE, ("text", TensorProto.STRING, [1])], {}, "input 'text'.*takes text.*ArrayReader"),
    ([IMAGE, ("x", F, None)], {}, "input 'x'.*how many axes.*kinds={"),
    ([IMAGE, ("x", F, [1, 2, 3, 4, 5])], {}, "input 'x'.*cannot be told.*kinds={"),
    ([IMAGE], {"input_ranges": {"imag": (0, 1)}}, "Did you mean 'image'"),
    ([IMAGE], {"input_shapes": {"image": (1, 4, 8, 8)}}, "does not fit"),
    ([IMAGE], {"kinds": {"image": "imag"}}, r"'imag' is not known\. Did you mean 'image'"),
    ([IMAGE], {"kinds": {"y": "image"}}, "no input 'y'"), ([IMAGE], {"std": 0}, "std must not be 0"),
    ([IMAGE], {"mean": [1, 2]}, "one a channel"), ([IMAGE], {"input_range": (2, 1)}, "upside down"),
    ([IMAGE], {"input_range": (0, float("inf"))}, "not finite"),
    ([IMAGE], {"input_ranges": {"image": 3}}, "no pair of numbers"), ([IMAGE], {"real": []}, "yields none"),
    ([IMAGE, ("features", F, [1, 6])], {"real": REAL}, "'features'"), ([("x", F, [1, 8])], {"mean": 1.0}, "for images"),
])  # fmt: skip
def test_what_is_not_understood_is_refused_by_name(inputs, wishes, says):
    with pytest.raises(CalibrationError, match=says):
        SyntheticReader(model_of(*inputs), **wishes)


def test_sequences_and_operators_of_unknown_domains_are_refused():
    model = model_of(IMAGE)
    boxes = helper.make_sequence_type_proto(helper.make_tensor_type_proto(F, None))
    model.graph.input.append(helper.make_value_info("boxes", boxes))
    with pytest.raises(CalibrationError, match=r"input 'boxes'.*sequence"):
        SyntheticReader(model)
    model = model_of(("x", F, [1, 3, 8, 8]), domain="ai.onnx.contrib")
    with pytest.raises(CalibrationError, match=r"input 'x'.*ai\.onnx\.contrib"):
        SyntheticReader(model)
    assert SyntheticReader(model, kinds={"x": "image"}).feed(0)["x"].shape == (1, 3, 8, 8)


def test_the_caller_decides():
    reader = SyntheticReader(model_of(IMAGE, MYSTERY), kinds={"image": "features", "mystery": InputKind.TOKENS})
    assert "features" in reader.assumptions[0]
    assert reader.feed(0)["mystery"].max() < 1000


# ---- the scale of inputs ---------------------------------------------------------------------------------------------


def first_layer(channels, pixels, *, folded):
    """A Conv and BatchNormalization trained, so to speak, on the given arrays, folded into one another or not."""
    rng = np.random.default_rng(0)
    weight = rng.normal(0, 0.3, (channels, pixels[0].shape[1], 3, 3)).astype(np.float32)
    zeros = np.zeros(channels, np.float32)
    shape = ",".join(map(str, pixels[0].shape[1:]))
    head, conv = f"g (float[N,{shape}] image) => (float out)", "[conv] conv = Conv <pads = [1, 1, 1, 1]> (image, w, b)"
    plain = partial(parse, f"{head} {{ {conv}  out = Relu (conv) }}", checked=False)
    values = np.concatenate(stem.Stem(plain({"w": weight, "b": zeros}), "image").respond(pixels), axis=1)
    mean, deviation = values.mean(axis=1), values.std(axis=1)
    gammas, betas = rng.uniform(0.7, 1.3, channels), rng.normal(0, 0.5, channels)
    if not folded:
        named = {"gamma": gammas, "beta": betas, "mean": mean, "var": deviation**2, "w": weight, "b": zeros}
        norm = "norm = BatchNormalization (conv, gamma, beta, mean, var)"
        constants = {name: value.astype(np.float32) for name, value in named.items()}
        return parse(f"{head} {{ {conv}  {norm}  out = Relu (norm) }}", constants, checked=False)
    factor = gammas / deviation
    scaled = weight * factor[:, None, None, None], betas - mean * factor
    return plain({name: value.astype(np.float32) for name, value in zip("wb", scaled, strict=True)})


def trained_on(way, count=12):
    return [way.apply(drawing.photograph(drawing.Draws(77, i), 32, 32))[None].astype(np.float32) for i in range(count)]


@pytest.mark.parametrize("way", WAYS, ids=[w.name for w in WAYS])
def test_stored_statistics_tell_the_range_and_a_folded_bias_its_order_of_magnitude(way):
    reader = SyntheticReader(first_layer(24, trained_on(way), folded=False))
    assert reader.provenance.known["image"] is Known.STATISTICS
    assert f"{way.name} (" in reader.assumptions[0]
    reader = SyntheticReader(first_layer(24, trained_on(way), folded=True))
    made = np.stack([reader.feed(i)["image"] for i in range(16)])
    assert 0.4 < made.std() / np.stack(trained_on(way)).std() < 3
    assert reader.provenance.known["image"] is Known.CONVENTION


def test_where_biases_are_too_small_to_tell_a_classifiers_answers_do():
    """Numbers from 0 to 1 fit the first bias but leave the answers even; up to 255 they make them as sure as usual."""
    rng, convs = np.random.default_rng(0), first_layer(24, trained_on(WAYS[0]), folded=True)
    arrays = {t.name: numpy_helper.to_array(t) for t in convs.graph.initializer}
    arrays |= {
        "v": rng.normal(0, 0.1, (24, 24, 3, 3)).astype(np.float32),
        "e": np.full(24, 1e-4, np.float32),
        "h": rng.normal(0, 0.02, (24, 12)).astype(np.float32),
    }
    text = """g (float[N,3,32,32] image) => (float[N,12] y) { c = Conv <pads = [1, 1, 1, 1]> (image, w, b)
        r = Relu (c) d = Conv (r, v, e) q = Relu (d) k = Conv (q, v, e) m = GlobalAveragePool (k) f = Flatten (m)
        a = MatMul (f, h) y = Softmax (a) }"""
    reader = SyntheticReader(parse(text, arrays))
    assert reader.provenance.known["image"] is Known.GUESS
    assert np.stack([reader.feed(i)["image"] for i in range(4)]).max() > 100


def test_no_usual_way_and_a_model_that_does_not_run_are_a_guess():
    usual = trained_on(WAYS[0])
    strange, none = [each * 30 + 500 for each in usual], [np.full_like(each, np.nan) for each in usual]
    odd = [first_layer(24, on, folded=folded) for on, folded in ((strange, False), (none, False), (none, True))]
    unheard, newer = (first_layer(24, usual, folded=folded) for folded in (True, False))
    unheard.graph.node.append(helper.make_node("Unheard", ["out"], ["more"]))
    for model in (*odd, unheard):
        assert SyntheticReader(model).provenance.known["image"] is Known.GUESS
    newer.ir_version = 99  # lowered for the runtime, as in quantization
    assert SyntheticReader(newer).provenance.known["image"] is Known.STATISTICS


def test_metadata_tells():
    model = model_of(("image", F, [1, 3, 16, 16]))
    helper.set_model_props(model, {"image.mean": "[0.5, 0.5, 0.5]", "image.std": "[0.25, 0.25, 0.25]"})
    image = (reader := SyntheticReader(model)).feed(0)["image"]
    assert -2 <= image.min() < image.max() <= 2
    assert reader.provenance.known["image"] is Known.GRAPH


@pytest.mark.parametrize(("wishes", "low", "high"), [
    ({"input_range": (0, 255)}, 0, 255), ({"input_range": (-1, 1)}, -1, 1),
    ({"input_ranges": {"image": (-1, 1)}}, -1, 1), ({"mean": 127.5, "std": 127.5}, -1, 1),
    ({"mean": (104, 117, 123)}, -123, 151), ({"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}, -2.2, 2.7),
    ({"input_range": (0, 1), "mean": 0.5, "std": 0.5}, -1, 1),
    ({"input_range": (0, 255), "mean": 0.0, "std": 255.0}, 0, 1),
])  # fmt: skip
def test_the_caller_tells(wishes, low, high):
    reader = SyntheticReader(model_of(("image", F, [1, 3, 48, 48])), samples=8, **wishes)
    made, near = np.stack([reader.feed(i)["image"] for i in range(8)]), 0.15 * (high - low)
    assert low <= made.min() < low + near
    assert high - near < made.max() <= high + 1e-6
    assert reader.provenance.known["image"] is Known.GIVEN


def test_features_are_fitted_to_statistics():
    rng = np.random.default_rng(0)
    mean, spread = np.linspace(-30, 10, 20), np.linspace(1, 4, 20)
    data = (mean + spread * rng.standard_normal((500, 20))).astype(np.float32)
    weight = rng.normal(0, 0.2, (20, 60)).astype(np.float32)
    arriving = data @ weight
    named = {"g": np.ones(60), "b": np.zeros(60), "m": arriving.mean(axis=0), "v": arriving.var(axis=0)}
    model = parse(
        """g (float[N,20] x) => (float[N,60] y) <float[20,60] w, float[60] g, float[60] b, float[60] m, float[60] v> {
        a = MatMul (x, w)  y = BatchNormalization (a, g, b, m, v) }""",
        {"w": weight, **{name: value.astype(np.float32) for name, value in named.items()}},
    )
    reader = SyntheticReader(model, samples=400)
    made = np.concatenate([reader.feed(i)["x"] for i in range(400)])
    np.testing.assert_allclose(made.mean(axis=0), mean, atol=2.5)
    assert 0.5 < np.median(made.std(axis=0) / spread) < 2
    assert reader.provenance.known["x"] is Known.STATISTICS
    assert np.array_equal(reader.feed(3)["x"], SyntheticReader(model, samples=4).feed(3)["x"])


def test_statistics_of_other_channels_than_arrive_say_nothing():
    text = """g (float[1,5] x) => (float[5,1] y) <float[5,5] w, float[5] g, float[5] v> {
        a = MatMul (x, w) t = Transpose (a) y = BatchNormalization (t, g, g, g, v) }"""
    assert SyntheticReader(parse(text)).provenance.known["x"] is not Known.STATISTICS  # the runtime refuses to run it


def test_real_samples_come_first_and_give_the_scale():
    rng = np.random.default_rng(0)
    inputs = [("image", F, [1, 3, 24, 24]), ("features", F, [1, 6])]
    drawn = ((rng.uniform(-3, 9, (1, 3, 24, 24)), rng.normal(50, 2, (1, 6))) for _ in range(12))
    real = [{"image": i.astype(np.float32), "features": f.astype(np.float32)} for i, f in drawn]
    reader = SyntheticReader(model_of(*inputs), samples=10, real=real)
    assert (len(reader), reader.provenance.real) == (22, 12)
    np.testing.assert_array_equal(reader.feed(3)["image"], real[3]["image"])
    made = [reader.feed(i) for i in range(12, 22)]
    assert -3.1 < min(f["image"].min() for f in made) < -2
    assert 8 < max(f["image"].max() for f in made) < 9.1
    assert 45 < np.mean([f["features"] for f in made]) < 55
    assert set(reader.provenance.known.values()) == {Known.REAL}


# ---- states ----------------------------------------------------------------------------------------------------------


def counter(state="state", new="stateN", step="Add ({}, one)"):
    """A net whose state counts the steps."""
    return parse(f"""g (float[1,8] x, float[1,2] {state}) => (float[1,8] out, float[1,2] {new}, float sum)
        <float[1,2] one = {{1, 1}}> {{
        {new} = {step.format(state)}  out = Identity (x)  sum = ReduceSum <keepdims = 0> (x) }}""")


@pytest.mark.parametrize(("state", "new"), [("state", "stateN"), ("h0", "hn"), ("hidden_in", "result")])
def test_states_are_fed_back(state, new):
    reader = SyntheticReader(counter(state, new), samples=40)
    counts = [float(reader.feed(i)[state][0, 0]) for i in range(40)]
    assert counts == [(i % SAMPLES_A_SEQUENCE) * STEPS_A_SAMPLE for i in range(40)]
    assert [float(reader.feed(i)[state][0, 0]) for i in (9, 2, 33)] == [counts[i] for i in (9, 2, 33)]
    assert "its own" in reader.assumptions[1] or "model's own" in reader.assumptions[1]


def test_states_that_are_not_fed_back():
    """One without an output is zero and a guess, a range that is given counts, and none may explode."""
    model = counter()
    del model.graph.output[1]
    alone = SyntheticReader(model, samples=20)
    assert not alone.feed(15)["state"].any()
    assert alone.provenance.known["state"] is Known.GUESS
    given = SyntheticReader(counter(), input_ranges={"state": (5, 6)}).feed(3)["state"]
    assert 5 <= given.min() <= given.max() <= 6
    with pytest.raises(CalibrationError, match="grow beyond all bounds"):
        SyntheticReader(counter(step="Exp ({})"), samples=20).feed(15)


def test_past_keys_are_those_of_tokens():
    model = parse(DECODER)
    model.graph.input[1].type.tensor_type.shape.dim[1].dim_param = "P + T"  # of the mask
    reader = SyntheticReader(model, samples=8, kinds={"input_ids": "tokens"})
    feed = reader.feed(0)
    steps, past = feed["input_ids"].shape[1], feed["past_0"].shape[1]
    assert feed["attention_mask"].shape == (1, past + steps)
    assert feed["position_ids"][0].tolist() == list(range(past, past + steps))
    assert feed["past_0"].any()
    assert {*feed["past_0"].ravel()} <= {*range(1000)}, "the tokens as numbers"
    assert not np.array_equal(feed["input_ids"], reader.feed(1)["input_ids"])
