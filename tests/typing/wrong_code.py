"""Calls that a type checker must refuse: each line marked with the code of the error, and an unused mark is one too."""

from kenosis_ort import ArrayReader, Stages, quantize_static

READER = ArrayReader("data.npz")

quantize_static(3, "int8.onnx", READER)  # type: ignore[arg-type]
quantize_static("float.onnx", "int8.onnx", READER, protect_outputs="int")  # type: ignore[arg-type]
quantize_static("float.onnx", "int8.onnx", READER, stage=Stages())  # type: ignore[call-arg]
quantize_static("float.onnx", "int8.onnx", READER, progress=lambda done: None)  # type: ignore[arg-type,misc]
quantize_static("float.onnx", "int8.onnx", READER, verify="yes")  # type: ignore[arg-type]
quantize_static("float.onnx")  # type: ignore[call-arg]
Stages(plazement=False)  # type: ignore[call-arg]
print(quantize_static("float.onnx", "int8.onnx", READER).fusoin)  # type: ignore[attr-defined]
