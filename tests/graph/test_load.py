from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort.errors import AlreadyQuantizedError, ModelLoadError
from kenosis_ort.graph.load import check_not_quantized, load_model
from tests.graph.build import model, run, value

WEIGHT = np.arange(4096, dtype=np.float32).reshape(64, 64)


def linear() -> onnx.ModelProto:
    return model(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], [value("x", [1, 64])], [value("y", [1, 64])], {"w": WEIGHT}
    )


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


def test_a_wrong_argument_is_a_type_error():
    with pytest.raises(TypeError, match="path or an onnx"):
        load_model(3)


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


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(ModelLoadError, match="does not exist"):
        load_model(tmp_path / "none.onnx")
    with pytest.raises(ModelLoadError, match="folder"):
        load_model(tmp_path)
    for name in ("a\0b", "x" * 5000):
        with pytest.raises(ModelLoadError, match="cannot be read"):
            load_model(name)


def test_no_operator_set_and_no_outputs():
    proto = linear()
    del proto.opset_import[:]
    with pytest.raises(ModelLoadError, match="operator set"):
        load_model(proto)
    proto = linear()
    del proto.graph.output[:]
    with pytest.raises(ModelLoadError, match="no outputs"):
        load_model(proto)


def test_external_data_are_read(external):
    loaded = load_model(external())
    tensor = loaded.proto.graph.initializer[0]
    assert tensor.data_location == onnx.TensorProto.DEFAULT
    np.testing.assert_array_equal(numpy_helper.to_array(tensor), WEIGHT)
    x = np.ones((1, 64), np.float32)
    np.testing.assert_allclose(run(loaded.proto, {"x": x})[0], x @ WEIGHT)


def test_external_data_without_length_use_the_shape(external):
    np.testing.assert_array_equal(
        numpy_helper.to_array(load_model(external(length=None)).proto.graph.initializer[0]), WEIGHT
    )


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


def test_a_link_out_of_the_folder_is_refused(external):
    path = external()
    secret = path.parent.parent / "secret.data"
    secret.write_bytes(WEIGHT.tobytes())
    (path.parent / "model.data").unlink()
    (path.parent / "model.data").symlink_to(secret)
    with pytest.raises(ModelLoadError, match="by a link"):
        load_model(path)


def test_a_linked_folder_is_no_way_out(external):
    path = external(location="sub/secret.data")
    outside = path.parent.parent / "outside"
    outside.mkdir()
    (outside / "secret.data").write_bytes(WEIGHT.tobytes())
    (path.parent / "sub").symlink_to(outside)
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
    np.testing.assert_array_equal(
        numpy_helper.to_array(load_model(snapshot / "model.onnx").proto.graph.initializer[0]), WEIGHT
    )


def test_external_data_in_a_subgraph_constant_are_checked(tmp_path):
    tensor = numpy_helper.from_array(WEIGHT, "w")
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../outside")
    branch = helper.make_graph([helper.make_node("Constant", [], ["c"], value=tensor)], "b", [], [value("c", [64, 64])])
    node = helper.make_node("If", ["x"], ["y"], then_branch=branch, else_branch=branch)
    proto = model([node], [value("x", [], onnx.TensorProto.BOOL)], [value("y", [64, 64])])
    path = tmp_path / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ModelLoadError, match="outside"):
        load_model(path)


def test_a_proto_with_unloaded_external_data_is_refused(external):
    proto = onnx.load(external(), load_external_data=False)
    with pytest.raises(ModelLoadError, match="Pass the path"):
        load_model(proto)


def test_quantized_activations_are_refused():
    q = helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], name="quant")
    dq = helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"])
    scale = {"s": np.float32(1), "z": np.uint8(0)}
    with pytest.raises(AlreadyQuantizedError, match="quant"):
        check_not_quantized(model([q, dq], [value("x", [1])], [value("y", [1])], scale))
    integer = helper.make_node("MatMulInteger", ["x", "x"], ["y"])
    kind = TensorProto
    proto = model([integer], [value("x", [2, 2], kind.UINT8)], [value("y", [2, 2], kind.INT32)])
    with pytest.raises(AlreadyQuantizedError, match="MatMulInteger"):
        check_not_quantized(proto)


def test_weights_stored_quantized_are_accepted():
    nodes = [
        helper.make_node("DequantizeLinear", ["wq", "s"], ["w"]),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    weights = {"wq": np.ones((4, 4), np.int8), "s": np.float32(0.1)}
    check_not_quantized(model(nodes, [value("x", [1, 4])], [value("y", [1, 4])], weights))
