"""Counts what a node does in WebAssembly: as for ``ort-cpu``, but for Relu and the pieces of Convs.

A Relu counts apart from a Clip, which is slower in float. Float kernels there take 16 pixels at once, whatever is left
of the last 16: what they multiply in vain counts as pieces, which small pictures are full of (7x7 is computed as 64).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import onnx_ir as ir

from kenosis_ort.graph.view import GraphView
from kenosis_ort.targets.costs import Work
from kenosis_ort.targets.ort_cpu.work import work_of as cpu_work_of

_PIXELS: Final = 16
_BY_PIXELS: Final = frozenset({"conv-pointwise", "conv-dense", "conv-depthwise", "conv-depthwise-odd"})


def work_of(view: GraphView, node: ir.Node) -> Work | None:
    """Returns what a node does, None where shapes that matter are not known; as for ``ort-cpu``."""
    work = cpu_work_of(view, node)
    if work is not None and node.op_type == "Relu":
        return replace(work, shape_class="relu")
    out = view.shape_of_one(node.outputs[0]) if work is not None and node.op_type == "Conv" else None
    return work if work is None or out is None else conv_work(work, out[0] * math.prod(out[2:]))


def conv_work(work: Work, pixels: int) -> Work:
    """Returns the work of a Conv with the products that are made in vain as its pieces.

    Args:
        work: Its work on ``ort-cpu``.
        pixels: Positions written.
    """
    if work.shape_class not in _BY_PIXELS or not pixels:
        return work
    return replace(work, pieces=-pixels % _PIXELS * work.macs // pixels)
