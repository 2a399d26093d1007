"""``TensorQuantOverrides``, read for placement: which tensors have types and parameters of the caller's own.

The quantizer computes the parameters with stock's arithmetic; what counts here is whether the runtime finds an integer
kernel, and whether an activation still vanishes, with the parameters that the caller wants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import onnx

from kenosis_ort.errors import OptionError

_LIMITS: Final[dict[int, tuple[int, int]]] = {onnx.TensorProto.UINT8: (0, 255), onnx.TensorProto.INT8: (-128, 127)}

Entry = Mapping[str, Any]


class Overrides:
    """The caller's overrides by tensor name.

    Args:
        entries: ``extra_options['TensorQuantOverrides']``: a list by tensor, one entry or one a channel.
        activation_type: ONNX element type of activations without an entry.
        weight_type: That of weights.
    """

    def __init__(self, entries: Mapping[str, Sequence[Entry]], *, activation_type: int, weight_type: int) -> None:
        self._entries = {name: tuple(said) for name, said in entries.items() if said}
        self._activation_type = activation_type
        self._weight_type = weight_type

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Any:
        return iter(self._entries)

    def __bool__(self) -> bool:
        return bool(self._entries)

    def type_of(self, name: str) -> int:
        """Returns the element type that an activation's Q writes."""
        return _element_type(self._first(name).get("quant_type"), self._activation_type)

    def type_read(self, name: str, consumer: str) -> int:
        """Returns the element type that a node reads of an activation, after a conversion if there is one."""
        convert = self._first(name).get("convert")
        if not convert or consumer not in convert.get("recv_nodes", (consumer,)):
            return self.type_of(name)
        return _element_type(convert.get("quant_type"), self._activation_type)

    def converts(self, name: str) -> bool:
        """Tells whether some consumers read an activation in another type than it is written in."""
        return bool(self._first(name).get("convert"))

    def weight_type(self, name: str) -> int:
        """Returns the element type of a weight."""
        return _element_type(self._first(name).get("quant_type"), self._weight_type)

    def symmetric(self, name: str) -> bool | None:
        """Returns whether the caller wants a tensor's zero point to be that of no offset, None for no word."""
        said = self._first(name).get("symmetric")
        return None if said is None else bool(said)

    def has_scale(self, name: str) -> bool:
        """Tells whether the caller gives a tensor its scale."""
        return "scale" in self._first(name)

    def refuse_offset(self, name: str, why: str) -> None:
        """Raises where the caller wants another zero point than 0 for a tensor.

        Args:
            name: The tensor.
            why: What the runtime's kernel does with one.

        Raises:
            OptionError: The caller does.
        """
        entry = self._first(name)
        if entry.get("symmetric") or np.any(np.asarray(entry.get("zero_point", 0))):
            raise OptionError(
                f"the entry of '{name}' asks for another zero point than 0: {why}",
                where="TensorQuantOverrides",
                fix="leave out 'symmetric' and 'zero_point' of that tensor",
            )

    def axis(self, name: str) -> int | None:
        """Returns the channel axis that the caller gives a weight."""
        axis = self._first(name).get("axis")
        return None if axis is None else int(axis)

    def same(self, one: str, other: str) -> bool:
        """Tells whether two tensors have the same entries."""
        return repr(self._entries.get(one)) == repr(self._entries.get(other))

    def absorb(self, name: str, low: float | None, high: float | None) -> bool:
        """Tells whether a Relu or Clip of these bounds vanishes in front of a Q with the caller's parameters."""
        entry = self._first(name)
        if entry.get("symmetric") or self.converts(name) or self.type_of(name) not in _LIMITS:
            return False
        if "scale" not in entry:
            least, most = entry.get("rmin"), entry.get("rmax")
            below = low is None or least is None or float(least) >= low
            return below and (high is None or most is None or float(most) <= high)
        qmin, qmax = _LIMITS[self.type_of(name)]
        scale, zero_point = np.float32(np.asarray(entry["scale"]).item()), int(np.asarray(entry["zero_point"]).item())
        below = low is None or np.float32(qmin - zero_point) * scale >= np.float32(low)
        return bool(below and (high is None or np.float32(qmax - zero_point) * scale <= np.float32(high)))

    def _first(self, name: str) -> Entry:
        return self._entries[name][0] if name in self._entries else {}


def _element_type(said: Any, default: int) -> int:
    return default if said is None else int(getattr(said, "tensor_type", said))
