"""Linear layers of few bits and dynamic ones against float arithmetic; `quantize_weights` as users call it."""

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st
from onnx import TensorProto, helper

import kenosis_ort
from kenosis_ort.accuracy.outputs import compare_outputs
from kenosis_ort.quantizer.linear_layers import dynamic
from kenosis_ort.weights.blocks import weight_only, with_block_embeddings
from tests import models
from tests.flow.support import changed, quality
from tests.planning import parse

FORMS = [weight_only, dynamic]
KERNELS = {"MatMulNBits", "DynamicQuantizeMatMul", "MatMulIntegerToFloat"}
BIAS = models.normal((24,), 1)


def kernels(model):
    return [node.op_type for node in model.graph.node if node.op_type in KERNELS]


def decibels(reference, model, *, count=3):
    return min(c.sqnr_db for c in compare_outputs(reference, model, models.feeds(reference, count)))


def one_layer(nodes="y = Gemm(x, w, b)", b=BIAS, *, x="3,32", w="32,24", seed=0):
    return parse(f"(float[{x}] x) => (y) <float[{w}] w> {{ {nodes} }}", {"b": np.float32(b)}, seed=seed)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("model", "least"), [
    (models.mlp(n_in=48, hidden=64, n_out=32), 30), (models.mlp(n_in=48, hidden=64, n_out=32, gemm=False), 30),
    (models.mlp(n_in=200, hidden=130, n_out=17), 30), (models.transformer_block(tokens=6, width=32), 30),
    (one_layer("y = MatMul(x, w)"), 35), (one_layer("m = MatMul(x, w) y = Add(b, m)", x="2,3,32"), 35),
    (one_layer("m = MatMul(x, w) y = Add(b, m)", 0.5), 35), (one_layer("y = Gemm(x, w)"), 35),
    (one_layer("y = Gemm<transB = 1>(x, w, b)", w="24,32"), 35),
    (one_layer("y = Gemm<transB = 1, beta = 2.5>(x, w, b)", w="24,32"), 35), (one_layer(b=np.full((1, 24), 2.0)), 35),
    (one_layer("y = Gemm<beta = -1.0>(x, w, b)", np.full((1, 1), 2.0)), 35),
])  # fmt: skip
def test_all_linear_layers_run_on_the_kernels(form, model, least):
    before = model.SerializeToString(deterministic=True)
    made = form(model)
    assert model.SerializeToString(deterministic=True) == before
    constants = {t.name for t in model.graph.initializer}
    linear = [n for n in model.graph.node if n.op_type in ("Gemm", "MatMul") and n.input[1] in constants]
    assert len(kernels(made)) == len(linear)
    assert decibels(model, made) > least
    assert made.ByteSize() < model.ByteSize()
    assert [o.name for o in made.graph.output] == [o.name for o in model.graph.output]


def overridable():
    model = one_layer()
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [32, 24]))
    return model


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("build", [
    lambda: models.conv_relu_chain(2),
    lambda: models.mlp(n_in=8, hidden=12, n_out=4),  # too small to pay
    lambda: one_layer("y = Gemm<alpha = 0.5>(x, w, b)"), lambda: one_layer(b=np.ones((3, 24))),
    lambda: one_layer(b=np.ones((3, 1))), lambda: one_layer("y = Gemm(x, w)", w="32,8"),
    overridable,  # what callers may override is no constant
    lambda: changed(one_layer(), w=np.inf),
])  # fmt: skip
def test_other_nets_have_no_such_form(form, build):
    assert form(build()) is None


def test_data_that_several_layers_read_is_quantized_once():
    made = dynamic(models.transformer_block(tokens=6, width=32))
    assert kernels(made).count("MatMulIntegerToFloat") == 3  # q, k and v
    assert sum(n.op_type == "DynamicQuantizeLinear" for n in made.graph.node) == 1


@pytest.mark.parametrize("form", FORMS)
def test_a_matrix_that_several_layers_use_is_stored_once(form):
    model = parse("""(float[2,32] x) => (float[2,32] y) <float[32,32] w>
        { a = MatMul(x, w) b = Relu(a) c = MatMul(b, w) d = Gemm<transB = 1>(c, w) y = Relu(d) }""")  # another matrix
    made = form(model)
    assert (len(kernels(made)), len(made.graph.initializer)) == (3, 4)
    assert decibels(model, made) > 30


@pytest.mark.parametrize("form", FORMS)
def test_a_matrix_with_another_reader_stays_too(form):
    model = parse("""(int64[4] ids) => (float[4,50] y) <float[50,32] table>
        { rows = Gather(table, ids) y = Gemm<transB = 1>(rows, table) }""")
    made = form(model)
    assert "table" in {t.name for t in made.graph.initializer}
    assert decibels(model, made) > 30


def test_seven_bit_weights():
    made = dynamic(one_layer(), reduce_range=True)
    (weight,) = (onnx.numpy_helper.to_array(t) for t in made.graph.initializer if t.data_type == TensorProto.INT8)
    assert np.abs(weight).max() == 64


def look_up(rows, width, seed=0):
    text = f"(int64[4] ids) => (y) <float[{rows},{width}] table> {{ [look] y = Gather (table, ids) }}"
    return parse(text, seed=seed)


@given(
    rows=st.integers(16, 60), width=st.sampled_from([32, 64]), bits=st.sampled_from([4, 8]), seed=st.integers(0, 99)
)  # fmt: skip
def test_embeddings_are_looked_up_in_blocks(rows, width, bits, seed):
    model = look_up(rows, width, seed)
    made, names = with_block_embeddings(model, bits, 32)
    assert names == ("look",)
    (compared,) = compare_outputs(model, made, [{"ids": np.random.default_rng(seed).integers(0, rows, 4)}])
    assert compared.sqnr_db > (17 if bits == 4 else 40)


def test_embeddings_that_do_not_fit_blocks_stay():
    assert with_block_embeddings(look_up(50, 40), 4, 32)[1] == ()


# ---- the public call -------------------------------------------------------------------------------------------------


def decoder(width=64, rows=50, seed=0):
    """Tokens in, an embedding, three linear layers with a residual, logits out."""
    net = models.Net(seed=seed)
    ids = net.input("ids", [1, 6], TensorProto.INT64)
    x = net.op("Gather", [net.weight((rows, width), scale=1.0, name="table"), ids], name="embed")
    for i in range(3):
        y = net.op("Relu", [net.linear(x, width, width, name=f"layer{i}")])
        x = net.op("Add", [x, y])
    return net.of(net.op("MatMul", [x, net.weight((width, rows), name="head_w")], name="head"))


def feeds(count, seed=0):
    rng = np.random.default_rng(seed)
    return [{"ids": rng.integers(0, 50, (1, 6))} for _ in range(count)]


@pytest.mark.parametrize("bits", [4, 8])
def test_layers_and_embedding_have_few_bits_and_the_file_runs(tmp_path, bits):
    model, out = decoder(), tmp_path / "out.onnx"
    before = model.SerializeToString(deterministic=True)
    report = kenosis_ort.quantize_weights(model, out, models.FeedReader(feeds(16)), bits=bits, protect_sensitive=False)
    assert model.SerializeToString(deterministic=True) == before
    written = [node.op_type for node in onnx.load(out).graph.node]
    assert (written.count("MatMulNBits"), written.count("GatherBlockQuantized")) == (4, 1)
    assert [layer.bits for layer in report.layers] == [bits] * 5
    assert report.bytes_after == out.stat().st_size < report.bytes_before
    (compared,) = report.outputs
    assert compared.sqnr_db == pytest.approx(quality(model, out, feeds(16)[1::2]), abs=1.5)
    assert quality(model, out, feeds(8, seed=9)) > (12 if bits == 4 else 30)


@pytest.mark.parametrize(
    ("coarse", "samples", "bits"), [(False, 16, 8), (False, 0, 8), (True, 16, 4), (True, 0, 8)], ids=str
)
def test_an_embedding_has_four_bits_where_they_cost_the_outputs_little(tmp_path, coarse, samples, bits):
    """A table on a grid of 16 steps loses nothing by 4 bits, one of random numbers more than the layers behind it."""
    steps = np.random.default_rng(1).integers(0, 16, (50, 64))
    steps[:, ::32], steps[:, 1::32] = 0, 15
    model, out = changed(decoder(), table=lambda table: steps / 8 - 1 if coarse else table), tmp_path / "out.onnx"
    given = feeds(samples) if samples else None
    report = kenosis_ort.quantize_weights(model, out, given)
    assert {layer.node: layer.bits for layer in report.layers}["embed"] == bits
    assert any("Embeddings have 8 bits" in note for note in report.notes) == (bits == 8)
    plain, others = tmp_path / "float_table.onnx", feeds(8, seed=9)
    kenosis_ort.quantize_weights(model, plain, given, embeddings=False)
    assert quality(model, out, others) > quality(model, plain, others) - 1.5


def test_samples_make_it_better_on_others(tmp_path):
    model, found = decoder(), {}
    for name, reader in (("nearest", None), ("rounded", models.FeedReader(feeds(64)))):
        options = {"embeddings": False, "accuracy_level": 0, "protect_sensitive": False}
        report = kenosis_ort.quantize_weights(model, tmp_path / f"{name}.onnx", reader, **options)
        assert {layer.rounded for layer in report.layers} == {name == "rounded"}
        found[name] = quality(model, tmp_path / f"{name}.onnx", feeds(32, seed=9))
    assert found["rounded"] > found["nearest"] + 1


def test_a_layer_that_loses_much_more_than_the_others_keeps_eight_bits(tmp_path):
    one_of_a_block = np.where(np.arange(64) % 16, 1, 40)[:, None]  # takes all the range
    model = changed(decoder(), head_w=one_of_a_block)
    how = {"embeddings": False, "block_size": 128}
    report = kenosis_ort.quantize_weights(model, tmp_path / "out.onnx", **how)
    bits = {layer.node: layer.bits for layer in report.layers}
    plain = kenosis_ort.quantize_weights(model, tmp_path / "plain.onnx", protect_sensitive=False, **how)
    errors = {layer.node: 10 ** (layer.error_db / 10) for layer in plain.layers}
    middle = np.median(list(errors.values()))
    assert bits == {node: 8 if error > 4 * middle else 4 for node, error in errors.items()}


def test_named_nodes_stay_float(tmp_path):
    model, out = decoder(), tmp_path / "out.onnx"
    kenosis_ort.quantize_weights(model, out, nodes_to_exclude=["head", "embed"])
    written = {node.name: node.op_type for node in onnx.load(out).graph.node}
    assert (written["head"], written["embed"]) == ("MatMul", "Gather")


@pytest.mark.parametrize(("options", "error", "words"), [
    *((options, kenosis_ort.KenosisError, next(iter(options))) for options in (
        {"bits": 3}, {"bits": "4"}, {"block_size": 20}, {"accuracy_level": 2}, {"nodes_to_exclude": ["nowhere"]},
        {"symmetric": "yes"}, {"embeddings": 3},
    )),
    ({"model_input": models.conv_relu_chain(2)}, kenosis_ort.NothingToQuantizeError, "."),
    ({"calibration_data_reader": [{"other": np.zeros((1, 6))}]}, kenosis_ort.CalibrationError, "ids"),
    ({"calibration_data_reader": []}, kenosis_ort.CalibrationError, "yields no sample"),
])  # fmt: skip
def test_what_is_wrong_is_told_and_nothing_is_written(tmp_path, options, error, words):
    with pytest.raises(error, match=words):
        kenosis_ort.quantize_weights(**{"model_input": decoder(), "model_output": tmp_path / "out.onnx", **options})
    assert not list(tmp_path.iterdir())


def test_progress_is_told_by_layer(tmp_path):
    told = []
    kenosis_ort.quantize_weights(decoder(), tmp_path / "out.onnx", feeds(6), progress=lambda *entry: told.append(entry))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
