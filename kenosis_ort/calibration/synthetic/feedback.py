"""Recurrent states and past keys and values: outputs of the model that its next step takes as inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.calibration.session import ObservedModel, SessionSettings, run
from kenosis_ort.calibration.synthetic.kinds import InputInfo, InputKind
from kenosis_ort.errors import CalibrationError
from kenosis_ort.graph.states import state_pairs

Array = npt.NDArray[Any]
Feed = dict[str, Array]

SAMPLES_A_SEQUENCE = 16
STEPS_A_SAMPLE = 4  # states need time to fill, and one sample every few steps shows more of it


def find_links(proto: onnx.ModelProto, infos: Sequence[InputInfo]) -> dict[str, str]:
    """Returns, by name of a state input, the output that takes its place in the next step.

    They belong together if their names say so, see `state_pairs`; without such names, if their types and shapes fit, in
    the order in which they stand.
    """
    states = {info.name: info for info in infos if info.kind in (InputKind.STATE, InputKind.PAST)}
    links = {name: output for output, name in state_pairs(proto).items() if name in states}
    for name, info in states.items():
        fitting = [v.name for v in proto.graph.output if v.name not in links.values() and _fits(info, v)]
        waiting = [other for other in states.values() if other.name not in links and _are_alike(other, info)]
        if name not in links and fitting and len(fitting) >= len(waiting):
            links[name] = fitting[0]
    return links


def _are_alike(one: InputInfo, other: InputInfo) -> bool:
    return len(one.shape) == len(other.shape) and one.element_type == other.element_type


def _fits(info: InputInfo, value: onnx.ValueInfoProto) -> bool:
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type") or tensor.elem_type != info.element_type or not info.shape:
        return False
    if tensor.HasField("shape") and len(tensor.shape.dim) != len(info.shape):
        return False
    sizes = [d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim]
    return all(a == b for a, b in zip(info.shape, sizes, strict=False) if isinstance(a, int) and b is not None)


class Feedback:
    """Runs a model step by step so that its states are its own.

    Args:
        proto: The model.
        links: Output by name of the input that it replaces.
        settings: How to run it.
        warm: Whether a first, unseen step fills the states: for past keys and values, which are never empty.
    """

    def __init__(self, proto: onnx.ModelProto, links: dict[str, str], settings: SessionSettings, *, warm: bool) -> None:
        self._links = links
        self._outputs = tuple(dict.fromkeys(links.values()))
        self._warm = warm
        with ObservedModel(proto, settings) as model:
            self._session = model.session(self._outputs)
        self._at: tuple[int, int] | None = None
        self._states: Feed = {}

    def states(self, sequence: int, step: int, make: Callable[[int, int], Feed]) -> Feed:
        """The states in front of a step.

        Args:
            sequence: Index of the sequence.
            step: Index of the step.
            make: Makes the feed of a sequence and step, with initial states.

        Raises:
            CalibrationError: The model does not run.
        """
        if self._at is None or self._at[0] != sequence or self._at[1] > step:
            self._at, self._states = (sequence, 0), {}
            if self._warm:
                self._advance(make(sequence, 0))
        while self._at[1] < step:
            self._advance(make(sequence, self._at[1]))
            self._at = (sequence, self._at[1] + 1)
        return dict(self._states)

    def _advance(self, feed: Feed) -> None:
        feed = {**feed, **self._states}
        found = dict(
            zip(self._outputs, run(self._session, self._outputs, feed, self._at[0] if self._at else 0), strict=True)
        )
        states = {name: _cut(np.asarray(found[output]), feed[name].shape) for name, output in self._links.items()}
        if not all(np.isfinite(state).all() for state in states.values()):
            raise CalibrationError(
                "The model's states grow beyond all bounds on made-up data.",
                where=f"inputs {', '.join(self._links)}",
                fix="Give input_ranges for the states, or a reader of real data.",
            )
        self._states = states


def _cut(array: Array, shape: tuple[int, ...]) -> Array:
    """The last steps of an array that has grown along an axis."""
    if array.ndim != len(shape):
        return array.reshape(shape)
    return np.ascontiguousarray(
        array[tuple(slice(max(a - b, 0), None) for a, b in zip(array.shape, shape, strict=True))]
    )
