"""The fusion proof: ONNX Runtime's own optimized graph, read back and mapped to the nodes of the model."""
