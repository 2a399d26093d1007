"""Minima and maxima, reduced inside the graph so that no intermediate tensor leaves the runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

Array = npt.NDArray[Any]

REDUCTIONS = ("ReduceMin", "ReduceMax", "ReduceMean", "Size")
"""The mean serves to find NaN too: the runtime's minimum and maximum lose it."""


@dataclass(frozen=True)
class Reductions:
    """Nodes that reduce tensors, and the names of their outputs: one of each of `REDUCTIONS` a tensor."""

    nodes: tuple[onnx.NodeProto, ...]
    outputs: tuple[str, ...]


def reductions(tensors: Sequence[str], prefix: str) -> Reductions:
    """Returns reduction nodes for tensors.

    Args:
        tensors: Names of the tensors.
        prefix: Of the new names; no name in the graph starts with it.
    """
    nodes, outputs = [], []
    for tensor in tensors:
        for op in REDUCTIONS:
            output = f"{prefix}{op}/{tensor}"
            node = helper.make_node(op, [tensor], [output], name=output)
            if op != "Size":  # keepdims=1: with 0 the runtime refuses empty tensors
                node.attribute.append(helper.make_attribute("keepdims", 1))
            nodes.append(node)
            outputs.append(output)
    return Reductions(tuple(nodes), tuple(outputs))


class RangeAccumulator:
    """Follows minima and maxima of tensors of one element type over samples and chunks.

    The arithmetic of the moving average is done in the tensors' own type and in stock's order of summation, so
    that the result is stock's bit for bit.

    Args:
        size: Number of tensors.
        dtype: Their element type.
        moving_average: Whether a chunk's range is the mean of its samples' minima and maxima.
        constant: Weight of a newer chunk in the moving average over chunks.
        symmetric: Whether a chunk's range is made symmetric before it is merged.
    """

    def __init__(
        self, size: int, dtype: npt.DTypeLike, *, moving_average: bool, constant: float, symmetric: bool
    ) -> None:
        self._dtype = np.dtype(dtype)
        self._moving_average = moving_average
        self._constant = constant
        self._symmetric = symmetric
        self.low = np.full(size, np.inf, self._dtype)
        self.high = np.full(size, -np.inf, self._dtype)
        self._rows: list[tuple[Array, Array]] = []
        self._average: tuple[Array, Array] | None = None

    def add(self, low: Array, high: Array) -> None:
        """Adds one sample.

        Args:
            low: Minima, one a tensor; greater than ``high`` for an empty tensor.
            high: Maxima, one a tensor.
        """
        np.minimum(self.low, low, out=self.low)
        np.maximum(self.high, high, out=self.high)
        if self._moving_average:
            empty = low > high
            self._rows.append(
                (np.where(empty, np.nan, low).astype(self._dtype), np.where(empty, np.nan, high).astype(self._dtype))
            )

    def close_chunk(self) -> None:
        """Merges the samples since the last call into the moving average."""
        if not self._rows:
            return
        low, high = (_mean_of_columns([row[i] for row in self._rows]) for i in (0, 1))
        self._rows = []
        if self._symmetric:
            high = np.maximum(np.abs(low), np.abs(high))
            low = -high
        if self._average is None:
            self._average = (low, high)
        else:
            self._average = (self._blend(self._average[0], low), self._blend(self._average[1], high))

    def _blend(self, old: Array, new: Array) -> Array:
        constant = np.asarray(self._constant, self._dtype)
        blended = old + constant * (new - old)
        out: Array = np.where(np.isnan(old), new, np.where(np.isnan(new), old, blended))
        return out

    def averages(self) -> list[tuple[float, float] | None]:
        """Returns the moving average of each tensor, None where there is none."""
        if self._average is None:
            return [None] * self.low.size
        pairs = zip(*(side.tolist() for side in self._average), strict=True)
        return [None if np.isnan(a) else (a, b) for a, b in pairs]


def _mean_of_columns(rows: list[Array]) -> Array:
    """Mean over the rows that are not NaN, NaN for a column of nothing else, summed along contiguous memory."""
    columns = np.ascontiguousarray(np.stack(rows).T)
    present = ~np.isnan(columns).all(axis=1)
    out = np.full(columns.shape[0], np.nan, columns.dtype)
    out[present] = np.nanmean(columns[present], axis=1)
    return out
