"""Under a byte budget, or with many weights, the graph runs in parts, once, with the same result."""

import gc
import itertools
import logging
import weakref
from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st

from kenosis_ort.calibration import collector, part_session, parts
from kenosis_ort.errors import CalibrationError
from kenosis_ort.graph.outside import content_bytes, weight_bytes, with_weights_on_disk
from kenosis_ort.graph.walk import read_names
from kenosis_ort.runtime import session
from kenosis_ort.storage.spool import Spool
from tests import models, planning
from tests.calibration.support import node_outputs, one_node_model, random_feeds, swept
from tests.planning import parse

NAMES = ["residual_block", "silu_net", "two_input_detector", "transformer_block", "net_with_if", "concat_net", "mlp"]


def annotated(net):
    return onnx.shape_inference.infer_shapes(models.ALL[net]())


def under(model, feeds, budget, tensors=None, **options):
    """The table with stock's own sessions under a byte budget."""
    return swept(model, feeds, tensors, fetch_budget=budget, **{"method": "percentile", "bit_exact": True, **options})


@pytest.mark.parametrize("net", NAMES)
@pytest.mark.parametrize("budget", [1, 1500, 2**28])
@pytest.mark.parametrize("method", ["percentile", "minmax"])
def test_parts_give_the_same_table(net, budget, method):
    model = models.ALL[net]()
    samples = models.feeds(model, 2)
    whole = under(model, samples, 2**30, method=method)
    assert under(model, samples, budget, method=method, threads=2 if budget == 1500 else 1).tensors == whole.tensors


@given(st.sampled_from(NAMES), st.integers(1, 500), st.integers(200, 4000))
def test_parts_cover_each_needed_node_once(net, budget, most):
    """No part has more observed bytes or weights than wanted where it could be cut."""
    model = annotated(net)
    feed, types = models.feeds(model, 1)[0], part_session.element_types(model)
    observed = [n for n in node_outputs(model) if n not in feed]
    sizes = parts.estimate_bytes(model, feed, observed)
    small = parts.cut(model, observed, sizes, types, budget)
    assert all(len(p.observed) <= 1 or sum(sizes[name] for name in p.observed) <= budget for p in small)
    light = parts.cut(model, observed, {}, types, 2**30, weights=most)
    held = {tensor.name: content_bytes(tensor) for tensor in model.graph.initializer}
    of_nodes = [sum(held.get(name, 0) for name in set(read_names(node))) for node in model.graph.node]
    for inside in (of_nodes[part.start : part.end] for part in light):
        assert sum(inside) <= most or max(inside) > most / 2
    assert len(parts.cut(model, observed, {}, types, 2**30, weights=2 * weight_bytes(model) + 1)) == 1
    for found in (small, light, parts.cut_behind(model, observed)):
        assert found is light or len(found) > 1
        assert [p.start for p in found] == [0, *(p.end for p in found[:-1])]
        made = set(feed)
        for part in found:
            assert set(part.inputs) <= made
            made.update(part.passed_on)
        assert [name for part in found for name in part.observed] == observed
    (early,) = parts.cut(model, observed[:1], sizes, types, budget)
    assert (early.start, early.observed, early.passed_on) == (0, (observed[0],), ())
    assert observed[0] in model.graph.node[early.end - 1].output, "what is not observed is not computed"


def test_what_no_later_part_reads_is_let_go():
    """While a feed's results of a part are taken, no feed before it holds what that part alone read."""
    model = onnx.shape_inference.infer_shapes(models.conv_relu_chain(4))
    names, feeds = [node.output[0] for node in model.graph.node], models.feeds(model, 2)
    seen = {}

    def take(place, arrays):
        (name,) = arrays
        seen[place, name] = weakref.ref(arrays[name])
        assert place == 0 or not any(seen[0, each]() is not None for each in names[: names.index(name)])

    with part_session.ObservedModel(model, part_session.SessionSettings()) as observed:
        computed = dict.fromkeys(names, "float32")
        parts.StagedModel(observed, model, computed, part_session.element_types(model), 1).run(feeds, [0, 1], take)
    assert len(seen) == 2 * len(names)


def test_no_cut_across_a_value_without_a_tensor_type():
    text = """g (float[2] x) => (float[4] y) { a = Neg (x)  s = SequenceConstruct (a, x)  b = Neg (a)
        c = ConcatFromSequence <axis = 0> (s)  y = Neg (c) }"""
    model = onnx.shape_inference.infer_shapes(parse(text))
    samples = [{"x": np.array([1, -2], np.float32)}]
    assert under(model, samples, 2**20, [*"abcy"]).tensors == under(model, samples, 1, [*"abcy"]).tensors
    found = parts.cut(model, [*"abcy"], dict.fromkeys("abcy", 8), part_session.element_types(model), 1)
    assert not any(part.start in (2, 3) for part in found)


@pytest.mark.parametrize("annotate", [True, False])  # sizes are measured where annotations do not tell
def test_a_larger_feed_is_planned_anew(annotate, caplog):
    samples = [*random_feeds(1, (2, 2)), *random_feeds(1, (80, 80)), *random_feeds(1, (2, 2))]
    with caplog.at_level(logging.INFO, "kenosis_ort.calibration"):
        table = under(one_node_model(annotate=annotate), samples, 9000, ["y", "z"])
    assert caplog.text.count("2 parts") == 1
    assert table.tensors["z"].count == 4 + 6400 + 4


def test_large_weights_go_to_a_file_that_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = models.mlp(hidden=128)
    (feed,) = models.feeds(model, 1)
    with part_session.ObservedModel(model, part_session.SessionSettings(threads=1)) as observed:
        assert len(list(tmp_path.iterdir())) == 1
        name = model.graph.node[0].output[0]
        part = observed.segment(part_session.Segment(0, 1, ("x",), (name,), ()), [name], feed)
        for opened in (observed.session([name]), part):
            assert opened.run([name], feed)[0].shape == (feed["x"].shape[0], 128)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="NaN"):
        swept(model, [{"x": np.full((1, 16), np.nan, np.float32)}], [name])
    assert not list(tmp_path.iterdir())


CONSTANTS = {"head": [2], "sizes": [9, 7], "pads": [0, 0, 1, 1, 0, 0, 1, 1], "zero": [0], "two": [2], "k": [3]}


def net_of_cut_constants(*, fold):
    """Resize by computed sizes, a Pad and a TopK whose amounts come from Constant nodes far in front of them."""
    model = parse(
        """g (float[n,2,4,5] x) => (float[n,2,o,q] y) {  twice = Mul (k, head)  shape = Shape (x)
        batch = Slice (shape, zero, two)  wanted = Concat <axis = 0> (batch, sizes)  a = Relu (x)
        b = Resize (a, , empty, wanted)  c = Pad (b, pads)  mean = ReduceMean <keepdims = 0> (c)  d = Sub (c, mean)
        e, index = TopK (d, twice)  y = GatherElements <axis = 3> (d, index) }""",
        {**{name: np.array(numbers) for name, numbers in CONSTANTS.items()}, "empty": np.array([], np.float32)},
    )
    if not fold:
        stored, nodes = list(model.graph.initializer), list(model.graph.node)
        del model.graph.initializer[:], model.graph.node[:]
        model.graph.node.extend(onnx.helper.make_node("Constant", [], [t.name], value=t) for t in stored)
        model.graph.node.extend(nodes)
    return model


@pytest.mark.parametrize("annotate", [False, True])
@pytest.mark.parametrize("fold", [False, True])
def test_constants_and_ranks_outlive_a_cut(fold, annotate):
    model = net_of_cut_constants(fold=fold)
    model = onnx.shape_inference.infer_shapes(model) if annotate else model
    samples, names = random_feeds(2, (3, 2, 4, 5)), [*"abcdey", "mean"]
    assert under(model, samples, 1, names).tensors == under(model, samples, 2**30, names).tensors
    types = {**part_session.element_types(model), "wanted": onnx.TensorProto.INT64, "shape": onnx.TensorProto.INT64}
    found = parts.cut(model, names, dict.fromkeys(names, 8), {**types, **dict.fromkeys([*names, "index"], 1)}, 1)
    assert len(found) > 3
    assert not {*CONSTANTS, "empty", "twice"}.intersection(itertools.chain(*(p.inputs for p in found)))


@pytest.mark.parametrize("heavy", [False, True])
def test_what_cannot_run_by_itself_runs_from_the_first_node_on(heavy, monkeypatch, caplog):
    model = annotated("residual_block")
    samples = models.feeds(model, 3)
    whole = under(model, samples, 2**30)
    make = part_session.ObservedModel.segment

    def refuse(self, part, *args, **options):
        if part.start > 1:
            raise CalibrationError("refused")
        return make(self, part, *args, **options)

    monkeypatch.setattr(part_session.ObservedModel, "segment", refuse)
    monkeypatch.setattr(parts, "_MOST_WEIGHTS", 600 if heavy else 2**32)
    with caplog.at_level(logging.INFO, "kenosis_ort.calibration"):
        assert under(model, samples, 1).tensors == whole.tensors
    assert caplog.text.count("cannot run by itself") == 1


def test_random_nodes_are_no_constants():
    model = parse("g (float[2] x) => (float[2] y) { noise = RandomNormal <shape = [2]> ()  y = Add (x, noise) }")
    assert part_session.constant_values(model) == (set(), frozenset())


@pytest.mark.parametrize("budget", [1, 2**30])
def test_nodes_in_another_order_give_the_same_table(budget):
    model = models.residual_block()
    samples, names = models.feeds(model, 2), node_outputs(model)
    want = under(model, samples, 2**30, names)
    model.graph.node.reverse()
    before = model.SerializeToString(deterministic=True)
    assert under(model, samples, budget, names).tensors == want.tensors
    assert model.SerializeToString(deterministic=True) == before
    np.testing.assert_equal(samples, models.feeds(model, 2))


# ---- many weights: some samples at a time, one part open at a time --------------------------------------------------

KINDS = {
    "minmax": {}, "sketch": {"sketch": True}, "percentile": {"method": "percentile"},
    "chunks": {"max_intermediate_outputs": 3}, "average": {"moving_average": True},
}  # fmt: skip


@pytest.fixture
def heavy(monkeypatch):
    """Parts of few weights, bundles of three samples, and hardly any memory for what crosses."""
    monkeypatch.setattr(parts, "_MOST_WEIGHTS", 600)
    for module in (collector, parts):
        monkeypatch.setattr(module, "Spool", partial(Spool, memory=100))
    monkeypatch.setattr(collector, "_BUNDLE", 3)


def swept_net(net, **options):
    few = {"channels": 6} if net == "residual_block" else {}  # of which no processor makes blocks: parts add alike
    model = planning.prepared(models.ALL[net](**few))
    channels = dict.fromkeys(node_outputs(model)[:3], 1) if net == "residual_block" else {}
    return swept(model, models.feeds(model, 7, seed=3), channels=channels, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("net", NAMES)
def test_the_table_is_that_of_the_whole(net, kind, request):
    part = {} if kind == "average" else dict.fromkeys((0, 2, 5), ())
    whole = swept_net(net, part=part, keep=4, **KINDS[kind])
    request.getfixturevalue("heavy")
    in_parts = swept_net(net, part=part, keep=4, **KINDS[kind])
    assert (in_parts.to_json(), in_parts.part) == (whole.to_json(), whole.part)


@pytest.mark.usefixtures("heavy")
def test_one_part_is_open_at_a_time(monkeypatch):
    segment, opened, told = part_session.ObservedModel.segment, list[weakref.ref[Any]](), list[int]()

    def alone(self, *arguments, **options):
        gc.collect()
        assert not any(each() is not None for each in opened)
        made = segment(self, *arguments, **options)
        opened.append(weakref.ref(made))
        return made

    monkeypatch.setattr(part_session.ObservedModel, "segment", alone)
    swept_net("residual_block", progress=lambda done, _: told.append(done))
    assert len(opened) >= 6  # two parts or more, for three parcels
    assert told == [0, 0, 0, 3, 3, 3, 6, 6, 7]


@pytest.mark.usefixtures("heavy")
def test_parts_are_opened_as_the_whole_is(tmp_path, monkeypatch):
    """Whether the runtime orders weights for its kernels, which add up in another order then, is of the whole."""
    model = with_weights_on_disk(planning.prepared(models.residual_block()), tmp_path / "weights")
    opened_as = []
    map_weights = session.map_weights
    monkeypatch.setattr(session, "map_weights", lambda m, o: (opened_as.append(weight_bytes(m)), map_weights(m, o)))
    swept(model, models.feeds(model, 2))
    assert len(opened_as) > 1
    assert set(opened_as) == {weight_bytes(model)}
