"""Code as users write it; type-checked, never run. ``reveal_type``-like checks are assignments with annotations."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, QuantType, StaticQuantConfig

import kenosis_ort as ko


class MyReader(CalibrationDataReader):
    def __init__(self, samples: list[npt.NDArray[np.float32]]) -> None:
        self.left = iter(samples)

    def get_next(self) -> dict[str, Any] | None:
        sample = next(self.left, None)
        return None if sample is None else {"x": sample}


def as_in_existing_scripts(model: onnx.ModelProto) -> None:
    ko.quantize_static("float.onnx", "int8.onnx", MyReader([]))
    ko.quantize_static(Path("float.onnx"), Path("int8.onnx"), MyReader([]), QuantFormat.QDQ, ["Conv"], True, False)
    ko.quantize_static(
        model, "int8.onnx", MyReader([]), activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
        per_channel=True, reduce_range=False, nodes_to_exclude=["head"], calibrate_method=CalibrationMethod.Percentile,
        extra_options={"CalibPercentile": 99.9}, calibration_cache_path=Path("ranges.json"),
    )  # fmt: skip
    ko.quantize("float.onnx", "int8.onnx", StaticQuantConfig(MyReader([])), protect_outputs="float")


def show(done: int, total: int | None) -> None:
    print(done, total)


def with_extras() -> ko.QuantizationReport:
    return ko.quantize_static(
        "float.onnx", "int8.onnx", ko.ImageFolderReader("pictures", input_name="image", size=(224, 224)),
        target="ort-cpu", protect_outputs="int8", primary_inputs=("image",), custom_op_libraries=["lib.so"],
        progress=show, verify=True, stages=ko.Stages(nudge=False),
    )  # fmt: skip


def read_the_report(report: ko.QuantizationReport) -> tuple[float, list[str]]:
    plan: ko.PlacementPlan = report.plan
    sizes: tuple[int, int] = (report.size_before, report.size_after)
    quality: dict[str, float] = {output.name: output.sqnr_db for output in report.outputs}
    floats: list[str] = []
    if report.fusion is not None:
        floats = [kernel.node for kernel in report.fusion.kernels if not kernel.integer]
    text: str = report.to_json() + report.verdict() + str(report) + plan.to_json()
    source: str = report.options["per_channel"].source
    return sizes[0] / sizes[1] + sum(quality.values()), [*floats, source, text, ko.__version__]


def prove() -> float:
    report: ko.FusionReport = ko.verify_fusion("int8.onnx")
    return report.integer_share()


def readers(model: onnx.ModelProto) -> list[CalibrationDataReader]:
    arrays = {"x": np.zeros((4, 3, 8, 8), np.float32)}
    length: int = len(ko.ArrayReader(arrays, batch_size=2))
    made: list[CalibrationDataReader] = [ko.ArrayReader(arrays), ko.ArrayReader([arrays]), ko.ArrayReader("d.npz")]
    return [*made, ko.SyntheticReader(model, samples=length)]


def errors() -> str | None:
    try:
        table = ko.CalibrationTable.load("ranges.json")
        low, high = table.range_of("x")
        return f"{low:.3f} {high:.3f}"
    except ko.CalibrationError as error:
        return error.fix
    except ko.KenosisError as error:
        return f"{error.what} {error.where}"
