"""A quantization script as users of ONNX Runtime write them; it knows nothing of kenosis_ort."""

import argparse
import time

import digits_data_reader
import numpy as np
import onnxruntime
from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process


def benchmark(model_path):
    session = onnxruntime.InferenceSession(model_path, providers=["CPUExecutionProvider"])
    input_name = session.get_inputs()[0].name
    total = 0.0
    runs = 10
    input_data = np.zeros((1, 1, 8, 8), np.float32)
    _ = session.run([], {input_name: input_data})
    for _ in range(runs):
        start = time.perf_counter()
        session.run([], {input_name: input_data})
        end = (time.perf_counter() - start) * 1000
        total += end
        print(f"{end:.2f}ms")
    total /= runs
    print(f"Avg: {total:.2f}ms")


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--input_model", required=True)
    parser.add_argument("--output_model", required=True)
    parser.add_argument("--calibrate_dataset", required=True)
    parser.add_argument(
        "--quant_format", default=QuantFormat.QDQ, type=QuantFormat.from_string, choices=list(QuantFormat)
    )
    parser.add_argument("--per_channel", default=False, type=bool)
    return parser.parse_args()


def main():
    args = get_args()
    prepared_model = args.output_model + ".prepared.onnx"
    quant_pre_process(args.input_model, prepared_model)
    dr = digits_data_reader.DigitsDataReader(args.calibrate_dataset, args.input_model)
    quantize_static(
        prepared_model,
        args.output_model,
        dr,
        quant_format=args.quant_format,
        per_channel=args.per_channel,
        weight_type=QuantType.QInt8,
    )
    print("Calibrated and quantized model saved.")
    print("benchmarking fp32 model...")
    benchmark(args.input_model)
    print("benchmarking int8 model...")
    benchmark(args.output_model)


if __name__ == "__main__":
    main()
