"""Quantizes a model that decodes its images and words its answers itself, with onnxruntime-extensions operators.

    python examples/processing_inside.py

The shipped digits net gets a front that decodes a PNG (``DecodeImage``) and scales its pixels, and a back that turns
the class into a word (``VectorToString``): bytes in, text out. Both need the library of onnxruntime-extensions in every
session: ``custom_op_libraries=`` registers it for calibration and the checks; no library is ever loaded unasked. What
is around the net stays as it is, the net in the middle runs in integers. Needs
``pip install 'kenosis-ort[extensions,images]'``.
"""

from __future__ import annotations

import argparse
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import TensorProto, compose, helper, numpy_helper
from onnxruntime_extensions import get_library_path
from PIL import Image

from kenosis_ort import ArrayReader, quantize_static
from kenosis_ort.demo import load_digits, model_path

IMAGES, TEXT = "com.microsoft.extensions", "ai.onnx.contrib"  # the domains of the extensions' operators
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def png(image: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Returns an image (1, 8, 8) from 0 to 1 as the bytes of a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(np.rint(image[0] * 255).astype(np.uint8)).convert("RGB").save(buffer, "PNG")
    return np.frombuffer(buffer.getvalue(), np.uint8)


def constant(name: str, value: npt.ArrayLike) -> TensorProto:
    """Returns a constant of the graph."""
    return numpy_helper.from_array(np.asarray(value), name)


def with_processing(net: onnx.ModelProto) -> onnx.ModelProto:
    """Returns the net with input ``png`` (uint8, the bytes) and outputs ``word`` (string) and ``logits``."""
    front = helper.make_graph(
        [
            helper.make_node("DecodeImage", ["png"], ["pixels"], "decode", domain=IMAGES),  # (8, 8, 3), BGR
            helper.make_node("Slice", ["pixels", "from", "to", "axis"], ["grey"], "grey"),
            helper.make_node("Cast", ["grey"], ["numbers"], "cast", to=TensorProto.FLOAT),
            helper.make_node("Div", ["numbers", "most"], ["scaled"], "scale"),
            helper.make_node("Reshape", ["scaled", "shape"], ["pre_image"], "batch"),
        ],
        "front",
        [helper.make_tensor_value_info("png", TensorProto.UINT8, ["bytes"])],
        [helper.make_tensor_value_info("pre_image", TensorProto.FLOAT, [1, 1, 8, 8])],
        [
            *(constant(name, [number]) for name, number in (("from", 0), ("to", 1), ("axis", 2))),
            constant("most", np.float32(255)),
            constant("shape", [1, 1, 8, 8]),
        ],
    )
    table = "\n".join(f"{word}\t{number}" for number, word in enumerate(WORDS))
    back = helper.make_graph(
        [
            helper.make_node("Identity", ["all"], ["logits"], "keep"),
            helper.make_node("ArgMax", ["all"], ["class"], "class", axis=1, keepdims=0),
            helper.make_node("VectorToString", ["class"], ["word"], "word", domain=TEXT, map=table, unk="?"),
        ],
        "back",
        [helper.make_tensor_value_info("all", TensorProto.FLOAT, ["n", 10])],
        [
            helper.make_tensor_value_info("word", TensorProto.STRING, ["n"]),
            helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 10]),
        ],
    )
    opsets = [*net.opset_import, helper.make_opsetid(IMAGES, 1), helper.make_opsetid(TEXT, 1)]
    before, after = (helper.make_model(g, opset_imports=opsets, ir_version=net.ir_version) for g in (front, back))
    inner = compose.add_prefix(net, "net/")
    joined = compose.merge_models(before, inner, [("pre_image", "net/image")])
    return compose.merge_models(joined, after, [("net/logits", "all")])


def read(model: Path, files: Sequence[npt.NDArray[np.uint8]]) -> list[str]:
    """Returns the word for each image file."""
    options = ort.SessionOptions()
    options.register_custom_ops_library(get_library_path())
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return [session.run(["word"], {"png": file})[0][0] for file in files]


def main(argv: Sequence[str] | None = None) -> None:
    """Builds, quantizes, reads images before and after."""
    argparse.ArgumentParser(description="Quantize a model with onnxruntime-extensions operators.").parse_args(argv)
    digits = load_digits()
    with tempfile.TemporaryDirectory() as folder, model_path() as net:
        float_model, int8_model = Path(folder) / "reader.onnx", Path(folder) / "reader.int8.onnx"
        onnx.save(with_processing(onnx.load(net)), float_model)
        report = quantize_static(
            float_model,
            int8_model,
            ArrayReader([{"png": png(image)} for image in digits.calibration]),
            custom_op_libraries=[get_library_path()],
            promise=False,  # decoding a PNG takes longer than this net, so int8 cannot show in the time
        )
        files = [png(image) for image in digits.images]
        before, after = read(float_model, files), read(int8_model, files)
    truth = [WORDS[label] for label in digits.labels]
    print(report.verdict())
    print(f"accuracy {np.mean(np.equal(before, truth)):.4f} -> {np.mean(np.equal(after, truth)):.4f}")
    print(f"the first ten: {' '.join(after[:10])}")
    print(report.plan.explain("decode"))


if __name__ == "__main__":
    main()
