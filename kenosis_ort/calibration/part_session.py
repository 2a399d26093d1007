"""Runtime sessions of the float model, or of a part of its graph, with chosen tensors as outputs."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx.helper
import onnxruntime as ort

from kenosis_ort.calibration.feeds import misfit
from kenosis_ort.errors import CalibrationError
from kenosis_ort.graph import outside
from kenosis_ort.graph.constants import Is, having
from kenosis_ort.graph.walk import read_names
from kenosis_ort.runtime import session as sessions
from kenosis_ort.runtime.machine import runtime_limits
from kenosis_ort.runtime.session import Closing, Session
from kenosis_ort.storage.writing import Scratch

_log = logging.getLogger(__name__)

_RANDOM = having(Is.RANDOM)


class SessionSettings(NamedTuple):
    """Settings of sessions.

    Attributes:
        providers: Execution providers; empty for the CPU.
        custom_op_libraries: Libraries with custom operators to register.
        threads: Number of threads of the runtime; 0 leaves it to the runtime.
        optimize: Whether the runtime optimizes the graph.
    """

    providers: tuple[Any, ...] = ()
    custom_op_libraries: tuple[str, ...] = ()
    threads: int = 0
    optimize: bool = True


class Segment(NamedTuple):
    """A contiguous part of a graph.

    Attributes:
        start: Index of its first node.
        end: Index after its last node.
        inputs: Names of the values it reads from outside; constants are not among them.
        observed: Tensors to observe that it computes.
        passed_on: Values it computes that later parts read.
    """

    start: int
    end: int
    inputs: tuple[str, ...]
    observed: tuple[str, ...]
    passed_on: tuple[str, ...]


def constant_values(proto: onnx.ModelProto) -> tuple[set[str], frozenset[int]]:
    """Values equal on every run: their names, and indices of the main graph's nodes that compute some.

    Initializers that are graph inputs too are among the values although callers may override them; nodes that read
    them are not.
    """
    graph = proto.graph
    names = {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
    known = names - {value.name for value in graph.input}
    nodes = []
    for at, node in enumerate(graph.node):
        if node.op_type not in _RANDOM and known.issuperset(read_names(node)):
            nodes.append(at)
            known.update(name for name in node.output if name)
    return names | known, frozenset(nodes)


class ObservedModel(Closing):
    """A model on disk whose weights several sessions share, in a temporary folder that `close` removes.

    Args:
        proto: The float model; it is not changed.
        settings: How sessions are made.
    """

    def __init__(self, proto: onnx.ModelProto, settings: SessionSettings) -> None:
        self.settings = settings
        self._scratch: Scratch | None = None
        self._file: Path | None = None  # beside the weights, for models that are opened
        self._is_mapped = outside.refers_outside(proto)
        self._skeleton = self._strip(proto)

    def close(self) -> None:
        """Removes the temporary folder."""
        if self._scratch is not None:
            self._scratch.close()

    def _strip(self, proto: onnx.ModelProto) -> onnx.ModelProto:
        """A copy of the model with large weights moved to a file; they are never copied twice in memory."""
        inside = (t for t in proto.graph.initializer if not outside.is_outside(t))
        if any(outside.content_bytes(t) >= outside.MIN_EXTERNAL_BYTES for t in inside):
            self._scratch = Scratch("calibration")
            folder = self._scratch.path
            self._file = None if self._is_mapped else folder / "model.onnx"
            write = outside.with_weights_on_disk if self._is_mapped else outside.write_external_data
            skeleton = write(proto, folder / "weights.bin")
        else:
            skeleton = outside.copy_model(proto)
        skeleton.graph.name = skeleton.graph.name or "graph"
        # A newer IR version only allows fields that the runtime ignores.
        skeleton.ir_version = min(proto.ir_version, runtime_limits().max_ir)
        return skeleton

    def session(self, outputs: Sequence[str], nodes: Iterable[onnx.NodeProto] = ()) -> Session:
        """Makes a session of the whole graph.

        Args:
            outputs: Names of the tensors to return, in this order.
            nodes: Nodes to append to the graph.

        Raises:
            CalibrationError: The runtime refuses the model.
        """
        model = onnx.ModelProto()
        model.CopyFrom(self._skeleton)
        model.graph.node.extend(nodes)
        del model.graph.output[:]
        model.graph.output.extend(self._typed(outputs))
        return self._create(model)

    def _typed(self, names: Iterable[str]) -> Iterator[onnx.ValueInfoProto]:
        """Yields values to return; only those of the model's own interface need a type, the runtime infers others."""
        known = {value.name: value for value in (*self._skeleton.graph.output, *self._skeleton.graph.input)}
        for name in names:
            yield known.get(name) or onnx.ValueInfoProto(name=name)

    def segment(
        self,
        part: Segment,
        outputs: Sequence[str],
        values: Mapping[str, Any],
        *,
        alone: bool = True,
    ) -> Session:
        """Makes a session of a contiguous part of the graph; what is constant in the whole is constant in it.

        Args:
            part: Which nodes, and what they read from outside.
            outputs: Names of the tensors to return, in this order.
            values: What the part is to run on: types and ranks of its inputs are those of their values.
            alone: Whether it is the only session; otherwise it gives memory back after each run.

        Raises:
            CalibrationError: The runtime refuses it, or it would read something other than tensors from outside.
        """
        source = self._skeleton.graph
        model = onnx.ModelProto(ir_version=self._skeleton.ir_version)
        model.opset_import.extend(self._skeleton.opset_import)
        model.functions.extend(self._skeleton.functions)
        graph = model.graph
        graph.name = source.name
        graph.node.extend(self._constants_before(part))
        graph.node.extend(source.node[part.start : part.end])
        used = set(outputs).union(*(read_names(node) for node in graph.node))
        made = {name for node in graph.node for name in node.output}
        graph.initializer.extend(t for t in source.initializer if t.name in used)
        graph.sparse_initializer.extend(t for t in source.sparse_initializer if t.values.name in used)
        graph.value_info.extend(v for v in source.value_info if v.name in made)
        own = {value.name: value for value in source.input}
        graph.input.extend(own[t.name] for t in graph.initializer if t.name in own)
        annotated = {value.name: value for value in source.value_info}
        for name in part.inputs:
            graph.input.append(own.get(name) or _input_like(name, values.get(name), annotated.get(name)))
        graph.output.extend(self._typed(outputs))
        return self._create(model, arena=alone)

    def _constants_before(self, part: Segment) -> list[onnx.NodeProto]:
        """The nodes in front of a part that compute constants which it reads."""
        nodes = self._skeleton.graph.node
        wanted = set().union(*(read_names(node) for node in nodes[part.start : part.end]))
        found = []
        for at in sorted((at for at in self._constant_nodes if at < part.start), reverse=True):
            if wanted.intersection(nodes[at].output):
                found.append(nodes[at])
                wanted.update(read_names(nodes[at]))
        return found[::-1]

    @cached_property
    def _constant_nodes(self) -> frozenset[int]:
        return constant_values(self._skeleton)[1]

    def _create(self, model: onnx.ModelProto, *, arena: bool = True) -> Session:
        settings, source = self.settings, model.SerializeToString()
        if self._file is not None:
            self._file.write_bytes(source)
            source = str(self._file)
        try:
            options = sessions.session_options(threads=settings.threads, optimize=settings.optimize)
            options.enable_cpu_mem_arena = arena
            options.enable_mem_pattern = False  # it holds a quarter more memory for the same time
            if self._is_mapped:
                sessions.map_weights(self._skeleton, options)  # a part computes as the whole does
            libraries = settings.custom_op_libraries
            return sessions.open_session(
                source, options=options, custom_op_libraries=libraries, providers=settings.providers
            )
        except Exception as error:  # the runtime's exceptions have no common base below Exception
            raise CalibrationError(
                f"The runtime refuses the float model: {shorten(error)}.",
                fix="Check that the model runs in onnxruntime; for custom operators give custom_op_libraries.",
            ) from error


def run(session: Session, names: Sequence[str], feed: Mapping[str, Any], sample: int) -> dict[str, Any]:
    """Runs a session; returns the values by name.

    Raises:
        CalibrationError: The runtime fails; the message names the sample, and the input that does not fit the others.
    """
    try:
        return dict(zip(names, session.run(names, dict(feed)), strict=True))
    except Exception as error:  # as above
        blamed = misfit(session, feed)
        raise CalibrationError(
            f"The float model fails on the calibration data. {blamed} {shorten(error)}.".replace("  ", " "),
            where=f"sample {sample}",
            fix="Bring the inputs to sizes that fit." if blamed else "Check that the model runs on this sample.",
        ) from error


def outputs_of(
    proto: onnx.ModelProto, names: Sequence[str], feeds: Iterable[Mapping[str, Any]], libraries: Iterable[str] = ()
) -> Iterator[dict[str, Any]]:
    """Yields the values of tensors of a model by name for each feed, with libraries of custom operators.

    Raises:
        CalibrationError: The model cannot be opened, or fails on a feed.
    """
    with ObservedModel(proto, SessionSettings(custom_op_libraries=tuple(libraries))) as model:
        session = model.session(names)
        for number, feed in enumerate(feeds):
            yield run(session, names, feed, number)


def _input_like(name: str, value: Any, annotated: onnx.ValueInfoProto | None) -> onnx.ValueInfoProto:
    """The declaration of an input that takes a value: its type and rank.

    Sizes stay open, but for those of a list of numbers: operators that read shapes want to know how many there are.
    """
    array = value.numpy() if isinstance(value, ort.OrtValue) else value
    if not isinstance(array, (np.ndarray, np.generic)):
        raise CalibrationError(f"The graph cannot be cut at '{name}': it is no tensor.", fix="Raise fetch_budget.")
    kind = onnx.TensorProto.STRING if array.dtype.kind in "OSU" else onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    dims = [] if annotated is None else annotated.type.tensor_type.shape.dim
    declared = tuple(d.dim_value if d.HasField("dim_value") else -1 for d in dims)
    fixed = array.ndim == 1 and declared == array.shape
    return onnx.helper.make_tensor_value_info(name, kind, array.shape if fixed else [None] * array.ndim)


def element_types(proto: onnx.ModelProto) -> dict[str, int]:
    """The element type of every tensor of the main graph whose type is known, 0 for other types."""
    graph = proto.graph
    out: dict[str, int] = {}
    for value in (*graph.value_info, *graph.output, *graph.input):
        if value.HasField("type"):
            out[value.name] = value.type.tensor_type.elem_type if value.type.HasField("tensor_type") else 0
    for tensor in graph.initializer:
        out[tensor.name] = tensor.data_type
    return out


def initializer_arrays(proto: onnx.ModelProto, names: set[str]) -> dict[str, Any]:
    """The values of the initializers among the given names."""
    return {t.name: outside.array_in(t) for t in proto.graph.initializer if t.name in names}


def shorten(error: BaseException, limit: int = 400) -> str:
    """The first lines of an error's message."""
    text = " ".join(str(error).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
