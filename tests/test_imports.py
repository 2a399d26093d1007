"""What an import loads: in a process of its own, and beside a torch that must not be touched; how deep imports go."""

import json
import os
import subprocess
import sys
from functools import cache

import numpy as np
import onnx
import pytest

from tests import models

STOCK = "from onnxruntime.quantization import quantize_static"
OURS = "from kenosis_ort import quantize_static"
_FOR_A_VERDICT = {
    *("kenosis_ort", "numpy", "onnx", "onnxruntime", "onnx_ir", "ml_dtypes", "google", "rich", "markdown_it"),
    *("mdurl", "pygments", "typing_extensions", "flatbuffers", "packaging"),
}


def loaded_by(code, tmp_path):
    """Names of the modules, the standard library aside, that a fresh process has loaded behind some code."""
    torch = tmp_path / "torch"
    torch.mkdir(exist_ok=True)
    (torch / "__init__.py").write_text("raise AssertionError('torch was imported')\n")
    code = f"import sys, json\n{code}\nprint(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    how = {"env": {**os.environ, "PYTHONPATH": path}, "capture_output": True, "text": True, "check": True}
    done = subprocess.run([sys.executable, "-c", code], **how)
    names = json.loads(done.stderr.splitlines()[-1])
    return {name for name in names if name.partition(".")[0] not in sys.stdlib_module_names}


def packages(modules):
    found = {name.partition(".")[0] for name in modules if not name.startswith("_")}
    return found - {"sitecustomize", "usercustomize"}  # which a distribution's Python may load by itself


@pytest.mark.since("1.27")  # before, stock itself imports torch where it is installed
def test_the_drop_in_import_loads_little_more_than_stock(tmp_path):
    stock, ours = loaded_by(STOCK, tmp_path), loaded_by(OURS, tmp_path)
    assert packages(ours) <= packages(stock) | {"kenosis_ort", "typing_extensions"}
    own = {name for name in ours if name.startswith("kenosis_ort.")}
    few = {"api", "checks", "errors", "exports", "options", "quantizer", "storage", "targets"}
    assert {name.split(".")[1] for name in own} <= few
    assert len(own) < 14


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_a_look_at_a_file_loads_no_more_than_it_needs(tmp_path, command):
    onnx.save(models.mlp(), tmp_path / "model.onnx")
    code = f"from kenosis_ort.cli.main import main\nmain([{command!r}, {str(tmp_path / 'model.onnx')!r}])"
    modules = loaded_by(code, tmp_path)
    assert packages(modules) <= _FOR_A_VERDICT
    own = {name.split(".")[1] for name in modules if name.startswith("kenosis_ort.")}
    assert not own & {"flow", "calibration", "accuracy", "passes", "cluster", "tuning", "weights", "placement"}


@pytest.mark.since("1.27")  # before, stock itself imports torch where it is installed
def test_a_call_on_real_samples_loads_nothing_that_makes_samples_up(tmp_path):
    onnx.save(models.mlp(), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", **models.feeds(models.mlp(), 1)[0])
    code = f"{OURS}\nfrom kenosis_ort import ArrayReader\n"
    files = ", ".join(repr(str(tmp_path / name)) for name in ("model.onnx", "out.onnx"))
    code += f"quantize_static({files}, ArrayReader({str(tmp_path / 'data.npz')!r}))"
    modules = loaded_by(code, tmp_path)
    assert "kenosis_ort.flow.finish" in modules
    assert not [name for name in modules if ".synthetic" in name or name.endswith(".trust")]


@pytest.mark.since("1.27")  # before, stock itself imports torch where it is installed
def test_no_name_of_the_package_loads_what_is_heavy(tmp_path):
    modules = loaded_by("import kenosis_ort\nfor name in kenosis_ort.__all__: getattr(kenosis_ort, name)", tmp_path)
    heavy = {"torch", "sympy", "mpmath", "scipy", "pandas", "distributed", "dask", "PIL", "pyarrow"}
    assert not packages(modules) & heavy


def test_shapes_are_inferred_without_torch(tmp_path):
    onnx.save(models.mlp(), tmp_path / "model.onnx")
    code = "import onnx\nfrom kenosis_ort.graph import shapes\n"
    code += f"model = onnx.load({str(tmp_path / 'model.onnx')!r})\nassert shapes._infer_symbolic(model)"
    assert loaded_by(code, tmp_path) & {"sympy", "torch"} == {"sympy"}


def test_symbols_are_computed_all_the_same(tmp_path):
    code = "from kenosis_ort.graph.view import ir\nassert 'sympy' not in sys.modules\n"
    code += "assert str(ir.SymbolicDim('N') + 1) == 'N + 1'\nimport sympy\nassert ir._core.sympy.Expr is sympy.Expr"
    assert "sympy" in loaded_by(code, tmp_path)


def test_no_chain_of_imports_is_longer_than_ten():
    grimp = pytest.importorskip("grimp", reason="it comes with import-linter")
    graph = grimp.build_graph("kenosis_ort", cache_dir=None)

    @cache
    def height(module):
        return 1 + max(map(height, graph.find_modules_directly_imported_by(module) - {module}), default=0)

    assert not [module for module in graph.modules if height(module) > 10]
