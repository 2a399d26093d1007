"""What every format has to hold: it runs as the QDQ form does and comes back; what it cannot say is refused."""

from collections import Counter
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest

from kenosis_ort.errors import KenosisError, ModelLoadError, UnsupportedModelError
from kenosis_ort.formats import conventions, qonnx_nodes, to_qop
from kenosis_ort.formats.runtime_form import to_runtime_form
from kenosis_ort.formats.tensors import quantizers_of
from kenosis_ort.graph.outside import copy_model
from kenosis_ort.interop import read_model
from tests import models, planning
from tests.formats.qonnx import DOMAIN, X86, Net, conv_net, model_of, operators, run


class Format(NamedTuple):
    """One format.

    Attributes:
        write: Makes it of a canonical model, of the integer kernels' form where the runtime executes it as it stands.
        read_as: What the reader calls it.
        steps: By how many steps of an output results may differ from the QDQ form's.
    """

    write: Any
    read_as: tuple[str, ...]
    steps: float = 0.0


FORMATS = {
    "qdq": Format(copy_model, ("qdq", "qcdq")), "qcdq": Format(conventions.to_qcdq, ("qdq", "qcdq")),
    "qonnx": Format(conventions.to_qonnx, ("qonnx",)),
    "qop-clip": Format(lambda model: to_qop.to_qop(to_runtime_form(copy_model(model), X86), clip=True), ("qop",), 1.01),
}  # fmt: skip
EXAMPLES = {
    **{f"conv_net{kind}": lambda kind=kind: read_model(conv_net(**kind)).canonical
       for kind in ({}, {"signed": True}, {"bits": 2, "norm": True}, {"bits": 8}, {"bits": 8, "bias": False})},
    **{name: lambda name=name: planning.quantize(models.ALL[name](), protect_outputs="int8").quantized
       for name in ("residual_block", "mobile_block", "mlp_matmul", "transformer_block")},
}  # fmt: skip
each_format = pytest.mark.parametrize("form", FORMATS)
each_example = pytest.mark.parametrize("example", EXAMPLES)
canonical = cache(lambda example: EXAMPLES[example]())


def written(form, example):
    return FORMATS[form].write(canonical(example))


def outputs(model, example, *, optimize=False):
    (feed,) = models.feeds(canonical(example), 1, dims={"batch": 2})
    return run(qonnx_nodes.spell_out(model), feed, optimize=optimize)


def check_close(found, wanted, example, steps):
    step = max(float(t.quantizer.scale.max()) for t in quantizers_of(canonical(example)) if t.constant is None)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=max(steps * step, 1e-5))


def grids(model):
    """What is said of each quantized tensor but biases, without names; what several DQs say of one tensor once."""
    found = {}
    for t in quantizers_of(model):
        q = t.quantizer
        content = None if t.constant is None else onnx.numpy_helper.to_array(t.constant).tobytes()
        said = (q.scale.tobytes(), str(q.zero_point.tolist()), q.axis, q.signed, q.narrow and bool(content), q.bits)
        if q.bits <= 8:
            found[t.integers] = (*said, content)
    return Counter(found.values())


@each_format
@each_example
def test_what_is_written_runs_as_the_qdq_form_and_changes_nothing(form, example):
    source, steps = canonical(example), FORMATS[form].steps
    before = source.SerializeToString()
    made = written(form, example)
    assert source.SerializeToString() == before
    onnx.checker.check_model(qonnx_nodes.spell_out(made))
    check_close(outputs(made, example), outputs(source, example, optimize=bool(steps)), example, steps)
    for kind in ("input", "output"):
        assert [v.name for v in getattr(made.graph, kind)] == [v.name for v in getattr(source.graph, kind)]


@each_format
@each_example
def test_what_is_written_comes_back(form, example):
    made = written(form, example)
    if "MatMulIntegerToFloat" in operators(made):
        pytest.skip("its output has no scale")
    found = read_model(made)
    assert found.format in FORMATS[form].read_as
    assert not {node.domain for node in found.canonical.graph.node} - {"", "com.microsoft"}
    check_close(outputs(found.canonical, example), outputs(made, example), example, FORMATS[form].steps)
    if form.startswith("qop"):
        activations = {t.quantizer.scale.tobytes() for t in quantizers_of(canonical(example)) if t.quantize}
        assert {t.quantizer.scale.tobytes() for t in quantizers_of(found.canonical) if t.quantize} <= activations
    else:
        assert grids(found.canonical) == grids(read_model(canonical(example)).canonical)
    again = FORMATS[form].write(found.canonical)
    check_close(outputs(again, example), outputs(made, example), example, FORMATS[form].steps)
    assert operators(again) == operators(FORMATS[form].write(read_model(again).canonical))


@each_format
def test_the_float_model_behind_it_has_no_integers(form):
    found = read_model(written(form, "residual_block"), as_float=True).canonical
    assert not {t.data_type for t in found.graph.initializer} & {onnx.TensorProto.INT8, onnx.TensorProto.UINT8}
    assert not any("Quant" in node.op_type or "QLinear" in node.op_type for node in found.graph.node)


# ---- what cannot be said --------------------------------------------------------------------------------------------


def quant(change=lambda node: None, **said):
    net = Net()
    model = net.of(net.quant("x", **{"scale": 0.1, "out": "y", **said}))
    change(model.graph.node[0])
    return model


def without(name):
    return lambda node: node.attribute.remove(next(a for a in node.attribute if a.name == name))


def as_type(op_type):
    return lambda node: setattr(node, "op_type", op_type)


def of(build):
    net = Net()
    return net.of(build(net))


def in_a_body():
    net, inner = Net(), quant().graph
    net.domains.add(DOMAIN)
    body = onnx.helper.make_graph(inner.node, "body", [], inner.output)
    return net.of(net.op("If", [np.asarray(True)], name="branch", out="y", then_branch=body, else_branch=body))


def from_data(node, kind):
    text = f"(float[2,3,6,6] x) => ({kind} y) {{ q = QuantizeLinear (x, s, z)\n {node} }}"
    constants = {"s": np.float32(0.05), "z": np.uint8(120), "w": np.ones((6, 4), np.uint8), "r": np.ones(6, np.float32)}
    return planning.parse(text, constants)


READ = {
    "bit width 0": (quant(bits=0), "bit width 0"), "bit width 300": (quant(bits=300), "bit width 300"),
    "bit width nan": (quant(bits=float("nan")), "bit width"),
    "fractional bit width": (quant(bits=3.5), "no whole number"),
    "bit width by channel": (quant(bits=[[[2.0]], [[3.0]], [[4.0]]]), "differs by channel"),
    "1 bit": (quant(bits=1), "1 bit"), "16 bits": (quant(bits=16), "16 bits"),
    "scale 0": (quant(scale=0.0), "above zero"), "negative scale": (quant(scale=-0.5), "above zero"),
    "scale inf": (quant(scale=float("inf")), "finite"),
    "scale by group": (quant(scale=np.full((3, 6, 1), 0.1)), "by group"),
    "scale of another channel count": (quant(scale=np.full((5, 1, 1), 0.1)), ""),
    "scale of too many dimensions": (quant(scale=np.full((1, 1, 1, 1, 1), 0.1)), "does not fit"),
    "scale larger than its constant": (
        of(lambda net: net.op("Add", ["x", net.quant(np.ones((3, 1, 1)), np.full((3, 1, 6), 0.1))])), "does not fit"),
    "zero point outside": (quant(zero_point=300.0, bits=8, signed=0), "zero point 300"),
    "negative zero point of unsigned integers": (quant(zero_point=-1.0, signed=0), "zero point -1"),
    "fractional zero point": (quant(zero_point=0.5), "whole number"),
    "zero point nan": (quant(zero_point=float("nan")), "not finite"),
    "rounding of data": (quant(rounding_mode="FLOOR"), "FLOOR.* Fix: export it with rounding_mode ROUND"),
    "unknown rounding": (quant(rounding_mode="STOCHASTIC"), "STOCHASTIC"),
    "no zero point": (quant(lambda node: node.input.__setitem__(2, "")), "3 inputs; it takes 4"),
    "no bit width": (quant(lambda node: node.input.pop()), "3 inputs; it takes 4"),
    "no attribute signed": (quant(without("signed")), "'signed'"), "signed is 2": (quant(signed=2), "neither 0 nor 1"),
    "scale from data": (of(lambda net: net.quant("x", net.op("ReduceMax", ["x"], keepdims=1))),
                        "computed from data.* Fix: export it with static"),
    "minifloats": (quant(as_type("FloatQuant")), "known are BipolarQuant.*FloatQuant"),
    "thresholds": (quant(as_type("MultiThreshold")), "known are BipolarQuant.*MultiThreshold"),
    "in a body": (in_a_body(), "body of control flow"),
    "a value made twice": (of(lambda net: net.quant(net.quant("x", 0.1, out="y"), 0.1, out="y")), "read.*Fix: Export"),
    "integers of a scale by row": (from_data("y = QLinearMatMul (q, s, z, w, s, z, r, z)", "uint8[2,3,6,4]"),
                                   "one number is wanted.*QLinearMatMul"),
    "products of integers": (from_data("y = MatMulInteger (q, w)", "int32[2,3,6,4]"), "scales computed.*MatMulInteger"),
    "scales of each run": (from_data("y, t, u = DynamicQuantizeLinear (x)", "uint8[2,3,6,6]"), "Fix: quantize the"),
}  # fmt: skip


@pytest.mark.parametrize("case", READ)
def test_what_cannot_be_read_is_refused_with_node_and_clause(case):
    model, clause = READ[case]
    before = model.SerializeToString()
    with pytest.raises(KenosisError, match=clause or ".") as refused:
        read_model(model)
    assert isinstance(refused.value, (UnsupportedModelError, ModelLoadError))
    if clause:
        assert "node '" in str(refused.value)
    assert model.SerializeToString() == before


def test_what_cannot_be_written_is_refused_with_node_and_fix():
    with pytest.raises(UnsupportedModelError, match=r"'x' has 4.*node 'dq'.*Fix: write format='qop-clip'"):
        to_qop.to_qop(model_of(0, 15))
    for write in (conventions.to_qcdq, conventions.to_qonnx, to_qop.to_qop):
        with pytest.raises(UnsupportedModelError, match=r"\[1, 14\].*no number of bits.*node 'clip'.*Fix: signed"):
            write(model_of(1, 14))
