"""What we write, and conversions, run and transformed by the package `qonnx` itself (extra ``interop``)."""

import numpy as np
import onnx
import pytest

from kenosis_ort import convert, quantize_static
from tests import models
from tests.formats.qonnx import conv_net, draw, run

pytest.importorskip("qonnx", reason="the extra 'interop' is not installed")

from qonnx.core.modelwrapper import ModelWrapper
from qonnx.core.onnx_exec import execute_onnx
from qonnx.transformation.channels_last import ConvertToChannelsLastAndClean
from qonnx.transformation.infer_datatypes import InferDataTypes
from qonnx.transformation.infer_shapes import InferShapes
from qonnx.transformation.qcdq_to_qonnx import QCDQToQuant
from qonnx.util.cleanup import cleanup_model

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        tuple(map(int, onnx.__version__.split(".")[:2])) >= (1, 22), reason="qonnx stamps its IR version"
    ),
]


def net():
    """Three Convs, a pool and a Gemm, as channels-last flows take it."""
    net = models.Net(seed=5)
    a = net.op("Relu", [net.conv(net.input("x", [1, 3, 12, 12]), 3, 8, name="stem")])
    b = net.op("Relu", [net.conv(a, 8, 8, name="second")])
    pooled = net.op("MaxPool", [b], kernel_shape=[2, 2], strides=[2, 2])
    c = net.op("Relu", [net.conv(pooled, 8, 8, name="third")])
    flat = net.op("Flatten", [net.op("GlobalAveragePool", [c])])
    return net.of(net.op("Gemm", [flat, net.weight((8, 4)), np.zeros(4)], name="head"))


FEEDS = models.feeds(net(), 6)


def written(folder, form, bits):
    out = folder / f"{form}{bits}.onnx"
    options = {"weight_bits": bits, "activation_bits": bits, "recipe": "plain", "promise": False}
    quantize_static(net(), out, models.FeedReader(FEEDS), format=form, **options)
    return onnx.load(out)


def executed(model, feed):
    wrapped = (model if isinstance(model, ModelWrapper) else ModelWrapper(model)).transform(InferShapes())
    (found,) = execute_onnx(wrapped, {wrapped.graph.input[0].name: feed["x"]}).values()
    return np.asarray(found)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_few_bits_are_the_package_s_to_the_bit(tmp_path, bits):
    exported, ours = written(tmp_path, "qonnx", bits), written(tmp_path, "qcdq", bits)
    for feed in FEEDS:
        np.testing.assert_array_equal(executed(exported, feed), run(ours, feed)[0])


def test_eight_bits_differ_by_a_step_at_most(tmp_path):
    exported, ours = written(tmp_path, "qonnx", 8), written(tmp_path, "qcdq", 8)
    step = max(
        float(onnx.numpy_helper.to_array(t).max()) for t in exported.graph.initializer if "quant_scale" in t.name
    )
    off = np.abs([executed(exported, feed) - run(ours, feed)[0] for feed in FEEDS])
    assert off.max() <= step
    assert off.mean() <= step / 4


@pytest.mark.parametrize("bits", [4, 8])
def test_qcdq_is_converted_by_the_package(tmp_path, bits):
    spelled = written(tmp_path, "qcdq-qonnx", bits)
    converted = ModelWrapper(spelled).transform(InferShapes()).transform(QCDQToQuant())
    assert {n.op_type for n in converted.graph.node}.isdisjoint({"QuantizeLinear", "DequantizeLinear"})
    for feed in FEEDS[:2]:
        np.testing.assert_allclose(executed(converted, feed), run(spelled, feed)[0], atol=1e-5)


@pytest.mark.parametrize("bits", [2, 4])
def test_the_package_s_transformations_keep_it(tmp_path, bits):
    exported, feed = written(tmp_path, "qonnx", bits), FEEDS[0]
    expected = executed(exported, feed)
    clean = cleanup_model(ModelWrapper(exported), preserve_qnt_ops=True)
    np.testing.assert_array_equal(executed(clean, feed), expected)
    typed = clean.transform(InferDataTypes(allow_scaledint_dtypes=True))
    found = {str(typed.get_tensor_datatype(n.output[0])) for n in typed.graph.node if n.op_type == "Quant"}
    assert f"SCALEDINT<{bits}>" in found
    last = clean.transform(ConvertToChannelsLastAndClean(make_input_channels_last=False))
    np.testing.assert_allclose(executed(last, feed), expected, atol=1e-5)


# ---- conversions from QONNX ----------------------------------------------------------------------------------------

X = draw()


def converted(path, model, to, x=X):
    done = convert(model, path, to)
    assert done.fusion is None or done.fusion.integer_share() == 1.0, str(done)
    return np.asarray(run(path, {model.graph.input[0].name: x}, optimize=True)[0])


@pytest.mark.parametrize("to", ["qdq", "qop"])
@pytest.mark.parametrize("kind", [{"bits": 2}, {"bits": 3, "signed": True}, {"bits": 4, "norm": True}])
def test_converted_few_bits_on_integer_kernels_are_the_package_s_to_the_bit(tmp_path, kind, to):
    model = conv_net(**kind)
    np.testing.assert_array_equal(converted(tmp_path / "out.onnx", model, to), executed(model, {"x": X}))


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
