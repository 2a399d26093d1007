"""One frozen request: options of the caller, and those that the host decided where the caller gave none."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from kenosis_ort import options
from kenosis_ort.accuracy.metric import CheckedMetric
from kenosis_ort.calibration import cached_samples
from kenosis_ort.calibration.methods import CalibrationConfig
from kenosis_ort.errors import OptionError
from kenosis_ort.graph.view import PreparedModel
from kenosis_ort.graph.walk import owners
from kenosis_ort.options import EXPORT_FORMATS, OptionChoice, Speed, Stages, Widths
from kenosis_ort.passes.recipe import Recipe
from kenosis_ort.plan import PlacementOptions, PlacementPlan
from kenosis_ort.quantizer.int8_cache import Cache
from kenosis_ort.quantizer.stock import QuantType
from kenosis_ort.rewrite.rule import Rule
from kenosis_ort.runtime.machine import machine
from kenosis_ort.targets.model import Target
from kenosis_ort.targets.profile import HostProfile
from kenosis_ort.targets.proof import FusionReport
from kenosis_ort.targets.vocabulary import DataTypes, Role

if TYPE_CHECKING:  # which few calls have, and which loads asyncio
    from kenosis_ort.cluster.client import Cluster

Progress = Callable[[int, int | None], None]
EIGHT_BIT = (QuantType.QInt8, QuantType.QUInt8)
_COMPARED_FEEDS = 4
_MEASURED_FEEDS = 1024  # what is lost is measured on; their bytes are bounded as well
_FEEDS_OF_BODIES = 4096  # their bytes are bounded as well


@dataclass(frozen=True)
class Request:
    """One quantization, fully resolved.

    Attributes:
        output: Where the result goes, absolute.
        output_name: The same as the caller gave it.
        stock_reason: Why stock's own placement is used; None where the plan decides.
        complaints: Warnings about names that fit nothing.
        names_all_types: ``op_types`` leaves out nothing that the target would quantize.
        names_all_nodes: ``nodes_to_quantize`` likewise.
        preparation: Rewrites that belong to preparation, in order.
        float_forms: Rewrites into operators that quantize better, in order.
        integer_forms: Rewrites that pay between integer kernels only, in order.
        types: Data types of the target on the machine at hand.
        choices: Every option with its value and who chose it, for the report.
        recipe: The accuracy passes.
        metric: The caller's own measure.
        eval_reader: The caller's held-out data, not read yet; None for held-out calibration samples.
        speed: What is timed.
        evidence: What is gathered for the picture in the report.
        format: How the result is written.
        widths: Bits of weights and activations.
        host: The machine that the file is laid out for; None where the target knows of none.
        executor: Where the float model runs over the samples; None for this process.
        kv_cache: ``int8``, or a file whose cache's scales are taken; None where caches stay float.
        caches: The tensors of the cache that become int8.
        max_opset: The highest main operator set of the result that the caller allows; None for the runtime's.
        on_failure: What a defect of ours ends in: ``error``, or ``float``, the float model as it came.
        open_defaults: Inputs with a default value that callers may override, and that so are not constant.
    """

    output: Path
    output_name: str
    op_types: tuple[str, ...]
    per_channel: bool
    reduce_range: bool
    activation_type: QuantType
    weight_type: QuantType
    nodes_to_quantize: tuple[str, ...]
    nodes_to_exclude: tuple[str, ...]
    use_external_data_format: bool
    calibrate_method: Any
    calibration_providers: tuple[Any, ...] | None
    extra_options: Mapping[str, Any]
    cache_path: Path | None
    target: Target
    protect_outputs: options.OutputPolicy
    primary_inputs: tuple[str, ...] | None
    custom_op_libraries: tuple[str, ...]
    progress: Progress | None
    verify: bool
    stages: Stages
    preparation: tuple[Rule, ...]
    float_forms: tuple[Rule, ...]
    integer_forms: tuple[Rule, ...]
    types: DataTypes
    stock_reason: str | None
    choices: Mapping[str, OptionChoice]
    recipe: Recipe
    metric: CheckedMetric | None
    eval_reader: Any
    speed: Speed
    evidence: options.Evidence
    format: options.Format
    widths: Widths
    host: HostProfile | None = None
    executor: Cluster | None = None
    kv_cache: str | os.PathLike[str] | None = None
    caches: tuple[Cache, ...] = ()
    max_opset: int | None = None
    on_failure: options.Failure = "error"
    open_defaults: frozenset[str] = frozenset()
    complaints: tuple[str, ...] = ()
    names_all_types: bool = False
    names_all_nodes: bool = False

    @property
    def unrewritten(self) -> Request:
        """The request without optional rewrites."""
        return replace(self, float_forms=(), integer_forms=())

    def with_stock_placement(self, why: str) -> Request:
        """The request with stock's placement: weights by tensor, and of 7 bits for kernels that add pairs in int16."""
        seven_bits = self.types.largest_pair is not None and self.weight_type == QuantType.QInt8
        default: dict[str, Any] = {"per_channel": False, "reduce_range": seven_bits}
        open_ones = {name: value for name, value in default.items() if not self.is_explicit(name)}
        choices = {name: OptionChoice(value, "stock default") for name, value in open_ones.items()}
        return replace(self, stock_reason=why, choices={**self.choices, **choices}, **open_ones)

    def with_names_of(self, prepared: PreparedModel) -> Request:
        """The request with the caller's node names as they are in the prepared model."""

        def renamed(name: str) -> list[str]:
            return [name, *(n for n in prepared.nodes.get(name, ()) if n.startswith(name))]

        exclude, only = (
            tuple(dict.fromkeys(new for name in names for new in renamed(name)))
            for names in (self.nodes_to_exclude, self.nodes_to_quantize)
        )
        by_node = {new: bits for name, bits in self.widths.by_node.items() for new in renamed(name)}
        widths = replace(self.widths, by_node=by_node)
        return replace(self, nodes_to_exclude=exclude, nodes_to_quantize=only, widths=widths)

    def is_explicit(self, option: str) -> bool:
        """Whether the caller chose an option's value."""
        return self.choices[option].source == "caller"

    @property
    def given_extra_options(self) -> dict[str, Any]:
        """Extra options of the caller, without those that the target adds."""
        return {key: v for key, v in self.extra_options.items() if self.is_explicit(f"extra_options.{key}")}

    @property
    def op_types_named(self) -> bool:
        """The caller gave a list of operator types."""
        return "op_types_to_quantize" in self.choices

    @property
    def inserts_smoothing(self) -> bool:
        """SmoothQuant may insert a Mul where nothing can take its scale."""
        return bool(self.extra_options.get("SmoothQuant")) and self.extra_options.get("SmoothQuantFolding") is False

    @property
    def chooses_ranges(self) -> bool:
        """Activation ranges are chosen by their effect: the caller named no method, and the recipe says so."""
        return self.recipe.ranges == "auto" and self.choices["calibrate_method"].source != "caller"

    @property
    def feeds_wanted(self) -> int:
        """Number of feeds that the passes and comparisons need again."""
        return max(self.recipe.samples, _COMPARED_FEEDS)

    def most_feeds(self, model: onnx.ModelProto, *, for_all: bool = False) -> int:
        """Largest number of cached feeds: bodies of control flow are calibrated on these.

        Args:
            model: The float model.
            for_all: They are to serve every recipe, as in a table that is written.
        """
        if any(True for _ in owners(model)):
            return _FEEDS_OF_BODIES
        if for_all or self.cache_path is not None:
            return max(self.feeds_wanted, cached_samples.MOST_FOR_PASSES)
        return max(self.feeds_wanted, _MEASURED_FEEDS if self.executor is None else 0)

    @property
    def is_proved(self) -> bool:
        """The target's runtime is asked which kernels it uses."""
        return self.verify and self.target.hooks.prove is not None

    def proof(self, model: onnx.ModelProto, plan: PlacementPlan | None = None) -> FusionReport | None:
        """The kernels that the runtime uses for a model; None for a target that cannot be asked."""
        prove = self.target.hooks.prove
        return None if prove is None else prove(model, plan=plan or None, custom_op_libraries=self.custom_op_libraries)

    @property
    def is_for_this_machine(self) -> bool:
        """The processor at hand chooses the same kernels as that of the file's profile."""
        return self.host is None or set(self.host.features) == set(machine().features)

    @property
    def host_label(self) -> str:
        """Machine that a file is laid out for, as the report names it; empty where no costs were asked for."""
        profile, speed = self.host, self.speed
        if profile is None or speed.tune == "off" or self.stock_reason is not None:
            return ""
        if speed.host is not None or self.choices["host"].source == "recipe":
            how = "as asked for"
        elif not profile.is_of_class(machine().features):
            return f"this machine, whose class was not measured: by the ratios of {profile.machine}, without times"
        else:
            shipped = {p.name: p for p in self.target.profiles}.get(profile.name)
            how = "measured here" if shipped is None else "the profile nearest to this machine"
            if shipped is not None and profile != shipped:
                how += ", but for its second kernel of Conv, which was run here and is no faster"
        return f"'{profile.name}' ({profile.machine}), {how}"

    @property
    def is_stock(self) -> bool:
        """All stages are off: the result has to be stock's."""
        return self.stages == Stages.none()

    @property
    def asks_int8(self) -> bool:
        """The caller wants int8 activations on a machine whose kernels take uint8: perhaps for another machine."""
        int8 = QuantType.QInt8
        return bool(self.activation_type == int8 and self.types.activation != int8.tensor_type)

    @property
    def restricts_types(self) -> bool:
        """The caller's list of operator types says more than "the whole model"."""
        return self.op_types_named and not self.names_all_types

    @property
    def explicit_option(self) -> str | None:
        """The option by which the caller chose types or nodes, so that none of these is left float for speed."""
        extra, activation, weight = self.extra_options, self.activation_type, self.weight_type
        latent = any(runs_float(self.target, op_type) for op_type in self.op_types)
        options = (
            (self.format in EXPORT_FORMATS, f"format='{self.format}'"),
            (not self.widths.are_bytes, "the number of bits"),
            (activation.tensor_type not in self.types.activations, f"activation_type=QuantType.{activation.name}"),
            (weight.tensor_type not in self.types.weights, f"weight_type=QuantType.{weight.name}"),
            (self.nodes_to_quantize and not self.names_all_nodes, "nodes_to_quantize"),
            (self.restricts_types and latent, "op_types_to_quantize"),
            *((extra.get(key), f"extra_options['{key}']") for key in ("TensorQuantOverrides", "BlockSize")),
            (self._forces_latent, "extra_options['ForceQuantizeNoInputCheck']"),
        )
        return next((name for is_given, name in options if is_given), None) if self.stock_reason is None else None

    def is_requested(self, node: Any) -> bool:
        """Whether the caller names a node, or its type, that the target would leave float."""
        named = bool(self.nodes_to_quantize) and not self.names_all_nodes and node.name in self.nodes_to_quantize
        by_type = self.restricts_types and node.op_type in self.op_types
        return (named or by_type) and runs_float(self.target, node.op_type)

    @property
    def needs_wide_types(self) -> bool:
        """The caller asks for data types that Q and DQ of the standard domain have from operator set 21 on."""
        entries = [e for extra in (self.extra_options.get("TensorQuantOverrides") or {}).values() for e in extra]
        types = [e.get("quant_type") for e in (*entries, *(e.get("convert") or {} for e in entries))]
        wide = any(t is not None and t not in EIGHT_BIT for t in (self.activation_type, self.weight_type, *types))
        return (wide or bool(self.extra_options.get("BlockSize"))) and not self.extra_options.get("UseQDQContribOps")

    @property
    def suits_kernels(self) -> bool:
        """Weights are stored as the kernels of the machine like them best."""
        types = self.activation_type == QuantType.QUInt8 and self.weight_type == QuantType.QInt8
        extra = self.extra_options
        own = self.stages.weights and extra.get("WeightSymmetric") is not False and not extra.get("MinimumRealRange")
        plain = self.format in ("qdq", "qop")  # other tools expect weights of zero point 0
        return types and own and plain and self.speed.tune != "off"

    @property
    def _forces_latent(self) -> bool:
        # Along with a list of operators the flag is `get_qdq_config`'s own, which sets it on every call.
        return bool(self.extra_options.get("ForceQuantizeNoInputCheck")) and not self.op_types_named

    def placement_options(self) -> PlacementOptions:
        """Constraints for the planner."""
        extra = self.extra_options
        return PlacementOptions(
            op_types=frozenset(self.op_types) if self.restricts_types else None,
            nodes=frozenset(self.nodes_to_quantize) if self.nodes_to_quantize and not self.names_all_nodes else None,
            nodes_to_exclude=frozenset(self.nodes_to_exclude),
            activation_type=self.activation_type.tensor_type,
            weight_type=self.weight_type.tensor_type,
            kernel_activations=self.types.activations,
            kernel_weights=self.types.weights,
            mixes_types=self.types.mixed,
            splits_readers=self.activation_type.tensor_type in self.types.single_reader,
            activation_symmetric=bool(extra.get("ActivationSymmetric")),
            weight_symmetric=extra.get("WeightSymmetric"),
            least_range=float(extra.get("MinimumRealRange") or 0.0),
            per_channel=self.per_channel,
            per_tensor=frozenset(self.types.per_tensor),
            matmul_axis=(extra.get("QDQOpTypePerChannelSupportToAxis") or {}).get("MatMul"),
            block_size=int(extra.get("BlockSize") or 0),
            quantize_bias=extra.get("QuantizeBias", True) is not False,
            overrides=extra.get("TensorQuantOverrides") or {},
            float_outputs=frozenset(extra.get("OpTypesToExcludeOutputQuantization") or ()),
            force_latent=self._forces_latent,
            protect_inputs=self.stages.protect_inputs,
            protect_outputs=self.protect_outputs if self.stages.protect_outputs else None,
            primary_inputs=self.primary_inputs,
        )


def runs_float(target: Target, op_type: str) -> bool:
    """Whether a target leaves operators of a type float."""
    rule = target.rule(op_type)
    return rule is None or rule.role in (Role.FLOAT, Role.ISLAND)


def not_taken(what: str, where: str, target: Target, types: DataTypes, taken: Sequence[int]) -> OptionError:
    """The error for a data type that a target does not take."""
    names = ", ".join(f"QuantType.{known.name}" for known in QuantType if known.tensor_type in taken)
    return OptionError(
        f"target '{target.name}' does not take {what}: {types.why}", where=where, fix=f"leave it out, or pass {names}"
    )


def calibration_config(request: Request) -> CalibrationConfig:
    """Configuration of the calibration."""
    config = CalibrationConfig.from_extra_options(request.calibrate_method, request.extra_options)
    planned = request.stock_reason is None
    config = replace(config, bit_exact=not planned)  # stock's placement gets stock's very ranges
    if planned and request.chooses_ranges and config.method == "minmax":
        config = replace(config, sketch=True)
    return config
