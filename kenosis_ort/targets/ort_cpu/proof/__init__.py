"""The fusion proof: ONNX Runtime's own optimized graph, read back and told by the nodes of the model."""
