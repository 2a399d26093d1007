"""Files of models as they come: what is read, what is refused, and with what words."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from kenosis_ort.errors import AlreadyQuantizedError, ModelLoadError
from kenosis_ort.graph.load import check_not_quantized, load_model
from tests.graph.build import net, run

WEIGHT = np.arange(4096, dtype=np.float32).reshape(64, 64)


def linear() -> onnx.ModelProto:
    return net("(float[1,64] x) => (float[1,64] y) { y = MatMul(x, w) }", {"w": WEIGHT})


def weight_of(path) -> np.ndarray:
    return numpy_helper.to_array(load_model(path).proto.graph.initializer[0])


@pytest.fixture
def external(tmp_path):
    """A model with its weight in model.data; returns the path and a way to edit the tensor's entry."""
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "model.onnx"
    onnx.save_model(linear(), path, save_as_external_data=True, location="model.data", size_threshold=0)

    def edit(**entries):
        proto = onnx.load(path, load_external_data=False)
        tensor = proto.graph.initializer[0]
        kept = {e.key: e.value for e in tensor.external_data} | {k: str(v) for k, v in entries.items()}
        del tensor.external_data[:]
        for key, text in kept.items():
            if text != "None":
                tensor.external_data.add(key=key, value=text)
        path.write_bytes(proto.SerializeToString())
        return path

    return edit


def test_a_path_gives_a_complete_model(tmp_path):
    path = tmp_path / "m.onnx"
    onnx.save(linear(), path)
    loaded = load_model(str(path))
    assert loaded.path == path
    assert loaded.name == str(path)
    assert loaded.proto == linear()


def test_a_model_proto_is_copied():
    given = linear()
    loaded = load_model(given)
    assert loaded.path is None
    assert loaded.proto == given
    loaded.proto.graph.node[0].name = "changed"
    loaded.proto.graph.initializer[0].raw_data = b""
    assert given == linear()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS"),
        (b"PK\x03\x04aaaa", "zip archive"),
        (b"<!doctype html><html>", "HTML"),
        (b"\x18\x00\x00\x00ORTM" + bytes(20), "ORT format"),
        (b"this is no model at all, only a text of some length", "not a complete ONNX model"),
        (bytes(range(256)), "not a complete ONNX model"),
        (b"\x08\x08", "no ONNX graph"),
    ],
)
def test_other_files_are_refused_by_what_they_are(tmp_path, content, message):
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_model(path)
    assert str(path) in str(caught.value)
    assert caught.value.fix


def test_every_truncation_is_refused(tmp_path):
    whole = linear().SerializeToString()
    path = tmp_path / "m.onnx"
    for length in [1, 2, 10, 50, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError):
            load_model(path)


@pytest.mark.parametrize(
    ("name", "says"),
    [("none.onnx", "does not exist"), ("", "folder"), ("a\0b", "cannot be read"), ("x" * 5000, "cannot be read")],
)
def test_what_is_no_file(tmp_path, name, says):
    with pytest.raises(ModelLoadError, match=says):
        load_model(f"{tmp_path}/{name}")
    with pytest.raises(TypeError, match="path or an onnx"):
        load_model(3)


@pytest.mark.parametrize(("field", "says"), [("opset_import", "operator set"), ("graph", "no outputs")])
def test_no_operator_set_and_no_outputs(field, says):
    proto = linear()
    del (proto.graph.output if field == "graph" else proto.opset_import)[:]
    with pytest.raises(ModelLoadError, match=says):
        load_model(proto)


def test_external_data_are_read(external):
    loaded = load_model(external())
    tensor = loaded.proto.graph.initializer[0]
    assert tensor.data_location == onnx.TensorProto.DEFAULT
    np.testing.assert_array_equal(numpy_helper.to_array(tensor), WEIGHT)
    x = np.ones((1, 64), np.float32)
    np.testing.assert_allclose(run(loaded.proto, {"x": x})[0], x @ WEIGHT)


def test_external_data_without_length_use_the_shape(external):
    np.testing.assert_array_equal(weight_of(external(length=None)), WEIGHT)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"location": "/etc/passwd"}, "absolute path"),
        ({"location": "C:\\secret"}, "absolute path"),
        ({"location": "\\\\host\\share"}, "absolute path"),
        ({"location": "../secret.data"}, "outside the model's folder"),
        ({"location": "a/../../secret.data"}, "outside the model's folder"),
        ({"location": "..\\secret.data"}, "outside the model's folder"),
        ({"location": "a\0b"}, "names no file"),
        ({"location": None}, "names no file"),
        ({"location": "none.data"}, "does not exist"),
        ({"location": "."}, "not a regular file"),
        ({"location": "*/_ORT_MEM_ADDR_/*"}, "does not exist"),
        ({"offset": 1}, "has only"),
        ({"offset": 10**15}, "has only"),
        ({"offset": -1}, "negative"),
        ({"offset": "x"}, "malformed"),
        ({"length": -5}, "negative"),
        ({"length": 10**12}, "takes 16384"),
        ({"length": 100}, "takes 16384"),
    ],
)
def test_unsafe_or_broken_external_data_are_refused(external, entries, message):
    path = external(**entries)
    (path.parent.parent / "secret.data").write_bytes(WEIGHT.tobytes())
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_model(path)
    assert "tensor 'w'" in str(caught.value)


def test_a_missing_or_short_data_file_is_refused(external):
    path = external()
    data = path.parent / "model.data"
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(ModelLoadError, match="truncated"):
        load_model(path)
    data.unlink()
    with pytest.raises(ModelLoadError, match="does not exist"):
        load_model(path)


@pytest.mark.parametrize("folder", [False, True])
def test_links_out_of_the_folder_are_refused(external, folder):
    path = external(location="sub/secret.data") if folder else external()
    outside = path.parent.parent / "outside"
    outside.mkdir()
    (outside / "secret.data").write_bytes(WEIGHT.tobytes())
    (path.parent / "model.data").unlink()
    link, to = ("sub", outside) if folder else ("model.data", outside / "secret.data")
    (path.parent / link).symlink_to(to)
    with pytest.raises(ModelLoadError, match="by a link"):
        load_model(path)


def test_a_hub_cache_of_links_is_read(external, tmp_path):
    """Model and data are links into one folder of blobs, as hubs lay out their caches."""
    path = external()
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (path.parent / "model.data").rename(blobs / "b")
    path.rename(blobs / "a")
    (snapshot / "model.onnx").symlink_to("../../blobs/a")
    (snapshot / "model.data").symlink_to("../../blobs/b")
    np.testing.assert_array_equal(weight_of(snapshot / "model.onnx"), WEIGHT)


def test_external_data_in_a_subgraph_constant_are_checked(tmp_path):
    body = "() => (float[1] c) { c = Constant<value = float[1] {1}>() }"
    text = f"(bool x) => (float[1] y) {{ y = If(x) <then_branch = t {body}, else_branch = e {body}> }}"
    proto = net(text)
    tensor = proto.graph.node[0].attribute[1].g.node[0].attribute[0].t
    tensor.Clear()
    tensor.MergeFrom(onnx.TensorProto(data_type=1, dims=[1], data_location=onnx.TensorProto.EXTERNAL))
    tensor.external_data.add(key="location", value="../outside")
    path = tmp_path / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ModelLoadError, match="outside"):
        load_model(path)


def test_a_proto_with_unloaded_external_data_is_refused(external):
    proto = onnx.load(external(), load_external_data=False)
    with pytest.raises(ModelLoadError, match="Pass the path"):
        load_model(proto)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("(float[1] x) => (float[1] y) { [quant] q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }", "quant"),
        ("(uint8[2,2] x) => (int32[2,2] y) { y = MatMulInteger(x, x) }", "MatMulInteger"),
        # weights alone
        ("(float[1,4] x) => (float[1,4] y) <int8[4,4] v> { w = DequantizeLinear(v, s) y = MatMul(x, w) }", ""),
    ],
)
def test_quantized_activations_are_refused(text, named):
    proto = net(text, {"s": np.float32(1), "z": np.uint8(0)})
    if not named:
        check_not_quantized(proto)
        return
    with pytest.raises(AlreadyQuantizedError, match=named):
        check_not_quantized(proto)
