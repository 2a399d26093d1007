"""A page that runs a quantized net in the browser, and the folder that serves it.

    npm install onnxruntime-web
    KENOSIS_ORT_WEB=. python examples/web_page.py --folder page
    KENOSIS_ORT_WEB=. python examples/web_page.py --folder page --serve 8000

The shipped digits net is quantized for ``ort-web``; the page runs it and the float one on 600 held-out images, and
shows how many each gets right and how long an image takes. ``promise=False``, since the page itself compares: a net of
a few microseconds gains nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

from kenosis_ort import ArrayReader, quantize_static
from kenosis_ort.demo import load_digits, model_path

PAGE = Path(__file__).with_name("web_page.html")
RUNTIME = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")


class Handler(SimpleHTTPRequestHandler):
    """Serves a folder, scripts and WebAssembly under the types that browsers ask for."""

    extensions_map = {  # noqa: RUF012 - as in the base class
        **SimpleHTTPRequestHandler.extensions_map,
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
    }

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Says nothing."""


def write_page(folder: Path, runtime: Path) -> None:
    """Writes all that the page needs into a folder.

    Args:
        folder: Made where it does not exist.
        runtime: The folder in which onnxruntime-web was installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    with model_path() as model:
        shutil.copy(model, folder / "float.onnx")
        reader = ArrayReader({"image": digits.calibration})
        report = quantize_static(model, folder / "web.onnx", reader, target="ort-web", promise=False)
    print(report.verdict())
    digits.images.astype(np.float32).tofile(folder / "images.bin")
    digits.labels.astype(np.uint8).tofile(folder / "labels.bin")
    shutil.copy(PAGE, folder / "index.html")
    for name in RUNTIME:
        shutil.copy(runtime / "node_modules" / "onnxruntime-web" / "dist" / name, folder / name)


def server(folder: Path, port: int = 0) -> ThreadingHTTPServer:
    """Returns a server of a folder on this machine; port 0 for any that is free."""
    return ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, directory=str(folder)))


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the page, and serves it if asked to."""
    parser = argparse.ArgumentParser(description="A page that runs a quantized net in the browser.")
    parser.add_argument("--folder", type=Path, default=Path("page"), help="what to write into (%(default)s)")
    parser.add_argument("--serve", type=int, metavar="PORT", help="serve the page until interrupted")
    arguments = parser.parse_args(argv)
    runtime = Path(os.environ.get("KENOSIS_ORT_WEB", "."))
    if not (runtime / "node_modules" / "onnxruntime-web").is_dir():
        sys.exit(
            f"no onnxruntime-web in '{runtime}': npm install onnxruntime-web, and set KENOSIS_ORT_WEB to the folder"
        )
    write_page(arguments.folder, runtime)
    print(f"{arguments.folder / 'index.html'} is written")
    if arguments.serve is not None:
        with server(arguments.folder, arguments.serve) as serving:
            print(f"http://127.0.0.1:{serving.server_port}/")
            serving.serve_forever()


if __name__ == "__main__":
    main()
