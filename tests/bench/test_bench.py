"""`kenosis_ort.bench` with real sessions: what it takes, leaves out and refuses. Nothing here depends on speed."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

import kenosis_ort
from kenosis_ort import BenchReport, CalibrationError, OptionError, VerificationError
from kenosis_ort.bench import Verdict
from tests.models import FeedReader, Net, conv_relu_chain, feeds, mlp, net_with_if

QUICK = {"rounds": 2, "budget_s": 0.3, "warmup": 1}


def quick(models, given=None, **keywords) -> BenchReport:
    return kenosis_ort.bench(models, given, **{**QUICK, **keywords})


@pytest.fixture(scope="module")
def chain() -> onnx.ModelProto:
    return conv_relu_chain(2)


@pytest.fixture
def path(tmp_path: Path, chain: onnx.ModelProto) -> Path:
    file = tmp_path / "chain.onnx"
    onnx.save_model(chain, file)
    return file


def without_kernel() -> onnx.ModelProto:
    """A model with the same input as the chain that the runtime does not load."""
    model = conv_relu_chain(2)
    model.graph.node[0].op_type = "NoSuchOperator"
    return model


def refusing(rows: int) -> onnx.ModelProto:
    """A model that loads and runs only with batches of so many rows."""
    net = Net()
    x = net.input("x", ["n", 6])
    net.op("Reshape", [x, net.const(np.array([rows, 6]), "shape")], out="y")
    net.output("y", [rows, 6])
    return net.model()


def test_paths_bytes_and_protos(chain: onnx.ModelProto, path: Path):
    before = chain.SerializeToString()
    report = quick([path, str(path), chain.SerializeToString(), chain], feeds(chain, 2))
    assert [t.name for t in report.models] == ["chain.onnx", "chain.onnx (2)", "model 3", "model 4"]
    assert report.baseline == "chain.onnx"
    assert report.left_out == ()
    assert chain.SerializeToString() == before
    size = path.stat().st_size
    assert [t.size for t in report.models] == [size, size, size, chain.ByteSize()]
    for timing in report.models:
        assert 0 < timing.p50_ms <= timing.p95_ms <= timing.p99_ms
        assert timing.runs_per_second > 0
        assert timing.runs >= len(timing.round_ms) == report.rounds
        assert timing.load_ms > 0
        assert timing.ratio_low <= timing.ratio <= timing.ratio_high
    assert report.models[0].ratio == 1


def test_files_of_the_same_name_are_told_apart_by_their_paths(tmp_path: Path, chain: onnx.ModelProto):
    paths = [tmp_path / folder / "m.onnx" for folder in ("a", "b")]
    for file in paths:
        file.parent.mkdir()
        onnx.save_model(chain, file)
    assert [t.name for t in quick(paths, feeds(chain)).models] == [str(p) for p in paths]


def test_one_model_alone_with_a_reader_or_made_up_data(chain: onnx.ModelProto):
    reader = FeedReader(feeds(chain, 5))
    quick(chain, reader)
    assert reader.get_next() is not None, "it is read no further than needed"
    report = quick(chain)
    assert len(report.models) == 1
    assert any(note.startswith("made-up data: input") for note in report.notes)
    assert quick(chain.SerializeToString()).notes[0] == report.notes[0]


def test_external_data_counts(tmp_path: Path):
    model = mlp()
    inline, outside = tmp_path / "inline.onnx", tmp_path / "outside.onnx"
    onnx.save_model(model, inline)
    onnx.save_model(model, outside, save_as_external_data=True, location="w.bin", size_threshold=0)
    report = quick([inline, outside], feeds(model))
    bare = onnx.load_model(outside, load_external_data=False)
    assert "external data" in quick([mlp(), bare], feeds(mlp())).left_out[0].reason
    expected = outside.stat().st_size + (tmp_path / "w.bin").stat().st_size
    assert report.by_name["outside.onnx"].size == expected > outside.stat().st_size


@pytest.mark.parametrize("broken", [b"no model", without_kernel(), Path("no/such/model.onnx")])
def test_a_model_that_does_not_load_is_named_and_left_out(chain: onnx.ModelProto, broken):
    report = quick({"good": chain, "broken": broken, "also good": chain}, feeds(chain))
    assert [t.name for t in report.models] == ["good", "also good"]
    assert [gone.name for gone in report.left_out] == ["broken"]
    assert report.left_out[0].reason
    assert "left out: broken" in str(report)


def test_a_model_that_does_not_run_is_named_and_left_out():
    data = [{"x": np.zeros((2, 6), np.float32)}]
    report = quick({"two": refusing(2), "three": refusing(3)}, data)
    assert [t.name for t in report.models] == ["two"]
    assert report.left_out[0].name == "three"
    assert "does not run" in report.left_out[0].reason


def test_the_only_model_or_the_baseline_has_to_run(chain: onnx.ModelProto):
    two = [{"x": np.zeros((2, 6), np.float32)}]
    for given, data, what in (
        (b"no model", feeds(chain), "the model cannot be timed"),
        ("no/such/model.onnx", None, r"the model cannot be timed.*does not exist"),
        ([without_kernel(), chain], feeds(chain), "the baseline model cannot be timed"),
        ([refusing(3), refusing(2)], two, "does not run"),
    ):
        with pytest.raises(VerificationError, match=what):
            quick(given, data)


def test_models_of_other_inputs_are_refused(chain: onnx.ModelProto):
    with pytest.raises(OptionError, match="different inputs"):
        quick([chain, net_with_if()], feeds(chain))


def test_feeds_that_do_not_fit_are_refused(chain: onnx.ModelProto):
    (name, array), *_ = feeds(chain, 1)[0].items()
    for given, what in (
        ([{name: array, f"{name}x": array}], "Did you mean"),
        ([{}], f"lacks the input '{name}'"),
        ([{name: array.astype(np.uint8)}], r"wrong type: expected float32 .* got uint8 .*model 'model 1'"),
        ([{name: array[0]}], "wrong shape"),
        ([], "no feed"),
    ):
        with pytest.raises(CalibrationError, match=what):
            quick(chain, given)


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ({"threads": -1}, "threads"),
        ({"rounds": 0}, "rounds"),
        ({"warmup": -1}, "warmup"),
        ({"budget_s": 0}, "budget_s"),
        ({"budget_s": float("nan")}, "budget_s"),
        ({"baseline": 1}, "baseline"),
        ({"baseline": -1}, "baseline"),
        ({"baseline": "model 2"}, "Did you mean 'model 1'"),
    ],
)
def test_options_out_of_range(chain: onnx.ModelProto, keywords: dict[str, object], named: str):
    with pytest.raises(OptionError, match=named):
        quick(chain, feeds(chain), **keywords)


@pytest.mark.parametrize("models", [[], {}, [42]])
def test_what_is_no_model_is_refused(models):
    with pytest.raises(OptionError, match="model"):
        quick(models)


def test_a_model_without_inputs():
    net = Net()
    net.op("Neg", [net.const(np.ones(4), "c")], out="y")
    net.output("y", [4], TensorProto.FLOAT)
    assert quick(net.model()).models[0].runs > 0


def test_json_and_text(chain: onnx.ModelProto):
    report = quick({"a": chain, "b": chain}, feeds(chain))
    assert report.models[1].verdict is Verdict.NOISY
    assert any("too few" in note for note in report.notes)
    raw = json.loads(report.to_json())
    assert raw == json.loads(json.dumps(report.to_dict()))
    assert raw["schema"] == 1
    assert raw["models"][1]["verdict"] in {str(v) for v in Verdict}
    assert "baseline" in str(report)
    assert "one thread" in str(report)


def test_any_two_models_can_be_compared(chain: onnx.ModelProto):
    report = quick({"a": chain, "b": chain, "c": chain}, feeds(chain), baseline="b")
    assert list(report.by_name) == ["a", "b", "c"]
    assert report.by_name["b"].ratio == 1
    assert report.compare("a").ratio == report.by_name["a"].ratio
    assert report.compare("b", "c").ratio == pytest.approx(1 / report.compare("c", "b").ratio)
    with pytest.raises(OptionError, match="no model 'd'"):
        report.compare("d")
