"""Random small nets for property tests: every operator role, branches, shared weights, bodies, several outputs."""

from __future__ import annotations

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper

from kenosis_ort.graph.walk import captured_names
from tests.models import Net

_CHANNELS, _SIZE = 4, 4
_SHAPE = [1, _CHANNELS, _SIZE, _SIZE]
_STEPS = (
    "conv", "conv", "conv", "depthwise", "shared_conv", "relu", "relu", "clip", "far_clip", "sigmoid", "leaky", "tanh",
    "hardswish", "add", "add", "mul", "add_scalar", "mul_scalar", "mul_vector", "concat", "maxpool", "averagepool",
    "transpose_twice", "reshape_twice", "resize", "split", "softmax", "norm", "if", "linear", "sub",
)  # fmt: skip


class _Grower:
    """Adds random steps to a net; all values have one shape."""

    def __init__(self, draw: st.DrawFn, seed: int) -> None:
        self.draw = draw
        self.net = Net(seed=seed)
        self.values = [self.net.input("x", _SHAPE)]
        self.flag: str | None = None
        self.shared: tuple[str, str] | None = None

    def pick(self) -> str:
        """Returns a value to read, a late one more often than an early one."""
        late = self.values[-3:]
        return self.draw(st.sampled_from(late if self.draw(st.booleans()) else self.values))

    def step(self, kind: str) -> None:
        self.values.append(getattr(self, f"_{kind}")())

    def _conv(self) -> str:
        k = self.draw(st.sampled_from([1, 3]))
        return self.net.conv(self.pick(), _CHANNELS, _CHANNELS, k=k, bias=self.draw(st.booleans()))

    def _depthwise(self) -> str:
        return self.net.conv(self.pick(), _CHANNELS, _CHANNELS, groups=_CHANNELS)

    def _shared_conv(self) -> str:
        net = self.net
        if self.shared is None:
            w = net.weight((_CHANNELS, _CHANNELS, 1, 1), name="shared_w")
            self.shared = (w, net.const(net.rng.normal(0, 0.1, _CHANNELS), "shared_b"))
        return net.op("Conv", [self.pick(), *self.shared], kernel_shape=[1, 1])

    def _relu(self) -> str:
        return self.net.op("Relu", [self.pick()])

    def _clip(self) -> str:
        bounds = self.draw(st.sampled_from([(0.0, 6.0), (-1.0, 1.0), (0.0, 1.0), (-0.5, 2.0)]))
        return self.net.op("Clip", [self.pick(), *(self.net.const(b) for b in bounds)])

    def _far_clip(self) -> str:
        return self.net.op("Clip", [self.pick(), self.net.const(0.25), self.net.const(3.0)])

    def _sigmoid(self) -> str:
        return self.net.op("Sigmoid", [self.pick()])

    def _leaky(self) -> str:
        return self.net.op("LeakyRelu", [self.pick()], alpha=0.1)

    def _tanh(self) -> str:
        return self.net.op("Tanh", [self.pick()])

    def _hardswish(self) -> str:
        return self.net.op("HardSwish", [self.pick()])

    def _add(self) -> str:
        return self.net.op("Add", [self.pick(), self.pick()])

    def _sub(self) -> str:
        return self.net.op("Sub", [self.pick(), self.pick()])

    def _mul(self) -> str:
        return self.net.op("Mul", [self.pick(), self.pick()])

    def _add_scalar(self) -> str:
        value = self.net.const(self.draw(st.sampled_from([0.5, -2.0])))
        return self.net.op("Add", [value, self.pick()])

    def _mul_scalar(self) -> str:
        return self.net.op("Mul", [self.pick(), self.net.const(np.array([0.5]))])

    def _mul_vector(self) -> str:
        return self.net.op("Mul", [self.pick(), self.net.const(self.net.rng.uniform(0.5, 1.5, (1, _CHANNELS, 1, 1)))])

    def _concat(self) -> str:
        net = self.net
        both = net.op("Concat", [self.pick(), self.pick()], axis=1)
        return net.conv(both, 2 * _CHANNELS, _CHANNELS, k=1) if self.draw(st.booleans()) else self._half(both)

    def _half(self, wide: str) -> str:
        net = self.net
        bounds = [net.const(np.array([v])) for v in (1, _CHANNELS + 1, 1)]
        return net.op("Slice", [wide, *bounds])

    def _maxpool(self) -> str:
        return self.net.op("MaxPool", [self.pick()], kernel_shape=[3, 3], pads=[1, 1, 1, 1])

    def _averagepool(self) -> str:
        return self.net.op("AveragePool", [self.pick()], kernel_shape=[3, 3], pads=[1, 1, 1, 1])

    def _transpose_twice(self) -> str:
        once = self.net.op("Transpose", [self.pick()], perm=[0, 2, 3, 1])
        return self.net.op("Transpose", [once], perm=[0, 3, 1, 2])

    def _reshape_twice(self) -> str:
        net = self.net
        flat = net.op("Reshape", [self.pick(), net.const(np.array([1, -1]))])
        return net.op("Reshape", [flat, net.const(np.array(_SHAPE))])

    def _resize(self) -> str:
        net = self.net
        up = net.op("Resize", [self.pick(), "", net.const([1.0, 1.0, 2.0, 2.0])], mode="nearest")
        return net.op("MaxPool", [up], kernel_shape=[2, 2], strides=[2, 2])

    def _split(self) -> str:
        net = self.net
        first = net.op("Split", [self.pick(), net.const(np.array([2, 2]))], outputs=2, axis=1)
        return net.op("Concat", [f"{first}_1", first], axis=1)

    def _softmax(self) -> str:
        return self.net.op("Softmax", [self.pick()], axis=1)

    def _norm(self) -> str:
        net = self.net
        gamma, beta = net.const(np.ones(_SIZE)), net.const(np.zeros(_SIZE))
        return net.op("LayerNormalization", [self.pick(), gamma, beta], axis=-1)

    def _linear(self) -> str:
        return self.net.linear(self.pick(), _SIZE, _SIZE, bias=self.draw(st.booleans()))

    def _if(self) -> str:
        net = self.net
        if self.flag is None:
            self.flag = net.input("flag", [], TensorProto.BOOL)
        name = f"if_{len(net.nodes)}"
        captured = self.pick()

        def branch(label: str, op_type: str) -> onnx.GraphProto:
            out = f"{name}_{label}"
            node = helper.make_node(op_type, [captured], [out], name=f"{out}_node")
            return helper.make_graph([node], out, [], [helper.make_tensor_value_info(out, TensorProto.FLOAT, _SHAPE)])

        return net.op(
            "If", [self.flag], name=name, then_branch=branch("then", "Tanh"), else_branch=branch("else", "Neg")
        )


@st.composite
def nets(draw: st.DrawFn, max_steps: int = 10) -> onnx.ModelProto:
    """Draws a model of at least one Conv; what nothing reads is an output, and some other values are too."""
    grower = _Grower(draw, draw(st.integers(0, 2**16)))
    grower.step("conv")
    for kind in draw(st.lists(st.sampled_from(_STEPS), min_size=1, max_size=max_steps)):
        grower.step(kind)
    read = {name for node in grower.net.nodes for name in (*node.input, *captured_names(node))}
    ends = [v for v in grower.values[1:] if v not in read]
    outputs = {*ends, *draw(st.lists(st.sampled_from(grower.values[1:]), max_size=1))}
    for name in sorted(outputs):
        grower.net.output(name, _SHAPE)
    return grower.net.model("random_net")
