"""A net quantized by another tool; run by the Python of an environment that holds it.

    PYTHON _peer.py TOOL NET.onnx FEEDS.npz OUT DEFAULT|TRANSFORMER

TOOL is ``nncf`` (``nncf.quantize`` with its defaults, the model type said of a transformer; on ONNX' form of the model
where OUT is ``.onnx``, on OpenVINO's where it is ``.xml``) or ``quark`` (AMD Quark, ``INT8_CNN_DEFAULT`` or
``INT8_TRANSFORMER_DEFAULT``). FEEDS.npz holds arrays named ``SAMPLE/INPUT``. Prints JSON: the versions. It imports
nothing of kenosis-ort, whose requirements that environment need not meet.
"""

from __future__ import annotations

import contextlib
import json
import sys
from importlib.metadata import version
from typing import Any

import numpy as np

PACKAGES = {"nncf": ("nncf", "openvino", "onnx"), "quark": ("amd-quark", "onnxruntime", "onnx")}


def nncf(net: str, feeds: list[dict[str, Any]], out: str, kind: str) -> None:
    """Writes NNCF's file."""
    import nncf
    import onnx
    import openvino

    how = {"subset_size": len(feeds), "model_type": nncf.ModelType.TRANSFORMER if kind == "TRANSFORMER" else None}
    if out.endswith(".xml"):
        model = openvino.Core().read_model(net)
        openvino.save_model(nncf.quantize(model, nncf.Dataset(feeds), **how), out, compress_to_fp16=False)
    else:
        onnx.save(nncf.quantize(onnx.load(net), nncf.Dataset(feeds), **how), out)


def quark(net: str, feeds: list[dict[str, Any]], out: str, kind: str) -> None:
    """Writes Quark's file."""
    from onnxruntime.quantization import CalibrationDataReader
    from quark.onnx import Config, ModelQuantizer
    from quark.onnx.quantization.config import get_default_config

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.feeds = iter(feeds)

        def get_next(self) -> dict[str, Any] | None:
            return next(self.feeds, None)

    name = "INT8_TRANSFORMER_DEFAULT" if kind == "TRANSFORMER" else "INT8_CNN_DEFAULT"
    ModelQuantizer(Config(global_quant_config=get_default_config(name))).quantize_model(net, out, Reader())


def main() -> None:
    """Writes the file."""
    tool, net, feeds_file, out, kind = sys.argv[1:]
    feeds: dict[str, dict[str, Any]] = {}
    with np.load(feeds_file, allow_pickle=False) as arrays:
        for key in arrays:
            sample, _, name = key.partition("/")
            feeds.setdefault(sample, {})[name] = arrays[key]
    with contextlib.redirect_stdout(sys.stderr):
        {"nncf": nncf, "quark": quark}[tool](net, list(feeds.values()), out, kind)
    print(json.dumps({package: version(package) for package in PACKAGES[tool]}))


if __name__ == "__main__":
    main()
