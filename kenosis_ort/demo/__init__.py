"""A real trained net with real images, and its quantization: ``kenosis-ort demo``.

``digits_cnn.onnx`` is a small residual CNN trained on scikit-learn's handwritten digits (the UCI "Optical
Recognition of Handwritten Digits" test set); ``digits.npz`` holds 100 images of its training split for
calibration and 600 held-out ones. Both are made by ``examples/train_digits.py``.
"""

from kenosis_ort.demo.measurements import Digits, load_digits, model_path

__all__ = ["Digits", "load_digits", "model_path"]
