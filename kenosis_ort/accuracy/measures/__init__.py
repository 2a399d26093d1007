"""Measures of outputs: one family of measures a file, and which of them suits an output."""
