"""Random small nets for property tests: every operator role, branches, shared weights, bodies, several outputs."""

import numpy as np
from hypothesis import strategies as st
from onnx import TensorProto, helper

from kenosis_ort.graph.walk import captured_names
from tests.models import Net

_CHANNELS, _SIZE = 4, 4
_SHAPE = [1, _CHANNELS, _SIZE, _SIZE]
_BOUNDS = [(0.0, 6.0), (-1.0, 1.0), (0.0, 1.0), (-0.5, 2.0)]


class _Grower:
    """Adds random steps to a net; all values have one shape."""

    def __init__(self, draw, seed):
        self.draw = draw
        self.net = Net(seed=seed)
        self.values = [self.net.input("x", _SHAPE)]
        self.flag: str | None = None
        self.shared: tuple[str, str] | None = None

    def pick(self):
        """Returns a value to read, a late one more often than an early one."""
        return self.draw(st.sampled_from(self.values[-3:] if self.flip() else self.values))

    def flip(self):
        return self.draw(st.booleans())

    def op(self, op_type, *others, **attributes):
        """Adds a node that reads a value and others."""
        return self.net.op(op_type, [self.pick(), *others], **attributes)

    def on(self, value, op_type, *others, **attributes):
        return self.net.op(op_type, [value, *others], **attributes)

    def conv(self, k, **given):
        return self.net.conv(self.pick(), _CHANNELS, _CHANNELS, k=k, **given)

    def shared_conv(self):
        net = self.net
        if self.shared is None:
            w = net.weight((_CHANNELS, _CHANNELS, 1, 1), name="shared_w")
            self.shared = (w, net.const(net.rng.normal(0, 0.1, _CHANNELS), "shared_b"))
        return self.op("Conv", *self.shared, kernel_shape=[1, 1])

    def concat(self):
        both = self.op("Concat", self.pick(), axis=1)
        if self.flip():
            return self.net.conv(both, 2 * _CHANNELS, _CHANNELS, k=1)
        return self.on(both, "Slice", *(np.array([v]) for v in (1, _CHANNELS + 1, 1)))

    def split(self):
        first = self.op("Split", np.array([2, 2]), outputs=2, axis=1)
        return self.on(f"{first}_1", "Concat", first, axis=1)

    def branches(self):
        if self.flag is None:
            self.flag = self.net.input("flag", [], TensorProto.BOOL)
        name, captured = f"if_{len(self.net.nodes)}", self.pick()

        def branch(label, op_type):
            out = f"{name}_{label}"
            node = helper.make_node(op_type, [captured], [out], name=f"{out}_node")
            return helper.make_graph([node], out, [], [helper.make_tensor_value_info(out, TensorProto.FLOAT, _SHAPE)])

        bodies = {"then_branch": branch("then", "Tanh"), "else_branch": branch("else", "Neg")}
        return self.net.op("If", [self.flag], name=name, **bodies)


_POOL = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
_STEPS = {
    "conv": lambda g: g.conv(g.draw(st.sampled_from([1, 3])), bias=g.flip()),
    "depthwise": lambda g: g.conv(3, groups=_CHANNELS), "shared_conv": _Grower.shared_conv,
    "relu": lambda g: g.op("Relu"), "clip": lambda g: g.op("Clip", *g.draw(st.sampled_from(_BOUNDS))),
    "far_clip": lambda g: g.op("Clip", 0.25, 3.0), "sigmoid": lambda g: g.op("Sigmoid"),
    "leaky": lambda g: g.op("LeakyRelu", alpha=0.1), "tanh": lambda g: g.op("Tanh"),
    "hardswish": lambda g: g.op("HardSwish"), "add": lambda g: g.op("Add", g.pick()),
    "sub": lambda g: g.op("Sub", g.pick()), "mul": lambda g: g.op("Mul", g.pick()),
    "add_scalar": lambda g: g.on(g.net.const(g.draw(st.sampled_from([0.5, -2.0]))), "Add", g.pick()),
    "mul_scalar": lambda g: g.op("Mul", np.array([0.5])),
    "mul_vector": lambda g: g.op("Mul", g.net.rng.uniform(0.5, 1.5, (1, _CHANNELS, 1, 1))), "concat": _Grower.concat,
    "maxpool": lambda g: g.op("MaxPool", **_POOL), "averagepool": lambda g: g.op("AveragePool", **_POOL),
    "transpose_twice": lambda g: g.on(g.op("Transpose", perm=[0, 2, 3, 1]), "Transpose", perm=[0, 3, 1, 2]),
    "reshape_twice": lambda g: g.on(g.op("Reshape", np.array([1, -1])), "Reshape", np.array(_SHAPE)),
    "resize": lambda g: g.on(
        g.op("Resize", "", [1.0, 1.0, 2.0, 2.0], mode="nearest"), "MaxPool", kernel_shape=[2, 2], strides=[2, 2]),
    "split": _Grower.split, "softmax": lambda g: g.op("Softmax", axis=1),
    "norm": lambda g: g.op("LayerNormalization", np.ones(_SIZE), np.zeros(_SIZE), axis=-1), "if": _Grower.branches,
    "linear": lambda g: g.net.linear(g.pick(), _SIZE, _SIZE, bias=g.flip()),
}  # fmt: skip
_OFTEN = ("conv", "conv", "relu", "add")


@st.composite
def nets(draw, max_steps=10):
    """Draws a model of at least one Conv; what nothing reads is an output, and some other values are too."""
    grower = _Grower(draw, draw(st.integers(0, 2**16)))
    for kind in ("conv", *draw(st.lists(st.sampled_from([*_STEPS, *_OFTEN]), min_size=1, max_size=max_steps))):
        grower.values.append(_STEPS[kind](grower))
    read = {name for node in grower.net.nodes for name in (*node.input, *captured_names(node))}
    ends = [v for v in grower.values[1:] if v not in read]
    outputs = {*ends, *draw(st.lists(st.sampled_from(grower.values[1:]), max_size=1))}
    for name in sorted(outputs):
        grower.net.output(name, _SHAPE)
    return grower.net.model("random_net")
