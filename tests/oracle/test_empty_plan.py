"""The drop-in proof: with an empty plan, and with all stages off, the result is stock ONNX Runtime's."""

import functools
import logging
import tempfile
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors
from onnxruntime.quantization import QDQQuantizer, create_calibrator
from onnxruntime.quantization import quantize_static as stock_quantize_static
from onnxruntime.quantization.calibrate import TensorsData
from onnxruntime.quantization.quant_utils import add_pre_process_metadata
from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

from kenosis_ort.api import quantize_static
from kenosis_ort.errors import KenosisError
from kenosis_ort.graph.outside import copy_model
from kenosis_ort.graph.walk import opset_of
from kenosis_ort.options import Stages
from kenosis_ort.quantizer.fusion_aware import FusionAwareQDQQuantizer
from kenosis_ort.quantizer.stock import stock_model
from tests.models import FeedReader, session
from tests.oracle import corpus
from tests.oracle.compare import differences
from tests.oracle.corpus import GRAPHS, OPTIONS, Options

OP_TYPES = tuple(sorted({*QDQRegistry, *QLinearOpsRegistry}))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)  # stock asks for pre-processing on every call
    yield
    logging.disable(logging.NOTSET)


@functools.cache
def _model(name: str, opset: int) -> bytes:
    model = GRAPHS[name]()
    if opset_of(model) != opset:
        model = onnx.version_converter.convert_version(model, opset)  # the corpus' operators have adapters
    model = onnx.shape_inference.infer_shapes(model)
    add_pre_process_metadata(model)
    return bytes(model.SerializeToString())


def _load(name: str, opset: int) -> onnx.ModelProto:
    return onnx.load_from_string(_model(name, opset))


@functools.cache
def _ranges(name: str, opset: int) -> TensorsData:
    model = _load(name, opset)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"
        onnx.save(model, str(path))
        calibrator = create_calibrator(path, OP_TYPES, augmented_model_path=str(Path(folder) / "augmented.onnx"))
        calibrator.collect_data(FeedReader(corpus.feeds(model)))
        return calibrator.compute_data()


def _quantize(make: Any, source: onnx.ModelProto, name: str, options: Options, **extras: Any) -> onnx.ModelProto | str:
    """Returns the quantized model, or what the quantizer raised."""
    numbers = (options[key] for key in ("per_channel", "reduce_range", "weight_type", "activation_type"))
    nodes = (list(options[key]) for key in ("nodes_to_quantize", "nodes_to_exclude"))
    op_types, further = list(options["op_types_to_quantize"] or OP_TYPES), dict(options["extra_options"])
    quantizer = make(copy_model(source), *numbers, _ranges(name, options["opset"]), *nodes, op_types, further, **extras)
    try:
        quantizer.quantize_model()
    except (ValueError, AssertionError, RuntimeError, KeyError, TypeError, AttributeError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    result: onnx.ModelProto = quantizer.model.model
    return result


def _loads(model: onnx.ModelProto) -> bool:
    try:
        session(model)
    except (ort_errors.InvalidGraph, ort_errors.Fail, ort_errors.InvalidArgument, ort_errors.NotImplemented):
        return False
    return True


def _some(options: str) -> list[str]:
    """All graphs for the plain data types; every third, another third each time, for the other options."""
    names = list(GRAPHS)
    if options in ("u8s8", "u8s8_per_channel", "s8s8_symmetric"):
        return names
    return names[list(OPTIONS).index(options) % 3 :: 3]


def test_corpus_covers_both_registries() -> None:
    seen = {n.op_type for build in GRAPHS.values() for n in build().graph.node}
    assert not set(OP_TYPES) - seen


_FOUR_BITS = pytest.param("u8s4_opset21", marks=pytest.mark.since("1.24"))  # stock of before fails beside onnx of today


@pytest.mark.parametrize("options", [_FOUR_BITS if name == "u8s4_opset21" else name for name in OPTIONS])
def test_empty_plan_equals_stock(options: str) -> None:
    problems, quantized = {}, 0
    graphs, chosen = _some(options), OPTIONS[options]
    for name in graphs:
        types = chosen["weight_type"], chosen["activation_type"]
        source = stock_model(_load(name, chosen["opset"]), *types, chosen["extra_options"])
        want = _quantize(QDQQuantizer, source, name, chosen)
        got = _quantize(FusionAwareQDQQuantizer, source, name, chosen, plan=None)
        if isinstance(want, str) or isinstance(got, str):
            if isinstance(want, onnx.ModelProto):
                problems[name] = [f"stock works, ours raises {got}"]
            continue
        quantized += any(n.op_type == "QuantizeLinear" for n in want.graph.node)
        found = differences(want, got)
        if found and _loads(want):  # nothing to be equal to where stock's file is invalid
            problems[name] = found
    assert not problems
    assert quantized > (0 if options in ("only_front", "some_op_types") else len(graphs) // 2)


END_TO_END = "u8s8 u8s8_per_channel s8s8_symmetric keep_removable dedicated_pairs without_front u16s8"


@pytest.mark.filterwarnings("ignore:The file holds the float model:kenosis_ort.KenosisWarning")
@pytest.mark.parametrize("options", END_TO_END.split())
def test_all_stages_off_equals_stock(options: str, tmp_path: Path) -> None:
    arguments = {**deepcopy(OPTIONS[options]), "op_types_to_quantize": list(OP_TYPES), "nodes_to_quantize": []}
    opset, problems, stock, ours = arguments.pop("opset"), {}, tmp_path / "stock.onnx", tmp_path / "ours.onnx"
    for name in list(GRAPHS)[:: 2 if options == "u8s8" else 6]:
        model = _load(name, opset)
        nodes = {n.name for n in model.graph.node}
        if not {n.op_type for n in model.graph.node} & set(OP_TYPES):
            continue
        arguments["nodes_to_exclude"] = [n for n in OPTIONS[options]["nodes_to_exclude"] if n in nodes]
        try:
            stock_quantize_static(model, str(stock), FeedReader(corpus.feeds(model)), **arguments)
            want = onnx.load(stock)
        except (ValueError, RuntimeError, AssertionError, TypeError, ort_errors.Fail):
            continue  # where stock has no answer there is nothing to be equal to
        if not _loads(want):
            continue
        feeds, model = FeedReader(corpus.feeds(model)), _load(name, opset)  # stock made its weights file references
        try:
            report = quantize_static(model, ours, feeds, stages=Stages.none(), verify=False, **arguments)
        except KenosisError as error:
            problems[name] = [f"ours raises {error}"]
            continue
        if not report.is_float:
            problems[name] = differences(want, onnx.load(ours))
        elif any(n.op_type == "QuantizeLinear" for n in want.graph.node):
            problems[name] = ["ours finds nothing to quantize"]
    assert not any(problems.values()), problems
