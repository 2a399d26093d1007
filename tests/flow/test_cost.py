"""What a call costs, held below bounds: sessions and runs, work against the number of nodes, peak memory."""

import cProfile
import pstats
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import pytest

from kenosis_ort import quantize_static
from kenosis_ort.runtime.counting import counted
from tests import models, planning
from tests.models import FeedReader, Net


def cost(layers: int, samples: int, folder: Path, **options: Any) -> Any:
    model = models.conv_relu_chain(2 * layers, channels=6, size=12)  # too few for blocks, which take a session
    reader = FeedReader(models.feeds(model, samples))
    with counted() as counts:
        report = quantize_static(model, folder / "out.onnx", reader, promise=False, **options)
    assert not report.warnings
    return counts


def test_depth_costs_no_sessions_and_no_runs(tmp_path: Path) -> None:
    """Bias correction went layer by layer: a session a layer, and a run of it for each sample."""
    shallow, deep = (cost(layers, 24, tmp_path).total for layers in (3, 12))
    assert abs(deep.sessions - shallow.sessions) <= 4  # a pass may find nothing to do in one of them; nine layers more
    assert abs(deep.runs - shallow.runs) <= 2 * 24  # nine layers' would be 216


@pytest.mark.parametrize(("samples", "options", "sessions", "runs"), [
    (16, {}, 18, 115), (40, {}, 21, 220), (10, {"recipe": "plain", "verify": False, "evidence": "none"}, 4, 10),
])  # fmt: skip
def test_bounds(samples: int, options: dict[str, Any], sessions: int, runs: int, tmp_path: Path) -> None:
    counts = cost(4, samples, tmp_path, **options)
    assert counts.total.sessions <= sessions, counts.by_stage
    assert counts.total.runs <= runs, counts.by_stage
    calibrated = counts.by_stage["calibrate"]
    assert (calibrated.sessions, calibrated.runs) == (1, samples)  # with the ranges of the samples to fit to


# ---- no function is called more than in proportion to the nodes -----------------------------------------------

FEW = 400
"""Calls up to which nothing is said about their growth."""
MOST = 2.6
"""Times as many calls for twice the nodes; four where each node looks at all others."""


def residual(count: int, *, one_weight: bool = False) -> onnx.ModelProto:
    net, value = Net.over([1, 4, 4, 4]), "x"
    weights = [net.weight((4, 4, 3, 3)) for _ in range(1 if one_weight else count)]
    for at in range(count):
        value = net.op(
            "Relu", [net.op("Add", [net.op("Conv", [value, weights[at % len(weights)]], pads=[1] * 4), value])]
        )
    return net.of(value)


def concat(count: int) -> onnx.ModelProto:
    net = Net.over([1, 4, 4, 4])
    return net.of(net.op("Concat", [net.op("Relu", [net.conv("x", 4, 4)]) for _ in range(count)], axis=1))


BLOCK = """
    q{0} = MatMul ({1}, w)  k{0} = MatMul ({1}, w)  v{0} = MatMul ({1}, w)
    qh{0} = Reshape (q{0}, heads)  kh{0} = Reshape (k{0}, heads)  vh{0} = Reshape (v{0}, heads)
    qt{0} = Transpose <perm = [0,2,1,3]> (qh{0})  kt{0} = Transpose <perm = [0,2,3,1]> (kh{0})
    vt{0} = Transpose <perm = [0,2,1,3]> (vh{0})
    p{0} = MatMul (qt{0}, kt{0})  s{0} = Softmax <axis = -1> (p{0})  m{0} = MatMul (s{0}, vt{0})
    t{0} = Transpose <perm = [0,2,1,3]> (m{0})  f{0} = Reshape (t{0}, wide)  o{0} = MatMul (f{0}, w)
    a{0} = Add (o{0}, {1})  r{0} = Relu (a{0})"""


def transformer(count: int) -> onnx.ModelProto:
    blocks = "".join(BLOCK.format(at, f"r{at - 1}" if at else "x") for at in range(count))
    return planning.parse(f"""net (float[1,4,8] x) => (float[1,4,8] y)
        <float[8,8] w, int64[4] heads = {{1, 4, 2, 4}}, int64[3] wide = {{1, 4, 8}}> {{{blocks}
        y = Identity (r{count - 1}) }}""")


def calls(model: onnx.ModelProto, folder: Path) -> Counter[str]:
    """Calls of each function by file and name; of a generator, its steps."""
    feeds = [{"x": 0.1 * feed["x"]} for feed in models.feeds(model, 2)]
    profile = cProfile.Profile()
    with profile:
        quantize_static(model, folder / "out.onnx", FeedReader(feeds), promise=False)
    found: Counter[str] = Counter()
    for (file, line, name), (_, count, *_) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        found[f"{file}:{line if 'kenosis_ort' in file else ''}:{name}"] += count
    return found


@pytest.mark.parametrize(
    ("make", "count"), [(residual, 16), (partial(residual, one_weight=True), 24), (concat, 24), (transformer, 6)]
)
def test_twice_the_nodes_take_twice_the_calls(tmp_path: Path, make: Any, count: int) -> None:
    calls(make(2), tmp_path)  # imports
    once, twice = calls(make(count), tmp_path), calls(make(2 * count), tmp_path)
    grown = {name: (once[name], many) for name, many in twice.items() if many > FEW + MOST * once[name]}
    assert grown == {}


# ---- peak memory of a whole call, in a process of its own, against a plain session of the same model ------------

SIDE = 4096
CHILD = """
import sys
import numpy as np
kind, source, out, side = sys.argv[1:]
feeds = [{"x": np.random.default_rng(i).normal(size=(4, int(side))).astype(np.float32)} for i in range(8)]
if kind == "plain":
    import onnxruntime as ort
    ort.InferenceSession(source, providers=["CPUExecutionProvider"]).run(None, feeds[0])
else:
    import kenosis_ort
    report = kenosis_ort.quantize_static(source, out, kenosis_ort.ArrayReader(feeds))
    assert report.fusion is not None and report.speed is not None
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:")))
"""


def peak(kind: str, source: Path, out: Path) -> float:
    """MiB."""
    command = [sys.executable, "-W", "ignore", "-c", CHILD, kind, str(source), str(out), str(SIDE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1]) / 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system tells no peak")
def test_one_large_weight_is_not_held_again_and_again(tmp_path: Path) -> None:
    text = f"(float[N,{SIDE}] x) => (float[N,{SIDE}] y) <float[{SIDE},{SIDE}] w> {{ m = MatMul (x, w)  y = Relu (m) }}"
    source, out = tmp_path / "one.onnx", tmp_path / "out.onnx"
    onnx.save(planning.parse(text, ir_version=9), source)
    size = source.stat().st_size / 2**20
    assert peak("quantize", source, out) <= peak("plain", source, out) + 4 * size + 300  # the promise
