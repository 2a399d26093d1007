"""What each pass brings on real nets: thresholds far below what was measured, on samples that no pass has seen."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from kenosis_ort.accuracy.channel_statistics import channel_statistics
from kenosis_ort.accuracy.error import output_error
from kenosis_ort.passes.contract import materialize
from kenosis_ort.passes.correct_biases import bias_shifts, with_biases, with_shifts
from kenosis_ort.passes.equalize_layers import equalize, values_for_equalization
from kenosis_ort.passes.round_weights import learn_rounding
from kenosis_ort.runtime.session import open_session
from tests import planning
from tests.downloaded import ZOO


def keywords():
    raw = np.load(ZOO / "kws.npz", allow_pickle=False)
    x = ((raw["x"][:256].astype(np.float32) - float(raw["zp"])) * np.float32(raw["scale"]))[:, None]
    return [{"input": x[i : i + 32]} for i in range(0, 256, 32)]


def small_pictures():
    images = np.load(ZOO / "cifar10_calib.npz", allow_pickle=False)["images"][:32].astype(np.float32) / 255
    return [{"lr_y": x[None, None]} for x in images @ np.array([0.299, 0.587, 0.114], np.float32)]


def decibels(reference, model, feeds):
    outputs = []
    for proto in (model, reference):
        session = open_session(proto.SerializeToString())
        names = [o.name for o in session.get_outputs()]
        outputs.append([dict(zip(names, session.run(None, feed), strict=True)) for feed in feeds])
    return -10 * np.log10(output_error(outputs[0], outputs[1]))


@pytest.mark.parametrize(
    ("net", "data", "equalization", "correction"),
    [("mlperf_kws_dscnn", keywords, -1.0, 2.0), ("superres_espcn_x3", small_pictures, 6.0, -0.5)],
)
def test_passes_one_after_the_other(net, data, equalization, correction):
    """Measured: 32.5, 32.1 and 36.8 dB on keywords; 25, 43 and 44 dB on super-resolution (SQNR)."""
    path = ZOO / f"{net}.onnx"
    if not path.exists():
        pytest.skip("the zoo is not here")
    model = planning.prepared(onnx.load(path))
    feeds = data()
    fit, held_out = feeds[::2], feeds[1::2]
    plain = planning.quantize(model, feeds=fit)

    wanted = values_for_equalization(model)
    equal = equalize(model, peaks=channel_statistics(model, fit, wanted, threads=1)).model
    equalized = planning.quantize(with_biases(equal), feeds=fit)
    before, after = (decibels(model, o.quantized, held_out) for o in (plain, equalized))
    assert after > before + equalization

    nodes = set(equalized.plan.integer_nodes())
    shifts = bias_shifts(equalized.model, equalized.quantized, fit, nodes=nodes, threads=1)
    corrected = planning.quantize(materialize(equalized.model, with_shifts(equalized.model, shifts)), feeds=fit)
    best = decibels(model, corrected.quantized, held_out)
    assert best > after + correction

    rounded = learn_rounding(equalized.model, equalized.quantized, fit, nodes=nodes, threads=1)
    assert len(rounded.gains) > 2
    fine = materialize(equalized.model, rounded.overlay)
    again = planning.quantize(fine, feeds=fit)
    shifts = bias_shifts(equalized.model, again.quantized, fit, nodes=nodes, threads=1)
    last = planning.quantize(materialize(fine, with_shifts(fine, shifts)), feeds=fit)
    assert decibels(model, last.quantized, held_out) > best - 1.0
