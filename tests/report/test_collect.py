"""What is gathered from the models agrees with the models."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from kenosis_ort.accuracy.value_grids import read_grids
from kenosis_ort.calibration.collector import Points, collect
from kenosis_ort.calibration.statistics import CalibrationConfig
from kenosis_ort.report.gathering import BINS, profile_tensors, sketch_graph
from tests import models
from tests.flow.support import changed, make
from tests.models import FeedReader, feeds


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    model = models.residual_block()
    return model, make(model, tmp_path_factory.mktemp("pair"), rewrites=False).written


def test_sketch_holds_every_node_and_edge_but_no_constants(pair):
    model, _ = pair
    nodes = sketch_graph(model).nodes
    constants = {t.name for t in model.graph.initializer}
    read = [[name for name in node.input if name not in constants] for node in model.graph.node]
    found = [(node.name, [*node.inputs], [*node.outputs]) for node in nodes]
    assert found == [(node.name, values, [*node.output]) for node, values in zip(model.graph.node, read, strict=True)]
    assert (nodes[0].weight, nodes[0].shape) == ("8x3x3x3", "1x8x8x8")
    body = next(node for node in sketch_graph(models.net_with_if()).nodes if node.op_type == "If")
    assert len(body.inputs) > 1, "what a body reads counts"


def test_grids_are_those_of_the_quantized_model_and_weights_within_half_a_step_of_theirs(pair):
    model, made = pair
    grids = read_grids(model, made)
    constants = {t.name: numpy_helper.to_array(t) for t in (*model.graph.initializer, *made.graph.initializer)}
    names = {name for node in model.graph.node for name in node.output}
    made_of = [n.input for n in made.graph.node if n.op_type == "QuantizeLinear" and n.input[0] in names]
    assert made_of
    for value, scale, zero in made_of:
        ends, step = np.iinfo(constants[zero].dtype), float(constants[scale])
        assert grids[value].range == tuple((end - int(constants[zero])) * step for end in (ends.min, ends.max))
    for name in (n.input[1] for n in model.graph.node if n.op_type == "Conv"):
        real = constants[name].astype(np.float64)
        signal, noise = grids[name].rounding(real)
        assert signal == pytest.approx(float(np.square(real).sum()), rel=1e-12)
        assert 0.0 < noise <= real.size * (0.5001 * grids[name].scale.max()) ** 2


def test_profiles_count_every_value_and_know_the_noise(pair):
    model, made = pair
    config = CalibrationConfig(method="percentile")
    tensors = [n.output[0] for n in model.graph.node if n.op_type in ("Conv", "Relu", "Add")]
    table = collect(model, FeedReader(feeds(model, 4)), Points(tensors, config=config))
    profiles = profile_tensors(model, made, table)
    activations = [p for p in profiles if p.kind == "activation"]
    weights = [p for p in profiles if p.kind == "weight"]
    assert {p.name for p in activations} == set(tensors)
    assert len(weights) == sum(n.op_type in ("Conv", "Gemm") for n in model.graph.node)
    for profile in activations:
        counts = json.loads(json.dumps(profile.bars.counts))
        assert (len(counts), sum(counts)) == (BINS, table.tensors[profile.name].count)
    assert all(30 < profile.sqnr_db < math.inf and profile.bits == 8 for profile in weights)
    assert {p.kind for p in profile_tensors(model, made)} == {"weight"}, "without a table"


@pytest.mark.x86_only
@pytest.mark.parametrize(
    ("options", "caption", "largest"), [({}, "8 bits, pairs within int16", 127), ({"reduce_range": True}, "7 bit", 64)]
)
def test_weights_have_the_range_that_their_integers_span(tmp_path: Path, options: Any, caption: str, largest: int):
    model = models.residual_block()
    made = make(model, tmp_path, rewrites=False, **options).written
    grids, profiles = read_grids(model, made), {p.name: p for p in profile_tensors(model, made)}
    for name in (node.input[1] for node in model.graph.node if node.op_type == "Conv"):
        grid, profile = grids[name], profiles[name]
        integers = numpy_helper.to_array(grid.stored).astype(np.int64)
        assert np.abs(integers).max() == largest
        values = integers.reshape(len(integers), -1) * grid.scale[:, None]
        assert profile.chosen == (values.min(), values.max())
        assert profile.precision == caption


def test_free_8_bits_claim_no_pairs(pair):
    model, made = pair
    convs = {node.input[1] for node in model.graph.node if node.op_type == "Conv"}
    free = changed(made, **{f"{name}_quantized": lambda w: np.full_like(w, 127) for name in convs})
    assert {p.precision for p in profile_tensors(model, free) if p.name in convs} == {"8 bit"}
