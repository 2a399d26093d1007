"""How a calibration table's file holds samples: arrays as text, their sizes checked before memory is taken."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import onnx

from kenosis_ort.calibration.feeds import Sample
from kenosis_ort.calibration.fingerprint import feed_digest
from kenosis_ort.calibration.kept import MOST_BYTES, KeptSamples, digest_of
from kenosis_ort.errors import CalibrationError

_NUMBERS: Final[Mapping[str, np.dtype[Any]]] = {
    kind.name: kind
    for kind in map(onnx.helper.tensor_dtype_to_np_dtype, onnx.helper.get_all_tensor_dtypes())
    if not kind.hasobject and kind.kind not in "SU"
}
"""Types of tensors whose bytes are their content; no other can be named in a file."""
_DAMAGED = "Delete the file, so that calibration runs again."


def pack_samples(kept: KeptSamples) -> tuple[dict[str, Any] | None, list[Any]]:
    """Returns what was kept as plain JSON data: what identifies the samples, and the samples themselves.

    Numbers in their reader are left out: of several readers' samples they say nothing.

    Returns:
        None and nothing where a sample holds what is neither an array nor a sequence of arrays.
    """
    samples = kept.samples
    try:
        packed = [{name: _pack(value) for name, value in sample.items()} for sample in samples]
    except TypeError:
        return None, []
    digests = [f"{digest_of(sample):064x}" for sample in samples]
    return {"most": kept.most, "budget": kept.budget, "cut": f"{kept.cut:x}", "digests": digests}, packed


def unpack_samples(head: Mapping[str, Any] | None, raw: Sequence[Any]) -> KeptSamples | None:
    """Reads what `pack_samples` returned.

    Raises:
        CalibrationError: A sample is not what its digest says, or the samples are larger than they may be.
        KeyError: Or TypeError or ValueError; the data is damaged in another way.
    """
    if head is None:
        return None
    size = sum(_size(value) for sample in raw for value in sample.values())
    if size > min(int(head["budget"]), MOST_BYTES) or len(raw) != len(head["digests"]):
        raise CalibrationError(f"The samples in the calibration table take {size} bytes.", fix=_DAMAGED)
    kept = KeptSamples(int(head["most"]), int(head["budget"]), copies=False)
    kept.cut_at(int(head["cut"], 16))
    for known, packed in zip(head["digests"], raw, strict=True):
        values = {str(name): _unpack(value) for name, value in packed.items()}
        digest = feed_digest(values)
        if digest != int(known, 16):
            raise CalibrationError(
                "A sample in the calibration table was edited: its digest does not fit.", fix=_DAMAGED
            )
        kept.add(Sample(values, None, digest))
    return kept


def _pack(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_pack(item) for item in value]
    array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    if array.dtype.name in _NUMBERS:
        content = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
        return {"dtype": array.dtype.name, "shape": list(array.shape), "base64": content}
    if all(isinstance(item, str) for item in array.reshape(-1).tolist()):
        width = array.dtype.itemsize // 4 if array.dtype.kind == "U" else 0
        return {"width": width, "shape": list(array.shape), "text": array.reshape(-1).tolist()}
    raise TypeError(f"a sample holds {array.dtype}, which no file does")


def _size(packed: Any) -> int:
    """Returns the bytes that a value will take; those of numbers as their text is long, before it is decoded."""
    if isinstance(packed, list):
        return sum(map(_size, packed))
    shape = [int(size) for size in packed["shape"]]
    count, is_text = math.prod(shape), "text" in packed
    size = count * (4 * int(packed["width"]) if is_text else _NUMBERS[packed["dtype"]].itemsize)
    there = count == len(packed["text"]) if is_text else -(-size // 3) * 4 == len(packed["base64"])
    if min(shape, default=0) < 0 or size < 0 or not there:
        raise ValueError("the size of an array is not what its shape says")
    return size


def _unpack(packed: Any) -> Any:
    if isinstance(packed, list):
        return [_unpack(item) for item in packed]
    shape = [int(size) for size in packed["shape"]]
    if "text" in packed:
        kind = np.dtype(f"<U{int(packed['width'])}" if packed["width"] else object)
        return np.array([str(item) for item in packed["text"]], kind).reshape(shape)
    try:
        content = base64.b64decode(packed["base64"], validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from error
    return np.frombuffer(content, _NUMBERS[packed["dtype"]]).reshape(shape).copy()
