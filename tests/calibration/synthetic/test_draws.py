"""Random numbers, pictures and sound: the same everywhere, distributed as promised; which nets are shown writing."""

import hashlib
from functools import partial
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st

from kenosis_ort.calibration import feeds, part_session
from kenosis_ort.calibration.synthetic import SyntheticReader, drawing, makers, pixels, reader
from kenosis_ort.calibration.synthetic.kinds import InputInfo, InputKind, SyntheticSample
from kenosis_ort.calibration.synthetic.makers import audio_maker, noise_field, waveform
from tests.planning import parse

# Written down on x86-64 with numpy 2.4; every platform and release has to agree.
GOLDEN = {
    "words": ("a702b5ba4090ae4f", lambda draws: draws.words(100)),
    "integers": ("cca6a6c12d63dc12", lambda draws: draws.integers(-5, 1000, (50,))),
    "bells": ("da084aa9dbfc9dea", lambda draws: draws.bells((7, 5))),
    "pink": ("ba9785e24aed2708", lambda draws: drawing.pink(draws, (2, 33, 20), axes=2, fading=200)),
    "photograph": ("661fa9de449713d9", lambda draws: drawing.photograph(draws, 150, 224)),
    "pages": ("b61d84b40bf0a952", lambda _: np.array([int(drawing.page(each, 64, 64).sum()) for each in named(16)])),
    "small": ("ecd9804860bd1dac", lambda _: np.concatenate([drawing.photograph(each, 32, 32) for each in named(16)])),
    "waveform": ("aee42ee88369f921", lambda draws: np.round(waveform(draws, 8000) * 2**20).astype(np.int64)),
    "field": ("ded7abda4d1fca9f", lambda draws: np.round(noise_field(draws, (2, 10, 12)) * 2**20).astype(np.int64)),
}


def named(count):
    return [drawing.Draws(0, at) for at in range(count)]


@pytest.mark.parametrize("name", GOLDEN)
def test_the_same_bytes_everywhere(name):
    wanted, draw = GOLDEN[name]
    array = draw(drawing.Draws(3, 1, "x"))
    little = array.astype(array.dtype.newbyteorder("<"))
    assert hashlib.sha256(np.ascontiguousarray(little).tobytes()).hexdigest()[:16] == wanted


@given(low=st.integers(-(2**31), 2**31), span=st.integers(0, 2**32 - 1), seed=st.integers(0, 2**63))
def test_integers_stay_within_their_bounds(low, span, seed):
    numbers = drawing.Draws(seed).integers(low, low + span, (40,))
    assert low <= numbers.min()
    assert numbers.max() <= low + span


def test_streams_depend_on_every_part_of_the_key():
    keys = [(0, 0), (0, 1), (1, 0), (0, 0, "a"), (0, 0, "b"), (0, 0, "a", 1)]
    assert len({int(drawing.Draws(*key).words(1)[0]) for key in keys}) == len(keys)


def test_steps_of_a_sequence_are_cut_from_one_sound(monkeypatch):
    """Making it anew for each step took the square of the steps: 45 of 49 s of a call for a net that reads 16,000."""
    info = InputInfo("x", onnx.TensorProto.FLOAT, (2, 160), InputKind.AUDIO)
    samples = [SyntheticSample(7, index, step, 5) for index, step in ((0, 0), (0, 1), (0, 4), (1, 0), (1, 2), (0, 2))]
    alone = [audio_maker(info, (2, 160), -1.0, 1.0, feeds.Known.GIVEN).make(sample) for sample in samples]
    made = Mock(wraps=waveform)
    monkeypatch.setattr(makers, "waveform", made)
    audio = audio_maker(info, (2, 160), -1.0, 1.0, feeds.Known.GIVEN)
    together = [audio.make(sample) for sample in samples]
    np.testing.assert_array_equal(together, alone)
    assert [call.args[1] for call in made.call_args_list] == [800] * 6  # two rows of three changes of the sequence
    whole = np.stack([waveform(samples[0].draws("x", row), 800) for row in range(2)])
    np.testing.assert_allclose(together[1], whole[:, 160:320], atol=1e-6)


# ---- writing ---------------------------------------------------------------------------------------------------------


NATURAL, WRITTEN = 40, 200


def edges(*, bias=0.0, size=(32, 32)):
    """A net that answers to differences between neighbours: a map of probabilities."""
    kernel = np.zeros((4, 3, 3, 3), np.float32)
    for i, place in enumerate(((0, 1), (1, 0), (1, 2), (2, 1))):
        kernel[i, :, 1, 1], kernel[(i, slice(None), *place)] = 4, -4
    return parse(
        f"""(float[1,3,{size[0]},{size[1]}] x) => (float probability)
        <float[4,3,3,3] k, float[4] h, float[1,4,1,1] one> {{
        edges = Conv (x, k, h)  ink = Relu (edges)  sum = Conv (ink, one, bias)  probability = Sigmoid (sum) }}""",
        {"k": kernel, "h": np.full(4, 0.5), "one": np.ones(4), "bias": np.array([bias], np.float32)},
        checked=False,
    )


def flat_or_noise(level, spread, draws, height, width):
    return (level + draws.integers(-1, 1, (3, height, width)) * spread % 56).astype(np.uint8)


def brightness(monkeypatch, noisy):
    """Makes photographs and writing flat but for one of them, which is noise."""
    for name, level in (("photograph", NATURAL), ("page", WRITTEN)):
        monkeypatch.setattr(pixels, name, partial(flat_or_noise, level, 80 if level == noisy else 0))


def maker_of(model, **options):
    (maker,) = SyntheticReader(model, samples=2, input_range=(0, 1), **options)._makers.values()
    return maker


@pytest.mark.parametrize("draw", [drawing.page, drawing.photograph])
@pytest.mark.parametrize("size", [(1, 1), (5, 3), (17, 8), (48, 320), (96, 96)])
def test_pictures_of_any_size_repeat(size, draw):
    pictures = [draw(drawing.Draws(0, i, "x"), *size) for i in range(3)]
    assert all(p.shape == (3, *size) and p.dtype == np.uint8 for p in pictures)
    assert all(np.array_equal(p, draw(drawing.Draws(0, i, "x"), *size)) for i, p in enumerate(pictures))


@pytest.mark.parametrize(
    ("size", "line"), [((48, 320), True), ((32, 100), True), ((64, 64), False), ((375, 1242), False)]
)
def test_lines(size, line):
    assert drawing.is_line(*size) is line


def test_a_net_that_writing_excites_is_shown_it(monkeypatch):
    brightness(monkeypatch, WRITTEN)
    maker = maker_of(edges())
    assert maker.writing
    assert "half of them of writing" in maker.says
    reader = SyntheticReader(edges(), samples=32, input_range=(0, 255))
    written = [bool(reader.feed(i)["x"].mean() > 120) for i in range(32)]
    assert sum(written) == 16
    for every in (2, 4, 8):
        assert 0 < sum(written[::every]) < 32 // every, "whoever takes every second sample gets some of both"


def test_a_net_that_photographs_excite_is_not_and_one_that_takes_lines_needs_less(monkeypatch):
    brightness(monkeypatch, NATURAL)
    maker = maker_of(edges())
    assert not maker.writing
    assert "writing" not in maker.says
    model = edges(size=(32, 128))
    monkeypatch.setattr(pixels, "_excitement", lambda *_, writing, **__: ([1.1 if writing else 1.0], [1.0]))
    assert maker_of(model).writing
    assert not maker_of(edges()).writing


def test_a_net_that_does_not_run_is_shown_photographs():
    model = edges()
    maker = maker_of(model)
    model.graph.node[0].op_type = "NoSuchOperator"
    assert not pixels.shows_writing(model, maker, part_session.SessionSettings())


def test_a_picture_among_other_inputs_is_a_photograph(monkeypatch):
    monkeypatch.setattr(reader, "shows_writing", lambda *_: True)
    two = parse("(float[1,3,32,32] a, float[1,3,32,32] b) => (float[1,3,32,32] y) { y = Add (a, b) }")
    makers = SyntheticReader(two, samples=2, input_range=(0, 1))._makers.values()
    assert not any(maker.writing for maker in makers if isinstance(maker, pixels.ImageMaker))
    assert maker_of(edges()).writing
