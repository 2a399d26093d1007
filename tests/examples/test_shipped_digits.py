"""The shipped net and images are what the documentation says they are."""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import onnx
import onnxruntime as ort

from kenosis_ort.demo import load_digits, model_path


def test_shipped_files_are_small():
    sizes = [files("kenosis_ort.demo").joinpath(name) for name in ("digits_cnn.onnx", "digits.npz")]
    assert sum(len(path.read_bytes()) for path in sizes) < 600_000


def test_images_are_as_described():
    digits = load_digits()
    assert digits.calibration.shape == (100, 1, 8, 8)
    assert digits.images.shape == (600, 1, 8, 8)
    assert digits.calibration.dtype == digits.images.dtype == np.float32
    assert (digits.images.min(), digits.images.max()) == (0, 1)
    assert set(digits.labels) == set(range(10))


def test_held_out_images_are_not_among_the_calibration_images():
    digits = load_digits()
    held_out = {image.tobytes() for image in digits.images}
    assert not any(image.tobytes() in held_out for image in digits.calibration)


def test_net_is_trained_and_holds_the_operators_that_matter():
    digits = load_digits()
    with model_path() as path:
        model = onnx.load(path)
        session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    onnx.checker.check_model(model, full_check=True)
    expected = {"Conv", "BatchNormalization", "Relu", "MaxPool", "Add", "Flatten", "Gemm"}
    assert {node.op_type for node in model.graph.node} == expected
    answers = session.run(None, {"image": digits.images})[0].argmax(1)
    assert (answers == digits.labels).mean() >= 0.97
