"""Performs a plan on ONNX Runtime's own quantizer; the only place that knows its insides."""
