"""The report of one quantization: its facts as text, as an HTML page, and as a recipe file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from kenosis_ort.option_types import IN_FILE, RecipeFile, value_of
from kenosis_ort.options import Stages
from kenosis_ort.passes.recipe import Recipe
from kenosis_ort.report.facts import ReportFacts
from kenosis_ort.storage.data import plain
from kenosis_ort.storage.writing import write_text
from kenosis_ort.targets import DEFAULT_TARGET

HOST_CHOICES: Final = ("activation_type", "weight_type", "per_channel", "reduce_range")
"""Options that this machine decides where none is given."""
_USUAL: Final[Mapping[str, Any]] = {
    "quant_format": "QDQ",
    "format": "qdq",
    "protect_outputs": "auto",
    "target": DEFAULT_TARGET,
    "rewrites": True,
    "stages": dict.fromkeys(Stages.__dataclass_fields__, True),
}


class QuantizationReport(ReportFacts):
    """Result of `quantize_static`: decisions with reasons, and the kernels that the runtime uses.

    Its attributes are those of `kenosis_ort.report.facts.ReportFacts`.
    """

    def __str__(self) -> str:
        from kenosis_ort.report.text import render_report, to_text  # loads rich

        return to_text(render_report(self))

    def _repr_html_(self) -> str:
        from kenosis_ort.report.html.page import render_notebook

        return render_notebook(self)

    def to_html(self) -> str:
        """The report as one HTML page that needs no network and no other file."""
        from kenosis_ort.report.html.page import render_html

        return render_html(self, self.recipe_file().to_toml())

    def recipe_file(self) -> RecipeFile:
        """Recipe file that makes the same model again from the same data: the recipe, and the options of this call.

        What this machine decided is fixed; where nothing was timed, nothing is timed the next time either.
        """
        options: dict[str, Any] = {}
        extra: dict[str, Any] = {}
        for name, (value, source) in self.options.items():
            key = name.removeprefix("extra_options.")
            if key != name:
                extra.update({key: value} if source == "caller" else {})
            elif name in IN_FILE and (source == "caller" or name in HOST_CHOICES) and plain(value) != _USUAL.get(name):
                options[name] = value_of(name, value)
        if self.recipe is None or self.recipe.speed is None:
            options["promise"] = False
        if extra:
            options["extra_options"] = extra
        host = self.options.get("host")
        by_machine = None if host is None or host.source == "caller" else host.value
        return RecipeFile(self.recipe or Recipe(), options, host=by_machine)

    def save_recipe(self, path: str | os.PathLike[str]) -> None:
        """Writes `recipe_file`, which ``quantize_static(..., recipe=path)`` reads.

        Raises:
            OutputError: The file cannot be written.
        """
        self.recipe_file().save(path)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Writes `to_html` to a file.

        Raises:
            OutputError: The file cannot be written, or another one lies there that is no page.
        """
        write_text(path, self.to_html(), "the report")
