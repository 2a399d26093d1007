"""Windows of convolutions are what the runtime multiplies a kernel with."""

import numpy as np
import onnx
from hypothesis import given, settings, strategies as st

from kenosis_ort.graph.shapes import windows
from tests.models import session

_SIZES = st.integers(1, 3)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(_SIZES, _SIZES, _SIZES, st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=2), st.data()
)
def test_windows_times_a_kernel_are_the_runtimes_convolution(axes, data):
    kernel, strides, dilations, before, behind = (list(each) for each in zip(*axes, strict=True))
    auto_pad = data.draw(st.sampled_from(["NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"]))
    given_ = {"strides": strides, "dilations": dilations}
    if auto_pad == "NOTSET":
        given_["pads"] = [*before, *behind]
    elif auto_pad != "VALID":
        given_["dilations"] = [1] * len(axes)  # the runtime takes no others there
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, *(7 for _ in axes))).astype(np.float32)
    w = rng.normal(size=(4, 3, *kernel)).astype(np.float32)
    node = onnx.helper.make_node("Conv", ["x", "w"], ["y"], auto_pad=auto_pad, **given_)
    info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph([node], "conv", [info("x", 1, x.shape)], [info("y", 1, None)])
    graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    view = windows(x, kernel, **given_, auto_pad=auto_pad)
    rank = len(axes)
    found = np.tensordot(view, w, axes=([1, *range(2 + rank, 2 + 2 * rank)], [1, *range(2, 2 + rank)]))
    np.testing.assert_allclose(np.moveaxis(found, -1, 1), session(model).run(None, {"x": x})[0], rtol=1e-4, atol=1e-4)
