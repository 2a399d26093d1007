"""``kenosis-ort demo``: the shipped digits net, quantized by stock and by kenosis-ort."""

from kenosis_ort.demo.__main__ import add_arguments, run

HELP = "quantize the shipped digits net; print accuracy, speed and the fusion proof"
DESCRIPTION = """\
Quantizes a trained CNN for handwritten digits with stock ONNX Runtime and
with kenosis-ort, and prints accuracy on held-out images, speed and the
fusion proof."""

__all__ = ["DESCRIPTION", "HELP", "add_arguments", "run"]
