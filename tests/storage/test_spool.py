"""What does not fit in memory is on disk, and reads the same."""

import numpy as np
import pytest

from kenosis_ort.storage.spool import Spool


@pytest.mark.parametrize("memory", [0, 100, 10**6])
def test_entries_come_back(memory: int) -> None:
    entries = [
        {"x": np.full((i, 3), i, np.float32), "ids": np.arange(i), "text": np.array(["a", "bc"]), "n": i}
        for i in range(6)
    ]
    spool = Spool(memory=memory)
    for entry in entries:
        spool.append(entry)
    assert len(spool) == 6
    np.testing.assert_equal(list(spool), entries)
    assert spool[1]["x"].dtype == np.float32
    assert [e["n"] for e in spool[1:5][1:]] == [2, 3, 4]
    np.testing.assert_equal([spool[-1], spool[2]], [entries[5], entries[2]])  # after others were read
    with pytest.raises(IndexError):
        spool[6]


def test_memory_is_bounded_and_the_file_goes() -> None:
    spool = Spool(memory=1000)
    for i in range(50):
        spool.append({"x": np.full(100, i, np.float64)})
    folder = spool._arrays.scratch.path
    assert sum(f.stat().st_size for f in folder.iterdir()) > 45 * 800
    held = sum(v.nbytes for entry in spool._in_memory for v in entry.values())
    assert 0 < held <= 1000
    part = spool[48:]
    del spool
    assert part[1]["x"][0] == 49
    del part
    assert not folder.exists()


def test_arrays_are_copied() -> None:
    buffer = np.zeros(3)
    spool = Spool()
    for i in range(3):
        buffer[:] = i
        spool.append({"x": buffer})
    assert [entry["x"][0] for entry in spool] == [0, 1, 2]
