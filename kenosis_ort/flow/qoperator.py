"""QOperator format: written by ONNX Runtime's own quantizer, on checked feeds and with its failures explained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx

from kenosis_ort.calibration.feeds import check_feed, input_specs, sample_feeds
from kenosis_ort.errors import CalibrationError, UnsupportedModelError
from kenosis_ort.flow.request import Request
from kenosis_ort.graph.load import load_model
from kenosis_ort.quantizer.stock import CalibrationDataReader, write_qoperator
from kenosis_ort.storage.scratch import Scratch


def quantize_to_qoperator(
    proto: onnx.ModelProto,
    request: Request,
    reader: CalibrationDataReader | None,
    excluded: Sequence[str],
    named: Sequence[str],
) -> tuple[onnx.ModelProto, int]:
    """Returns the model in QOperator format, written by ONNX Runtime's own quantizer, and the number of samples.

    Raises:
        CalibrationError: The reader yields nothing, or feeds of wrong names, types or shapes.
        UnsupportedModelError: ONNX Runtime's quantizer fails.
    """
    checked = None if reader is None else _CheckingReader(reader, proto)
    with Scratch("qoperator") as folder:
        made = folder / "model.onnx"
        try:
            write_qoperator(
                proto,
                made,
                checked,
                op_types_to_quantize=list(request.op_types) if request.op_types_named else None,
                per_channel=request.per_channel,
                reduce_range=request.reduce_range,
                activation_type=request.activation_type,
                weight_type=request.weight_type,
                nodes_to_quantize=list(named),
                nodes_to_exclude=list(excluded),
                calibrate_method=request.calibrate_method,
                calibration_providers=request.calibration_providers,
                extra_options=dict(request.extra_options),
                calibration_cache_path=request.cache_path,
            )
        except Exception as error:  # the runtime raises several unrelated classes, all of them plain exceptions
            if checked is not None and error is checked.failure:
                raise
            text = " ".join(str(error).split())[:300]
            if checked is not None and checked.samples == 0:
                raise CalibrationError(
                    f"No data is collected: the calibration data reader yields no sample ({text}).",
                    fix="return at least one {input name: array} from get_next()",
                ) from error
            raise UnsupportedModelError(
                f"ONNX Runtime's quantizer cannot write this model in QOperator format: {text}",
                fix="pass quant_format=QuantFormat.QDQ, or exclude the nodes in question",
            ) from error
        return load_model(made).proto, 0 if checked is None else checked.samples


class _CheckingReader(CalibrationDataReader):  # type: ignore[misc]
    """Checks a reader's feeds against the model's inputs before stock gets them, and counts them.

    Attributes:
        samples: Feeds handed on.
        failure: What the reader or the check raised.
    """

    def __init__(self, reader: CalibrationDataReader, proto: onnx.ModelProto) -> None:
        self.reader = reader
        self.samples = 0
        self.failure: Exception | None = None
        self._left = sample_feeds(reader)
        self._inputs = input_specs(proto)

    def get_next(self) -> dict[str, Any] | None:
        try:
            feed = next(self._left, None)
            checked = None if feed is None else check_feed(feed, *self._inputs, self.samples)
        except Exception as error:
            self.failure = error
            raise
        self.samples += checked is not None
        return checked

    def __len__(self) -> int:
        return len(self.reader)

    def set_range(self, start_index: int, end_index: int) -> None:
        self.reader.set_range(start_index=start_index, end_index=end_index)
        self._left = sample_feeds(self.reader)
