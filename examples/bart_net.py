"""A small BART in three files, as exporters write one, that translates: no training, and numpy alone.

Widths and graphs are BART's: embeddings of tokens and positions, layers of attention and GELU with normalization behind
each, a decoder whose attention to itself has a cache. Weights are random but for what makes it a translator: positions
and tokens lie in directions of their own, attention to the encoder looks for its own position, and the output layer is
fitted by ridge regression on what the decoder says. Each word of a sentence becomes the word of another language.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

WIDTH, HEADS, LAYERS, WORDS, LONGEST = 256, 4, 2, 64, 32
PAD, START, END, FIRST = 0, 1, 2, 3
PER_HEAD = WIDTH // HEADS
_MASKED = float(np.finfo(np.float32).min)
_FITTED_ON, _SMALL, _SHARP = 192, 0.2, 12.0

Array = npt.NDArray[Any]
Weights = dict[str, Array]


def dictionary() -> Array:
    """Returns the translation of each word; the end of a sentence stays it."""
    other = np.arange(WORDS)
    other[FIRST:] = np.random.default_rng(5).permutation(np.arange(FIRST, WORDS))
    return other


def sentences(count: int, seed: int) -> list[dict[str, Array]]:
    """Returns sentences of 6 to 30 words and an end, with masks, one a feed."""
    rng = np.random.default_rng(seed)
    found = []
    for length in rng.integers(6, LONGEST - 1, count):
        words = np.append(rng.integers(FIRST, WORDS, length), END)[None].astype(np.int64)
        found.append({"input_ids": words, "attention_mask": np.ones_like(words)})
    return found


def weights() -> Weights:
    """Returns all weights, the output layer of zeros."""
    rng = np.random.default_rng(0)
    turned = np.linalg.qr(rng.normal(size=(WIDTH, WIDTH)))[0]
    places, meanings = turned[:, :LONGEST], turned[:, LONGEST:]
    aside = meanings @ meanings.T  # what layers add leaves the places alone
    find = np.concatenate([places @ np.eye(LONGEST, PER_HEAD) for _ in range(HEADS)], 1)
    found: Weights = {
        "positions": 8 * places.T,
        "words": rng.normal(size=(WORDS, WIDTH - LONGEST)) @ meanings.T,
        "output": np.zeros((WIDTH, WORDS)),
    }
    for side in ("encoder", "decoder"):
        found |= {f"{side}.norm.gain": np.ones(WIDTH), f"{side}.norm.shift": np.zeros(WIDTH)}
        for layer in range(LAYERS):
            kinds = ("self", "cross") if side == "decoder" else ("self",)
            for kind in kinds:
                name, is_cross = f"{side}.{layer}.{kind}", kind == "cross"
                for role in ("query", "key", "value", "out"):
                    matrix = rng.normal(0, WIDTH**-0.5, (WIDTH, WIDTH))
                    if is_cross and role in ("query", "key"):
                        matrix = find * (_SHARP if role == "query" else 1.0)
                    elif role == "out":
                        matrix = (1.0 if is_cross else _SMALL) * matrix @ aside
                    found[f"{name}.{role}"] = matrix
                    found[f"{name}.{role}.bias"] = rng.normal(0, 0.02, WIDTH)
            found[f"{side}.{layer}.wide"] = rng.normal(0, WIDTH**-0.5, (WIDTH, 4 * WIDTH))
            found[f"{side}.{layer}.wide.bias"] = rng.normal(0, 0.02, 4 * WIDTH)
            found[f"{side}.{layer}.narrow"] = rng.normal(0, _SMALL * WIDTH**-0.5, (4 * WIDTH, WIDTH)) @ aside
            found[f"{side}.{layer}.narrow.bias"] = rng.normal(0, 0.02, WIDTH)
            for kind in (*kinds, "wide"):
                found |= {
                    f"{side}.{layer}.{kind}.gain": np.ones(WIDTH),
                    f"{side}.{layer}.{kind}.shift": np.zeros(WIDTH),
                }
    return {name: array.astype(np.float32) for name, array in found.items()}


class _Graph:
    """Writes one of the files.

    Args:
        weights: All weights.
    """

    def __init__(self, held: Weights) -> None:
        self.held = held
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, TensorProto] = {}

    def __call__(self, op: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        out = out or f"{op.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [out], f"{out}/{op}", **attributes))
        return out

    def constant(self, name: str, array: Any = None) -> str:
        values = self.held[name] if array is None else np.asarray(array)
        self.constants[name] = numpy_helper.from_array(values, name)
        return name

    def number(self, value: float) -> str:
        return self.constant(f"number {value:g}", np.float32(value))

    def whole(self, *values: int) -> str:
        return self.constant(f"whole {values}", np.array(values, np.int64))

    def linear(self, x: str, name: str) -> str:
        return self("Add", self("MatMul", x, self.constant(name)), self.constant(f"{name}.bias"))

    def norm(self, x: str, name: str) -> str:
        gain, shift = self.constant(f"{name}.gain"), self.constant(f"{name}.shift")
        return self("LayerNormalization", x, gain, shift, axis=-1)

    def heads(self, x: str, name: str, out: str = "") -> str:
        split = self("Reshape", self.linear(x, name), self.whole(0, -1, HEADS, PER_HEAD))
        return self("Transpose", split, perm=(0, 2, 1, 3), out=out)

    def attention(self, x: str, name: str, keys: str, values: str, mask: str) -> str:
        query = self("Mul", self.heads(x, f"{name}.query"), self.number(PER_HEAD**-0.5))
        scores = self("MatMul", query, self("Transpose", keys, perm=(0, 1, 3, 2)))
        shares = self("Softmax", self("Add", scores, mask) if mask else scores, axis=-1)
        joined = self("Transpose", self("MatMul", shares, values), perm=(0, 2, 1, 3))
        flat = self("Reshape", joined, self.whole(0, -1, WIDTH))
        return self.norm(self("Add", x, self.linear(flat, f"{name}.out")), name)

    def feed_forward(self, x: str, name: str) -> str:
        wide = self.linear(x, f"{name}.wide")
        erf = self("Erf", self("Div", wide, self.number(2**0.5)))
        gelu = self("Mul", self("Mul", wide, self("Add", erf, self.number(1))), self.number(0.5))
        return self.norm(self("Add", x, self.linear(gelu, f"{name}.narrow")), f"{name}.wide")

    def embedded(self, side: str, first: str) -> str:
        """Returns tokens and positions, counted from a number on."""
        words = self("Gather", self.constant("words"), "input_ids")
        length = self("Gather", self("Shape", "input_ids"), self.constant("one", np.int64(1)))
        numbers = self("Range", first, self("Add", first, length), self.constant("one", np.int64(1)))
        places = self("Gather", self.constant("positions"), numbers)
        return self.norm(self("Add", words, places), f"{side}.norm")

    def masked(self, mask: str) -> str:
        """Returns what is added to scores of padding."""
        there = self("Cast", self("Unsqueeze", mask, self.whole(1, 2)), to=TensorProto.FLOAT)
        return self("Mul", self("Sub", self.number(1), there), self.number(_MASKED))

    def causal(self) -> str:
        """Returns what is added to scores of words still to come."""
        length = self("Gather", self("Shape", "input_ids"), self.whole(1))
        square = self("ConstantOfShape", self("Concat", length, length, axis=0), value=helper.make_tensor(
            "masked", TensorProto.FLOAT, [1], [_MASKED]))  # fmt: skip
        return self("Trilu", square, self.constant("one", np.int64(1)), upper=1)

    def model(self, inputs: Mapping[str, Sequence[Any]], outputs: Mapping[str, Sequence[Any]]) -> onnx.ModelProto:
        def value(name: str, shape: Sequence[Any]) -> onnx.ValueInfoProto:
            integer = name.endswith(("_ids", "_mask"))
            return helper.make_tensor_value_info(name, TensorProto.INT64 if integer else TensorProto.FLOAT, shape)

        ends = ([value(name, shape) for name, shape in values.items()] for values in (inputs, outputs))
        graph = helper.make_graph(self.nodes, "bart", *ends, list(self.constants.values()))
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], producer_name="bart_net")
        model.ir_version = 8
        onnx.checker.check_model(model, full_check=True)
        return model


def encoder(held: Weights) -> onnx.ModelProto:
    """Returns the encoder."""
    g = _Graph(held)
    x, mask = g.embedded("encoder", g.constant("zero", np.int64(0))), g.masked("attention_mask")
    for layer in range(LAYERS):
        name = f"encoder.{layer}.self"
        x = g.attention(x, name, g.heads(x, f"{name}.key"), g.heads(x, f"{name}.value"), mask)
        x = g.feed_forward(x, f"encoder.{layer}")
    g("Identity", x, out="last_hidden_state")
    ids = ["batch", "length"]
    return g.model({"input_ids": ids, "attention_mask": ids}, {"last_hidden_state": [*ids, WIDTH]})


def decoder(held: Weights, *, past: bool) -> onnx.ModelProto:
    """Returns the decoder of the first words, or the one with a cache of those before."""
    g = _Graph(held)
    old, new = "past_key_values.{}.{}.{}", "present.{}.{}.{}"
    inputs: dict[str, list[Any]] = {"input_ids": ["batch", "words"], "encoder_attention_mask": ["batch", "length"]}
    outputs: dict[str, list[Any]] = {"logits": ["batch", "words", WORDS]}
    if past:
        shape = g("Shape", old.format(0, "decoder", "key"))
        first = g("Gather", shape, g.constant("two", np.int64(2)))
    else:
        inputs["encoder_hidden_states"] = ["batch", "length", WIDTH]
        first = g.constant("zero", np.int64(0))
    x, mask = g.embedded("decoder", first), g.masked("encoder_attention_mask")
    causal = "" if past else g.causal()
    for layer in range(LAYERS):
        caches = {}
        for kind, side in (("self", "decoder"), ("cross", "encoder")):
            for what in ("key", "value"):
                before, after = old.format(layer, side, what), new.format(layer, side, what)
                size = ["batch", HEADS, "seen" if kind == "self" else "length", PER_HEAD]
                weight = f"decoder.{layer}.{kind}.{what}"
                if past:
                    inputs[before] = size
                if past and kind == "cross":
                    caches[kind, what] = before
                    continue
                source = x if kind == "self" else "encoder_hidden_states"
                own = g.heads(source, weight, out="" if past else after)
                caches[kind, what] = g("Concat", before, own, axis=2, out=after) if past else own
                outputs[after] = ["batch", HEADS, "all" if past and kind == "self" else size[2], PER_HEAD]
            x = g.attention(
                x, f"decoder.{layer}.{kind}", caches[kind, "key"], caches[kind, "value"],
                mask if kind == "cross" else causal,
            )  # fmt: skip
        x = g.feed_forward(x, f"decoder.{layer}")
    g("Identity", x, out="features")
    g("MatMul", "features", g.constant("output"), out="logits")
    return g.model(inputs, outputs)


def fitted(held: Weights) -> Weights:
    """Returns the weights with an output layer that translates, by ridge regression on sentences of one length."""
    length = LONGEST - 2
    ids = np.random.default_rng(1).integers(FIRST, WORDS, (_FITTED_ON, length))
    for row, end in zip(ids, np.random.default_rng(2).integers(6, length, _FITTED_ON), strict=True):
        row[end], row[end + 1 :] = END, PAD
    mask = (ids != PAD).astype(np.int64)
    right = dictionary()[ids]
    said = np.concatenate([np.full((_FITTED_ON, 1), START), right[:, :-1]], 1)
    probe = decoder(held, past=False)
    probe.graph.output.append(helper.make_tensor_value_info("features", TensorProto.FLOAT, None))
    hidden = _run(encoder(held), {"input_ids": ids, "attention_mask": mask}, ["last_hidden_state"])
    features = _run(
        probe, {"input_ids": said, "encoder_hidden_states": hidden, "encoder_attention_mask": mask}, ["features"]
    )
    rows = mask.astype(bool)
    x, y = features[rows].astype(np.float64), 10 * np.eye(WORDS)[right[rows]]
    return {**held, "output": np.linalg.solve(x.T @ x + np.eye(WIDTH), x.T @ y).astype(np.float32)}


def _run(model: onnx.ModelProto, feed: Mapping[str, Array], names: list[str]) -> Any:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(names, dict(feed))[0]


def write(folder: Path) -> dict[str, Path]:
    """Writes the three files; returns their paths by name."""
    held = fitted(weights())
    made = {
        "encoder": encoder(held),
        "decoder": decoder(held, past=False),
        "decoder_with_past": decoder(held, past=True),
    }
    paths = {name: folder / f"{name}.onnx" for name in made}
    for name, model in made.items():
        onnx.save(model, paths[name])
    return paths
