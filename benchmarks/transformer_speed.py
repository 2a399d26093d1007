"""Transformers at their real widths: how fast and how faithful int8 is, for prompts and for single tokens.

Nets of random weights are exported from their configurations, with feeds of the pipeline they stand in: a decoder's
cache is its own. Columns: time of the float file under all of the runtime's optimizations; then for each tool the speed
over it (above 1 is faster) and the signal over the noise of the worst output on feeds that were not calibrated on.

- ``static``: ``quant_pre_process``, then ``quantize_static`` with uint8 activations and int8 weights by channel;
- ``dynamic``: ``onnxruntime.quantization.quantize_dynamic`` of MatMul and Gemm, int8 weights by channel;
- ``ours``: ``kenosis_ort.quantize_static`` without any option, with the attention layers it made one operator of all.

Speeds are medians over rounds, in each of which every file gets a fresh session of one thread, in random order; times
are those of that thread, so that what else the machine does counts less.

    python benchmarks/transformer_speed.py FOLDER --export     # in an environment with torch and transformers
    python benchmarks/transformer_speed.py FOLDER
    python benchmarks/transformer_speed.py FOLDER --only gpt2 --profile
    python benchmarks/transformer_speed.py FOLDER --outliers   # writes a T5 and a Llama with massive tokens; no torch
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from _node_times import profile
from _session import outputs, session, sqnr_by_output
from _zoo import OneShotReader, ort_best, quiet_folder
from nets.transformer import END, llama_outliers, t5_outliers

from kenosis_ort.bench.harness import Schedule, time_interleaved

CALIBRATION, EVALUATION = 8, 4
CALIBRATION_OF_OUTLIERS = 16
LENGTH, PAST, VOCABULARY = 128, 64, 1000
TOOLS = ("static", "dynamic", "ours")
ATTENTION = ("Attention", "MultiHeadAttention", "GroupQueryAttention")

Feed = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Net:
    """One net to export.

    Attributes:
        module: Takes the inputs in their order and returns plain outputs.
        feeds: Makes the inputs by name, of a number of the sample.
        open: Dimensions that are not fixed, by input.
        attentions: Its attention layers.
    """

    module: Any
    feeds: Callable[[int], dict[str, Any]]
    open: Mapping[str, Mapping[int, str]]
    attentions: int


def nets() -> dict[str, Callable[[], Net]]:
    """Returns what makes each net; needs torch and transformers."""
    import torch
    import transformers as tf

    def ids(seed: int, length: int = LENGTH) -> Any:
        return torch.from_numpy(np.random.default_rng(seed).integers(3, VOCABULARY, (1, length)))

    def noise(seed: int, *shape: int) -> Any:
        return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32))

    def texts(net: Any, layers: int, **fixed: Any) -> Net:
        def feed(seed: int) -> dict[str, Any]:
            return {"input_ids": ids(seed), "attention_mask": torch.ones(1, LENGTH, dtype=torch.int64)}

        names = ("input_ids", "attention_mask")
        return Net(_plain(net, names, **fixed), feed, {n: {0: "batch", 1: "length"} for n in names}, layers)

    def pictures(net: Any, layers: int, name: str, *shape: int) -> Net:
        return Net(_plain(net, (name,)), lambda seed: {name: noise(seed, 1, *shape)}, {name: {0: "batch"}}, layers)

    def decoder(net: Any, layers: int) -> Net:
        """A decoder of one more token, with the cache of the tokens before."""
        net.eval()

        def feed(seed: int) -> dict[str, Any]:
            with torch.no_grad():
                cache = net(input_ids=ids(seed, LENGTH), use_cache=True).past_key_values
            past = {f"past_{i}": x for i, x in enumerate(_flat(cache))}
            return {"input_ids": ids(seed + 999, 1), "attention_mask": torch.ones(1, LENGTH + 1).long(), **past}

        names = ["input_ids", "attention_mask", *(f"past_{i}" for i in range(2 * layers))]
        axes = {name: {0: "batch", 2: "past"} for name in names[2:]}
        return Net(_cached(net, names), feed, {"attention_mask": {0: "batch", 1: "seen"}, **axes}, layers)

    def bart_decoder() -> Net:
        """The document's decoder with past, self-attention's cache and cross-attention's of each layer."""
        net = tf.BartModel(bart).eval()

        def feed(seed: int) -> dict[str, Any]:
            with torch.no_grad():
                seen = net.encoder(ids(seed))[0]
                cache = net.decoder(ids(seed + 99, PAST), encoder_hidden_states=seen, use_cache=True).past_key_values
            both = zip(_flat(cache.self_attention_cache), _flat(cache.cross_attention_cache), strict=True)
            past = {f"past_{i}": x for i, x in enumerate(x for pair in both for x in pair)}
            return {"input_ids": ids(seed + 999, 1), "encoder_hidden_states": seen, **past}

        names = ["input_ids", "encoder_hidden_states", *(f"past_{i}" for i in range(4 * layers))]
        lengths = {name: {0: "batch", 2: "seen" if at % 2 else "past"} for at, name in enumerate(names[2:])}
        axes = {"input_ids": {0: "batch"}, "encoder_hidden_states": {0: "batch", 1: "seen"}, **lengths}
        return Net(_cross_cached(net.decoder), feed, axes, 2 * layers)

    layers = 4
    wide = {"hidden_size": 768, "num_hidden_layers": layers, "num_attention_heads": 12, "intermediate_size": 3072}
    base = {**wide, "vocab_size": VOCABULARY}
    mini = {**base, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
    tiny = {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3, "intermediate_size": 768}
    distil = tf.DistilBertConfig(dim=768, n_layers=layers, n_heads=12, hidden_dim=3072, vocab_size=VOCABULARY)
    sides = ("encoder", "decoder")
    parts = {f"{s}_{w}": n for s in sides for w, n in (("layers", layers), ("ffn_dim", 3072), ("attention_heads", 12))}
    bart = tf.BartConfig(**parts, d_model=768, vocab_size=VOCABULARY)
    small = {f"{s}_{w}": n for s in sides for w, n in (("layers", 4), ("ffn_dim", 1536), ("attention_heads", 6))}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    whisper = tf.WhisperConfig(**small, **ends, d_model=384, vocab_size=VOCABULARY)
    gpt2 = tf.GPT2Config(n_embd=768, n_layer=layers, n_head=12, vocab_size=VOCABULARY)
    grouped = {**base, "intermediate_size": 2048, "num_key_value_heads": 4, "max_position_embeddings": 512}
    llama = tf.LlamaConfig(**grouped)
    t5 = tf.T5Config(d_model=512, d_kv=64, d_ff=2048, num_layers=layers, num_heads=8, vocab_size=VOCABULARY)
    return {
        "bert_mini": lambda: texts(tf.BertModel(tf.BertConfig(**mini)), layers),
        "bert_base": lambda: texts(tf.BertModel(tf.BertConfig(**base)), layers),
        "distilbert": lambda: texts(tf.DistilBertModel(distil), layers),
        "deit_tiny": lambda: pictures(tf.DeiTModel(tf.DeiTConfig(**tiny)), 12, "pixel_values", 3, 224, 224),
        "vit_base": lambda: pictures(tf.ViTModel(tf.ViTConfig(**wide)), layers, "pixel_values", 3, 224, 224),
        "bart_encoder": lambda: texts(tf.BartModel(bart).encoder, layers),
        "bart_decode": bart_decoder,
        "gpt2_decode": lambda: decoder(tf.GPT2Model(gpt2), layers),
        "llama_decode": lambda: decoder(tf.LlamaModel(llama), layers),
        "llama_prefill": lambda: texts(tf.LlamaModel(llama), layers, use_cache=False),
        "whisper_encoder": lambda: pictures(tf.WhisperModel(whisper).encoder, 4, "input_features", 80, 3000),
        "t5_encoder": lambda: texts(tf.T5Model(t5).encoder, layers),
    }


def _flat(cache: Any) -> list[Any]:
    """Returns keys and values of all layers in turn."""
    return [x for layer in cache.layers for x in (layer.keys, layer.values)]


def _plain(net: Any, names: tuple[str, ...], **fixed: Any) -> Any:
    import torch

    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, *values: Any) -> Any:
            return self.net(**dict(zip(names, values, strict=True)), **fixed, return_dict=True)[0]

    return Plain()


def _cached(net: Any, names: list[str]) -> Any:
    import torch
    import transformers

    class Cached(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, *values: Any) -> Any:
            said, past = dict(zip(names[:2], values, strict=False)), values[2:]
            cache = transformers.DynamicCache()
            for i in range(len(past) // 2):
                cache.update(past[2 * i], past[2 * i + 1], i)
            found = self.net(**said, past_key_values=cache, use_cache=True)
            return found[0], *_flat(found.past_key_values)

    return Cached()


def _cross_cached(net: Any) -> Any:
    import torch
    import transformers

    class CrossCached(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, token: Any, seen: Any, *past: Any) -> Any:
            own, cross = transformers.DynamicCache(), transformers.DynamicCache()
            for i in range(len(past) // 4):
                own.update(past[4 * i], past[4 * i + 2], i)
                cross.update(past[4 * i + 1], past[4 * i + 3], i)
            cache = transformers.EncoderDecoderCache(own, cross)
            found = self.net(token, encoder_hidden_states=seen, past_key_values=cache, use_cache=True)
            return found[0], *_flat(found.past_key_values.self_attention_cache)

    return CrossCached()


def export(folder: Path, only: str, *, dynamo: bool) -> None:
    """Writes the nets with their feeds, by torch's old exporter, or by the new one where that fails."""
    import torch

    for name, make in nets().items():
        if only not in name:
            continue
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        for new in (True,) if dynamo else (False, True):
            torch.manual_seed(0)
            net = make()
            first = net.feeds(0)
            shapes: dict[str, Any] = {"dynamic_axes": {k: dict(v) for k, v in net.open.items()}}
            if new:
                auto = torch.export.Dim.AUTO
                shapes = {"dynamic_shapes": (tuple(dict.fromkeys(net.open.get(key, {}), auto) for key in first),)}
            try:
                torch.onnx.export(
                    net.module.eval(), tuple(first.values()), str(place / "float.onnx"), input_names=list(first),
                    opset_version=20 if new else 17, dynamo=new, external_data=False, **shapes,
                )  # fmt: skip
            except Exception as error:  # exporters raise what they like
                print(f"{name}: the exporter fails: {' '.join(str(error).split())[:200]}", file=sys.stderr)
                continue
            for sample in range(CALIBRATION + EVALUATION):
                np.savez(place / f"{sample:02}.npz", **{k: v.numpy() for k, v in net.feeds(sample).items()})
            (place / "attentions").write_text(str(net.attentions))
            print(f"{name}: exported by the {'new' if new else 'old'} exporter", flush=True)
            break


def write_outliers(folder: Path) -> None:
    """Writes the nets with massive tokens, with sentences that end or begin with one."""
    for name, make, at in (("t5_outliers", t5_outliers, -1), ("llama_outliers", llama_outliers, 0)):
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        onnx.save(make(), place / "float.onnx")
        for sample in range(CALIBRATION_OF_OUTLIERS + EVALUATION):
            rng = np.random.default_rng(sample)
            ids = rng.integers(3, 2000, (1, LENGTH if not sample else int(rng.integers(24, LENGTH))))
            ids[0, at] = END
            np.savez(place / f"{sample:02}.npz", input_ids=ids)
        (place / "attentions").write_text("4")


def feeds_of(place: Path) -> list[Feed]:
    """Returns a net's feeds, without inputs that the exporter found unused."""
    known = {value.name for value in onnx.load(place / "float.onnx", load_external_data=False).graph.input}
    found = []
    for path in sorted(place.glob("*.npz")):
        with np.load(path) as data:
            found.append({name: data[name] for name in data.files if name in known})
    return found


def quantized(tool: str, source: Path, folder: Path, feeds: list[Feed]) -> Path:
    """Returns one tool's file."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    import kenosis_ort

    out = folder / f"{tool}.onnx"
    with quiet_folder():
        if tool == "static":
            ort_best(str(source), out, feeds)
        elif tool == "dynamic":
            types = ["MatMul", "Gemm"]
            quantize_dynamic(source, out, op_types_to_quantize=types, per_channel=True, weight_type=QuantType.QInt8)
        else:
            print(f"  {kenosis_ort.quantize_static(str(source), str(out), OneShotReader(feeds)).verdict()}", flush=True)
    return out


def attempt(tool: str, source: Path, folder: Path, feeds: list[Feed]) -> Path | None:
    """Returns one tool's file, None where there is none that loads; says why."""
    try:
        path = quantized(tool, source, folder, feeds)
        outputs(path, feeds[:1])
    except Exception as error:  # a tool that fails is a result
        print(f"  {tool}: {' '.join(str(error).split())[:160]}", file=sys.stderr)
        return None
    return path


def attentions(path: Path) -> int:
    """Returns how many attention layers of a file are one operator."""
    return sum(node.op_type in ATTENTION for node in onnx.load(path, load_external_data=False).graph.node)


def exported(folder: Path, only: str) -> Iterator[Path]:
    """Yields the folders of the nets."""
    yield from (said.parent for said in sorted(folder.glob("*/attentions")) if only in said.parent.name)


def measure(place: Path, folder: Path, args: argparse.Namespace) -> str:
    """Returns a net's line of the table."""
    feeds, source = feeds_of(place), place / "float.onnx"
    fit, test = feeds[:-EVALUATION], feeds[-EVALUATION:]
    want = outputs(source, test)
    files, quality = {"FP32": source}, {}
    for tool in args.tools:
        path = attempt(tool, source, folder, fit)
        if path is not None:
            files[tool], quality[tool] = path, min(sqnr_by_output(want, outputs(path, test)))
    schedule = Schedule(args.rounds, float("inf"), warmup=2, block_s=args.seconds)
    opened = partial(_opened, files)
    taken = time_interleaved(list(files), opened, test[:1], schedule, clock=time.thread_time, must_run="FP32")
    base = taken.round_ms("FP32")
    cells = []
    for tool in args.tools:
        if tool in quality and tool in taken.blocks:
            speed = statistics.median(a / b for a, b in zip(base, taken.round_ms(tool), strict=True))
            cells.append(f"{speed:5.2f}x {quality[tool]:5.1f} dB")
        else:
            cells.append(f"{'-':>15s}")
    fused = attentions(files["ours"]) if "ours" in files else 0
    if args.profile:
        for tool, path in files.items():
            print(f"  {tool}: {kernels(path, test[0])}")
    layers = (place / "attentions").read_text()
    return f"{place.name:16s} {statistics.median(base):8.2f} " + "  ".join(cells) + f"  {fused:2d} of {layers}"


def _opened(files: Mapping[str, Path], name: str) -> Any:
    return session(files[name])


def kernels(path: Path, feed: Feed) -> str:
    """Returns what takes a model's time, operator by operator."""
    taken: Counter[str] = Counter()
    for _, kind, microseconds in profile(str(path), feed, seconds=1):
        taken[kind] += round(microseconds)
    return ", ".join(f"{kind} {us} us" for kind, us in taken.most_common(12))


def main() -> int:
    """Exports, or prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--export", action="store_true", help="write the nets")
    parser.add_argument("--outliers", action="store_true", help="nets with massive tokens, which it writes itself")
    parser.add_argument("--dynamo", action="store_true", help="by torch's new exporter")
    parser.add_argument("--only", default="", metavar="NAME", help="nets of which the name holds this")
    parser.add_argument("--tools", nargs="+", default=TOOLS, choices=TOOLS, metavar="TOOL")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.2, help="length of one block (%(default)s)")
    parser.add_argument("--profile", action="store_true", help="print what takes the time in each file")
    args = parser.parse_args()
    if args.outliers:
        args.folder = args.folder / "outliers"
        write_outliers(args.folder)
    if args.export:
        export(args.folder, args.only, dynamo=args.dynamo)
        return 0
    print(f"{'net':16s} {'FP32, ms':>8s} " + "  ".join(f"{tool:>15s}" for tool in args.tools) + "  attention")
    for place in exported(args.folder.resolve(), args.only):
        with tempfile.TemporaryDirectory(prefix="kenosis-bench-") as folder:
            print(measure(place, Path(folder), args), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
