"""Which input of a feed does not fit the others, where the runtime only says at which node it stopped.

Exporters give open dimensions names, and inputs whose dimensions have one name must agree. The names are not always
true, so they are read only once a run has failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

_CACHE_RANK, _TOKENS_RANK = 4, 2
_TOKENS, _MASKS = ("decoder_input_ids", "input_ids"), ("decoder_attention_mask", "attention_mask")

Dims = Mapping[str, Sequence[Any]]
Sizes = Mapping[str, tuple[int, ...]]


def misfit(session: ort.InferenceSession, feed: Mapping[str, Any]) -> str:
    """Which input does not fit the others, in one sentence; "" if none is known not to.

    Args:
        session: Of the model.
        feed: What it fails on.
    """
    declared = {value.name: value.shape for value in session.get_inputs() if value.name in feed}
    given = {name: np.shape(feed[name]) for name in declared}
    found: dict[str, dict[int, list[tuple[str, int]]]] = {}
    for name, dims in declared.items():
        for axis, (dim, size) in enumerate(zip(dims, given[name], strict=False)):
            if isinstance(dim, str):
                found.setdefault(dim, {}).setdefault(size, []).append((name, axis))
    for dim, sizes in found.items():
        if len(sizes) > 1:
            (few, ((name, axis), *_)), *_, (many, ((other, at), *_)) = sorted(sizes.items(), key=lambda s: len(s[1]))
            return (
                f"The input '{name}' has {few} on axis {axis}, and the input '{other}' has {many} on axis {at}; the "
                f"model calls both '{dim}'."
            )
    return _odd_mask(declared, given)


def _odd_mask(declared: Dims, given: Sizes) -> str:
    """Error of a mask that does not cover the tokens and the cache."""
    tokens = next((name for name in _TOKENS if len(given.get(name, ())) == _TOKENS_RANK), "")
    open_caches = [n for n, dims in declared.items() if len(dims) == _CACHE_RANK and not isinstance(dims[2], int)]
    cache = next((name for name in open_caches if len(given[name]) == _CACHE_RANK), "")
    for mask in _MASKS if tokens else ():
        if len(given.get(mask, ())) == _TOKENS_RANK:
            read, past = given[tokens][1], given[cache][2] if cache else 0
            if given[mask][1] != read + past:
                covered = f"{read}, and the cache '{cache}' has {past}" if cache else str(read)
                return f"The input '{mask}' has {given[mask][1]} on axis 1, where '{tokens}' has {covered}."
    return ""
