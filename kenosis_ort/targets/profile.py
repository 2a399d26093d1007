"""Costs of kernels as data: coefficients for each class in float and integer, and host profiles, one for a machine.

The time of a kernel is taken as a sum of what it does: products, elements written, and pieces gathered to feed the
products. A class says which kernel it is and what its pieces are; `Work` counts them for one node. The coefficients
are those of one machine, a `kenosis_ort.targets.profile.HostProfile`; what the classes mean is the target's.

A host profile is such a table as a file. A target ships a few, one for each class of processors it was measured on;
further ones are measured where a user asks for it. A file is laid out for the machine of one profile: that at hand, or
any other whose profile is given. Profiles come from anywhere, so every number in one is checked.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final, Literal

import onnx

from kenosis_ort.errors import OptionError, printable
from kenosis_ort.graph.view import GraphView, ir
from kenosis_ort.runtime.machine import has_dot_products, keep, machine, processor_class, recall
from kenosis_ort.storage.writing import regular, write_text

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
        profile: What its kernels cost on the machine.
        work: Counts what a node does; None where shapes that matter are not known.
        fused: Classes that cost nothing behind a float Conv or Gemm.
        gates: Functions f that cost in float as much as ``x * f(x)`` where that is all they are for.
        blocked: Classes whose float kernels keep channels in blocks.
        passes_blocks: Those that write blocks where they read nothing else, joined channels in whole blocks.
        shows_times: Reports may give microseconds: the file is made for a processor of the class that was measured.
        anywhere: Integer kernels are slower than float ones for many shapes, so that regions anywhere in a net are left
            float by estimate, not only its first nodes.
    """

    profile: HostProfile
    work: Callable[[GraphView, ir.Node], Work | None]
    fused: frozenset[str] = frozenset()
    blocked: frozenset[str] = frozenset()
    passes_blocks: frozenset[str] = frozenset()
    gates: frozenset[str] = frozenset()
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
        if work.second and work.shape_class in self.profile.shifted:
            return self.shifted_us(work, cold)
        cost = self._costs(work)[1]
        return None if cost is None else cost.microseconds(work, cold)

    def shifted_us(self, work: Work, cold: float = 1.0) -> float | None:
        """The microseconds of a node in integer on the second kernel, None where there is no such."""
        cost = self.profile.shifted.get(work.shape_class)
        return None if cost is None else cost.microseconds(work, cold)

    def cold(self, works: Iterable[Work]) -> float:
        """The share of the kernels' own costs that counts in a net: less where all of it stays in near caches.

        Args:
            works: What its nodes do.
        """
        touched = sum(work.weights + work.elements for work in works)
        return min(max(touched / _NEAR, self.profile.warm), 1.0)

    def _costs(self, work: Work) -> tuple[KernelCost, KernelCost | None]:
        return self.profile.kernels.get(work.shape_class) or self.profile.kernels["other"]


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


FORMAT: Final = "kenosis-ort host profile"
SCHEMA: Final = 1
SIZE_LIMIT: Final = 1 << 16
"""Bytes of a file; what this package writes is a few thousand."""
_MOST: Final = 1e9  # of any number: a kernel whose call alone takes a second is none
_MOST_CLASSES: Final = 256
_MOST_THREADS: Final = 4096
_LONGEST_TEXT: Final = 200
_COST: Final = tuple(f.name for f in fields(KernelCost))
_FIX: Final = "measure one with kenosis-ort profile, or leave host out"


@dataclass(frozen=True)
class HostProfile:
    """Costs of kernels on one machine.

    Attributes:
        name: What a report calls it, e.g. ``vnni``.
        target: Name of the target whose runtime was measured.
        cpu: The processor.
        features: Its flags among `kenosis_ort.runtime.machine.FEATURES`, by which a runtime chooses its kernels.
        runtime: The runtime's version.
        threads: Threads of a session.
        run: Microseconds of a run besides its kernels.
        kernels: Coefficients in float and in integer by class; None where there is no integer kernel.
        shifted: Integer coefficients by class of a second kernel, which weights of another zero point select.
        error: Largest factor seen between the estimated and the measured speed of a net relative to float.
        warm: Share of a call's own cost that is left in nets small enough to stay in the near caches; 1 where calls
            were measured warm.
        saturates: 8-bit products saturate there.
    """

    name: str
    target: str
    cpu: str
    features: tuple[str, ...]
    runtime: str
    threads: int
    run: float
    kernels: Mapping[str, tuple[KernelCost, KernelCost | None]]
    shifted: Mapping[str, KernelCost] = field(default_factory=dict)
    error: float = 1.5
    warm: float = 1.0
    saturates: bool = False

    @property
    def machine(self) -> str:
        """Processor, runtime and threads in words."""
        threads = {0: "all threads", 1: "one thread"}.get(self.threads, f"{self.threads} threads")
        return f"{self.cpu}, {self.runtime}, {threads}"

    def is_of_class(self, features: Sequence[str]) -> bool:
        """Whether it was measured on a processor of the class that flags say, so that its times hold there."""
        return processor_class(self.features) == processor_class(features)

    def table(self, costs: CostTable, *, shows_times: bool = True) -> CostTable:
        """A target's table with the costs of its kernels on this machine.

        Args:
            costs: Of the same target, on any machine.
            shows_times: As the attribute of a table.
        """
        return replace(costs, profile=self, shows_times=shows_times)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        costs = {
            name: {"float": _plain(of_float), "integer": _plain(of_integer)}
            for name, (of_float, of_integer) in self.kernels.items()
        }
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        shifted = {name: _plain(cost) for name, cost in self.shifted.items()}
        head = {"format": FORMAT, "schema": SCHEMA}
        return {**head, **own, "features": list(self.features), "kernels": costs, "shifted": shifted}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, where: str = "host") -> HostProfile:
        """Reads what `to_dict` returned.

        Raises:
            OptionError: It is no profile of this schema, or holds a number that cannot be.
        """
        try:
            return _profile(raw)
        except ValueError as error:
            raise OptionError(f"the host profile cannot be used: {error}", where=where, fix=_FIX) from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it as JSON.

        Raises:
            OutputError: The file cannot be written.
        """
        write_text(path, json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n", "the host profile")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> HostProfile:
        """Reads a file that `save` wrote.

        Raises:
            OptionError: It is missing, too large, or no profile.
        """
        where = os.fspath(path)
        try:
            with regular(path).open("rb") as file:
                text = file.read(SIZE_LIMIT + 1)
        except OSError as error:
            raise OptionError(
                f"the host profile cannot be read: {error.strerror or error}", where=where, fix=_FIX
            ) from error
        if len(text) > SIZE_LIMIT:
            raise OptionError(f"a host profile of more than {SIZE_LIMIT} bytes", where=where, fix=_FIX)
        return cls.parse(text, where=where)

    @classmethod
    def parse(cls, text: str | bytes, *, where: str = "host") -> HostProfile:
        """Reads what `save` writes.

        Raises:
            OptionError: It is no profile.
        """
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise OptionError(f"the host profile is no JSON: {error}", where=where, fix=_FIX) from error
        return cls.from_dict(raw, where=where)


def _profile(raw: Any) -> HostProfile:
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise ValueError("it is no host profile")
    if raw.get("schema") != SCHEMA:
        raise ValueError(f"it has schema {raw.get('schema')!r}, this version reads {SCHEMA}")

    def checked(key: str, holds: Callable[[Any], bool], what: str) -> Any:
        found = raw.get(key)
        if not holds(found):
            raise ValueError(f"'{key}' is no {what}")
        return found

    def is_short(found: Any) -> bool:
        return isinstance(found, str) and 0 < len(found) <= _LONGEST_TEXT

    names = ("name", "target", "cpu", "runtime")
    texts = {key: printable(checked(key, is_short, "short text"), keep="") for key in names}
    kernels, shifted = (checked(key, lambda found: isinstance(found, dict), "table") for key in ("kernels", "shifted"))
    if "other" not in kernels or len(kernels) > _MOST_CLASSES:
        raise ValueError("'kernels' lacks 'other', the class of all that it does not name, or names too many")
    costs = {}
    for name, both in kernels.items():
        forms = both if isinstance(both, dict) else {"float": both}
        in_integer = forms.get("integer")
        costs[name] = (
            _cost(forms.get("float"), f"kernel '{name}', float"),
            None if in_integer is None else _cost(in_integer, f"kernel '{name}', integer"),
        )
    features = checked(
        "features", lambda f: isinstance(f, list) and all(isinstance(w, str) for w in f), "list of words"
    )
    return HostProfile(
        **texts,
        features=tuple(sorted(features)),
        threads=checked("threads", lambda n: type(n) is int and 0 <= n <= _MOST_THREADS, "number of threads"),
        run=_number(raw.get("run"), "run"),
        kernels=costs,
        shifted={
            name: _cost(found, f"kernel '{name}', shifted") for name, found in shifted.items() if found is not None
        },
        error=_number(raw.get("error"), "error", least=1.0),
        warm=min(_number(raw.get("warm"), "warm"), 1.0),
        saturates=checked("saturates", lambda found: type(found) is bool, "truth value"),
    )


def _cost(raw: Any, what: str) -> KernelCost:
    if not isinstance(raw, dict) or not set(raw) <= set(_COST) or "fixed" not in raw:
        raise ValueError(f"{what}: a table of {', '.join(_COST)} is expected")
    return KernelCost(**{name: _number(value, f"{what}, {name}") for name, value in raw.items()})


def _number(raw: Any, what: str, *, least: float = 0.0) -> float:
    if isinstance(raw, bool) or not isinstance(raw, (int, float)) or not least <= raw <= _MOST:
        raise ValueError(f"{what} is {raw!r}, not a number from {least:g} to {_MOST:g}")
    return float(raw)


def _plain(cost: KernelCost | None) -> dict[str, float] | None:
    return None if cost is None else {name: value for name, value in asdict(cost).items() if value or name == "fixed"}


def nearest(profiles: Sequence[HostProfile], features: Sequence[str], *, saturates: bool) -> HostProfile:
    """Profile whose processor has most kernels in common with one of these features.

    Args:
        profiles: At least one; of equally near ones the first is taken, as where none shares a feature.
        features: Flags among `kenosis_ort.runtime.machine.FEATURES`; none where the system does not list them.
        saturates: Products of 8 bits saturate there, as measured; it counts where the flags do not say otherwise.
    """
    clips = saturates and not has_dot_products(features)
    known = any({*p.features} & {*features} for p in profiles)
    return min(profiles, key=lambda p: (p.saturates != clips, known and len({*p.features} ^ {*features})))


def cached_profile(target: str, runtime: str, threads: int) -> HostProfile | None:
    """The profile that was measured on this machine, None where none was.

    Args:
        target: Name of the target.
        runtime: Version of the runtime.
        threads: Threads of a session.
    """
    raw = recall(_cache_name(target, runtime, threads))
    if raw is None:
        return None
    try:
        return HostProfile.from_dict(raw)
    except OptionError:  # of another version of this package, or damaged: it can be measured again
        return None


def keep_profile(profile: HostProfile) -> None:
    """Keeps a profile of this machine for `cached_profile`; where nothing can be kept, nothing happens."""
    keep(_cache_name(profile.target, profile.runtime, profile.threads), profile.to_dict())


def _cache_name(target: str, runtime: str, threads: int) -> str:
    here = machine()
    identity = json.dumps([target, here.cpu, here.features, runtime, threads])
    return f"profile-{hashlib.sha256(identity.encode()).hexdigest()[:24]}"
