"""The formats that a quantized model is written in and read from, all by way of one canonical form (`model`)."""
