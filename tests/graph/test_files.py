"""Models are written whole or not at all, whatever fails or kills the process; weights that stay on disk."""

import copy
import os
import shutil
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import kenosis_ort
from kenosis_ort.errors import KenosisWarning, ModelLoadError, OutputError, VerificationError, warn_caller
from kenosis_ort.graph import external_data, outside
from kenosis_ort.graph.files import check_destination, weights_on_disk, write_model
from kenosis_ort.graph.load import load_model
from tests import models
from tests.graph.build import assert_same, net, run
from tests.storage.killing import killed_at_every_step
from tests.weights.test_quantize import decoder, feeds


def small():
    return net("(float[1,64] x) => (float[1,64] y) <float[64,64] w, float[64] b> { h = MatMul(x, w) y = Add(h, b) }")


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def without_temporary_folders(folder):
    """Removes what a killed process has left."""
    for left in folder.glob(".kenosis-write-*"):
        shutil.rmtree(left)


X = {"x": np.ones((1, 64), np.float32)}


def accept(path):
    run(str(path), X)


def refuse(path):
    assert path.exists()
    raise VerificationError("no good")


@pytest.mark.parametrize("external", [False, True])
def test_what_is_written_is_the_model(tmp_path, external):
    proto, out = small(), tmp_path / "out.onnx"
    for _ in range(2):  # the second time in the place of the first
        write_model(proto, out, external_data=external, check=accept)
    assert files(tmp_path).keys() == ({"out.onnx", "out.onnx.data"} if external else {"out.onnx"})
    assert_same(proto, str(out), X, rtol=0)
    assert load_model(out).proto == proto == small()


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("before", [{}, {"out.onnx": b"before", "out.onnx.data": b"data before"}])
def test_on_refusal_nothing_changes(tmp_path, before, external):
    for name, content in before.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(VerificationError):
        write_model(small(), tmp_path / "out.onnx", external_data=external, check=refuse)
    assert files(tmp_path) == before


def test_a_link_is_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link.onnx").symlink_to(tmp_path / "real" / "out.onnx")
    write_model(small(), tmp_path / "link.onnx", external_data=False, check=accept)
    assert ((tmp_path / "real" / "out.onnx").is_file(), (tmp_path / "link.onnx").is_symlink()) == (True, True)


@pytest.mark.parametrize(("destination", "message"), [
    ("none/out.onnx", "does not exist"), ("", "is a folder"), ("/dev/null", "regular file"),
    ("o" * 250 + ".onnx", "could not be written: File name too long"),
])  # fmt: skip
def test_bad_destinations_are_named_with_a_fix(tmp_path, destination, message):
    with pytest.raises(OutputError, match=message) as caught:
        write_model(small(), tmp_path / destination, external_data=True, check=accept)
    assert caught.value.fix
    assert not files(tmp_path)


def test_tensors_of_every_layout_survive_external_data(tmp_path):
    proto, out = net("(float[1,64] x) => (float[1,64] y) { y = Identity(x) }"), tmp_path / "out.onnx"
    proto.graph.initializer.extend([
        helper.make_tensor("typed", TensorProto.FLOAT, [2048], np.arange(2048.0)),
        onnx.numpy_helper.from_array(np.linspace(-2, 2, 4096).astype(np.float16), "half"),
        helper.make_tensor("text", TensorProto.STRING, [300], [b"word!"] * 300),
        helper.make_tensor("four", TensorProto.INT4, [4097], [i % 15 - 7 for i in range(4097)]),
    ])  # fmt: skip
    write(proto, out, external=True)
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in load_model(out).proto.graph.initializer}
    for tensor in proto.graph.initializer:
        np.testing.assert_array_equal(stored[tensor.name], onnx.numpy_helper.to_array(tensor))


def test_what_cannot_be_written_is_told_before_any_work(tmp_path, monkeypatch):
    with pytest.raises(OutputError, match="output path is too long"):
        check_destination(tmp_path / ("o" * 300))
    monkeypatch.setattr(os, "access", lambda path, _: str(path) != str(tmp_path))
    with pytest.raises(OutputError, match="not writable"):
        check_destination(tmp_path / "out.onnx")


@pytest.mark.parametrize("length", [250, 255])
def test_names_as_long_as_the_system_takes_are_written(tmp_path, length):
    """Although nothing can lie beside them."""
    out = tmp_path / ("o" * (length - 5) + ".onnx")
    check_destination(out)
    for _ in range(2):
        write_model(small(), out, external_data=False, check=accept)
    assert files(tmp_path).keys() == {out.name}


# ---- the old model or the new one is there, with its own data --------------------------------------------------------


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture(params=[True, False], ids=["links", "no links"])
def links(request, monkeypatch):
    """Whether the file system has hard links."""
    if not request.param:
        monkeypatch.setattr(os, "link", no_links)
    return bool(request.param)


def square(seed, size=64):
    text = f"(float[1,{size}] x) => (float[1,{size}] y) <float[{size},{size}] w> {{ y = MatMul(x, w) }}"
    return net(text, seed=seed)


OLD, NEW = square(0), square(1, size=48)


def write(proto, out, *, external, warn=warn_caller):
    write_model(proto, out, external_data=external, check=lambda _: None, warn=warn)


no_links = Mock(side_effect=OSError(95, "Operation not supported"))


@needs_fork
@pytest.mark.parametrize("new_external", [True, False], ids=["to data", "to one file"])
@pytest.mark.parametrize("old", ["data", "one file", "nothing", "content name"])
def test_killed_at_any_step(tmp_path, monkeypatch, old, new_external, links):
    out = tmp_path / "out.onnx"

    def reset():
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
        found = load_model(out).proto if out.exists() else None
        assert found in ((None, NEW) if old == "nothing" else (OLD, NEW))
        seen.add(found == NEW)
        write(NEW, out, external=new_external)  # the next run removes data that nobody reads
        without_temporary_folders(tmp_path)
        assert load_model(out).proto == NEW
        names = set(files(tmp_path))
        if old == "data" and not new_external:
            names.discard("out.onnx.data")  # a name that a user may have given
        assert len(names) == 1 + new_external, names
        reset()
    assert (seen, load_model(out).proto) == ({False, True}, NEW)
    assert not (links and new_external) or files(tmp_path).keys() == {"out.onnx", "out.onnx.data"}


def test_data_that_the_model_does_not_read_stay(tmp_path):
    for name in ("out.onnx.data", "out.onnx.backup.data"):
        (tmp_path / name).write_bytes(b"somebody's")
    write(NEW, tmp_path / "out.onnx", external=False)
    assert files(tmp_path).keys() == {"out.onnx", "out.onnx.data", "out.onnx.backup.data"}


@needs_fork
@pytest.mark.parametrize("old", ["nothing", "one file", "shared"])
def test_data_of_another_model_stay(tmp_path, old, links):
    """Whether another model was stored there first, or two read the same data."""
    out, other, data = tmp_path / "out.onnx", tmp_path / "other.onnx", tmp_path / "out.onnx.data"

    def reset():
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
        without_temporary_folders(tmp_path)
        reset()
    warned = []
    for size in (48, 32, 32):
        write(square(1, size=size), out, external=True, warn=warned.append)
        assert (load_model(out).proto, load_model(other).proto) == (square(1, size=size), OLD)
        assert len(files(tmp_path)) == 4  # the data of the one before are gone
    assert len(warned) == 3
    assert "'other.onnx' reads 'out.onnx.data'" in warned[0]
    write(NEW, out, external=False)
    assert (files(tmp_path).keys(), load_model(other).proto) == ({"other.onnx", "out.onnx", "out.onnx.data"}, OLD)


def test_a_model_that_cannot_be_read_counts_as_a_reader(tmp_path, monkeypatch):
    for name in ("out.onnx.data", "closed.onnx"):
        (tmp_path / name).write_bytes(b"somebody's")
    monkeypatch.setattr("mmap.mmap", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.warns(KenosisWarning, match=r"'closed\.onnx' reads"):
        write(NEW, tmp_path / "out.onnx", external=True)
    assert (tmp_path / "out.onnx.data").read_bytes() == b"somebody's"


@pytest.mark.parametrize("old", ["a pair", "no model"])
@pytest.mark.parametrize("failing", [os.replace, os.link], ids=lambda f: f.__name__)
@pytest.mark.parametrize("call", range(4))
def test_a_step_that_fails_leaves_the_old_pair_or_the_new_one(tmp_path, monkeypatch, failing, call, old):
    out, full = tmp_path / "out.onnx", OSError(28, "No space left on device")
    if old == "a pair":
        write(OLD, out, external=True)
    else:
        out.write_bytes(b"before")
        out.with_name("out.onnx.data").write_bytes(b"data before")
    before, failed = files(tmp_path), False
    later = [full] * 9 if old == "a pair" else [DEFAULT] * 9  # what is undone has to work
    with monkeypatch.context() as patch:
        patch.setattr(os, failing.__name__, Mock(wraps=failing, side_effect=[*[DEFAULT] * call, full, *later]))
        try:
            write(NEW, out, external=True)
        except OutputError as error:
            failed = "No space left" in str(error)
            assert failed
    assert files(tmp_path) == before if failed else load_model(out).proto == NEW
    assert len(files(tmp_path)) == 2


# ---- weights that stay on disk: the same results as with all of them in memory, and no file is followed unchecked ----


@pytest.fixture
def on_disk(monkeypatch):
    """Small weights are treated as large ones."""
    if not outside.IS_POSSIBLE:
        pytest.skip("files have no common root here")
    monkeypatch.setattr(external_data, "_IN_MEMORY_UP_TO", 0)
    monkeypatch.setattr(external_data, "_LEFT_OUTSIDE", 512)
    monkeypatch.setattr(outside, "_LEAST", 256)


def split(model, folder):
    path = folder / "model.onnx"
    copy = outside.copy_model(model)  # which saving changes
    onnx.save_model(copy, path, save_as_external_data=True, location="model.data", size_threshold=256)
    return path


def test_what_is_made_goes_to_disk_once(tmp_path, on_disk):
    lazy = load_model(split(decoder(), tmp_path), lazily=True).proto
    tensor = onnx.numpy_helper.from_array(np.arange(1024, dtype=np.float32), "t")
    assert outside.put_outside(tensor) is tensor
    with weights_on_disk(lazy):
        first, second = outside.put_outside(tensor), outside.put_outside(tensor)
        assert (outside.is_outside(first), bool(first.raw_data)) == (True, False)
        assert first == second
        assert np.array_equal(outside.array_in(first), outside.array_in(tensor))
        file = Path("/", next(e.value for e in first.external_data if e.key == "location"))
        assert file.is_file()
    assert not file.exists()


def test_a_file_cannot_claim_to_be_checked(tmp_path):
    path = split(decoder(), tmp_path)
    proto = onnx.load_model(path, load_external_data=False)
    tensor = next(t for t in proto.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL)
    del tensor.external_data[:]
    for key, value in (("location", "etc/passwd"), ("checksum", "kenosis-0")):
        tensor.external_data.add(key=key, value=value)
    assert not outside.is_outside(tensor)
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ModelLoadError):
        load_model(path, lazily=True)


def parts(path):
    """Returns all that a file says, wherever its weights lie."""
    model = onnx.load(path)
    return (
        {t.name: (t.data_type, outside.array_in(t).tobytes()) for t in model.graph.initializer},
        list(model.graph.node),
        list(model.graph.output),
    )


def weights_alone(samples):
    return lambda path, out: kenosis_ort.quantize_weights(path, out, feeds(samples) or None)


def by_recipe(recipe):
    return lambda path, out: kenosis_ort.quantize_static(
        path, out, models.reader(load_model(path).proto, 10), recipe=recipe, promise=False
    )


@pytest.mark.parametrize(("build", "call"), [
    (decoder, weights_alone(0)), (decoder, weights_alone(8)), (models.transformer_block, by_recipe("fast")),
    (lambda: models.bn_net(channels=16), by_recipe("accurate")), (models.transformer_block, by_recipe("weight-only-4")),
], ids=["weights alone", "by samples", "fast", "accurate", "weight-only-4"])  # fmt: skip
def test_files_and_reports_are_those_made_in_memory(tmp_path, on_disk, monkeypatch, build, call):
    path, reports = split(build(), tmp_path), []
    for name, limit in (("disk", 0), ("memory", 2**40)):
        monkeypatch.setattr(external_data, "_IN_MEMORY_UP_TO", limit)
        reports.append(call(path, tmp_path / f"{name}.onnx"))
        assert not [text for text in getattr(reports[-1], "warnings", ()) if "bug" in text]
    assert parts(tmp_path / "disk.onnx") == parts(tmp_path / "memory.onnx")
    if build is decoder:
        assert all((tmp_path / f"{name}.onnx.data").exists() for name in ("disk", "memory"))
        assert repr(reports[0].layers) == repr(reports[1].layers)  # NaN is not itself
        assert reports[0].outputs == reports[1].outputs


def test_an_output_may_take_the_place_of_its_source(tmp_path, on_disk):
    path = split(decoder(), tmp_path)
    kenosis_ort.quantize_weights(path, tmp_path / "apart.onnx", feeds(6))
    kenosis_ort.quantize_weights(path, path, feeds(6))
    assert parts(path) == parts(tmp_path / "apart.onnx")


def test_all_modules_read_tensors_wherever_they_lie():
    """ONNX' own function finds nothing of what lies on disk."""
    package = Path(kenosis_ort.__file__).parent
    found = {p.name for p in package.rglob("*.py") if "numpy_helper.to_array(" in p.read_text(encoding="utf-8")}
    assert found == {"outside.py", "qdq.py"}  # which wraps it, and which knows the folder


def test_calibrating_and_planning_leave_weights_on_disk(tmp_path, on_disk, monkeypatch):
    path, reader = split(decoder(), tmp_path), kenosis_ort.ArrayReader
    monkeypatch.setattr(external_data, "_IN_MEMORY_UP_TO", 2**40)
    held = kenosis_ort.calibrate(path, reader(feeds(3))).to_json()
    planned = kenosis_ort.preview(path)
    monkeypatch.setattr(external_data, "_IN_MEMORY_UP_TO", 0)
    loaded = Mock(wraps=external_data.read_external_data)
    monkeypatch.setattr("kenosis_ort.graph.load.read_external_data", loaded)
    assert kenosis_ort.calibrate(path, reader(feeds(3))).to_json() == held
    assert kenosis_ort.calibrate(path, tmp_path / "t.json", reader(feeds(3))).samples == 3
    assert kenosis_ort.preview(path).nodes == planned.nodes
    assert [outside.refers_outside(call.args[0]) for call in loaded.call_args_list] == [True] * 3
