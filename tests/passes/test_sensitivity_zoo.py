"""Real nets: the search removes most of the error for little work, on samples it has not seen."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest

from kenosis_ort.accuracy.compare import compare
from kenosis_ort.accuracy.metric import Budget
from kenosis_ort.passes.evaluator import Evaluator
from kenosis_ort.passes.leave_float import search_mixed_precision
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.verify import verify_fusion
from tests import planning
from tests.downloaded import ZOO


def _picture(size: int, seed: int) -> np.ndarray:
    """A smooth random picture with edges, values 0..1, shape (1, 1, size, size)."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:size, 0:size] / size
    waves = sum(
        np.sin(2 * np.pi * (a * x + b * y) + c) / (1 + abs(a) + abs(b)) for a, b, c in rng.uniform(-4, 4, (8, 3))
    )
    picture = waves + (x + rng.uniform(-0.5, 0.5) * y > rng.uniform(0.2, 0.8))
    picture = (picture - picture.min()) / np.ptp(picture)
    return picture.astype(np.float32)[None, None]


def test_super_resolution() -> None:
    if not (ZOO / "superres_espcn_x3.onnx").exists():
        pytest.skip("the zoo is not here")
    model = planning.prepared(onnx.load(ZOO / "superres_espcn_x3.onnx"))
    name = model.graph.input[0].name
    feeds = [{name: _picture(48, seed)} for seed in range(8)]

    def build(keep_float: Mapping[str, str]) -> tuple[onnx.ModelProto, PlacementPlan]:
        made = planning.quantize(model, feeds=feeds[:4], keep_float=keep_float)
        return made.quantized, made.plan

    def replan(keep_float: Mapping[str, str]) -> PlacementPlan:
        return planning.plan_of(model, keep_float=keep_float)

    evaluator = Evaluator(model, feeds[4:])
    options: dict[str, Any] = {"feeds": feeds[:2], "loss": partial(evaluator.loss, budget=1e-6), "replan": replan}
    found = search_mixed_precision(model, build, budget=Budget(1e-6), **options)
    assert found.loss < 0.8 * found.loss_before
    assert 0 < found.float_share <= 0.05
    quantized, plan = build(found.keep_float)
    proof = verify_fusion(quantized, plan=plan)
    assert not any(proof.by_node[name].integer for name in found.left_float)
    before, after = (compare(model, q, feeds[4:], threads=1) for q in (build({})[0], quantized))
    assert after.outputs[0].sqnr_db > before.outputs[0].sqnr_db + 2
