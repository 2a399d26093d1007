"""What inputs are for: by name, type, shape, and by what the graph does with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from kenosis_ort.calibration.synthetic import InputKind, SyntheticReader
from kenosis_ort.calibration.synthetic.kinds import classify
from kenosis_ort.errors import CalibrationError
from tests.calibration.synthetic.support import model_of

F, I64, U8, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.UINT8, TensorProto.BOOL

CASES: list[tuple[str, int, list[Any], InputKind | None]] = [
    ("data", F, [1, 3, 224, 224], InputKind.IMAGE),
    ("data", F, ["N", 224, 224, 3], InputKind.IMAGE),
    ("x", F, ["N", 1, 28, 28], InputKind.IMAGE),
    ("lr", F, ["N", 1, "H", "W"], InputKind.IMAGE),
    ("x", F, [3, 64, 64], InputKind.IMAGE),
    ("x", U8, [1, 240, 320, 3], InputKind.IMAGE),
    ("mfcc", F, ["N", 1, 49, 10], InputKind.FEATURES),
    ("x", F, ["N", 640], InputKind.FEATURES),
    ("x", F, ["N", 80, "T"], InputKind.SERIES),
    ("x", F, [1, 64, 7, 7], InputKind.FEATURES),
    ("audio", F, [1, "n"], InputKind.AUDIO),
    ("x", F, [1, 16000], InputKind.AUDIO),
    ("x", F, [1, 1, "n"], InputKind.AUDIO),
    ("pcm", TensorProto.INT16, [1, "n"], InputKind.AUDIO),
    ("h0", F, [1, 1, 8], InputKind.STATE),
    ("encoder_state", F, [1, 8], InputKind.STATE),
    ("past_key_values.0.key", F, ["b", 4, "past", 8], InputKind.PAST),
    ("attention_mask", I64, ["b", "s"], InputKind.MASK),
    ("padding_mask", BOOL, [1, 9], InputKind.MASK),
    ("position_ids", I64, [1, 9], InputKind.POSITIONS),
    ("tokenTypeIds", I64, [1, 9], InputKind.SEGMENTS),
    ("sr", I64, [], InputKind.SAMPLE_RATE),
    ("text_lengths", I64, [1], InputKind.LENGTH),
    ("scale_factor", F, [1, 2], InputKind.SCALE),
    ("im_shape", F, [1, 2], InputKind.IMAGE_SIZE),
    ("orig_target_sizes", I64, [1, 2], InputKind.IMAGE_SIZE),
    ("use_cache_branch", BOOL, [1], InputKind.BOOLEAN),
    ("mystery", I64, [1, 4], None),
    ("x", F, [], None),
    ("x", F, [1, 2, 3, 4, 5], None),
    ("text", TensorProto.STRING, [1], None),
]


@pytest.mark.parametrize(("name", "element_type", "shape", "kind"), CASES)
def test_names_types_and_shapes(name: str, element_type: int, shape: list[Any], kind: InputKind | None) -> None:
    (info,) = classify(model_of((name, element_type, shape)))
    assert info.kind is kind
    if kind is not None and not any(isinstance(d, str) for d in shape[1:]):
        reader = SyntheticReader(model_of((name, element_type, shape)), samples=2)
        made = reader.feed(1)[name]
        assert made.dtype == info.dtype
        assert made.shape == tuple(1 if isinstance(d, str) else d for d in shape)


def test_a_matrix_tells_features_from_sound_and_their_number() -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["out"])]
    model = model_of(("x", F, ["N", "M"]), nodes=nodes, constants=[("w", np.ones((12, 3), np.float32))])
    assert classify(model)[0].kind is InputKind.FEATURES
    assert SyntheticReader(model).feed(0)["x"].shape == (1, 12)


def test_a_conv_tells_the_channels() -> None:
    nodes = [helper.make_node("Conv", ["x", "w"], ["out"])]
    weight = np.ones((4, 1, 3, 3), np.float32)
    model = model_of(("x", F, ["N", "C", "H", "W"]), nodes=nodes, constants=[("w", weight)])
    assert SyntheticReader(model, samples=1).feed(0)["x"].shape == (1, 1, 224, 224)


def test_additive_masks() -> None:
    nodes = [helper.make_node("Add", ["attention_mask", "k"], ["out"])]
    model = model_of(("attention_mask", F, [2, 1, 1, 8]), nodes=nodes, constants=[("k", np.float32(1))])
    masks = [SyntheticReader(model, samples=8).feed(i)["attention_mask"] for i in range(8)]
    assert set(np.unique(masks)) == {-10_000.0, 0.0}
    assert all((mask[:, 0, 0, 0] == 0).all() for mask in masks)


@pytest.mark.parametrize(
    ("unknown", "says"),
    [
        (("mystery", I64, [1, 4]), "looks nothing up"),
        (("text", TensorProto.STRING, [1]), "takes text"),
        (("x", F, None), "how many axes"),
        (("x", F, [1, 2, 3, 4, 5]), "cannot be told"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(unknown: Any, says: str) -> None:
    model = model_of(("image", F, [1, 3, 8, 8]), unknown)
    with pytest.raises(CalibrationError, match=f"input '{unknown[0]}'.*{says}") as caught:
        SyntheticReader(model)
    wanted = "ArrayReader" if unknown[1] == TensorProto.STRING else "kinds={"
    assert wanted in str(caught.value.fix)


def test_sequences_and_operators_of_unknown_domains_are_refused() -> None:
    model = model_of(("x", F, [1, 3, 8, 8]))
    model.graph.input.append(
        helper.make_value_info("boxes", helper.make_sequence_type_proto(helper.make_tensor_type_proto(F, None)))
    )
    with pytest.raises(CalibrationError, match=r"input 'boxes'.*sequence"):
        SyntheticReader(model)
    nodes = [helper.make_node("Tokenizer", ["x"], ["out"], domain="ai.onnx.contrib")]
    model = model_of(("x", F, [1, 3, 8, 8]), nodes=nodes)
    with pytest.raises(CalibrationError, match=r"input 'x'.*ai\.onnx\.contrib"):
        SyntheticReader(model)
    assert SyntheticReader(model, kinds={"x": "image"}).feed(0)["x"].shape == (1, 3, 8, 8)


def test_the_caller_decides() -> None:
    model = model_of(("x", F, [1, 3, 40, 40]), ("mystery", I64, [1, 6]))
    reader = SyntheticReader(model, kinds={"x": "features", "mystery": InputKind.TOKENS})
    assert "features" in reader.assumptions[0]
    assert reader.feed(0)["mystery"].max() < 1000
    with pytest.raises(CalibrationError, match=r"'imag' is not known\. Did you mean 'image'"):
        SyntheticReader(model, kinds={"x": "imag"})
    with pytest.raises(CalibrationError, match="no input 'y'"):
        SyntheticReader(model, kinds={"y": "image"})
