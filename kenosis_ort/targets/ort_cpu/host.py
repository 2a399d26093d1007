"""Abilities of this machine's integer kernels, and the data types that follow.

Whether 8-bit products saturate is measured, not looked up: one tiny product on the installed runtime tells
for every operating system and processor alike.
"""

from __future__ import annotations

import logging
import platform
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import onnx
from onnx import TensorProto, helper

from kenosis_ort.runtime.session import fact_of_processor, new_session, session_options
from kenosis_ort.targets.model import DataTypes

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostDefaults:
    """Data types that run fastest and exactly on this machine.

    Attributes:
        machine: Processor family as the operating system names it.
        activation_signed: int8 (Arm) instead of uint8 (x86-64) activations.
        saturates: 8-bit products saturate (x86-64 without VNNI).
        why: The reason in one sentence.
    """

    machine: str
    activation_signed: bool
    saturates: bool
    why: str


def is_arm(machine: str) -> bool:
    """Whether a processor family, as the operating system names it, is Arm."""
    return machine.lower().startswith(("arm", "aarch"))


@cache
def products_saturate() -> bool:
    """Whether uint8 x int8 products saturate at 16 bits in this runtime on this machine.

    255 * 127 + 255 * 127 = 64770 clips to 32767. Source: ``reduce_range`` in the ONNX Runtime quantization
    guide. Where the processor says what it can do, the answer is kept for the next process.
    """
    return fact_of_processor("saturate", _products_saturate, lambda cached: isinstance(cached, bool))


def _products_saturate() -> bool:
    n = 64
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["a", "b"], ["y"])],
        "saturation_probe",
        [helper.make_tensor_value_info("a", TensorProto.UINT8, [n, n])],
        [helper.make_tensor_value_info("y", TensorProto.INT32, [n, n])],
        [onnx.numpy_helper.from_array(np.full((n, n), 127, np.int8), "b")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    (y,) = new_session(model.SerializeToString(), session_options()).run(None, {"a": np.full((n, n), 255, np.uint8)})
    return bool((np.asarray(y) != 255 * 127 * n).any())


def host_defaults(machine: str | None = None) -> HostDefaults:
    """The defaults for this machine.

    Args:
        machine: Processor family to answer for; None for the one this runs on.
    """
    family = machine or platform.machine()
    if is_arm(family):
        return HostDefaults(family, True, False, "Arm kernels take int8 activations and weights")
    saturates = products_saturate()
    sums = "16 bits on this machine and clipped there" if saturates else "32 bits on this machine, in 16 on others"
    why = f"uint8 activations, int8 weights whose products cannot clip: they are added in {sums}"
    _log.debug("host %s: %s", family, why)
    return HostDefaults(family, False, saturates, why)


def for_this_machine(types: DataTypes) -> DataTypes:
    """The data types of the target as they are on the machine at hand."""
    host = host_defaults()
    signed = host.activation_signed
    return replace(
        types,
        activation=TensorProto.INT8 if signed else TensorProto.UINT8,
        saturates=host.saturates,
        single_reader=() if signed else (TensorProto.INT8,),
        why=host.why,
    )
