"""Every code block of the documentation and the README runs as it stands."""

import importlib
import importlib.util
import re
import shlex
import shutil
import textwrap
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import pytest
from PIL import Image

from kenosis_ort import ArrayReader, quantize_static
from kenosis_ort.cli.main import build_parser, main
from kenosis_ort.demo import load_digits
from tests import models, planning

_FENCE = re.compile(
    r"(?:^(?P<mark>[ ]*<!-- not run: (?P<why>.+?) -->)\n)?"
    r"^(?P<indent>[ ]*)```(?P<language>\w+)[^\n]*\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """One fenced block.

    Attributes:
        page: The file it stands in.
        line: Number of its first line of code, from 1.
        language: What its fence says.
        text: The code.
        why_not: Why it is not run; empty where it is.
    """

    page: Path
    line: int
    language: str
    text: str
    why_not: str = ""

    def commands(self):
        """Returns the ``kenosis-ort`` command lines of a shell block as words."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("kenosis-ort ")]


def blocks_of(page):
    """Returns the blocks of a page in order."""
    text = page.read_text(encoding="utf-8")
    blocks = []
    for found in _FENCE.finditer(text):
        line = text.count("\n", 0, found.start("text")) + 1
        blocks.append(Block(page, line, found["language"], textwrap.dedent(found["text"]), found["why"] or ""))
    return blocks


def run_python(block, namespace):
    """Runs a block as a module of its own; a traceback shows the line of the page."""
    exec(compile("\n" * (block.line - 1) + block.text, str(block.page), "exec", dont_inherit=True), namespace)


# ---- the files that the pages speak about ----------------------------------------------------------------------------


ROOT = Path(__file__).resolve().parents[2]
RNG = np.random.default_rng(7)


CLASSIFIER = """(float[1,3,16,16] image) => (logits) <float[16,3,3,3] w0, float[16,16,3,3] w1, float[10,16] w2> {
    [stem] c0 = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (image, w0) [relu0] r0 = Relu (c0)
    [body] c1 = Conv <pads = [1, 1, 1, 1]> (r0, w1) [relu1] r1 = Relu (c1) [pool] p = GlobalAveragePool (r1)
    [flatten] f = Flatten (p) [head] logits = Gemm <transB = 1> (f, w2) }"""
RECURRENT = """(float[1,16] x, float[1,32] state) => (y, stateN) <float[32,16] wx, float[32,32] wh, float[4,32] wo> {
    [inputs] a = Gemm <transB = 1> (x, wx) [states] b = Gemm <transB = 1> (state, wh) [sum] s = Add (a, b)
    [tanh] stateN = Tanh (s) [head] y = Gemm <transB = 1> (stateN, wo) }"""
"""A small net over colour pictures, and one step of a net whose state is an input and an output."""


def _write_pipeline(folder):
    """Writes an encoder and its decoders, of one layer each, and a folder of sentences."""
    spec = importlib.util.spec_from_file_location("docs_bart_net", ROOT / "examples" / "bart_net.py")
    net = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(net)
    net.LAYERS, net._FITTED_ON = 1, 16
    net.write(folder)
    (folder / "sentences").mkdir()
    for number, sentence in enumerate(net.sentences(3, seed=1)):
        np.savez(folder / "sentences" / f"{number}.npz", **sentence)


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """A folder with the models and samples that the pages name."""
    folder = tmp_path_factory.mktemp("docs")
    digits = load_digits()
    onnx.save(models.narrow_digits(), folder / "model.onnx")
    np.savez(folder / "samples.npz", image=digits.calibration[:8])
    np.savez(folder / "test.npz", image=digits.images[:32])
    np.save(folder / "labels.npy", digits.labels[:32])
    np.savez(folder / "recording.npz", x=RNG.normal(size=(40, 1, 16)).astype(np.float32)[:, 0])
    onnx.save(planning.parse(CLASSIFIER), folder / "classifier.onnx")
    onnx.save(planning.parse(RECURRENT), folder / "recurrent.onnx")
    _write_pipeline(folder)
    (folder / "photos").mkdir()
    for number in range(8):
        pixels = RNG.integers(0, 255, size=(40, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "photos" / f"{number}.png")
    return folder


@pytest.fixture
def workplace(files, tmp_path, monkeypatch):
    """A copy of these files, which is the current folder, and a bench that runs a model for no longer than it must."""
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # a profile that a page measures is no other test's
    harness = importlib.import_module("kenosis_ort.bench.harness")
    monkeypatch.setattr(harness, "Schedule", partial(harness.Schedule, block_s=0.005))
    return tmp_path


# ---- pages -----------------------------------------------------------------------------------------------------------


README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


@each_page
def test_the_blocks_of_a_page_run_one_after_the_other(page, workplace):
    namespace = {"__name__": "docs"}
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
def test_the_command_lines_of_a_page_parse(page):
    for block in blocks_of(page):
        for words in block.commands() if block.language == "sh" else ():
            build_parser().parse_args(words)


def test_what_is_not_run_says_why():
    left_out = [block for page in PAGES for block in blocks_of(page) if block.why_not]
    assert all(len(block.why_not) > 10 for block in left_out)
    assert len(left_out) <= 5
    assert all(block.language == "sh" for block in left_out)


def test_a_block_is_found_with_its_place(tmp_path):
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
