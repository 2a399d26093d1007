"""A body of ``If``, ``Loop`` or ``Scan`` as a model of its own, and back.

What the body reads from the graphs around it becomes inputs of the model, or constants where it is constant there. So
everything that works on a main graph works on a body: rewrites, placement, calibration, quantization.

Recurrent states and caches are pairs of an output and the input whose next value it is.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import onnx

from kenosis_ort.graph.constants import HEAVY
from kenosis_ort.graph.opset import fit_opset
from kenosis_ort.graph.outside import content_bytes, copy_model, raw_bytes
from kenosis_ort.graph.walk import all_graphs, all_names, opset_of, outer_names, rename_all, reserve_name

_SHARED_FROM = 1024  # bytes; two branches often read one weight, and each would get a quantized copy of its own


class Place(NamedTuple):
    """Place of a body: ``attribute`` of the main-graph node named ``owner``."""

    owner: str
    attribute: str

    def __str__(self) -> str:
        return f"the {self.attribute} of '{self.owner}'"


class Body(NamedTuple):
    """A body taken out.

    Attributes:
        place: Where it was.
        model: It as a model; its inputs are those of the body, then the captured values.
        captured: Names of the inputs that are values of the graph around it.
        constants: Constants of the graph around it that the model holds copies of, by name.
    """

    place: Place
    model: onnx.ModelProto
    captured: tuple[str, ...]
    constants: Mapping[str, onnx.TensorProto]


def has_layers(graph: onnx.GraphProto) -> bool:
    """Whether a graph, or a body in it, holds an operator that may run in integer."""
    return any(node.op_type in HEAVY for nested in all_graphs(graph) for node in nested.node)


def places(node: onnx.NodeProto) -> Iterator[tuple[Place, onnx.GraphProto]]:
    """Yields the bodies of a node and where they are."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield Place(node.name, attribute.name), attribute.g


def take_out(
    model: onnx.ModelProto, place: Place, body: onnx.GraphProto, types: Mapping[str, onnx.TypeProto]
) -> Body | None:
    """A body as a model; None where the type of a value that it captures is not known.

    Args:
        model: The model whose main graph holds the owner; not changed.
        place: Where the body is.
        body: The body.
        types: Types of the main graph's values by name.
    """
    outer = {tensor.name: tensor for tensor in model.graph.initializer}
    overridable = {value.name for value in model.graph.input}
    captured, constants = [], {}
    for name in outer_names(body):
        if name in outer and name not in overridable:
            constants[name] = outer[name]
        else:
            captured.append(name)
    if any(name not in types for name in captured):
        return None
    made = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    made.graph.CopyFrom(body)
    made.graph.name = body.name or "body"
    for name in captured:
        made.graph.input.add(name=name).type.CopyFrom(types[name])
    made.graph.initializer.extend(constants.values())
    return Body(place, made, tuple(captured), constants)


class Opened:
    """A model into which bodies are put back, in place.

    Args:
        model: The model.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = model
        self._shared: dict[bytes, str] = {}
        self._taken = all_names(model)

    def put_back(self, body: Body, changed: onnx.ModelProto) -> None:
        """Puts a changed form of a body in the place of the present one; its interface stays.

        A body has the operator set of the model around it: where its changed form needs a later one, as that of
        attention, the whole model is raised, and where the model is at a later one the body is.

        Args:
            body: As it was taken out.
            changed: A model of the same inputs and outputs.

        Raises:
            UnsupportedModelError: A node has no equivalent in the later operator set.
        """
        changed = self._at_one_opset(changed)
        owner = next(node for node in self._model.graph.node if node.name == body.place.owner)
        old = next(attribute.g for attribute in owner.attribute if attribute.name == body.place.attribute)
        before = all_names(body.model)
        made = onnx.GraphProto(name=old.name, node=changed.graph.node, doc_string=old.doc_string)
        renamed: dict[str, str] = {}
        for tensor in changed.graph.initializer:
            if body.constants.get(tensor.name) == tensor:
                continue  # as it is in the graph around the body
            if content_bytes(tensor) >= _SHARED_FROM:
                renamed[tensor.name] = self._share(tensor)
                continue
            if tensor.name in body.constants:  # a rewrite changed its copy of what others read as well
                renamed[tensor.name] = reserve_name(tensor.name, self._taken)
            made.initializer.append(tensor)
        for name in sorted(all_names(made) - before - renamed.keys()):
            renamed[name] = reserve_name(name, self._taken)
        rename_all(made, renamed)
        made.input.extend(old.input)
        made.output.extend(old.output)
        old.CopyFrom(made)
        known = {entry.domain for entry in self._model.opset_import}
        self._model.opset_import.extend(e for e in changed.opset_import if e.domain not in known)

    def _at_one_opset(self, changed: onnx.ModelProto) -> onnx.ModelProto:
        """Brings the model and the changed form of a body to the later of their operator sets; returns the form."""
        own, other = opset_of(self._model), opset_of(changed)
        if other > own:
            fit_opset(self._model, min_opset=other, max_opset=other)
            self._model.ir_version = max(self._model.ir_version, changed.ir_version)
        if own > other:
            changed = copy_model(changed)
            fit_opset(changed, min_opset=own, max_opset=own)
        return changed

    def _share(self, tensor: onnx.TensorProto) -> str:
        """Stores a constant in the main graph, bodies of one content once; returns its name."""
        key = hashlib.sha256(repr((tensor.data_type, list(tensor.dims))).encode() + raw_bytes(tensor)).digest()
        if key not in self._shared:
            self._shared[key] = reserve_name(tensor.name, self._taken)
            self._model.graph.initializer.append(tensor)
            self._model.graph.initializer[-1].name = self._shared[key]
        return self._shared[key]


_WHEN = "past|present|prev|previous|next|new|old|in|out|input|output|initial|final|last|cur|current|updated|tm1|t"

_MARKS, _BARE_MARKS = (re.compile(rf"(?<![a-z])({words})(?![a-z])") for words in (f"{_WHEN}|key|values", _WHEN))


def state_pairs(model: onnx.ModelProto) -> dict[str, str]:
    """Pairs of outputs and the inputs whose next values they are, by the graph, or by names, types and ranks.

    What a Concat makes of an input alone and of something computed is that input grown, whatever it is called: a cache.
    Elsewhere two names belong together if they are equal once words such as past, present, in, out, new or next, and a
    last letter N, are taken off (``past_0_k`` and ``present_0_k``, ``state`` and ``stateN``).

    Args:
        model: The model.

    Returns:
        Input name by output name; without those that are not clear.
    """
    constants = {t.name for t in model.graph.initializer}
    inputs = [v for v in model.graph.input if v.name not in constants]
    found = _grown(model.graph, inputs)
    left = [v for v in inputs if v.name not in found.values() and state_stem(v.name)]
    for output in model.graph.output:
        # What the graph tells is not looked for by name: no input that is left has an empty stem.
        stem = "" if output.name in found else state_stem(output.name)
        named = [v.name for v in left if v.name != output.name and state_stem(v.name) == stem and alike(v, output)]
        if len(named) == 1:
            found[output.name] = named[0]
    taken = list(found.values())
    return {o: i for o, i in found.items() if taken.count(i) == 1}


def _grown(graph: onnx.GraphProto, inputs: Sequence[onnx.ValueInfoProto]) -> dict[str, str]:
    """The inputs by the outputs that they are concatenated to, with nothing else that enters."""
    entering = {value.name: value for value in inputs}
    leaving = {value.name: value for value in graph.output}
    found: dict[str, str] = {}
    for node in graph.node:
        if node.op_type != "Concat" or node.output[0] not in leaving:
            continue
        read = [name for name in node.input if name in entering and alike(entering[name], leaving[node.output[0]])]
        if len(read) == 1:
            found[node.output[0]] = read[0]
    return found


def state_stem(name: str) -> str:
    """Rest of a name without words such as past and present; "" if nothing is left.

    ``key`` and ``values`` go too, for ``past_key_values.0.key`` is what ``present.0.key`` was, unless they are all that
    there is: ``past_key``.
    """
    lowered = re.sub(r"(?<=[a-z])N$", "", name).lower().replace("_", " ")
    stems = (re.sub(r"[^a-z0-9]+", "", marks.sub("", lowered)) for marks in (_MARKS, _BARE_MARKS))
    return next(filter(None, stems), "")


def alike(a: onnx.ValueInfoProto, b: onnx.ValueInfoProto) -> bool:
    """Whether two values have one element type and shapes that can be equal but for symbolic sizes."""
    left, right = a.type.tensor_type, b.type.tensor_type
    if left.elem_type != right.elem_type or len(left.shape.dim) != len(right.shape.dim) or not left.shape.dim:
        return left.elem_type == right.elem_type and not right.HasField("shape")
    pairs = zip(left.shape.dim, right.shape.dim, strict=True)
    return all(not (x.dim_value and y.dim_value) or x.dim_value == y.dim_value for x, y in pairs)
