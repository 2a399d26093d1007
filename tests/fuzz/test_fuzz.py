"""Mutated models through the public doors: a result that holds, or one sentence. `benchmarks/fuzz.py` runs more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tests.fuzz.case import ALLOWED, make_case
from tests.fuzz.gentle import GENTLE
from tests.fuzz.seeds import SEEDS, seed_feeds, seed_model, split_data
from tests.fuzz.structure import STRUCTURAL

ROOT = Path(__file__).parents[2]
SEED = 10
CASES, PARTS = 90, 2

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="cases are forked")


@pytest.mark.parametrize("part", range(PARTS))
def test_mutated_models_end_in_a_result_or_one_sentence(part: int, tmp_path: Path) -> None:
    count = CASES // PARTS
    words = ["--cases", count, "--first", part * count, "--seed", SEED, "--jobs", 1, "--keep", tmp_path]
    command = [sys.executable, "-m", "tests.fuzz.farm", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == count
    assert [r for r in results if r["class"] not in ALLOWED] == []
    assert {r["class"] for r in results} & {"int8", "float", "done"}, (
        "nothing came through: the mutations are too coarse"
    )


def test_a_case_follows_from_its_seed_and_number() -> None:
    first, second, other = make_case(SEED, 3), make_case(SEED, 3), make_case(SEED, 4)
    assert (first.told(), first.model, first.data) == (second.told(), second.model, second.data)
    assert first.told() != other.told()


@pytest.mark.parametrize("name", sorted(SEEDS))
def test_every_seed_runs_in_the_runtime(name: str, tmp_path: Path) -> None:
    import onnxruntime as ort

    model = seed_model(name)
    (tmp_path / "weights.bin").write_bytes(split_data(model))
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    session = ort.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    for feed in seed_feeds(name):
        assert session.run(None, feed)


@pytest.mark.parametrize("mutation", sorted({*STRUCTURAL, *GENTLE}, key=lambda m: m.__name__), ids=lambda m: m.__name__)
def test_every_mutation_changes_models(mutation) -> None:
    changed = 0
    for number, name in enumerate(sorted(SEEDS) * 4):
        model = seed_model(name)
        before = model.SerializeToString()
        said = mutation(model, Random(number))
        assert said is None or isinstance(said, str)
        changed += model.SerializeToString() != before
    assert changed > len(SEEDS)
