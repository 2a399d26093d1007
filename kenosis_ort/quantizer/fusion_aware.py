"""The quantizer: performs a placement plan on stock's ``QDQQuantizer``.

Without a plan stock's own methods run as they are. With one, none of them that walks or searches the graph does: the
plan decides each edge, and what it decides is placed in time linear in the number of nodes.
"""

import logging
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, Final

import onnx
import onnxruntime
from onnxruntime.quantization import quant_utils
from onnxruntime.quantization.calibrate import TensorsData
from onnxruntime.quantization.onnx_model import ONNXModel
from onnxruntime.quantization.qdq_quantizer import QDQQuantizer
from onnxruntime.quantization.quant_utils import DEQUANT_OUTPUT_SUFFIX, add_infer_metadata

from kenosis_ort.errors import OptionError
from kenosis_ort.graph.constants import replace_nodes
from kenosis_ort.graph.walk import all_graphs, all_nodes, captured_names, reserve_name
from kenosis_ort.options import Stages
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.quantizer.pairs import Pairs, QdqEditor
from kenosis_ort.quantizer.placed_constants import Constants

_log = logging.getLogger(__name__)

_PRODUCER = ("kenosis_ort", version("kenosis-ort"))


_NEWER_OPTIONS = {  # by the function that came with them
    "ActivationRestrictedAsymmetric": "snap_zero_point_to_uint8",
    "BlockSize": "compute_scale_zp_blocked",
}


def check_installed(extra_options: Mapping[str, Any]) -> None:
    """Refuses what the installed runtime's quantizer is too old to know, and would ignore without a word.

    Raises:
        OptionError: An option needs a newer onnxruntime.
    """
    newer = [k for k, needed in _NEWER_OPTIONS.items() if extra_options.get(k) and not hasattr(quant_utils, needed)]
    if newer:
        what = f"extra_options['{newer[0]}'] needs onnxruntime 1.27 or later; {onnxruntime.__version__} is installed"
        raise OptionError(what, where=newer[0], fix="upgrade onnxruntime, or remove it")


def sort_nodes_as_stock(graph: onnx.GraphProto) -> None:
    """Puts nodes in the order of stock's ``topological_sort``, which does not know what bodies read.

    Raises:
        ValueError: The graph has a cycle, or a node reads a value that nothing writes.
    """
    nodes = list(graph.node)
    waiting: dict[str, list[int]] = {}
    reads = [(*filter(None, node.input), *captured_names(node)) for node in nodes]
    missing = list(map(len, reads))
    order: list[int] = []
    for position, names in enumerate(reads):
        if not names:
            order.append(position)
        for name in names:
            waiting.setdefault(name, []).append(position)

    def arrive(name: str) -> None:
        for position in waiting.get(name, ()):
            missing[position] -= 1
            if missing[position] == 0:
                order.append(position)

    for name in sorted({value.name for value in (*graph.initializer, *graph.input)}):
        arrive(name)
    for position in order:  # which grows
        for output in nodes[position].output:
            arrive(output)
    if len(order) != len(nodes):
        stuck = next(i for i in range(len(nodes)) if missing[i] > 0)
        raise ValueError(f"the graph is not a DAG, or node '{nodes[stuck].name}' reads a value that nothing writes")
    replace_nodes(graph, [nodes[position] for position in order])


class ModelWithBodies(ONNXModel):  # type: ignore[misc]
    """Stock's model, where a value that a body of If, Loop or Scan reads counts as read by the node that has it."""

    def input_name_to_nodes(self) -> dict[str, list[onnx.NodeProto]]:
        found: dict[str, list[onnx.NodeProto]] = super().input_name_to_nodes()
        for node in self.nodes():
            for name in captured_names(node):
                found.setdefault(name, []).append(node)
        return found

    def clean_initializers(self) -> Any:
        """As stock, which loses the domain of a node that has a body."""
        domains = {at: node.domain for at, node in enumerate(self.nodes()) if node.HasField("domain")}
        found = super().clean_initializers()
        for at, domain in domains.items():
            self.model.graph.node[at].domain = domain
        return found

    def topological_sort(self, *_: Any, **__: Any) -> None:
        sort_nodes_as_stock(self.model.graph)


class FusionAwareQDQQuantizer(QDQQuantizer):  # type: ignore[misc]
    """Stock's quantizer with the plan's marks in place of its own.

    Args:
        model: Prepared model; changed in place, so pass a private copy.
        per_channel, reduce_range, weight_qType, activation_qType, tensors_range: As ``QDQQuantizer``.
        further: Its parameters from ``nodes_to_quantize`` on.
        plan: What to place where; None or an empty plan leaves everything to stock.
        stages: Which Kenosis stages act on the arithmetic.
        weights: Content of initializers that the model only names, so that weights which become integers are never
            copied as floats. Not changed; copied in where something still reads them.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        per_channel: bool,
        reduce_range: bool,
        weight_qType: Any,  # noqa: N803 - stock's name
        activation_qType: Any,  # noqa: N803 - stock's name
        tensors_range: TensorsData | None,
        *further: Any,
        plan: PlacementPlan | None = None,
        stages: Stages | None = None,
        weights: Mapping[str, onnx.TensorProto] | None = None,
    ) -> None:
        self.plan = plan or None
        self.stages = stages or Stages()
        self.weights = dict(weights or {})
        if self.plan:  # its shapes are inferred: stock would write it to disk, infer them again, and read it back
            add_infer_metadata(model)
        ranges = None if self.plan else tensors_range
        super().__init__(model, per_channel, reduce_range, weight_qType, activation_qType, ranges, *further)
        self.tensors_range = tensors_range
        self._placed: tuple[Pairs, Constants] | None = None

    def quantize_model(self) -> onnx.ModelProto:
        """Quantizes and returns the model (the one given, changed in place), unsorted as in stock."""
        if self.plan is None:
            super().quantize_model()
        else:
            self._perform(self.plan)
        quantized: onnx.ModelProto = self.model.model
        return quantized

    def rescaled(
        self, ranges: TensorsData, constants: Mapping[str, onnx.TensorProto]
    ) -> dict[str, onnx.TensorProto] | None:
        """The initializers of the quantized model that differ with other ranges and other constants, by name.

        Args:
            ranges: For the same plan.
            constants: In place of those of the float model.

        Returns:
            None where the model would differ in more than numbers: a bias would widen a scale of weights, constants
            other than biases are quantized, or biases are no longer one where their scales are.
        """
        assert self._placed is not None, "the model is quantized, by a plan"
        pairs, placed = self._placed
        self.tensors_range = ranges
        scales = pairs.rescaled()
        biases = placed.rescaled(constants)
        return None if biases is None else {**scales, **biases}

    def is_tensor_per_channel(
        self, tensor_name: str, default_axis: int, op_type: str | None = None
    ) -> tuple[bool, int | None]:
        """As stock, but a MatMul weight of three or more dimensions is per tensor: the runtime takes no other."""
        weight = self.initializers.get(tensor_name)
        refused = op_type == "MatMul" and weight is not None and len(weight.dims) > 2
        overridden = self.tensor_quant_overrides.has_per_channel_overrides(tensor_name)
        if refused and not overridden and self.stages != Stages.none():
            return False, None
        found: tuple[bool, int | None] = super().is_tensor_per_channel(tensor_name, default_axis, op_type)
        return found

    def calc_graph_quant_params(self) -> dict[str, Any]:
        """As stock, which calls this when all else is set up; from here on what bodies read counts."""
        self.model: ONNXModel = ModelWithBodies(self.model.model)
        found: dict[str, Any] = super().calc_graph_quant_params()
        return found

    def _quantize_sharing_param_tensors(self) -> None:
        """As stock, which waits for ever for a provider that the model itself brings quantized: such stay float."""
        waiting = dict(self.tensors_to_quantize)
        resolved = set(self.quantized_value_map)
        progress = True
        while progress:
            ready = {name for name, info in waiting.items() if info.quant_para_provider.input_name in resolved}
            progress = bool(ready)
            resolved |= ready
            for name in ready:
                del waiting[name]
        for name in waiting:
            _log.warning("'%s' stays float: the tensor it shares its scale with is quantized already", name)
            del self.tensors_to_quantize[name]
        super()._quantize_sharing_param_tensors()

    def _perform(self, plan: PlacementPlan) -> None:
        editor = QdqEditor(self)
        pairs = Pairs(editor, plan)
        pairs.place()
        constants = Constants(editor, plan, pairs)
        constants.place()
        self._placed = pairs, constants
        editor.finish()
        if self.qdq_op_domain:
            self.model.set_opset_import(self.qdq_op_domain, 1)
        self.model.model.producer_name, self.model.model.producer_version = _PRODUCER


_SUFFIX: Final = "_dequantized"


def name_made_values(quantized: onnx.ModelProto, original: onnx.ModelProto) -> None:
    """Renames in place what dequantizes values and weights that ``original`` does not have.

    ``onnxruntime.quantization.qdq_loss_debug`` takes ``X_DequantizeLinear_Output`` for the counterpart of the float
    model's ``X``, and fails where there is no ``X``: a value that a rewrite made.
    """
    known = _names(original.graph)
    taken = _names(quantized.graph)
    new: dict[str, str] = {}
    for node in quantized.graph.node:
        name = node.output[0] if node.op_type == "DequantizeLinear" else ""
        base = name.removesuffix(DEQUANT_OUTPUT_SUFFIX)
        if base != name and base not in known:
            new[name] = node.output[0] = reserve_name(f"{base}{_SUFFIX}", taken)
    for node in all_nodes(quantized, functions=False) if new else ():
        node.input[:] = [new.get(name, name) for name in node.input]


def _names(graph: onnx.GraphProto) -> set[str]:
    """The names of all values of a graph and its bodies."""
    names: set[str] = set()
    for inner in all_graphs(graph):
        names.update(value.name for value in (*inner.input, *inner.output, *inner.initializer))
        names.update(name for node in inner.node for name in node.output)
    return names
