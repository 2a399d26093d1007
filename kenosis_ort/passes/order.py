"""The passes in the order in which they run, those from outside among them."""

from __future__ import annotations

from dataclasses import fields
from typing import Final

from kenosis_ort.errors import OptionError, did_you_mean
from kenosis_ort.passes.choose_ranges import RangeChoice
from kenosis_ort.passes.contract import Pass, WeightPass
from kenosis_ort.passes.correct_biases import BiasCorrection
from kenosis_ort.passes.equalize_layers import Equalization
from kenosis_ort.passes.leave_float import MixedPrecision
from kenosis_ort.passes.recipe import FURTHER, PassSettings, Recipe
from kenosis_ort.passes.round_weights import LearnedRounding
from kenosis_ort.passes.scale_rows import RowScales
from kenosis_ort.passes.smooth import SmoothQuant

PASSES: Final[tuple[type[Pass], ...]] = (
    RowScales,
    Equalization,
    SmoothQuant,
    BiasCorrection,
    RangeChoice,
    LearnedRounding,
    MixedPrecision,
)
"""Those that come with the package, those that change weights first; their settings are fields of `Recipe` itself."""

WEIGHT_PASSES: Final = tuple(kind() for kind in PASSES if issubclass(kind, WeightPass))

_order: list[type[Pass]] = [*PASSES]


def register(kind: type[Pass], *, before: str = MixedPrecision.name) -> None:
    """Makes a pass known, so that recipes may hold it and recipe files may name it.

    It runs where a recipe asks for it: ``Recipe(passes=(MyPass(),))``, or a table ``[recipe.my_pass]`` in a file.

    Args:
        kind: The pass. One of the same name and class, as a notebook's cell makes it again, takes the place of the
            former one.
        before: Name of the pass before which it runs, among those on the same side of calibration.

    Raises:
        OptionError: Its name is taken or no identifier, or there is no pass ``before`` which it could run.
    """
    name = kind.name
    taken = {other.name: other for other in _order}
    settings = {entry.name for other in PASSES for entry in fields(other)}
    known = taken.get(name)
    is_again = known is not None and known not in PASSES and known.__qualname__ == kind.__qualname__
    if not name.isidentifier() or name in settings or (known is not None and not is_again):
        raise OptionError(
            f"a pass cannot be named '{name}'", where="register", fix="name it with an identifier that is not taken"
        )
    if before not in taken:
        hint = did_you_mean(before, taken)
        raise OptionError(f"there is no pass '{before}'.{hint}", where="register", fix=f"one of {[*taken]}")
    if known is not None:
        _order.remove(known)
    _order.insert([other.name for other in _order].index(before), kind)
    FURTHER.clear()
    FURTHER.update({other.name: other for other in _order if other not in PASSES})


def registered() -> dict[str, type[PassSettings]]:
    """The passes that were registered, by name."""
    return dict(FURTHER)


def passes_of(recipe: Recipe) -> tuple[Pass, ...]:
    """The passes that a recipe asks for, in order."""
    own = {type(each): each for each in recipe.passes}
    found = (kind.of(recipe) if kind in PASSES else own.get(kind) for kind in _order)
    return tuple(each for each in found if isinstance(each, Pass) and each.wanted)
