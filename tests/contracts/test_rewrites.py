"""What every float rewrite has to hold: same interface, same numbers, nothing left to do the second time."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import onnx
import pytest

from kenosis_ort.graph.opset import RewriteResult, prepare
from kenosis_ort.graph.outside import copy_model
from kenosis_ort.graph.shapes import infer_shapes
from kenosis_ort.rewrite import FLOAT_FORMS, INTEGER_FORMS, PREPARATION
from kenosis_ort.runtime.limits import runtime_limits
from kenosis_ort.targets.ort_cpu.rewrites import OWN_FORMS
from tests import models
from tests.contracts.rich import rich_net
from tests.graph.build import assert_same

MODELS: dict[str, Callable[[], onnx.ModelProto]] = {**models.ALL, "rich_net": rich_net}
REWRITES: dict[str, Callable[..., RewriteResult]] = {
    rule.__name__: rule for rule in (*PREPARATION, *FLOAT_FORMS, *INTEGER_FORMS, *OWN_FORMS)
}
OTHERS: dict[str, tuple[str, ...]] = {
    "fold_batch_norm": ("bn_net",),
    "collapse_silu": ("silu_net",),
    "collapse_gelu": ("transformer_block",),
    "fuse_attention": ("transformer_block",),
    "fold_scale": ("two_input_detector",),
    "batch_norm_to_conv": ("bn_net",),
    "space_to_depth_stem": ("two_input_detector",),
    "pad_stem_channels": (
        "residual_block", "mobile_block", "silu_net", "bn_net", "two_input_detector", "net_with_if"
    ),
}  # fmt: skip
"""Models beside the rich net in which a rewrite finds something to do."""
each_rewrite = pytest.mark.parametrize("rewrite", REWRITES)
each_pair = pytest.mark.parametrize(
    ("rewrite", "name"), [(rule, name) for rule in REWRITES for name in ("rich_net", *OTHERS.get(rule, ()))]
)


def plain(name: str) -> onnx.ModelProto:
    """Returns a model as a rewrite gets it: named nodes, constants as initializers, shapes inferred."""
    limits = runtime_limits()
    return prepare(MODELS[name](), min_opset=13, max_ir=limits.max_ir, max_opset=limits.max_opset).proto


def options(rewrite: str, model: onnx.ModelProto) -> dict[str, Any]:
    return {"nodes": {n.name for n in model.graph.node}} if REWRITES[rewrite] in (*INTEGER_FORMS, *OWN_FORMS) else {}


def apply(rewrite: str, model: onnx.ModelProto, keep_values: Collection[str] = ()) -> RewriteResult:
    result = REWRITES[rewrite](model, keep_values=keep_values, **options(rewrite, model))
    infer_shapes(model)
    return result


@each_pair
def test_interface_and_numbers_stay_and_a_second_time_finds_nothing(rewrite: str, name: str) -> None:
    before = plain(name)
    after = copy_model(before)
    result = apply(rewrite, after)
    assert [v.name for v in after.graph.input] == [v.name for v in before.graph.input]
    assert [v.name for v in after.graph.output] == [v.name for v in before.graph.output]
    onnx.checker.check_model(after)
    assert_same(before, after, models.feeds(before, 1)[0], rtol=1e-4)
    stored = after.SerializeToString(deterministic=True)
    again = apply(rewrite, after)
    assert again.merged == {}
    assert after.SerializeToString(deterministic=True) == stored
    gone = {n.name for n in before.graph.node} - {n.name for n in after.graph.node}
    assert gone <= set(result.merged), "what is gone is accounted for"
    assert {by for by in result.merged.values() if by} <= {n.name for n in after.graph.node}
    assert before.graph.node != after.graph.node
    assert result.notes, "what is changed is told"
    assert all(note.strip() == note and note for note in result.notes)


@each_rewrite
def test_a_model_without_its_pattern_stays_as_it_is(rewrite: str) -> None:
    for name in MODELS.keys() - {"rich_net", *OTHERS.get(rewrite, ())}:
        before = plain(name)
        after = copy_model(before)
        assert REWRITES[rewrite](after, **options(rewrite, after)).merged == {}, name  # notes may say why not
        assert after == before, name


@each_pair
def test_values_to_keep_stay(rewrite: str, name: str) -> None:
    before = plain(name)
    values = [o for n in before.graph.node for o in n.output if o]
    after = copy_model(before)
    apply(rewrite, after, keep_values=values)
    made = {o for n in after.graph.node for o in n.output} | {i.name for i in after.graph.initializer}
    assert set(values) <= made


@each_rewrite
def test_results_do_not_depend_on_what_was_rewritten_before(rewrite: str) -> None:
    """Two models in a row are treated alike: no state is left between calls."""
    first, second = plain("rich_net"), plain("rich_net")
    apply(rewrite, first)
    apply(rewrite, second)
    assert first.SerializeToString(deterministic=True) == second.SerializeToString(deterministic=True)


def test_all_of_them_in_a_row() -> None:
    before = plain("rich_net")
    after = copy_model(before)
    for rewrite in REWRITES:
        apply(rewrite, after)
    assert_same(before, after, models.feeds(before, 1)[0], rtol=1e-3)
    kinds = {n.op_type for n in after.graph.node}
    assert not kinds & {"Identity", "Dropout", "BatchNormalization", "Sum", "Sigmoid", "Erf"}
