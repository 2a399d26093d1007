"""Sessions, counted and mapped; the limits of the runtime, found once; runtimes in a process of their own."""

import json
import os
import re
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

import kenosis_ort
from kenosis_ort.errors import RuntimeEndedError, VerificationError
from kenosis_ort.graph.files import uses_external_data
from kenosis_ort.graph.outside import weight_bytes, write_external_data
from kenosis_ort.runtime import session
from kenosis_ort.runtime.child import Child
from kenosis_ort.runtime.counting import Cost, at_stage, counted
from kenosis_ort.runtime.machine import RuntimeLimits, runtime_limits
from kenosis_ort.runtime.session import open_session
from tests.planning import parse


@pytest.fixture
def model():
    head = f"(float[N,64] x) => (float[N,32] y) <float[64,32] weight, float[32] bias = {{{', '.join(['3'] * 32)}}}>"
    return parse(f"{head} {{ y = Gemm (x, weight, bias) }}")


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def outputs(model):
    x = np.random.default_rng(1).normal(size=(3, 64)).astype(np.float32)
    return np.asarray(open_session(model).run(None, {"x": x})[0])


def test_mapped_weights_compute_the_same_and_leave_nothing(model, scratch, monkeypatch):
    expected, before = outputs(model), model.SerializeToString()
    monkeypatch.setattr(session, "MAPPED_FROM", 1)
    assert np.array_equal(outputs(model), expected)
    assert model.SerializeToString() == before
    model.graph.node[0].op_type = "Nonsense"
    with pytest.raises(VerificationError, match="Nonsense"):
        open_session(model)
    assert list(scratch.iterdir()) == []


def test_values_of_a_session_that_stays_open_take_no_memory_behind_its_runs():
    wide = parse("""(float[1,1,2048,2048] x) => (float[1,1,1,1] y) <float[8,1,1,1] w>
        { c = Conv (x, w)  s = Sin (c)  e = Exp (s)  r = ReduceMean <axes = [1,2,3]> (e)  y = Add (r, r) }""")
    feed, size = {"x": np.zeros((1, 1, 2048, 2048), np.float32)}, 2**27  # bytes of one value
    with open_session(wide) as opened:
        opened.answer(feed), opened.answer(feed)  # from the second run on values lie in one block
        held = memory_in_use()
        (found,) = opened.runs([feed])
        assert held - memory_in_use() > size
        assert found["y"] == opened.answer(feed)["y"]


def memory_in_use():
    if sys.platform != "linux":
        pytest.skip("it is read from /proc")
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_freed_memory_goes_back_before_a_large_model_is_opened(model, scratch, monkeypatch):
    given = []
    monkeypatch.setattr(session, "_malloc_trim", lambda: given.append)
    sources = [model, model.SerializeToString(), scratch / "model.onnx"]
    onnx.save(model, scratch / "model.onnx")
    for source in sources:
        open_session(source)
    assert not given, "a small one"
    monkeypatch.setattr(session, "MAPPED_FROM", 1000)
    for source in sources:
        open_session(source)
    assert given == [0] * 3


def test_a_full_disk_does_not_matter_where_bytes_do(model, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "MAPPED_FROM", 1)
    monkeypatch.setattr(session, "write_external_data", Mock(side_effect=OSError(28, "No space left on device")))
    assert session.openable(model, tmp_path) == model.SerializeToString()
    monkeypatch.setattr(session, "_BYTES_LIMIT", 1)
    with pytest.raises(OSError, match="No space"):
        session.openable(model, tmp_path)


def test_weight_bytes_are_those_in_memory(model, tmp_path):
    assert weight_bytes(model) == 4 * (64 * 32 + 32)
    shell = write_external_data(model, tmp_path / "weights.bin")
    assert (uses_external_data(shell), weight_bytes(shell)) == (True, 4 * 32)  # the bias is too small to be moved


def test_what_a_session_returns_as_one_array():
    pair = [np.float32([[1, 2]]), np.float32([3])]
    np.testing.assert_array_equal(session.as_array(pair), [1, 2, 3])
    maps = [{"b": 0.75, "a": 0.25}, {"a": 1.0, "b": 0.0}]
    np.testing.assert_array_equal(session.as_array(maps), [[0.25, 0.75], [1, 0]])
    np.testing.assert_array_equal(session.as_array({2: 5.0, 1: 4.0}), [4, 5])
    assert [session.as_array(empty).size for empty in ([], None)] == [0, 0]
    assert session.as_array([np.array(["a", "b"], object), np.array(["c"], object)]).tolist() == ["a", "b", "c"]
    assert session.as_array(onnxruntime.OrtValue.ortvalue_from_numpy(pair[0])).shape == (1, 2)
    assert session.as_array(pair[0]) is pair[0]


def test_a_session_answers_by_name_and_says_what_it_refuses(model):
    x = np.ones((2, 64), np.float32)
    model.graph.input.append(helper.make_tensor_value_info("bias", TensorProto.FLOAT, [32]))  # with a default value
    with open_session(model, further=["y", "x"]) as opened:
        assert (opened.inputs, opened.outputs) == ({"x", "bias"}, ("y", "x"))
        (answer,) = opened.runs([{"x": x}])
        assert (answer.keys(), np.array_equal(answer["x"], x)) == ({"y", "x"}, True)
        assert opened.answer({"x": x}, ["y"])["y"].shape == (2, 32)
        with pytest.raises(VerificationError, match="the model does not run"):
            opened.answer({"x": x[:, :3]})
    with pytest.raises(VerificationError, match="does not load") as caught:
        open_session(b"nothing", name="mine")
    assert caught.value.where == "mine"


def test_sessions_runs_and_bytes_are_counted_by_stage(model):
    feed = {"x": np.ones((1, 64), np.float32)}
    with counted() as counts:
        with at_stage("outer"):
            opened = open_session(model)
            with at_stage("inner"):
                opened.run(None, feed)
            opened.run(None, feed)
        with counted() as within:
            opened.run(None, feed)
    opened.run(None, feed)
    assert counts.by_stage == {"outer": Cost(1, 1, 128), "inner": Cost(0, 1, 128), "": Cost(0, 1, 128)}
    assert (within.total, counts.total) == (Cost(0, 1, 128), Cost(1, 3, 384))


def test_no_other_module_opens_sessions():
    folder, opens = Path(kenosis_ort.__file__).parent, re.compile(r"\bInferenceSession\(")
    found = {p.relative_to(folder).as_posix() for p in folder.rglob("*.py") if opens.search(p.read_text("utf-8"))}
    # the limits of the runtime are probed before all else; another process imports nothing of this package
    assert found <= {"runtime/session.py", "runtime/machine.py", "targets/other_process.py"}


# ---- what the installed runtime takes --------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A process that knows nothing yet, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path)
    runtime_limits.cache_clear()
    yield tmp_path
    runtime_limits.cache_clear()


def test_limits_are_probed_once_for_an_installation(fresh):
    with counted() as first:
        found = runtime_limits()
    runtime_limits.cache_clear()
    with counted() as second:
        assert runtime_limits() == found
    assert first.total.sessions > second.total.sessions == 0
    assert found.version == onnxruntime.__version__


FOUND = {"max_ir": 10, "max_opset": 21, "max_ml": 3, "version": onnxruntime.__version__}


@pytest.mark.parametrize("text", ["", "{", "[1]", *(json.dumps({**FOUND, **wrong}) for wrong in (
    {"max_opset": "21", "version": "1"}, {"max_ir": 10**9}, {"max_opset": 199, "version": "0.1.0"}
))])  # fmt: skip
def test_what_a_damaged_file_or_that_of_another_runtime_says_is_not_believed(fresh, text):
    found = runtime_limits()
    (file,) = fresh.rglob("runtime-*.json")
    file.write_text(text)
    runtime_limits.cache_clear()
    assert runtime_limits() == found
    assert json.loads(file.read_text())["max_ir"] == found.max_ir


def test_without_a_place_to_keep_them_limits_are_found_all_the_same(fresh, monkeypatch):
    monkeypatch.setattr("kenosis_ort.runtime.machine.recall", lambda name: None)
    monkeypatch.setattr("kenosis_ort.runtime.machine.user_cache", lambda: fresh / "file" / "below")
    (fresh / "file").write_text("no folder")
    assert isinstance(runtime_limits(), RuntimeLimits)


# ---- a runtime in a process of its own -------------------------------------------------------------------------------


_SQUARES = """
import json, os, signal, sys
for line in sys.stdin:
    asked = json.loads(line)["n"]
    print("asked", asked, file=sys.stderr, flush=True)
    if asked == 3:
        os.kill(os.getpid(), signal.SIGABRT)
    print(json.dumps({"square": asked**2}), flush=True)
"""


@pytest.fixture
def command(tmp_path):
    (tmp_path / "squares.py").write_text(_SQUARES)
    return [sys.executable, str(tmp_path / "squares.py")]


def test_it_answers_and_says_in_the_end_what_it_printed(command):
    with Child(command, "squares") as child:
        assert ([child.ask({"n": n})["square"] for n in (1, 2, 4)], bool(child.runs)) == ([1, 4, 16], True)
    assert (bool(child.runs), child.log.split("\n")) == (False, ["asked 1", "asked 2", "asked 4", ""])


@pytest.mark.parametrize(
    ("killed", "said"), [(False, "squares ended its process, with code -6: .*asked 3"), (True, "code -9")]
)
def test_its_death_is_told_with_code_and_last_words(killed, said, command):
    child = Child(command, "squares")
    assert child.ask({"n": 5}) == {"square": 25}
    if killed:
        child._process.kill()
    with pytest.raises(RuntimeEndedError, match=said):
        child.ask({"n": 3})
    assert not child.runs
    child.close()
