from __future__ import annotations

import numpy as np
import pytest

from kenosis_ort.flow.rows import as_samples
from kenosis_ort.passes.evaluator import Rows

BATCH = {"x": np.random.default_rng(0).normal(0, 1, (24, 3)).astype(np.float32)}


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("what", ["alone", "mean", "first", "cumulated"])
def test_rows_are_tried_on_the_last_of_them(what: str, count: int) -> None:
    """Nine of 24 rows are run to know it; whatever joins rows joins those of two parts too."""
    seen = []

    def run(feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        x = feed["x"]
        seen.append(len(x))
        joined = {"alone": x, "mean": x - x.mean(0), "first": x - x[0], "cumulated": x.cumsum(0)}
        return [joined[what]]

    found = as_samples(run, [BATCH], count=count)
    if what == "alone":
        assert all(isinstance(each, Rows) for each in found)
        np.testing.assert_array_equal(np.concatenate([each["x"] for each in found]), BATCH["x"])
        assert len(found) == count
        assert sum(seen) == 9
    else:
        assert found == [BATCH]


def test_a_model_of_a_fixed_batch_gets_it_full() -> None:
    def run(feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        if len(feed["x"]) != 24:
            raise ValueError("24 rows")
        return [feed["x"] * 2]

    found = as_samples(run, [BATCH], count=8)
    assert [len(each["x"]) for each in found] == [24] * 8
    assert not any(isinstance(each, Rows) for each in found)
