"""The page of the example in headless Chromium; skipped where there is no browser or no onnxruntime-web."""

import os
import shutil
import threading
from pathlib import Path

import pytest

from kenosis_ort.targets.ort_web import VARIABLE, missing

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


def test_it_says_what_is_missing(load_example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(SystemExit, match="npm install"):
        load_example("web_page").main(["--folder", str(tmp_path / "page")])


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_the_page_runs_the_quantized_net(load_example, tmp_path: Path):
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    executable = os.environ.get("KENOSIS_TEST_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        pytest.skip("no Chromium is installed")
    example = load_example("web_page")
    example.write_page(tmp_path / "page", Path(os.environ[VARIABLE]))
    serving = example.server(tmp_path / "page")
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    try:
        with api.sync_playwright() as playwright:
            browser = playwright.chromium.launch_persistent_context(
                str(tmp_path / "profile"), executable_path=executable, args=ARGUMENTS
            )
            page = browser.new_page()
            page.goto(f"http://127.0.0.1:{serving.server_port}/")
            page.wait_for_function("/done|failed/.test(document.title)", timeout=60_000)
            said, rows = page.inner_text("#said"), page.locator("tr").all_inner_texts()
            browser.close()
    finally:
        serving.shutdown()
        serving.server_close()
    assert said == ""
    print(rows)
    float_, int8 = (row.split() for row in rows[1:])
    assert (float_[0], int8[0]) == ("float.onnx", "web.onnx")
    assert int(int8[1]) < int(float_[1])
    right = [int(row[2].split("/")[0]) for row in (float_, int8)]
    assert right[0] > 580
    assert abs(right[0] - right[1]) <= 6
