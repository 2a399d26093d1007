"""From a float model to its plan and its quantized form, step by step, as the flow does it but without files.

`parse` reads the text form of ONNX, in which weights are declared and filled with seeded random numbers:

    net (float[1,3,8,8] x) => (y) <float[8,3,3,3] w, float[8] b> {
      c = Conv <kernel_shape=[3,3], pads=[1,1,1,1]> (x, w, b)
      y = Relu (c)
    }

Functions of the model may follow. Preparation names the nodes ``Conv_c`` and ``Relu_y``; ``[name] c = Conv (x, w)``
names one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType

from kenosis_ort.calibration.collector import Points, collect
from kenosis_ort.calibration.methods import CalibrationConfig
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.graph.outside import copy_model
from kenosis_ort.graph.view import GraphView
from kenosis_ort.options import Stages
from kenosis_ort.placement.planner import Planner
from kenosis_ort.plan import PlacementOptions, PlacementPlan
from kenosis_ort.quantizer.fusion_aware import FusionAwareQDQQuantizer
from kenosis_ort.quantizer.stock import QUANTIZABLE_OPS
from kenosis_ort.rewrite import PREPARATION
from kenosis_ort.rewrite.affine import fold_gemm_factors
from kenosis_ort.rewrite.prepare import prepare
from kenosis_ort.targets import Target
from kenosis_ort.targets.ort_cpu import ORT_CPU
from tests import models
from tests.models import Feed, FeedReader

Range = tuple[float, float]


def parse(
    text: str, weights: Mapping[str, Any] | None = None, *, opset: int = 17, ir_version: int = 10, seed: int = 0,
    domains: Sequence[str] = ("com.microsoft",), checked: bool = True,
) -> onnx.ModelProto:  # fmt: skip
    """Returns the model of an ONNX text graph.

    Args:
        text: The graph, with or without a name; values declared in ``<...>`` that no node computes become initializers.
        weights: Contents of some of these, or of further ones; the rest is random (floats) or zero (integers).
        opset: Version of the ONNX operator set.
        ir_version: IR version.
        seed: Seed of the random weights.
        domains: Operator sets beside ONNX' own, each of version 1.
        checked: ONNX looks whether the model is sound.
    """
    imports = ", ".join(
        f'"{domain}" : {version}' for domain, version in {"": opset, **dict.fromkeys(domains, 1)}.items()
    )
    head = f"<ir_version: {ir_version}, opset_import: [{imports}]>"
    model = onnx.parser.parse_model(f"{head}\n{'' if text.lstrip()[0] != '(' else 'net '}{text}")
    graph = model.graph
    given = {name: np.asarray(value) for name, value in (weights or {}).items()}
    computed = {name for node in graph.node for name in node.output}
    declared = [v for v in graph.value_info if v.name not in computed]
    rng = np.random.default_rng(seed)
    for value in declared:
        tensor = value.type.tensor_type
        shape = [d.dim_value for d in tensor.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        if value.name in given:
            array = given.pop(value.name).astype(dtype).reshape(shape)
        elif dtype.kind == "f":
            fan_in = max(int(np.prod(shape[1:])), 1)
            array = rng.normal(0.0, (1.5 / fan_in) ** 0.5, shape).astype(dtype)
        else:
            array = np.zeros(shape, dtype)
        graph.initializer.append(numpy_helper.from_array(array, value.name))
    for name, array in given.items():
        graph.initializer.append(numpy_helper.from_array(array, name))
    kept = [v for v in graph.value_info if v.name in computed]
    del graph.value_info[:]
    if any(not output.HasField("type") for output in graph.output):
        for output in graph.output:
            output.type.tensor_type.elem_type = TensorProto.FLOAT
        model = onnx.shape_inference.infer_shapes(model)
        del model.graph.value_info[:]
    model.graph.value_info.extend(kept)
    if checked:
        onnx.checker.check_model(model)
    return model


def prepared(model: onnx.ModelProto, *, min_opset: int = 13) -> onnx.ModelProto:
    """Returns the model as the flow prepares it before planning, a Gemm's factors aside: those of models that went
    through ``quant_pre_process`` reach the planner."""
    rewrites = [rewrite for rewrite in PREPARATION if rewrite is not fold_gemm_factors]
    return prepare(model, min_opset=min_opset, rewrites=rewrites).proto


def view_of(model: onnx.ModelProto | str, weights: Mapping[str, Any] | None = None) -> GraphView:
    """Returns the prepared model, or that of an ONNX text, as it is looked at."""
    return GraphView(prepared(parse(model, weights) if isinstance(model, str) else model))


def plan_of(
    model: onnx.ModelProto | str, *, weights: Mapping[str, Any] | None = None,
    ranges: Mapping[str, Range] | None = None, target: Target = ORT_CPU, min_opset: int = 13, **options: Any
) -> PlacementPlan:  # fmt: skip
    """Returns the plan of a model, or of an ONNX text.

    Args:
        model: The model, or the text for `parse`.
        weights: For `parse`.
        ranges: Calibrated ranges; None plans as before calibration.
        target: The runtime's table.
        min_opset: Least operator set of preparation.
        options: Fields of `PlacementOptions`.
    """
    proto = parse(model, weights) if isinstance(model, str) else model
    return Planner(GraphView(prepared(proto, min_opset=min_opset)), target, PlacementOptions(**options)).plan(ranges)


@dataclass(frozen=True)
class Outcome:
    """A model on its way: the prepared float one, its plan, its ranges, and the quantized one."""

    model: onnx.ModelProto
    plan: PlacementPlan
    table: CalibrationTable
    quantized: onnx.ModelProto
    feeds: tuple[Feed, ...]


def quantize(
    model: onnx.ModelProto | str, *, weights: Mapping[str, Any] | None = None, feeds: Sequence[Feed] | None = None,
    stages: Stages | None = None, reduce_range: bool = False, weight_type: QuantType = QuantType.QInt8,
    extra_options: Mapping[str, Any] | None = None,
    revise: Callable[[PlacementPlan, GraphView], PlacementPlan] = lambda plan, _: plan, **options: Any
) -> Outcome:  # fmt: skip
    """Plans, calibrates with seeded data, plans again and quantizes; nothing is verified or repaired.

    Args:
        model: The model, or the text for `parse`.
        weights: For `parse`.
        feeds: Calibration data; random by default.
        stages: Which arithmetic to use.
        reduce_range: 7-bit weights.
        weight_type: Data type of weights.
        extra_options: Stock's options.
        revise: Changes the plan.
        options: Fields of `PlacementOptions`.
    """
    proto = prepared(parse(model, weights) if isinstance(model, str) else model)
    samples = tuple(feeds if feeds is not None else models.feeds(proto, 3))
    wishes = PlacementOptions(**options)
    view = GraphView(proto)
    first = Planner(view, ORT_CPU, wishes).plan()
    constants = {i.name for i in proto.graph.initializer}
    tensors = [value for value, _ in first.quantized_values() if value not in constants]
    config = CalibrationConfig.from_extra_options("MinMax", {})
    table = collect(proto, FeedReader(samples), Points(tensors, config=config))
    plan = Planner(view, ORT_CPU, wishes).plan({name: table.range_of(name) for name in table.tensors})
    plan = revise(plan, view)
    quantizer = FusionAwareQDQQuantizer(
        copy_model(proto), wishes.per_channel, reduce_range, weight_type, wishes.activation_type,
        table.to_tensors_data(), [], list(wishes.nodes_to_exclude), list(QUANTIZABLE_OPS), dict(extra_options or {}),
        plan=plan, stages=stages,
    )  # fmt: skip
    quantized = quantizer.quantize_model()
    quantizer.model.topological_sort()
    return Outcome(proto, plan, table, quantized, samples)
