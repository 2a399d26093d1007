"""Static INT8 on trained transformers, by their own measure: perplexity of a Llama, accuracy of a BERT that classifies.

Ours beside stock's default and best options, on text that none was calibrated on; SQNR of the logits and speed against
float from interleaved runs. FOLDER is made by ``benchmarks/trained.py``.

    python benchmarks/text_tasks.py FOLDER [--recipe fast accurate] [--threads 1]
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from _session import outputs, session, sqnr_by_output
from _timing import interleaved
from _zoo import OneShotReader, quiet_folder
from onnxruntime.quantization import QuantType, quantize_static as stock_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from weights import Text

from kenosis_ort import quantize_static

Feed = Mapping[str, Any]


def stock(model: Path, out: Path, feeds: Sequence[Feed], *, best: bool) -> None:
    """Writes stock's file: as it is called without options, or preprocessed, uint8 and per channel."""
    prepared = out.with_suffix(".prepared.onnx")
    quant_pre_process(str(model), str(prepared))
    types: dict[str, Any] = {"per_channel": True, "activation_type": QuantType.QUInt8} if best else {}
    stock_static(str(prepared), str(out), OneShotReader(feeds), **types)


def accuracy(path: Path, samples: Any, labels: Any) -> float:
    """Returns the share of samples whose class is right, in percent."""
    runner = session(path, threads=2)
    found = [runner.run(None, {"input_ids": samples[i : i + 64]})[0].argmax(-1) for i in range(0, len(samples), 64)]
    return 100.0 * float((np.concatenate(found) == labels).mean())


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table for each net."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipe", nargs="+", default=["fast"])
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--windows", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(argv)
    text = Text(args.folder)
    data = np.load(args.folder / "text.npz")
    samples, labels = (data[f"test_{name}"].astype(np.int64) for name in ("samples", "labels"))
    known = data["samples"].astype(np.int64)
    chosen = np.random.default_rng(0).choice(len(known), args.samples, replace=False)
    snippets = [{"input_ids": known[i : i + 1]} for i in chosen]
    unseen = [text.feed(text.test[None, 1000 * i : 1000 * i + 128]) for i in range(8)]
    nets: dict[str, tuple[Sequence[Feed], Sequence[Feed], Callable[[Path], float], str]] = {
        "llama.onnx": (
            text.samples(args.samples),
            unseen,
            partial(text.perplexity, windows=args.windows),
            "perplexity",
        ),
        "bert.onnx": (
            snippets,
            [{"input_ids": samples[i : i + 1]} for i in range(16)],
            partial(accuracy, samples=samples, labels=labels),
            "% right",
        ),
    }
    for net, (feeds, held_out, measure, unit) in nets.items():
        model = args.folder / net
        print(f"{net}: float32 {measure(model):.3f} {unit}", flush=True)
        makers: dict[str, Callable[[Path], Any]] = {
            "stock, default": partial(stock, model, feeds=feeds, best=False),
            "stock, best": partial(stock, model, feeds=feeds, best=True),
        }
        for recipe in args.recipe:
            makers[f"ours, {recipe}"] = lambda out, r=recipe, m=model, f=feeds: quantize_static(
                m, out, OneShotReader(f), recipe=r, promise=False, evidence="none"
            )
        with quiet_folder() as folder:
            made = {"float32": model}
            for name, make in makers.items():
                out = folder / f"{len(made)}.onnx"
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        make(out)
                    found = measure(out)
                except Exception as error:
                    print(f"  {name:16s} does not run: {type(error).__name__}: {str(error)[:90]}", flush=True)
                    continue
                made[name] = out
                decibels = sqnr_by_output(outputs(model, held_out), outputs(out, held_out))[0]
                print(f"  {name:16s} {found:8.3f} {unit}, {decibels:5.1f} dB", flush=True)
            times = interleaved(made, held_out[0], baseline="float32", rounds=args.rounds, threads=args.threads)
            print("  " + ", ".join(f"{name} {t.milliseconds:.2f} ms {t.speed:.2f}x" for name, t in times.items()))


if __name__ == "__main__":
    main()
