"""Outputs to measure, from random numbers."""

from typing import Any

import numpy as np


def softmax(x: Any, axis: int = -1) -> Any:
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return (e / e.sum(axis=axis, keepdims=True)).astype(np.float32)


def sigmoid(x: Any) -> Any:
    return (1 / (1 + np.exp(-x))).astype(np.float32)


def boxes_of(rng: np.random.Generator, count: int) -> Any:
    """Boxes by their corners."""
    low = rng.uniform(0, 80, (1, count, 2))
    return np.concatenate([low, low + rng.uniform(5, 20, (1, count, 2))], axis=-1).astype(np.float32)
