"""NNCF's file of a net; run by the Python of an environment that holds nncf, openvino and numpy.

    PYTHON _nncf.py NET.onnx FEEDS.npz OUT.xml DEFAULT|TRANSFORMER

FEEDS.npz holds arrays named ``SAMPLE/INPUT``. What NNCF's guide says is done: ``nncf.quantize`` on OpenVINO's form of
the model with its defaults, and its model type said where the net is a transformer. Prints JSON: the versions. It
imports nothing of kenosis-ort.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import nncf
import numpy as np
import openvino


def main() -> None:
    """Writes the file."""
    net, feeds_file, out, kind = sys.argv[1:]
    feeds: dict[str, dict[str, Any]] = {}
    with np.load(feeds_file, allow_pickle=False) as arrays:
        for key in arrays:
            sample, _, name = key.partition("/")
            feeds.setdefault(sample, {})[name] = arrays[key]
    model_type = nncf.ModelType.TRANSFORMER if kind == "TRANSFORMER" else None
    model = openvino.Core().read_model(net)
    made = nncf.quantize(model, nncf.Dataset(list(feeds.values())), subset_size=len(feeds), model_type=model_type)
    openvino.save_model(made, out, compress_to_fp16=False)
    print(json.dumps({"nncf": nncf.__version__, "openvino": openvino.__version__}))


if __name__ == "__main__":
    main()
