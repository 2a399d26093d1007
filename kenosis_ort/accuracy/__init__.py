"""Measures of what outputs are for, comparison of outputs and layers of two models, and the caller's metric."""
