"""The table of a sweep: for people, as JSON, and as one HTML page that fetches nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import jinja2
from markupsafe import Markup

from kenosis_ort import __version__
from kenosis_ort.cli.fleet.run import Row
from kenosis_ort.errors import printable
from kenosis_ort.report.text import format_bytes
from kenosis_ort.storage.data import to_data as plain_data

if TYPE_CHECKING:
    from rich.table import Table

_COLUMNS: Final = ("model", "dB", "speed", "size", "seconds", "verdict")
_PAGE: Final = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>Sweep</title>
<style>
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
th, td { border-bottom: 1px solid rgba(128, 128, 128, 0.4); padding: 6px 10px; text-align: left; vertical-align: top }
td.n, th.n { font-variant-numeric: tabular-nums; text-align: right; white-space: nowrap }
tr.failed td { color: #b3261e }
@media (prefers-color-scheme: dark) { tr.failed td { color: #f2b8b5 } }
</style>
</head>
<body>
<h1>{{ rows|length }} models</h1>
<p>{{ summary }}</p>
<table>
<thead><tr>
{% for name in columns %}<th{{ number if loop.index0 in numbers }} scope="col">{{ name }}</th>{% endfor %}

</tr></thead>
<tbody>
{% for cells, failed in rows %}
<tr{{ ' class="failed"'|safe if failed }}>
{% for cell in cells %}<td{{ number if loop.index0 in numbers }}>{{ cell }}</td>{% endfor %}

</tr>
{% endfor %}
</tbody>
</table>
<p>kenosis-ort {{ version }}</p>
</body>
</html>
"""


def to_data(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the table as plain data for JSON."""
    models = plain_data(list(rows))
    return {"schema": 1, "version": __version__, "failed": sum(row.failed for row in rows), "models": models}


def summary(rows: Sequence[Row]) -> str:
    """Returns the outcome in one sentence."""
    failed, earlier = sum(row.failed for row in rows), sum(row.earlier for row in rows)
    parts = [f"{len(rows) - failed} of {len(rows)} models quantized"]
    parts += [f"{earlier} of them by an earlier run"] if earlier else []
    parts += [f"{failed} failed"] if failed else []
    return ", ".join(parts) + "."


def cells(row: Row) -> tuple[str, ...]:
    """Returns a row as text."""
    if row.failed:
        return (row.name, "", "", "", f"{row.seconds:.1f}", f"failed: {row.verdict}")
    return (
        row.name,
        "" if row.sqnr_db is None else f"{row.sqnr_db:.1f}",
        "" if row.speed is None else f"{row.speed:.2f}x",
        f"{format_bytes(row.size_before)} to {format_bytes(row.size_after)}",
        f"{row.seconds:.1f}" + (" before" if row.earlier else ""),
        row.verdict,
    )


def render(rows: Sequence[Row]) -> Table:
    """Returns the table for a terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=summary(rows), title_justify="left", box=None, pad_edge=False)
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in ("model", "verdict") else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in cells(row)), style="red" if row.failed else None)
    return table


def to_html(rows: Sequence[Row]) -> str:
    """Returns the table as a page; all names are escaped."""
    template = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(_PAGE)
    shown = [([printable(cell) for cell in cells(row)], row.failed) for row in rows]
    return template.render(
        rows=shown,
        summary=summary(rows),
        columns=_COLUMNS,
        version=__version__,
        number=Markup(' class="n"'),
        numbers=(1, 2, 3, 4),
    )
