"""Files from outside: no code is loaded from them, no pipe is read for ever, no bomb unfolds."""

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kenosis_ort import ArrayReader, CalibrationTable, KenosisError, OptionError, quantize_static
from kenosis_ort.graph.load import load_model
from kenosis_ort.option_types import RecipeFile
from kenosis_ort.targets.profile import HostProfile
from tests import models


def test_a_recipe_file_loads_no_library(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text('schema = 1\n[recipe]\n[options]\ncustom_op_libraries = ["evil.so"]\n')
    with pytest.raises(OptionError, match="run code of their own"):
        RecipeFile.load(file)
    model = models.mlp()
    with pytest.raises(OptionError, match="pass them in the call"):
        quantize_static(model, tmp_path / "out.onnx", models.reader(model, 4), recipe=file)
    assert not (tmp_path / "out.onnx").exists()


READ: dict[str, Callable[[Path], Any]] = {
    "model": load_model,
    "recipe": RecipeFile.load,
    "data": lambda path: list(ArrayReader(path)),
    "ranges": CalibrationTable.load,
    "host": HostProfile.load,
}


def feed(pipe: Path) -> None:
    """Writes to whoever reads a pipe, so that one that should not be read does not hang."""
    with contextlib.suppress(OSError):
        while True:
            pipe.write_bytes(b"nothing of use")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.parametrize("kind", READ)
def test_a_pipe_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / ("pipe.npz" if kind == "data" else "pipe")
    os.mkfifo(path)
    threading.Thread(target=feed, args=(path,), daemon=True).start()
    with pytest.raises(KenosisError, match=r"pipe, a device or|regular file"):
        READ[kind](path)


def test_an_archive_that_unfolds_to_much_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "bomb.npz", x=np.zeros((64, 4096), np.float32))
    monkeypatch.setattr("kenosis_ort.calibration.readers._LARGE", 2**19)
    with pytest.raises(KenosisError, match="unfolds to"):
        ArrayReader(tmp_path / "bomb.npz")


def test_an_encrypted_archive(tmp_path: Path) -> None:
    path = tmp_path / "secret.npz"
    np.savez(path, x=np.zeros((4, 4), np.float32))
    raw = bytearray(path.read_bytes())
    raw[6] |= 1  # the flag of encryption, in the entry's head and in the directory
    raw[raw.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(raw)
    with pytest.raises(KenosisError, match="encrypted"):
        ArrayReader(path)
