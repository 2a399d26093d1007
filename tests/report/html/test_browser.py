"""The page in a real browser, headless; skipped where there is none."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.report.html.test_page import EVIL, evil_report
from tests.report.samples import evidence, full_report, fusion, kernel, plan

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
DEEP = [f"/layer.{i // 4}/{('conv', 'relu', 'conv', 'relu')[i % 4]}_{i % 4}" for i in range(240)]

pytestmark = pytest.mark.browser


def _executable() -> str | None:
    named = os.environ.get("KENOSIS_TEST_BROWSER")
    return named or next((found for name in BROWSERS if (found := shutil.which(name))), None)


@pytest.fixture(scope="module")
def browser() -> Any:
    executable = _executable()
    if executable is None:
        pytest.skip("no Chromium is installed")
    with api.sync_playwright() as playwright:
        # A sandbox needs privileges that containers lack; the page is our own.
        opened = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield opened
        opened.close()


class Opened:
    """A page with a record of what it asked for and complained about."""

    def __init__(self, browser: Any, path: Path, **context: Any) -> None:
        self.page = browser.new_context(viewport={"width": 1280, "height": 900}, **context).new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.complaints.append(dialog.message), dialog.dismiss()))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.goto(path.as_uri())
        self.page.wait_for_function("document.getElementById('graph-canvas').width > 300")

    def panel(self) -> str:
        return str(self.page.inner_text("#graph-panel"))

    def close(self) -> None:
        assert self.requests == [self.page.url.split("#")[0]]
        assert self.complaints == []
        self.page.context.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder: Path = tmp_path_factory.mktemp("pages")
    deep = full_report(plan=plan(*DEEP), fusion=fusion(*(kernel(name) for name in DEEP)), evidence=evidence(*DEEP))
    found = {}
    for name, report in {"small": full_report(), "deep": deep, "evil": evil_report()}.items():
        found[name] = folder / f"{name}.html"
        report.save_html(found[name])
    return found


@pytest.mark.parametrize("name", ["small", "deep", "evil"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_opens_without_complaints_or_requests(browser, files, name: str, scheme: str, tmp_path: Path):
    opened = Opened(browser, files[name], color_scheme=scheme)
    opened.page.screenshot(path=tmp_path / "page.png", full_page=True)
    assert (tmp_path / "page.png").stat().st_size > 10_000
    opened.close()


def test_a_click_on_a_node_tells_about_it(browser, files):
    opened = Opened(browser, files["small"], reduced_motion="reduce")
    opened.page.get_by_role("button", name="stem_relu").first.click()
    opened.page.keyboard.press("Escape")
    box = opened.page.locator("#graph-canvas").bounding_box()
    # The picture is centred; a chain of three nodes has its second in the middle.
    opened.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert "stem_relu" in opened.panel()
    opened.close()


def test_a_selected_node_shows_decision_kernel_ranges_and_histogram(browser, files):
    opened = Opened(browser, files["small"])
    opened.page.locator("#decision-table").get_by_role("button", name="stem", exact=True).click()
    text = opened.panel()
    for expected in ("stem", "Because", "rule", "com.microsoft.QLinearConv", "40.0 dB", "represented −0.5 to 1.5"):
        assert expected in text, text
    assert opened.page.locator("#graph-panel svg .bars").count() >= 1
    assert "stem" in opened.page.inner_text("#graph-live")
    opened.close()


def test_the_keyboard_walks_along_the_edges(browser, files):
    opened = Opened(browser, files["small"], reduced_motion="reduce")
    opened.page.focus("#graph-canvas")
    seen = []
    for _ in range(5):
        opened.page.keyboard.press("ArrowDown")
        seen.append(opened.page.inner_text("#graph-panel h3"))
    assert seen == ["image", "stem", "stem_relu", "head", "head.out"]
    opened.page.keyboard.press("ArrowUp")
    assert opened.page.inner_text("#graph-panel h3") == "head"
    opened.page.keyboard.press("Enter")
    assert opened.page.evaluate("document.activeElement.id") == "graph-panel"
    opened.page.focus("#graph-canvas")
    opened.page.keyboard.press("Escape")
    assert "No node selected" in opened.panel()
    before = opened.page.inner_text("#zoom-level")
    opened.page.keyboard.press("-")
    opened.page.wait_for_function(f"document.getElementById('zoom-level').textContent !== {before!r}")
    opened.close()


def test_a_deep_net_is_first_seen_as_blocks_that_open(browser, files):
    opened = Opened(browser, files["deep"], reduced_motion="reduce")
    assert opened.page.get_by_role("button", name="Repeated blocks").get_attribute("aria-pressed") == "true"
    opened.page.focus("#graph-canvas")
    opened.page.keyboard.press("ArrowDown")
    opened.page.keyboard.press("ArrowDown")
    assert "Block 1 of 60" in opened.panel()
    opened.page.get_by_role("button", name="Show its 4 nodes").click()
    assert opened.page.get_by_role("button", name="All nodes").get_attribute("aria-pressed") == "true"
    assert "/layer.0/conv_0" in opened.panel()
    opened.page.fill("#graph-search", "layer.33/")
    assert opened.page.inner_text("#graph-matches").startswith("4 found")
    opened.page.press("#graph-search", "Enter")
    assert "/layer.33/conv_0" in opened.panel()
    opened.close()


def test_the_table_sorts_and_searches(browser, files):
    opened = Opened(browser, files["small"])
    rows = opened.page.locator("#decision-table tbody tr")
    opened.page.get_by_role("button", name="Node", exact=True).click()
    assert rows.first.locator("th").inner_text() == "head"
    opened.page.get_by_role("button", name="Signal", exact=True).click()
    opened.page.get_by_role("button", name="Signal", exact=True).click()
    assert rows.first.locator("th").inner_text() == "stem"
    opened.page.fill("#decision-search", "no q on its output")
    assert opened.page.inner_text("#decision-count") == "1 of 3 nodes"
    opened.page.fill("#decision-search", "")
    opened.page.select_option("#decision-region", "fused")
    assert opened.page.inner_text("#decision-count") == "1 of 3 nodes"
    opened.close()


def test_names_that_try_to_be_markup_are_shown_as_they_are(browser, files):
    opened = Opened(browser, files["evil"])
    opened.page.fill("#graph-search", "alert")
    opened.page.press("#graph-search", "Enter")
    assert EVIL in opened.panel()
    opened.close()


def test_it_reads_on_a_narrow_screen(browser, files):
    opened = Opened(browser, files["small"])
    opened.page.set_viewport_size({"width": 390, "height": 800})
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390
    opened.close()
