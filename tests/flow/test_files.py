"""What a call writes and costs: no file is mixed up; sessions, runs, work against the number of nodes, peak memory."""

import cProfile
import errno
import os
import pstats
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest

from kenosis_ort import (
    ArrayReader,
    CalibrationError,
    CalibrationTable,
    KenosisWarning,
    OptionError,
    OutputError,
    Recipe,
    calibrate,
    preview,
    quantize_static,
    quantize_weights,
    verify_fusion,
)
from kenosis_ort.graph.outside import copy_model
from kenosis_ort.runtime.counting import counted
from tests import models, planning
from tests.flow.support import quality, quantized

BLOCK_MODEL = models.residual_block()


def save_with_data(path, location):
    onnx.save(copy_model(BLOCK_MODEL), path, save_as_external_data=True, location=location, size_threshold=0)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a model of external data, arrays, a recipe and a cache; the current one."""
    save_with_data(tmp_path / "model.onnx", "weights.bin")
    np.savez(tmp_path / "data.npz", x=np.concatenate([feed["x"] for feed in models.feeds(BLOCK_MODEL)]))
    Recipe("plain").save(tmp_path / "recipe.toml")
    quantized(BLOCK_MODEL, tmp_path / "other.onnx", calibration_cache_path=tmp_path / "cache.json")
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("output", "options", "text"), [
    ("weights.bin", {}, "the output is the float model's external data"),
    ("sub/../data.npz", {}, "the output is the calibration data"),
    ("recipe.toml", {"recipe": "recipe.toml"}, "the output is the recipe"),
    ("cache.json", {"calibration_cache_path": "cache.json"}, "the output is the calibration cache"),
    ("new.onnx", {"calibration_cache_path": Path("sub/../new.onnx")}, "the calibration cache is the out"),
    ("new.onnx", {"calibration_cache_path": "new.onnx.data"}, "the calibration cache is the output's ext"),
    ("near.onnx", {}, "the output's external data is the float model's external data"),
])  # fmt: skip
def test_no_output_is_an_input_or_another_output(folder, output, options, text):
    model = "far.onnx" if output == "near.onnx" else "model.onnx"
    save_with_data(folder / "far.onnx", "near.onnx.data")
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    for door in (partial(quantize_static, **{"recipe": "plain", **options}), *([] if options else [quantize_weights])):
        with pytest.raises(OutputError, match=text) as caught:
            door(model, output, ArrayReader("data.npz"))
        assert caught.value.fix
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("kind", ["html", "recipe", "recipe alone", "table"])
def test_what_is_saved_takes_the_place_of_its_own_kind_alone(folder, kind):
    report = quantize_static("model.onnx", "made.onnx", ArrayReader("data.npz"), recipe="plain", promise=False)
    save = {
        "html": report.save_html, "recipe": report.save_recipe, "recipe alone": Recipe("plain").save,
        "table": CalibrationTable.load("cache.json").save,
    }[kind]  # fmt: skip
    texts = {"page.html": " <!doctype html>", "a.json": '{"a": 1}', "a.toml": "# a\na = 1\n", "a.py": "#!/a\na = 1\n"}
    for name, text in texts.items():
        (folder / name).write_text(text)
    own = {"html": "page.html", "table": "a.json"}.get(kind, "a.toml")
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    others = {"model.onnx", "weights.bin", "made.onnx", "data.npz", "none.onnx", *texts} - {own}
    for other in others:
        with pytest.raises((OutputError, CalibrationError), match="would take the place of a file of another kind"):
            save(other)
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    (folder / "empty").touch()
    for name in (own, "new", "empty"):
        save(name)
        save(name)
    assert (folder / own).read_bytes() == (folder / "new").read_bytes() == (folder / "empty").read_bytes()


@pytest.mark.parametrize("linked", ["model.onnx", "weights.bin"])
def test_an_output_that_is_a_hard_link_replaces_one_name_and_says_nothing(folder, recwarn, linked):
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    os.link(linked, "hard.onnx")
    report = quantize_static("model.onnx", "hard.onnx", ArrayReader("data.npz"), recipe="plain", promise=False)
    assert not report.warnings
    assert not [warned for warned in recwarn if "replaced" in str(warned.message)]
    assert {path: path.read_bytes() for path in before} == before
    assert "QuantizeLinear" in {node.op_type for node in onnx.load("hard.onnx").graph.node}


@pytest.mark.skipif(os.name == "nt", reason="there a folder in use cannot be deleted")
@pytest.mark.parametrize(("door", "places"), [
    (lambda model, out, data: quantize_static(model, out, ArrayReader(data), recipe="plain"), (0, 1, 2)),
    (lambda model, out, data: calibrate(model, out, ArrayReader(data)), (0, 1, 2)),
    (lambda model, *_: preview(model), [0]),
    (lambda model, *_: verify_fusion(model), [0]),
    (lambda _, out, __: Recipe("plain").save(out), [1]),
])  # fmt: skip
def test_in_a_deleted_folder_absolute_paths_lead_somewhere(folder, door, places):
    os.chdir("sub")
    (folder / "sub").rmdir()
    names = ("model.onnx", "out", "data.npz")
    door(*(folder / name for name in names))
    (folder / "out").unlink(missing_ok=True)
    for at in places:
        with pytest.raises(OptionError, match="working directory of this process was deleted") as caught:
            door(*(Path(name) if place == at else folder / name for place, name in enumerate(names)))
        assert (caught.value.where, "absolute path" in str(caught.value.fix)) == (names[at], True)


def test_a_reader_that_changes_the_working_directory_moves_nothing(tmp_path, folder):
    class Wanderer(models.FeedReader):
        def get_next(self):
            os.chdir(folder / "sub")
            return super().get_next()

    options = {"recipe": "plain", "promise": False, "calibration_cache_path": "new.json"}
    report = quantize_static("model.onnx", "out.onnx", Wanderer(models.feeds(BLOCK_MODEL)), **options)
    assert report.model_output == "out.onnx"
    assert {"out.onnx", "new.json"} <= {*os.listdir(folder)}
    assert os.listdir(folder / "sub") == []


@contextmanager
def files_of_at_most(size):
    """Lets writes beyond a size fail, as on a full disk; Python ignores the signal that goes with it."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("external", [False, True])
def test_a_disk_that_is_full_leaves_the_old_file(tmp_path, external):
    out = tmp_path / "out.onnx"
    quantized(BLOCK_MODEL, out, use_external_data_format=external)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with files_of_at_most(2000), pytest.raises(OutputError) as caught:
        quantized(models.mlp(hidden=256), out, use_external_data_format=external)
    assert caught.value.fix
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), tempfile.gettempdir())


def test_a_full_folder_of_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setattr("kenosis_ort.calibration.part_session.ObservedModel._strip", full)
    with pytest.raises(OutputError, match="No space left on device") as caught:
        quantized(BLOCK_MODEL, tmp_path / "out.onnx")
    assert "TMPDIR" in str(caught.value.fix)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("net", "external", "recipe"), [
    (models.mlp, False, "plain"), (models.residual_block, True, "plain"), (models.residual_block, False, "fast"),
    (models.residual_block, True, "accurate"), (models.transformer_block, False, "accurate"),
])  # fmt: skip
def test_the_output_may_take_the_models_place_as_with_stock(tmp_path, net, external, recipe):
    """It becomes what it becomes elsewhere."""
    (here := tmp_path / "here").mkdir()
    path, other = here / "model.onnx", tmp_path / "other.onnx"
    onnx.save(net(), path, save_as_external_data=external, location="model.onnx.data", size_threshold=0)
    sizes, feeds = [sum(file.stat().st_size for file in here.iterdir())], models.feeds(net())
    quantized(path, other, feeds, recipe=recipe)
    with pytest.warns(KenosisWarning, match="the float model's own file, which is replaced"):
        report = quantized(path, path, feeds, use_external_data_format=external, recipe=recipe)
    sizes.append(sum(file.stat().st_size for file in here.iterdir()))
    assert [report.size_before, report.size_after] == sizes
    assert len([*here.iterdir()]) == 1 + external
    onnx.checker.check_model(str(path), full_check=True)
    assert quality(net(), path, feeds) == quality(net(), other, feeds) > 20
    assert external or path.read_bytes() == other.read_bytes()


# ---- cost: sessions and runs, work against the number of nodes, peak memory -----------------------------------------


def cost(layers, samples, folder, **options):
    model = models.conv_relu_chain(2 * layers, channels=6, size=12)  # too few for blocks, which take a session
    reader = models.FeedReader(models.feeds(model, samples))
    with counted() as counts:
        report = quantize_static(model, folder / "out.onnx", reader, promise=False, **options)
    assert not report.warnings
    return counts


def test_depth_costs_no_sessions_and_no_runs(tmp_path):
    """Bias correction went layer by layer: a session a layer, and a run of it for each sample."""
    shallow, deep = (cost(layers, 24, tmp_path).total for layers in (3, 12))
    assert abs(deep.sessions - shallow.sessions) <= 4  # a pass may find nothing to do in one of them; nine layers more
    assert abs(deep.runs - shallow.runs) <= 2 * 24  # nine layers' would be 216


@pytest.mark.parametrize(("samples", "options", "sessions", "runs"), [
    (16, {}, 18, 115), (40, {}, 21, 220), (10, {"recipe": "plain", "verify": False, "evidence": "none"}, 4, 10),
])  # fmt: skip
def test_bounds(samples, options, sessions, runs, tmp_path):
    counts = cost(4, samples, tmp_path, **options)
    assert counts.total.sessions <= sessions, counts.by_stage
    assert counts.total.runs <= runs, counts.by_stage
    calibrated = counts.by_stage["calibrate"]
    assert (calibrated.sessions, calibrated.runs) == (1, samples)  # with the ranges of the samples to fit to


# ---- no function is called more than in proportion to the nodes -----------------------------------------------

FEW = 400
"""Calls up to which nothing is said about their growth."""
MOST = 2.6
"""Times as many calls for twice the nodes; four where each node looks at all others."""


def residual(count, *, one_weight=False):
    net, value = models.Net.over([1, 4, 4, 4]), "x"
    weights = [net.weight((4, 4, 3, 3)) for _ in range(1 if one_weight else count)]
    for at in range(count):
        convolved = net.op("Conv", [value, weights[at % len(weights)]], pads=[1] * 4)
        value = net.op("Relu", [net.op("Add", [convolved, value])])
    return net.of(value)


def concat(count):
    net = models.Net.over([1, 4, 4, 4])
    return net.of(net.op("Concat", [net.op("Relu", [net.conv("x", 4, 4)]) for _ in range(count)], axis=1))


BLOCK = """
    q{0} = MatMul ({1}, w)  k{0} = MatMul ({1}, w)  v{0} = MatMul ({1}, w)  qh{0} = Reshape (q{0}, heads)
    kh{0} = Reshape (k{0}, heads)  vh{0} = Reshape (v{0}, heads)  qt{0} = Transpose <perm = [0,2,1,3]> (qh{0})
    kt{0} = Transpose <perm = [0,2,3,1]> (kh{0})  vt{0} = Transpose <perm = [0,2,1,3]> (vh{0})
    p{0} = MatMul (qt{0}, kt{0})  s{0} = Softmax <axis = -1> (p{0})  m{0} = MatMul (s{0}, vt{0})
    t{0} = Transpose <perm = [0,2,1,3]> (m{0})  f{0} = Reshape (t{0}, wide)  o{0} = MatMul (f{0}, w)
    a{0} = Add (o{0}, {1})  r{0} = Relu (a{0})"""


def transformer(count):
    blocks = "".join(BLOCK.format(at, f"r{at - 1}" if at else "x") for at in range(count))
    return planning.parse(f"""net (float[1,4,8] x) => (float[1,4,8] y)
        <float[8,8] w, int64[4] heads = {{1, 4, 2, 4}}, int64[3] wide = {{1, 4, 8}}> {{{blocks}
        y = Identity (r{count - 1}) }}""")


def calls(model, folder):
    """Calls of each function by file and name; of a generator, its steps."""
    feeds = [{"x": 0.1 * feed["x"]} for feed in models.feeds(model, 2)]
    profile = cProfile.Profile()
    with profile:
        quantize_static(model, folder / "out.onnx", models.FeedReader(feeds), promise=False)
    found = Counter()
    for (file, line, name), (_, count, *_) in pstats.Stats(profile).stats.items():
        found[f"{file}:{line if 'kenosis_ort' in file else ''}:{name}"] += count
    return found


@pytest.mark.parametrize(
    ("make", "count"), [(residual, 16), (partial(residual, one_weight=True), 24), (concat, 24), (transformer, 6)]
)
def test_twice_the_nodes_take_twice_the_calls(tmp_path, make, count):
    calls(make(2), tmp_path)  # imports
    once, twice = calls(make(count), tmp_path), calls(make(2 * count), tmp_path)
    grown = {name: (once[name], many) for name, many in twice.items() if many > FEW + MOST * once[name]}
    assert grown == {}


# ---- peak memory of a whole call, in a process of its own, against a plain session of the same model ------------

SIDE = 4096
CHILD = """
import sys
import numpy as np
kind, source, out, side = sys.argv[1:]
feeds = [{"x": np.random.default_rng(i).normal(size=(4, int(side))).astype(np.float32)} for i in range(8)]
if kind == "plain":
    import onnxruntime as ort
    ort.InferenceSession(source, providers=["CPUExecutionProvider"]).run(None, feeds[0])
else:
    import kenosis_ort
    report = kenosis_ort.quantize_static(source, out, kenosis_ort.ArrayReader(feeds))
    assert report.fusion is not None and report.speed is not None
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:")))
"""


def peak(kind, source, out):
    """MiB."""
    command = [sys.executable, "-W", "ignore", "-c", CHILD, kind, str(source), str(out), str(SIDE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1]) / 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system tells no peak")
def test_one_large_weight_is_not_held_again_and_again(tmp_path):
    text = f"(float[N,{SIDE}] x) => (float[N,{SIDE}] y) <float[{SIDE},{SIDE}] w> {{ m = MatMul (x, w)  y = Relu (m) }}"
    source, out = tmp_path / "one.onnx", tmp_path / "out.onnx"
    onnx.save(planning.parse(text, ir_version=9), source)
    size = source.stat().st_size / 2**20
    assert peak("quantize", source, out) <= peak("plain", source, out) + 4 * size + 300  # the promise
