"""The examples run as they stand and print what they promise; their index and the README name what exists."""

import ast
import difflib
import importlib
import inspect
import os
import re
import shlex
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from kenosis_ort import Placement, Speed, Stages, options, quantize_static
from kenosis_ort.targets.ort_web import VARIABLE, missing
from tests.examples.conftest import ROOT

# Small settings make small nets: int8 may not pay, and a hardly trained net loses more.
pytestmark = pytest.mark.filterwarnings("ignore::kenosis_ort.KenosisWarning")


def numbers(pattern, printed):
    """Returns the groups of the first match, as numbers."""
    found = re.search(pattern, printed)
    assert found is not None, printed
    return [float(group) for group in found.groups()]


ACCURATE = {
    "image_folder": ([], 0.98, 0.01, []),
    "processing_inside": ([], 0.98, 0.01, ["7 of 7", "DecodeImage 'decode': float"]),
    "nlp_encoder": (["--sentences", "400"], 0.8, 0.03,
                    [r"x Attention +\S", r"x LayerNormalization +\S", r"x Cast +\S", "'l0/context': float"]),
}  # fmt: skip
"""Arguments, the least accuracy, the largest loss and what is printed too."""


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.since("1.24" if name == "nlp_encoder" else "1.23")) for name in ACCURATE
])  # fmt: skip
def test_the_quantized_net_answers_as_the_float_one(load_example, capsys, name):
    arguments, least, loss, shown = ACCURATE[name]
    for module in {"image_folder": ["PIL"], "processing_inside": ["onnxruntime_extensions", "PIL"]}.get(name, []):
        pytest.importorskip(module)
    load_example(name).main(arguments)
    printed = capsys.readouterr().out
    before, after = numbers(r"accuracy ([0-9.]+) -> ([0-9.]+)", printed)
    assert before >= least
    assert abs(after - before) <= loss
    assert [text for text in shown if not re.search(text, printed)] == []
    if name == "nlp_encoder":
        assert numbers(r"SQNR of the logits ([0-9.]+) dB", printed)[0] >= 12


@pytest.mark.since("1.24")  # before, the runtime quantizes no operator set that has Attention
def test_bart(load_example, monkeypatch, capsys):
    script = load_example("bart")
    monkeypatch.setattr("bart_net.LAYERS", 1)
    script.main(["--sentences", "6", "--calibrate", "3", "--seconds", "0.1", "--recipe", "plain"])
    printed = capsys.readouterr().out
    assert numbers(r"fused: the float model's word at .* steps, ([0-9.]+)%", printed)[0] == 100
    assert numbers(r"fused int8: the float model's word at .* steps, ([0-9.]+)%", printed)[0] >= 95
    for piece, layers in (("encoder", 1), ("decoder", 2), ("decoder_with_past", 2)):
        table = printed[printed.index(f"\n{piece} ") :]
        for form, found in (("exported", 0), ("fused", layers), ("int8", 0), ("fused int8", layers)):
            assert numbers(rf"\n  {form} +(\d) of (\d)", table) == [found, layers], (piece, form)
        assert numbers(r"\n  fused  +\d of \d +([0-9.e+-]+)", table)[0] < 1e-4


def test_no_data(load_example, capsys):
    load_example("no_data").main([])
    printed = capsys.readouterr().out
    assert "input 'image'" in printed
    (made_up, decibel), (real, _) = (
        numbers(rf"{kind} data +accuracy ([0-9.]+), SQNR ([0-9.]+)", printed) for kind in ("made-up", "real")
    )
    assert (made_up >= real - 0.01, decibel >= 25) == (True, True)


def test_each_stage_matters_on_the_hard_net(load_example, capsys):
    script = load_example("ablation")
    every = script.cases()
    assert (every["all stages"], every["none (stock)"], len(every)) == (Stages(), Stages.none(), 8)
    script.main(["--net", "hard", "--rounds", "1"])
    found = re.findall(r"^(\S[^\n]*?)  +([0-9.]+|inf) dB.*?  (\d)/8", capsys.readouterr().out, re.MULTILINE)
    rows = {name: (float(decibel), int(integer)) for name, decibel, integer in found}
    decibel, integer = rows["all stages"]
    assert decibel > 30
    for name in every.keys() - {"all stages"}:
        assert rows[name][0] < decibel - 0.3 or rows[name][1] < integer, name
    assert rows["without nudge"][1] < integer
    assert rows["made-up data"][0] > 25


def test_ablation_of_a_model_with_data(load_example, monkeypatch, tmp_path, capsys):
    from kenosis_ort.demo import load_digits, model_path

    np.savez(tmp_path / "samples.npz", image=load_digits().images[:40])
    script = load_example("ablation")
    monkeypatch.setattr(script, "cases", lambda: {"all stages": Stages()})
    with model_path() as model:
        script.main(["--model", str(model), "--data", str(tmp_path / "samples.npz"), "--rounds", "1"])
    assert re.search(r"all stages +[0-9.]+ dB +1\.0000 +- +[67]/7", capsys.readouterr().out)


def test_labels_and_budget(load_example, capsys, tmp_path):
    load_example("labels_and_budget").main(["--zoo", str(tmp_path), "--budget", "0.02"])
    printed = capsys.readouterr().out
    after, before = numbers(r"metric 'Top1': ([0-9.]+) .*, ([0-9.]+) in float, on 300 evaluation samples", printed)
    assert before >= 0.98
    assert before - after <= 0.02
    assert "a loss of 0.02 is allowed: kept" in printed
    unseen, ours = numbers(r"300 samples that took no part: ([0-9.]+) in float, ([0-9.]+) now", printed)
    assert unseen - ours <= 0.02


def test_the_drop_in_tells_what_it_did(load_example, capsys):
    """What it does before, see `tests.cli.test_script`."""
    load_example("drop_in_after").main()
    printed = capsys.readouterr().out
    assert numbers(r"held-out images: ([0-9.]+)", printed)[0] >= 0.97
    assert "no report" not in printed


def test_one_line_differs():
    texts = [(ROOT / "examples" / f"drop_in_{name}.py").read_text(encoding="utf-8") for name in ("before", "after")]
    changed = [line for line in difflib.ndiff(*(text.splitlines() for text in texts)) if line[0] in "+-"]
    modules = ("- from onnxruntime.quantization", "+ from kenosis_ort")
    assert changed == [f"{module} import quantize_static" for module in modules]


ROW = re.compile(r"^(.+?), (stock|patched) +(\d+) of (\d+) +(-?[0-9.]+) dB +([0-9.]+)x$", re.MULTILINE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "client"), [("optimum_quantizer", "optimum.onnxruntime"), ("olive_static", "olive")])
def test_clients_of_stock(load_example, capsys, name, client):
    """Of each pair of rows the patched one is not worse, and one is better."""
    pytest.importorskip(client)
    load_example(name).main(["--samples", "8", "--rounds", "1"])
    printed = capsys.readouterr().out
    found = ROW.findall(printed)
    pairs = list(zip(found[::2], found[1::2], strict=True))
    assert len(pairs) == 2, printed
    for stock, patched in pairs:
        assert (stock[0], stock[1], patched[1]) == (patched[0], "stock", "patched")
        assert float(patched[4]) >= float(stock[4]) - 0.2, printed
    assert any(float(p[4]) > float(s[4]) + 1 or int(p[2]) > int(s[2]) for s, p in pairs), printed


# ---- the page, in headless Chromium where there is one ---------------------------------------------------------------


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


def test_it_says_what_is_missing(load_example, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(SystemExit, match="npm install"):
        load_example("web_page").main(["--folder", str(tmp_path / "page")])


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_the_page_runs_the_quantized_net(load_example, tmp_path):
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


# ---- the index of the examples, and the README -----------------------------------------------------------------------


FOLDER = ROOT / "examples"
INDEX = (FOLDER / "README.md").read_text(encoding="utf-8")
SCRIPTS = sorted(FOLDER.glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_is_named_and_documented(script):
    assert f"({script.name})" in INDEX
    assert ast.get_docstring(ast.parse(script.read_text(encoding="utf-8")))


def commands():
    blocks = re.findall(r"```sh\n(.*?)```", INDEX, re.DOTALL)
    docstrings = [ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "" for path in SCRIPTS]
    lines = [line.strip() for text in (*blocks, *docstrings) for line in text.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line.startswith("python examples/")]


@pytest.mark.parametrize("line", commands())
def test_commands_name_scripts_and_options_that_exist(line):
    _, script, *arguments = shlex.split(line, comments=True)
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / script, FOLDER / "cifar10_data.py"))
    assert [option for option in arguments if option.startswith("--") and f'"{option}"' not in source] == []


README = (ROOT / "README.md").read_text(encoding="utf-8")
OPTIONS = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
SHELL = [line for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) for line in block.splitlines()]


def test_there_are_exactly_two_set_up_commands():
    demo, tests = (line for line in SHELL if "pip install" in line)
    assert (demo.endswith("kenosis-ort demo"), "pytest" in tests) == (True, True)


def test_the_names_it_imports_are_public():
    imports = re.findall(r"^from (kenosis_ort\S*) import (.+)$", README, re.MULTILINE)
    assert imports
    for module, names in imports:
        assert {*names.split(", ")} <= {*importlib.import_module(module).__all__}


def test_the_page_of_options_lists_them_all():
    def listed(heading):
        rows = re.findall(r"^\| (`.*?) \|", OPTIONS.split(f"| {heading} |")[1].split("\n\n")[0], re.MULTILINE)
        return [name.strip("`") for row in rows for name in row.split(", ")]

    parameters = inspect.signature(quantize_static).parameters.values()
    assert listed("Parameter") == [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    in_groups = {*Speed.__dataclass_fields__, *Placement.__dataclass_fields__}
    assert listed("Keyword") == [name for name in options.KEYWORDS if name not in in_groups]
    fields = {f"{group.__name__}.{name}" for group in (Speed, Placement) for name in group.__dataclass_fields__}
    assert {*listed("Field")} == fields
