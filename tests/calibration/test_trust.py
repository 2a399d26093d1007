"""How far ranges of made-up samples are trusted: the verdict, how ranges grow, and what models know about theirs."""

import math
from functools import partial, reduce

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kenosis_ort import CalibrationError, KenosisWarning, SyntheticReader, quantize_static
from kenosis_ort.calibration import CalibrationConfig, CalibrationTable, Points, trust
from kenosis_ort.calibration.feeds import Known, Provenance
from kenosis_ort.calibration.synthetic import net_evidence
from kenosis_ort.calibration.synthetic.net_evidence import NetEvidence
from tests import models, planning
from tests.calibration.support import node_outputs, random_feeds, swept
from tests.calibration.synthetic.test_draws import edges

STEADY = {"a": 0.05}
SHAKY = {**STEADY, "b": 0.6}


def verdict(**changes):
    said = {"spreads": STEADY, "known": {"x": Known.GIVEN}, "misfits": {}, "silent": {}, "natural": True, **changes}
    provenance, evidence = Provenance(said["known"], said["natural"]), NetEvidence(said["misfits"], {}, said["silent"])
    return trust.verdict_on(said["spreads"], provenance, evidence, real=said.get("real", 0), needed=said.get("needed"))


@pytest.mark.parametrize(("changes", "expected", "cause", "supply"), [
    ({}, trust.TRUSTED, "", ""),
    ({"known": {"x": Known.CONVENTION}}, trust.USABLE, "'x'", "input_ranges={'x'"),
    ({"known": {"x": Known.GUESS}}, trust.DO_NOT_SHIP, "guess", "ten real samples"),
    ({"natural": False}, trust.USABLE, "made up", "ten real samples"),
    ({"natural": False, "misfits": {"bn": 0.1}}, trust.TRUSTED, "", ""),
    ({"misfits": {"bn": 0.6}}, trust.USABLE, "'bn'", "mean="),
    ({"misfits": {"bn": 3.0}}, trust.DO_NOT_SHIP, "misfit 3.00", "mean="),
    ({"silent": {"y": "is zero"}}, trust.DO_NOT_SHIP, "'y' is zero", "ten real samples"),
    ({"silent": {"y": "is zero"}, "real": 9}, trust.TRUSTED, "", ""),
    ({"spreads": SHAKY}, trust.DO_NOT_SHIP, "'b'", "more samples"),
    ({"known": {"x": Known.GUESS}, "real": 9}, trust.TRUSTED, "", ""),
    ({"real": 3}, trust.USABLE, "last of 3 real", "more real samples"),
    ({"real": 3, "needed": 1}, trust.TRUSTED, "", ""),
])  # fmt: skip
def test_rules(changes, expected, cause, supply):
    found, causes, supplies = verdict(**changes)
    assert found == expected
    assert cause in " ".join(causes)
    assert supply in " ".join(supplies)
    assert bool(causes) == bool(supplies) == (expected != trust.TRUSTED)


NET = planning.parse("""(float[n,16] x) => (y) <float[16,32] w, float[32,4] v> {
    m = MatMul (x, w)  r = Relu (m)  k = MatMul (r, v)  q = Mul (k, k)  y = Neg (q) }""")


def tables(feeds, groups):
    """Tables of a net, one a group of these samples."""
    count = len(feeds) // groups
    return [swept(NET, feeds[at * count : (at + 1) * count]) for at in range(groups)]


def test_ranges_hold_what_was_measured_within_bounds():
    made_up = tables(random_feeds(16, (1, 16)), 4)
    table, told = trust.assess(NET, made_up, provenance=Provenance(known={"x": Known.GIVEN}))
    assert (table.samples, told.source) == (16, "synthetic")
    assert {tensor.tensor for tensor in told.tensors} == set(node_outputs(NET)) == set(table.tensors)
    assert (told.tensors[0].stability or 0) <= (told.tensors[-1].stability or 0)
    measured = reduce(CalibrationTable.merge, made_up)
    for name in table.tensors:
        (low, high), (least, most) = measured.range_of(name), table.range_of(name)
        assert least <= low <= high <= most
        assert low < 0 or least >= 0, "no sign that no sample showed"
        assert high > 0 or most <= 0
    assert table.range_of("x") == measured.range_of("x")


def test_real_samples_decide_where_there_are_any():
    real = tables(random_feeds(4, (1, 16), seed=5), 4)
    made_up = tables([{"x": f["x"] * 100} for f in random_feeds(16, (1, 16))], 4)
    table, told = trust.assess(NET, made_up, real, provenance=Provenance(real=4))
    for name in table.tensors:
        (low, high), (least, most) = reduce(CalibrationTable.merge, real).range_of(name), table.range_of(name)
        assert least <= low <= high <= most
    assert {t.how for t in told.tensors} == {trust.RangeSource.REAL.value}
    assert told.source == "mixed"


@pytest.mark.parametrize(("sizes", "needed"), [([1] * 6, 1), (range(1, 7), None), ([1] * 2, None)])
def test_how_many_real_samples_were_enough(sizes, needed):
    feeds = [{"x": size * feed["x"]} for size in sizes for feed in random_feeds(1, (1, 16))]
    assert trust.real_samples_needed(tables(feeds, len(feeds))) == needed


def test_collection_in_groups_sees_every_sample_once():
    made_up = partial(SyntheticReader, NET, samples=11)
    collected = partial(trust.collect_with_trust, NET, samples=11, provenance=made_up().provenance)
    seen = []
    names, plain = node_outputs(NET), swept(NET, made_up())
    table, _ = collected(made_up(), Points(names, threads=1), progress=lambda *args: seen.append(args))
    assert table.samples == 11
    assert table.data_fingerprint == plain.data_fingerprint
    assert all(
        table.range_of(n)[0] <= plain.range_of(n)[0] <= plain.range_of(n)[1] <= table.range_of(n)[1] for n in names
    )
    assert [done for done, _ in seen if done] == sorted(done for done, _ in seen if done)
    assert seen[-1] == (11, 11)
    with pytest.raises(CalibrationError, match="order of the samples"):
        collected(made_up(), Points(names, CalibrationConfig(moving_average=True, max_intermediate_outputs=2)))


ENDS = st.tuples(st.floats(-1e4, 1e4), st.floats(0, 1e4)).map(lambda p: (p[0], p[0] + p[1]))


@given(groups=st.lists(ENDS, min_size=1, max_size=6), shallow=st.floats(0, 1), more=st.floats(0, 1))
def test_extension_holds_the_measured_range_and_grows_with_depth(groups, shallow, more):
    one, two = trust.extend(groups, shallow), trust.extend(groups, min(shallow + more, 1.0))
    assert one.measured == (min(g[0] for g in groups), max(g[1] for g in groups))
    assert two.extended[0] <= one.extended[0] <= one.measured[0]
    assert one.measured[1] <= one.extended[1] <= two.extended[1]
    width = one.measured[1] - one.measured[0]
    assert two.extended[1] - two.measured[1] <= 0.5 * width + 1e-9
    assert 0 <= one.spread <= 1


def test_inputs_constants_and_single_groups_are_not_extended():
    for groups, depth in (([(0.0, 1.0), (0.0, 2.0)], 0.0), ([(3.0, 3.0)] * 4, 1.0), ([(0.0, 5.0)], 1.0)):
        growth = trust.extend(groups, depth)
        assert growth.extended == growth.measured


def test_the_fit_predicts_the_growth_of_the_largest_value():
    rng = np.random.default_rng(0)
    reached = []
    for _ in range(200):
        values = rng.gumbel(10, 1, (4, 100)).max(axis=1)
        reached.append(trust.extend([(0.0, float(v)) for v in values], 1.0).extended[1])
    expected = 10 + math.log(4000) + 0.5772
    assert abs(np.mean(reached) - expected) < 0.5


@given(groups=st.lists(ENDS, min_size=2, max_size=6), real=ENDS, count=st.integers(1, 64))
def test_real_ranges_are_kept_and_extended_no_further_than_the_made_up_ones(groups, real, count):
    made_up = trust.extend(groups, 0.5)
    low, high = trust.growth_between(real, made_up, count, 64)
    assert min(real[0], made_up.extended[0]) <= low <= real[0]
    assert real[1] <= high <= max(real[1], made_up.extended[1])


# ---- what the net says -----------------------------------------------------------------------------------------------


INF = math.inf
BOUNDS = {"Relu": (0, INF), "Sigmoid": (0, 1), "Tanh": (-1, 1), "Softmax": (0, 1), "LogSoftmax": (-INF, 0), "Neg": None}


@pytest.mark.parametrize(("op", "expected"), BOUNDS.items())
def test_bounds_of_activations_hold(op, expected):
    model = planning.parse(f"g (float[N,3] x) => (float[N,3] z) {{ y = {op} (x)  z = Identity (y) }}")
    assert net_evidence.hard_bounds(model).get("z") == expected
    if expected is not None:
        feed = {"x": np.random.default_rng(0).normal(0, 20, (50, 3)).astype(np.float32)}
        low, high = swept(model, [feed], ["z"]).range_of("z")
        assert expected[0] <= low <= high <= expected[1]


def test_bounds_of_clip_and_concat():
    model = planning.parse("""g (float[N,3] x) => (float[N,6] d) <float six = {6}, float zero = {0}> {
        a = Clip (x, zero, six)  b = Clip (x, , six)  c = Concat <axis = 1> (a, a)  d = Concat <axis = 1> (a, x) }""")
    assert net_evidence.hard_bounds(model) == {"a": (0, 6), "b": (-INF, 6), "c": (0, 6)}


def test_depth_counts_layers():
    model = models.conv_relu_chain(4)
    values = ["x", *(node.output[0] for node in model.graph.node)]
    assert trust.depths(model) == dict(zip(values, [0, 0.5, 0.5, 1, 1], strict=True))


def normalized():
    """A BatchNormalization and Relu trained on given data, and the data."""
    data = np.random.default_rng(0).normal([1.0, -2.0, 5.0], [1.0, 3.0, 0.5], (4000, 3)).astype(np.float32)
    text = """g (float[N,3] x) => (float[N,3] z)
        <float[3] g = {1.5, -2.7, 1.0}, float[3] b = {0.5, 0.0, -1.0}, float[3] m, float[3] v> {
        [bn] y = BatchNormalization (x, g, b, m, v)  z = Relu (y) }"""
    return planning.parse(text, {"m": data.mean(axis=0), "v": data.var(axis=0)}), data


def test_natural_data_fit_and_their_range_is_predicted_from_scaled_ones():
    model, data = normalized()
    (fit,) = net_evidence.fit_batch_norms(model, [{"x": data[:2000]}, {"x": data[2000:]}])
    assert fit.misfit < 0.01
    real = swept(model, [{"x": data}])
    weak = net_evidence.fit_batch_norms(model, [{"x": data * np.float32(0.5)}])
    assert weak[0].misfit > 0.4
    predicted = net_evidence.predicted_ranges(model, weak, net_evidence.hard_bounds(model))
    for name in "yz":
        np.testing.assert_allclose(predicted[name], real.range_of(name), rtol=1e-3)


@pytest.mark.parametrize(
    ("found", "wanted"), [((-5, -1), (-0.5, -0.1)), ((-5, 2), (-0.5, 2)), ((1, 2), (1, 2))], ids=str
)
def test_a_leaky_relu_shortens_what_is_negative(found, wanted):
    model = planning.parse("g (float[1] y) => (float[1] z) { z = LeakyRelu <alpha = 0.1> (y) }")
    fit = net_evidence.BatchNormFit("bn", "y", 0.0, found)
    assert net_evidence.predicted_ranges(model, [fit], {})["z"] == pytest.approx(wanted)


def test_dead_channels_and_models_without_statistics():
    model, data = normalized()
    data[:, 0] = 1.0
    (fit,) = net_evidence.fit_batch_norms(model, [{"x": data}])
    assert np.isfinite(fit.range).all()
    assert net_evidence.fit_batch_norms(models.conv_relu_chain(2), []) == ()
    assert net_evidence.fit_batch_norms(model, []) == ()


FLAT = planning.parse("""(float[1,4] x) => (float[1,4] flat) <float small = {1e-9}, float three = {3}> {
    little = Mul (x, small)  flat = Add (little, three) }""")


@pytest.mark.parametrize(("model", "samples", "expected"), [
    (FLAT, 6, {"flat": "is the same for all samples"}), (FLAT, 3, {}),  # too few to tell
    *((model, 6, {}) for model in (edges(), models.residual_block(), models.mlp(), models.two_input_detector())),
])  # fmt: skip
def test_an_output_that_does_not_depend_on_the_sample(model, samples, expected):
    assert net_evidence.silent_outputs(model, models.feeds(model, samples)) == expected


def test_the_report_says_do_not_ship(tmp_path):
    model = edges(bias=-200.0)
    reader = SyntheticReader(model, samples=8, input_range=(0, 1))
    with pytest.warns(KenosisWarning):
        found = quantize_static(model, tmp_path / "out.onnx", reader, recipe="plain").trust
    assert (found.verdict, "never rises above" in found.reason) == ("do not ship", True)
