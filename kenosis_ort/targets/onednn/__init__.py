"""oneDNN, the library of kernels inside OpenVINO's CPU plugin and ONNX Runtime's OpenVINO and DNNL providers."""
