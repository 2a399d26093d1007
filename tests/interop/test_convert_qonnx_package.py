"""Conversions from QONNX beside the `qonnx` package's own execution (extra ``interop``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from kenosis_ort import convert
from tests.formats.qonnx import conv_net, draw, run

pytest.importorskip("qonnx", reason="the extra 'interop' is not installed")

from qonnx.core.modelwrapper import ModelWrapper
from qonnx.transformation.channels_last import ConvertToChannelsLastAndClean
from qonnx.util.cleanup import cleanup_model

from tests.interop.test_qonnx_package import executed

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        tuple(map(int, onnx.__version__.split(".")[:2])) >= (1, 22), reason="qonnx stamps its IR version"
    ),
]
X = draw()


def converted(path: Path, model: onnx.ModelProto, to: str, x: np.ndarray = X) -> np.ndarray:
    done = convert(model, path, to)
    assert done.fusion is None or done.fusion.integer_share() == 1.0, str(done)
    return np.asarray(run(path, {model.graph.input[0].name: x}, optimize=True)[0])


@pytest.mark.parametrize("to", ["qdq", "qop"])
@pytest.mark.parametrize("kind", [{"bits": 2}, {"bits": 3, "signed": True}, {"bits": 4, "norm": True}])
def test_few_bits_on_integer_kernels_are_the_package_s_to_the_bit(tmp_path, kind, to):
    model = conv_net(**kind)
    np.testing.assert_array_equal(converted(tmp_path / "out.onnx", model, to), executed(model, {"x": X}))


def test_eight_bits_on_integer_kernels_differ_by_a_step_at_most(tmp_path):
    model = conv_net(8, norm=True)
    difference = np.abs(converted(tmp_path / "out.onnx", model, "qdq") - executed(model, {"x": X}))
    assert difference.max() <= 0.4 * 1.001


def test_the_package_s_own_channels_last_form_of_a_net_comes_back(tmp_path):
    model = conv_net(4)
    x = X[:1]
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    wrapped = cleanup_model(ModelWrapper(model)).transform(ConvertToChannelsLastAndClean())
    name = wrapped.graph.input[0].name
    expected = executed(model, {"x": x})
    convert(wrapped.model, tmp_path / "out.onnx")
    (found,) = run(tmp_path / "out.onnx", {name: x}, optimize=True)
    np.testing.assert_array_equal(found, expected)
