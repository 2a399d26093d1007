"""Conformance of each Conv of a model to a document. Pure data."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from kenosis_ort.errors import printable
from kenosis_ort.storage.data import to_data

SCHEMA_VERSION: Final = 1


class Clause(str, Enum):
    """The clauses of oneDNN's text on quantized Convolutions."""

    CONVOLUTION = "convolution"  # a Convolution with conversions around it, each a node
    SRC_CONVERSION = "src-conversion"  # Q2F: Dequantize, perhaps with TypeCast
    SRC_TYPE = "src-type"
    WEIGHTS_CONVERSION = "weights-conversion"  # Q2F: the same, perhaps with Quantize of float weights before it
    WEIGHTS_TYPE = "weights-type"
    BIAS_CONVERSION = "bias-conversion"  # F2F: nothing, or TypeCast
    BIAS_TYPE = "bias-type"
    EPILOGUE = "epilogue"  # BiasAdd first and once, then 0 to 4 binary or unary operations
    DST_CONVERSION = "dst-conversion"  # F2F or F2Q: TypeCast, Quantize
    DST_TYPE = "dst-type"


@dataclass(frozen=True)
class BrokenClause:
    """A clause that a Conv breaks, and by what, in one sentence."""

    clause: Clause
    why: str


@dataclass(frozen=True)
class ConvPattern:
    """One Conv, as the document sees it.

    Attributes:
        node: Name of the Conv, or ``<Conv value>`` after its output where it has none.
        graph: Empty for the main graph, else the path of the ``If``/``Loop`` body that holds it.
        src: Data type of the source as it enters the pattern, ``u8`` for one.
        weights: The same of the weights.
        bias: The same of the bias; empty without one.
        epilogue: The document's names of the operations that belong to the pattern, in order.
        dst: Data type of what the pattern writes.
        ends: Why the epilogue ends before a conversion; empty where one ends it, or the graph does.
        broken: The clauses that it breaks.
    """

    node: str
    graph: str
    src: str = ""
    weights: str = ""
    bias: str = ""
    epilogue: tuple[str, ...] = ()
    dst: str = ""
    ends: str = ""
    broken: tuple[BrokenClause, ...] = ()

    @property
    def matches(self) -> bool:
        """Whether the Conv is an instance of the pattern."""
        return not self.broken

    @property
    def pattern(self) -> str:
        """The instance in one line: ``u8 * s8 + f32 -> Sigmoid, Multiply -> u8``."""
        bias = f" + {self.bias}" if self.bias else ""
        epilogue = f"{', '.join(self.epilogue)} -> " if self.epilogue else ""
        return f"{self.src} * {self.weights}{bias} -> {epilogue}{self.dst}"

    def __str__(self) -> str:
        where = f"{self.graph}/{self.node}" if self.graph else self.node
        found = f"Conv '{where}': {self.pattern}" if self.src else f"Conv '{where}'"
        broken = "; ".join(f"{b.clause.value}: {b.why}" for b in self.broken)
        return printable(f"{found}{f' ({self.ends})' if self.ends else ''}{f' breaks {broken}' if broken else ''}")


@dataclass(frozen=True)
class PatternReport:
    """All Convs of a model against a document.

    Attributes:
        target: Whose document.
        document: Its title.
        convs: One entry per Conv, in the model's order.
    """

    target: str
    document: str
    convs: tuple[ConvPattern, ...]

    @property
    def conforms(self) -> bool:
        """Whether every Conv is an instance of the pattern."""
        return all(c.matches for c in self.convs)

    def verdict(self) -> str:
        """The result in one sentence."""
        matching = sum(c.matches for c in self.convs)
        found = Counter(b.clause.value for c in self.convs for b in c.broken)
        broken = f"; broken: {', '.join(f'{name} {n}x' for name, n in found.most_common())}" if found else ""
        return f"{matching} of {len(self.convs)} Convs match '{self.document}'{broken}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        data = to_data(self)
        convs = [{**each, "matches": conv.matches} for each, conv in zip(data["convs"], self.convs, strict=True)]
        return {"schema": SCHEMA_VERSION, **data, "verdict": self.verdict(), "convs": convs}

    def __str__(self) -> str:
        return "\n".join([self.verdict(), *(f"  {c}" for c in self.convs)])
