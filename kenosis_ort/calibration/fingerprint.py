"""Fingerprints of models and calibration data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kenosis_ort.graph.outside import array_in, brought_in, is_outside

if TYPE_CHECKING:
    import onnx


def model_fingerprint(proto: onnx.ModelProto) -> str:
    """Returns a SHA-256 over the graph and all weights of a model, as 64 hexadecimal digits.

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
    content: bytes
    if tensor.HasField("raw_data"):
        content = tensor.raw_data
    elif is_outside(tensor):
        content = bytes(brought_in(tensor).raw_data)
    elif tensor.data_location == tensor.EXTERNAL:
        content = tensor.SerializeToString(deterministic=True)
    elif tensor.data_type == tensor.STRING:
        content = b"\0".join(tensor.string_data)
    else:
        content = array_in(tensor).tobytes()
    return content


def feed_digest(feed: Mapping[str, Any]) -> int:
    """Returns a number below 2**256 that identifies one feed by names, types, shapes and content.

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
