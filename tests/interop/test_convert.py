"""kenosis_ort.convert: files in, files out, on the runtime's integer kernels, or one clear error and no file."""

import json

import numpy as np
import onnx
import pytest

from kenosis_ort import OptionError, OutputError, UnsupportedModelError, VerificationError, convert, interop
from kenosis_ort.cli.main import main
from kenosis_ort.interop import read_model
from tests.formats.qonnx import Net, conv_net, draw, execute, run


@pytest.mark.parametrize("kind", [
    {}, {"signed": True}, {"bits": 2}, {"bits": 8}, {"bits": 8, "signed": True}, {"norm": True},
])  # fmt: skip
def test_qonnx_runs_on_integer_kernels_and_computes_the_same(tmp_path, kind):
    model = conv_net(**kind)
    done = convert(model, tmp_path / "out.onnx")
    assert (done.read_as, done.fusion.integer_share()) == ("qonnx", 1.0), str(done.fusion)
    assert all(k.integer for k in done.fusion.kernels if k.op_type == "Add"), str(done.fusion)
    expected, actual = execute(model, {"x": draw()})[0], run(tmp_path / "out.onnx", draw(), optimize=True)[0]
    if kind.get("bits", 4) < 8:
        np.testing.assert_array_equal(actual, expected)
    assert np.abs(expected - actual).max() <= 0.4 * 1.01
    assert (expected != actual).mean() <= 0.1


@pytest.mark.parametrize("to", ["qdq", "qop", "qcdq", "qonnx", "float"])
def test_every_target_keeps_names_and_says_how_it_agrees(tmp_path, to):
    model = conv_net(bits=8)
    before, done = model.SerializeToString(), convert(model, tmp_path / "out.onnx", to)
    written = onnx.load(tmp_path / "out.onnx")
    assert [v.name for v in (*written.graph.input, *written.graph.output)] == ["x", model.graph.output[0].name]
    assert (done.agreement[0].sqnr_db > 20, done.size) == (True, (tmp_path / "out.onnx").stat().st_size)
    counted = {"8-bit unsigned activations": 4, "8-bit signed constants": 3, "8-bit signed activations": 2}
    assert done.tensors == ({} if to == "float" else counted)
    assert done.agreement[0].equal == 1.0 or to in ("qdq", "qop", "float")
    assert (json.loads(json.dumps(done.to_dict()))["written_as"], model.SerializeToString()) == (to, before)


def test_what_is_refused_leaves_no_file(tmp_path):
    net, source, out = Net(), tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(conv_net(), source)
    unquantized = net.of(net.op("Relu", ["x"]))
    for kind, says, given in (
        (UnsupportedModelError, "12 bits", (net.of(net.quant("x", 0.1, bits=12)), out)),
        (UnsupportedModelError, "Nothing in the model is quantized", (unquantized, out)),
        (OptionError, "qonxn", (source, out, "qonxn")), (OutputError, "in.onnx", (source, source)),
    ):  # fmt: skip
        with pytest.raises(kind, match=says):
            convert(*given)
    assert [*tmp_path.iterdir()] == [source]


def test_the_command_names_its_output_after_the_format(tmp_path, capsys):
    onnx.save(conv_net(), tmp_path / "net.onnx")
    assert main(["convert", str(tmp_path / "net.onnx"), "--to", "qop"]) == 0
    assert (tmp_path / "net.qop.onnx").exists()
    assert "4-bit" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "net.onnx"), "--to", "tflite"]) == 2


def test_ties_that_fall_otherwise_are_no_reason_to_refuse_and_what_is_off_by_more_is(tmp_path, monkeypatch):
    """Compared on an input that lies half way between two steps of the first quantizer."""
    steps = np.random.default_rng(0).integers(-4, 4, (2, 3, 6, 6)).astype(np.float32) + np.float32(0.5)
    monkeypatch.setattr(interop, "_made_up", lambda *_: [{"x": steps / 8}])
    net, kept, out = Net(), tmp_path / "kept.onnx", tmp_path / "out.onnx"
    model = net.of(net.quant("x", 0.125, zero_point=101, bits=8))
    assert convert(model, kept).agreement[0].sqnr_db < 30

    def misread(*args, **kwargs):
        found = read_model(*args, **kwargs)
        for scale in (i for i in found.canonical.graph.initializer if i.dims == [] and i.data_type == 1):
            scale.CopyFrom(onnx.numpy_helper.from_array(np.float32(8), scale.name))
        return found

    monkeypatch.setattr(interop, "read_model", misread)
    with pytest.raises(VerificationError, match="what was read is off"):
        convert(model, out)
    assert not out.exists()
