"""Models in pieces, run together."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from kenosis_ort import PipelineReader
from kenosis_ort.calibration.feeds import misfit
from kenosis_ort.errors import CalibrationError
from tests.planning import parse

# Token t of the vocabulary 0 to 8 is followed by t + 1; a cache holds the tokens read as numbers.
ENCODER = """encoder (int64[B,S] input_ids, int64[B,S] attention_mask) => (float[B,S,1] last_hidden_state)
    <int64[1] last = {-1}> {
    there = Mul (input_ids, attention_mask)
    numbers = Cast <to = 1> (there)
    last_hidden_state = Unsqueeze (numbers, last) }"""
_SCORES = """
    numbers = Cast <to = 1> (input_ids)
    wide = Unsqueeze (numbers, last)
    next = Add (wide, one)
    distance = Sub (vocabulary, next)
    away = Abs (distance)
    logits = Neg (away)"""
_CONSTANTS = """int64[1] last = {-1}, float one = {1}, float[9] vocabulary = {0, 1, 2, 3, 4, 5, 6, 7, 8}"""
FIRST = f"""first (int64[B,T] input_ids, float[B,S,1] encoder_hidden_states, int64[B,S] encoder_attention_mask)
    => (float[B,T,9] logits, float[B,T,1] present_0_decoder_key, float[B,S,1] present_0_encoder_key)
    <{_CONSTANTS}> {{ {_SCORES}
    present_0_decoder_key = Identity (wide)
    masked = Cast <to = 1> (encoder_attention_mask)
    masks = Unsqueeze (masked, last)
    present_0_encoder_key = Mul (encoder_hidden_states, masks) }}"""
WITH_PAST = f"""with_past (int64[B,1] input_ids, int64[B,S] encoder_attention_mask,
    float[B,P,1] past_key_values_0_decoder_key, float[B,S,1] past_key_values_0_encoder_key)
    => (float[B,1,9] logits, float[B,Q,1] present_0_decoder_key)
    <{_CONSTANTS}> {{ {_SCORES}
    seen = Cast <to = 1> (encoder_attention_mask)
    present_0_decoder_key = Concat <axis = 1> (past_key_values_0_decoder_key, wide) }}"""


def three() -> dict[str, Any]:
    return {"encoder": parse(ENCODER), "first": parse(FIRST), "with_past": parse(WITH_PAST)}


def sentences(*lengths: int) -> list[dict[str, Any]]:
    ids = [np.arange(1, n + 1)[None] for n in lengths]
    return [{"input_ids": row, "attention_mask": np.ones_like(row)} for row in ids]


def drain(reader: Any) -> list[dict[str, Any]]:
    return list(iter(reader.get_next, None))


def test_each_piece_gets_what_the_pieces_before_it_return() -> None:
    pipeline = PipelineReader(three(), sentences(3, 2), tokens=2, start_token=4, threads=1)
    assert list(pipeline) == ["encoder", "first", "with_past"]
    assert len(pipeline) == 3
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


def test_a_sequence_ends_with_its_stop_token() -> None:
    pipeline = PipelineReader(three(), sentences(3), tokens=9, start_token=1, stop_token=4, threads=1)
    assert [feed["input_ids"].item() for feed in drain(pipeline["with_past"])] == [2, 3]
    ends_at_once = PipelineReader(three(), sentences(3), tokens=9, start_token=1, stop_token=2, threads=1)
    assert drain(ends_at_once["with_past"]) == []


def test_only_what_a_piece_needs_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    import kenosis_ort.calibration.pipeline as module

    real = module._Piece.run
    monkeypatch.setattr(module._Piece, "run", lambda piece, *rest: ran.append(piece.name) or real(piece, *rest))
    pipeline = PipelineReader(three(), sentences(3), tokens=2, start_token=1, threads=1)
    for name, expected in (("encoder", []), ("first", ["encoder"]), ("with_past", ["encoder", "first", "with_past"])):
        ran.clear()
        drain(pipeline[name])
        assert ran == expected


MERGED = f"""merged (int64[B,T] input_ids, float[B,S,1] encoder_hidden_states, bool[1] use_cache_branch,
    float[B,P,1] past_key_values_0_decoder_key, float[B,U,1] past_key_values_0_encoder_key)
    => (float[B,T,9] logits, float[B,Q,1] present_0_decoder_key, float[B,V,1] present_0_encoder_key)
    <{_CONSTANTS}, float[1,0,1] nothing> {{ {_SCORES}
    present_0_decoder_key = Concat <axis = 1> (past_key_values_0_decoder_key, wide)
    present_0_encoder_key = If (use_cache_branch) <
        then_branch = with_cache () => (float[B,V,1] empty) {{ empty = Identity (nothing) }},
        else_branch = without () => (float[B,V,1] seen) {{ seen = Identity (encoder_hidden_states) }}> }}"""


def test_both_branches_of_a_merged_decoder() -> None:
    models = {"encoder": parse(ENCODER), "decoder": parse(MERGED)}
    feeds = drain(PipelineReader(models, sentences(3), tokens=3, start_token=1, threads=1)["decoder"])
    assert [bool(feed["use_cache_branch"]) for feed in feeds] == [False, True, True]
    assert [feed["past_key_values_0_decoder_key"].shape for feed in feeds] == [(1, 0, 1), (1, 1, 1), (1, 2, 1)]
    # The branch with a cache returns empty keys of the encoder; those of the first step stay.
    assert [feed["past_key_values_0_encoder_key"].ravel().tolist() for feed in feeds] == [[], [1, 2, 3], [1, 2, 3]]


DECODER = f"""decoder (int64[B,T] input_ids, int64[B,M] attention_mask, int64[B,T] position_ids, float[B,P,1] past_0)
    => (float[B,T,9] logits, float[B,Q,1] present_0)
    <{_CONSTANTS}> {{ {_SCORES}
    ones = Cast <to = 1> (attention_mask)
    places = Cast <to = 1> (position_ids)
    present_0 = Concat <axis = 1> (past_0, wide) }}"""


def test_the_mask_and_positions_of_a_decoder_alone_grow() -> None:
    prompt = {"input_ids": np.array([[0, 1, 2]]), "attention_mask": np.array([[0, 1, 1]])}
    for given in ({}, {"position_ids": np.array([[0, 0, 1]])}):
        pipeline = PipelineReader({"decoder": parse(DECODER)}, [{**prompt, **given}], tokens=3, threads=1)
        feeds = drain(pipeline["decoder"])
        assert [feed["input_ids"].tolist() for feed in feeds] == [[[0, 1, 2]], [[3]], [[4]]]
        assert [feed["attention_mask"].tolist() for feed in feeds[1:]] == [[[0, 1, 1, 1]], [[0, 1, 1, 1, 1]]]
        assert [feed["past_0"].shape[1] for feed in feeds] == [0, 3, 4]
        positions = [feed["position_ids"].tolist() for feed in feeds]
        assert positions[1:] == ([[[2]], [[3]]] if given else [[[3]], [[4]]])


def test_a_decoder_without_a_cache_reads_all_tokens_again() -> None:
    text = f"net (int64[B,T] input_ids) => (float[B,T,9] logits) <{_CONSTANTS}> {{ {_SCORES} }}"
    feeds = drain(PipelineReader({"net": parse(text)}, [{"input_ids": np.array([[2]])}], tokens=3, threads=1)["net"])
    assert [feed["input_ids"].tolist() for feed in feeds] == [[[2]], [[2, 3]], [[2, 3, 4]]]


def test_links_and_choice_say_what_names_do_not() -> None:
    head = parse(
        """head (int64[B,T] input_ids, float[B,S,1] memory) => (float[B,T,1] state) <int64[1] last = {-1}> {
        numbers = Cast <to = 1> (input_ids)\n state = Unsqueeze (numbers, last) }"""
    )
    models = {"encoder": parse(ENCODER), "head": head}
    links = {"head": {"memory": "last_hidden_state"}}

    def after(outputs: Any) -> Any:
        return outputs["state"][:, -1].astype(np.int64) * 2

    pipeline = PipelineReader(models, sentences(3), tokens=3, start_token=1, links=links, choose=after, threads=1)
    assert drain(pipeline["head"])[-1]["input_ids"].tolist() == [[1, 2, 4]]
    with pytest.raises(CalibrationError, match="scores of tokens"):
        drain(PipelineReader(models, sentences(3), start_token=1, links=links, threads=1)["head"])
    with pytest.raises(CalibrationError, match=r"choose returned float64 of shape \(1,\)"):
        drain(PipelineReader(models, sentences(3), start_token=1, choose=lambda _: np.ones(1), threads=1)["head"])
    for said, message in (({"heads": {}}, "no model"), ({"head": {"memry": "state"}}, "input that there is not"),
                          ({"head": {"memory": "stat"}}, "Did you mean 'state'")):  # fmt: skip
        with pytest.raises(CalibrationError, match=message):
            PipelineReader(models, sentences(3), links=said)


def test_a_loop_of_the_callers_own() -> None:
    def halves(pieces: Any, sample: Any) -> None:
        for part in (slice(0, 1), slice(1, None)):
            seen = pieces["encoder"](**{name: value[:, part] for name, value in sample.items()})
            pieces["net"](x=seen["last_hidden_state"])

    net = parse("net (float[B,S,1] x) => (float[B,S,1] y) { y = Neg (x) }")
    pipeline = PipelineReader({"encoder": parse(ENCODER), "net": net}, sentences(3, 2), run=halves, threads=1)
    assert [feed["x"].ravel().tolist() for feed in drain(pipeline["net"])] == [[1], [2, 3], [1], [2]]
    assert len(drain(pipeline["encoder"])) == 4

    def stops(pieces: Any, sample: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        drain(PipelineReader({"net": net}, sentences(3), run=stops)["net"])


def test_what_does_not_fit_is_named() -> None:
    short = sentences(3)[0] | {"encoder_attention_mask": np.ones((1, 2), np.int64)}
    models = {k: v for k, v in three().items() if k != "with_past"}
    links = {"first": {"encoder_attention_mask": "encoder_attention_mask"}}
    pipeline = PipelineReader(models, [short], start_token=1, tokens=2, links=links, threads=1)
    with pytest.raises(CalibrationError) as error:
        drain(pipeline["first"])
    assert "model 'first'" in str(error.value)
    assert "'encoder_hidden_states' has 3 on axis 1, and the input 'encoder_attention_mask' has 2" in str(error.value)
    assert "the model calls both 'S'" in str(error.value)
    wrong = [{"input_ids": np.ones((1, 3)), "attention_mask": np.ones((1, 3), np.int64)}]
    with pytest.raises(CalibrationError, match=r"wrong type.*\n?.*model 'encoder', input 'input_ids', sample 0"):
        drain(PipelineReader(three(), wrong, start_token=1, threads=1)["encoder"])
    with pytest.raises(CalibrationError, match="Give start_token="):
        drain(PipelineReader(three(), sentences(3), threads=1)["first"])
    odd = parse("odd (float[B,S,1,1] memory) => (float[B,S,1,1] y) { y = Neg (memory) }")
    with pytest.raises(CalibrationError, match="input 'memory'"):
        drain(PipelineReader({"encoder": parse(ENCODER), "odd": odd}, sentences(3), threads=1)["odd"])
    with pytest.raises(CalibrationError, match="no models"):
        PipelineReader({}, sentences(3))
    with pytest.raises(CalibrationError, match="no samples"):
        PipelineReader(three(), [])
    with pytest.raises(KeyError, match="encodr"):
        PipelineReader(three(), sentences(3))["encodr"]


def test_files_are_read_once_and_left_alone(tmp_path: Path) -> None:
    paths = {}
    for name, model in three().items():
        paths[name] = tmp_path / f"{name}.onnx"
        onnx.save(model, paths[name])
    before = {name: path.read_bytes() for name, path in paths.items()}
    pipeline = PipelineReader(paths, iter(sentences(2, 3)), start_token=1, tokens=2, threads=1)
    assert len(drain(pipeline["with_past"])) == 4
    assert {name: path.read_bytes() for name, path in paths.items()} == before


@pytest.mark.parametrize(("mask", "past", "said"), [(3, 0, ""), (4, 2, "'attention_mask' has 4 on axis 1"), (5, 2, "")])
def test_a_mask_covers_the_tokens_and_the_cache(mask: int, past: int, said: str) -> None:
    net = parse(
        """net (int64[B,T] input_ids, int64[B,M] attention_mask, float[B,2,P,1] past_0) => (int64[B,T] y) {
        y = Identity (input_ids) }"""
    )
    session = ort.InferenceSession(net.SerializeToString(), providers=["CPUExecutionProvider"])
    feed = {"input_ids": np.zeros((1, 3)), "attention_mask": np.zeros((1, mask)), "past_0": np.zeros((1, 2, past, 1))}
    assert said in misfit(session, feed)
    assert bool(misfit(session, feed)) == bool(said)
