"""What runs each layer and how long: kernel, path inside it, time by the host profile and, on request, as measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kenosis_ort.report.evidence import OpTimes
from kenosis_ort.targets.proof import FusionReport

if TYPE_CHECKING:
    from rich.console import RenderableType

_RUNNING = ("integer", "float")


@dataclass(frozen=True)
class LayerTime:
    """One layer of the delivered model.

    Attributes:
        node: Its name; empty for all that is between layers: Q, DQ, changes of layout.
        op_type: Its operator.
        kernel: What runs it, e.g. ``com.microsoft.QLinearConv``; empty where the runtime was not asked.
        path: Which way inside the kernel the stored weights select; empty where there is one only.
        estimated_us: Microseconds by the profile of the machine that the file is laid out for; None where not known.
        measured_us: Microseconds by the runtime's profiler, here; None where nothing was measured.
    """

    node: str
    op_type: str
    kernel: str = ""
    path: str = ""
    estimated_us: float | None = None
    measured_us: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON; `LayerTime(**data)` reads it."""
        return asdict(self)


def layer_times(
    fusion: FusionReport | None,
    estimated: Mapping[str, tuple[str, float]],
    between_us: float | None,
    times: OpTimes | None,
) -> tuple[LayerTime, ...]:
    """Returns the layers that have a kernel of their own, in the model's order, and what is between them.

    Args:
        fusion: What the runtime made of the model; None where it was not asked.
        estimated: Operator and microseconds by node; empty without an estimate.
        between_us: Estimated microseconds of what is between layers; None without an estimate.
        times: Measured times; None where nothing was measured.
    """
    running = [] if fusion is None else [k for k in fusion.kernels if k.status in _RUNNING]
    layers = [LayerTime(k.node, k.op_type, k.kernel, k.path) for k in running]
    layers = layers or [LayerTime(name, op_type) for name, (op_type, us) in estimated.items() if us]
    names = {layer.node for layer in layers}
    measured: dict[str, float] = {}
    for kernel in () if times is None else times.after:
        name = kernel.node if kernel.node in names else ""
        measured[name] = measured.get(name, 0.0) + 1e3 * kernel.milliseconds
    found = [
        LayerTime(x.node, x.op_type, x.kernel, x.path, _us(estimated, x.node), measured.get(x.node)) for x in layers
    ]
    rest = measured.get("")
    return (*found, LayerTime("", "between layers", "", "", between_us, rest)) if between_us or rest else tuple(found)


def _us(estimated: Mapping[str, tuple[str, float]], node: str) -> float | None:
    return estimated[node][1] if node in estimated else None


def kernels_in_words(layers: Iterable[LayerTime]) -> str:
    """Returns how many Convs take which path, and the time of a run by estimate and as measured; empty without."""
    layers = tuple(layers)
    paths = Counter(layer.path for layer in layers if layer.path)
    said = [f"{count} on the {path} kernel" for path, count in paths.most_common()]
    for how, times in (
        ("estimated", [x.estimated_us for x in layers]),
        ("measured", [x.measured_us for x in layers]),
    ):
        known = [us for us in times if us is not None]
        said += [f"{how} {sum(known):,.0f} us a run"] if known else []
    return f"{'Convs: ' if paths else ''}{', '.join(said)}"


def render_layers(layers: Sequence[LayerTime]) -> RenderableType:
    """Returns the layers as a table for a rich console."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, title="Layers", title_justify="left", title_style="bold")
    table.add_column("layer", overflow="fold")
    for heading in ("operator", "kernel", "path"):
        table.add_column(heading)
    for heading in ("estimated", "measured"):
        table.add_column(heading, justify="right", no_wrap=True)
    for x in layers:
        names = (Text(text) for text in (x.node, x.op_type, x.kernel.rpartition(".")[2], x.path))
        table.add_row(*names, *(_shown(us) for us in (x.estimated_us, x.measured_us)))
    return table


def _shown(us: float | None) -> str:
    return "" if us is None else f"{us:,.1f} us"
