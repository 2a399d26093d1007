"""One adapter for each operator whose meaning or signature changed between operator sets 7 and 26.

An adapter rewrites one node in place from the form before the version it is listed under to the form from that
version on (and not older than operator set 13). What it needs around the node goes to the context: constants, and
nodes before and after. Source of each change: the version history of the ONNX operator schemas.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.graph.outside import array_in
from kenosis_ort.graph.walk import all_names, reserve_name

Array = npt.NDArray[np.generic]


class NoEquivalentError(Exception):
    """A node cannot be expressed in the other operator set; carries the reason."""


class AdapterContext:
    """Context of an adapter: questions about the node at hand, and edits around it.

    Args:
        model: The model.
        infer_types: Returns the types of the model's values by name; called once an adapter asks for one.

    Attributes:
        before: Nodes to put in front of the node.
        after: Nodes to put behind it.
    """

    def __init__(self, model: onnx.ModelProto, infer_types: Callable[[], Mapping[str, onnx.TypeProto]]) -> None:
        self._model, self._names, self._infer_types = model, all_names(model), infer_types
        self._shared: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._owner = model.graph
        self._node = onnx.NodeProto()
        self.before: list[onnx.NodeProto] = []
        self.after: list[onnx.NodeProto] = []

    def enter(self, owner: onnx.GraphProto, node: onnx.NodeProto) -> None:
        """Turns to another node."""
        self._owner, self._node = owner, node
        self.before, self.after = [], []

    @cached_property
    def _types(self) -> Mapping[str, onnx.TypeProto]:  # which few adapters ask for
        return self._infer_types()

    def fresh(self, base: str) -> str:
        """A value or node name that nothing in the model has yet."""
        return reserve_name(base, self._names)

    def constant(self, array: Array, suffix: str) -> str:
        """Stores a constant in the node's graph and returns its name; equal constants of the main graph are shared."""
        key = (array.dtype.str, array.shape, array.tobytes())
        if self._owner is self._model.graph and key in self._shared:
            return self._shared[key]
        name = self.fresh(f"{self._node.name}_{suffix}")
        self._owner.initializer.append(onnx.numpy_helper.from_array(array, name))
        if self._owner is self._model.graph:
            self._shared[key] = name
        return name

    def stored(self, value: str) -> Array | None:
        """The content of an initializer of the node's graph, None for any other value."""
        return next((array_in(tensor) for tensor in self._owner.initializer if tensor.name == value), None)

    def type_of(self, value: str) -> onnx.TypeProto.Tensor | None:
        """Element type and shape of a tensor as far as ONNX infers them."""
        found = self._types.get(value)
        return found.tensor_type if found is not None and found.HasField("tensor_type") else None

    def rank(self, value: str) -> int | None:
        """The rank of a value, None if unknown."""
        found = self.type_of(value)
        return len(found.shape.dim) if found is not None and found.HasField("shape") else None

    def dtype(self, value: str) -> np.dtype[np.generic]:
        """The numpy type of a value, float32 if unknown."""
        found = self.type_of(value)
        elem_type = found.elem_type if found is not None and found.elem_type else onnx.TensorProto.FLOAT
        return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(elem_type))

    def add_before(self, op_type: str, inputs: Sequence[str], suffix: str, **attributes: Any) -> str:
        """Adds a node with one output in front of the node; returns the output's name."""
        node, output = self._new(op_type, inputs, suffix, attributes)
        self.before.append(node)
        return output

    def add_behind_output(
        self, op_type: str, inputs: Sequence[str], suffix: str, *, position: int = 0, **attributes: Any
    ) -> None:
        """Adds a node that reads an output of the node (in front of ``inputs``) and takes over its name."""
        inner = self.fresh(f"{self._node.output[position]}_{suffix}_in")
        node, _ = self._new(op_type, [inner, *inputs], suffix, attributes)
        node.output[0] = self._node.output[position]
        self._node.output[position] = inner
        self.after.insert(0, node)

    def _new(
        self, op_type: str, inputs: Sequence[str], suffix: str, attributes: Mapping[str, Any]
    ) -> tuple[onnx.NodeProto, str]:
        name = self.fresh(f"{self._node.name}_{suffix}")
        output = self.fresh(f"{name}_output")
        return onnx.helper.make_node(op_type, list(inputs), [output], name=name, **attributes), output


Adapter = Callable[[onnx.NodeProto, AdapterContext], None]


def _take(node: onnx.NodeProto, name: str) -> onnx.AttributeProto | None:
    """Removes an attribute and returns it, None if the node has none of that name."""
    for at, attribute in enumerate(node.attribute):
        if attribute.name == name:
            taken: onnx.AttributeProto = node.attribute.pop(at)
            return taken
    return None


def _set(node: onnx.NodeProto, name: str, value: int | str | bytes) -> None:
    _take(node, name)
    node.attribute.append(onnx.helper.make_attribute(name, value))


def _set_input(node: onnx.NodeProto, position: int, value: str) -> None:
    while len(node.input) <= position:
        node.input.append("")
    node.input[position] = value


def _to_inputs(*attributes: str) -> Adapter:
    """Makes attributes the inputs behind the first one.

    Slice 10, Pad 11, Split, Squeeze, Unsqueeze and ReduceSum 13, the other reductions 18.
    """

    def change(node: onnx.NodeProto, context: AdapterContext) -> None:
        for position, name in enumerate(attributes, start=1):
            taken = _take(node, name)
            if taken is not None:
                _set_input(node, position, context.constant(np.array(taken.ints, dtype=np.int64), name))

    return change


def _split_count(node: onnx.NodeProto, _context: AdapterContext) -> None:
    """Split 18: without sizes the number of outputs is required."""
    if len(node.input) < 2 or not node.input[1]:
        _set(node, "num_outputs", len(node.output))


def _top_k(node: onnx.NodeProto, context: AdapterContext) -> None:
    taken = _take(node, "k")
    if taken is None:
        raise NoEquivalentError("it does not say k")
    _set_input(node, 1, context.constant(np.array([taken.i], dtype=np.int64), "k"))


def _pad(node: onnx.NodeProto, context: AdapterContext) -> None:
    _to_inputs("pads")(node, context)
    value = _take(node, "value")
    if value is not None and value.f:
        _set_input(node, 2, context.constant(np.array(value.f, dtype=context.dtype(node.input[0])), "value"))


def _clip(node: onnx.NodeProto, context: AdapterContext) -> None:
    """Clip 11: the bounds became inputs of the tensor's type; bounds at the limits of float32 mean none."""
    limit = np.finfo(np.float32).max
    for position, (name, unbounded) in enumerate((("min", -limit), ("max", limit)), start=1):
        taken = _take(node, name)
        if taken is not None and taken.f != unbounded:
            _set_input(node, position, context.constant(np.array(taken.f, dtype=context.dtype(node.input[0])), name))


def _dropout(node: onnx.NodeProto, context: AdapterContext) -> None:
    """Dropout 12: the ratio became an input; without ``training_mode`` it does nothing, as before in inference.

    A mask says what was kept. In inference the runtime fills it with zeros before operator set 12, with ones after.
    """
    _take(node, "ratio")
    if len(node.output) > 1 and node.output[1]:
        kind = context.dtype(node.output[1])
        if kind != np.bool_:  # operator set 7
            to = onnx.helper.np_dtype_to_tensor_dtype(kind)
            context.add_behind_output("Cast", [], "mask_type", position=1, to=to)
        context.add_behind_output("Not", [], "mask", position=1)


def _batch_norm_per_channel(node: onnx.NodeProto, context: AdapterContext) -> None:
    """BatchNormalization 9: per channel. Each element by itself is a product with a constant and a sum with one."""
    spatial = _take(node, "spatial")
    if spatial is None or spatial.i:
        return
    stored = [context.stored(name) for name in node.input[1:5]]
    if any(array is None for array in stored):
        raise NoEquivalentError("it normalizes each element (spatial=0) by what is not constant")
    gamma, beta, mean, variance = (np.asarray(array, np.float64) for array in stored)
    epsilon = _take(node, "epsilon")
    scale = gamma / np.sqrt(variance + (1e-5 if epsilon is None else epsilon.f))
    kind = context.dtype(node.input[0])
    factors = context.constant(scale.astype(kind), "scale")
    product = context.add_before("Mul", [node.input[0], factors], "product")
    node.op_type = "Add"
    del node.input[:], node.attribute[:], node.output[1:]
    node.input.extend([product, context.constant((beta - mean * scale).astype(kind), "shift")])


def _batch_norm_outputs(node: onnx.NodeProto, _context: AdapterContext) -> None:
    if any(node.output[1:]):
        raise NoEquivalentError("it is in training mode")
    del node.output[1:]


def _softmax(node: onnx.NodeProto, context: AdapterContext) -> None:
    """Softmax, LogSoftmax and Hardmax 13: along one axis, before over all axes from ``axis`` on as one.

    With ``axis`` the last one the two are the same; else ``y = reshape(softmax(flatten(x, axis), -1), shape(x))``.
    """
    taken = _take(node, "axis")
    axis = taken.i if taken is not None else 1
    rank = context.rank(node.input[0])
    _set(node, "axis", -1)
    if axis == -1 or (rank is not None and axis == rank - 1):
        return
    source = node.input[0]
    node.input[0] = context.add_before("Flatten", [source], "flatten", axis=axis)
    shape = context.add_before("Shape", [source], "shape")
    context.add_behind_output("Reshape", [shape], "restore")


def _upsample(node: onnx.NodeProto, context: AdapterContext) -> None:
    """Upsample 10 became Resize."""
    scales = _take(node, "scales")
    mode = _take(node, "mode")
    if scales is not None:
        node.input.append(context.constant(np.array(scales.floats, dtype=np.float32), "scales"))
    if len(node.input) < 2:
        raise NoEquivalentError("it has no scales")
    node.op_type = "Resize"
    _set(node, "mode", mode.s if mode is not None else "nearest")
    _resize(node, context)


def _resize(node: onnx.NodeProto, context: AdapterContext) -> None:
    """Resize 11: a second input and rules of rounding were added.

    Before, the runtime computed ``out[i] = in[i / scale]`` with the index rounded down on an axis that grows and up
    on one that shrinks. Where there are axes of both kinds, one node grows and a second one shrinks.
    """
    name = node.input[1]
    stored = context.stored(name)
    scales = None if stored is None else stored.astype(np.float32)
    del node.input[1:]
    nearest = all(a.s == b"nearest" for a in node.attribute if a.name == "mode")
    grows, shrinks = (False, False) if scales is None else (bool((scales > 1).any()), bool((scales < 1).any()))
    _set(node, "coordinate_transformation_mode", "asymmetric")
    if not nearest:
        _set_input(node, 2, name)
        return
    _set(node, "nearest_mode", "ceil" if shrinks and not grows else "floor")
    if scales is not None and grows and shrinks:
        inputs = ["", context.constant(np.minimum(scales, 1), "scales_down")]
        given: dict[str, Any] = {
            "mode": "nearest",
            "coordinate_transformation_mode": "asymmetric",
            "nearest_mode": "ceil",
        }
        context.add_behind_output("Resize", inputs, "shrink", **given)
        name = context.constant(np.maximum(scales, 1), "scales_up")
    _set_input(node, 2, name)


def _scatter(node: onnx.NodeProto, _context: AdapterContext) -> None:
    node.op_type = "ScatterElements"


def _scan(_node: onnx.NodeProto, _context: AdapterContext) -> None:
    raise NoEquivalentError("it scans over a batch axis of its own")


def _roi_align(node: onnx.NodeProto, _context: AdapterContext) -> None:
    _set(node, "coordinate_transformation_mode", "output_half_pixel")


def _grid_sample(node: onnx.NodeProto, _context: AdapterContext) -> None:
    taken = _take(node, "mode")
    mode = taken.s.decode() if taken is not None else "bilinear"
    _set(node, "mode", {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode))


def _dft(node: onnx.NodeProto, context: AdapterContext) -> None:
    taken = _take(node, "axis")
    axis = taken.i if taken is not None else 1
    _set_input(node, 2, context.constant(np.array(axis, dtype=np.int64), "axis"))


def _group_norm(node: onnx.NodeProto, context: AdapterContext) -> None:
    """GroupNormalization 21: scale and bias became one number a channel, before one a group."""
    groups = next((a.i for a in node.attribute if a.name == "num_groups"), 0)
    found = context.type_of(node.input[0])
    channels = found.shape.dim[1].dim_value if found is not None and len(found.shape.dim) > 1 else 0
    if not groups or not channels:
        raise NoEquivalentError("its number of channels is not known")
    for position in (1, 2):
        stored = context.stored(node.input[position])
        if stored is None:
            raise NoEquivalentError("its scale or bias is not constant")
        node.input[position] = context.constant(np.repeat(stored, channels // groups), ("", "scale", "bias")[position])


_axes_to_input = _to_inputs("axes")
_REDUCTIONS_18 = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")

ADAPTERS: Mapping[str, tuple[tuple[int, Adapter], ...]] = {
    "BatchNormalization": ((9, _batch_norm_per_channel), (14, _batch_norm_outputs)),
    "Clip": ((11, _clip),),
    "DFT": ((20, _dft),),
    "Dropout": ((12, _dropout),),
    "GridSample": ((20, _grid_sample),),
    "GroupNormalization": ((21, _group_norm),),
    "Pad": ((11, _pad),),
    "Resize": ((11, _resize),),
    "RoiAlign": ((16, _roi_align),),
    "Scan": ((9, _scan),),
    "Scatter": ((11, _scatter),),
    "Slice": ((10, _to_inputs("starts", "ends", "axes")),),
    "Split": ((13, _to_inputs("split")), (18, _split_count)),
    "TopK": ((10, _top_k),),
    "Upsample": ((10, _upsample),),
    **dict.fromkeys(("Hardmax", "LogSoftmax", "Softmax"), ((13, _softmax),)),
    **dict.fromkeys(("ReduceSum", "Squeeze", "Unsqueeze"), ((13, _axes_to_input),)),
    **{f"Reduce{name}": ((18, _axes_to_input),) for name in _REDUCTIONS_18},
}
"""For each operator the versions at which its form changed, in rising order, with the adapter for it."""
