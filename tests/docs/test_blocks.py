"""Every code block of the documentation and the README runs as it stands."""

from pathlib import Path
from typing import Any

import onnx
import pytest

from kenosis_ort import ArrayReader, quantize_static
from kenosis_ort.cli.main import build_parser, main

from .blocks import blocks_of, run_python

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


@each_page
def test_the_blocks_of_a_page_run_one_after_the_other(page: Path, workplace: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "docs"}
    if page == README:
        namespace["my_reader"] = ArrayReader("samples.npz")
        model = onnx.load("model.onnx")
        next(node for node in model.graph.node if node.name == "layer5.conv").name = "conv1"
        onnx.save(model, "model.onnx")
        quantize_static("model.onnx", "any_quantized_model.onnx", ArrayReader("samples.npz"), recipe="plain")
    if any("model.int8.onnx" in block.text for block in blocks_of(page)):
        quantize_static("model.onnx", "model.int8.onnx", ArrayReader("samples.npz"), recipe="plain")
    for block in (block for block in blocks_of(page) if not block.why_not):
        if block.language == "python":
            run_python(block, namespace)
        for words in block.commands() if block.language == "sh" and page != README else ():
            code = main(words)
            assert code in (0, 1), f"{page.name}:{block.line}: kenosis-ort {' '.join(words)} returns {code}"


@each_page
def test_the_command_lines_of_a_page_parse(page: Path) -> None:
    for block in blocks_of(page):
        for words in block.commands() if block.language == "sh" else ():
            build_parser().parse_args(words)


def test_what_is_not_run_says_why() -> None:
    left_out = [block for page in PAGES for block in blocks_of(page) if block.why_not]
    assert all(len(block.why_not) > 10 for block in left_out)
    assert len(left_out) <= 5
    assert all(block.language == "sh" for block in left_out)


def test_a_block_is_found_with_its_place(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Head\n\n    ```python\n    x = 1\n    ```\n\n<!-- not run: no such file -->\n```sh\nkenosis-ort x\n```\n"
    )
    first, second = blocks_of(page)
    assert (first.line, first.language, first.text) == (4, "python", "x = 1\n")
    assert (second.why_not, second.commands()) == ("no such file", [["x"]])
    page.write_text("\n```python\n1 / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as failure:
        run_python(blocks_of(page)[0], {})
    assert failure.traceback[-1].lineno == 2, "counted from 0: the third line of the page"
