"""Files as they are made for a target, with what tests ask of them."""

import re

import numpy as np
import onnx
from onnx import numpy_helper

from kenosis_ort import quantize_static
from tests import models
from tests.flow.support import run, sqnr_db
from tests.planning import parse

Q, DQ = "QuantizeLinear", "DequantizeLinear"
CONSTANTS = {
    **{
        name: np.float32(value)
        for name, value in {"zero": 0, "one": 1, "nine": 9, "tiny": 0.02, "least": -3.4e38}.items()
    },
    **{f"ones{count}": np.ones(count, np.float32) for count in (4, 6, 8)},
    **{f"zeros{count}": np.zeros(count, np.float32) for count in (4, 6, 8, 16)},
    **{f"i{value}": np.array([value]) for value in range(4)}, "by": np.full((1, 6, 1, 1), 1.5, np.float32),
    "half": np.full((1, 1, 1, 1), 0.5, np.float32), "channels": np.float32([60, 1, 1, 1, 1, 1]).reshape(1, 6, 1, 1),
    "even": np.tile([True, False], 192).reshape(1, 6, 8, 8), "twice": np.float32([1, 1, 2, 2]),
    "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]), "flat": np.array([1, 72]),
}  # fmt: skip
"""What texts of nets name, beside weights, which are called after their shapes: ``w8_6_3_3``."""


def net_of(body, shape="1,6,8,8", outputs="y", **more):
    """Returns the net of nodes from ``x`` to ``y``; ``more`` are constants beside those here."""
    weights = dict(re.findall(r"\b(w(\d+(?:_\d+)*)[a-z]?)\b", body))
    declared = ", ".join(f"float[{sizes.replace('_', ',')}] {name}" for name, sizes in weights.items())
    held = {name: value for name, value in {**CONSTANTS, **more}.items() if re.search(rf"\b{name}\b", body)}
    head = f"(float[{shape}] x) => ({outputs}) {f'<{declared}>' if declared else ''}"
    return parse(f"{head} {{ {body} }}", held, opset=20, domains=())


def quantized_net(body, shape="1,4,6,6", outputs="y", **more):
    """Likewise, where ``a = Q (b)`` are Q and DQ, and ``q8_3_3_3`` and ``u8_3_3_3`` DQ of int8 and uint8 weights."""
    pair = r"[\1_Q] \1_q = QuantizeLinear (\2, step, middle) [\1_DQ] \1 = DequantizeLinear (\1_q, step, middle)"
    body = re.sub(r"(\w+) = Q \((\w+)\)", pair, body)
    grid = {"step": np.float32(0.05), "middle": np.uint8(128), "nought": np.int8(0)}
    held, draws = {**grid, **more}, np.random.default_rng(0)
    for name, kind, sizes in dict.fromkeys(re.findall(r"\b(([qu])(\d+(?:_\d+)*)[a-z]?)\b", body)):
        dtype, zero = (np.int8, "nought") if kind == "q" else (np.uint8, "middle")
        held[f"{name}_held"] = draws.integers(0, 100, [*map(int, sizes.split("_"))]).astype(dtype)
        body = f"{name} = DequantizeLinear ({name}_held, step, {zero}) {body}"
    return net_of(body, shape, outputs, **held)


class Written:
    """A file for a target, with its report.

    Args:
        model: The float net.
        folder: Where it is written.
        target: Name of the target.
        feeds: Samples; six random ones by default.
        options: Of the call; by default the recipe is plain, and nothing is promised.
    """

    def __init__(self, model, folder, target, *, feeds=(), **options):
        self.source, self.path = model, folder / f"{target}.onnx"
        options = {"recipe": "plain", "promise": False, **options}
        reader = models.FeedReader(feeds or models.feeds(model, 6))
        self.report = quantize_static(model, self.path, reader, target=target, **options)
        self.model = onnx.load(self.path)
        self.nodes = {n.name: n for n in self.model.graph.node}
        self.makers = {v: n for n in self.model.graph.node for v in n.output}
        self.constants = {t.name: numpy_helper.to_array(t) for t in self.model.graph.initializer}

    @property
    def operators(self):
        """The operators of the file in order, Q and DQ left out."""
        return [n.op_type for n in self.model.graph.node if n.op_type not in (Q, DQ)]

    @property
    def grids(self):
        """Scale and zero point of each Q, by the name of what it quantizes."""
        return {
            n.input[0]: (float(self.constants[n.input[1]]), int(self.constants[n.input[2]]))
            for n in self.model.graph.node
            if n.op_type == Q
        }

    @property
    def types(self):
        """The types of activations."""
        return {self.constants[n.input[2]].dtype.name for n in self.model.graph.node if n.op_type == Q}

    def readers(self, name):
        """The operators behind a node."""
        made = set(self.nodes[name].output)
        return sorted(n.op_type for n in self.model.graph.node if made & set(n.input))

    def before(self, name):
        """The operator before each input of a node, "" for graph inputs and constants."""
        makers = [self.makers.get(v) for v in self.nodes[name].input]
        return ["" if maker is None else maker.op_type for maker in makers]

    def decibels(self):
        """The signal of its outputs against the float net's."""
        feeds = models.feeds(self.source, 4)
        return sqnr_db([o[0] for o in run(self.source, feeds)], [o[0] for o in run(self.path, feeds)])
