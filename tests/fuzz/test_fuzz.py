"""Mutated models through the public doors: a result that holds, or one sentence. `benchmarks/fuzz.py` runs more."""

import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import settings

from tests.fuzz.case import Case
from tests.fuzz.gentle import GENTLE
from tests.fuzz.isolated import IS_POSSIBLE, isolated
from tests.fuzz.seeds import SEEDS, seed_bytes, seed_feeds, seed_model, split_data
from tests.fuzz.structure import STRUCTURAL
from tests.models import session

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "fuzz.py"


@pytest.mark.skipif(not IS_POSSIBLE, reason="cases are forked")
def test_mutated_models_end_in_a_result_or_one_sentence(tmp_path):
    """As many cases as the profile says, the same each time.

    They are drawn in a process of their own: what hypothesis draws depends on the modules that are loaded.
    ``onnxruntime_extensions.cvt``, which another test loads, asks for the Python form of protobuf in the environment:
    that one refuses text which is no UTF-8.
    """
    environment = {**os.environ}
    environment.pop("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", None)
    count = str(settings.default.max_examples if settings.default else 25)
    words = [sys.executable, str(BENCHMARK), "--cases", count, "--jobs", "1", "--keep", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{count} cases" in done.stdout


@pytest.mark.skipif(not IS_POSSIBLE, reason="cases are forked")
def test_a_name_that_is_no_text_is_refused_on_purpose_though_the_runtime_takes_it():
    model = seed_bytes("linear").replace(b"fc0", b"fc\xff")
    found = isolated(Case("linear", "quantize_static", {"promise": False}, model=model, feeds=seed_feeds("linear")))
    assert (found["class"], "utf-8" in found["detail"].lower()) == ("refused", True), found


@pytest.mark.parametrize("name", sorted(SEEDS))
def test_every_seed_runs_in_the_runtime(name, tmp_path):
    model = seed_model(name)
    (tmp_path / "weights.bin").write_bytes(split_data(model))
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    opened = session(tmp_path / "model.onnx")
    assert all(opened.run(None, feed) for feed in seed_feeds(name))


@pytest.mark.parametrize("mutation", sorted({*STRUCTURAL, *GENTLE}, key=lambda m: m.__name__), ids=lambda m: m.__name__)
def test_every_mutation_changes_models(mutation):
    changed = 0
    for number, name in enumerate(sorted(SEEDS) * 4):
        model = seed_model(name)
        assert isinstance(mutation(model, Random(number)), (str, type(None)))
        changed += model.SerializeToString() != seed_model(name).SerializeToString()
    assert changed > len(SEEDS)
