"""Defaults that target, format and machine set, and options that they refuse.

Bits and the cache of a decoder are checked against the format; the profile whose costs decide is that of the machine
which a file is laid out for.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import onnxruntime as ort

from kenosis_ort import options
from kenosis_ort.errors import OptionError, did_you_mean
from kenosis_ort.flow.request import Request, not_taken
from kenosis_ort.graph.view import GraphView
from kenosis_ort.options import BYTE, Widths
from kenosis_ort.passes.recipe import Recipe
from kenosis_ort.placement.cost import NetCosts
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.quantizer import stock
from kenosis_ort.runtime.machine import ARM, machine, processor_class
from kenosis_ort.targets import DataTypes, Target
from kenosis_ort.targets.profile import CostTable, HostProfile, cached_profile, nearest
from kenosis_ort.tuning.measure import pays


def serve(
    target: Target, types: DataTypes, activation: stock.QuantType, weight: stock.QuantType, given: Mapping[str, Any]
) -> dict[str, Any]:
    """The extra options that the target sets where the caller gave none.

    Args:
        target: The target.
        types: Its data types on the machine at hand.
        activation: Data type of activations.
        weight: Data type of weights.
        given: The caller's extra options.

    Raises:
        OptionError: The target cannot serve something that the caller asks for.
    """
    kinds = ("activation_type", activation, types.activations), ("weight_type", weight, types.weights)
    for option, kind, taken in kinds:
        if types.only_these and kind.tensor_type not in taken:
            raise not_taken(f"{option}=QuantType.{kind.name}", option, target, types, taken)
    symmetric = {"ActivationSymmetric": types.symmetric, "WeightSymmetric": types.only_these and types.weight_symmetric}
    for option, is_wanted in symmetric.items():
        if is_wanted and given.get(option) is False:
            raise OptionError(
                f"target '{target.name}' takes zero point 0 alone, and {option} is False",
                where="extra_options",
                fix=f"leave out {option}",
            )
    own: dict[str, Any] = {"ActivationSymmetric": True} if types.symmetric else {}
    own |= {"QuantizeBias": False} if target.bias == "float" else {}
    return {key: value for key, value in own.items() if key not in given}


def chosen_format(given: options.Format | None, quant_format: Any) -> options.Format:
    """The format that the caller asked for, by our option or by stock's.

    Raises:
        OptionError: The two contradict each other.
    """
    if quant_format is not stock.QuantFormat.QOperator:
        return given or "qdq"
    if given not in (None, *options.OPERATOR_FORMATS):
        raise OptionError(
            f"quant_format=QuantFormat.QOperator contradicts format={given!r}",
            where="format",
            fix="leave out one of them",
        )
    return given or "qop"


def with_bits(recipe: Recipe, weights: int | None, activations: int | None) -> tuple[Recipe, Widths]:
    """The recipe with the caller's bits, and these.

    Learned rounding is tried where weights have fewer bits than 8: there the rounding of each counts.
    """
    recipe = replace(
        recipe,
        weight_bits=recipe.weight_bits if weights is None else weights,
        activation_bits=recipe.activation_bits if activations is None else activations,
    )
    by_node = {name: (entry.get("weights"), entry.get("activations")) for name, entry in recipe.bits.items()}
    widths = Widths(recipe.weight_bits, recipe.activation_bits, by_node)
    if recipe.name == "fast" and min([recipe.weight_bits, *(w for w, _ in by_node.values() if w)]) < BYTE:
        recipe = replace(recipe, rounding="learned")
    return recipe, widths


def check_combinations(request: Request) -> None:
    """Checks options against each other: format, target, numbers of bits, stock's placement, the cache of a decoder.

    Raises:
        OptionError: Two contradict each other.
    """
    _check_format(request)
    _check_widths(request)
    reason = request.stock_reason
    for option, where, is_asked, fix in (
        ("fewer bits than 8 go", "weight_bits", not request.widths.are_bytes, "leave the bits at 8"),
        ("SmoothQuant goes", "extra_options", request.extra_options.get("SmoothQuant"), "leave out SmoothQuant"),
    ):
        if reason is not None and is_asked:
            raise OptionError(
                f"{option} with kenosis-ort's own placement, and {reason}",
                where=where,
                fix=f"{fix}, or leave out the option that dictates the placement",
            )
    if request.kv_cache is not None:
        _check_kv_cache(request.kv_cache, request)


def _check_format(request: Request) -> None:
    """Checks that the format can say it, and that the target reads it; formats for other tools are not for a target."""
    target, written = request.target, request.format
    by_node = (bits for _, bits in request.widths.by_node.values())
    narrow = [bits for bits in (request.widths.activations, *by_node) if bits is not None and bits < BYTE]
    if narrow and written not in options.NARROW_FORMATS:
        raise OptionError(
            f"format='{written}' has activations of 8 bits, and activation_bits asks for {min(narrow)}",
            where="activation_bits",
            fix="pass format='qcdq' (the runtime's kernels), 'qop-clip' or 'qonnx'; weight_bits alone goes with any",
        )
    if written in options.EXPORT_FORMATS:
        return
    if written not in target.formats:
        raise OptionError(
            f"target '{target.name}' does not read files in format '{written}'",
            where="format",
            fix=f"one of {', '.join((*target.formats, *options.EXPORT_FORMATS))}",
        )
    if written in options.OPERATOR_FORMATS and request.per_channel and target.operators_per_tensor:
        raise OptionError(
            f"target '{target.name}' computes something else, without a word, of a QLinearConv with scales by channel",
            where="format, per_channel",
            fix="pass per_channel=False, or format='qdq'",
        )


_PLAIN: Final[Mapping[str, tuple[Any, ...]]] = {
    "ActivationSymmetric": (False, None),
    "WeightSymmetric": (True, None),
    "MinimumRealRange": (0, None),
    "ActivationRestrictedAsymmetric": (False, None),
    "BlockSize": (0, None),
}
"""The values of options that go with fewer bits than 8."""


def _check_widths(request: Request) -> None:
    """Checks that no other option sets numbers of bits below 8."""
    if request.widths.are_bytes:
        return
    eight, given = (stock.QuantType.QUInt8, stock.QuantType.QInt8), request.given_extra_options
    types = ("weight_type", request.weight_type, eight[1:]), ("activation_type", request.activation_type, eight)
    against = [f"{name}=QuantType.{kind.name}" for name, kind, taken in types if kind not in taken]
    against += [f"extra_options['{key}']" for key, plain in _PLAIN.items() if given.get(key) not in plain]
    if against:
        raise OptionError(
            f"fewer bits than 8 are bytes of a smaller range, which {against[-1]} contradicts",
            where="weight_bits, activation_bits",
            fix="leave one of them out",
        )


def _check_kv_cache(source: str | os.PathLike[str], request: Request) -> None:
    """Checks that it is a word or a file, and goes with the format and the recipe."""
    if request.format not in ("qdq", "qcdq"):
        raise OptionError(
            f"kv_cache goes with Q and DQ in the file, and format='{request.format}' has others",
            where="kv_cache",
            fix="format='qdq' or 'qcdq'",
        )
    if request.recipe.weight_only:
        raise OptionError(
            "kv_cache needs ranges of the cache, and a recipe of weights alone finds none",
            where="kv_cache",
            fix="another recipe",
        )
    if source != options.INT8_CACHE and not Path(source).is_file():
        raise OptionError(
            f"kv_cache={os.fspath(source)!r} is neither '{options.INT8_CACHE}' nor a file",
            where="kv_cache",
            fix=f"kv_cache='{options.INT8_CACHE}', or the path of a file made with it",
        )


_SLOWER: Final = 0.95


def runtime_version() -> str:
    """The installed runtime as profiles name it."""
    return f"onnxruntime {ort.__version__}"


def profile_for(target: Target, speed: options.Speed, recorded: str | None = None) -> HostProfile | None:
    """The profile of the machine that a file is made for.

    Where the caller says nothing it is the one measured on this machine, else the target's nearest one.

    Args:
        target: Whose runtime it is; None is returned where it has no profiles.
        speed: What the caller says.
        recorded: The name of the one to take where the caller says nothing, if it comes with the target.

    Raises:
        OptionError: There is no such profile, or it is another target's or of another architecture.
    """
    given = speed.host
    if target.costs is None or not target.profiles:
        if given is None:
            return None
        raise OptionError(f"target '{target.name}' has no costs of kernels", where="host", fix="leave host out")
    known = {profile.name: profile for profile in target.profiles}
    if given is None and recorded in known:
        return known[recorded]
    if given is None:
        own = cached_profile(target.name, runtime_version(), speed.threads)
        usable = own is not None and own.kernels.keys() >= target.costs.profile.kernels.keys()
        if own is not None and usable:
            return own
        return nearest(target.profiles, machine().features, saturates=target.data_types().saturates)
    profile = given if isinstance(given, HostProfile) else _named(target, given)
    lacking = ", ".join(sorted(target.costs.profile.kernels.keys() - profile.kernels.keys())[:5])
    features = machine().features
    other, here = ("Arm" if processor_class(f) == ARM else "x86-64" for f in (profile.features, features))
    for is_wrong, what, fix in (
        (
            profile.target != target.name,
            f"is of target '{profile.target}'",
            f"target='{profile.target}', or a profile of '{target.name}'",
        ),
        (lacking, f"lacks kernels: {lacking}", "measure it with this version: kenosis-ort profile"),
        (
            features and not profile.features,
            "has an empty list of features: nothing says which processor it is of",
            "measure it on Linux, whose system lists them, or name a profile that comes with the target",
        ),
        (
            features and other != here,  # which takes other data types than those that this machine decides
            f"is of an {other} processor, and data types follow this one, of {here}",
            f"a profile of an {here} processor, or leave host out",
        ),
    ):
        if is_wrong:
            raise OptionError(f"host profile '{profile.name}' {what}", where="host", fix=fix)
    return profile


def costs_for(costs: CostTable, profile: HostProfile, speed: options.Speed) -> CostTable:
    """Costs on the machine that a file is made for; times of another class of processors are not shown.

    Args:
        costs: Of the target.
        profile: Of the machine.
        speed: What the caller says.
    """
    return profile.table(costs, shows_times=speed.host is not None or profile.is_of_class(machine().features))


def with_own_profile(request: Request) -> Request:
    """The request with this machine's own profile, where the caller names no machine and none was measured.

    It is the nearest profile, less its second kernel if that is no faster here.

    Args:
        request: Of a call.
    """
    target, speed, profile = request.target, request.speed, request.host
    if target.hooks.probes is None or target.costs is None:
        return request
    if request.stock_reason is not None or profile is None or request.choices["host"].source != "host default":
        return request
    if profile not in target.profiles or not profile.shifted or pays(target, profile, speed.threads):
        return request
    profile = replace(profile, shifted={})
    choices = {**request.choices, "host": options.OptionChoice(None, "host default")}
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
    here = target.costs.profile
    plain = replace(plan, decisions=tuple(replace(d, zero_point=0) for d in plan.decisions))
    yield (
        f"{len(shifted)} Convs have weights of zero point -1, which select a faster kernel on '{here.name}', "
        "with the same results everywhere. For another machine pass its profile as host, or quantize there."
    )
    for profile in target.profiles:
        if profile.name != here.name:
            net = NetCosts(view, profile.table(target.costs))
            there = net.estimate(plain).planned_us / net.estimate(plan).planned_us
            if there < _SLOWER:
                yield f"On '{profile.name}' they make it slower: {there:.2f}x of a file laid out for it, by estimate."
