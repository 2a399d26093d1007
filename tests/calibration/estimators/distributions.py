"""Data of the kinds that activations have, and their statistics."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from kenosis_ort.calibration.histogram import HistogramBuilder
from kenosis_ort.calibration.statistics import TensorStatistics

Floats = npt.NDArray[np.float32]


def statistics_of(data: Floats) -> TensorStatistics:
    builder = HistogramBuilder()
    assert builder.add(data).is_finite
    return TensorStatistics(float(data.min()), float(data.max()), data.size, histogram=builder.finish())


def quantization_error(data: Floats, low: float, high: float, power: float, levels: int = 256) -> float:
    """What `Sketch.errors` predicts, from the data themselves."""
    values = data.astype(np.float64)
    low, high = min(low, 0.0), max(high, 0.0)
    step = (high - low) / (levels - 1)
    if step == 0.0:
        return float((np.abs(values) ** power).mean())
    below = round(-low / step)
    quantized = np.clip(np.rint(values / step), -below, levels - 1 - below) * step
    return float((np.abs(values - quantized) ** power).mean())


@st.composite
def activations(draw: st.DrawFn, size: int = 4000) -> Floats:
    """Gaussian, heavy-tailed, rectified, clipped, shifted or spiky data of any magnitude."""
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    kind = draw(st.sampled_from(["normal", "laplace", "student", "uniform", "lognormal"]))
    data = {
        "normal": lambda: rng.standard_normal(size),
        "laplace": lambda: rng.laplace(size=size),
        "student": lambda: rng.standard_t(3, size),
        "uniform": lambda: rng.uniform(-1, 2, size),
        "lognormal": lambda: rng.lognormal(0, 1, size),
    }[kind]()
    data = data * draw(st.sampled_from([1e-3, 1.0, 37.0])) + draw(st.sampled_from([0.0, 0.0, 0.5, -2.0]))
    if draw(st.booleans()):
        data[:3] *= 20.0  # a few outliers
    rectified = draw(st.sampled_from(["no", "relu", "relu6", "negative"]))
    if rectified == "relu":
        data = np.maximum(data, 0.0)
    elif rectified == "relu6":
        data = np.clip(data, 0.0, 6.0)
    elif rectified == "negative":
        data = -np.abs(data)
    return data.astype(np.float32)
