"""A BART in three files, encoder, decoder and decoder with past: attention fused, then int8, then generation.

    python examples/bart.py
    python examples/bart.py --torch

Each file goes through four forms: as exported, with its attention layers made one operator each, in int8, and in int8
with fused attention, which `quantize_static` does by itself where it pays. Only the encoder can be fed with sentences;
what the decoders read is computed by the pieces before them, so `PipelineReader` runs the three together and hands on
what each one gets. At the end both pipelines translate sentences that nothing was calibrated on, the int8 one with its
own cache, and their words are compared.

The model is made here, see bart_net.py; with ``--torch``, where torch and transformers are installed, transformers'
BART gets the same weights and is exported (bart_torch.py).
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from bart_net import END, LONGEST, START, sentences, write

import kenosis_ort
from kenosis_ort import PipelineReader, quantize_static
from kenosis_ort.rewrite import FLOAT_FORMS, INTEGER_FORMS, fuse_attention

PIECES = ("encoder", "decoder", "decoder_with_past")
Feed = Mapping[str, Any]


class Piece:
    """One file, run by name on one thread."""

    def __init__(self, path: Path) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.outputs = [value.name for value in self.session.get_outputs()]

    def __call__(self, **feed: Any) -> dict[str, Any]:
        return dict(zip(self.outputs, self.session.run(None, feed), strict=True))


def translated(pieces: Mapping[str, Piece], sentence: Feed) -> list[int]:
    """Returns the words that a pipeline writes for a sentence, the likeliest at each step, up to the end."""
    mask = sentence["attention_mask"]
    hidden = pieces["encoder"](**sentence)["last_hidden_state"]
    first = np.full((1, 1), START, np.int64)
    out = pieces["decoder"](input_ids=first, encoder_hidden_states=hidden, encoder_attention_mask=mask)
    cache: dict[str, Any] = {}
    words: list[int] = []
    while True:
        words.append(int(out.pop("logits")[0, -1].argmax()))
        cache.update({name.replace("present", "past_key_values"): value for name, value in out.items()})
        if words[-1] == END or len(words) == LONGEST:
            return words
        token = np.array([words[-1:]], np.int64)
        out = pieces["decoder_with_past"](input_ids=token, encoder_attention_mask=mask, **cache)


def agreement(before: Mapping[str, Piece], after: Mapping[str, Piece], test: Sequence[Feed]) -> tuple[int, int]:
    """Returns at how many steps two pipelines write the same word, and how many steps there are."""
    same = steps = 0
    for sentence in test:
        want, got = translated(before, sentence), translated(after, sentence)
        same += sum(a == b for a, b in zip(want, got, strict=False))
        steps += max(len(want), len(got))
    return same, steps


def forms(name: str, path: Path, pipeline: PipelineReader, recipe: str) -> dict[str, Path]:
    """Writes the four forms of a file; returns their paths."""
    paths = {form: path.with_name(f"{name}.{form.replace(' ', '_')}.onnx") for form in ("fused", "int8", "fused int8")}
    kenosis_ort.fuse(path, paths["fused"])
    unfused = [rule.__name__ for rule in (*FLOAT_FORMS, *INTEGER_FORMS) if rule is not fuse_attention]
    options: dict[str, Any] = {
        "recipe": recipe,
        "promise": False,
    }  # show int8 whatever it gains at this size and on this machine
    quantize_static(path, paths["int8"], pipeline[name], rewrites=unfused, **options)
    quantize_static(paths["fused"], paths["fused int8"], pipeline[name], **options)
    return {"exported": path, **paths}


def show(name: str, paths: Mapping[str, Path], held_out: PipelineReader, seconds: float) -> None:
    """Prints layers, differences, times and sizes of a file's forms."""
    feeds = list(iter(held_out[name].get_next, None))[:8]
    timed = kenosis_ort.bench({form: str(path) for form, path in paths.items()}, feeds, threads=1, budget_s=seconds)
    want = [Piece(paths["exported"])(**feed) for feed in feeds]
    softmax = sum(node.op_type == "Softmax" for node in onnx.load(paths["exported"]).graph.node)
    print(f"\n{name:20s} {'attention':>10s} {'max. difference':>16s} {'ms':>8s} {'speed':>7s} {'kB':>7s}")
    for form, path in paths.items():
        fused = sum(node.op_type == "Attention" for node in onnx.load(path).graph.node)
        got = [Piece(path)(**feed) for feed in feeds]
        far = max(float(np.abs(a[k] - b[k]).max()) for a, b in zip(want, got, strict=True) for k in a)
        time, size = timed.by_name[form], path.stat().st_size / 1000
        print(f"  {form:18s} {fused:5d} of {softmax} {far:16.1e} {time.p50_ms:8.3f} {time.ratio:6.2f}x {size:7.0f}")


def main(argv: Sequence[str] | None = None) -> None:
    """Exports, fuses, quantizes, generates."""
    parser = argparse.ArgumentParser(description="Take a BART in three files to int8.")
    parser.add_argument("--torch", action="store_true", help="export transformers' BART")
    parser.add_argument("--calibrate", type=int, default=12, help="sentences to calibrate on (%(default)s)")
    parser.add_argument("--sentences", type=int, default=50, help="to translate at the end (%(default)s)")
    parser.add_argument("--recipe", default="fast", help="of quantize_static (%(default)s)")
    parser.add_argument("--seconds", type=float, default=4, help="for timing a file (%(default)s)")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's exporter
        if arguments.torch:
            from bart_torch import export

            exported = export(Path(folder))
        else:
            exported = write(Path(folder))
        ends: dict[str, Any] = {"start_token": START, "stop_token": END, "tokens": LONGEST}
        pipeline = PipelineReader(exported, sentences(arguments.calibrate, seed=3), **ends)
        held_out = PipelineReader(exported, sentences(2, seed=4), **ends)
        files = {name: forms(name, exported[name], pipeline, arguments.recipe) for name in PIECES}
        for name in PIECES:
            show(name, files[name], held_out, arguments.seconds)
        test = sentences(arguments.sentences, seed=5)
        before = {name: Piece(files[name]["exported"]) for name in PIECES}
        print()
        for form in ("fused", "fused int8"):
            after = {name: Piece(files[name][form]) for name in PIECES}
            same, steps = agreement(before, after, test)
            print(f"{form}: the float model's word at {same} of {steps} steps, {same / steps:.1%}")


if __name__ == "__main__":
    main()
