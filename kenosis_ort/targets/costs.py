"""Costs of kernels of a runtime, as data: a few coefficients for each class of kernel, in float and in integer.

The time of a kernel is taken as a sum of what it does: products, elements written, and pieces gathered to feed the
products. A class says which kernel it is and what its pieces are; `Work` counts them for one node. The coefficients
are those of one machine, a `kenosis_ort.targets.profile.HostProfile`; what the classes mean is the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import onnx

from kenosis_ort.graph.view import GraphView, ir

Form = Literal["float", "integer", "shifted"]
"""Of a node: in float, in integer, in integer with weights whose zero point selects the second kernel."""


_NEAR: Final = 1 << 21
"""Weights and elements that a net touches in a run, below which its kernels begin warm."""
_ONCE_NEAR: Final = 0.5
"""Time of weights that are used once a run, where the near caches hold them, relative to that of weights from far."""


@dataclass(frozen=True)
class Work:
    """Work of one node.

    Attributes:
        shape_class: Which kernel does it, a key of `CostTable`.
        macs: Multiply-accumulates, by the arithmetic definition of the operator.
        products: Those that the kernel makes, its tiles filled up.
        elements: Elements written.
        pieces: Pieces of memory gathered one by one; what they are depends on the class.
        reads: Elements gathered to feed the products, each as often as it is.
        weights: Elements of weights, which come from far as a rule.
        second: The runtime has its second integer kernel alone for it, whatever zero point the weights have.
    """

    shape_class: str
    macs: int = 0
    products: int = 0
    elements: int = 0
    pieces: int = 0
    reads: int = 0
    weights: int = 0
    second: bool = False


@dataclass(frozen=True)
class KernelCost:
    """Coefficients of a kernel's time.

    Attributes:
        fixed: Nanoseconds a call, the executor's share included.
        product: Picoseconds a product.
        element: Picoseconds an element written.
        piece: Picoseconds a piece gathered.
        read: Picoseconds an element gathered.
        weight: Picoseconds an element of weights.
    """

    fixed: float
    product: float = 0.0
    element: float = 0.0
    piece: float = 0.0
    read: float = 0.0
    weight: float = 0.0

    def microseconds(self, work: Work, cold: float = 1.0) -> float:
        """The time of a node.

        Args:
            work: What it does.
            cold: Share of the call's own cost that counts, less than 1 where all of a net stays in near caches.
        """
        spent = work.products * self.product + work.pieces * self.piece + work.weights * self.weight
        spent += work.elements * self.element + work.reads * self.read
        if 0 < work.macs <= work.weights:  # each weight is used once: to read them is what takes time
            spent *= max(cold, _ONCE_NEAR)
        return cold * self.fixed * 1e-3 + spent * 1e-6


@dataclass(frozen=True)
class CostTable:
    """The kernels of one runtime on one kind of machine, one thread.

    Attributes:
        measured_on: Processor and runtime version.
        command: The command that measures it.
        run: Microseconds of a run besides its kernels.
        kernels: Coefficients in float and in integer by class; None where there is no integer kernel.
        error: Largest factor seen between the estimated and the measured speed of a net relative to float.
        work: Counts what a node does; None where shapes that matter are not known.
        fused: Classes that cost nothing behind a float Conv or Gemm.
        gates: Functions f that cost nothing in float where ``x * f(x)`` is all they are for.
        blocked: Operators whose float kernels keep channels in blocks.
        shifted: Integer coefficients by class of a second kernel, which weights of another zero point select.
        warm: Share of a call's own cost that is left in nets small enough to stay in the near caches.
        host: Name of the machine's profile; empty for a table of one machine alone.
        shows_times: Reports may give microseconds: the file is made for a processor of the class that was measured.
        anywhere: Integer kernels are slower than float ones for many shapes, so that regions anywhere in a net are left
            float by estimate, not only its first nodes.
    """

    measured_on: str
    command: str
    run: float
    kernels: Mapping[str, tuple[KernelCost, KernelCost | None]]
    error: float
    work: Callable[[GraphView, ir.Node], Work | None]
    fused: frozenset[str] = frozenset()
    blocked: frozenset[str] = frozenset()
    gates: frozenset[str] = frozenset()
    shifted: Mapping[str, KernelCost] = field(default_factory=dict)
    warm: float = 1.0
    host: str = ""
    shows_times: bool = True
    anywhere: bool = False

    def float_us(self, work: Work, cold: float = 1.0) -> float:
        """The microseconds of a node in float; those of any elementwise operator where the class is unknown.

        Args:
            work: What it does.
            cold: As `cold` tells.
        """
        return self._costs(work)[0].microseconds(work, cold)

    def integer_us(self, work: Work, cold: float = 1.0) -> float | None:
        """The microseconds of a node in integer, None without an integer kernel."""
        if work.second and work.shape_class in self.shifted:
            return self.shifted_us(work, cold)
        cost = self._costs(work)[1]
        return None if cost is None else cost.microseconds(work, cold)

    def shifted_us(self, work: Work, cold: float = 1.0) -> float | None:
        """The microseconds of a node in integer on the second kernel, None where there is no such."""
        cost = self.shifted.get(work.shape_class)
        return None if cost is None else cost.microseconds(work, cold)

    def cold(self, works: Iterable[Work]) -> float:
        """The share of the kernels' own costs that counts in a net: less where all of it stays in near caches.

        Args:
            works: What its nodes do.
        """
        touched = sum(work.weights + work.elements for work in works)
        return min(max(touched / _NEAR, self.warm), 1.0)

    def _costs(self, work: Work) -> tuple[KernelCost, KernelCost | None]:
        return self.kernels.get(work.shape_class) or self.kernels["other"]


@dataclass(frozen=True)
class Probe:
    """A small net whose kernels are timed, to learn what kernels of a runtime cost on a machine.

    Attributes:
        model: The net.
        feed: What it is run on.
        nodes: By name the nodes that are asked about, with what they do and in which form.
        kernels: By type the kernels that are asked about, all of which do the same in this net.
    """

    model: onnx.ModelProto
    feed: Mapping[str, Any]
    nodes: Mapping[str, tuple[Work, Form]]
    kernels: Mapping[str, Work] = field(default_factory=dict)
