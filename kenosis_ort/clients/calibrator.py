"""Stock's calibrators with the streaming collection behind them.

The objects are stock's own, augmented file and all, so that code that reads them finds what it expects. Only the data
takes another way: one sample at a time through statistics that do not grow, where stock holds the results of all
samples until the end. MinMax ranges equal stock's bit for bit; histograms differ as `calibration.methods` explains.
"""

import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnxruntime.quantization.calibrate import (
    CalibraterBase,
    CalibrationMethod,
    DistributionCalibrater,
    EntropyCalibrater,
    MinMaxCalibrater,
    PercentileCalibrater,
    TensorsData,
    create_calibrator as stock_create_calibrator,
)

from kenosis_ort.calibration.collector import Points, Sweep
from kenosis_ort.calibration.methods import CalibrationConfig
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.errors import KenosisError, warn_caller
from kenosis_ort.graph.outside import copy_model

_log = logging.getLogger(__name__)

_SETTINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "MinMax": ("symmetric", "moving_average", "averaging_constant", "max_intermediate_outputs"),
    "Entropy": ("symmetric", "num_bins", "num_quantized_bins"),
    "Percentile": ("symmetric", "num_bins", "percentile"),
    "Distribution": ("num_bins", "scenario"),
}
"""The keys that stock reads from ``extra_options``, by method; they are fields of `CalibrationConfig` too."""


def create_calibrator(
    model: str | Path,
    op_types_to_calibrate: Sequence[str] | None = None,
    augmented_model_path: str | os.PathLike[str] = "augmented_model.onnx",
    calibrate_method: CalibrationMethod = CalibrationMethod.MinMax,
    use_external_data_format: bool = False,
    providers: Sequence[Any] | None = None,
    extra_options: Mapping[str, Any] | None = None,
) -> CalibraterBase:
    """A calibrator in place of ``onnxruntime.quantization.calibrate.create_calibrator``.

    Memory does not grow with the number of samples, whatever the method. The augmented model is written as stock
    writes it, and loaded only where ``infer_session`` is asked for. ``per_channel`` ranges are left to stock's.

    Args:
        model: Path of the float model.
        op_types_to_calibrate: Operator types whose tensors are observed; None for all.
        augmented_model_path: Where to write the augmented model.
        calibrate_method: A ``CalibrationMethod``.
        use_external_data_format: Write the augmented model's weights beside it.
        providers: Execution providers; the CPU's by default.
        extra_options: The method's settings, under stock's names.

    Returns:
        An instance of stock's class for the method: ``collect_data`` any number of times, then ``compute_data``.

    Raises:
        ValueError: An unknown method, or ``model`` is no path.
        OptionError: A setting is out of range.
    """
    options = dict(extra_options or {})
    kind = _CALIBRATERS.get(calibrate_method)
    if kind is None or options.get("per_channel"):
        return stock_create_calibrator(
            model,
            op_types_to_calibrate,
            augmented_model_path,
            calibrate_method,
            use_external_data_format,
            providers,
            options,
        )
    settings = {key: options[key] for key in _SETTINGS[calibrate_method.name] if options.get(key) is not None}
    if not settings.get("moving_average"):
        settings.pop("averaging_constant", None)  # without effect then, whatever it is
    config = CalibrationConfig(method=calibrate_method, bit_exact=True, **settings)
    calibrator = kind(
        model,
        op_types_to_calibrate,
        augmented_model_path,
        use_external_data_format=use_external_data_format,
        **settings,
    )
    calibrator.begin(config)
    calibrator.augment_graph()
    if providers:
        calibrator.execution_providers = list(providers)
    calibrator.create_inference_session()
    return calibrator


class _Streaming(CalibraterBase):  # type: ignore[misc]
    """Methods that replace those of stock's class: how data are collected."""

    _config: CalibrationConfig
    _float: onnx.ModelProto
    _collection: Sweep | None = None
    _session: Any = None
    _has_session = False
    _by_stock = False

    def begin(self, config: CalibrationConfig) -> None:
        """Keeps the float model as it is before augmentation."""
        self._config = config
        self._float = copy_model(self.model)

    @property
    def infer_session(self) -> Any:
        """The session of the augmented model, made when it is first asked for: collection has sessions of its own."""
        if self._has_session and self._session is None:
            super().create_inference_session()
        return self._session

    @infer_session.setter
    def infer_session(self, session: Any) -> None:
        self._session = session

    def create_inference_session(self) -> None:
        self._session, self._has_session = None, True
        if self._collection is not None and not self._collection.samples:
            self._collection.close()
            self._collection = None

    def collect_data(self, data_reader: Any) -> None:
        """Takes all feeds that a reader has left into account; may be called again.

        Raises:
            CalibrationError: No sample at all, feeds that do not fit the model, or the model fails on one.
        """
        if self._collection is None and not self._by_stock:
            self._open()
        if self._collection is None:
            super().collect_data(data_reader)
            return
        self._collection.read(data_reader)
        if isinstance(self, MinMaxCalibrater):
            self.calibrate_tensors_range = self.compute_data()

    def compute_data(self) -> TensorsData:
        """The ranges of all observed tensors over all samples so far."""
        if self._collection is None:
            return super().compute_data()
        found = self._collection.statistics()
        return CalibrationTable(tensors=found, config=self._config).to_tensors_data()

    def _open(self) -> None:
        tensors = sorted(self.select_tensors_to_calibrate(self._float)[0])
        try:
            points = Points(
                tensors,
                self._config,
                providers=self.execution_providers or (),
                seen_as={name: _FinitePart(name) for name in tensors},
            )
            self._collection = Sweep(self._float, points)
        except KenosisError as error:
            _log.debug("the calibrator falls back to stock's collection", exc_info=True)
            self._by_stock = True
            warn_caller(f"Calibrated as stock does: {error}")
            return
        weakref.finalize(self, self._collection.close)


class _FinitePart:
    """Stands for a tensor's values by those that are finite: stock's ranges of a mask of minus infinity are infinite.

    Args:
        name: The tensor's name, for the warning that is given once.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_warned = False

    def __call__(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if not array.size or (np.isfinite(array.min()) and np.isfinite(array.max())):
            return array
        if not self._has_warned:
            self._has_warned = True
            _log.warning("tensor '%s' holds NaN or infinity; its range is that of its finite values", self._name)
        finite: npt.NDArray[Any] = array[np.isfinite(array)]
        return finite


_CALIBRATERS: Final[Mapping[Any, Callable[..., Any]]] = {
    method: type(stock.__name__, (_Streaming, stock), {"__doc__": stock.__doc__})
    for method, stock in (
        (CalibrationMethod.MinMax, MinMaxCalibrater),
        (CalibrationMethod.Entropy, EntropyCalibrater),
        (CalibrationMethod.Percentile, PercentileCalibrater),
        (CalibrationMethod.Distribution, DistributionCalibrater),
    )
}
