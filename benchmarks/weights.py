"""Weights of 4 and 8 bits on a trained language model: perplexity on text it has not seen, size, time of a token.

Ours beside ONNX Runtime's ``matmul_nbits_quantizer``: rounding to nearest, HQQ, its k-quant, and GPTQ. FOLDER is made
by ``benchmarks/trained.py``; HQQ needs torch, what does not run is left out with the reason.

    python benchmarks/weights.py FOLDER [--blocks 32 128] [--only ours] [--no-times]
"""

from __future__ import annotations

import argparse
import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from _session import session
from _timing import interleaved
from _zoo import OneShotReader, quiet_folder

from kenosis_ort import quantize_weights

WINDOW = 256
PAST = 128
Feed = Mapping[str, Any]


class Text:
    """The trained model's text.

    Args:
        folder: Of `benchmarks/trained.py`.
    """

    def __init__(self, folder: Path) -> None:
        self.model = folder / "llama.onnx"
        data = np.load(folder / "text.npz")
        self.train, self.test = data["train"].astype(np.int64), data["test"].astype(np.int64)
        inputs = session(self.model).get_inputs()
        self._past = {i.name: (i.shape[1], i.shape[3]) for i in inputs if i.name.startswith("past")}

    def feed(self, ids: Any, past: int = 0) -> Feed:
        """Returns windows, (rows, pieces), as a feed with a cache of that length."""
        rng = np.random.default_rng(0)
        caches = {n: (len(ids), heads, past, size) for n, (heads, size) in self._past.items()}
        return {"input_ids": ids, **{n: rng.standard_normal(s).astype(np.float32) for n, s in caches.items()}}

    def samples(self, count: int) -> list[Feed]:
        """Returns prompts to calibrate on."""
        at = np.random.default_rng(0).integers(0, len(self.train) - WINDOW, count)
        return [self.feed(self.train[None, a : a + WINDOW]) for a in at]

    def perplexity(self, path: Path, windows: int) -> float:
        """Returns the perplexity on windows of the held-out text."""
        runner, total = session(path, threads=2), 0.0
        at = np.random.default_rng(1).integers(0, len(self.test) - WINDOW - 1, windows)
        for a in at:
            ids = self.test[None, a : a + WINDOW + 1]
            logits = runner.run(["logits"], self.feed(ids[:, :-1]))[0].astype(np.float64)
            logits -= logits.max(-1, keepdims=True)
            logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
            total -= float(np.take_along_axis(logits, ids[:, 1:, None], -1).sum())
        return float(np.exp(total / (windows * WINDOW)))


def of_ort(text: Text, out: Path, make: Callable[[Any], Any]) -> None:
    """Writes what ONNX Runtime's quantizer makes."""
    from onnxruntime.quantization import matmul_nbits_quantizer as nbits

    quantizer = nbits.MatMulNBitsQuantizer(onnx.load(text.model), algo_config=make(nbits))
    quantizer.process()
    made = quantizer.model.model
    for node in made.graph.node:  # as it sets for rounding to nearest when asked, and not for the others
        if node.op_type == "MatMulNBits" and not any(a.name == "accuracy_level" for a in node.attribute):
            node.attribute.append(onnx.helper.make_attribute("accuracy_level", 4))
    onnx.save(made, out)


def ours(text: Text, out: Path, samples: int, **options: Any) -> None:
    """Writes what this package makes."""
    quantize_weights(text.model, out, OneShotReader(text.samples(samples)) if samples else None, **options)


def ways(text: Text, blocks: Sequence[int], samples: int) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Yields the ways to quantize by name."""
    both = ("MatMul", "Gather")
    for block in blocks:
        size: dict[str, Any] = {"block_size": block}
        for name, make in (
            ("nearest", lambda q, s=size: q.DefaultWeightOnlyQuantConfig(accuracy_level=4, **s)),
            (
                "nearest, embedding",
                lambda q, s=size: q.DefaultWeightOnlyQuantConfig(accuracy_level=4, op_types_to_quantize=both, **s),
            ),
            ("HQQ", lambda q, s=size: q.HQQWeightOnlyQuantConfig(**s)),
            (
                "GPTQ",
                lambda q, s=size: q.GPTQWeightOnlyQuantConfig(OneShotReader(text.samples(samples)), **s),
            ),
        ):
            yield f"4 bits, {block}: ORT {name}", partial(of_ort, text, make=make)
        yield f"4 bits, {block}: ours, no samples", partial(ours, text, samples=0, **size)
        yield f"4 bits, {block}: ours", partial(ours, text, samples=samples, **size)
    yield "4 bits, 32: ORT k-quant", partial(of_ort, text, make=lambda q: q.KQuantWeightOnlyQuantConfig())
    yield "8 bits, 128: ours", partial(ours, text, samples=0, bits=8, block_size=128)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--blocks", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--samples", type=int, default=32, help=f"windows of {WINDOW} pieces to calibrate on")
    parser.add_argument("--windows", type=int, default=96, help="to measure perplexity on")
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args(argv)
    text = Text(args.folder)
    plain = text.perplexity(text.model, args.windows)
    print(f"float32: perplexity {plain:.3f}, {text.model.stat().st_size / 1e6:.1f} MB", flush=True)
    with quiet_folder() as folder:
        made = {"float32": text.model}
        for name, way in ways(text, args.blocks, args.samples):
            if args.only not in name:
                continue
            out = folder / f"{len(made)}.onnx"
            try:
                with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
                    warnings.simplefilter("ignore")
                    way(out)
                found = text.perplexity(out, args.windows)
            except Exception as error:
                print(f"{name:38s} does not run: {type(error).__name__}: {str(error)[:90]}", flush=True)
                continue
            made[name] = out
            change = 100 * (found / plain - 1)
            print(f"{name:38s} {found:8.3f} ({change:+6.2f} %)  {out.stat().st_size / 1e6:6.1f} MB", flush=True)
        if not args.no_times:
            one = text.feed(text.test[None, :1], past=PAST)
            print(f"one token behind {PAST}, one thread:")
            for name, timing in interleaved(made, one, baseline="float32", rounds=args.rounds).items():
                print(f"{name:38s} {timing.milliseconds:7.3f} ms  {timing.speed:.2f}x +- {timing.spread:.2f}")


if __name__ == "__main__":
    main()
