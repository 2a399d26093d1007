"""What mkdocs calls while it builds the site: puts the generated parts into the pages."""

from __future__ import annotations

from typing import Any

from generate import fill  # mkdocs puts this file's folder on the path


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Returns a page's Markdown with its generated parts."""
    return fill(markdown)
