"""The data reader of `run.py`, in a module beside it."""

import numpy
import onnxruntime
from onnxruntime.quantization import CalibrationDataReader


class DigitsDataReader(CalibrationDataReader):
    def __init__(self, calibration_data: str, model_path: str):
        self.enum_data = None
        session = onnxruntime.InferenceSession(model_path, None, providers=["CPUExecutionProvider"])
        (_, _, height, width) = session.get_inputs()[0].shape
        self.nhwc_data_list = [image[None] for image in numpy.load(calibration_data)["image"]]
        assert self.nhwc_data_list[0].shape == (1, 1, height, width)
        self.input_name = session.get_inputs()[0].name
        self.datasize = len(self.nhwc_data_list)

    def get_next(self):
        if self.enum_data is None:
            self.enum_data = iter([{self.input_name: data} for data in self.nhwc_data_list])
        return next(self.enum_data, None)

    def rewind(self):
        self.enum_data = None
