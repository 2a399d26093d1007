"""Files of models as they come: what is read, what is refused before anything works on it, and with what words."""

from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort import AlreadyQuantizedError, ArrayReader, ModelLoadError, compare, preview, quantize_static
from kenosis_ort.graph.load import check_not_quantized, load_model, parse_model
from kenosis_ort.graph.outside import raw_bytes, tensor_bytes
from kenosis_ort.graph.shapes import infer_shapes
from kenosis_ort.graph.structure import unsound
from kenosis_ort.runtime.machine import runtime_limits
from tests import models
from tests.graph.build import net, run

TINY = np.arange(16, dtype=np.float32).reshape(4, 4)


def tiny():
    return net("(float[1,4] x) => (float[1,4] y) { [mm] y = MatMul(x, w) }", {"w": TINY})


@pytest.fixture
def external(tmp_path):
    """Writes a model with its weight in model.data, whose entry says so much else, and returns its path."""
    path = tmp_path / "folder" / "model.onnx"
    path.parent.mkdir()

    def write(**entries):
        onnx.save_model(tiny(), path, save_as_external_data=True, location="model.data", size_threshold=0)
        proto = onnx.load(path, load_external_data=False)
        tensor = proto.graph.initializer[0]
        said = {e.key: e.value for e in tensor.external_data} | entries
        del tensor.external_data[:]
        for key in (key for key, value in said.items() if value is not None):
            tensor.external_data.add(key=key, value=str(said[key]))
        path.write_bytes(proto.SerializeToString())
        return path

    return write


def test_a_path_gives_a_complete_model_and_a_proto_is_copied(tmp_path):
    given, path = tiny(), tmp_path / "m.onnx"
    onnx.save(given, path)
    loaded, copied = load_model(str(path)), load_model(given)
    assert (loaded.path, loaded.name, loaded.proto) == (path, str(path), given)
    assert (copied.path, copied.proto) == (None, given)
    copied.proto.graph.node[0].name = "changed"
    copied.proto.graph.initializer[0].raw_data = b""
    assert given == tiny()


@pytest.mark.parametrize("outputs", ["float[2] y", "float[2] y, float[2] w"])
def test_a_constant_that_is_listed_as_an_input_is_its_default(outputs):
    model = net(f"(float[2] x, float[2] w) => ({outputs}) {{ w = Constant<value_floats=[1.0, 2.0]>() y = Add(x, w) }}")
    loaded = load_model(model).proto
    assert [node.op_type for node in loaded.graph.node] == ["Add"]
    assert [tensor.name for tensor in loaded.graph.initializer] == ["w"]


@pytest.mark.parametrize(("content", "message"), [
    (b"", "empty"), (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS"),
    (b"PK\x03\x04aaaa", "zip archive"), (b"<!doctype html><html>", "HTML"),
    (b"\x18\x00\x00\x00ORTM" + bytes(20), "ORT format"),
    (b"this is no model at all, only a text of some length", "not a complete ONNX model"),
    (bytes(range(256)), "not a complete ONNX model"), (b"\x08\x08", "no ONNX graph"),
    *((tiny().SerializeToString()[:length], "ONNX") for length in (1, 2, 10, 50, 100, -1)),
])  # fmt: skip
def test_other_files_are_refused_by_what_they_are(tmp_path, content, message):
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_model(path)
    assert (str(path) in str(caught.value), bool(caught.value.fix)) == (True, True)


@pytest.mark.parametrize(("name", "says"), [
    ("none.onnx", "does not exist"), ("", "folder"), ("a\0b", "cannot be read"), ("x" * 5000, "cannot be read"),
])  # fmt: skip
def test_what_is_no_file(tmp_path, name, says):
    with pytest.raises(ModelLoadError, match=says):
        load_model(f"{tmp_path}/{name}")
    with pytest.raises(TypeError, match="path or an onnx"):
        load_model(3)


def test_external_data_are_read(external):
    for path in (external(), external(length=None)):  # without a length by its shape
        (tensor,) = load_model(path).proto.graph.initializer
        assert tensor.data_location == TensorProto.DEFAULT
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), TINY)


UNSAFE = {
    "absolute path": [{"location": at} for at in ("/etc/passwd", "C:\\secret", "\\\\host\\share")],
    "outside the model's folder": [{"location": f"{at}secret.data"} for at in ("../", "a/../../", "..\\")],
    "names no file": [{"location": at} for at in ("a\0b", None)],
    "does not exist": [{"location": at} for at in ("none.data", "*/_ORT_MEM_ADDR_/*")],
    "not a regular file": [{"location": "."}], "has only": [{"offset": 1}, {"offset": 10**15}],
    "negative": [{"offset": -1}, {"length": -5}], "malformed": [{"offset": "x"}],
    "takes 64": [{"length": 10**12}, {"length": 10}], "truncated": [{"location": "short.data"}],
}  # fmt: skip


@pytest.mark.parametrize(("message", "entries"), [(says, entries) for says, all_ in UNSAFE.items() for entries in all_])
def test_unsafe_or_broken_external_data_are_refused(external, entries, message):
    path = external(**entries)
    (path.parent.parent / "secret.data").write_bytes(TINY.tobytes())
    (path.parent / "short.data").write_bytes(TINY.tobytes()[:-1])
    with pytest.raises(ModelLoadError, match=f"(?s)(?=.*tensor 'w').*{message}"):
        load_model(path)


@pytest.mark.parametrize("folder", [False, True])
def test_links_out_of_the_folder_are_refused(external, folder):
    path = external(location="sub/secret.data") if folder else external()
    outside = path.parent.parent / "outside"
    outside.mkdir()
    (outside / "secret.data").write_bytes(TINY.tobytes())
    (path.parent / "model.data").unlink()
    link, to = ("sub", outside) if folder else ("model.data", outside / "secret.data")
    (path.parent / link).symlink_to(to)
    with pytest.raises(ModelLoadError, match="by a link"):
        load_model(path)


def test_a_hub_cache_of_links_is_read(external, tmp_path):
    """Model and data are links into one folder of blobs, as hubs lay out their caches."""
    path, snapshot = external(), tmp_path / "snapshots"
    snapshot.mkdir()
    for name, blob in (("model.onnx", "a"), ("model.data", "b")):
        (path.parent / name).rename(path.parent / blob)
        (snapshot / name).symlink_to(f"../folder/{blob}")
    (tensor,) = load_model(snapshot / "model.onnx").proto.graph.initializer
    np.testing.assert_array_equal(numpy_helper.to_array(tensor), TINY)


def test_external_data_in_a_subgraph_constant_are_checked(tmp_path):
    body = "() => (float[1] c) { c = Constant<value = float[1] {1}>() }"
    proto = net(f"(bool x) => (float[1] y) {{ y = If(x) <then_branch = t {body}, else_branch = e {body}> }}")
    tensor = proto.graph.node[0].attribute[1].g.node[0].attribute[0].t
    tensor.CopyFrom(TensorProto(data_type=1, dims=[1], data_location=TensorProto.EXTERNAL))
    tensor.external_data.add(key="location", value="../outside")
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(ModelLoadError, match="outside"):
        load_model(tmp_path / "m.onnx")


def test_a_proto_with_unloaded_external_data_is_refused(external):
    proto = onnx.load(external(), load_external_data=False)
    with pytest.raises(ModelLoadError, match="Pass the path"):
        load_model(proto)


@pytest.mark.parametrize(("text", "named"), [
    ("(float[1] x) => (float[1] y) { [quant] q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }", "quant"),
    ("(uint8[2,2] x) => (int32[2,2] y) { y = MatMulInteger(x, x) }", "MatMulInteger"),
    ("(uint8[2,2] x) => (uint8[2,2] y) { y = QLinearMatMul(x, s, z, x, s, z, s, z) }", "QLinearMatMul"),
])  # fmt: skip
def test_quantized_activations_are_refused(text, named):
    with pytest.raises(AlreadyQuantizedError, match=named):
        check_not_quantized(net(text, {"s": np.float32(1), "z": np.uint8(0)}))


def test_weights_alone_may_be_quantized():
    text = "(float[1,4] x) => (float[1,4] y) <int8[4,4] v, float s> { w = DequantizeLinear(v, s) y = MatMul(x, w) }"
    check_not_quantized(net(text))


# ---- what is checked before anything works on a model ---------------------------------------------------------------


def nested(levels):
    """A model of nested bodies, built without a copy: protobuf's own limits are lower."""
    proto = tiny()
    owner = proto.graph
    for _ in range(levels):
        node = owner.node.add(op_type="If", input=["f"], output=["y"])
        owner = node.attribute.add(name="then_branch", type=onnx.AttributeProto.GRAPH).g
    return proto


def with_functions(*bodies):
    """A model whose function ``f0`` calls in a row what its body names, and so on."""
    text = "(float[1,4] x) => (float[1,4] y) { y = d.f0(x) }"
    for at, calls in enumerate(bodies):
        names = ["p", *(f"v{i}" for i in range(calls.count(" "))), "q"]
        rows = (f"{b} = {call}({a})" for call, a, b in zip(calls.split(), names[:-1], names[1:], strict=True))
        text += f' <domain: "d", opset_import: ["" : 17, "d" : 1]> f{at} (p) => (q) {{ {" ".join(rows)} }}'
    return net(text, domains=("d",))


@pytest.mark.parametrize(("fields", "message"), [
    ({"dims": [4, -4]}, "negative size"), ({"dims": [4, 5]}, "64 bytes.*takes 80"), ({"dims": [2**40, 2**40]}, "takes"),
    ({"dims": [2**32, 2**32, 4]}, "takes"), ({"raw_data": TINY.tobytes()[:-1]}, "63 bytes"),
    ({"raw_data": TINY.tobytes() + b"\0"}, "65 bytes"), ({"raw_data": b"", "float_data": [1.0] * 15}, "15 numbers"),
    ({"raw_data": TINY.tobytes()[:8], "segment": TensorProto.Segment(begin=0, end=1)}, "segment"),
    ({"data_type": 77}, "data type 77"), ({"data_type": 0}, "data type 0"),
    ({"data_type": TensorProto.STRING}, "strings"),
])  # fmt: skip
def test_tensors_have_to_fill_their_shape(fields, message):
    proto = tiny()
    tensor = proto.graph.initializer[0]
    for name, value in fields.items():
        tensor.ClearField(name)
        if value != b"":
            tensor.MergeFrom(TensorProto(**{name: value}))
    with pytest.raises(ModelLoadError, match=f"(?s)Tensor 'w' .*{message}"):
        load_model(proto)


SOUND = (
    *(np.ones((2, 3), np.float16), np.ones(3, np.complex64), np.array(["a", "b"], object)),
    *(np.ones((0, 4), np.float32), np.array(True), np.ones(3, np.uint64)),
)


@pytest.mark.parametrize("tensor", [
    *(numpy_helper.from_array(array, "unused") for array in SOUND),
    *(helper.make_tensor("unused", helper.np_dtype_to_tensor_dtype(a.dtype), a.shape, a.ravel()) for a in SOUND),
    *(helper.make_tensor("unused", kind, [3], [1, 2, 3]) for kind in (TensorProto.INT4, TensorProto.UINT4)),
])  # fmt: skip
def test_sound_tensors_of_all_types_are_taken(tensor):
    proto = tiny()
    proto.graph.initializer.append(tensor)
    assert len(load_model(proto).proto.graph.initializer) == 2


def test_what_nothing_reads_and_nobody_could_read_is_left_out():
    proto = tiny()
    broken = proto.graph.initializer.add(name="unused", data_type=1, dims=[3], raw_data=b"x")
    assert [t.name for t in load_model(proto).proto.graph.initializer] == ["w"]
    assert broken in proto.graph.initializer  # the caller's own is not changed


def without(field, of=""):
    proto = tiny()
    {"": proto, "graph": proto.graph, "node": proto.graph.node[0]}[of].ClearField(field)
    return proto


def calling(*, argument):
    proto = with_functions("d.f1", "Relu")
    proto.graph.node[0].input[0] = argument
    proto.functions[1].input.append("spare")
    return proto


@pytest.mark.parametrize(("build", "says"), [
    (lambda: without("opset_import"), "operator set"), (lambda: without("ir_version"), "no ONNX graph"),
    (lambda: without("output", "graph"), "no outputs"),
    *((lambda field=field: without(field, "node"), r"'mm' \(MatMul\).*needs 2 and 1") for field in ("input", "output")),
    (lambda: nested(60), "levels deep"), (lambda: with_functions("d.f1", "Relu d.f0"), "calls itself"),
    (lambda: with_functions(*(" ".join([f"d.f{i + 1}"] * 10) for i in range(8)), "Relu"), "unfolds to"),
    (lambda: calling(argument=""), "'f1' leaves out its input 'p'"),  # the runtime crashes on it
])  # fmt: skip
def test_what_is_no_sound_model_is_refused(build, says):
    with pytest.raises(ModelLoadError, match=says):
        load_model(build(), ask_runtime=False)


def test_bodies_and_functions_that_are_sound_are_taken():
    assert parse_model(nested(10).SerializeToString()).graph.node
    for proto in (with_functions("d.f1 d.f1", "Relu Relu"), calling(argument="x")):
        assert load_model(proto).proto.functions


@pytest.mark.parametrize(("build", "old", "says"), [
    (tiny, b"mm", "not UTF-8"), (tiny, b"\x01x", "not UTF-8"), (tiny, b"\x01w", "not UTF-8"),
    (lambda: with_functions("Relu"), b"\x02f0", "not UTF-8"), (tiny, b"somebody", ""),
], ids=["node", "input", "initializer", "function", "what is no name does not matter"])  # fmt: skip
def test_names_that_are_no_text_are_refused(build, old, says):
    proto = build()
    proto.producer_name = "somebody"
    content = proto.SerializeToString()
    assert old in content
    content = content.replace(old, old[:-1] + b"\xff")
    if not says:
        assert load_model(parse_model(content)).proto.graph.node
        return
    with pytest.raises(ModelLoadError, match=says):
        parse_model(content)


@pytest.mark.parametrize("version", [2**63 - 1, pytest.param(2**31, marks=pytest.mark.since("1.24")), -(2**63)])
def test_any_number_is_taken_for_a_version(version):
    plain, called = tiny(), with_functions("Relu")
    for entry in (plain.opset_import[0], called.opset_import[0], called.functions[0].opset_import[0]):
        entry.version = version
    with pytest.raises(ModelLoadError):
        load_model(called)
    for proto in (plain, called):
        assert load_model(proto, ask_runtime=False).proto.opset_import[0].version == version


def test_a_segment_that_is_whole_is_read():
    proto = tiny()
    proto.graph.initializer[0].segment.end = 16
    assert not load_model(proto).proto.graph.initializer[0].HasField("segment")


def test_a_negative_size_is_open():
    """Paddle's exporters wrote -1; shape inference reckons with it, and so a Tile was repeated -1 times."""
    text = "p = MaxPool<kernel_shape = [2,2], strides = [2,2]>(x) y = Flatten(p)"
    proto = net(f"(float[1,3,1,1] x) => (float[1,1] y) {{ {text} }}")
    for size in (size for v in (*proto.graph.input, *proto.graph.output) for size in v.type.tensor_type.shape.dim):
        size.dim_value = 3 if size.dim_value == 3 else -1
    inferred = load_model(proto).proto
    infer_shapes(inferred)
    for value in (inferred.graph.input[0], *inferred.graph.value_info):
        assert [d.dim_value for d in value.type.tensor_type.shape.dim] == [0, 3, 0, 0]
    assert proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value == -1  # the caller's


def test_a_reference_outside_functions_means_nothing():
    proto = net("(float[1,4] x) => (float[1,4] y) { y = LeakyRelu<alpha = 0.5>(x) }")
    proto.graph.node[0].attribute[0].ref_attr_name = "slope"
    attribute = load_model(proto).proto.graph.node[0].attribute[0]
    assert (attribute.ref_attr_name, attribute.f) == ("", 0.5)


# ---- the runtime first ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("from_file", [True, False])
def test_what_the_runtime_refuses_is_refused_first(monkeypatch, tmp_path, from_file):
    """Before ONNX's C++ code sees a model."""
    for name in ("shape_inference.infer_shapes", "checker.check_model", "version_converter.convert_version"):
        monkeypatch.setattr(f"onnx.{name}", Mock(side_effect=AssertionError("ONNX saw it before the runtime did")))
    source, feeds = tiny(), [{"x": np.ones((1, 4), np.float32)}]
    source.graph.node[0].op_type = "NoSuchOperator"
    if from_file:
        (tmp_path / "m.onnx").write_bytes(source.SerializeToString())
        source = tmp_path / "m.onnx"
    for call in (
        lambda: preview(source),
        lambda: quantize_static(source, tmp_path / "out.onnx", ArrayReader(feeds)),
        lambda: compare(source, tiny(), feeds),
    ):
        with pytest.raises(ModelLoadError, match=r"The runtime refuses the model.*NoSuchOperator"):
            call()


def test_of_qonnx_it_is_said_that_the_model_is_quantized():
    text = "(float[1,3] x) => (float[1,3] y) <float s, float z, float b> { y = onnx.brevitas.Quant(x, s, z, b) }"
    with pytest.raises(ModelLoadError, match=r"Quant.*It is quantized, in QONNX.*convert"):
        load_model(net(text, domains=("onnx.brevitas",)))


def test_what_preparation_mends_is_no_reason_to_refuse():
    limits, proto = runtime_limits(), tiny()
    proto.ir_version = limits.max_ir + 1
    assert load_model(proto).proto.ir_version == limits.max_ir < proto.ir_version
    proto = tiny()
    proto.graph.node.add(op_type="Relu", input=["y"], output=["z"], name="mm")  # a name used twice
    proto.opset_import[0].version = limits.max_opset + 1
    assert load_model(proto).proto == proto


# ---- what a file says wrongly about values ----------------------------------------------------------------------


@pytest.mark.parametrize("said", ["float[7] mm", "int64[1,4] mm", "float[1,5] mm"], ids=["rank", "type", "size"])
def test_value_info_that_inference_contradicts_is_corrected(said):
    text = f"""(float[1,4] x) => (float[1,4] y) <float[4,4] w, float[N,9] z, float[N,4] mm, {said}>
    {{ mm = MatMul(x, w) z = mine.Odd(mm) y = mine.Odd(z) }}"""
    proto = net(text, domains=("mine",))
    infer_shapes(proto, thorough=False)
    dims = {v.name: [d.dim_value or d.dim_param for d in v.type.tensor_type.shape.dim] for v in proto.graph.value_info}
    assert dims == {"z": ["N", 9], "mm": [1, 4]}


@pytest.mark.parametrize("kind", ["INT2", "UINT2", "INT4", "FLOAT4E2M1"])
def test_packed_tensors_are_read(kind):
    number = dict(TensorProto.DataType.items()).get(kind)
    if number is None:
        pytest.skip(f"the installed onnx knows no {kind}")
    packed = helper.make_tensor("w", number, [5], [0, 1, 1, 0, 1])
    assert tensor_bytes(packed) == (2 if kind.endswith("T2") else 3)
    whole = TensorProto(name="w", data_type=number, dims=[5], raw_data=raw_bytes(packed))
    assert unsound(packed) is unsound(whole) is None
    assert np.array_equal(numpy_helper.to_array(whole), numpy_helper.to_array(packed))
    whole.raw_data += b"\0"
    assert unsound(whole) is not None


@pytest.mark.parametrize("version", [0, -1])
def test_an_ir_version_that_no_release_has_is_taken_as_the_runtime_takes_it(version, tmp_path):
    proto = models.mlp()
    proto.ir_version = version
    quantize_static(proto, tmp_path / "out.onnx", models.reader(proto, 2), promise=False)
    run(str(tmp_path / "out.onnx"), models.feeds(proto, 1)[0])
