"""A layer that is left float has its own weights and biases, whatever passes did to it before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from kenosis_ort.passes.contract import Overlay, materialize
from tests import models
from tests.flow.support import initializers, quantized
from tests.models import Net


def chain(layers: int) -> onnx.ModelProto:
    net = Net(seed=3)  # of which bias correction is clearly better
    y = net.input("x", [1, 4, 8, 8])
    for i in range(layers):
        y = net.op("Relu", [net.conv(y, 4, 4, name=f"conv{i}")], name=f"relu{i}")
    net.output(y, [1, 4, 8, 8])
    return net.model()


def corrected(model: onnx.ModelProto) -> Overlay:
    constants = {name: numpy_helper.from_array(array + np.float32(0.5), name) for name, array in held(model).items()}
    return {node.name: {n: constants[n] for n in node.input[1:]} for node in model.graph.node if node.op_type == "Conv"}


def held(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


@settings(max_examples=20, deadline=None)
@given(st.lists(st.booleans(), min_size=4, max_size=4))
def test_corrections_stay_in_integer_layers_alone(kinds: list[bool]) -> None:
    base = chain(4)
    before, overlay = base.SerializeToString(), corrected(base)
    made = materialize(base, overlay, [f"conv{i}" for i, integer in enumerate(kinds) if integer])
    own, found = held(base), held(made)
    for i, integer in enumerate(kinds):
        for name in (f"conv{i}_w", f"conv{i}_b"):
            assert np.array_equal(found[name], own[name] + np.float32(0.5 * integer))
    assert [t.name for t in made.graph.initializer] == [t.name for t in base.graph.initializer]
    assert base.SerializeToString() == before
    assert (made is base) == (not any(kinds)), "nothing is copied where nothing differs"


def test_a_weight_that_an_integer_layer_reads_too_is_corrected() -> None:
    base = chain(2)
    base.graph.node[2].input[1] = base.graph.node[0].input[1]
    found = held(materialize(base, corrected(base), ["conv0"]))
    assert np.array_equal(found["conv0_w"], held(base)["conv0_w"] + np.float32(0.5))
    assert np.array_equal(found["conv1_b"], held(base)["conv1_b"])


def test_the_file_has_the_float_layers_own_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Corrected in the passes, cut off afterwards, as the speed ladder and mixed precision do."""
    from kenosis_ort.flow import speed

    model = chain(4)
    feeds = models.feeds(model, 16)

    def cut(call, builder, build, feeds, worthless):  # type: ignore[no-untyped-def]
        assert {"conv0", "conv1"} <= build.corrections.keys()
        keep = {**build.keep_float, "conv0": "test", "conv1": "test"}
        return replace(builder.quantize(build.table, keep, build.corrections), fusion=build.fusion), True

    monkeypatch.setattr(speed, "delivered", cut)
    report = quantized(model, tmp_path / "out.onnx", feeds, recipe="fast")
    assert next(p for p in report.passes if p.name == "bias_correction").kept
    found = initializers(tmp_path / "out.onnx")
    for name in ("conv0_b", "conv1_b", "conv0_w"):
        assert np.array_equal(found[name], held(model)[name])
