"""Calibration data for models in pieces: a pipeline of several files is run, and each file's feeds are recorded.

Text and speech models are deployed as an encoder, a decoder for the first tokens and a decoder with a cache for the
others, or with both decoders in one file. Only the first piece can be fed with data that somebody has: what the others
read is computed by the pieces before them, caches by themselves. `ClosedLoopReader` is for one file with states.

While tokens are generated, a decoder gets the tokens, the cache, the mask and the positions. Exporters name these
inputs and outputs each in their own way, but in few ways. A cache belongs to the output whose name is equal once words
such as past and present are taken off; a mask and positions grow with the tokens; whatever else is asked for under the
name of an encoder's input or output is that.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime as ort
from onnxruntime.quantization import CalibrationDataReader

from kenosis_ort.calibration.feeds import Array, InputSpec, check_feed, input_specs, sample_feeds
from kenosis_ort.calibration.part_session import ObservedModel, SessionSettings, run
from kenosis_ort.checks import mapping, whole
from kenosis_ort.errors import CalibrationError, did_you_mean, last_gate
from kenosis_ort.graph.bodies import alike, state_stem
from kenosis_ort.graph.load import load_model
from kenosis_ort.storage.spool import Spool

Values = Mapping[str, Array]
Choose = Callable[[Values], Any]

TOKEN_INPUTS: Final = ("decoder_input_ids", "input_ids")
_MASKS: Final = ("attention_mask", "decoder_attention_mask")
_POSITIONS: Final = ("position_ids", "decoder_position_ids", "cache_position")
_BRANCH: Final = "use_cache_branch"


def greedy(outputs: Values) -> Array:
    """The token of the largest score at the last position, [batch, 1].

    Args:
        outputs: Outputs of a decoder, one of them scores [batch, positions, vocabulary] whose name holds "logits", or
            the only one of three dimensions.

    Raises:
        CalibrationError: It is not clear which output holds scores.
    """
    scores = [v for name, v in outputs.items() if "logits" in name.lower() and v.ndim == 3]
    if len(scores) != 1:
        raise CalibrationError(
            f"No output is clearly the scores of tokens: there are {', '.join(outputs)}.",
            fix="Give choose=, a function that returns the next tokens [batch, 1] for a decoder's outputs.",
        )
    return np.asarray(scores[0][:, -1:, :].argmax(-1), np.int64)


@dataclass
class Generation:
    """One sample on its way through a pipeline.

    Attributes:
        sample: The caller's values by input name.
        start: First token of a decoder behind an encoder; None for the sample's own.
        values: All outputs so far, by name; later ones replace earlier ones.
        states: The cache, by what its names have in common.
        tokens: What the next decoder reads, [batch, positions]; None before the first.
        seen: Tokens in the cache.
        began: A decoder has run.
        is_behind_encoder: The first piece was an encoder, which reads no tokens of ours.
        encoded: Its outputs.
    """

    sample: Values
    start: int | None
    values: dict[str, Array] = field(default_factory=dict)
    states: dict[str, Array] = field(default_factory=dict)
    tokens: Array | None = None
    seen: int = 0
    began: bool = False
    is_behind_encoder: bool = False
    encoded: Values = field(default_factory=dict)

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return next((len(value) for value in self.sample.values() if value.ndim), 1)

    def feed(self, piece: str, inputs: Sequence[InputSpec], caches: Mapping[str, str], links: Mapping[str, str]) -> Any:
        """Feed of a piece.

        Args:
            piece: Its name, for messages.
            inputs: Its inputs.
            caches: What its caches' names have in common with those of outputs, by input name.
            links: Names of values of the sample, or of outputs of pieces, by input name.

        Raises:
            CalibrationError: Nothing is known for an input.
        """
        found: dict[str, Array] = {}
        tokens = self._tokens(piece, inputs)
        for spec in inputs:
            if spec.name not in links:
                value = self._value(spec, caches, tokens)
            elif (value := self._stored(links[spec.name])) is None:  # still to be computed: a cache is empty then
                value = self._empty(spec)
            if value is None:
                known = ", ".join(sorted({*self.values, *self.sample})) or "none"
                raise CalibrationError(
                    f"Nothing is known that the input '{spec.name}' of the model '{piece}' could get.",
                    where=f"model '{piece}', input '{spec.name}'",
                    fix=f"Give links={{'{piece}': {{'{spec.name}': name}}}} with one of: {known}.",
                )
            found[spec.name] = value
        return found

    def take(self, outputs: Values, caches: Mapping[str, str], chosen: Array) -> None:
        """Takes in what a decoder returned.

        Args:
            outputs: By name.
            caches: What the names of caches among them have in common with those of inputs, by output name.
            chosen: The next tokens, [batch, 1].
        """
        # A branch that does not compute the encoder's keys and values again returns empty ones.
        full = {name: value for name, value in outputs.items() if value.size or name not in self.values}
        self.values.update(full)
        self.states.update({stem: outputs[name] for name, stem in caches.items() if name in full})
        self.began = True
        if self.tokens is None or caches:
            self.seen += 0 if self.tokens is None else self.tokens.shape[1]
            self.tokens = chosen
        else:
            self.tokens = np.concatenate([self.tokens, chosen.astype(self.tokens.dtype)], 1)

    def _tokens(self, piece: str, inputs: Sequence[InputSpec]) -> Array | None:
        names = [spec.name for spec in inputs if spec.name in TOKEN_INPUTS]
        if not names:
            return None
        if self.tokens is not None:
            return self.tokens
        # Behind an encoder "input_ids" of the sample are those of the encoder.
        own = [n for n in (names[0], "decoder_input_ids") if n != "input_ids"] if self.is_behind_encoder else names[:1]
        self.tokens = next((self.sample[name] for name in own if name in self.sample), None)
        if self.tokens is None and self.is_behind_encoder and self.start is not None:
            self.tokens = np.full((self.batch, 1), self.start, np.int64)
        if self.tokens is None:
            raise CalibrationError(
                f"The first tokens of the decoder '{piece}' are not known.",
                where=f"model '{piece}', input '{names[0]}'",
                fix="Give start_token=, or 'decoder_input_ids' in every sample.",
            )
        return self.tokens

    def _stored(self, name: str) -> Array | None:
        """An output of a piece, or a value of the sample."""
        return self.values.get(name, self.sample.get(name))

    def _value(self, spec: InputSpec, caches: Mapping[str, str], tokens: Array | None) -> Array | None:
        name = spec.name
        if name in caches:
            state = self.states.get(caches[name])
            return self._empty(spec) if state is None else state
        if tokens is not None and name in TOKEN_INPUTS:
            return tokens
        if tokens is not None and not (self.is_behind_encoder and name == "attention_mask"):
            grown = self._grown(spec, tokens)
            if grown is not None:
                return grown
        found = self._stored(name)
        return self._of_encoder(spec) if found is None and self.is_behind_encoder else found

    def _grown(self, spec: InputSpec, tokens: Array) -> Array | None:
        """A mask or positions for the tokens seen and those to read."""
        name, count = spec.name, tokens.shape[1]
        if name == _BRANCH:
            return np.array([self.began])
        if name in _MASKS:
            given = self.sample.get(name)
            total = self.seen + count
            if given is None:
                return np.ones((self.batch, total), spec.dtype)
            more = np.ones((len(given), max(total - given.shape[1], 0)), given.dtype)
            return np.concatenate([given, more], 1)
        if name in _POSITIONS:
            given = self.sample.get(name)
            if given is not None and not self.began:
                return given
            first = self.seen if given is None else int(given.max()) + 1 + self.seen - given.shape[-1]
            positions = np.arange(first, first + count, dtype=spec.dtype)
            flat = spec.shape is not None and len(spec.shape) == 1
            return positions if flat else np.broadcast_to(positions, (self.batch, count)).copy()
        return None

    def _of_encoder(self, spec: InputSpec) -> Array | None:
        """An input or output of an encoder, by its name ``encoder_...``."""
        short = spec.name.removeprefix("encoder_")
        if short != spec.name and short in self.sample:
            return self.sample[short]
        rank = None if spec.shape is None else len(spec.shape)
        alike = [v for v in self.encoded.values() if v.dtype == spec.dtype and v.ndim == (rank or 3)]
        return alike[0] if len(alike) == 1 else None

    def _empty(self, spec: InputSpec) -> Array | None:
        if spec.shape is None or spec.dtype is None:
            return None
        sizes = [d if isinstance(d, int) else self.batch if axis == 0 else 0 for axis, d in enumerate(spec.shape)]
        return np.zeros(sizes, spec.dtype)


@dataclass(frozen=True)
class _Piece:
    """One model of a pipeline.

    Attributes:
        name: As the caller calls it.
        model: On disk, with weights that its sessions share.
        specs: Inputs that must be fed, and those with a default value.
        inputs: Declarations of the inputs.
        outputs: Declarations of the outputs.
    """

    name: str
    model: ObservedModel
    specs: tuple[tuple[InputSpec, ...], tuple[InputSpec, ...]]
    inputs: tuple[onnx.ValueInfoProto, ...]
    outputs: tuple[onnx.ValueInfoProto, ...]

    @cached_property
    def session(self) -> ort.InferenceSession:
        return self.model.session([value.name for value in self.outputs])

    def checked(self, feed: Mapping[str, Any], sample: int) -> dict[str, Any]:
        """A feed as the model takes it."""
        with self._named():
            return check_feed(feed, *self.specs, sample)

    def run(self, feed: Mapping[str, Any], sample: int) -> dict[str, Array]:
        """The outputs by name."""
        names = [value.name for value in self.outputs]
        with self._named():
            return run(self.session, names, feed, sample)

    def call(self, sample: int, seen: Spool | None, /, **inputs: Any) -> dict[str, Array]:
        """The outputs by name for inputs by name, which go to a list."""
        feed = self.checked(inputs, sample)
        if seen is not None:
            seen.append(feed)
        return self.run(feed, sample)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Names the model in what is raised."""
        try:
            yield
        except CalibrationError as error:
            where = f"model '{self.name}', {error.where}" if error.where else f"model '{self.name}'"
            raise CalibrationError(error.what, where=where, fix=error.fix) from error


class PipelineReader:
    """Runs the float models of a pipeline together, and hands on what each of them gets.

    ``pipeline[name]`` is a reader of calibration data for that model. Nothing is stored but the samples: each reader
    runs the pieces that its model needs anew, sample by sample.

    Without `run` the pieces stand in the order in which they run: an encoder if there is one, then a decoder of the
    first tokens if it is a file of its own, at last the one that is run once for each token. Its cache is found by the
    names of inputs and outputs (``past_key_values.0.key`` and ``present.0.key``); ``encoder_hidden_states`` is what the
    encoder returns, ``encoder_attention_mask`` its mask, and a decoder's own mask and positions grow with its tokens.
    Of decoders with both branches in one file (``use_cache_branch``) the first step takes the one without cache.

    Args:
        models: The float models, as paths or in memory, by a name for each.
        samples: A ``CalibrationDataReader`` or an iterable of feeds: inputs of the first piece, and whatever others
            need that no piece computes. Read once, when the pipeline is made; what does not fit into memory goes to a
            temporary file.
        tokens: Tokens generated for a sample at most.
        start_token: First token of a decoder behind an encoder; None for ``decoder_input_ids`` of the samples.
        stop_token: Token behind which a sequence ends; None for none.
        choose: Makes the next tokens, integers [batch, 1], of a decoder's outputs by name; None takes those of the
            largest ``logits``.
        links: For each piece, by input name, the name of the output or of the value of a sample that it gets, where
            names do not tell.
        run: A loop of the caller's own, for pipelines of other kinds: called with a function for each piece, by name,
            and a sample. The function takes inputs by name and returns outputs by name.
        custom_op_libraries: Shared libraries with custom operators to register.
        threads: Threads of the runtime; 0 leaves it to the runtime.

    Raises:
        CalibrationError: There are no models or no samples, a sample cannot be read, or a link names nothing there is.
    """

    @last_gate
    def __init__(
        self,
        models: Mapping[str, str | os.PathLike[str] | onnx.ModelProto],
        samples: Any,
        *,
        tokens: int = 16,
        start_token: int | None = None,
        stop_token: int | None = None,
        choose: Choose | None = None,
        links: Mapping[str, Mapping[str, str]] | None = None,
        run: Callable[[Mapping[str, Callable[..., dict[str, Array]]], Mapping[str, Any]], Any] | None = None,
        custom_op_libraries: Sequence[str] = (),
        threads: int = 0,
    ) -> None:
        self._tokens = whole("tokens", tokens, least=1)
        self._start, self._stop = start_token, stop_token
        self._choose, self._run = choose or greedy, run
        settings = SessionSettings((), tuple(custom_op_libraries), threads)
        self._pieces = {name: _opened(name, model, settings) for name, model in mapping("models", models).items()}
        if not self._pieces:
            raise CalibrationError("A pipeline of no models is not possible.", fix="Give models={name: path}.")
        self._samples = Spool()
        for sample in sample_feeds(samples):
            self._samples.append({name: np.asarray(value) for name, value in sample.items()})
        if not self._samples:
            raise CalibrationError("The pipeline has no samples.", fix="Give at least one feed of its first model.")
        self._links = {name: dict(wiring) for name, wiring in (links or {}).items()}
        self._check_links()
        self._order = list(self._pieces.values())
        self._cache_inputs, self._cache_outputs = _caches(self._order)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, name: str) -> CalibrationDataReader:
        """A new reader of what a model gets.

        Raises:
            KeyError: There is no such model.
        """
        if name not in self._pieces:
            raise KeyError(f"'{name}'; there are {', '.join(self._pieces)}")
        return _PieceReader(self._recorded(name) if self._run is not None else self._generated(name))

    def _check_links(self) -> None:
        for piece, wiring in self._links.items():
            if piece not in self._pieces:
                hint, known = did_you_mean(piece, self._pieces), ", ".join(self._pieces)
                raise CalibrationError(f"A link names no model.{hint}", where=f"'{piece}'", fix=f"One of {known}.")
            computed = {value.name for p in self._pieces.values() for value in p.outputs}
            inputs = {v.name for v in self._pieces[piece].inputs}
            of_values = computed | set(self._samples[0])
            for what, names, there in (("input", wiring, inputs), ("value", wiring.values(), of_values)):
                for name in (name for name in names if name not in there):
                    raise CalibrationError(
                        f"A link of '{piece}' names an {what} that there is not.{did_you_mean(name, there)}",
                        where=f"'{name}'",
                        fix=f"There are: {', '.join(sorted(there))}.",
                    )

    def _generated(self, wanted: str) -> Iterator[dict[str, Any]]:
        """Yields what a piece gets, sample by sample; what lies behind its last feed does not run."""
        steps = [*self._order, *[self._order[-1]] * (self._tokens - 1)]
        end = max(at for at, piece in enumerate(steps) if piece.name == wanted)
        for number, sample in enumerate(self._samples):
            state = Generation(sample, self._start)
            for at, piece in enumerate(steps[: end + 1]):
                feed = self._fed(state, piece, number)
                if piece.name == wanted:
                    yield feed
                if at == end or not self._step(state, piece, feed, number):
                    break

    def _is_encoder(self, piece: _Piece) -> bool:
        return piece is self._order[0] and len(self._order) > 1 and not self._cache_outputs[piece.name]

    def _fed(self, state: Generation, piece: _Piece, sample: int) -> dict[str, Any]:
        if self._is_encoder(piece):
            names = {value.name for value in piece.inputs}
            return piece.checked({name: value for name, value in state.sample.items() if name in names}, sample)
        caches, links = self._cache_inputs[piece.name], self._links.get(piece.name, {})
        return piece.checked(state.feed(piece.name, piece.specs[0], caches, links), sample)

    def _step(self, state: Generation, piece: _Piece, feed: Mapping[str, Any], sample: int) -> bool:
        """Runs a piece; tells whether its sequences go on."""
        outputs = piece.run(feed, sample)
        if self._is_encoder(piece):
            state.is_behind_encoder, state.encoded = True, outputs
            state.values.update(outputs)
            return True
        chosen = np.asarray(self._choose(outputs))
        if chosen.ndim != 2 or chosen.dtype.kind not in "iu":
            raise CalibrationError(
                f"choose returned {chosen.dtype} of shape {chosen.shape}, not integers of shape (batch, 1).",
                where=f"model '{piece.name}', sample {sample}",
                fix="Return the numbers of the next tokens, one a sequence.",
            )
        state.take(outputs, self._cache_outputs[piece.name], chosen)
        return self._stop is None or not bool((chosen == self._stop).all())

    def _recorded(self, wanted: str) -> Iterator[dict[str, Any]]:
        """Yields what a piece gets in a loop of the caller's own."""
        assert self._run is not None
        for number, sample in enumerate(self._samples):
            seen = Spool()
            calls = {p.name: partial(p.call, number, seen if p.name == wanted else None) for p in self._order}
            self._run(calls, sample)
            yield from seen


class _PieceReader(CalibrationDataReader):  # type: ignore[misc]
    """Hands feeds on."""

    def __init__(self, feeds: Iterator[dict[str, Any]]) -> None:
        self._feeds = feeds

    def get_next(self) -> dict[str, Any] | None:
        return next(self._feeds, None)


def _caches(pieces: Sequence[_Piece]) -> tuple[dict[str, dict[str, str]], dict[str, dict[str, str]]]:
    """Inputs and outputs that are caches, as names, types and ranks tell: by piece, what their names have in common."""
    made = {state_stem(value.name): value for piece in pieces for value in piece.outputs}
    inputs: dict[str, dict[str, str]] = {}
    for piece in pieces:
        stems = [state_stem(value.name) for value in piece.inputs]
        inputs[piece.name] = {
            value.name: stem
            for value, stem in zip(piece.inputs, stems, strict=True)
            if stem and stem in made and stems.count(stem) == 1 and value.name not in (made[stem].name, *TOKEN_INPUTS)
            if alike(value, made[stem])
        }
    read = {stem for found in inputs.values() for stem in found.values()}
    outputs = {p.name: {v.name: s for v in p.outputs if (s := state_stem(v.name)) in read} for p in pieces}
    return inputs, outputs


def _opened(name: str, model: Any, settings: SessionSettings) -> _Piece:
    proto = load_model(model, ask_runtime=False).proto
    inputs, outputs = (  # copies, which do not keep the model in memory
        tuple(onnx.ValueInfoProto.FromString(v.SerializeToString()) for v in values)
        for values in (proto.graph.input, proto.graph.output)
    )
    return _Piece(name, ObservedModel(proto, settings), input_specs(proto), inputs, outputs)
