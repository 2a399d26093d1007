"""Mutated models through the public doors: a result that holds, or one sentence. `benchmarks/fuzz.py` runs more."""

from __future__ import annotations

from pathlib import Path
from random import Random

import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given, note, settings

from tests.fuzz.case import ALLOWED, Case, cases
from tests.fuzz.gentle import GENTLE
from tests.fuzz.isolated import IS_POSSIBLE, isolated
from tests.fuzz.seeds import SEEDS, seed_feeds, seed_model, split_data
from tests.fuzz.structure import STRUCTURAL, Mutation


@pytest.mark.skipif(not IS_POSSIBLE, reason="cases are forked")
@settings(derandomize=True, suppress_health_check=list(HealthCheck))  # what is new is looked for by the benchmark
@given(case=cases())
def test_mutated_models_end_in_a_result_or_one_sentence(case: Case) -> None:
    result = isolated(case)
    note(result["detail"])
    assert result["class"] in ALLOWED


@pytest.mark.parametrize("name", sorted(SEEDS))
def test_every_seed_runs_in_the_runtime(name: str, tmp_path: Path) -> None:
    model = seed_model(name)
    (tmp_path / "weights.bin").write_bytes(split_data(model))
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    session = ort.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    for feed in seed_feeds(name):
        assert session.run(None, feed)


@pytest.mark.parametrize("mutation", sorted({*STRUCTURAL, *GENTLE}, key=lambda m: m.__name__), ids=lambda m: m.__name__)
def test_every_mutation_changes_models(mutation: Mutation) -> None:
    changed = 0
    for number, name in enumerate(sorted(SEEDS) * 4):
        model = seed_model(name)
        before = model.SerializeToString()
        said = mutation(model, Random(number))
        assert said is None or isinstance(said, str)
        changed += model.SerializeToString() != before
    assert changed > len(SEEDS)
