"""QCDQ with float weights and QONNX: the traps of QONNX' tools, and any net there and back.

Each trap was measured with the package `qonnx` 1.0.0: what it does with such a model is silently wrong, or an exception
of its own.
"""

from collections import Counter

import numpy as np
import onnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kenosis_ort.formats.conventions import to_qcdq, to_qonnx
from kenosis_ort.formats.from_qonnx import Reader
from kenosis_ort.formats.qonnx_nodes import spell_out
from kenosis_ort.graph.outside import copy_model
from kenosis_ort.graph.shapes import value_types
from kenosis_ort.graph.walk import attribute
from kenosis_ort.placement.eligibility import Widths, with_widths
from tests import planning
from tests.contracts.test_formats import grids
from tests.flow.support import changed
from tests.formats.qonnx import run
from tests.formats.test_model import model_of
from tests.quantizer.random_nets import nets

ANY = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def canonical(model: onnx.ModelProto | str, bits: int = 8) -> planning.Outcome:
    """A quantized model of so many bits."""
    widths = Widths(bits, bits)
    return planning.quantize(model, protect_outputs="int8", revise=lambda plan, view: with_widths(plan, view, widths))


def check_traps(model: onnx.ModelProto) -> None:
    """What QONNX' tools stumble over is not there."""
    graph = model.graph
    constants = {t.name: t for t in graph.initializer}
    quantized = {n.output[0] for n in graph.node if n.op_type == "QuantizeLinear"}
    named = Counter(v.name for v in (*graph.value_info, *graph.output, *graph.input))
    assert max(named.values()) == 1, "cleanup asserts one entry a value"
    assert not named.keys() & constants.keys()
    readers = Counter(n.input[0] for n in graph.node if n.op_type == "DequantizeLinear")
    assert set(readers.values()) <= {1}, "of several DQs behind one Q all but the first are computed wrong"
    for node in graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            assert len(node.input) == 3, "a missing zero point is a ValueError"
            assert node.input[2]
            scale = constants[node.input[1]]
            assert (attribute(node, "axis") is not None) == (len(scale.dims) == 1), (
                "an axis beside one scale is an error"
            )
        if node.op_type == "DequantizeLinear":
            assert node.input[0] not in constants, "integer weights with a scale a channel are a ValueError"
        if node.op_type in ("Conv", "MaxPool", "AveragePool"):
            assert attribute(node, "kernel_shape") is not None, "the cost of a model is read off it"
        if node.op_type == "Clip" and node.input[0] in quantized:
            low, high = (int(onnx.numpy_helper.to_array(constants[name])) for name in node.input[1:])
            unsigned = constants[node.input[1]].data_type == onnx.TensorProto.UINT8
            assert low <= 0 < high, "bounds without 0 are an AssertionError"
            assert not unsigned or (high + 1) & high == 0, "that unsigned ranges are narrow is lost"
        assert node.op_type != "Max" or len(node.input) > 1, "what keeps one runtime from fusing is no part of the net"
    assert model.ir_version <= 10


@ANY
@given(nets(), st.sampled_from([2, 3, 4, 8]))
def test_any_net_is_the_same_in_every_export_and_comes_back_from_qonnx(model: onnx.ModelProto, bits: int) -> None:
    done = canonical(model, bits)
    expected = run(done.quantized, done.feeds[0])
    for made in (to_qcdq(done.quantized), to_qonnx(done.quantized)):
        check_traps(made)
        for a, b in zip(expected, run(spell_out(made), done.feeds[0]), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
    assert grids(done.quantized) == grids(Reader(copy_model(made), value_types(made)).run())


def test_weights_of_one_step_are_bipolar() -> None:
    model = changed(model_of(0, 15, weight="INT2"), w=lambda w: np.where(w > 0, 1, -1))
    feed = {"x": np.random.default_rng(0).normal(size=(1, 3, 4, 4)).astype(np.float32)}
    made = to_qonnx(model)
    assert [n.op_type for n in made.graph.node] == ["Quant", "BipolarQuant", "Conv"]
    np.testing.assert_allclose(run(spell_out(made), feed)[0], run(model, feed)[0], atol=1e-5)
