"""Transformers' BART with the weights of bart_net.py, exported in three files.

Needs torch, onnx and transformers. Names of inputs and outputs are those that Optimum gives them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from bart_net import END, FIRST, HEADS, LAYERS, LONGEST, PAD, START, WIDTH, WORDS, fitted, weights
from transformers import BartConfig, BartForConditionalGeneration, DynamicCache, EncoderDecoderCache


def loaded() -> Any:
    """Returns the net with the weights of bart_net.py."""
    sides = {f"{s}_{w}": n for s in ("encoder", "decoder") for w, n in (
        ("layers", LAYERS), ("attention_heads", HEADS), ("ffn_dim", 4 * WIDTH))}  # fmt: skip
    net = BartForConditionalGeneration(
        BartConfig(
            **sides, vocab_size=WORDS, d_model=WIDTH, max_position_embeddings=LONGEST, pad_token_id=PAD,
            bos_token_id=START, eos_token_id=END, decoder_start_token_id=START, tie_word_embeddings=False,
        )
    )  # fmt: skip
    held = {name: torch.from_numpy(array) for name, array in fitted(weights()).items()}
    words, places = held["words"], torch.cat([torch.zeros(2, WIDTH), held["positions"]])  # BART counts from 2 on
    state = {
        "model.shared.weight": words,
        "lm_head.weight": held["output"].T,
        "final_logits_bias": torch.zeros(1, WORDS),
    }
    for side in ("encoder", "decoder"):
        at = f"model.{side}"
        state |= {f"{at}.embed_tokens.weight": words, f"{at}.embed_positions.weight": places}
        state |= _norm(f"{at}.layernorm_embedding", held, f"{side}.norm")
        for layer in range(LAYERS):
            ours, theirs = f"{side}.{layer}", f"{at}.layers.{layer}"
            for kind, name in (("self", "self_attn"), ("cross", "encoder_attn"))[: 2 if side == "decoder" else 1]:
                for role, part in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "out")):
                    state |= _linear(f"{theirs}.{name}.{part}_proj", held, f"{ours}.{kind}.{role}")
                state |= _norm(f"{theirs}.{name}_layer_norm", held, f"{ours}.{kind}")
            state |= _linear(f"{theirs}.fc1", held, f"{ours}.wide") | _linear(f"{theirs}.fc2", held, f"{ours}.narrow")
            state |= _norm(f"{theirs}.final_layer_norm", held, f"{ours}.wide")
    net.load_state_dict(state)
    return net.eval()


def _linear(name: str, held: Any, ours: str) -> dict[str, Any]:
    return {f"{name}.weight": held[ours].T, f"{name}.bias": held[f"{ours}.bias"]}


def _norm(name: str, held: Any, ours: str) -> dict[str, Any]:
    return {f"{name}.weight": held[f"{ours}.gain"], f"{name}.bias": held[f"{ours}.shift"]}


class Encoder(torch.nn.Module):
    """The first file."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net.model.encoder

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        return self.net(input_ids, attention_mask).last_hidden_state


class Decoder(torch.nn.Module):
    """The other two; with a cache as further inputs, keys and values of a layer for itself, then for the encoder."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net.model.decoder
        self.head = net.lm_head

    def forward(self, input_ids: Any, mask: Any, *rest: Any) -> Any:
        cache, hidden = None, rest[0] if len(rest) == 1 else None
        if hidden is None:
            own, cross = DynamicCache(), DynamicCache()
            for layer in range(LAYERS):
                own.update(rest[4 * layer], rest[4 * layer + 1], layer)
                cross.update(rest[4 * layer + 2], rest[4 * layer + 3], layer)
            cache = EncoderDecoderCache(own, cross)
            hidden = torch.zeros(1, mask.shape[1], WIDTH)  # not read: its keys and values are in the cache
        out = self.net(
            input_ids, encoder_hidden_states=hidden, encoder_attention_mask=mask, past_key_values=cache, use_cache=True
        )
        parts = [out.past_key_values.self_attention_cache]
        parts += [out.past_key_values.cross_attention_cache] if cache is None else []
        made = [x for i in range(LAYERS) for part in parts for x in (part.layers[i].keys, part.layers[i].values)]
        return self.head(out.last_hidden_state), *made


def export(folder: Path) -> dict[str, Path]:
    """Writes the three files; returns their paths by name."""
    net = loaded()
    ids = torch.randint(FIRST, WORDS, (1, 9))
    mask, token = torch.ones_like(ids), torch.full((1, 1), START)
    with torch.no_grad():
        hidden = Encoder(net)(ids, mask)
        cache = Decoder(net)(token, mask, hidden)[1:]
    names = [
        f"{i}.{side}.{what}" for i in range(LAYERS) for side in ("decoder", "encoder") for what in ("key", "value")
    ]
    own = [name for name in names if "decoder" in name]
    past, present = ([f"{word}.{n}" for n in names] for word in ("past_key_values", "present"))
    sizes = {"input_ids": {0: "batch", 1: "words"}, "attention_mask": {0: "batch", 1: "length"},
             "encoder_attention_mask": {0: "batch", 1: "length"}}  # fmt: skip
    sizes["encoder_hidden_states"] = sizes["attention_mask"]
    sizes |= {name: {0: "batch", 2: "seen" if "decoder" in name else "length"} for name in past}
    first = {**sizes, "input_ids": {0: "batch", 1: "length"}}

    def write(name: str, module: Any, values: Sequence[Any], inputs: list[str], outputs: list[str], axes: Any) -> Path:
        path = folder / f"{name}.onnx"
        torch.onnx.export(
            module, tuple(values), str(path), input_names=inputs, output_names=outputs, opset_version=17, dynamo=False,
            dynamic_axes={key: axes[key] for key in inputs},
        )  # fmt: skip
        return path

    masks = ["input_ids", "encoder_attention_mask"]
    return {
        "encoder": write(
            "encoder", Encoder(net), [ids, mask], ["input_ids", "attention_mask"], ["last_hidden_state"], first
        ),
        "decoder": write(
            "decoder", Decoder(net), [token, mask, hidden], [*masks, "encoder_hidden_states"],
            ["logits", *present], sizes,
        ),
        "decoder_with_past": write(
            "decoder_with_past", Decoder(net), [token, mask, *cache], [*masks, *past],
            ["logits", *(f"present.{name}" for name in own)], sizes,
        ),
    }  # fmt: skip
