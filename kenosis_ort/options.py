"""Frozen options: those that the caller gave, those left open, and the checked `extra_options`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Final, Literal, NamedTuple, TypedDict, get_args

from typing_extensions import Self

from kenosis_ort.checks import MOST_THREADS, Check, choice, either, flag, instance, or_none, path, several, whole

OutputPolicy = Literal["auto", "float", "int8"]
Evidence = Literal["none", "light", "full"]
Failure = Literal["error", "float"]
Tuning = Literal["off", "model"]


Format = Literal["qdq", "qop", "qcdq", "qcdq-qonnx", "qop-clip", "qonnx"]
"""How the result is written: Q and DQ around float operators; quantized operators; Q, Clip and DQ, with integer weights
as the runtime fuses them, or float ones as QONNX' tools read them; quantized operators with Clip; QONNX."""
INT8_CACHE: Final = "int8"
"""What ``kv_cache`` says for a cache at scales of its own."""
NARROW_FORMATS: Final = ("qcdq", "qcdq-qonnx", "qop-clip", "qonnx")
"""Formats that say fewer bits than 8 of an activation."""
OPERATOR_FORMATS: Final = ("qop", "qop-clip")
EXPORT_FORMATS: Final = ("qcdq-qonnx", "qonnx")
"""Formats for other tools than the runtime."""


OptionSource = Literal["caller", "recipe", "host default", "stock default", "target default"]


class OptionChoice(NamedTuple):
    """An option's value and who chose it."""

    value: Any
    source: OptionSource


class Unset:
    """Type of `UNSET`: the caller gave no value, so that a recipe file or the host decides."""

    def __repr__(self) -> str:
        return "<host default>"


UNSET: Final = Unset()


@dataclass(frozen=True)
class Stages:
    """The switchable Kenosis stages (Kenosis paper, "The Kenosis Optimization Pipeline", stages 2 to 7).

    Stage 1, self-calibration, is the choice of a `SyntheticReader` as calibration reader.

    Attributes:
        weights: Weight scales and rounding in float64 (off: stock's arithmetic).
        bias: int32 bias at exactly ``input_scale * weight_scale`` in float64, with overflow widening and a
            private copy where consumers disagree (off: no widening, a bias that overflows is clipped).
        nudge: Activation ranges snapped so that 0.0 is exact and absorbed activations stay absorbable
            (off: stock's scale and zero point).
        placement: Fusion-aware placement (off: stock's node-by-node placement).
        protect_inputs: Tensors that derive from secondary inputs or hold shapes stay float.
        protect_outputs: Graph outputs and the zone behind the last heavy operator stay float.
    """

    weights: bool = True
    bias: bool = True
    nudge: bool = True
    placement: bool = True
    protect_inputs: bool = True
    protect_outputs: bool = True

    def __post_init__(self) -> None:
        for field_ in fields(self):
            object.__setattr__(self, field_.name, flag(f"stages.{field_.name}", getattr(self, field_.name)))

    @classmethod
    def none(cls) -> Stages:
        """All stages off: the result is stock ONNX Runtime's."""
        return cls(**{f.name: False for f in fields(cls)})


def host(name: str, value: Any) -> Any:
    """A machine: a profile, or its name or path; a wrong one is reported later."""
    return value if value is None or hasattr(value, "kernels") else path(name, value)


FIELDS: Final[Mapping[str, Check]] = {
    "protect_outputs": partial(choice, among=get_args(OutputPolicy)),
    "primary_inputs": or_none(several),
    "rewrites": either(flag, several),
    "stages": or_none(partial(instance, of=Stages, what="a kenosis_ort.Stages")),
    "tune": partial(choice, among=get_args(Tuning)),
    "threads": partial(whole, most=MOST_THREADS),
    "promise": flag,
    "host": host,
    "sequence_lengths": partial(several, each=partial(whole, least=1), what="whole numbers"),
}
"""Checks of the fields of `Placement` and `Speed`, which are keywords of `kenosis_ort.quantize_static` too."""


class _Group:
    """Options of which it is known which ones the caller stated, at their defaults or not."""

    stated: frozenset[str]

    def __new__(cls, *values: Any, **named: Any) -> Self:
        group = super().__new__(cls)
        names = [*cls.__annotations__][: len(values)]
        object.__setattr__(group, "stated", frozenset((*names, *named)))
        return group

    def __post_init__(self) -> None:
        for name in type(self).__annotations__:
            object.__setattr__(self, name, FIELDS[name](name, getattr(self, name)))


@dataclass(frozen=True)
class Placement(_Group):
    """Options of the placement beside stock's own.

    Attributes:
        protect_outputs: What to do with a Conv that computes a graph output: ``"float"``, ``"int8"``, or ``"auto"``:
            float where that costs next to nothing. Gemm and MatMul heads always write float, but for ``"int8"``, which
            quantizes the graph's outputs as stock does.
        primary_inputs: Names of the inputs that carry the data proper; what derives from the others alone stays
            float. None tells them apart by name and shape.
        rewrites: Float-equivalent rewrites into forms that quantize better: True for those that pay on the target,
            False for none, or names (see ``kenosis_ort.rewrite``).
        stages: Kenosis stages to switch off, for ablation; ``Stages.none()`` is stock.

    Raises:
        OptionError: A value is unknown or of another type.
    """

    protect_outputs: OutputPolicy = "auto"
    primary_inputs: Sequence[str] | None = None
    rewrites: bool | Sequence[str] = True
    stages: Stages | None = None


class Keywords(TypedDict, total=False):
    """Further keywords of `kenosis_ort.quantize_static`, for those who need more than its ten own parameters.

    Attributes:
        verify: Read the fusion proof off the runtime's optimized graph and repair what falls short; True if left out.
        evidence: What the report gathers for its picture: ``"light"``, the default, reads the models' graph, ranges and
            weights; ``"full"`` also runs both for the signal by layer and the time by operator; ``"none"``.
        executor: A ``distributed.Client``, or a `kenosis_ort.Cluster` with more to say: the float model runs over the
            samples, and candidates of the passes, on its workers; the result is the same to the bit. None runs it here.
        kv_cache: ``"int8"``: the cache of a decoder enters and leaves the file as int8, at scales that stand in its
            metadata and in the report. The path of a file made so: at that file's scales, for a decoder of the first
            tokens whose cache the other reads. None leaves it float.
        on_failure: What a defect of kenosis-ort ends in: ``"error"``, the default, an `InternalError` and no file;
            ``"float"``, the float model as it came, with the reason in the report's ``fallbacks``.
        weight_bits: Width of weights, 2 to 8; None leaves it to the recipe (8). Below 8 scales have the least squared
            error, and learned rounding is tried.
        activation_bits: Width of what nodes compute, likewise; what enters the graph has 8. Below 8 only in a format
            that can say so.
        protect_outputs: Instead of ``placement.protect_outputs``, as each of the following three is of its field.
        primary_inputs: As above.
        rewrites: As above.
        stages: As above.
        tune: Instead of ``speed.tune``; the following four likewise.
        threads: ``speed.threads``.
        promise: ``speed.promise``.
        host: ``speed.host``.
        sequence_lengths: ``speed.sequence_lengths``.
        max_opset: The highest main operator set of the result, 13 or more. What needs a higher one is an error where it
            is asked for, and left out where it is optional. None, the default, for the model's own, or a higher one
            that by estimate makes it more than 5 % faster.
    """

    verify: bool
    evidence: Evidence
    executor: Any
    kv_cache: str | os.PathLike[str] | None
    on_failure: Failure
    weight_bits: int | None
    activation_bits: int | None
    protect_outputs: OutputPolicy
    primary_inputs: Sequence[str] | None
    rewrites: bool | Sequence[str]
    stages: Stages | None
    tune: Tuning
    threads: int
    promise: bool
    host: str | os.PathLike[str] | Any
    sequence_lengths: Sequence[int]
    max_opset: int | None


KEYWORDS: Final = tuple(Keywords.__annotations__)


@dataclass(frozen=True)
class Speed(_Group):
    """Options of the measurements that keep the promise: the result is not slower than the float model.

    Attributes:
        tune: ``model``: regions follow from a host profile; ``off``: none is left float for speed.
        threads: Threads of the sessions that are timed, as in deployment; 0 for the runtime's default.
        promise: The result is timed against the float model and replaced where it is slower.
        host: The machine that the file is laid out for: the name of a profile that comes with the target, the path of
            one that was measured (``kenosis-ort profile``), or a `kenosis_ort.HostProfile`; None for the one measured
            on this machine, or the nearest. Nothing is timed for a machine of another kind than this one.
        sequence_lengths: Lengths that the model is timed at and must not be slower than the float model at, e.g.
            ``(1, 128)`` for single tokens and prompts; samples are cut or repeated to them. Empty for those of the
            calibration samples, the shortest and the longest where these are far apart.

    Raises:
        OptionError: A value is unknown or out of range.
    """

    tune: Tuning = "model"
    threads: int = 1
    promise: bool = True
    host: str | os.PathLike[str] | Any = None
    sequence_lengths: Sequence[int] = ()


BYTE = 8


@dataclass(frozen=True)
class Widths:
    """Bits of weights and activations, 2 to 8.

    Attributes:
        weights: Of all weights that ``by_node`` does not speak about.
        activations: Of all values that nodes compute, likewise.
        by_node: (weights, activations) by node; None leaves one of them at the general word.
    """

    weights: int = BYTE
    activations: int = BYTE
    by_node: Mapping[str, tuple[int | None, int | None]] = field(default_factory=dict)

    @property
    def are_bytes(self) -> bool:
        """Everything has 8 bits."""
        given = [bits for pair in self.by_node.values() for bits in pair if bits is not None]
        return all(bits == BYTE for bits in (self.weights, self.activations, *given))

    def of(self, node: str, *, weights: bool) -> int:
        """The bits of the weights that a node reads, or of what it computes."""
        given = self.by_node.get(node, (None, None))[0 if weights else 1]
        return given or (self.weights if weights else self.activations)
