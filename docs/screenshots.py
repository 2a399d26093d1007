"""Pictures of the report for the documentation, in light and dark.

    python docs/screenshots.py                       # quantizes the shipped digits net and takes pictures of its report
    python docs/screenshots.py --all --out pictures  # every section, not only those that the documentation shows

Needs playwright and pillow (``pip install playwright pillow``) and a Chromium: one on the PATH, or named by
``--browser``.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from kenosis_ort.report.quantization_report import QuantizationReport

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SCALE = 2
MARGIN = 24
COLOURS = 128  # a page of text and plots has few; the files are a third of the size
SCHEMES = ("light", "dark")
SHOWN = {"page": SCHEMES, "graph": SCHEMES, "signal": SCHEMES[:1], "speed": SCHEMES[:1]}
"""The sections that the documentation shows, and in which colours."""


def main(argv: list[str] | None = None) -> int:
    """Takes the pictures; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images", help="folder of the pictures")
    parser.add_argument("--node", help="part of the name of the node whose details are shown")
    parser.add_argument("--all", action="store_true", help="every section in both colours")
    parser.add_argument("--browser", help="a Chromium; by default one on the PATH")
    arguments = parser.parse_args(argv)
    executable = arguments.browser or next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if executable is None:
        parser.error("there is no Chromium on the PATH; name one with --browser")
    report = _digits()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = Path(folder) / "report.html"
        _without_folders(report).save_html(page_file)
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        for scheme in SCHEMES:
            context = browser.new_context(
                viewport={"width": 1360, "height": 900},
                device_scale_factor=SCALE,
                color_scheme=scheme,
                reduced_motion="reduce",
            )
            page = context.new_page()
            page.goto(page_file.as_uri())
            for name, take in _pictures(arguments.node or _telling_node(report)).items():
                if arguments.all or scheme in SHOWN.get(name, ()):
                    take(page)
                    page.wait_for_timeout(150)
                    _save(page, name, arguments.out / f"report-{name}-{scheme}.png")
            context.close()
        browser.close()
    return 0


def _pictures(node: str) -> dict[str, Callable[[Page], Any]]:
    """Returns what to do before each picture, by the section that it shows; ``page`` is all that fits the screen."""

    def details(page: Page) -> None:
        page.fill("#graph-search", node)
        page.press("#graph-search", "Enter")
        page.fill("#graph-search", "")
        page.evaluate("document.activeElement.blur()")

    return {
        "page": lambda page: page.evaluate("scrollTo(0, 0)"),
        "graph": details,
        "signal": lambda _: None,
        "ranges": lambda _: None,
        "speed": lambda _: None,
        "decisions": lambda _: None,
    }


def _save(page: Page, section: str, path: Path) -> None:
    if section == "page":
        page.screenshot(path=path)
        _shrink(path)
        return
    box = page.locator(f"#{section}").bounding_box() if page.locator(f"#{section}").count() else None
    if box is not None:
        top = box["y"] + page.evaluate("scrollY")
        clip = {
            "x": box["x"] - MARGIN,
            "y": top - MARGIN,
            "width": box["width"] + 2 * MARGIN,
            "height": box["height"] + 2 * MARGIN,
        }
        page.screenshot(path=path, clip=clip, full_page=True)
        _shrink(path)


def _shrink(path: Path) -> None:
    """Leaves a picture its most frequent colours."""
    with Image.open(path) as picture:
        few = picture.convert("RGB").quantize(COLOURS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


def _telling_node(report: QuantizationReport) -> str:
    """Returns the name of the integer node whose output has the least signal; it has most to tell."""
    integer = set(report.plan.integer_nodes())
    layers = [] if report.evidence is None else [layer for layer in report.evidence.layers if layer.node in integer]
    return min(layers, key=lambda layer: layer.sqnr_db).node if layers else next(iter(integer), "")


def _digits() -> QuantizationReport:
    """Returns the report of the shipped digits net with everything measured."""
    from kenosis_ort import ArrayReader, quantize_static
    from kenosis_ort.demo import INPUT_NAME, load_digits, model_path

    with tempfile.TemporaryDirectory() as folder, model_path() as model:
        out = Path(folder) / "digits_kenosis.onnx"
        return quantize_static(model, out, ArrayReader({INPUT_NAME: load_digits().calibration}), evidence="full")


def _without_folders(report: QuantizationReport) -> QuantizationReport:
    """Returns the report with file names in place of paths, which differ from machine to machine."""
    return replace(report, model_input=Path(report.model_input).name, model_output=Path(report.model_output).name)


if __name__ == "__main__":
    sys.exit(main())
