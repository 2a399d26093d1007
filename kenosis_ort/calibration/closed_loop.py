"""Calibration data for nets with states: the float model's own states are fed back from one step to the next.

Recorded data of a recurrent net, a voice detector or a language model with a cache often hold the inputs proper only.
With zeros or random numbers for the states, the ranges of all that depends on them would be wrong.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper
from onnxruntime.quantization import CalibrationDataReader

from kenosis_ort.calibration.feeds import sample_feeds
from kenosis_ort.calibration.session import ObservedModel, SessionSettings, run
from kenosis_ort.errors import CalibrationError, did_you_mean, last_gate
from kenosis_ort.graph.load import load_model
from kenosis_ort.graph.states import state_pairs

Array = npt.NDArray[Any]


class ClosedLoopReader(CalibrationDataReader):  # type: ignore[misc]
    """Completes feeds with the states that the float model computed on the feed before.

    A feed that holds a state itself starts a new sequence with it; so does every ``steps``-th feed.

    Args:
        model: The float model, as a path or in memory.
        reader: A ``CalibrationDataReader`` or an iterable of feeds, without the states or with those of the first
            step of each sequence; read once.
        states: Input name by output name; by default what `state_pairs` finds.
        initial: First states by input name. By default zeros; a size that is not fixed is 1 on the first axis (the
            batch) and 0 on others (an empty cache).
        steps: Number of feeds in a sequence; None for one sequence, or those that the feeds' own states start.
        custom_op_libraries: Shared libraries with custom operators to register.
        threads: Threads of the runtime; 0 leaves it to the runtime.

    Raises:
        CalibrationError: A state is no input or output of the model, or there is none.
    """

    @last_gate
    def __init__(
        self,
        model: str | os.PathLike[str] | onnx.ModelProto,
        reader: Any,
        *,
        states: Mapping[str, str] | None = None,
        initial: Mapping[str, Array] | None = None,
        steps: int | None = None,
        custom_op_libraries: Sequence[str] = (),
        threads: int = 0,
    ) -> None:
        proto = load_model(model, ask_runtime=False).proto
        self._states = dict(state_pairs(proto) if states is None else states)
        self._inputs = {v.name: v for v in proto.graph.input}
        self._check({v.name for v in proto.graph.output}, states is not None)
        if steps is not None and steps < 1:
            raise CalibrationError(
                f"A sequence of {steps} feeds is not possible.", fix="Give steps=1 or more, or None."
            )
        self._initial = {name: np.asarray(value) for name, value in (initial or {}).items()}
        self._steps = steps
        self._reader = reader
        self._left: Iterator[Mapping[str, Any]] | None = None
        self._model = ObservedModel(proto, SessionSettings((), tuple(custom_op_libraries), threads))
        self._session = self._model.session(list(self._states))
        self._current: dict[str, Any] = {}
        self._count = 0

    def _check(self, outputs: set[str], given: bool) -> None:
        for output, name in self._states.items():
            for what, value, known in (("output", output, outputs), ("input", name, set(self._inputs))):
                if value not in known:
                    raise CalibrationError(
                        f"A state names an {what} that the model does not have.{did_you_mean(value, sorted(known))}",
                        where=f"'{value}'",
                    )
        if not self._states:
            raise CalibrationError(
                "No state is fed back." if given else "No output of the model is clearly the next value of an input.",
                fix="Give states={output name: input name}.",
            )

    def __len__(self) -> int:
        return len(self._reader)

    def get_next(self) -> dict[str, Any] | None:
        """The next feed with its states, None at the end."""
        if self._left is None:
            self._left = iter(sample_feeds(self._reader))
        feed = next(self._left, None)
        if feed is None:
            self._model.close()
            return None
        names = list(self._states.values())
        if self._steps is not None and self._count % self._steps == 0:
            self._current = {}
        complete = dict(feed)
        for name in names:
            if name not in complete:
                complete[name] = self._current[name] if name in self._current else self._first(name)
        computed = run(self._session, list(self._states), complete, self._count)
        self._current = dict(zip(names, computed, strict=True))
        self._count += 1
        return complete

    def _first(self, name: str) -> Array:
        if name in self._initial:
            return self._initial[name]
        tensor = self._inputs[name].type.tensor_type
        if not tensor.HasField("shape"):
            raise CalibrationError(
                "The shape of a first state is not known.", where=f"input '{name}'", fix="Give initial={name: array}."
            )
        dims = list(enumerate(tensor.shape.dim))
        shape = [d.dim_value if d.HasField("dim_value") else int(axis == 0) for axis, d in dims]
        return np.zeros(shape, helper.tensor_dtype_to_np_dtype(tensor.elem_type))
