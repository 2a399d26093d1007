"""Trains a small Llama and a small text classifier on Python's own library and exports them, for other benchmarks.

    python benchmarks/trained.py FOLDER                            # on two cores
    python benchmarks/trained.py FOLDER --steps 6000 --rows 64     # 4 minutes on a GPU

Needs torch, transformers and tokenizers; the benchmarks that read FOLDER need none of them. What is there stays:
training on one machine and exporting on another is ``--train-only`` and then the same command without. FOLDER holds:

- ``llama.onnx``: a language model of pieces of words, RMSNorm, rotary embeddings, grouped queries, SwiGLU, one table
  for embedding and head; inputs ``input_ids`` and a cache ``past_0`` to ``past_N``, which may be empty.
- ``bert.onnx``: an encoder with normalizations behind its residuals that tells which package 64 pieces are from.
- ``text.npz``: numbers of the pieces, ``train`` and ``test``, of other files each; ``samples``, ``labels`` and
  ``test_samples``, ``test_labels`` of the classifier, of other passages each.
"""

from __future__ import annotations

import argparse
import hashlib
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

PIECES = 2048
WINDOW = 128
SNIPPET = 64
PASSAGE = 4096  # characters of a passage, which is of the classifier's training or test data as a whole
PACKAGES = (
    "asyncio",
    "distutils",
    "email",
    "idlelib",
    "importlib",
    "lib2to3",
    "multiprocessing",
    "tkinter",
    "unittest",
)


def write_text(folder: Path) -> None:
    """Cuts the library into pieces and writes them as numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(f for f in root.rglob("*.py") if "site-packages" not in f.parts)
    texts = {f: f.read_text(encoding="utf-8", errors="ignore") for f in files}
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=PIECES, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts.values(), trainer)

    def numbers(text: str) -> list[int]:
        return list(tokenizer.encode(text).ids)

    parts: dict[str, list[int]] = {"train": [], "test": []}
    for file, text in texts.items():
        digest = hashlib.sha256(str(file.relative_to(root)).encode()).digest()
        parts["test" if digest[0] < 26 else "train"] += numbers(text)
    sorted_out: dict[str, list[Any]] = {name: [] for name in ("samples", "labels", "test_samples", "test_labels")}
    for label, package in enumerate(PACKAGES):
        whole = "\n".join(text for file, text in texts.items() if file.is_relative_to(root / package))
        for number, begin in enumerate(range(0, len(whole), PASSAGE)):
            ids, prefix = numbers(whole[begin : begin + PASSAGE]), "test_" if number % 4 == 0 else ""
            for at in range(0, len(ids) - SNIPPET + 1, SNIPPET):
                sorted_out[f"{prefix}samples"].append(ids[at : at + SNIPPET])
                sorted_out[f"{prefix}labels"].append(label)
    np.savez_compressed(folder / "text.npz", **{n: np.asarray(v, np.int16) for n, v in (parts | sorted_out).items()})


def llama(width: int) -> Any:
    """Returns the language model, not trained."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=PIECES,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=4,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config)


def bert(width: int) -> Any:
    """Returns the classifier, not trained."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=PIECES,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=4,
        num_attention_heads=width // 64,
        max_position_embeddings=SNIPPET,
        num_labels=len(PACKAGES),
        attn_implementation="eager",
    )
    return BertForSequenceClassification(config)


def train(module: Any, batch: Callable[[np.random.Generator], dict[str, Any]], steps: int, rate: float) -> None:
    """Trains in place: AdamW, warm-up and cosine decay."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    module.to(device).train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    warm = max(steps // 20, 1)
    decay = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / warm, 0.5 + 0.5 * float(np.cos(np.pi * s / steps)))
    )
    rng, start = np.random.default_rng(0), time.perf_counter()
    for step in range(steps):
        fed = {name: torch.from_numpy(value).to(device) for name, value in batch(rng).items()}
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            loss = module(**fed).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        decay.step()
        if step % max(steps // 20, 1) == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}, {time.perf_counter() - start:.0f} s", flush=True)
    module.to("cpu").eval()


def train_llama(folder: Path, width: int, steps: int, rows: int) -> None:
    """Trains the language model and writes its weights."""
    import torch

    torch.manual_seed(0)
    text = np.load(folder / "text.npz")["train"].astype(np.int64)

    def batch(rng: np.random.Generator) -> dict[str, Any]:
        at = rng.integers(0, len(text) - 2 * WINDOW, rows)
        ids = np.stack([text[a : a + 2 * WINDOW] for a in at])
        return {"input_ids": ids, "labels": ids}

    module = llama(width)
    train(module, batch, steps, 2e-3 * (256 / width) ** 0.5)
    save(module, width, folder / "llama")


def train_bert(folder: Path, width: int, steps: int, rows: int) -> None:
    """Trains the classifier and writes its weights."""
    import torch

    torch.manual_seed(0)
    data = np.load(folder / "text.npz")
    samples, labels = data["samples"].astype(np.int64), data["labels"].astype(np.int64)

    def batch(rng: np.random.Generator) -> dict[str, Any]:
        at = rng.integers(0, len(samples), rows)
        return {"input_ids": samples[at], "labels": labels[at]}

    module = bert(width)
    train(module, batch, steps, 4e-4)
    save(module, width, folder / "bert")


def save(module: Any, width: int, folder: Path) -> None:
    """Writes weights in half precision, a file for each third of them."""
    folder.mkdir(exist_ok=True)
    state = [(name, p.detach().numpy().astype(np.float16)) for name, p in module.named_parameters()]
    cut = -(-len(state) // 3)
    for part in range(3):
        np.savez(folder / f"weights_{width}_{part}.npz", **dict(state[part * cut : (part + 1) * cut]))


def load(make: Callable[[int], Any], folder: Path) -> Any:
    """Returns a module with the weights that `save` wrote."""
    import torch

    files = sorted(folder.glob("weights_*_*.npz"))
    module = make(int(files[0].stem.split("_")[1]))
    state = {n: torch.from_numpy(v.astype(np.float32)) for file in files for n, v in np.load(file).items()}
    module.load_state_dict(state, strict=False)
    return module.eval()


def export_llama(folder: Path) -> None:
    """Exports the language model with its cache."""
    import torch
    from transformers import DynamicCache

    net = load(llama, folder / "llama")
    config = net.config
    layers, heads = config.num_hidden_layers, config.num_key_value_heads

    class Cached(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, ids: Any, *past: Any) -> Any:
            cache = DynamicCache()
            for i in range(layers):
                cache.update(past[2 * i], past[2 * i + 1], i)
            begin, length = past[0].shape[2], ids.shape[1]
            place = torch.arange(begin, begin + length)
            seen = torch.arange(begin + length)[None, :] <= place[:, None]
            mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
            found = self.net(
                ids, attention_mask=mask, position_ids=place[None], cache_position=place, past_key_values=cache
            )
            return (found.logits, *(x for layer in found.past_key_values.layers for x in (layer.keys, layer.values)))

    past = [f"past_{i}" for i in range(2 * layers)]
    now = [f"present_{i}" for i in range(2 * layers)]
    shape = (1, heads, 5, config.hidden_size // config.num_attention_heads)
    torch.onnx.export(
        Cached(),
        (torch.zeros(1, 7, dtype=torch.int64), *(torch.randn(shape) for _ in past)),
        str(folder / "llama.onnx"),
        input_names=["input_ids", *past],
        output_names=["logits", *now],
        dynamic_axes={"input_ids": {0: "batch", 1: "length"}, **{p: {0: "batch", 2: "past"} for p in past}},
        opset_version=17,
        dynamo=False,
    )


def export_bert(folder: Path) -> None:
    """Exports the classifier."""
    import torch

    net = load(bert, folder / "bert")

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, ids: Any) -> Any:
            return self.net(input_ids=ids, attention_mask=torch.ones_like(ids)).logits

    torch.onnx.export(
        Logits(),
        (torch.zeros(2, SNIPPET, dtype=torch.int64),),
        str(folder / "bert.onnx"),
        input_names=["input_ids"],
        output_names=["logits"],
        dynamic_axes={"input_ids": {0: "batch"}},
        opset_version=17,
        dynamo=False,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Does what is not done yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--width", type=int, default=256, help="of the language model; a multiple of 128")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rows", type=int, default=16, help="windows a step")
    parser.add_argument("--train-only", action="store_true")
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    if not (args.folder / "text.npz").is_file():
        write_text(args.folder)
    if not (args.folder / "llama").is_dir():
        train_llama(args.folder, args.width, args.steps, args.rows)
    if not (args.folder / "bert").is_dir():
        train_bert(args.folder, 128, args.steps, 2 * args.rows)
    for name, export in (("llama.onnx", export_llama), ("bert.onnx", export_bert)):
        if not args.train_only and not (args.folder / name).is_file():
            export(args.folder)


if __name__ == "__main__":
    main()
