"""What the runtime can: versions that differ, models of other floating types, custom operators, threads, processes."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto
from onnxruntime.quantization import QuantType, quant_utils

from kenosis_ort import Stages, SyntheticReader, compare, errors, quantize_static, quantize_weights, verify_fusion
from kenosis_ort.runtime.machine import runtime_limits
from tests import models, planning
from tests.flow.support import good, interface, make, proof, quality, quantized, sqnr_db, typed
from tests.models import FeedReader

ROOT = Path(__file__).resolve().parents[2]
POOLED = """net (float[1,3,16,16] x) => (float[1,4] y)
    <float[8,3,3,3] w, float[8,8,3,3] v, float[8,8,3,3] u, float[4,8] h, float[4] hb> {
    a = Conv <pads = [1,1,1,1]> (x, w)  b = Relu (a)  p = MaxPool <kernel_shape = [2,2], strides = [2,2]> (b)
    c = Conv <pads = [1,1,1,1]> (p, v)  d = Relu (c)  e = Conv <pads = [1,1,1,1]> (d, u)
    m = GlobalAveragePool (e)  f = Flatten (m)  y = Gemm <transB = 1> (f, h, hb) }"""


@pytest.mark.parametrize(
    "opset", [7, 9, 11, 12, 13, 18, 19, 20, 21, 22, 23, pytest.param(24, marks=pytest.mark.since("1.24"))]
)
def test_every_operator_set_fuses_down_to_the_max_pool(tmp_path, opset):
    if opset > onnx.defs.onnx_opset_version():
        pytest.skip(f"onnx {onnx.__version__} knows no operator set {opset}")
    made = good(planning.parse(POOLED, opset=opset), tmp_path)
    integer = ("Conv_a", "MaxPool_p", "Conv_c", "Conv_e", "GlobalAveragePool_m", "Gemm_y")
    assert all(proof(made.report).by_node[name].integer for name in integer)
    written = next(o.version for o in made.written.opset_import if not o.domain)
    assert written == max(min(opset, runtime_limits().best_opset({"MaxPool"})), 13)
    assert any("lowered" in note for note in made.report.notes) == (written < opset)


def test_nodes_of_a_later_operator_set_keep_it(tmp_path):
    """Where the operator set in which MaxPool fuses lacks another operator, the model stays as it is."""
    if runtime_limits().max_opset < 23:
        pytest.skip(f"onnxruntime {runtime_limits().version} quantizes up to operator set {runtime_limits().max_opset}")
    text = """net (float[1,4,8,8] x) => (float[1,4,7,7] y) <float[4,4,3,3] w, float[7] ones> {
        c = Conv <pads = [1,1,1,1]> (x, w)  p = MaxPool <kernel_shape = [2,2]> (c)  y = RMSNormalization (p, ones) }"""
    made = make(planning.parse(text, {"ones": [1.0] * 7}, opset=23), tmp_path)
    assert next(o.version for o in made.written.opset_import if not o.domain) == 23
    assert made.db() > 20


LINEAR = "net (float[1,64] x) => (float[1,64] y) <float[64,64] w> { y = MatMul (x, w) }"


@pytest.mark.parametrize(("text", "options"), [
    (LINEAR, {}), (LINEAR, {"recipe": "weight-only-4"}), (LINEAR, {"stages": Stages.none()}),
    ("net (float[1,4] x) => (float[1,4] y) { y = Relu (x) }", {"on_failure": "float"}),
], ids=["default", "weights", "stock", "float"])  # fmt: skip
@pytest.mark.filterwarnings("ignore:The file holds the float model")
@pytest.mark.parametrize("from_file", [False, True])
def test_an_ir_version_that_the_runtime_does_not_read_is_lowered(tmp_path, text, options, from_file):
    """Releases of onnx write versions that older runtimes do not read, which most files have no need of."""
    model = planning.parse(text)
    float_model, feeds = onnx.ModelProto.FromString(model.SerializeToString()), models.feeds(model)
    model.ir_version = runtime_limits().max_ir + 1
    source, out = tmp_path / "float.onnx", tmp_path / "out.onnx"
    onnx.save(model, source)
    report = quantize_static(source if from_file else model, out, FeedReader(feeds), **options)
    assert onnx.load(out).ir_version <= runtime_limits().max_ir < model.ir_version
    assert sum("IR version lowered" in note for note in report.notes) == 1
    assert quality(float_model, out, feeds) > 12
    if not options:
        assert compare(source, out, FeedReader(feeds)).outputs[0].sqnr_db > 12
        assert quantize_weights(source, out, FeedReader(feeds)).outputs


TURNED = "t = Transpose <perm = [0,2,3,1]> (x)  i = Transpose <perm = [0,3,1,2]> (t)"


@pytest.mark.parametrize("between", ["i = Identity (x)", TURNED], ids=["nothing", "Transpose"])
def test_clip_of_a_graph_input(tmp_path, between):
    """Runtimes before 1.24 die on graph input, Clip, QuantizeLinear."""
    text = f"""net (float[1,4,8,8] x) => (float[1,8,1,1] y)
        <float low = {{0.0}}, float high = {{1.0}}, float[8,4,3,3] w, float[8,8,3,3] v> {{
        {between}  c = Clip (i, low, high)  a = Conv <pads = [1,1,1,1]> (c, w)  r = Relu (a)
        b = Conv <pads = [1,1,1,1]> (r, v)  y = GlobalAveragePool (b) }}"""
    made = make(planning.parse(text), tmp_path, protect_outputs="int8")
    assert made.report.plan.barriers == ("c",)
    assert made.report.left_float() == ()
    assert made.db() > 20


def test_options_that_the_runtime_would_ignore_are_refused(tmp_path, monkeypatch):
    for function in ("snap_zero_point_to_uint8", "compute_scale_zp_blocked"):
        monkeypatch.delattr(quant_utils, function, raising=False)
    for option, value in (("ActivationRestrictedAsymmetric", True), ("BlockSize", 16)):
        with pytest.raises(errors.OptionError, match=rf"{option}.*needs onnxruntime 1\.27 or later"):
            quantized(models.residual_block(), tmp_path / "out.onnx", extra_options={option: value})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kinds", ["QUInt16 QInt8", "QInt16 QInt16", "QUInt8 QInt16"])
@pytest.mark.parametrize("net", ["residual_block", "transformer_block"])
def test_sixteen_bits(tmp_path, net, kinds):
    """Newer runtimes raise the operator set for them, older ones take their own domain's operators."""
    types = dict(zip(("activation_type", "weight_type"), (QuantType[kind] for kind in kinds.split()), strict=True))
    made = make(models.ALL[net](), tmp_path, per_channel=False, **types)
    activation, weight = (np.dtype(kind[1:].lower()) for kind in kinds.split())
    assert {zero_point.dtype for _, zero_point in made.grids.values()} == {activation}
    assert {a.dtype for n, a in made.held.items() if n.endswith("_w_quantized")} == {weight}
    assert "runs in float" in (told := " ".join(made.report.notes)) or "run in float" in told
    assert made.db() > 30


# ---- other floating types -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["residual_block", "two_input_detector", "mlp_matmul", "mlp"])
def test_half_and_double_models_are_integer_where_float_models_are(tmp_path, name):
    single = models.ALL[name]()
    kind = TensorProto.DOUBLE if name == "mlp" else TensorProto.FLOAT16  # the runtime runs them in these types
    reference = quantized(single, tmp_path / "single.onnx")
    made = make(typed(single, kind), tmp_path, models.feeds(typed(single, kind)))
    assert any(made.heavy.values())
    kinds = {n.node: n.kind for n in made.report.plan.nodes if not n.node.endswith("_Cast")}
    assert kinds == {n.node: n.kind for n in reference.plan.nodes}
    assert made.db() > 28
    assert kind not in {t.data_type for t in made.written.graph.initializer}
    if name == "residual_block":
        quantize_static(made.model, made.out, SyntheticReader(made.model, samples=4))
    assert interface(made.out) == interface(made.model)


# ---- custom operators: the library is registered on request, and never unasked --------------------------------


@pytest.fixture
def library():
    return str(pytest.importorskip("onnxruntime_extensions").get_library_path())


CUSTOM = """(float[1,3,8,8] x, float[4,4] m) => (float[1,4,8,8] y) <float[4,3,3,3] w, float[4,4,3,3] v,
    int64[4] map = {1, 1, 4, 4}, int64[8] pads = {0, 0, 2, 2, 0, 0, 2, 2}> {
    [conv0] a = Conv <pads = [1,1,1,1]> (x, w)  r = Relu (a)  [inverse] i = ai.onnx.contrib.Inverse (m)
    s = Reshape (i, map)  p = Pad (s, pads)  t = Mul (r, p)  [conv1] y = Conv <pads = [1,1,1,1]> (t, v) }"""
"""A picture through Conv, the extensions' Inverse of a small matrix, and Conv again."""


def custom():
    return planning.parse(CUSTOM, ir_version=8, domains=["ai.onnx.contrib"], checked=False)


def custom_feeds():
    rng = np.random.default_rng(0)
    x, m = rng.normal(0, 1, (4, 1, 3, 8, 8)), np.eye(4) * 2 + rng.normal(0, 0.1, (4, 4, 4))
    return [{"x": x[i].astype(np.float32), "m": m[i].astype(np.float32)} for i in range(4)]


@pytest.fixture
def registered(monkeypatch):
    """The libraries that any session was given."""
    seen = []
    original = ort.SessionOptions.register_custom_ops_library

    def register(self, path):
        seen.append(path)
        original(self, path)

    monkeypatch.setattr(ort.SessionOptions, "register_custom_ops_library", register)
    return seen


def test_registered_on_request(tmp_path, library, registered):
    out, feeds = tmp_path / "out.onnx", custom_feeds()
    report = quantize_static(custom(), out, FeedReader(feeds), custom_op_libraries=[library])
    assert set(registered) == {library}
    assert report.left_float() == ()
    kernels = proof(report).by_node
    assert [kernels[name].integer for name in ("conv0", "conv1", "inverse")] == [True, True, False]
    want, got = ([models.session(m, library).run(None, feed)[0] for feed in feeds] for m in (custom(), out))
    assert sqnr_db(want, got) > 25
    assert verify_fusion(out, custom_op_libraries=[library]).by_node["conv1"].integer
    with pytest.raises(errors.KenosisError, match="custom_op_libraries"):
        verify_fusion(out)


@pytest.mark.usefixtures("library")
def test_refused_without_a_library_and_never_registered_unasked(tmp_path, registered):
    (bogus := tmp_path / "bogus.so").write_bytes(b"no library")
    for libraries, text in (([], r"Inverse.*custom_op_libraries"), ([str(bogus)], r"bogus\.so")):
        with pytest.raises(errors.KenosisError, match=text) as caught:
            quantize_static(custom(), tmp_path / "c.onnx", FeedReader(custom_feeds()), custom_op_libraries=libraries)
        assert caught.value.fix
        assert registered == libraries
    assert not (tmp_path / "c.onnx").exists()
    registered.clear()
    quantized(models.conv_relu_chain(2), tmp_path / "out.onnx", recipe="fast", promise=True, tune="model")
    assert registered == []


# ---- the same call gives the same bytes -----------------------------------------------------------------------

NETS = ("residual_block", "bn_net", "two_input_detector", "net_with_if", "transformer_block", "mlp")


def made_of(name, folder):
    folder.mkdir(exist_ok=True)
    quantized(models.ALL[name](), folder / name)
    return (folder / name).read_bytes()


def test_in_threads_and_in_other_processes(tmp_path):
    """One after the other, at once, and with other hashes: nothing depends on the order of sets of strings."""
    alone = {name: made_of(name, tmp_path / "alone") for name in NETS}
    with ThreadPoolExecutor(4) as pool:
        for at in range(2):
            together = list(pool.map(lambda name, at=at: made_of(name, tmp_path / f"{at}"), NETS))
            assert dict(zip(NETS, together, strict=True)) == alone
    make = "[made_of(name, Path(sys.argv[1])) for name in NETS]"
    code = f"from pathlib import Path; from tests.flow.test_runtime_versions import *; {make}"
    for seed in ("0", "1"):
        command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / f"hash{seed}")]
        subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, timeout=300)
    one, other = (tmp_path / f"hash{seed}" for seed in "01")
    assert [name for name in NETS if (one / name).read_bytes() != (other / name).read_bytes()] == []
