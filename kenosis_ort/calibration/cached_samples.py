"""Samples kept for the passes that need data again: those of least digest, whoever read them and in whatever order.

A digest of the content is as good as a draw, and it is the same on every machine: what three shards kept, put together
and cut again, is what one reader of all samples would have kept. So a calibration table can take its reader's place;
its file holds arrays as text, whose sizes are checked before memory is taken.
"""

from __future__ import annotations

import base64
import binascii
import bisect
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import onnx

from kenosis_ort.calibration.feeds import Sample, bytes_of
from kenosis_ort.errors import CalibrationError
from kenosis_ort.graph.outside import is_outside, raw_bytes


def model_fingerprint(proto: onnx.ModelProto) -> str:
    """A SHA-256 over the graph and all weights of a model, as 64 hexadecimal digits.

    It does not depend on the order of initializers and opset imports, on whether weights are stored raw or typed, on
    shape annotations, metadata, documentation, or the IR version.

    Args:
        proto: A model with its external data read into memory.
    """
    digest = hashlib.sha256()

    def feed(*parts: bytes) -> None:
        for part in parts:
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)

    for opset in sorted(proto.opset_import, key=lambda o: o.domain):
        feed(opset.domain.encode(), str(opset.version).encode())
    for tensor in sorted(proto.graph.initializer, key=lambda t: t.name):
        feed(tensor.name.encode(), f"{tensor.data_type} {list(tensor.dims)}".encode(), _content(tensor))
    for sparse in sorted(proto.graph.sparse_initializer, key=lambda t: t.values.name):
        feed(sparse.SerializeToString(deterministic=True))
    for value in (*proto.graph.input, *proto.graph.output):
        feed(value.name.encode(), str(value.type.tensor_type.elem_type).encode())
    for node in proto.graph.node:
        feed(
            node.op_type.encode(),
            node.domain.encode(),
            node.name.encode(),
            "\0".join(node.input).encode(),
            "\0".join(node.output).encode(),
        )
        for attribute in sorted(node.attribute, key=lambda a: a.name):
            feed(attribute.SerializeToString(deterministic=True))
    for function in proto.functions:
        feed(function.SerializeToString(deterministic=True))
    return digest.hexdigest()


def _content(tensor: onnx.TensorProto) -> bytes:
    if tensor.HasField("raw_data"):
        return tensor.raw_data
    if tensor.data_location == tensor.EXTERNAL and not is_outside(tensor):
        return bytes(tensor.SerializeToString(deterministic=True))
    return b"\0".join(tensor.string_data) if tensor.data_type == tensor.STRING else raw_bytes(tensor)


def feed_digest(feed: Mapping[str, Any]) -> int:
    """A number below 2**256 that identifies one feed by names, types, shapes and content.

    The digests of several feeds are added modulo 2**256: the sum does not depend on their order.
    """
    digest = hashlib.sha256()
    for name in sorted(feed):
        digest.update(f"{name}\0".encode())
        _digest_value(digest, feed[name])
    return int.from_bytes(digest.digest(), "big")


def _digest_value(digest: hashlib._Hash, value: Any) -> None:
    if isinstance(value, (list, tuple)) and any(isinstance(item, np.ndarray) for item in value):
        digest.update(f"sequence {len(value)}\0".encode())
        for item in value:
            _digest_value(digest, item)
        return
    array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    digest.update(f"{array.dtype.str}\0{array.shape}\0".encode())
    if array.dtype.hasobject:
        digest.update(repr(array.tolist()).encode())
    else:
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


MOST_BYTES = 64 * 2**20
"""Of all kept samples together."""
MOST_FOR_PASSES = 64
"""Samples that a recipe of the package wants at most: so many are kept for a table that is to serve every recipe."""

_NO_CUT = 2**256


class CachedSamples:
    """The samples of least digest among all that were added, as many as a number and a budget of bytes allow.

    A sample that comes twice is kept once; one that alone is beyond the budget is none that can be kept.

    Args:
        most: Number of samples to keep at most.
        budget: Bytes to keep at most.
        copies: Arrays of their own are kept: a reader may refill the same buffer.

    Attributes:
        samples: They, in the order of their digests.
        bytes: Of all of them together.
        cut: The digest from which on nothing is kept, since there is no room for it.
    """

    def __init__(self, most: int, budget: int = MOST_BYTES, *, copies: bool = True) -> None:
        self.most, self.budget = most, budget
        self.cut = _NO_CUT
        self._copies = copies
        self.samples: list[Sample] = []
        self.bytes = 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CachedSamples):
            return NotImplemented
        same = [digest_of(s) for s in self.samples] == [digest_of(s) for s in other.samples]
        return same and (self.cut, self.most, self.budget) == (other.cut, other.most, other.budget)

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self.samples)

    def add(self, sample: Sample) -> None:
        """Keeps a sample, checked against the model's inputs, if it is among those of least digest."""
        digest, size = digest_of(sample), bytes_of(sample)
        at = bisect.bisect_left(self.samples, digest, key=digest_of)
        if digest >= self.cut or size > self.budget or digest in map(digest_of, self.samples[at : at + 1]):
            return
        copied = self._copies
        own = {name: np.array(v) if copied and isinstance(v, np.ndarray) else v for name, v in sample.items()}
        self.samples.insert(at, Sample(own, sample.index, digest))
        self.bytes += size
        while len(self.samples) > self.most or self.bytes > self.budget:
            self._drop()

    def cut_at(self, digest: int) -> None:
        """Drops what lies at or beyond a digest, and keeps none of it from now on."""
        while self.samples and digest_of(self.samples[-1]) >= digest:
            self._drop()
        self.cut = min(self.cut, digest)

    def merge(self, other: CachedSamples) -> CachedSamples:
        """The samples that would have been cached of both data sets together."""
        merged = CachedSamples(min(self.most, other.most), min(self.budget, other.budget), copies=False)
        merged.cut_at(min(self.cut, other.cut))
        for sample in (*self.samples, *other.samples):
            merged.add(sample)
        return merged

    def _drop(self) -> None:
        dropped = self.samples.pop()
        self.cut = digest_of(dropped)
        self.bytes -= bytes_of(dropped)


def digest_of(sample: Sample) -> int:
    """The digest of a sample's content, computed where it was not before."""
    return feed_digest(sample) if sample.digest is None else sample.digest


_NUMBERS: Final[Mapping[str, np.dtype[Any]]] = {
    kind.name: kind
    for kind in map(onnx.helper.tensor_dtype_to_np_dtype, onnx.helper.get_all_tensor_dtypes())
    if not kind.hasobject and kind.kind not in "SU"
}
"""Types of tensors whose bytes are their content; no other can be named in a file."""


_DAMAGED = "Delete the file, so that calibration runs again."


def pack_samples(cached: CachedSamples) -> tuple[dict[str, Any] | None, list[Any]]:
    """The cached samples as plain JSON data: what identifies them, and the samples themselves.

    Numbers in their reader are left out: of several readers' samples they say nothing.

    Returns:
        None and nothing where a sample holds what is neither an array nor a sequence of arrays.
    """
    samples = cached.samples
    try:
        packed = [{name: _pack(value) for name, value in sample.items()} for sample in samples]
    except TypeError:
        return None, []
    digests = [f"{digest_of(sample):064x}" for sample in samples]
    return {"most": cached.most, "budget": cached.budget, "cut": f"{cached.cut:x}", "digests": digests}, packed


def unpack_samples(head: Mapping[str, Any] | None, raw: Sequence[Any]) -> CachedSamples | None:
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
    cached = CachedSamples(int(head["most"]), int(head["budget"]), copies=False)
    cached.cut_at(int(head["cut"], 16))
    for known, packed in zip(head["digests"], raw, strict=True):
        values = {str(name): _unpack(value) for name, value in packed.items()}
        digest = feed_digest(values)
        if digest != int(known, 16):
            raise CalibrationError(
                "A sample in the calibration table was edited: its digest does not fit.", fix=_DAMAGED
            )
        cached.add(Sample(values, None, digest))
    return cached


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
    """The bytes that a value will take; those of numbers as their text is long, before it is decoded."""
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
