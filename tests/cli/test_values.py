"""What an option's text may say."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.cli import values


@pytest.mark.parametrize(
    ("read", "text", "expected"),
    [
        (values.whole, "0", 0),
        (values.positive, "3", 3),
        (values.number, "-1.5", -1.5),
        (values.seconds, "0.5", 0.5),
        (values.share, "0.005", 0.005),
        (values.share, "0.5%", 0.005),
        (values.share, "100%", 1.0),
        (values.numbers, "0.485,0.456", (0.485, 0.456)),
        (values.image_size, "224X320", (224, 320)),
        (values.named_shape, "ids=1x128", ("ids", (1, 128))),
        (values.named_shape, "a=b=2", ("a=b", (2,))),
        (values.named_word, "x=token ids", ("x", "token ids")),
        (values.input_range, "0,255", (None, (0.0, 255.0))),
        (values.input_range, "image=-1,1", ("image", (-1.0, 1.0))),
        (values.extra_option, "A=True", ("A", True)),
        (values.extra_option, 'A={"x": [1]}', ("A", {"x": [1]})),
        (values.extra_option, "A=b=c", ("A", "b=c")),
        (values.extra_option, "A=", ("A", "")),
    ],
)
def test_what_is_taken(read: Callable[[str], Any], text: str, expected: object):
    assert read(text) == expected


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (values.whole, "-1"),
        (values.whole, "1.5"),
        (values.whole, "²"),
        (values.positive, "0"),
        (values.number, "nan"),
        (values.number, "inf"),
        (values.seconds, "0"),
        (values.seconds, "soon"),
        (values.share, "1.5"),
        (values.share, "101%"),
        (values.share, "-1%"),
        (values.numbers, "a,b"),
        (values.numbers, "1,,2"),
        (values.image_size, "224"),
        (values.image_size, "1x2x3"),
        (values.image_size, "0x3"),
        (values.named_shape, "1x2"),
        (values.named_shape, "=1x2"),
        (values.named_shape, "a=axb"),
        (values.named_word, "a="),
        (values.input_range, "1,0"),
        (values.input_range, "a=1"),
        (values.extra_option, "A"),
        (values.extra_option, "=1"),
    ],
)
def test_what_is_refused(read: Callable[[str], Any], text: str):
    with pytest.raises(argparse.ArgumentTypeError):
        read(text)


READERS = (
    values.whole,
    values.positive,
    values.number,
    values.seconds,
    values.share,
    values.numbers,
    values.image_size,
    values.named_shape,
    values.named_word,
    values.input_range,
    values.extra_option,
)


@pytest.mark.parametrize("read", READERS)
@given(text=st.text(max_size=12))
def test_no_text_breaks_a_reader_otherwise(read: Callable[[str], Any], text: str):
    with contextlib.suppress(argparse.ArgumentTypeError):
        read(text)
