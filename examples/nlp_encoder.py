"""Quantizes a BERT-like text classifier, and says what stays float and why.

    python examples/nlp_encoder.py

The encoder is made here: two layers of BERT's graph as exporters write it (embeddings, masked attention, GELU through
Erf, LayerNormalization), with random weights and the few strong channels that trained encoders have. Its head is fitted
to a small task, so that accuracy means something: do the words of a sentence lean one way or the other? For a real
model only the reader matters: yield what your tokenizer returns, masks and all, of sentences of natural length.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort import ArrayReader, compare, quantize_static

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS, LEANING = 500, 48, 128, 4, 2, 60
Feed = dict[str, npt.NDArray[np.int64]]


def sentences(count: int, seed: int) -> tuple[list[Feed], npt.NDArray[np.int64]]:
    """Returns tokens with masks, one sentence a feed, and the way each leans: word 4 to 63 one way, 64 to 123 other."""
    rng = np.random.default_rng(seed)
    feeds, labels = [], np.zeros(count, np.int64)
    for i in range(count):
        length = int(rng.integers(8, LENGTH))
        ids, mask = np.zeros((1, LENGTH), np.int64), np.zeros((1, LENGTH), np.int64)
        ids[0, :length] = rng.integers(4, VOCABULARY, length)
        labels[i] = rng.integers(2)
        leaning = rng.random(length) < 0.3
        ids[0, :length][leaning] = rng.integers(4, 4 + LEANING, int(leaning.sum())) + LEANING * labels[i]
        ids[0, 0], mask[0, :length] = 1, 1  # [CLS]
        feeds.append({"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)})
    return feeds, labels


def encoder(head: npt.NDArray[np.float32], bias: npt.NDArray[np.float32]) -> onnx.ModelProto:
    """Returns the classifier: three inputs (N, 48) of int64, output ``logits`` (N, 2)."""
    rng = np.random.default_rng(0)
    nodes: list[onnx.NodeProto] = []
    weights: list[TensorProto] = []

    def emit(op: str, inputs: Sequence[str], out: str, *arrays: npt.NDArray[np.generic], **attributes: Any) -> str:
        names = [f"{out}.{i}" for i in range(len(arrays))]
        weights.extend(numpy_helper.from_array(a, n) for a, n in zip(arrays, names, strict=True))
        nodes.append(helper.make_node(op, [*inputs, *names], [out], out, **attributes))
        return out

    def normal(*shape: int, scale: float = 1.0) -> npt.NDArray[np.float32]:
        return rng.normal(0, scale, shape).astype(np.float32)

    def linear(x: str, out: str, width_in: int, width_out: int, gain: float = 1.0) -> str:
        product = emit("MatMul", [x], f"{out}/MatMul", normal(width_in, width_out, scale=gain * width_in**-0.5))
        return emit("Add", [product], out, normal(width_out, scale=0.1))

    def norm(x: str, out: str) -> str:
        gain = np.ones(WIDTH, np.float32)
        gain[[3, 77]] = 4.0  # trained encoders have a few channels far larger than the rest
        return emit("LayerNormalization", [x], out, gain, normal(WIDTH, scale=0.1), axis=-1)

    def scalar(value: float) -> npt.NDArray[np.float32]:
        return np.array(value, np.float32)

    words = emit("Gather", ["word_table", "input_ids"], "words")
    kinds = emit("Gather", ["kind_table", "token_type_ids"], "kinds")
    table, direction = normal(VOCABULARY, WIDTH), normal(WIDTH, scale=0.7)
    table[4 : 4 + LEANING] -= direction  # words of a kind lie close together, as in trained tables
    table[4 + LEANING : 4 + 2 * LEANING] += direction
    weights.append(numpy_helper.from_array(table, "word_table"))
    weights.append(numpy_helper.from_array(normal(2, WIDTH, scale=0.1), "kind_table"))
    placed = emit("Add", [emit("Add", [words, kinds], "typed")], "placed", normal(1, LENGTH, WIDTH, scale=0.3))
    x = norm(placed, "embedded")
    mask = emit("Unsqueeze", ["attention_mask"], "mask4", np.array([1, 2]))
    mask = emit("Cast", [mask], "mask_float", to=TensorProto.FLOAT)
    mask = emit("Mul", [emit("Add", [mask], "mask_less", scalar(-1))], "mask_added", scalar(10000))
    for i in range(LAYERS):
        parts = {}
        for role, perm in (("query", (0, 2, 1, 3)), ("key", (0, 2, 3, 1)), ("value", (0, 2, 1, 3))):
            wide = linear(x, f"l{i}/{role}", WIDTH, WIDTH, 1.0 if role == "value" else 0.3)  # attention stays broad
            split = emit("Reshape", [wide], f"l{i}/{role}/split", np.array([0, LENGTH, HEADS, WIDTH // HEADS]))
            parts[role] = emit("Transpose", [split], f"l{i}/{role}/heads", perm=perm)
        scores = emit("MatMul", [parts["query"], parts["key"]], f"l{i}/scores")
        scaled = emit("Div", [scores], f"l{i}/scaled", scalar((WIDTH / HEADS) ** 0.5))
        shares = emit("Softmax", [emit("Add", [scaled, mask], f"l{i}/masked")], f"l{i}/softmax", axis=-1)
        context = emit("MatMul", [shares, parts["value"]], f"l{i}/context")
        joined = emit("Transpose", [context], f"l{i}/joined", perm=(0, 2, 1, 3))
        joined = emit("Reshape", [joined], f"l{i}/flat", np.array([0, LENGTH, WIDTH]))
        x = norm(emit("Add", [x, linear(joined, f"l{i}/out", WIDTH, WIDTH)], f"l{i}/sum"), f"l{i}/norm")
        wide = linear(x, f"l{i}/ffn", WIDTH, 4 * WIDTH)
        erf = emit("Erf", [emit("Div", [wide], f"l{i}/gelu/div", scalar(2**0.5))], f"l{i}/gelu/erf")
        gelu = emit("Mul", [wide, emit("Add", [erf], f"l{i}/gelu/one", scalar(1))], f"l{i}/gelu/mul")
        gelu = emit("Mul", [gelu], f"l{i}/gelu", scalar(0.5))
        x = norm(emit("Add", [x, linear(gelu, f"l{i}/back", 4 * WIDTH, WIDTH)], f"l{i}/sum2"), f"l{i}/norm2")
    first = emit("Gather", [x], "cls", np.array(0), axis=1)
    pooled = emit("Tanh", [linear(first, "pooler", WIDTH, WIDTH, 0.3)], "pooled")
    emit("Gemm", [pooled], "logits", head, bias)
    names = ("input_ids", "attention_mask", "token_type_ids")
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["n", LENGTH]) for name in names]
    outputs = [
        helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 2]),
        helper.make_tensor_value_info("pooled", TensorProto.FLOAT, ["n", WIDTH]),
    ]
    graph = helper.make_graph(nodes, "encoder", inputs, outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], producer_name="nlp_encoder")
    model.ir_version = 8
    onnx.checker.check_model(model, full_check=True)
    return model


def answers(model: onnx.ModelProto | Path, feeds: Sequence[Feed], output: str) -> npt.NDArray[np.float32]:
    """Returns one output for all feeds."""
    source = model if isinstance(model, Path) else model.SerializeToString()
    session = ort.InferenceSession(source, providers=["CPUExecutionProvider"])
    return np.concatenate([session.run([output], feed)[0] for feed in feeds])


def fit(train: Sequence[Feed], labels: npt.NDArray[np.int64]) -> onnx.ModelProto:
    """Returns the classifier with its head fitted by ridge regression on what the encoder says."""
    features = answers(encoder(np.zeros((WIDTH, 2), np.float32), np.zeros(2, np.float32)), train, "pooled")
    x = np.column_stack([features, np.ones(len(features))])
    y = np.eye(2)[labels] * 2 - 1
    head = np.linalg.solve(x.T @ x + np.eye(x.shape[1]), x.T @ y).astype(np.float32)
    model = encoder(head[:-1], head[-1])
    del model.graph.output[1]
    return model


def main(argv: Sequence[str] | None = None) -> None:
    """Fits, quantizes, compares, explains."""
    parser = argparse.ArgumentParser(description="Quantize a BERT-like text classifier.")
    parser.add_argument("--sentences", type=int, default=2000, help="to fit the head on")
    arguments = parser.parse_args(argv)
    train, labels = sentences(arguments.sentences, seed=1)
    test, test_labels = sentences(500, seed=2)
    with tempfile.TemporaryDirectory() as folder:
        float_model, int8_model = Path(folder) / "encoder.onnx", Path(folder) / "encoder.int8.onnx"
        onnx.save(fit(train, labels), float_model)
        report = quantize_static(
            float_model,
            int8_model,
            ArrayReader(train[:64]),
            promise=False,  # show INT8 whatever it gains at this size and on this machine
        )
        before, after = (answers(m, test, "logits").argmax(1) for m in (float_model, int8_model))
        compared = compare(float_model, int8_model, ArrayReader(test[:64]), samples=64)
    print(f"accuracy {(before == test_labels).mean():.3f} -> {(after == test_labels).mean():.3f}")
    print(f"the same answer for {(before == after).mean():.1%} of {len(test)} sentences")
    print(f"SQNR of the logits {compared.outputs[0].sqnr_db:.1f} dB")
    print(f"{report.verdict()} Size {report.size_before} -> {report.size_after} bytes")
    print("\nWhat stays float, and why:")
    stays = Counter((n.op_type, n.reason) for n in report.plan.nodes if n.node not in report.plan.integer_nodes())
    for (op_type, reason), count in stays.most_common():
        print(f"{count:4d} x {op_type:22s} {reason}")
    print("\n" + report.plan.explain("l0/context"))


if __name__ == "__main__":
    main()
