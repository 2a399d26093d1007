"""Feeds that models compute: states from step to step, what bodies are fed with, models in pieces."""

from unittest.mock import Mock

import numpy as np
import onnx
import pytest

from kenosis_ort import CalibrationError, PipelineReader
from kenosis_ort.calibration.computed_feeds import ClosedLoopReader, body_feeds
from kenosis_ort.calibration.feeds import misfit
from kenosis_ort.graph import bodies, shapes, walk
from kenosis_ort.runtime.counting import counted
from tests.contracts.test_readers import read as drain
from tests.flow import control
from tests.graph.build import ready, run
from tests.models import normal, session
from tests.planning import parse

RNG = np.random.default_rng(0)
INTEGRATOR = """net (float[1,3] x, float[1,3] h_in) => (float[1,3] z, float[1,3] h_out) {
    h_out = Add (x, h_in)\n z = Neg (h_out) }"""
CACHE = """net (float[1,T,2] x, float[B,P,2] past_key_values_0_key) => (float[1,T,2] y, float[B,Q,2] present_0_key) {
    present_0_key = Concat <axis = 1> (past_key_values_0_key, x)\n y = Neg (x) }"""


def ones(count):
    return [{"x": np.ones((1, 3), np.float32)} for _ in range(count)]


def looped(feeds, **options):
    """First elements of the states that a reader adds."""
    reader = ClosedLoopReader(parse(INTEGRATOR), feeds, threads=1, **options)
    assert len(reader) == len(feeds)
    found = [float(feed["h_in"][0, 0]) for feed in iter(reader.get_next, None)]
    assert reader.get_next() is None
    return found


def test_states_come_from_the_step_before():
    assert (looped(ones(4)), looped(ones(5), steps=2)) == ([0, 1, 2, 3], [0, 1, 0, 1, 0])
    first = {"h_in": np.full((1, 3), 7, np.float32)}
    assert looped(ones(3), initial=first) == [7, 8, 9]
    feeds = ones(4)
    feeds[2].update(first)
    assert looped(feeds, states={"h_out": "h_in"}) == [0, 1, 7, 8]


def test_an_empty_cache_grows(tmp_path):
    onnx.save(parse(CACHE), tmp_path / "net.onnx")
    reader = ClosedLoopReader(tmp_path / "net.onnx", [{"x": np.zeros((1, 3, 2), np.float32)}] * 3, threads=1)
    sizes = [feed["past_key_values_0_key"].shape for feed in iter(reader.get_next, None)]
    assert sizes == [(1, 0, 2), (1, 3, 2), (1, 6, 2)]


def test_bad_states_and_samples_are_named():
    for states, feeds, says in (
        ({"h_out": "h_inn"}, ones(2), "Did you mean"),
        ({}, ones(2), "No state"),
        (None, [{"x": np.ones((2, 2), np.float32)}], "sample 0"),
    ):
        with pytest.raises(CalibrationError, match=says):
            looped(feeds, states=states)


# ---- bodies ---------------------------------------------------------------------------------------------------------


X = normal((2, 32))


def fed(model, *feeds):
    """Each body with what it is fed with, the same each time."""
    found = []
    for owner in walk.owners(model):
        for place, graph in bodies.places(owner):
            body = bodies.take_out(model, place, graph, shapes.types_of(model, walk.outer_names(graph)))
            again = body_feeds(model, owner, body, lambda: iter(feeds))
            found.append((body, [*again()]))
            np.testing.assert_equal([*again()], found[-1][1])
    return found


@pytest.mark.parametrize("outside", [False, True])
def test_a_branch_is_fed_where_its_condition_holds(outside):
    model = ready(control.two_rates(outside=outside)).proto
    rates = [16000, 8000, 8000]
    feeds = [{"x": RNG.normal(size=(2, 3, 16, 16)).astype(np.float32), "rate": np.array(r)} for r in rates]
    taken = {"then_branch": [0], "else_branch": [1, 2]}
    for body, inside in fed(model, *feeds):
        for feed, at in zip(inside, taken[body.place.attribute], strict=True):
            np.testing.assert_allclose(run(body.model, feed)[0], run(model, feeds[at])[0], rtol=1e-5)
        if outside:  # constants of the graph around are constants of the body
            assert (len(body.captured), len(body.constants)) == (1, 1)
            assert body.constants.keys() <= {t.name for t in body.model.graph.initializer}


ENDS = """(float[2,32] x, int64 n) => (float[2,32] y, float[m,2,32] all) <int64 one = {1}> {
    y, all = Loop (n, , x) <body = b (int64 i, bool k, float[2,32] s) => (bool g, float[2,32] t, float[2,32] u)
    { t = Add (s, s)  u = Neg (t)  g = Less (i, one) }> }"""


@pytest.mark.parametrize(("model", "feed", "steps", "at"), [
    (parse(ENDS), {"x": X, "n": np.array(9)}, 2, 1),
    (control.loop(None), {"x": X, "n": np.array(3)}, 3, 1), (control.loop(3), {"x": X}, 3, 1),
    (control.scan(), {"x": normal((1, 6, 24))}, 6, 0),
], ids=["loop that ends by itself", "loop", "loop of known length", "scan"])  # fmt: skip
def test_loops_are_fed_once_an_iteration(model, feed, steps, at):
    model = ready(model).proto
    ((body, inside),) = fed(model, feed)
    assert [int(f.get("i", step)) for step, f in enumerate(inside)] == [*range(steps)]
    ran, (final, each) = [run(body.model, f) for f in inside], run(model, feed)
    np.testing.assert_allclose(ran[-1][at], final, rtol=1e-5)
    np.testing.assert_allclose(np.stack([r[at + 1] for r in ran]), each, rtol=1e-5)
    assert fed(model, *([feed | {"n": np.array(0)}] if "n" in feed else []))[0][1] == []


# ---- models in pieces, run together ----------------------------------------------------------------------------------


# Token t of the vocabulary 0 to 8 is followed by t + 1; a cache holds the tokens read as numbers.
ENCODER = """encoder (int64[B,S] input_ids, int64[B,S] attention_mask) => (float[B,S,1] last_hidden_state)
    <int64[1] last = {-1}> { there = Mul (input_ids, attention_mask)
    numbers = Cast <to = 1> (there)  last_hidden_state = Unsqueeze (numbers, last) }"""
_SCORES = """numbers = Cast <to = 1> (input_ids)  wide = Unsqueeze (numbers, last)
    next = Add (wide, one)  distance = Sub (vocabulary, next)  away = Abs (distance)  logits = Neg (away)"""
_CONSTANTS = """int64[1] last = {-1}, float one = {1}, float[9] vocabulary = {0, 1, 2, 3, 4, 5, 6, 7, 8}"""
FIRST = f"""first (int64[B,T] input_ids, float[B,S,1] encoder_hidden_states, int64[B,S] encoder_attention_mask)
    => (float[B,T,9] logits, float[B,T,1] present_0_decoder_key, float[B,S,1] present_0_encoder_key)
    <{_CONSTANTS}> {{ {_SCORES}
    present_0_decoder_key = Identity (wide)  masked = Cast <to = 1> (encoder_attention_mask)
    masks = Unsqueeze (masked, last)  present_0_encoder_key = Mul (encoder_hidden_states, masks) }}"""
WITH_PAST = f"""with_past (int64[B,1] input_ids, int64[B,S] encoder_attention_mask,
    float[B,P,1] past_key_values_0_decoder_key, float[B,S,1] past_key_values_0_encoder_key)
    => (float[B,1,9] logits, float[B,Q,1] present_0_decoder_key)  <{_CONSTANTS}> {{ {_SCORES}
    present_0_decoder_key = Concat <axis = 1> (past_key_values_0_decoder_key, wide) }}"""


PIECES = {"encoder": parse(ENCODER), "first": parse(FIRST), "with_past": parse(WITH_PAST)}


def sentences(*lengths):
    ids = [np.arange(1, n + 1)[None] for n in lengths]
    return [{"input_ids": row, "attention_mask": np.ones_like(row)} for row in ids]


def read(piece, samples, pieces=PIECES, **options):
    """What a piece is fed with."""
    return drain(PipelineReader(pieces, samples, **{"threads": 1, "start_token": 1, **options})[piece])


def test_each_piece_gets_what_the_pieces_before_it_return():
    pipeline = PipelineReader(PIECES, sentences(3, 2), tokens=2, start_token=4, threads=1)
    assert (len(pipeline), list(pipeline)) == (3, ["encoder", "first", "with_past"])
    assert [feed["input_ids"].shape for feed in drain(pipeline["encoder"])] == [(1, 3), (1, 2)]
    first = drain(pipeline["first"])
    assert [feed["input_ids"].tolist() for feed in first] == [[[4]], [[4]]]
    assert first[0]["encoder_hidden_states"].ravel().tolist() == [1, 2, 3]
    assert first[1]["encoder_attention_mask"].tolist() == [[1, 1]]
    later = drain(pipeline["with_past"])
    assert [feed["input_ids"].item() for feed in later] == [5, 6, 5, 6]
    cached = [feed["past_key_values_0_decoder_key"].ravel().tolist() for feed in later]
    assert cached == [[4], [4, 5], [4], [4, 5]]
    assert later[3]["past_key_values_0_encoder_key"].ravel().tolist() == [1, 2]
    assert len(drain(pipeline["first"])) == 2, "each reader begins anew"
    with pytest.raises(KeyError, match="encodr"):
        pipeline["encodr"]


def test_a_sequence_ends_with_its_stop_token():
    for stop, expected in ((4, [2, 3]), (2, [])):
        feeds = read("with_past", sentences(3), tokens=9, stop_token=stop)
        assert [feed["input_ids"].item() for feed in feeds] == expected


@pytest.mark.parametrize(("piece", "runs"), [("encoder", 0), ("first", 1), ("with_past", 3)])
def test_only_what_a_piece_needs_is_run(piece, runs):
    with counted() as counts:
        read(piece, sentences(3), tokens=2)
    assert counts.total.runs == runs


MERGED = f"""merged (int64[B,T] input_ids, float[B,S,1] encoder_hidden_states, bool[1] use_cache_branch,
    float[B,P,1] past_key_values_0_decoder_key, float[B,U,1] past_key_values_0_encoder_key)
    => (float[B,T,9] logits, float[B,Q,1] present_0_decoder_key, float[B,V,1] present_0_encoder_key)
    <{_CONSTANTS}, float[1,0,1] nothing> {{ {_SCORES}
    present_0_decoder_key = Concat <axis = 1> (past_key_values_0_decoder_key, wide)
    present_0_encoder_key = If (use_cache_branch) <
        then_branch = with_cache () => (float[B,V,1] empty) {{ empty = Identity (nothing) }},
        else_branch = without () => (float[B,V,1] seen) {{ seen = Identity (encoder_hidden_states) }}> }}"""


def test_both_branches_of_a_merged_decoder():
    feeds = read("decoder", sentences(3), {"encoder": PIECES["encoder"], "decoder": parse(MERGED)}, tokens=3)
    assert [bool(feed["use_cache_branch"]) for feed in feeds] == [False, True, True]
    assert [feed["past_key_values_0_decoder_key"].shape for feed in feeds] == [(1, 0, 1), (1, 1, 1), (1, 2, 1)]
    # The branch with a cache returns empty keys of the encoder; those of the first step stay.
    assert [feed["past_key_values_0_encoder_key"].ravel().tolist() for feed in feeds] == [[], [1, 2, 3], [1, 2, 3]]


DECODER = f"""decoder (int64[B,T] input_ids, int64[B,M] attention_mask, int64[B,T] position_ids, float[B,P,1] past_0)
    => (float[B,T,9] logits, float[B,Q,1] present_0)  <{_CONSTANTS}> {{ {_SCORES}
    present_0 = Concat <axis = 1> (past_0, wide) }}"""


def test_the_mask_and_positions_of_a_decoder_alone_grow():
    prompt = {"input_ids": np.array([[0, 1, 2]]), "attention_mask": np.array([[0, 1, 1]])}
    for given in ({}, {"position_ids": np.array([[0, 0, 1]])}):
        feeds = read("net", [{**prompt, **given}], {"net": parse(DECODER)}, tokens=3, start_token=None)
        assert [feed["input_ids"].tolist() for feed in feeds] == [[[0, 1, 2]], [[3]], [[4]]]
        assert [feed["attention_mask"].tolist() for feed in feeds[1:]] == [[[0, 1, 1, 1]], [[0, 1, 1, 1, 1]]]
        assert [feed["past_0"].shape[1] for feed in feeds] == [0, 3, 4]
        positions = [feed["position_ids"].tolist() for feed in feeds]
        assert positions[1:] == ([[[2]], [[3]]] if given else [[[3]], [[4]]])


def test_a_decoder_without_a_cache_reads_all_tokens_again():
    text = f"net (int64[B,T] input_ids) => (float[B,T,9] logits) <{_CONSTANTS}> {{ {_SCORES} }}"
    feeds = read("net", [{"input_ids": np.array([[2]])}], {"net": parse(text)}, tokens=3, start_token=None)
    assert [feed["input_ids"].tolist() for feed in feeds] == [[[2]], [[2, 3]], [[2, 3, 4]]]


HEAD = {"encoder": PIECES["encoder"], "head": parse(
    """(int64[B,T] input_ids, float[B,S,1] memory) => (float[B,T,1] state) <int64[1] last = {-1}> {
    numbers = Cast <to = 1> (input_ids)  state = Unsqueeze (numbers, last) }""")}  # fmt: skip
LINKS = {"head": {"memory": "last_hidden_state"}}


def test_links_and_choice_say_what_names_do_not():
    choose = lambda outputs: outputs["state"][:, -1].astype(np.int64) * 2  # noqa: E731
    feeds = read("head", sentences(3), HEAD, tokens=3, links=LINKS, choose=choose)
    assert feeds[-1]["input_ids"].tolist() == [[1, 2, 4]]


def test_a_loop_of_the_callers_own():
    def halves(pieces, sample):
        for part in (slice(0, 1), slice(1, None)):
            seen = pieces["encoder"](**{name: value[:, part] for name, value in sample.items()})
            pieces["net"](x=seen["last_hidden_state"])

    net = parse("net (float[B,S,1] x) => (float[B,S,1] y) { y = Neg (x) }")
    pieces = {"encoder": PIECES["encoder"], "net": net}
    feeds = read("net", sentences(3, 2), pieces, run=halves)
    assert [feed["x"].ravel().tolist() for feed in feeds] == [[1], [2, 3], [1], [2]]
    assert len(read("encoder", sentences(3, 2), pieces, run=halves)) == 4
    with pytest.raises(ZeroDivisionError):
        read("net", sentences(3), pieces, run=Mock(side_effect=ZeroDivisionError))


SHORT = [sentences(3)[0] | {"encoder_attention_mask": np.ones((1, 2), np.int64)}]
WRONG = [{"input_ids": np.ones((1, 3)), "attention_mask": np.ones((1, 3), np.int64)}]
OF_SHORT = {"first": {"encoder_attention_mask": "encoder_attention_mask"}}
ODD = parse("odd (float[B,S,1,1] memory) => (float[B,S,1,1] y) { y = Neg (memory) }")
SAID = (r"'encoder_hidden_states' has 3 on axis 1, and the input 'encoder_attention_mask' has 2.*calls both 'S'"
        r".*model 'first'")  # fmt: skip
REFUSED = (
    (SAID, "first", SHORT, {n: PIECES[n] for n in ("encoder", "first")}, {"tokens": 2, "links": OF_SHORT}),
    ("wrong type.*model 'encoder', input 'input_ids', sample 0", "encoder", WRONG, PIECES, {}),
    ("Give start_token=", "first", sentences(3), PIECES, {"start_token": None}),
    ("input 'memory'", "odd", sentences(3), {"encoder": PIECES["encoder"], "odd": ODD}, {}),
    ("no models", "", sentences(3), {}, {}), ("no samples", "", [], PIECES, {}),
    ("scores of tokens", "head", sentences(3), HEAD, {"links": LINKS}),
    (r"choose returned float64 of shape \(1,\)", "head", sentences(3), HEAD, {"choose": lambda _: np.ones(1)}),
    ("no model", "", sentences(3), HEAD, {"links": {"heads": {}}}),
    ("input that there is not", "", sentences(3), HEAD, {"links": {"head": {"memry": "state"}}}),
    ("Did you mean 'state'", "", sentences(3), HEAD, {"links": {"head": {"memory": "stat"}}}),
)  # fmt: skip


@pytest.mark.parametrize(("says", "piece", "samples", "pieces", "options"), REFUSED)
def test_what_does_not_fit_is_named(says, piece, samples, pieces, options):
    with pytest.raises(CalibrationError, match=says):
        read(piece, samples, pieces, **options)


def test_files_are_read_once_and_left_alone(tmp_path):
    paths = {name: tmp_path / f"{name}.onnx" for name in PIECES}
    for name, path in paths.items():
        onnx.save(PIECES[name], path)
    before = [path.read_bytes() for path in paths.values()]
    assert len(read("with_past", iter(sentences(2, 3)), paths, tokens=2)) == 4
    assert [path.read_bytes() for path in paths.values()] == before


@pytest.mark.parametrize(("mask", "past", "said"), [(3, 0, ""), (4, 2, "'attention_mask' has 4 on axis 1"), (5, 2, "")])
def test_a_mask_covers_the_tokens_and_the_cache(mask, past, said):
    net = parse(
        """net (int64[B,T] input_ids, int64[B,M] attention_mask, float[B,2,P,1] past_0) => (int64[B,T] y) {
        y = Identity (input_ids) }"""
    )
    feed = {"input_ids": np.zeros((1, 3)), "attention_mask": np.zeros((1, mask)), "past_0": np.zeros((1, 2, past, 1))}
    found = misfit(session(net), feed)
    assert (said in found, bool(found)) == (True, bool(said))
