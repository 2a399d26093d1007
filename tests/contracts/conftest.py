"""Plans are the same on every machine."""

from __future__ import annotations

import pytest

from kenosis_ort.targets.onednn import openvino_rules as rules


@pytest.fixture(autouse=True)
def _without_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "has_matrix_tiles", lambda: False)
