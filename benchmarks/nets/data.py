"""Inputs of the nets: pictures with the statistics of photographs, and sentences of mixed lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nets.leaves import dead_leaves

Feed = dict[str, npt.NDArray[Any]]

_MEAN = np.array([0.485, 0.456, 0.406])[:, None, None]
_DEVIATION = np.array([0.229, 0.224, 0.225])[:, None, None]


def picture(rng: np.random.Generator, side: int) -> npt.NDArray[np.float32]:
    """Returns ``[3, side, side]`` in [0, 1]: overlapping discs ("dead leaves") and a little noise."""
    noisy = dead_leaves(rng, side, side) + rng.normal(0, 0.02, (3, side, side))
    return np.clip(noisy, 0, 1).astype(np.float32)


def normalized(rng: np.random.Generator, side: int) -> npt.NDArray[np.float32]:
    """Returns a picture with ImageNet's mean and deviation taken out."""
    return ((picture(rng, side) - _MEAN) / _DEVIATION).astype(np.float32)


def pictures(count: int, seed: int, *, name: str = "x", side: int = 224, channels_last: bool = False) -> list[Feed]:
    """Returns feeds of one normalized picture each."""
    rng = np.random.default_rng(seed)
    found = [normalized(rng, side)[None] for _ in range(count)]
    return [{name: np.ascontiguousarray(p.transpose(0, 2, 3, 1)) if channels_last else p} for p in found]


def scaled_pictures(count: int, seed: int, *, side: int) -> list[Feed]:
    """Returns feeds of a detector: a picture, and by how much it was scaled."""
    rng = np.random.default_rng(seed)
    return [
        {"image": normalized(rng, side)[None], "scale_factor": rng.uniform(0.4, 1.6, (1, 2)).astype(np.float32)}
        for _ in range(count)
    ]


def sentences(count: int, seed: int, *, length: int, vocabulary: int) -> list[Feed]:
    """Returns feeds of token ids, from a quarter of the length up; words are Zipf-distributed, the rest is masked."""
    rng = np.random.default_rng(seed)
    likelihood = 1 / (np.arange(vocabulary) + 10.0)
    likelihood /= likelihood.sum()
    feeds = []
    for _ in range(count):
        words = int(rng.integers(length // 4, length + 1))
        mask = (np.arange(length) < words).astype(np.int64)[None]
        ids = rng.choice(vocabulary, (1, length), p=likelihood) * mask
        segments = ((np.arange(length) >= words // 2) & (np.arange(length) < words)).astype(np.int64)[None]
        feeds.append({"input_ids": ids.astype(np.int64), "attention_mask": mask, "token_type_ids": segments})
    return feeds


def joined(feeds: list[Feed]) -> Feed:
    """Returns one feed with all samples as a batch."""
    return {name: np.concatenate([feed[name] for feed in feeds]) for name in feeds[0]}
