"""Nets whose layers are in bodies of control flow."""

import numpy as np
import onnx

from tests.models import Net
from tests.planning import parse


def layer(net, x, channels, out):
    return net.op("Relu", [net.op("Conv", [x, net.weight((out, channels, 3, 3)), np.zeros(out)], pads=[1] * 4)])


def two_rates(*, stored=False, outside=False, nested=False):
    """An If on a sample rate with a whole net in both branches, as in voice activity detectors.

    Args:
        stored: Weights are initializers of the branches, else Constant nodes.
        outside: A Conv in front of the If, whose Relu the branches read, and a weight that both read.
        nested: Another If in the first branch.
    """
    main = Net(tag="m_")
    x, channels = main.input("x", ["N", 3, 16, 16]), 16 if outside else 3
    main.input("rate", [], onnx.TensorProto.INT64)
    x = layer(main, x, 3, 16) if outside else x
    shared = main.weight((16, channels, 3, 3)) if outside else ""
    branches = []
    for tag in ("then", "else"):
        part = Net(tag=f"{tag}_", seed=main.rng, stored=stored)
        y = part.op("Relu", [part.op("Conv", [x, shared], pads=[1] * 4)]) if outside else layer(part, x, channels, 16)
        if nested and tag == "then":
            y = inner_if(part, y)
        y = part.op("Flatten", [part.op("GlobalAveragePool", [layer(part, y, 16, 16)])])
        part.output(part.op("Gemm", [y, part.weight((16, 8)), part.rng.normal(size=8)]), ["N", 8])
        branches.append(part.graph(tag))
    condition = main.op("Equal", ["rate", np.array(16000, np.int64)])
    main.output(main.op("If", [condition], then_branch=branches[0], else_branch=branches[1]), ["N", 8])
    return main.model(ir_version=8)


def inner_if(part, x):
    """An If that takes its first branch where the mean is positive."""
    made = []
    for tag in ("inner", "other"):
        inner = Net(tag=f"{part.tag}{tag}_", seed=part.rng)
        inner.output(layer(inner, x, 16, 16))
        made.append(inner.graph(tag))
    condition = part.op("Greater", [part.op("ReduceMean", [x], keepdims=0), np.array(0, np.float32)])
    return part.op("If", [condition], then_branch=made[0], else_branch=made[1])


def loop(steps=None):
    """A Loop around MatMuls whose state grows with the iterations; its weights are outside.

    Args:
        steps: A constant number of iterations; None reads it from an input.
    """
    fed, held = (", int64 n", "") if steps is None else ("", f", int64 n = {{{steps}}}")
    text = f"""net (float[N,32] x{fed}) => (float[N,32] grown, float[T,N,24] each)
        <float[32,24] outer, float[32,32] beside, float[32,32] w, float up = {{1.2}}{held}> {{
        grown, each = Loop (n, , x) <body = step (int64 i, bool go, float[] state)
            => (bool on, float[] next, float[N,24] scanned) {{
            m = MatMul (state, w)  r = Relu (m)  y = Add (r, x)  next = Mul (y, up)  on = Identity (go)
            b = MatMul (x, beside)  s = Add (y, b)  scanned = MatMul (s, outer) }}> }}"""
    return parse(text, ir_version=8)


def scan():
    """A Scan over the rows of a matrix, backwards, with a recurrent layer."""
    text = """net (float[1,6,24] x) => (float[1,24] last, float[T,1,24] each)
        <float[24,24] u, float[24,24] v, float[1,24] first> {
        last, each = Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_input_directions = [1],
        body = step (float[1,24] h, float[1,24] row) => (float[1,24] new, float[1,24] out) {  a = MatMul (h, u)
        b = MatMul (row, v)  c = Add (a, b)  new = Tanh (c)  out = Identity (new) }>  (first, x) }"""
    return parse(text, ir_version=8)
