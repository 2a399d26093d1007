"""The benchmark's own nets compute what they say; every name that a script takes from us is there."""

import ast
import importlib
import importlib.util
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.models import session

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def nets():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.path", [str(BENCHMARKS), *sys.path])
        return importlib.import_module("nets")


def outputs(model, feeds):
    opened = session(model)
    return [opened.run(None, feed) for feed in feeds]


@pytest.mark.parametrize(("name", "shapes"), [
    *((name, [(1, 1000)]) for name in ("shufflenet", "squeezenet", "deit_tiny")),
    ("detector", [(1, 2100, 4), (1, 80, 2100)]), ("bert_mini", [(1, 128, 256), (1, 256)]),
])  # fmt: skip
def test_a_net_checks_loads_and_tells_inputs_apart(nets, name, shapes):
    architecture = nets.NETS[name]
    model = architecture.build()
    onnx.checker.check_model(model, full_check=True)
    first, second = outputs(model, architecture.feeds(2, 5))
    assert [value.shape for value in first] == shapes
    for a, b in zip(first, second, strict=True):
        assert np.isfinite(a).all()
        assert 0.01 < float(np.std(a)) < 1000
        assert float(np.std(a - b)) > 0.01 * float(np.std(a))


def test_the_same_weights_every_time(nets):
    build = nets.NETS["squeezenet"].build
    assert build().SerializeToString() == build().SerializeToString()


def test_statistics_are_those_of_the_data_and_folding_changes_no_output(nets):
    """What a BatchNormalization writes has the mean and deviation that its shift and scale say."""
    architecture = nets.NETS["shufflenet"]
    batch = nets.data.joined(architecture.feeds(2, 3))
    model = nets.settle(architecture.graph(), batch)
    folded = nets.fold(onnx.ModelProto.FromString(model.SerializeToString()))
    assert not any(node.op_type == "BatchNormalization" for node in folded.graph.node)
    (want,), (got,) = outputs(model, feeds := architecture.feeds(1, 7))[0], outputs(folded, feeds)[0]
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-3 * float(np.abs(want).max()))
    last = [node for node in model.graph.node if node.op_type == "BatchNormalization"][-1]
    model.graph.output.extend([onnx.helper.make_tensor_value_info(last.output[0], onnx.TensorProto.FLOAT, None)])
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.HasField("shape"):
            value.type.tensor_type.shape.dim[0].dim_param = "batch"
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    written = outputs(model, [batch])[0][1]
    np.testing.assert_allclose(written.mean(axis=(0, 2, 3)), stored[last.input[2]], rtol=0, atol=1e-3)
    np.testing.assert_allclose(written.std(axis=(0, 2, 3)), stored[last.input[1]], rtol=0.02, atol=1e-2)


# ---- names -----------------------------------------------------------------------------------------------------------


ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path for folder in ("benchmarks", "examples", "docs") for path in (ROOT / folder).glob("*.py"))


def taken(script):
    """Modules of ours and the names that a script takes from each."""
    found = ast.walk(ast.parse(script.read_text(encoding="utf-8")))
    froms = [node for node in found if isinstance(node, ast.ImportFrom) and not node.level]
    ours = [node for node in froms if (node.module or "").split(".")[0] in ("kenosis_ort", "tests")]
    return [(str(node.module), alias.name) for node in ours for alias in node.names]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_what_it_takes_exists(script):
    missing = [f"{module}.{name}" for module, name in taken(script) if not exists(module, name)]
    assert not missing


def exists(module, name):
    """Whether a module has the name, or a module of its own under it."""
    found = importlib.import_module(module)
    is_package = hasattr(found, "__path__")
    return hasattr(found, name) or (is_package and importlib.util.find_spec(f"{module}.{name}") is not None)
