"""Stage 6: scale factors, masks, ids and shapes keep out of int8, and so does the node where they meet the data."""

from __future__ import annotations

import numpy as np
import pytest

from kenosis_ort.errors import OptionError
from kenosis_ort.placement.assignment import protect, secondary_inputs
from tests import models
from tests.placement.build import view_of


def secondary(declared: str, primary: list[str] | None = None) -> list[str]:
    """The secondary inputs of a net with these inputs."""
    names = [each.split()[-1] for each in declared.split(", ")]
    body = " ".join(f"y{i} = Neg ({name})" for i, name in enumerate(names))
    outputs = ", ".join(f"y{i}" for i in range(len(names)))
    return list(secondary_inputs(view_of(f"({declared}) => ({outputs}) {{ {body} }}"), primary))


SECONDARY = """scale_factor im_shape image_shape im_info attention_mask token_type_ids position_ids sr h0 c0 state
    hidden_state past_key_values cache_k orig_target_sizes x_lengths"""
PRIMARY = "image x input pixel_values audio src features tokens"


@pytest.mark.parametrize(
    ("declared", "found"),
    [
        *((f"float[1,3,8,8] image, float[1,2] {name}", [name]) for name in SECONDARY.split()),
        *((f"float[1,3,8,8] {name}", []) for name in PRIMARY.split()),
        ("float[1,3,8,8] picture, float[1,2] extra, float[1,64] embedding", ["extra"]),  # small beside a picture
        ("float[1,4] a, float[1,2] b", []),  # two matrices
        ("float[1,3,8,8] mask", []),  # never all of them
    ],
)
def test_inputs_are_secondary_by_name_or_as_small_vectors(declared: str, found: list[str]) -> None:
    assert secondary(declared) == found


def test_the_callers_word_counts() -> None:
    declared = "float[1,3,8,8] image, float[1,3,8,8] mask"
    assert secondary(declared, ["mask"]) == ["image"]
    assert secondary(declared, ["image", "mask"]) == []
    with pytest.raises(OptionError, match=r"'imge'.*Did you mean 'image'"):
        secondary(declared, ["imge"])


def test_the_flood_stops_where_it_meets_the_data() -> None:
    protected = protect(view_of(models.two_input_detector()), None)
    assert set(protected) == {"scale_twice", "scale_unsqueeze", "box_rescale"}
    assert "mixes main data" in protected["box_rescale"]
    # A mask up to the Add behind the scores.
    assert set(protect(view_of(models.transformer_block()), None)) == {"hide", "hide_future", "masked"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("""(float[1,C,8,8] x) => (float[D] y, float[1,C,8,8] z)
            { s = Shape (x) f = Cast <to = 1> (s) y = Mul (f, half) z = Neg (x) }""", "Shape_s Cast_f Mul_y"),
        # The bound of a Clip is computed from the data: the chain to it is float, the data are not protected.
        ("(float[1,3,8,8] x) => (y) { m = ReduceMax <keepdims = 0> (x) h = Mul (m, half) y = Clip (x, zero, h) }",
         "ReduceMax_m Mul_h"),
        # What steers and feeds is data.
        ("(float[1,3,8,8] x) => (y, z) { m = ReduceMax <keepdims = 0> (x) y = Clip (x, zero, m) z = Neg (m) }", ""),
    ],
    ids=["shape", "bound", "both"],
)  # fmt: skip
def test_what_only_steers_stays_float(text: str, found: str) -> None:
    known = {name: np.float32(value) for name, value in (("half", 0.5), ("zero", 0)) if name in text}
    protected = protect(view_of(text, known), None)
    assert set(protected) == set(found.split())
    if "Mul_h" in protected:
        assert protected["Mul_h"] == "computes a shape, a bound or an index, not data"
