"""Well-known architectures at their real shapes with random weights, built without any download or framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import onnx

from nets import data
from nets.data import Feed
from nets.densenet import densenet121
from nets.detector import SIDE, detector
from nets.efficientnet import efficientnet_lite4
from nets.inception import inception_v1, inception_v2
from nets.mobilenet import mobilenet_v2, mobilenet_v3, mobilenet_v3_primitive
from nets.resnet import resnet50, resnet50_sum, resnet50_v2
from nets.shufflenet import shufflenet
from nets.squeezenet import squeezenet
from nets.statistics import fold, settle
from nets.transformer import LENGTH, VOCABULARY, bert_mini, deit_tiny

_STATISTICS_SEED = 11
_STATISTICS_SAMPLES = 8


@dataclass(frozen=True)
class Architecture:
    """One net and its inputs.

    Attributes:
        graph: Builds the net with unit statistics.
        feeds: Makes inputs from (count, seed).
        folded: Whether its exporter folds BatchNormalization into the Convs.
        variant: Whether it is another form of a net of the list, and not part of a run by default.
    """

    graph: Callable[[], onnx.ModelProto]
    feeds: Callable[[int, int], list[Feed]] = field(default=data.pictures)
    folded: bool = False
    variant: bool = False

    def build(self) -> onnx.ModelProto:
        """Returns the net with statistics that match its activations."""
        model = self.graph()
        if any(node.op_type == "BatchNormalization" for node in model.graph.node):
            model = settle(model, data.joined(self.feeds(_STATISTICS_SAMPLES, _STATISTICS_SEED)))
        return fold(model) if self.folded else model


NETS: dict[str, Architecture] = {
    "mobilenet_v2": Architecture(mobilenet_v2, folded=True),
    "efficientnet_lite4": Architecture(
        efficientnet_lite4, partial(data.pictures, name="images", channels_last=True), folded=True
    ),
    "resnet50": Architecture(resnet50, folded=True),
    "resnet50_sum": Architecture(resnet50_sum, variant=True),
    "resnet50_v2": Architecture(resnet50_v2, partial(data.pictures, name="data")),
    "squeezenet": Architecture(squeezenet),
    "inception_v1": Architecture(inception_v1),
    "inception_v2": Architecture(inception_v2),
    "shufflenet": Architecture(shufflenet),
    "densenet121": Architecture(densenet121),
    "mobilenet_v3": Architecture(mobilenet_v3, folded=True),
    "mobilenet_v3_primitive": Architecture(mobilenet_v3_primitive, folded=True, variant=True),
    "detector": Architecture(detector, partial(data.scaled_pictures, side=SIDE), folded=True),
    "deit_tiny": Architecture(deit_tiny),
    "bert_mini": Architecture(bert_mini, partial(data.sentences, length=LENGTH, vocabulary=VOCABULARY)),
}

__all__ = ["NETS", "Architecture", "Feed"]
