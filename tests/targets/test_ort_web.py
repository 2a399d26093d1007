"""Files for ONNX Runtime Web; where ``KENOSIS_ORT_WEB`` names its folder, what its WASM build makes of them too."""

from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from kenosis_ort import KenosisWarning, VerificationError, calibrate, preview, quantize_static
from kenosis_ort.calibration.estimators import _FARTHEST, fitted_to_widths
from kenosis_ort.graph.outside import copy_model
from kenosis_ort.graph.view import GraphView
from kenosis_ort.placement.cost import NetCosts
from kenosis_ort.placement.regions import cheapest_in_float
from kenosis_ort.plan import Kind
from kenosis_ort.runtime.session import open_session
from kenosis_ort.targets import TimedRuntime, get_target, ort_web
from kenosis_ort.targets.proof import Status
from tests import models
from tests.flow.support import run
from tests.targets.files import Written, net_of

there = pytest.mark.skipif(bool(ort_web.missing()), reason=ort_web.missing())


def chain(activation="Relu", width=32, size=14, last=True, **how):
    """Convs with activations between them."""
    net = models.Net()
    bounds = [np.float32(0), np.float32(6)] if activation == "Clip" else []
    x = net.input("x", [1, width, size, size])
    for name in ("a", "b", "c"):
        x = net.op(activation, [net.conv(x, width, width, name=name, **how), *bounds])
    return net.of(net.conv(x, width, 4, name="last") if last else x)


def written(model, folder, target="ort-web", **options):
    return Written(model, folder, target, **{"tune": "off", "protect_outputs": "int8", **options})


# -- the rules ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["Relu", "Clip"])
def test_rule_web_relu_as_table(activation, tmp_path):
    made = written(chain(activation), tmp_path)
    assert (made.operators.count("LeakyRelu"), activation in made.operators) == (3, False)
    assert all(a.f == 0.0 for n in made.model.graph.node if n.op_type == "LeakyRelu" for a in n.attribute)
    if not ort_web.missing():
        found = [kernel for kernel in ort_web.prove(made.path).kernels if kernel.op_type == "LeakyRelu"]
        assert {(kernel.status, "QLinearLeakyRelu" in kernel.kernel) for kernel in found} == {(Status.INTEGER, True)}
    meant = copy_model(made.model)  # computes the same
    for n in meant.graph.node:
        if n.op_type == "LeakyRelu":
            n.op_type = "Relu"
            del n.attribute[:]
    feeds = models.feeds(made.source, 4)
    np.testing.assert_array_equal(*(run(model, feeds) for model in (made.model, meant)))


test_rule_web_clip_as_table = test_rule_web_relu_as_table


def test_rule_web_range_keeps_negatives(tmp_path):
    made = written(chain(), tmp_path)
    convs = {v for v, node in made.makers.items() if node.op_type == "Conv"}
    behind = [zero for name, (_, zero) in made.grids.items() if name in convs]
    assert (len(behind), min(behind) > 50) == (4, True)
    assert [(s.low, s.high) for s in preview(chain("Clip"), target="ort-web").saturations] == [(-6.0, 6.0)] * 3


def test_few_of_the_numbers_that_no_reader_sees_are_on_the_grid(tmp_path):
    """2 % of the values in front of a Relu lie below its range, whatever chose the range; the rest costs nothing."""
    model = chain()
    table, plan = calibrate(model, models.reader(model, 8), target="ort-web"), preview(model, target="ort-web")
    assert len(plan.quantile_lows) == 3
    fitted = fitted_to_widths(table, plan)
    for name in plan.quantile_lows:
        (low, high), (cut, end) = table.range_of(name), fitted.range_of(name)
        assert low < cut < 0 < end == high
        histogram = table.tensors[name].histogram
        assert _FARTHEST / 2 < histogram.counts[histogram.edges[1:] <= cut].sum() / histogram.total <= _FARTHEST
    assert fitted_to_widths(fitted, plan).range_of(plan.quantile_lows[0]) == fitted.range_of(plan.quantile_lows[0])
    assert not preview(model, target="ort-cpu").quantile_lows


def test_rule_web_depthwise_float():
    body = """[expand] a = Conv (x, w256_64_1_1) b = Relu (a) [depthwise] c = Conv <group = 256, pads = [1,1,1,1]>
        (b, w256_1_3_3) d = Relu (c) [project] y = Conv (d, w64_256_1_1)"""
    model = onnx.shape_inference.infer_shapes(net_of(body, "1,64,28,28"))
    plan = preview(model, target="ort-web")
    assert plan.by_node["depthwise"].kind is Kind.INTEGER
    slower = cheapest_in_float(NetCosts(GraphView(model), get_target("ort-web").costs), plan, ())
    assert {"depthwise", "project"} & {*slower} == {"depthwise"}


def test_rule_web_attention_refused():
    assert "fuse_attention" not in (get_target("ort-web").float_forms or ())


@pytest.mark.parametrize(("scale", "stays"), [(6 / 255, False), (8 / 255, True)])
def test_a_clip_stays_where_its_scale_reaches_further(scale, stays):
    front = "c = Conv <pads = [1,1,1,1]> (x, w6_6_3_3) [clip] p = Clip (c, zero, six)"
    pair = "q = QuantizeLinear (p, step, point) y = DequantizeLinear (q, step, point)"
    plan = preview(net_of(f"{front} y = Conv (p, w6_6_3_3)", six=np.float32(6)), target="ort-web")
    model = net_of(f"{front} {pair}", six=np.float32(6), step=np.float32(scale), point=np.uint8(0))
    ort_web.spell_relus(model, plan)
    assert next(n.op_type == "Clip" for n in model.graph.node if n.name == "clip") is stays


# -- costs -------------------------------------------------------------------------------------------------------------


def timed_by(runtime):
    target = get_target("ort-web")
    return replace(target, hooks=replace(target.hooks, prove=None, time=runtime))


def test_without_the_runtime_a_net_that_gains_nothing_stays_float(tmp_path):
    target = timed_by(None)
    model = chain(width=96, size=56, last=False, groups=96)
    with pytest.warns(KenosisWarning, match="estimated by the table, not timed"):
        quantize_static(model, tmp_path / "out.onnx", models.reader(model, 2), target=target, recipe="plain")
    assert "QuantizeLinear" not in [n.op_type for n in onnx.load(tmp_path / "out.onnx").graph.node]


@pytest.mark.parametrize(("groups", "timed"), [(1, True), (48, False)])
def test_with_the_runtime_a_net_on_the_edge_is_timed(groups, timed, tmp_path, recwarn):
    """By the table 1.01x of float, and far below; it is off by up to 1.3x."""
    opener = Mock(side_effect=lambda source, **_: open_session(source))
    model = chain(width=48, size=56, last=False, k=1 if groups == 1 else 3, groups=groups)
    settled = {"target": timed_by(TimedRuntime(opener)), "recipe": "plain"}
    report = quantize_static(model, tmp_path / "out.onnx", models.reader(model, 2), **settled)
    assert any("it is timed" in note for note in report.notes) is timed
    assert any("not timed" in str(warning.message) for warning in recwarn) is not timed
    assert opener.called is timed


# -- the runtime -------------------------------------------------------------------------------------------------------


def test_what_is_missing_is_said(tmp_path, monkeypatch):
    monkeypatch.delenv(ort_web.VARIABLE, raising=False)
    assert ort_web.VARIABLE in ort_web.missing()
    monkeypatch.setenv(ort_web.VARIABLE, str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/node")
    assert f"'{tmp_path}', which has no node_modules" in ort_web.missing()
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert "not on the path" in ort_web.missing()
    with pytest.raises(VerificationError, match="not on the path"):
        ort_web.Node(3)


@there
@pytest.mark.parametrize("apart", [True, False])
def test_it_computes_what_stock_does_and_reads_external_data(tmp_path, apart):
    path, feed = written(chain(), tmp_path, use_external_data_format=apart).path, models.feeds(chain(), 1)[0]
    runner, before = ort_web.WebRunner(path), ort_web.clock()
    (got,) = runner.run(None, feed)
    (want,) = ort.InferenceSession(path).run(None, feed)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= 0.05 * np.abs(want).max()
    assert runner.seconds > 0
    assert ort_web.clock() - before == pytest.approx(runner.seconds)


@there
def test_the_proof_names_what_is_float(tmp_path):
    report = ort_web.prove(written(chain(), tmp_path, nodes_to_exclude=["b"]).path)
    assert report.runtime == "ONNX Runtime Web"
    found = {k.node: k.status for k in report.kernels if k.op_type == "Conv"}
    assert found == {"a": Status.INTEGER, "b": Status.FLOAT, "c": Status.INTEGER, "last": Status.INTEGER}


@there
def test_a_process_that_ended_is_told_of_and_started_again_and_refuses_what_is_no_model():
    runner = ort_web.WebRunner(chain().SerializeToString())
    ort_web.node(1).child._process.kill()
    with pytest.raises(VerificationError, match="ended"):
        runner.run(None, models.feeds(chain(), 1)[0])
    assert ort_web.node(1).child.runs
    with pytest.raises(VerificationError, match="refuses"):
        ort_web.WebRunner(b"no model")
