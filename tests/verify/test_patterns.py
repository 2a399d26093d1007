"""Every clause of oneDNN's quantized Convolution patterns, kept and broken."""

import re

import numpy as np
import pytest
from hypothesis import given, strategies as st
from onnx import TensorProto, helper

import kenosis_ort
from kenosis_ort.errors import ModelLoadError, OptionError
from kenosis_ort.verify import Clause, verify_patterns
from tests import planning
from tests.models import Net


def read(model):
    """Returns the only Conv's entry."""
    (found,) = verify_patterns(model, target="onednn").convs
    return found


# ---- the pattern ------------------------------------------------------------------------------------------------

UNARY = (
    "Abs", "Clip", "Elu", "Exp", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Log", "Mish", "Relu", "Round",
    "Sigmoid", "Softplus", "Sqrt", "Tanh",
)  # fmt: skip
BINARY = ("Add", "Sub", "Max", "Min", "Mul", "Div")
TYPES = {"u8": np.uint8(128), "s8": np.int8(0), "u16": np.uint16(0), "s16": np.int16(0)}
HELD = np.random.default_rng(0).integers(0, 100, (4, 4, 3, 3))
CONSTANTS = {
    **TYPES, **{f"held_{name}": HELD.astype(zero.dtype) for name, zero in TYPES.items()}, "step": np.float32(0.05),
    "half": np.full((1, 1, 1, 1), 0.5, np.float32), "zeros": np.zeros(4, np.float32), "zeros64": np.zeros(4),
    "zeros32": np.zeros(4, np.int32), "s32": np.int32(0), "ones16": np.ones((4, 4, 3, 3), np.float16),
    "step16": np.float16(0.05), "add": np.zeros((1, 4, 1, 1), np.float32),
}  # fmt: skip
WEIGHT = "w = DequantizeLinear (held_s8, step, s8)"


def conv(epilogue="", *, src="a = u8 (x)", weight=WEIGHT, bias="zeros", dst="y = u8 (LAST)", outputs="y", **more):
    """A Conv, quantized as the document wants it but for what is given as nodes; a type's name is Q and DQ of it.

    The Conv reads the last value of ``src``, of ``weight`` and of ``bias`` and writes ``c``; ``LAST`` is the last value
    of the epilogue. What is one name is that value.
    """

    def last(text):
        return re.findall(r"(\w+) = ", re.sub("<.*?>", "", text))[-1] if " = " in text else text

    reads = ", ".join(filter(None, map(last, (src, weight, bias))))
    made = " ".join(text for text in (src, weight, bias) if " = " in text)
    ended = dst.replace("LAST", last(epilogue) or "c")
    body = f"{made} [conv] c = Conv <pads = [1,1,1,1]> ({reads}) {epilogue} {ended}"
    pair = r"\1_q = QuantizeLinear (\3, step, \2) \1 = DequantizeLinear (\1_q, step, \2)"
    body = re.sub(rf"(\w+) = ({'|'.join(TYPES)}) \((\w+)\)", pair, body)
    held = {name: value for name, value in {**CONSTANTS, **more}.items() if re.search(rf"\b{name}\b", body)}
    text = f"(float[1,4,6,6] x) => ({outputs}) <float[4,4,3,3] weights> {{ {body} }}"
    return planning.parse(text, held, opset=20, domains=(), checked=False)


def chain(*ops, start="c"):
    """Operations, one behind the other."""
    names = [start, *(f"{start}{at}" for at in range(len(ops)))]
    return " ".join(
        f"{made} = {op} ({read}{', half' if op in BINARY else ''})"
        for op, read, made in zip(ops, names, names[1:], strict=False)
    )


SILU = "s = Sigmoid (c) e = Mul (c, s)"
FOUR = ("Relu", "Mul", "Tanh", "Abs")
BIAS_ADD = "b = Add (add, c)"
TWO_ADDS = f"{BIAS_ADD} d = Add (add, b)"
WHOLE = {
    "nothing": (conv(), (), "u8", ""), **{op: (conv(chain(op)), (None,), "u8", "") for op in (*UNARY, *BINARY)},
    "SiLU is two": (conv(SILU), ("Sigmoid", "Multiply"), "u8", ""),
    "Mish spelled out is three": (conv("p = Softplus (c) t = Tanh (p) e = Mul (t, c)"),
                                  ("SoftPlus", "Tanh", "Multiply"), "u8", ""),
    "a residual Add is binary": (conv("r = u8 (x) s = Add (r, c) e = Relu (s)"), ("Add", "ReLU"), "u8", ""),
    # A BiasAdd comes first, once, does not count, and holds one number a channel.
    "BiasAdd": (conv(f"{BIAS_ADD} {chain(*FOUR, start='b')}", bias=""),
                ("BiasAdd", "ReLU", "Multiply", "Tanh", "Abs"), "u8", ""),
    "with a bias": (conv(TWO_ADDS), ("Add", "Add"), "u8", ""),
    "without": (conv(TWO_ADDS, bias=""), ("BiasAdd", "Add"), "u8", ""),
    **{
        f"an Add of {shape}": (conv(BIAS_ADD, bias="", add=np.zeros(shape, np.float32)), ("Add",), "u8", "")
        for shape in ((1, 1, 1, 1), (1, 1, 6, 6), (4,), (1, 4, 6, 6), (1, 1, 4, 1, 1))
    },
    # Where it ends, in floating point or at a Quantize.
    "a second reader": (conv("e = Relu (c) t = Tanh (e)", dst="y = u8 (e)", outputs="y, t"),
                        ("ReLU",), "f32", "2 readers"),
    "three readers": (conv("e = Relu (c) t = Tanh (e) u = Abs (e)", dst="y = u8 (e)", outputs="y, t, u"),
                      ("ReLU",), "f32", "3 readers"),
    "a Cast to integers": (conv(dst="y = Cast <to = 6> (c)"), (), "f32", "Cast"),
    "an output of the graph": (conv("e = Relu (c)", outputs="y, c"), (), "f32", "output of the graph"),
    "another operator": (conv("e = Selu (c)"), (), "f32", "Selu"),
    "a Max of three": (conv("e = Max (c, x, x)"), (), "f32", "Max"),
    "an operand that is no data": (conv("p = u8 (x) m = ReduceMin <keepdims = 0> (c) e = Clip (p, m)"),
                                   (), "f32", "ReduceMin"),
    "a Quantize in between": (conv("q = u8 (c) e = Relu (q)"), (), "u8", ""),
    "float": (conv(dst="", outputs="c"), (), "f32", ""), "int8": (conv(dst="y = s8 (c)"), (), "s8", ""),
    "a TypeCast": (conv(dst="y = Cast <to = 10> (c)"), (), "f16", ""), "no bias": (conv(bias=""), (), "u8", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_instances_of_the_pattern(name):
    model, epilogue, dst, ends = WHOLE[name]
    found = read(model)
    assert found.matches, str(found)
    assert epilogue in (found.epilogue, (None,) * len(found.epilogue))
    assert (found.dst, ends in found.ends, bool(found.ends)) == (dst, True, bool(ends))


@given(st.lists(st.sampled_from(UNARY + BINARY), max_size=7))
def test_nought_to_four_operations(ops):
    found = read(conv(chain(*ops)))
    assert len(found.epilogue) == len(ops)
    assert [b.clause for b in found.broken] == ([Clause.EPILOGUE] if len(ops) > 4 else [])


def test_a_circle_of_nodes_is_left():
    model = conv("s = Add (c, x) r = Relu (s)")
    del model.graph.node[-2:]
    model.graph.node[-2].input[1] = "r"
    assert read(model).epilogue == ("Add", "ReLU")


# ---- the clauses, broken ----------------------------------------------------------------------------------------

INT32_BIAS = "b = DequantizeLinear (zeros32, step, s32)"


def in_type(to, epilogue=""):
    """A Conv that computes in a type, with a TypeCast to float32 before its Quantize."""
    src, weight = f"p = u8 (x) a = Cast <to = {to}> (p)", f"{WEIGHT} v = Cast <to = {to}> (w)"
    return conv(epilogue, src=src, weight=weight, bias="", dst="f = Cast <to = 1> (LAST) y = u8 (f)")


def of_other_form(*, op_type="Conv", inputs=3):
    model = conv()
    node = next(n for n in model.graph.node if n.op_type == "Conv")
    node.op_type = op_type
    del node.input[inputs:]
    return model


BROKEN = [
    (conv(src="x"), Clause.SRC_CONVERSION), (conv(src="p = u8 (x) a = Relu (p)"), Clause.SRC_CONVERSION),
    (conv(src="a = u16 (x)"), Clause.SRC_TYPE), (conv(weight="weights"), Clause.WEIGHTS_CONVERSION),
    (conv(weight="k = Clip (held_s8) w = DequantizeLinear (k, step, s8)"), Clause.WEIGHTS_CONVERSION),
    (conv(weight="w = DequantizeLinear (held_u8, step, u8)"), Clause.WEIGHTS_TYPE),
    (conv(weight="w = DequantizeLinear (held_s16, step, s16)"), Clause.WEIGHTS_TYPE),
    (conv(weight="w = u8 (weights)"), Clause.WEIGHTS_TYPE),
    (conv(weight="q = QuantizeLinear (ones16, step16, s8) w = DequantizeLinear (q, step, s8)"), Clause.WEIGHTS_TYPE),
    (conv(bias=INT32_BIAS), Clause.BIAS_CONVERSION), (conv(bias="zeros64"), Clause.BIAS_TYPE),
    (conv(f"{chain(*FOUR)} b = Add (add, c3)", bias=""), Clause.EPILOGUE), (conv(dst="y = u16 (c)"), Clause.DST_TYPE),
    (conv(dst="y = Cast <to = 11> (c)"), Clause.DST_TYPE),
    (conv(chain(*FOUR, *FOUR), src="a = s16 (x)", bias=INT32_BIAS, weight="weights", dst="y = s16 (LAST)"),
     [Clause.SRC_TYPE, Clause.WEIGHTS_CONVERSION, Clause.BIAS_CONVERSION, Clause.EPILOGUE, Clause.DST_TYPE]),
    (in_type(TensorProto.FLOAT16), Clause.DST_CONVERSION), (of_other_form(op_type="QLinearConv"), Clause.CONVOLUTION),
    (of_other_form(inputs=1), Clause.CONVOLUTION),
]  # fmt: skip


@pytest.mark.parametrize(("model", "clause"), BROKEN)
def test_broken_clauses(model, clause):
    found = read(model)
    clauses = clause if isinstance(clause, list) else [clause]
    assert ([b.clause for b in found.broken], found.matches) == (clauses, False)


def test_types_that_the_text_has():
    assert read(conv(src="a = s8 (x)")).src == "s8"
    quantized = read(conv(weight="w = s8 (weights)"))
    assert (quantized.matches, quantized.weights) == (True, "f32")
    other = read(in_type(TensorProto.BFLOAT16, "o = Cast <to = 16> (add) b = Add (o, c)"))
    assert (other.matches, other.dst, other.epilogue) == (True, "u8", ("BiasAdd",))
    to = f"Cast <to = {TensorProto.BFLOAT16}>"
    weight, bias = f"{WEIGHT} v = {to} (w)", f"b = {to} (zeros)"
    casts = read(conv(src=f"p = u8 (x) a = {to} (p)", weight=weight, bias=bias, dst="", outputs="c"))
    assert (casts.matches, casts.src, casts.weights, casts.bias, casts.dst) == (True, "u8", "s8", "f32", "bf16")


# ---- the report -------------------------------------------------------------------------------------------------


def test_what_the_report_says():
    report = kenosis_ort.verify_patterns(conv(SILU).SerializeToString())
    assert (report.conforms, "1 of 1 Convs match" in report.verdict()) == (True, True)
    assert "u8 * s8 + f32 -> Sigmoid, Multiply -> u8" in str(report)
    assert (read(conv()).node, read(conv()).pattern) == ("conv", "u8 * s8 + f32 -> u8")
    worse = verify_patterns(conv(src="x"))
    assert (worse.conforms, "src-conversion 1x" in worse.verdict()) == (False, True)
    assert worse.to_dict()["convs"][0]["broken"][0]["clause"] == "src-conversion"


def test_convs_of_bodies_are_read_too():
    net = Net.over((1, 4, 6, 6), opset=20)
    bodies = {f"{name}_branch": conv().graph for name in ("then", "else")}
    for body in bodies.values():
        del body.input[:]
    net.op("If", [net.input("flag", [], TensorProto.BOOL)], name="if", out="y", **bodies)
    model = helper.make_model(net.graph(), opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    assert {c.graph for c in verify_patterns(model).convs} == {"if.then_branch", "if.else_branch"}


def test_what_is_refused():
    with pytest.raises(OptionError, match="onednn"):
        verify_patterns(conv(), target="onedn")
    with pytest.raises(ModelLoadError):
        verify_patterns(b"no model")
