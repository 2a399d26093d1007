"""Messages to workers: a function with its arguments, of which models are sent once.

They are pickled as references to their content, by its digest. Contents lie in a file where all workers see the calling
machine's folder for temporary files, and large arrays with them; else they are results of tasks, which Dask sends once
a worker and makes again where one dies. Of models the weights are contents of their own: a candidate that differs from
the one before in a few scales sends these.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import threading
import uuid
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final

import numpy as np
import onnx

from kenosis_ort.cluster.client import Cluster
from kenosis_ort.cluster.flight import FORGOTTEN
from kenosis_ort.graph.outside import content_bytes, content_of, copy_without_weights, is_outside, refer
from kenosis_ort.runtime.session import Closing
from kenosis_ort.storage.scratch import Scratch

_LARGE: Final = 2**14
"""Bytes from which on an array or a weight goes once."""
_LONGEST_FILE: Final = 2**32
"""Bytes of contents beyond which arrays are sent each time."""
_ALIGNMENT: Final = 4096  # the runtime maps a file by pages
_KNOWN_MODELS: Final = 4
_MODEL, _ARRAY = "model", "array"


@dataclass(frozen=True)
class Packet:
    """A function with its arguments.

    Attributes:
        content: Both pickled, with references to contents.
        places: File, first byte and bytes of contents that lie in a file, by digest.
    """

    content: bytes
    places: Mapping[str, tuple[str, int, int]]


@dataclass(frozen=True)
class _Weight:
    """A weight that is sent apart: its name, type and shape, its content, and whether it lies in a file at home."""

    name: str
    data_type: int
    dims: tuple[int, ...]
    digest: str
    is_outside: bool


@dataclass(frozen=True)
class _Content:
    """A model as it is sent: contents that it needs, itself among them."""

    digest: str
    needs: frozenset[str]


@dataclass
class _Sent:
    """Record of the contents that were sent.

    Attributes:
        places: As `Packet` has them.
        bundles: By digest, the task whose result holds a content.
        models: By identity, models that were sent; held, so that no other object takes their identity.
    """

    places: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    bundles: dict[str, Any] = field(default_factory=dict)
    models: OrderedDict[int, tuple[onnx.ModelProto, _Content]] = field(default_factory=OrderedDict)


class Sender(Closing):
    """Packs functions with their arguments, and records what was sent.

    Args:
        cluster: The cluster.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._client = cluster.client
        self._scratch = Scratch("tasks")
        sees = cluster.sees(self._scratch.path)
        self._file: BinaryIO | None = (self._scratch.path / "contents").open("wb") if sees else None
        self._sent = _Sent()
        self._new: dict[str, bytes] = {}

    def close(self) -> None:
        """Releases what was sent."""
        self._sent, self._new = _Sent(), {}
        if self._file is not None:
            self._file.close()
        self._scratch.close()

    def packed(self, content: Any, *, anew: bool = False) -> tuple[Packet, list[Any]]:
        """Message for a worker, and the tasks whose results go with it.

        Args:
            content: To be pickled; its models and arrays must not be changed as long as this object lives.
            anew: Send contents again whose workers died; those that the scheduler has forgotten are in any case.
        """
        if anew or any(bundle.status in FORGOTTEN for bundle in self._sent.bundles.values()):
            self._sent.bundles.clear()
            self._sent.models.clear()
        buffer = io.BytesIO()
        pickler = _Pickler(buffer, self)
        pickler.dump(content)
        if self._new:
            bundle = result_of(self._client, self._new, f"kenosis-{uuid.uuid4().hex}")
            self._sent.bundles |= dict.fromkeys(self._new, bundle)
            self._new = {}
        if self._file is not None:
            self._file.flush()
        places = {digest: self._sent.places[digest] for digest in pickler.needs if digest in self._sent.places}
        bundles = {id(b): b for digest in sorted(pickler.needs - places.keys()) for b in [self._sent.bundles[digest]]}
        return Packet(buffer.getvalue(), places), list(bundles.values())

    def model(self, model: onnx.ModelProto) -> _Content:
        """Reference to a model; its parts that were not sent yet are added to the message."""
        known = self._sent.models.get(id(model))
        if known is not None:
            return known[1]
        shell = copy_without_weights(model, _goes_apart)
        weights = {}
        for at, tensor in enumerate(model.graph.initializer):
            if _goes_apart(tensor):
                digest = self._put(lambda of=tensor: content_of(of))  # type: ignore[misc]
                weights[at] = _Weight(tensor.name, tensor.data_type, tuple(tensor.dims), digest, is_outside(tensor))
        head = pickle.dumps((shell.SerializeToString(), weights))
        digest = self._put(lambda: [head])
        content = _Content(digest, frozenset({digest, *(weight.digest for weight in weights.values())}))
        self._sent.models[id(model)] = model, content
        while len(self._sent.models) > _KNOWN_MODELS:
            self._sent.models.popitem(last=False)
        return content

    def array(self, array: np.ndarray[Any, Any]) -> str | None:
        """The digest of an array's content, which is written if it is new; None where the array is sent in the message.

        Workers hold what goes to them as the result of a task for as long as the call lasts, and samples may be many.
        """
        if self._file is None or self._file.tell() + array.nbytes > _LONGEST_FILE:
            return None
        return self._put(lambda: [np.ascontiguousarray(array).tobytes()])

    def _put(self, pieces: Callable[[], Iterable[bytes]]) -> str:
        """The digest of a content; pieces of it are made a second time to write them."""
        hashed = hashlib.blake2b(digest_size=32)
        for piece in pieces():
            hashed.update(piece)
        digest = hashed.hexdigest()
        if digest in self._sent.places or digest in self._sent.bundles or digest in self._new:
            return digest
        if self._file is None:
            self._new[digest] = b"".join(pieces())
            return digest
        self._file.write(b"\0" * (-self._file.tell() % _ALIGNMENT))
        first = self._file.tell()
        for piece in pieces():
            self._file.write(piece)
        self._sent.places[digest] = self._file.name, first, self._file.tell() - first
        return digest


def _goes_apart(tensor: onnx.TensorProto) -> bool:
    return tensor.data_type != onnx.TensorProto.STRING and content_bytes(tensor) >= _LARGE


class _Pickler(pickle.Pickler):
    """Puts references in the place of models and large arrays; ``needs`` are the contents that these lead to."""

    def __init__(self, file: BinaryIO, sender: Sender) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._sender = sender
        self.needs: set[str] = set()

    def persistent_id(self, found: Any) -> tuple[Any, ...] | None:
        if isinstance(found, onnx.ModelProto):
            content = self._sender.model(found)
            self.needs |= content.needs
            return _MODEL, content.digest
        if isinstance(found, np.ndarray) and found.nbytes >= _LARGE and not found.dtype.hasobject:
            digest = self._sender.array(found)
            if digest is not None:
                self.needs.add(digest)
                return _ARRAY, digest, found.dtype, found.shape
        return None


# ---- on a worker ----------------------------------------------------------------------------------------------------


_models: OrderedDict[str, onnx.ModelProto] = OrderedDict()
_lock = threading.Lock()


def identity(content: Any) -> Any:
    """Its argument: as the result of a task it is sent once a worker, and again where a worker dies."""
    return content


def result_of(client: Any, content: Any, key: str) -> Any:
    """A content as the result of a task of that key."""
    with warnings.catch_warnings():  # of a large one, which has to travel
        warnings.simplefilter("ignore", UserWarning)
        return client.submit(identity, content, key=key, pure=False)


def unpacked(packet: Packet, bundles: Sequence[Mapping[str, bytes]]) -> Any:
    """The unpacked object; the same model is the same object as long as a worker has it in memory."""
    return _Unpickler(packet, bundles).load()


def forget_models() -> None:
    """Forgets the models that this worker knows."""
    with _lock:
        _models.clear()


class _Unpickler(pickle.Unpickler):
    """Follows references."""

    def __init__(self, packet: Packet, bundles: Sequence[Mapping[str, bytes]]) -> None:
        super().__init__(io.BytesIO(packet.content))
        self._packet, self._bundles = packet, bundles

    def persistent_load(self, reference: Any) -> Any:
        kind, digest, *more = reference
        if kind == _MODEL:
            return self._model(digest)
        dtype, shape = more
        return np.frombuffer(bytearray(self._bytes(digest)), dtype).reshape(shape)

    def _model(self, digest: str) -> onnx.ModelProto:
        with _lock:
            if digest not in _models:
                _models[digest] = self._made(digest)
            _models.move_to_end(digest)
            while len(_models) > _KNOWN_MODELS:
                _models.popitem(last=False)
            return _models[digest]

    def _made(self, digest: str) -> onnx.ModelProto:
        shell, weights = pickle.loads(self._bytes(digest))
        model = onnx.ModelProto()
        model.ParseFromString(shell)
        small = list(model.graph.initializer)
        del model.graph.initializer[:]
        for at in range(len(small) + len(weights)):
            tensor = model.graph.initializer.add()
            if at not in weights:
                tensor.CopyFrom(small.pop(0))
                continue
            found = weights[at]
            tensor.name, tensor.data_type = found.name, found.data_type
            tensor.dims.extend(found.dims)
            if found.is_outside and found.digest in self._packet.places:
                refer(tensor, *self._packet.places[found.digest])
            else:
                tensor.raw_data = self._bytes(found.digest)
        return model

    def _bytes(self, digest: str) -> bytes:
        for bundle in self._bundles:
            if digest in bundle:
                return bundle[digest]
        path, first, length = self._packet.places[digest]
        with open(path, "rb") as file:
            file.seek(first)
            return file.read(length)
