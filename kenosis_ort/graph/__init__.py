"""Reading, preparing and writing ONNX models, and the indexed views that the other rooms work on."""
