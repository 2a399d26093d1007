"""Weights of few bits in blocks; activations stay float."""
