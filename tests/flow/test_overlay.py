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

from kenosis_ort.flow.builder import restored
from kenosis_ort.graph.outside import copy_model
from kenosis_ort.plan import Kind, NodeDecision, PlacementPlan
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


def corrected(model: onnx.ModelProto) -> onnx.ModelProto:
    changed = copy_model(model)
    for tensor in changed.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) + np.float32(0.5), tensor.name))
    return changed


def plan_of(kinds: list[bool]) -> PlacementPlan:
    nodes = tuple(
        NodeDecision(f"conv{i}", "Conv", Kind.INTEGER if k else Kind.FLOAT, "rule", "") for i, k in enumerate(kinds)
    )
    return PlacementPlan("ort-cpu", nodes=nodes)


def held(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


@settings(max_examples=20, deadline=None)
@given(st.lists(st.booleans(), min_size=4, max_size=4))
def test_corrections_stay_in_integer_layers_alone(kinds: list[bool]) -> None:
    base = chain(4)
    changed = corrected(base)
    own, moved, found = held(base), held(changed), held(restored(changed, base, plan_of(kinds)))
    for i, integer in enumerate(kinds):
        for name in (f"conv{i}_w", f"conv{i}_b"):
            assert np.array_equal(found[name], (moved if integer else own)[name])
    assert held(changed).keys() == found.keys()
    assert all(np.array_equal(held(changed)[n], moved[n]) for n in moved)  # the given model is not changed


def test_a_weight_that_an_integer_layer_reads_too_stays() -> None:
    base = chain(2)
    base.graph.node[2].input[1] = base.graph.node[0].input[1]
    changed = corrected(base)
    found = held(restored(changed, base, plan_of([True, False])))
    assert np.array_equal(found["conv0_w"], held(changed)["conv0_w"])
    assert np.array_equal(found["conv1_b"], held(base)["conv1_b"])


def test_nothing_is_copied_where_nothing_differs() -> None:
    model = chain(2)
    assert restored(model, copy_model(model), plan_of([True, False])) is model


def test_the_file_has_the_float_layers_own_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Corrected in the passes, cut off afterwards, as the speed ladder and mixed precision do."""
    from kenosis_ort.flow import run

    model = chain(4)
    feeds = models.feeds(model, 16)

    def cut(call, builder, build, feeds, worthless):  # type: ignore[no-untyped-def]
        assert not np.array_equal(held(build.float_model)["conv0_b"], held(model)["conv0_b"])
        keep = {**build.keep_float, "conv0": "test", "conv1": "test"}
        return replace(builder.quantize(build.table, keep), fusion=build.fusion), True

    monkeypatch.setattr(run, "delivered", cut)
    report = quantized(model, tmp_path / "out.onnx", feeds, recipe="fast")
    assert next(p for p in report.passes if p.name == "bias_correction").kept
    found = initializers(tmp_path / "out.onnx")
    for name in ("conv0_b", "conv1_b", "conv0_w"):
        assert np.array_equal(found[name], held(model)[name])
