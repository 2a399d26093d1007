"""The machine that a file is laid out for: the profile whose costs decide, and notes for other machines."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import onnxruntime as ort

from kenosis_ort.errors import OptionError, did_you_mean
from kenosis_ort.flow.request import Request
from kenosis_ort.graph.view import GraphView
from kenosis_ort.options import Speed
from kenosis_ort.placement.cost import estimate
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.report.quantization_report import OptionChoice
from kenosis_ort.targets import Target
from kenosis_ort.targets.costs import CostTable
from kenosis_ort.targets.profile import ARM, HostProfile, cached_profile, nearest, processor, processor_class
from kenosis_ort.tuning.races import pays

_SLOWER: Final = 0.95


def runtime_version() -> str:
    """The installed runtime as profiles name it."""
    return f"onnxruntime {ort.__version__}"


def profile_for(target: Target, speed: Speed) -> HostProfile | None:
    """The profile of the machine that a file is made for.

    Where the caller says nothing it is the one measured on this machine, else the target's nearest one.

    Args:
        target: Whose runtime it is; None is returned where it has no profiles.
        speed: What the caller says.

    Raises:
        OptionError: There is no such profile, or it is another target's or of another architecture.
    """
    given = speed.host
    if target.costs is None or not target.profiles:
        if given is None:
            return None
        raise OptionError(f"target '{target.name}' has no costs of kernels", where="host", fix="leave host out")
    if given is None:
        own = cached_profile(target.name, runtime_version(), speed.threads)
        usable = own is not None and own.kernels.keys() >= target.costs.kernels.keys()
        if own is not None and usable:
            return own
        return nearest(target.profiles, processor()[1], saturates=target.data_types().saturates)
    profile = given if isinstance(given, HostProfile) else _named(target, given)
    if profile.target != target.name:
        raise OptionError(
            f"host profile '{profile.name}' is of target '{profile.target}'",
            where="host",
            fix=f"target='{profile.target}', or a profile of '{target.name}'",
        )
    lacking = sorted(target.costs.kernels.keys() - profile.kernels.keys())
    if lacking:
        raise OptionError(
            f"host profile '{profile.name}' lacks kernels: {', '.join(lacking[:5])}",
            where="host",
            fix="measure it with this version: kenosis-ort profile",
        )
    _check_architecture(profile, processor()[1])
    return profile


def _check_architecture(profile: HostProfile, features: Sequence[str]) -> None:
    """Refuses a profile whose processor takes other data types than those that the machine at hand decides."""
    if not features:
        return
    if not profile.features:
        raise OptionError(
            f"host profile '{profile.name}' has an empty list of features: nothing says which processor it is of",
            where="host",
            fix="measure it on Linux, whose system lists them, or name a profile that comes with the target",
        )
    other, here = ("Arm" if processor_class(f) == ARM else "x86-64" for f in (profile.features, features))
    if other != here:
        raise OptionError(
            f"host profile '{profile.name}' is of an {other} processor, and data types follow this one, of {here}",
            where="host",
            fix=f"a profile of an {here} processor, or leave host out",
        )


def costs_for(costs: CostTable, profile: HostProfile, speed: Speed) -> CostTable:
    """Costs on the machine that a file is made for; times of another class of processors are not shown.

    Args:
        costs: Of the target.
        profile: Of the machine.
        speed: What the caller says.
    """
    return costs.on(profile, shows_times=speed.host is not None or profile.is_of_class(processor()[1]))


def with_own_profile(request: Request) -> Request:
    """The request with this machine's own profile, where the caller names no machine and none was measured.

    It is the nearest profile, less its second kernel if that is no faster here.

    Args:
        request: Of a call.
    """
    target, speed, profile = request.target, request.speed, request.host
    if speed.host is not None or request.stock_reason is not None or target.probes is None or target.costs is None:
        return request
    if profile is None or profile not in target.profiles:
        return request
    if not profile.shifted or pays(target, profile, speed.threads):
        return request
    profile = replace(profile, shifted={})
    choices = {**request.choices, "host": OptionChoice(None, "host default")}
    return replace(
        request, target=replace(target, costs=costs_for(target.costs, profile, speed)), host=profile, choices=choices
    )


def _named(target: Target, given: str | os.PathLike[str]) -> HostProfile:
    names = {profile.name: profile for profile in target.profiles}
    word = os.fspath(given)
    if word in names:
        return names[word]
    if not os.path.exists(word):
        raise OptionError(
            f"host={word!r} is neither a profile of target '{target.name}' nor a file.{did_you_mean(word, names)}",
            where="host",
            fix=f"one of {', '.join(names)}, or a file that kenosis-ort profile wrote",
        )
    return HostProfile.load(word)


def host_label(request: Request) -> str:
    """Machine that a file is laid out for, as the report names it; empty where no costs were asked for."""
    profile, speed = request.host, request.speed
    if profile is None or speed.tune == "off" or request.stock_reason is not None:
        return ""
    if speed.host is not None:
        how = "as asked for"
    elif not profile.is_of_class(processor()[1]):
        return f"this machine, whose class was not measured: by the ratios of {profile.machine}, without times"
    else:
        shipped = {p.name: p for p in request.target.profiles}.get(profile.name)
        how = "measured here" if shipped is None else "the profile nearest to this machine"
        if shipped is not None and profile != shipped:
            how += ", but for its second kernel of Conv, which was run here and is no faster"
    return f"'{profile.name}' ({profile.machine}), {how}"


def elsewhere(view: GraphView, plan: PlacementPlan, target: Target) -> Iterator[str]:
    """Yields a note for each known machine on which the choice of kernels costs speed, by estimate.

    Args:
        view: The prepared model.
        plan: Its placement.
        target: With the costs of the machine that the file is made for.
    """
    shifted = {d.edge.consumer for d in plan.decisions if d.zero_point}
    if not shifted or target.costs is None:
        return
    plain = replace(plan, decisions=tuple(replace(d, zero_point=0) for d in plan.decisions))
    yield (
        f"{len(shifted)} Convs have weights of zero point -1, which select a faster kernel on '{target.costs.host}', "
        "with the same results everywhere. For another machine pass its profile as host, or quantize there."
    )
    for profile in target.profiles:
        if profile.name != target.costs.host:
            costs = target.costs.on(profile)
            there = estimate(view, plain, costs).planned_us / estimate(view, plan, costs).planned_us
            if there < _SLOWER:
                yield f"On '{profile.name}' they make it slower: {there:.2f}x of a file laid out for it, by estimate."
