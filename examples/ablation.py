"""The paper's ablation: the stages of the pipeline switched off one by one, everything else held constant.

    python examples/ablation.py                                          # the shipped digits net
    python examples/ablation.py --net hard                               # a net on which each stage matters
    python examples/ablation.py --model net.onnx --data samples.npz      # yours; the last quarter is for measuring

Data types, calibration data and range method are the same in all rows, and the accuracy passes are off
(``recipe="plain"``), so that a row differs from "all stages" in nothing but the stage it names. For each: SQNR of the
first output against float, agreement of its argmax (and top-1 for the digits), how many Conv, Gemm and MatMul nodes run
on integer kernels, and speed relative to float on one thread.

Reference: Coomler 2026, "Fusion-Aware QDQ Placement", section on the controlled ablation.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path

import hard_net
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnxruntime.quantization import CalibrationDataReader, QuantType

from kenosis_ort import ArrayReader, KenosisWarning, Stages, SyntheticReader, bench, quantize_static, verify_fusion
from kenosis_ort.demo import load_digits, model_path

Feed = Mapping[str, npt.NDArray[np.generic]]
HEAVY = ("Conv", "Gemm", "MatMul")


def cases() -> dict[str, Stages]:
    """Returns the stages of each row by its name."""
    every = Stages()
    single = {f"without {f.name}": replace(every, **{f.name: False}) for f in fields(Stages)}
    return {"all stages": every, **single, "none (stock)": Stages.none()}


def quantize(model: Path, output: Path, reader: CalibrationDataReader, stages: Stages) -> str:
    """Writes one row's model; returns how many of the heavy nodes run on integer kernels."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KenosisWarning)  # a stage that is off is bound to be warned about
        quantize_static(
            model,
            output,
            reader,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            per_channel=True,
            stages=stages,
            recipe="plain",
            rewrites=False,
            promise=False,  # slow rows are the point
        )
    heavy = [kernel for kernel in verify_fusion(output).kernels if kernel.op_type in HEAVY]
    return f"{sum(kernel.integer for kernel in heavy)}/{len(heavy)}"


def run(model: Path, feeds: Sequence[Feed]) -> npt.NDArray[np.float64]:
    """Returns the first output for all feeds."""
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    name = session.get_outputs()[0].name
    return np.concatenate([session.run([name], dict(feed))[0] for feed in feeds]).astype(np.float64)


def main(argv: Sequence[str] | None = None) -> None:
    """Quantizes once a row, prints the table."""
    parser = argparse.ArgumentParser(description="Switch the stages of the pipeline off one by one.")
    parser.add_argument("--net", choices=("digits", "hard"), default="digits", help="which net, without --model")
    parser.add_argument("--model", type=Path, help="float model; the shipped digits net if not given")
    parser.add_argument("--data", type=Path, help=".npz of arrays by input name, first axis samples")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of timing")
    arguments = parser.parse_args(argv)
    if (arguments.model is None) != (arguments.data is None):
        parser.error("give --model and --data, or neither")
    logging.getLogger().setLevel(logging.ERROR)  # stock's advice would stand between the lines of the table

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        labels, pixels = None, None
        calibration: Sequence[Feed]
        test: Sequence[Feed]
        if arguments.model is None and arguments.net == "hard":
            model, calibration, test = folder / "hard.onnx", hard_net.feeds(48), hard_net.feeds(64, seed=1)
            onnx.save(hard_net.build(), model)
            pixels = (0.0, 255.0)  # who has no data knows that much
        elif arguments.model is None:
            model, digits = stack.enter_context(model_path()), load_digits()
            calibration = [{"image": image[None]} for image in digits.calibration]
            test = [{"image": digits.images}]
            labels = digits.labels
        else:
            model, data = arguments.model, ArrayReader(arguments.data)
            feeds = [data.feed(i) for i in range(len(data))]
            split = len(feeds) * 3 // 4
            calibration, test = feeds[:split], feeds[split:]
        models = {"float32": model}
        integer = {"float32": "-"}
        for i, (name, stages) in enumerate(cases().items()):
            models[name] = folder / f"row{i}.onnx"
            integer[name] = quantize(model, models[name], ArrayReader(calibration), stages)
        name = "made-up data"  # stage 1, self-calibration, in the place of real data
        models[name] = folder / "made_up.onnx"
        made_up = SyntheticReader(model, samples=len(calibration), input_range=pixels)
        integer[name] = quantize(model, models[name], made_up, Stages())

        timed = bench(models, calibration[:8], rounds=arguments.rounds, baseline="float32").by_name
        reference = run(model, test)
        print(f"{'':24s} {'SQNR':>8s}  agreement  {'top-1':>6s}  integer  speed")
        for name, path in models.items():
            found = run(path, test)
            noise = np.square(found - reference).sum()
            sqnr = 10 * np.log10(np.square(reference).sum() / noise) if noise else np.inf
            agree = (found.argmax(1) == reference.argmax(1)).mean()
            top1 = "-" if labels is None else f"{(found.argmax(1) == labels).mean():.4f}"
            speed = timed[name].ratio if name in timed else np.nan
            print(f"{name:24s} {sqnr:5.1f} dB  {agree:9.4f}  {top1:>6s}  {integer[name]:>7s}  {speed:.2f}x")


if __name__ == "__main__":
    main()
