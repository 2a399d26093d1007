"""Passes that make a quantized model closer to its float model: pure functions on models, one pass a file."""
