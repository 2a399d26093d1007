"""The mapping does not depend on how nodes and values are called, and knows every kernel of real nets."""

import onnx
import onnx.parser
import pytest

from kenosis_ort.errors import VerificationError
from kenosis_ort.verify import Status, verify_patterns
from tests.targets.qdq import QdqGraph
from tests.verify.expect import report


def _model():
    g = QdqGraph()
    x = g.relu_q(g.op("Relu", g.conv(g.q(g.input((1, 16, 12, 12))))))
    y = g.q(g.op("Add", g.q(g.conv(x)), x))
    z = g.op("LeakyRelu", g.conv(y, weight="float", bias="float"))
    return g.model(g.op("Sigmoid", z), g.q(g.gemm(g.q(g.op("Flatten", y)), 16 * 144, 4)))


def _facts(found):
    position = {k.node: i for i, k in enumerate(found.kernels)}
    return [
        (k.op_type, k.kernel, k.integer, k.status, position.get(k.absorbed_into or ""), len(k.absorbed))
        for k in found.kernels
    ]


def named(pattern):
    model = _model()
    for number, node in enumerate(model.graph.node):
        node.name = pattern.format(n=number)
    return model


def values_named_like_the_runtimes_own():
    model = _model()
    outputs = {o.name for o in model.graph.output}
    names = {v: f"v{i}_nchwc" for i, v in enumerate(v for n in model.graph.node for v in n.output) if v not in outputs}
    for node in model.graph.node:
        for values in (node.input, node.output):
            values[:] = [names.get(v, v) for v in values]
    return model


PATTERNS = ("{n}", "a_token_{n}", "kv#{n}#", "Conv_{n}_nchwc", "a/MatMulAddFusion_{n}", "x" * 40 + "{n}", "n {n}/ü")


@pytest.mark.parametrize("model", [*map(named, PATTERNS), values_named_like_the_runtimes_own()])
def test_names_do_not_matter(model):
    before = model.SerializeToString(deterministic=True)
    assert (_facts(report(model)), model.SerializeToString(deterministic=True)) == (_facts(report(_model())), before)


def test_nodes_without_names():
    found = report(named(""))
    assert [k[:4] for k in _facts(found)] == [k[:4] for k in _facts(report(_model()))]
    assert all(k.node.startswith(f"<{k.op_type} ") for k in found.kernels)
    assert len({k.node for k in found.kernels}) == len(found.kernels)


BRANCHES = """
<ir_version: 9, opset_import: ["": 17]>
net (float[1, 1, 6, 6] x, bool flag) => (float[1, 1, 6, 6] y)
<float s = {{0.02}}, uint8 z = {{0}}, int8[1, 1, 1, 1] w = {{100}}, float[1, 1, 1, 1] f = {{0.5}}>
{{
  [if] y = If (flag) <
    {integer}_branch = a () => (float[1, 1, 6, 6] {p}out) {{
      {p}q = QuantizeLinear (x, s, z)
      {p}data = DequantizeLinear ({p}q, s, z)
      {p}weight = DequantizeLinear (w, s)
      [integer] {p}conv = Conv ({p}data, {p}weight)
      {p}requantized = QuantizeLinear ({p}conv, s, z)
      {p}out = DequantizeLinear ({p}requantized, s, z)
    }},
    {float}_branch = b () => (float[1, 1, 6, 6] out) {{
      data = Abs (x)
      weight = Identity (f)
      [float] conv = Conv (data, weight)
      [act] out = Sigmoid (conv)
    }}
  >
}}
"""


@pytest.mark.parametrize("order", [("then", "else"), ("else", "then")])
def test_branches_may_share_names(order):
    facts, broken = [], []
    for prefix in ("own_", ""):
        model = onnx.parser.parse_model(BRANCHES.format(p=prefix, integer=order[0], float=order[1]))
        found = report(model)
        facts.append(_facts(found))
        broken.append({conv.node: len(conv.broken) for conv in verify_patterns(model).convs})
    kernels = {k.node: k for k in found.kernels}
    assert (kernels["integer"].status, kernels["float"].status) == (Status.INTEGER, Status.FLOAT)
    assert (kernels["act"].absorbed_into, facts[0]) == ("float", facts[1])
    assert broken[0] == broken[1] == {"integer": 0, "float": 2}


def test_a_name_that_hides_one_outside_is_refused():
    text = BRANCHES.format(p="own_", integer="then", float="else").replace("Abs (x)", "Abs (x) x = Neg (data)")
    with pytest.raises(VerificationError):
        report(onnx.parser.parse_model(text))
