"""Lists of numbers as stock stores them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import helper

from kenosis_ort.graph.outside import copy_model
from kenosis_ort.options import Stages
from kenosis_ort.quantizer.editor import QdqEditor
from kenosis_ort.quantizer.fusion_aware import FusionAwareQDQQuantizer
from kenosis_ort.quantizer.stock import QuantType
from tests import models

KINDS = (np.float32, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.float16, np.int64)
LISTS = st.sampled_from(KINDS).flatmap(lambda kind: hnp.arrays(kind, hnp.array_shapes(min_dims=0, max_dims=2)))
MODEL = models.residual_block()


@given(LISTS)
def test_lists_are_stored_as_onnx_stores_them(array: npt.NDArray[Any]) -> None:
    quantizer = FusionAwareQDQQuantizer(
        copy_model(MODEL), False, False, QuantType.QInt8, QuantType.QUInt8, None, [], [], [], stages=Stages.none()
    )
    QdqEditor(quantizer).add_list("numbers", array)
    kind = helper.np_dtype_to_tensor_dtype(array.dtype)
    expected = helper.make_tensor("numbers", kind, array.shape, array.ravel().tolist())
    assert quantizer.model.constant("numbers").SerializeToString() == expected.SerializeToString()
