"""The report as one HTML page (`render_html`) and as a fragment for notebooks (`render_notebook`)."""

from kenosis_ort.report.html.page import render_html, render_notebook

__all__ = ["render_html", "render_notebook"]
