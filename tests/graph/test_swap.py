"""Whatever kills the process while a model is put in place, the old one or the new one is there, with its own data."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from kenosis_ort.errors import KenosisWarning, OutputError, warn_caller
from kenosis_ort.graph.load import load_model
from kenosis_ort.graph.save import write_model
from tests.graph.build import net as parsed
from tests.storage.killing import killed_at_every_step

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def net(seed: int, size: int = 64) -> onnx.ModelProto:
    text = f"(float[1,{size}] x) => (float[1,{size}] y) <float[{size},{size}] w> {{ y = MatMul(x, w) }}"
    return parsed(text, seed=seed)


OLD, NEW = net(0), net(1, size=48)


def write(proto: onnx.ModelProto, out: Path, *, external: bool, warn: Callable[[str], object] = warn_caller) -> None:
    write_model(proto, out, external_data=external, check=lambda _: None, warn=warn)


def no_links(*_: object, **__: object) -> None:
    raise OSError(95, "Operation not supported")


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
@pytest.mark.parametrize("new_external", [True, False], ids=["to data", "to one file"])
@pytest.mark.parametrize("old", ["data", "one file", "nothing", "content name"])
def test_killed_at_any_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new_external: bool, links: bool
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    out = tmp_path / "out.onnx"

    def reset() -> None:
        for file in tmp_path.glob("out*"):
            file.unlink()
        if old != "nothing":
            write(OLD, out, external=old != "one file")
        if old == "content name":
            with monkeypatch.context() as patch:
                patch.setattr(os, "link", no_links)
                write(OLD, out, external=True)

    seen = set()
    reset()
    for _ in killed_at_every_step(lambda: write(NEW, out, external=new_external)):
        if out.exists():
            found = load_model(out).proto
            assert found in (OLD, NEW)
            seen.add("new" if found == NEW else "old")
        else:
            assert old == "nothing"
            seen.add("old")
        write(NEW, out, external=new_external)  # the next run cleans up
        assert load_model(out).proto == NEW
        names = {p.name for p in tmp_path.iterdir()}
        if old == "data" and not new_external:
            names.discard("out.onnx.data")  # a name that a user may have given
        assert len(names) == 1 + new_external, names
        reset()
    assert seen == {"old", "new"}
    assert load_model(out).proto == NEW
    if links and new_external:
        assert sorted(p.name for p in tmp_path.iterdir()) == ["out.onnx", "out.onnx.data"]


def test_data_that_the_model_does_not_read_stay(tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    (tmp_path / "out.onnx.data").write_bytes(b"somebody's")
    (tmp_path / "out.onnx.backup.data").write_bytes(b"somebody's")
    write(NEW, out, external=False)
    assert {p.name for p in tmp_path.iterdir()} == {"out.onnx", "out.onnx.data", "out.onnx.backup.data"}


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
@pytest.mark.parametrize("old", ["nothing", "one file", "shared"])
def test_data_of_another_model_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, links: bool) -> None:
    """Whether another model was stored there first, or two read the same data."""
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    out, other, data = tmp_path / "out.onnx", tmp_path / "other.onnx", tmp_path / "out.onnx.data"

    def reset() -> None:
        for file in tmp_path.glob("out*"):
            file.unlink()
        onnx.save(copy.deepcopy(OLD), other, save_as_external_data=True, location=data.name, size_threshold=0)
        if old == "shared":
            out.write_bytes(other.read_bytes())
        elif old == "one file":
            write(OLD, out, external=False)

    reset()
    for _ in killed_at_every_step(lambda: write(NEW, out, external=True, warn=str)):
        assert load_model(other).proto == OLD
        assert (not out.exists() and old == "nothing") or load_model(out).proto in (OLD, NEW)
        reset()
    warned: list[str] = []
    for size in (48, 32, 32):
        made = net(1, size=size)
        write_model(made, out, external_data=True, check=lambda _: None, warn=warned.append)
        assert load_model(out).proto == made
        assert load_model(other).proto == OLD
        assert len(list(tmp_path.iterdir())) == 4  # the data of the one before are gone
    assert len(warned) == 3
    assert "'other.onnx' reads 'out.onnx.data'" in warned[0]
    write(NEW, out, external=False)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["other.onnx", "out.onnx", "out.onnx.data"]
    assert load_model(other).proto == OLD


def test_a_model_that_cannot_be_read_counts_as_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.onnx"
    (tmp_path / "out.onnx.data").write_bytes(b"somebody's")
    (tmp_path / "closed.onnx").write_bytes(b"not for us")
    opened = Path.open

    def refuse(path: Path, *arguments: Any, **keywords: Any) -> Any:
        if path.name == "closed.onnx":
            raise PermissionError(13, "Permission denied")
        return opened(path, *arguments, **keywords)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.warns(KenosisWarning, match=r"'closed\.onnx' reads"):
        write(NEW, out, external=True)
    assert (tmp_path / "out.onnx.data").read_bytes() == b"somebody's"


@pytest.mark.parametrize("failing", [os.replace, os.link], ids=lambda f: f.__name__)
@pytest.mark.parametrize("call", range(4))
def test_a_step_that_fails_leaves_the_old_pair_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: Callable[..., None], call: int
) -> None:
    out = tmp_path / "out.onnx"
    write(OLD, out, external=True)
    left = call

    def fail(*arguments: object, **keywords: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(28, "No space left on device")
        failing(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(os, failing.__name__, fail)
        expected = NEW
        try:
            write(NEW, out, external=True)
        except OutputError:
            expected = OLD
    assert load_model(out).proto == expected
    assert len(list(tmp_path.iterdir())) == 2
