"""The valid models that mutations start from: small, seeded, each with something of its own that can go wrong."""

from functools import cache

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests import models, planning
from tests.formats.qonnx import model_of

DATA_NAME = "weights.bin"
FEEDS = 6


def _detector():
    """A conv head whose number of boxes depends on the data: NonMaxSuppression, and Gather by what it chose."""
    return planning.parse(
        """(float[1,3,8,8] x) => (float[1,n,4] kept, int64[n,3] chosen) <float[8,3,3,3] w, float[8] b, float[4,8,1,1] u,
        float[2,8,1,1] v, int64[3] flat, int64[3] pair, int64 three, float half, float third, int64 two> {
        [stem] c = Conv<pads = [1, 1, 1, 1]>(x, w, b) [stem_relu] r = Relu(c)
        [box_head] p = Conv(r, u) [box_reshape] q = Reshape(p, flat)
        [box_transpose] boxes = Transpose<perm = [0, 2, 1]>(q)
        [score_head] s = Conv(r, v) [score_sigmoid] g = Sigmoid(s) [score_reshape] scores = Reshape(g, pair)
        [nms] chosen = NonMaxSuppression(boxes, scores, three, half, third)
        [rows] rows = Gather<axis = 1>(chosen, two) [kept] kept = Gather<axis = 1>(boxes, rows) }""",
        {"flat": [1, 4, 64], "pair": [1, 2, 64], "three": 3, "half": 0.5, "third": 0.3, "two": 2},
        checked=False,
    )


def _loop():
    """A Loop whose body multiplies a carried state by an outer weight, behind and before a Gemm."""
    return planning.parse(
        """(float[1,8] x) => (float[1,4] y)
        <float[8,8] w, float[8] b, float[8,8] body_w, int64 three, bool true, float[8,4] u, float[4] c> {
        [first] f = Gemm(x, w, b) [relu] h = Relu(f)
        [loop] s = Loop(three, true, h) <body = body (int64 step, bool going, float[1,8] state)
            => (bool still, float[1,8] next)
            { [mix] mixed = MatMul(state, body_w) [squash] next = Tanh(mixed) [go_on] still = Identity(going) }>
        [last] y = Gemm(s, u, c) }""",
        {"three": 3, "true": True},
    )


def _lstm():
    """A net with states: an LSTM fed and read by linear layers."""
    return planning.parse(
        """(float[5,1,8] x, float[1,1,6] h_in, float[1,1,6] c_in) => (float[5,1,4] y, float[1,1,6] h, float[1,1,6] c)
        <float[8,8] u, float[8] a, float[1,24,8] w, float[1,24,6] r, float[1,48] b, float[6,4] v, float[4] d,
        int64[1] one> { [before] m = MatMul(x, u) [before_bias] n = Add(m, a)
        [lstm] s, h, c = LSTM<hidden_size = 6>(n, w, r, b, "", h_in, c_in) [squeeze] t = Squeeze(s, one)
        [after] o = MatMul(t, v) [after_bias] y = Add(o, d) }""",
        {"one": [1]},
    )


def _half():
    """A float16 net with a float16 interface."""
    return planning.parse(
        """(float16[1,3,8,8] x) => (float16[1,4,8,8] y) <float16[8,3,3,3] w0, float16[4,8,1,1] w1>
        { [conv0] c = Conv<pads = [1, 1, 1, 1]>(x, w0) [relu] r = Relu(c) [conv1] y = Conv(r, w1) }"""
    )


def _functions():
    """Two model-local functions, one calling the other with an attribute."""
    return planning.parse(
        """(float[1,3,8,8] x) => (float[1,4,8,8] y) <float[4,3,1,1] w, float[4,4,1,1] w2>
        { a = Conv(x, w) b = local.block<slope = 0.1>(a) y = Conv(b, w2) }
        <domain: "local", opset_import: ["": 17]> silu (u) => (v) { s = Sigmoid(u) v = Mul(u, s) }
        <domain: "local", opset_import: ["": 17, "local": 1]> block <slope> (p) => (q)
        { r = LeakyRelu<alpha: float = @slope>(p) q = local.silu(r) }""",
        domains=("local",),
        ir_version=8,
    )


def _sparse():
    """A MatMul chain that holds a sparse initializer, Constant nodes, and weights listed as inputs."""
    model = planning.parse(
        """(float[1,8] x, float[8,8] listed) => (float[1,8] y) { [mm] m = MatMul(x, listed)
        [constant] c = Constant<value = float[1,1] {0.3}>() [shift] s = Add(m, c) [relu] r = Relu(s)
        [mm2] y = MatMul(r, sparse_w) }""",
        {"listed": models.normal((8, 8))},
        opset=13,
        ir_version=7,
        checked=False,
    )
    values = numpy_helper.from_array(models.normal((10,), 1), "sparse_w")
    indices = numpy_helper.from_array(np.arange(0, 60, 6, dtype=np.int64), "sparse_w_indices")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [8, 8]))
    return model


def _external():
    """A conv chain whose weights lie in `DATA_NAME`; their content stays in the model for `split_data`."""
    model = models.conv_relu_chain(6)
    offset = 0
    for tensor in model.graph.initializer:
        length = len(tensor.raw_data)
        for key, value in (("location", DATA_NAME), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        offset += length
    return model


SEEDS = {
    "conv": lambda: models.conv_relu_chain(6), "residual": models.residual_block, "bn": models.bn_net,
    "mobile": models.mobile_block, "transformer": models.transformer_block, "linear": lambda: models.mlp(gemm=False),
    "concat": models.concat_net, "detector": _detector, "two_inputs": models.two_input_detector,
    "if": models.net_with_if, "loop": _loop, "lstm": _lstm, "half": _half, "functions": _functions, "sparse": _sparse,
    "external": _external, "quantized": lambda: model_of(None, None), "digits": models.narrow_digits,
}  # fmt: skip


@cache
def seed_bytes(name):
    """A seed model, serialized."""
    return SEEDS[name]().SerializeToString()


def seed_model(name):
    """A fresh copy of a seed model."""
    return onnx.load_model_from_string(seed_bytes(name))


def seed_feeds(name):
    """Feeds that fit the seed model."""
    return models.feeds(seed_model(name), FEEDS, dims={"batch": 2})


def split_data(model):
    """Takes the content of tensors with external entries out of a model, in place; returns the data file."""
    data = bytearray()
    for tensor in model.graph.initializer:
        if tensor.external_data and tensor.HasField("raw_data"):
            data += tensor.raw_data
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
    return bytes(data)
