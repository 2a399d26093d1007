"""What is lost, as the report tells it from a few held-out calibration samples, beside what it is on test data.

For each net of the zoo: the measure that its outputs call for, its value and 95 % interval on the calibration samples
that are held out, and the same measure on data that nothing has seen, for kenosis-ort and for stock's best from the
same run. The last column says whether the interval holds the value on test data.

    python benchmarks/measures.py [--nets mlperf_ic_resnet8 ultraface] [--samples 200]
"""

from __future__ import annotations

import argparse
from typing import Any

import onnx
from _zoo import OneShotReader, choose, load_zoo, ort_best, quiet_folder

import kenosis_ort
from kenosis_ort.passes.evaluator import Evaluator
from kenosis_ort.passes.reference import Reference


def main() -> None:
    """Prints one line a net."""
    parser = argparse.ArgumentParser(description="Compare what reports say is lost with what is lost on test data.")
    parser.add_argument("--nets", nargs="*", default=[], help="names of the zoo's entries; all by default")
    parser.add_argument("--samples", type=int, default=200, help="feeds of test data (default: 200)")
    arguments = parser.parse_args()
    zoo = load_zoo()
    print("net                      measure                          held out                test     stock   holds")
    with quiet_folder() as folder:
        for name in choose(zoo, arguments.nets):
            entry = zoo.ENTRIES[name]()
            ours, stock = folder / f"{name}.onnx", folder / f"{name}.stock.onnx"
            reader = OneShotReader(entry.calib)
            told = kenosis_ort.quantize_static(entry.path, str(ours), reader, promise=False).measure
            model = onnx.load(entry.path)
            feeds = [feed for feed, _ in zip(entry.evals, range(arguments.samples), strict=False)]
            evaluator = Evaluator(Reference(model), feeds, graph=model.graph)
            found, other = evaluator.measured(onnx.load(str(ours))), _stock(entry, stock, evaluator)
            if told is None or found is None:
                print(f"{name:24} nothing to measure")
                continue
            short = told.measure.split(" with ")[0].split(" of output")[0]
            ends = "" if told.low is None else f" ({told.low:.3f} to {told.high:.3f})"
            holds = "" if told.low is None else "yes" if told.low <= found.value <= told.high else "NO"
            print(f"{name:24} {short:32} {told.value:.3f}{ends:18} {found.value:7.3f} {other:>9} {holds:>7}")


def _stock(entry: Any, out: Any, evaluator: Evaluator) -> str:
    try:
        ort_best(entry.path, out, entry.calib)
        found = evaluator.measured(onnx.load(str(out)))
    except Exception as error:  # what does not load is a result
        return type(error).__name__[:9]
    return "" if found is None else f"{found.value:.3f}"


if __name__ == "__main__":
    main()
