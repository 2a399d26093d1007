"""What an option's text may say."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.cli import flags


@pytest.mark.parametrize(
    ("read", "text", "expected"),
    [
        (flags.whole, "0", 0),
        (flags.positive, "3", 3),
        (flags.number, "-1.5", -1.5),
        (flags.seconds, "0.5", 0.5),
        (flags.share, "0.005", 0.005),
        (flags.share, "0.5%", 0.005),
        (flags.share, "100%", 1.0),
        (flags.numbers, "0.485,0.456", (0.485, 0.456)),
        (flags.image_size, "224X320", (224, 320)),
        (flags.named_shape, "ids=1x128", ("ids", (1, 128))),
        (flags.named_shape, "a=b=2", ("a=b", (2,))),
        (flags.named_word, "x=token ids", ("x", "token ids")),
        (flags.input_range, "0,255", (None, (0.0, 255.0))),
        (flags.input_range, "image=-1,1", ("image", (-1.0, 1.0))),
        (flags.extra_option, "A=True", ("A", True)),
        (flags.extra_option, 'A={"x": [1]}', ("A", {"x": [1]})),
        (flags.extra_option, "A=b=c", ("A", "b=c")),
        (flags.extra_option, "A=", ("A", "")),
    ],
)
def test_what_is_taken(read: Callable[[str], Any], text: str, expected: object):
    assert read(text) == expected


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (flags.whole, "-1"),
        (flags.whole, "1.5"),
        (flags.whole, "²"),
        (flags.positive, "0"),
        (flags.number, "nan"),
        (flags.number, "inf"),
        (flags.seconds, "0"),
        (flags.seconds, "soon"),
        (flags.share, "1.5"),
        (flags.share, "101%"),
        (flags.share, "-1%"),
        (flags.numbers, "a,b"),
        (flags.numbers, "1,,2"),
        (flags.image_size, "224"),
        (flags.image_size, "1x2x3"),
        (flags.image_size, "0x3"),
        (flags.named_shape, "1x2"),
        (flags.named_shape, "=1x2"),
        (flags.named_shape, "a=axb"),
        (flags.named_word, "a="),
        (flags.input_range, "1,0"),
        (flags.input_range, "a=1"),
        (flags.extra_option, "A"),
        (flags.extra_option, "=1"),
    ],
)
def test_what_is_refused(read: Callable[[str], Any], text: str):
    with pytest.raises(argparse.ArgumentTypeError):
        read(text)


READERS = (
    flags.whole,
    flags.positive,
    flags.number,
    flags.seconds,
    flags.share,
    flags.numbers,
    flags.image_size,
    flags.named_shape,
    flags.named_word,
    flags.input_range,
    flags.extra_option,
)


@pytest.mark.parametrize("read", READERS)
@given(text=st.text(max_size=12))
def test_no_text_breaks_a_reader_otherwise(read: Callable[[str], Any], text: str):
    with contextlib.suppress(argparse.ArgumentTypeError):
        read(text)
