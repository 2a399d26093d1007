"""Values as JSON has them, and on disk; from files of others no code is loaded, no pipe is read, no bomb unfolds."""

import contextlib
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kenosis_ort import ArrayReader, CalibrationTable, HostProfile, KenosisError, OptionError, quantize_static
from kenosis_ort.graph.load import load_model
from kenosis_ort.option_types import RecipeFile
from kenosis_ort.storage.data import to_data
from kenosis_ort.storage.spool import Spool
from tests import models

Colour = Enum("Colour", {"RED": "red", "BLUE": "blue"}, type=str)


@dataclass(frozen=True)
class Leaf:
    name: str
    size: float | None = None
    colour: Colour = Colour.RED


@dataclass(frozen=True)
class Tree:
    first: Leaf
    others: tuple[Leaf, ...] = ()
    by_name: Mapping[str, tuple[Leaf, ...]] = field(default_factory=dict)


leaves = st.builds(Leaf, st.text(), st.none() | st.floats(allow_nan=False), st.sampled_from(Colour))
some = st.lists(leaves, max_size=3).map(tuple)


@given(st.builds(Tree, leaves, some, st.dictionaries(st.text(), some)))
def test_objects_are_mappings_of_their_fields_and_any_number_is_valid_json(tree):
    data = to_data(tree)
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    back = [Leaf(raw["name"], None if raw["size"] is None else float(raw["size"]), Colour(raw["colour"]))
            for raw in (data["first"], *data["others"])]  # fmt: skip
    assert back == [tree.first, *tree.others]
    assert data["by_name"] == {name: [to_data(leaf) for leaf in listed] for name, listed in tree.by_name.items()}


def test_what_json_lacks_goes_by_its_name():
    assert to_data({"a": (Leaf("b", float("-inf")),)}) == {"a": [{"name": "b", "size": "-inf", "colour": "red"}]}


# ---- what does not fit in memory is on disk --------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [0, 100, 10**6])
def test_entries_come_back(memory):
    entries = [
        {"x": np.full((i, 3), i, np.float32), "ids": np.arange(i), "text": np.array(["a", "bc"]), "n": i}
        for i in range(6)
    ]
    spool = Spool(memory=memory)
    for entry in entries:
        spool.append(entry)
    assert len(spool) == 6
    np.testing.assert_equal(list(spool), entries)
    assert (spool[1]["x"].dtype, [e["n"] for e in spool[1:5][1:]]) == (np.float32, [2, 3, 4])
    np.testing.assert_equal([spool[-1], spool[2]], [entries[5], entries[2]])  # after others were read
    with pytest.raises(IndexError):
        spool[6]


def test_memory_is_bounded_and_the_file_goes():
    spool = Spool(memory=1000)
    for i in range(50):
        spool.append({"x": np.full(100, i, np.float64)})
    folder = spool._arrays.scratch.path
    assert sum(f.stat().st_size for f in folder.iterdir()) > 45 * 800
    assert 0 < sum(v.nbytes for entry in spool._in_memory for v in entry.values()) <= 1000
    part = spool[48:]
    del spool
    assert part[1]["x"][0] == 49
    del part
    assert not folder.exists()


def test_arrays_are_copied():
    buffer, spool = np.zeros(3), Spool()
    for i in range(3):
        buffer[:] = i
        spool.append({"x": buffer})
    assert [entry["x"][0] for entry in spool] == [0, 1, 2]


# ---- files from outside ----------------------------------------------------------------------------------------------


def test_a_recipe_file_loads_no_library(tmp_path):
    file, model = tmp_path / "r.toml", models.mlp()
    file.write_text('schema = 1\n[recipe]\n[options]\ncustom_op_libraries = ["evil.so"]\n')
    with pytest.raises(OptionError, match="run code of their own"):
        RecipeFile.load(file)
    with pytest.raises(OptionError, match="pass them in the call"):
        quantize_static(model, tmp_path / "out.onnx", models.reader(model, 4), recipe=file)
    assert not (tmp_path / "out.onnx").exists()


READ = {
    "model": load_model, "recipe": RecipeFile.load, "data": lambda path: list(ArrayReader(path)),
    "ranges": CalibrationTable.load, "host": HostProfile.load,
}  # fmt: skip


def feed(pipe):
    """Writes to whoever reads a pipe, so that one that should not be read does not hang."""
    with contextlib.suppress(OSError):
        while True:
            pipe.write_bytes(b"nothing of use")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.parametrize("kind", READ)
def test_a_pipe_is_refused(kind, tmp_path):
    path = tmp_path / ("pipe.npz" if kind == "data" else "pipe")
    os.mkfifo(path)
    threading.Thread(target=feed, args=(path,), daemon=True).start()
    with pytest.raises(KenosisError, match=r"pipe, a device or|regular file"):
        READ[kind](path)


def test_an_archive_that_unfolds_to_much_more(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "bomb.npz", x=np.zeros((64, 4096), np.float32))
    monkeypatch.setattr("kenosis_ort.calibration.readers._LARGE", 2**19)
    with pytest.raises(KenosisError, match="unfolds to"):
        ArrayReader(tmp_path / "bomb.npz")


def test_an_encrypted_archive(tmp_path):
    path = tmp_path / "secret.npz"
    np.savez(path, x=np.zeros((4, 4), np.float32))
    raw = bytearray(path.read_bytes())
    raw[6] |= 1  # the flag of encryption, in the entry's head and in the directory
    raw[raw.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(raw)
    with pytest.raises(KenosisError, match="encrypted"):
        ArrayReader(path)
