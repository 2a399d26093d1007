"""A model whose weights are too many for one part: some samples at a time, one part open at a time, the same table."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.calibration import CalibrationConfig, collect, collector, parts
from kenosis_ort.calibration import part_session as session
from kenosis_ort.calibration.feeds import Part
from kenosis_ort.calibration.part_session import ObservedModel, element_types
from kenosis_ort.calibration.parts import cut
from kenosis_ort.errors import CalibrationError
from kenosis_ort.graph.external_data import with_weights_on_disk
from kenosis_ort.graph.outside import content_bytes, weight_bytes
from kenosis_ort.graph.walk import read_names
from kenosis_ort.storage.spool import Spool
from tests import models, planning
from tests.calibration.support import node_outputs

NETS = ["residual_block", "silu_net", "two_input_detector", "transformer_block", "net_with_if", "concat_net", "mlp"]
CONFIGS = {
    "minmax": CalibrationConfig(),
    "sketch": CalibrationConfig(sketch=True),
    "percentile": CalibrationConfig(method="percentile"),
    "chunks": CalibrationConfig(max_intermediate_outputs=3),
    "average": CalibrationConfig(moving_average=True),
}


@pytest.fixture
def heavy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of few weights, bundles of three samples, and hardly any memory for what crosses."""
    monkeypatch.setattr(parts, "_MOST_WEIGHTS", 600)
    for module in (collector, parts):
        monkeypatch.setattr(module, "Spool", partial(Spool, memory=100))
    monkeypatch.setattr(collector, "_BUNDLE", 3)


def swept(net: str, config: CalibrationConfig, **options: Any) -> Any:
    few = {"channels": 6} if net == "residual_block" else {}  # of which no processor makes blocks: parts add alike
    model = planning.prepared(models.ALL[net](**few))
    channels = dict.fromkeys(node_outputs(model)[:3], 1) if net == "residual_block" else {}
    feeds = models.feeds(model, 7, seed=3)
    return collect(model, feeds, tensors=node_outputs(model), config=config, threads=1, channels=channels, **options)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("net", NETS)
def test_the_table_is_that_of_the_whole(net: str, kind: str, request: pytest.FixtureRequest) -> None:
    part: Part = {} if kind == "average" else dict.fromkeys((0, 2, 5), ())
    whole = swept(net, CONFIGS[kind], part=part, keep=4)
    request.getfixturevalue("heavy")
    in_parts = swept(net, CONFIGS[kind], part=part, keep=4)
    assert in_parts.to_json() == whole.to_json()
    assert in_parts.part == whole.part


@pytest.mark.usefixtures("heavy")
def test_one_part_is_open_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Any]] = []
    most = 0
    segment = ObservedModel.segment

    def counted(self: ObservedModel, *arguments: Any, **options: Any) -> Any:
        nonlocal most
        opened = segment(self, *arguments, **options)
        alive.append(weakref.ref(opened))
        gc.collect()
        most = max(most, sum(each() is not None for each in alive))
        return opened

    monkeypatch.setattr(ObservedModel, "segment", counted)
    told: list[tuple[int, int | None]] = []
    swept("residual_block", CONFIGS["minmax"], progress=lambda done, total: told.append((done, total)))
    assert len(alive) >= 6  # two parts or more, for three parcels
    assert most == 1
    assert [done for done, _ in told] == [0, 0, 0, 3, 3, 3, 6, 6, 7]


@pytest.mark.usefixtures("heavy")
def test_parts_are_opened_as_the_whole_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the runtime orders weights for its kernels, which add up in another order then, is of the whole."""
    model = with_weights_on_disk(planning.prepared(models.residual_block()), tmp_path / "weights")
    opened_as: list[int] = []
    map_weights = session.map_weights

    def recorded(whole: onnx.ModelProto, options: Any) -> None:
        opened_as.append(weight_bytes(whole))
        map_weights(whole, options)

    monkeypatch.setattr(session, "map_weights", recorded)
    collect(model, models.feeds(model, 2), tensors=node_outputs(model), config=CONFIGS["minmax"])
    assert len(opened_as) > 1
    assert set(opened_as) == {weight_bytes(model)}


@pytest.mark.usefixtures("heavy")
def test_a_sample_that_fails_is_named() -> None:
    model = planning.prepared(models.residual_block())
    feeds = models.feeds(model, 7)
    feeds[4] = {name: value * float("nan") for name, value in feeds[4].items()}
    with pytest.raises(CalibrationError) as caught:
        collect(model, feeds, tensors=node_outputs(model), config=CONFIGS["minmax"])
    assert "sample 4" in str(caught.value.where)


@given(st.sampled_from(NETS), st.integers(200, 4000))
def test_no_part_has_more_weights_than_wanted_where_it_could_be_cut(net: str, most: int) -> None:
    model = onnx.shape_inference.infer_shapes(models.ALL[net]())
    observed = node_outputs(model)
    sizes = {tensor.name: content_bytes(tensor) for tensor in model.graph.initializer}
    of_nodes = [sum(sizes.get(name, 0) for name in set(read_names(node))) for node in model.graph.node]
    found = cut(model, observed, {}, element_types(model), 2**30, weights=most)
    assert [part.start for part in found] == [0, *(part.end for part in found[:-1])]
    for part in found:
        inside = of_nodes[part.start : part.end]
        assert sum(inside) <= most or max(inside) > most / 2
    assert len(cut(model, observed, {}, element_types(model), 2**30, weights=2 * weight_bytes(model) + 1)) == 1
