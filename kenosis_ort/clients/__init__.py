"""Doors for code written against ``onnxruntime.quantization``: its quantizer class, its calibrators, `patch`."""
