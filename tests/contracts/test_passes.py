"""What every accuracy pass has to hold, on a net that it improves and on one that it leaves as it is, and why."""

import re
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import QuantType

from kenosis_ort import KenosisWarning, Recipe, option_types
from kenosis_ort.passes import PASSES, Candidate, Skipped, WeightPass, passes_of
from tests import models
from tests.flow.support import changed, quantized, run
from tests.flow.test_recipes import sentences, t5
from tests.models import Net

OFF = {
    "ranges": "minmax", "row_scales": False, "equalize": False, "smooth": "off", "bias_correction": False,
    "max_float_share": 0.0,
}  # fmt: skip
"""Settings of a recipe without any pass."""


IMAGE, SMALL, TOKENS = (1, 3, 8, 8), (1, 4, 8, 8), (1, 10, 32)


class Example(NamedTuple):
    """A net, its samples, and what a pass makes of it.

    Attributes:
        settings: Fields of the recipe that ask for the pass.
        net: The float model.
        samples: Its calibration samples.
        says: What its report says, a pattern.
        options: Further options of the call.
    """

    settings: Any
    net: Any
    samples: Any
    says: str = ""
    options: Any = MappingProxyType({})

    @property
    def recipe(self):
        """The recipe with this pass alone."""
        return Recipe(**{**OFF, **self.settings})


def uneven(op="Relu"):
    """Two Convs with channels of very different size between them."""
    net, scale = Net(seed=1), 10.0 ** np.linspace(-2, 1, 8)
    y = net.op(op, [net.conv(net.input("x", [1, 3, 8, 8]), 3, 8, name="first")], name="between")
    model = net.of(net.conv(y, 8, 8, name="second"))
    return changed(model, first_w=scale.reshape(8, 1, 1, 1), first_b=scale, second_w=1 / scale.reshape(1, 8, 1, 1))


def normalized(outliers):
    """Linear layers behind a normalization, some of whose channels are so many times larger."""
    net, width = Net(seed=2), 32
    gamma = np.ones(width)
    gamma[::11] = outliers
    y = net.input("x", [1, 10, width])
    y = net.op("LayerNormalization", [y, net.const(gamma), net.const(np.zeros(width))], name="norm", axis=-1)
    y = net.op("Relu", [net.linear(y, width, width, name="fc0")], name="relu")
    return net.of(net.linear(y, width, 8, name="fc1"))


def coarse(depth=3):
    """Convs of one scale of weights each, whose rounding moves what comes out."""
    net = Net(seed=3)
    y = net.input("x", [1, 4, 8, 8])
    for at in range(depth):
        y = net.op("Relu", [net.conv(y, 4, 4, name=f"conv{at}")], name=f"relu{at}")
    return net.of(net.conv(y, 4, 4, name="last"))


def whole():
    """A layer whose weights and inputs are whole numbers, so that integers compute it exactly."""
    net = Net(seed=4)
    weights = net.rng.integers(-127, 128, (16, 8)).astype(np.float32)
    weights[0] = 127.0
    return net.of(net.op("MatMul", [net.input("x", [4, 16]), net.const(weights)], name="exact"))


def integers():
    """Samples of whole numbers from 0 to 255, both of which each one holds."""
    found = np.random.default_rng(0).integers(0, 256, (16, 4, 16)).astype(np.float32)
    found[:, 0, :2] = 0.0, 255.0
    return [{"x": x} for x in found]


def normal(shape):
    """Normally distributed samples."""
    return lambda: [{"x": models.normal(shape, seed)} for seed in range(16)]


def with_tails():
    """Samples few of whose numbers are much larger than the others."""
    rng = np.random.default_rng(0)
    return [{"x": rng.standard_t(5, IMAGE).astype(np.float32)} for _ in range(32)]


IN_FLOAT = {"mixed_precision": True, "accuracy_budget": 1e-5, "max_float_share": 0.9}
BUDGET, UINT8 = {"mixed_precision": True, "accuracy_budget": 0.9}, {"weight_type": QuantType.QUInt8}
EXAMPLES = {
    "row_scales": Example({"row_scales": True}, t5, lambda: sentences(16), "layers behind"),
    "equalize": Example({"equalize": True}, uneven, normal(IMAGE), "1 places"),
    "smooth": Example({"smooth": "auto"}, lambda: normalized(40.0), normal(TOKENS), "2 places"),
    "bias_correction": Example({"bias_correction": True}, coarse, normal(SMALL)),
    "ranges": Example({"ranges": "auto"}, models.mobile_block, with_tails, "mse ranges"),
    "rounding": Example({"rounding": "learned"}, coarse, normal(SMALL)),
    "mixed_precision": Example(IN_FLOAT, coarse, normal(SMALL), "Left float"),
}
"""What each pass improves, by its name."""

NEAR_MISSES = {
    "row_scales": Example({"row_scales": True}, lambda: normalized(1.0), normal(TOKENS), "one range serves all rows"),
    "equalize": Example({"equalize": True}, lambda: uneven("Sigmoid"), normal(IMAGE), "nothing to gain"),
    "smooth": Example({"smooth": "auto"}, coarse, normal(SMALL), "nothing to gain"),
    "bias_correction": Example({"bias_correction": True}, whole, integers, "does not fall"),
    "ranges": Example({"ranges": "auto"}, whole, integers, "no other estimator is better"),
    "rounding": Example({"rounding": "learned"}, coarse, normal(SMALL), "does not fall", UINT8),
    "mixed_precision": Example(BUDGET, coarse, normal(SMALL), "the budget holds without"),
}
"""What each pass leaves as it is."""


# ---- what holds of each ----------------------------------------------------------------------------------------------


KINDS = {kind.name: kind for kind in PASSES}
each_pass = pytest.mark.parametrize("name", KINDS)
CASES = {"example": EXAMPLES, "near miss": NEAR_MISSES}
each_case = pytest.mark.parametrize("case", CASES)


def written(model):
    return model.SerializeToString(deterministic=True)


def seen_in(state):
    """Everything in a state, so that two can be compared."""
    factors = {value: np.asarray(how.factors).tobytes() for value, how in state.rescaled.items()}
    told = [written(state.prepared.proto), state.prepared.notes, factors]
    if state.build is not None:
        build = state.build
        told += [(n, k, written(t)) for n, ts in build.corrections.items() for k, t in ts.items()]
        told += [written(build.quantized), dict(build.keep_float), build.table.to_json()]
    return told


@contextmanager
def applied(kind, how):
    """A pass whose `apply` is another function, which gets the pass's own first."""
    with pytest.MonkeyPatch.context() as patch:
        real = kind.apply
        patch.setattr(kind, "apply", lambda self, *given: how(partial(real, self), *given))
        yield


@cache
def looked_at(name, case):
    """One call with a pass, looked at from inside: what it was given and gave, and what a second time gives."""
    example, seen = CASES[case][name], SimpleNamespace(left_float={})

    def apply(real, state, statistics, context):
        seen.before = seen_in(state)
        seen.found = [real(state, statistics, context) for _ in range(2)]
        seen.after = seen_in(state)
        seen.twice = [each if isinstance(each, Skipped) else (each.what, seen_in(each.state)) for each in seen.found]
        found = seen.found[0]
        if isinstance(found, Candidate):
            models = [state.prepared.proto, found.state.prepared.proto]
            seen.float_outputs = [[each[0] for each in run(model, example.samples()[:2])] for model in models]
        if isinstance(found, Candidate) and found.state.build is not None:
            seen.left_float = left_float(found.state, context)
        return found

    with TemporaryDirectory() as folder, applied(KINDS[name], apply), pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)
        seen.report = call(example, Path(folder, "out.onnx"))
    return seen


def left_float(state, context):
    """Float constants of an integer layer that is left float after a pass, beside those of the model."""
    build = state.built
    node = next(n for n in build.float_model.graph.node if n.name in build.plan.integer_nodes() and len(n.input) > 1)
    made = context.quantize(build.table, {**build.keep_float, node.name: "left float"}, build.corrections)
    own, found = constants(build.float_model), constants(made.quantized)
    return {name: (own[name], found.get(name)) for name in node.input[1:] if name in own}


def constants(model):
    return {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}


def call(example, out, **options):
    return quantized(example.net(), out, example.samples(), **{"recipe": example.recipe, **example.options, **options})


def test_every_pass_has_an_example_and_a_near_miss():
    assert EXAMPLES.keys() == NEAR_MISSES.keys() == KINDS.keys()


@each_pass
@each_case
def test_it_improves_its_example_and_says_why_it_leaves_the_other(name, case):
    seen = looked_at(name, case)
    (outcome,) = seen.report.passes
    assert (outcome.name, outcome.kept) == (name, case == "example")
    assert re.search(CASES[case][name].says, outcome.reason)
    for found in seen.found:
        assert isinstance(found, (Candidate, Skipped))
        assert isinstance(found, Candidate) or (found.why and "\n" not in found.why)
    if outcome.kept and outcome.error_before is not None:
        assert outcome.error_after < outcome.error_before


@each_pass
@each_case
def test_the_state_that_it_gets_stays_as_it_is_and_it_does_the_same_twice(name, case):
    seen = looked_at(name, case)
    assert (seen.before, seen.twice[0]) == (seen.after, seen.twice[1])


@each_pass
def test_a_candidate_is_the_same_float_net_and_nodes_left_float_have_their_own_weights(name):
    seen = looked_at(name, "example")
    before, after = seen.float_outputs
    for a, b in zip(before, after, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4 * np.abs(a).max())
    if issubclass(KINDS[name], WeightPass):
        assert seen.found[0].state.build is None
        assert seen.found[0].state.rescaled
    else:
        assert seen.left_float
        for own, found in seen.left_float.values():
            np.testing.assert_array_equal(found, own)


@pytest.mark.filterwarnings("ignore::kenosis_ort.KenosisWarning")
@each_pass
def test_one_that_raises_is_left_out_as_if_it_were_not_there(name, tmp_path):
    example, kind = EXAMPLES[name], KINDS[name]
    raises = Mock(side_effect=IndexError("a pass that fails"))
    with applied(kind, raises), pytest.warns(KenosisWarning, match=f"{kind.title} failed .*a pass that fails"):
        report = call(example, tmp_path / "failed.onnx")
    (outcome,) = report.passes
    assert (outcome.kept, outcome.reason) == (False, "it failed, see the warnings")
    call(example, tmp_path / "without.onnx", recipe=Recipe(**OFF))
    np.testing.assert_equal(*(constants(onnx.load(tmp_path / f"{each}.onnx")) for each in ("failed", "without")))


@each_pass
@each_case
def test_a_recipe_file_holds_it(name, case, tmp_path):
    recipe = CASES[case][name].recipe
    (tmp_path / "recipe.toml").write_text(option_types.RecipeFile(recipe, {}).to_toml(), encoding="utf-8")
    read = option_types.resolve(tmp_path / "recipe.toml").recipe
    assert [each.name for each in passes_of(read)] == [name]
    assert passes_of(read) == passes_of(recipe)
