"""The page in a real browser, headless; skipped where there is none."""

import os
import shutil

import pytest

from tests.report.html.test_page import EVIL, evil_report
from tests.report.samples import evidence, full_report, fusion, kernel, plan

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
DEEP = [f"/layer.{i // 4}/{('conv', 'relu', 'conv', 'relu')[i % 4]}_{i % 4}" for i in range(240)]

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser():
    executable = os.environ.get("KENOSIS_TEST_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        pytest.skip("no Chromium is installed")
    with api.sync_playwright() as playwright:
        # A sandbox needs privileges that containers lack; the page is our own.
        yield playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    deep = full_report(plan=plan(*DEEP), fusion=fusion(*(kernel(name) for name in DEEP)), evidence=evidence(*DEEP))
    found = {}
    for name, report in {"small": full_report(), "deep": deep, "evil": evil_report()}.items():
        found[name] = folder / f"{name}.html"
        report.save_html(found[name])
    return found


@pytest.fixture
def open_page(browser, files):
    """Function that opens a page; until the test ends it asks for nothing beside itself and complains of nothing."""
    opened, asked, complaints = list[str](), list[str](), list[str]()

    def open_page(name="small", **context):
        page = browser.new_context(viewport={"width": 1280, "height": 900}, **context).new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
        page.on("console", lambda message: complaints.append(message.text))
        opened.append(files[name].as_uri())
        page.goto(opened[-1])
        page.wait_for_function("document.getElementById('graph-canvas').width > 300")
        return page

    yield open_page
    assert (asked, complaints) == (opened, [])


@pytest.mark.parametrize("name", ["small", "deep", "evil"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_opens_without_complaints_or_requests(open_page, name, scheme, tmp_path):
    page = open_page(name, color_scheme=scheme)
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    assert (tmp_path / "page.png").stat().st_size > 10_000


def test_a_click_on_a_node_tells_about_it(open_page):
    page = open_page(reduced_motion="reduce")
    page.get_by_role("button", name="stem_relu").first.click()
    page.keyboard.press("Escape")
    box = page.locator("#graph-canvas").bounding_box()
    # The picture is centred; a chain of three nodes has its second in the middle.
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert "stem_relu" in page.inner_text("#graph-panel")


def test_a_selected_node_shows_decision_kernel_ranges_and_histogram(open_page):
    page = open_page()
    page.locator("#decision-table").get_by_role("button", name="stem", exact=True).click()
    text = page.inner_text("#graph-panel")
    for expected in ("stem", "Because", "rule", "com.microsoft.QLinearConv", "40.0 dB", "represented −0.5 to 1.5"):
        assert expected in text, text
    assert page.locator("#graph-panel svg .bars").count() >= 1
    assert "stem" in page.inner_text("#graph-live")


def test_the_keyboard_walks_along_the_edges(open_page):
    page = open_page(reduced_motion="reduce")
    page.focus("#graph-canvas")
    seen = []
    for _ in range(5):
        page.keyboard.press("ArrowDown")
        seen.append(page.inner_text("#graph-panel h3"))
    assert seen == ["image", "stem", "stem_relu", "head", "head.out"]
    page.keyboard.press("ArrowUp")
    assert page.inner_text("#graph-panel h3") == "head"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "graph-panel"
    page.focus("#graph-canvas")
    page.keyboard.press("Escape")
    assert "No node selected" in page.inner_text("#graph-panel")
    before = page.inner_text("#zoom-level")
    page.keyboard.press("-")
    page.wait_for_function(f"document.getElementById('zoom-level').textContent !== {before!r}")


def test_the_table_sorts_and_searches(open_page):
    page = open_page()
    rows = page.locator("#decision-table tbody tr")
    page.get_by_role("button", name="Node", exact=True).click()
    assert rows.first.locator("th").inner_text() == "head"
    page.get_by_role("button", name="Signal", exact=True).click()
    page.get_by_role("button", name="Signal", exact=True).click()
    assert rows.first.locator("th").inner_text() == "stem"
    page.fill("#decision-search", "no q on its output")
    assert page.inner_text("#decision-count") == "1 of 3 nodes"
    page.fill("#decision-search", "")
    page.select_option("#decision-region", "fused")
    assert page.inner_text("#decision-count") == "1 of 3 nodes"


def test_names_that_try_to_be_markup_are_shown_as_they_are(open_page):
    page = open_page("evil")
    page.fill("#graph-search", "alert")
    page.press("#graph-search", "Enter")
    assert EVIL in page.inner_text("#graph-panel")


def test_it_reads_on_a_narrow_screen(open_page):
    page = open_page()
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
