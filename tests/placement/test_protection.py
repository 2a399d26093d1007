"""Stage 6: scale factors, masks, ids and shapes keep out of int8, and so does the node where they meet the data."""

from __future__ import annotations

import numpy as np
import pytest

from kenosis_ort.errors import OptionError
from kenosis_ort.placement.assignment import protect, secondary_inputs
from tests import models
from tests.placement.build import view_of


def inputs_net(*declared: str) -> str:
    names = [d.split()[-1] for d in declared]
    sums = "\n".join(f"y{i} = Neg ({name})" for i, name in enumerate(names))
    outs = ", ".join(f"y{i}" for i in range(len(names)))
    return f"net ({', '.join(declared)}) => ({outs}) {{ {sums} }}"


@pytest.mark.parametrize(
    "name",
    ["scale_factor", "im_shape", "image_shape", "im_info", "attention_mask", "token_type_ids", "position_ids", "sr",
     "h0", "c0", "state", "hidden_state", "past_key_values", "cache_k", "orig_target_sizes", "x_lengths"],
)  # fmt: skip
def test_secondary_by_name(name: str) -> None:
    view = view_of(inputs_net("float[1,3,8,8] image", f"float[1,2] {name}"))
    assert list(secondary_inputs(view, None)) == [name]


@pytest.mark.parametrize("name", ["image", "x", "input", "pixel_values", "audio", "src", "features", "tokens"])
def test_primary_by_name(name: str) -> None:
    assert secondary_inputs(view_of(inputs_net(f"float[1,3,8,8] {name}")), None) == {}


def test_a_small_vector_beside_a_picture_is_secondary() -> None:
    view = view_of(inputs_net("float[1,3,8,8] picture", "float[1,2] extra", "float[1,64] embedding"))
    assert list(secondary_inputs(view, None)) == ["extra"]


def test_two_matrices_are_both_primary() -> None:
    assert secondary_inputs(view_of(inputs_net("float[1,4] a", "float[1,2] b")), None) == {}


def test_a_model_never_has_secondary_inputs_only() -> None:
    assert secondary_inputs(view_of(inputs_net("float[1,3,8,8] mask")), None) == {}


def test_the_callers_word_counts() -> None:
    view = view_of(inputs_net("float[1,3,8,8] image", "float[1,3,8,8] mask"))
    assert list(secondary_inputs(view, ["mask"])) == ["image"]
    assert secondary_inputs(view, ["image", "mask"]) == {}
    with pytest.raises(OptionError, match=r"'imge'.*Did you mean 'image'"):
        secondary_inputs(view, ["imge"])


def test_the_flood_stops_where_it_meets_the_data() -> None:
    protected = protect(view_of(models.two_input_detector()), None)
    assert set(protected) == {"scale_twice", "scale_unsqueeze", "box_rescale"}
    assert "mixes main data" in protected["box_rescale"]


def test_a_mask_stays_float_up_to_the_add_behind_the_scores() -> None:
    protected = protect(view_of(models.transformer_block()), None)
    assert set(protected) == {"hide", "hide_future", "masked"}


def test_what_derives_from_a_shape_stays_float() -> None:
    text = """net (float[1,C,8,8] x) => (float[D] y, float[1,C,8,8] z) {
      s = Shape (x)
      f = Cast <to = 1> (s)
      y = Mul (f, two)
      z = Neg (x)
    }"""
    protected = protect(view_of(text, {"two": np.float32(2)}), None)
    assert set(protected) == {"Shape_s", "Cast_f", "Mul_y"}


def test_what_only_steers_stays_float() -> None:
    """Here a Clip's bound is computed from the data: the chain to the bound is float, the data are not protected."""
    text = """net (float[1,3,8,8] x) => (y) {
      m = ReduceMax <keepdims = 0> (x)
      h = Mul (m, half)
      y = Clip (x, zero, h)
    }"""
    protected = protect(view_of(text, {"half": np.float32(0.5), "zero": np.float32(0)}), None)
    assert set(protected) == {"ReduceMax_m", "Mul_h"}
    assert protected["Mul_h"] == "computes a shape, a bound or an index, not data"


def test_a_value_that_steers_and_feeds_is_data() -> None:
    text = """net (float[1,3,8,8] x) => (y, z) {
      m = ReduceMax <keepdims = 0> (x)
      y = Clip (x, zero, m)
      z = Neg (m)
    }"""
    assert protect(view_of(text, {"zero": np.float32(0)}), None) == {}
