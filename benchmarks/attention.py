"""How many attention layers of exported transformers become one operator, and whether the result stays exact.

Exports nets of random weights from their configurations, by the old and the new exporter of torch, with both ways in
which transformers writes attention, and counts the layers that are found; with ``--peers`` also by ONNX Runtime's
``transformers.optimizer`` and onnxscript's ``optimize_for_ort``. The package needs neither torch nor transformers:

    python benchmarks/attention.py FOLDER --export      # in an environment with torch, transformers, onnxscript
    python benchmarks/attention.py FOLDER
    python benchmarks/attention.py FOLDER --peers       # in the first environment again, with the package
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from _session import outputs

LAYERS, WIDTH, HEADS = 2, 64, 4
WAYS = (("legacy", 17), ("dynamo", 18), ("dynamo", 20), ("dynamo", 23))
ATTENTIONS = ("eager", "sdpa")
OPERATORS = {"Attention", "MultiHeadAttention", "GroupQueryAttention"}


class Net:
    """A kind of net.

    Args:
        make: Makes the module once the configuration says how attention is written.
        config: The configuration.
        inputs: Inputs by name.
        layers: Attention layers.
        fixed: Arguments that are not inputs.
        cache: The inputs behind the first two are a cache.
    """

    def __init__(
        self, make: Callable[[Any], Any], config: Any, inputs: Mapping[str, Any], layers: int = LAYERS, **fixed: Any
    ) -> None:
        self.make, self.config, self.inputs, self.layers, self.fixed = make, config, dict(inputs), layers, fixed

    def module(self, attention: str) -> Any:
        """Returns the module, of weights that let attention matter."""
        import torch

        setattr(self.config, "_attn_implementation", attention)  # noqa: B010  (its only door)
        torch.manual_seed(0)
        module = wrapped(self.make(self.config).eval(), list(self.inputs), self.fixed)
        for weights in module.parameters():  # of the default ones attention adds next to nothing
            if weights.ndim > 1:
                weights.data.normal_(0, 2 * weights[0].numel() ** -0.5)
        return module.eval()

    def axes(self) -> dict[str, dict[int, str]]:
        """Returns the open dimensions."""
        if "past_0" in self.inputs:
            return {name: {0: "batch"} for name in self.inputs}
        texts = ("input_ids", "attention_mask")
        return {name: {0: "batch", 1: "length"} if name in texts else {0: "batch"} for name in self.inputs}


def wrapped(net: Any, names: Sequence[str], fixed: Mapping[str, Any]) -> Any:
    """Returns a module of positional inputs and plain outputs; of a decoder with its cache as inputs and outputs."""
    import torch
    import transformers

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, *values: Any) -> Any:
            said = dict(zip(names, values, strict=True))
            past = [said.pop(name) for name in names if name.startswith("past_")]
            if not past:
                return self.net(**said, **fixed, return_dict=True)[0]
            cache = transformers.DynamicCache()
            for i in range(len(past) // 2):
                cache.update(past[2 * i], past[2 * i + 1], i)
            found = self.net(**said, past_key_values=cache, use_cache=True)
            return (found[0], *(x for layer in found.past_key_values.layers for x in (layer.keys, layer.values)))

    return Wrapped()


def nets() -> dict[str, Net]:
    """Returns the nets by name."""
    import torch
    import transformers as tf

    torch.manual_seed(0)
    ids, seen = torch.randint(3, 90, (2, 11)), torch.randn(2, 9, WIDTH)
    mask = torch.ones(2, 11, dtype=torch.int64)
    mask[1, 8:] = 0
    text, picture = {"input_ids": ids, "attention_mask": mask}, {"pixel_values": torch.randn(1, 3, 32, 32)}
    two = {"input_ids": ids, "encoder_hidden_states": seen}
    size = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    small = {**size, "intermediate_size": 2 * WIDTH}
    words, vit = {**small, "vocab_size": 99}, {**small, "image_size": 32, "patch_size": 8}
    grouped = {**words, "num_key_value_heads": 2, "max_position_embeddings": 64}
    parts = {
        f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", LAYERS), ("ffn_dim", WIDTH))
    }
    heads = {"encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "d_model": WIDTH, "vocab_size": 99}
    bart = tf.BartConfig(**parts, **heads)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    whisper = tf.WhisperConfig(**parts, **heads, **special, max_source_positions=20)
    t5 = tf.T5Config(d_model=WIDTH, d_kv=16, d_ff=WIDTH, num_layers=LAYERS, num_heads=HEADS, vocab_size=99)
    gpt2 = tf.GPT2Config(n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, vocab_size=99)
    distil = tf.DistilBertConfig(dim=WIDTH, n_layers=LAYERS, n_heads=HEADS, hidden_dim=WIDTH, vocab_size=99)
    swin = tf.SwinConfig(image_size=32, patch_size=2, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4)
    wave = tf.Wav2Vec2Config(
        **small, conv_dim=(32, 32), conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
    )  # fmt: skip

    def cached(kv_heads: int) -> dict[str, Any]:
        past = {f"past_{i}": torch.randn(2, kv_heads, 7, WIDTH // HEADS) for i in range(2 * LAYERS)}
        seen_before = torch.ones(2, 8, dtype=torch.int64)
        return {"input_ids": ids[:, :1], "attention_mask": seen_before, **past}

    def part(kind: Any, which: str) -> Callable[[Any], Any]:
        return lambda config: getattr(kind(config), which)

    no_cache = {"use_cache": False}
    return {
        "bert": Net(tf.BertModel, tf.BertConfig(**words), text),
        "distilbert": Net(tf.DistilBertModel, distil, text),
        "roberta": Net(tf.RobertaModel, tf.RobertaConfig(**words), text),
        "vit": Net(tf.ViTModel, tf.ViTConfig(**vit), picture),
        "deit": Net(tf.DeiTModel, tf.DeiTConfig(**vit), picture),
        "swin": Net(tf.SwinModel, swin, picture, 4),
        "beit": Net(tf.BeitModel, tf.BeitConfig(**vit, use_relative_position_bias=True), picture),
        "clip_text": Net(tf.CLIPTextModel, tf.CLIPTextConfig(**words, projection_dim=WIDTH), text),
        "clip_image": Net(tf.CLIPVisionModel, tf.CLIPVisionConfig(**vit, projection_dim=WIDTH), picture),
        "gpt2": Net(tf.GPT2Model, gpt2, text, **no_cache),
        "gpt2_past": Net(tf.GPT2Model, gpt2, cached(HEADS)),
        "llama": Net(tf.LlamaModel, tf.LlamaConfig(**grouped), text, **no_cache),
        "llama_past": Net(tf.LlamaModel, tf.LlamaConfig(**grouped), cached(2)),
        "qwen2": Net(tf.Qwen2Model, tf.Qwen2Config(**grouped), text, **no_cache),
        "phi": Net(tf.PhiModel, tf.PhiConfig(**{**grouped, "num_key_value_heads": HEADS}), text, **no_cache),
        "bart_encoder": Net(part(tf.BartModel, "encoder"), bart, text),
        "bart_decoder": Net(part(tf.BartModel, "decoder"), bart, two, 2 * LAYERS, **no_cache),
        "t5_encoder": Net(part(tf.T5Model, "encoder"), t5, text),
        "t5_decoder": Net(part(tf.T5Model, "decoder"), t5, two, 2 * LAYERS, **no_cache),
        "whisper_encoder": Net(part(tf.WhisperModel, "encoder"), whisper, {"input_features": torch.randn(1, 80, 40)}),
        "whisper_decoder": Net(part(tf.WhisperModel, "decoder"), whisper, two, 2 * LAYERS, **no_cache),
        "wav2vec2": Net(tf.Wav2Vec2Model, wave, {"input_values": torch.randn(1, 400)}),
    }


def export(folder: Path, only: str) -> None:
    """Writes the nets that export, with an input each; says why the others do not."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    for name, net in nets().items():
        for attention in ATTENTIONS if only in name else ():
            for way, opset in WAYS:
                path, axes = folder / f"{name}-{way}{opset}-{attention}.onnx", net.axes()
                shapes: dict[str, Any] = {"dynamic_axes": axes}
                if way == "dynamo":
                    opened = tuple(dict.fromkeys(axes[key], torch.export.Dim.AUTO) for key in net.inputs)
                    shapes = {"dynamic_shapes": (opened,)}
                try:
                    torch.onnx.export(
                        net.module(attention), tuple(net.inputs.values()), str(path), input_names=list(net.inputs),
                        opset_version=opset, dynamo=way == "dynamo", **shapes,
                    )  # fmt: skip
                except Exception as error:  # exporters raise what they like
                    path.unlink(missing_ok=True)
                    print(f"{path.stem}: the exporter fails: {' '.join(str(error).split())[:120]}", file=sys.stderr)
                    continue
                np.savez(path.with_suffix(".npz"), **{key: value.numpy() for key, value in net.inputs.items()})
                path.with_suffix(".json").write_text(json.dumps({"layers": net.layers}))


def exported(folder: Path, only: str) -> Iterator[tuple[str, Path, dict[str, Any], int]]:
    """Yields name, file, feed and number of attention layers."""
    for said in sorted(path for path in folder.glob("*.json") if only in path.stem):
        with np.load(said.with_suffix(".npz")) as data:
            feed = {name: data[name] for name in data.files}
        yield said.stem, said.with_suffix(".onnx"), feed, json.loads(said.read_text())["layers"]


def ours(path: Path) -> onnx.ModelProto:
    """Returns what `kenosis_ort.fuse` makes of a file."""
    import kenosis_ort

    return kenosis_ort.fuse(path).model


def runtimes(path: Path) -> onnx.ModelProto:
    """Returns what ONNX Runtime's optimizer makes of a file, with the kind of model that fits best."""
    from onnxruntime.transformers import optimizer

    kinds = {"bart": "bart", "whisper": "bart", "gpt2": "gpt2", "t5": "t5", "vit": "vit", "deit": "vit", "swin": "swin"}
    kind = next((kind for name, kind in kinds.items() if path.stem.startswith(name)), "bert")
    model: onnx.ModelProto = optimizer.optimize_model(str(path), model_type=kind, opt_level=0).model
    return model


def onnxscripts(path: Path) -> onnx.ModelProto:
    """Returns what onnxscript's optimizer for the runtime makes of a file."""
    import onnx_ir
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    model: onnx.ModelProto = onnx_ir.to_proto(optimize_for_ort(onnx_ir.from_proto(onnx.load(path)))[0])
    return model


def refused(path: Path, feed: Mapping[str, Any]) -> str | None:
    """Returns why the runtime does not run a file as it was exported, None where it does."""
    try:
        outputs(path, [feed])
    except Exception as error:  # the runtime raises several unrelated classes
        return " ".join(str(error).split())[-160:]
    return None


def tried(fuse: Callable[[Path], onnx.ModelProto], path: Path, feed: Mapping[str, Any]) -> tuple[int, str]:
    """Returns how many layers are one operator in a model that runs, and how far its outputs are off."""
    try:
        model = fuse(path)
        pairs = list(zip(outputs(path, [feed])[0], outputs(model, [feed])[0], strict=True))
    except Exception as error:  # each tool raises what it likes
        return 0, f"fails: {' '.join(str(error).split())[:80]}"
    worst = max(float(np.abs(a - b).max() / max(np.abs(a).max(), 1e-9)) for a, b in pairs)
    return sum(node.op_type in OPERATORS for node in model.graph.node), f"{worst:.0e}"


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--export", action="store_true", help="write the nets")
    parser.add_argument("--peers", action="store_true", help="count those of other tools too")
    parser.add_argument("--only", default="", metavar="NAME", help="nets of which the name holds this")
    arguments = parser.parse_args()
    if arguments.export:
        export(arguments.folder, arguments.only)
        return 0
    tools = {"ours": ours, **({"onnxruntime": runtimes, "onnxscript": onnxscripts} if arguments.peers else {})}
    found, layers = Counter[str](), 0
    for name, path, feed, count in exported(arguments.folder, arguments.only):
        if (why := refused(path, feed)) is not None:
            print(f"{name:32} the runtime does not run the exported file: {why}", flush=True)
            continue
        layers += count
        said = []
        for tool, fuse in tools.items():
            fused, error = tried(fuse, path, feed)
            found[tool] += min(fused, count)
            said.append(f"{tool} {fused} ({error})")
        print(f"{name:32} {count} layers: {', '.join(said)}", flush=True)
    print(f"{layers} attention layers: " + ", ".join(f"{tool} {found[tool]}" for tool in tools))
    return 0


if __name__ == "__main__":
    sys.exit(main())
