"""Times model files in headless Chromium, in turns, each relative to the first: what `web` finds in Node, confirmed.

One thread of ONNX Runtime Web's WASM build; wall time of the least run of a round, medians over rounds. The files take
one float32 input; it is fed the same noise.

    pip install playwright && npm install onnxruntime-web
    KENOSIS_ORT_WEB=. python benchmarks/web_browser.py float.onnx int8.onnx
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from kenosis_ort.targets.ort_web import VARIABLE, missing

RUNTIME = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync"]  # fmt: skip
PAGE = """<!doctype html><title>run</title><script type="module">
import * as ort from './ort.wasm.min.mjs';
ort.env.wasm.numThreads = 1;
window.time = async (files, rounds) => {
  const sessions = [], times = files.map(() => []);
  for (const file of files) sessions.push(await ort.InferenceSession.create(file, { executionProviders: ['wasm'] }));
  const { name, shape } = sessions[0].inputMetadata[0];
  const dims = shape.map((size) => (typeof size === 'number' ? size : 1));
  let seed = 1;
  const noise = Float32Array.from({ length: dims.reduce((a, b) => a * b, 1) }, () => {
    seed = (seed * 1103515245 + 12345) & 0x7fffffff;
    return (seed / 0x7fffffff - 0.5) * 3;
  });
  const feed = { [name]: new ort.Tensor('float32', noise, dims) };
  for (let round = -1; round < rounds; round++) {
    for (const [i, session] of sessions.entries()) {
      let least = Infinity;
      for (let run = 0; run < 5; run++) {
        const begin = performance.now();
        await session.run(feed);
        least = Math.min(least, performance.now() - begin);
      }
      if (round >= 0) times[i].push(least);
    }
  }
  return times.map((all) => all.sort((a, b) => a - b)[all.length >> 1]);
};
document.title = 'ready';
</script>"""


class Handler(SimpleHTTPRequestHandler):
    """Serves a folder under the types that browsers ask for."""

    extensions_map = {**SimpleHTTPRequestHandler.extensions_map, ".mjs": "text/javascript", ".wasm": "application/wasm"}  # noqa: RUF012

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Says nothing."""


def main() -> None:
    """Prints milliseconds and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="ONNX files; the others are compared to the first")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if why := missing():
        sys.exit(why)
    from playwright.sync_api import sync_playwright

    executable = os.environ.get("KENOSIS_TEST_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    with tempfile.TemporaryDirectory(prefix="kenosis-browser-") as scratch:
        folder = Path(scratch) / "page"
        folder.mkdir()
        for name in RUNTIME:
            shutil.copy(Path(os.environ[VARIABLE]) / "node_modules" / "onnxruntime-web" / "dist" / name, folder)
        names = [f"{index}.onnx" for index, _ in enumerate(args.files)]
        for name, file in zip(names, args.files, strict=True):
            shutil.copy(file, folder / name)
        (folder / "index.html").write_text(PAGE, encoding="utf-8")
        serving = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch_persistent_context(
                str(Path(scratch) / "profile"), executable_path=executable, args=ARGUMENTS
            )
            page = browser.new_page()
            page.goto(f"http://127.0.0.1:{serving.server_port}/")
            page.wait_for_function("document.title === 'ready'")
            found = page.evaluate("([files, rounds]) => window.time(files, rounds)", [names, args.rounds])
            version = browser.browser.version if browser.browser else page.evaluate("navigator.userAgent")
            browser.close()
        serving.shutdown()
    print(version)
    for file, milliseconds in zip(args.files, found, strict=True):
        print(f"{file.name:60s} {milliseconds:9.2f} ms {found[0] / milliseconds:6.2f}x")


if __name__ == "__main__":
    main()
