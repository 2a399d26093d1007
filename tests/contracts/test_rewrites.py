"""What every float rewrite has to hold: same interface, same numbers, nothing left to do the second time."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import onnx
import pytest

from kenosis_ort.graph.copying import copy_model
from kenosis_ort.graph.prepare import RewriteResult, prepare
from kenosis_ort.graph.runtime import runtime_limits
from kenosis_ort.graph.shapes import infer_shapes
from kenosis_ort.rewrite import FLOAT_FORMS, INTEGER_FORMS, PREPARATION
from tests import models
from tests.contracts.rich import rich_net
from tests.graph.build import assert_same

MODELS: dict[str, Callable[[], onnx.ModelProto]] = {**models.ALL, "rich_net": rich_net}
REWRITES: dict[str, Callable[..., RewriteResult]] = {
    rule.__name__: rule for rule in (*PREPARATION, *FLOAT_FORMS, *INTEGER_FORMS)
}
each_rewrite = pytest.mark.parametrize("rewrite", REWRITES)
each_model = pytest.mark.parametrize("name", MODELS)


def plain(name: str) -> onnx.ModelProto:
    """Returns a model as a rewrite gets it: named nodes, constants as initializers, shapes inferred."""
    limits = runtime_limits()
    return prepare(MODELS[name](), min_opset=13, max_ir=limits.max_ir, max_opset=limits.max_opset).proto


def apply(rewrite: str, model: onnx.ModelProto, keep_values: Collection[str] = ()) -> RewriteResult:
    options: dict[str, Any] = {}
    if REWRITES[rewrite] in INTEGER_FORMS:
        options["nodes"] = {n.name for n in model.graph.node}
    result = REWRITES[rewrite](model, keep_values=keep_values, **options)
    infer_shapes(model)
    return result


@each_rewrite
@each_model
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
    changed = before.graph.node != after.graph.node
    assert result.notes or not changed, "what is changed is told"
    assert all(note.strip() == note and note for note in result.notes)


@each_rewrite
def test_each_finds_something_in_the_rich_net(rewrite: str) -> None:
    model = plain("rich_net")
    if rewrite == "batch_norm_to_conv":
        apply("fold_batch_norm", model)  # leaves the one that no Conv precedes
    before = copy_model(model)
    assert apply(rewrite, model).notes
    assert model.graph.node != before.graph.node


@each_rewrite
@each_model
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
