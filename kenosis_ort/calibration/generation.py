"""What each input of a decoder gets while tokens are generated: the tokens, the cache, the mask and the positions.

Exporters name these inputs and outputs each in their own way, but in few ways. A cache belongs to the output whose name
is equal once words such as past and present are taken off; a mask and positions grow with the tokens; whatever else
is asked for under the name of an encoder's input or output is that.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kenosis_ort.calibration.feeds import InputSpec
from kenosis_ort.errors import CalibrationError

Array = npt.NDArray[Any]
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
    scores = _scores(outputs)
    if scores is None:
        raise CalibrationError(
            f"No output is clearly the scores of tokens: there are {', '.join(outputs)}.",
            fix="Give choose=, a function that returns the next tokens [batch, 1] for a decoder's outputs.",
        )
    return np.asarray(scores[:, -1:, :].argmax(-1), np.int64)


def _scores(outputs: Values) -> Array | None:
    named = [v for name, v in outputs.items() if "logits" in name.lower() and v.ndim == 3]
    return named[0] if len(named) == 1 else None


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
        is_behind_encoder: The first piece was an encoder.
    """

    sample: Values
    start: int | None
    values: dict[str, Array] = field(default_factory=dict)
    states: dict[str, Array] = field(default_factory=dict)
    tokens: Array | None = None
    seen: int = 0
    began: bool = False
    is_behind_encoder: bool = False
    _first: dict[str, Array] = field(default_factory=dict)

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
            value = self._linked(spec, links[spec.name]) if spec.name in links else self._value(spec, caches, tokens)
            if value is None:
                raise CalibrationError(
                    f"Nothing is known that the input '{spec.name}' of the model '{piece}' could get.",
                    where=f"model '{piece}', input '{spec.name}'",
                    fix=f"Give links={{'{piece}': {{'{spec.name}': name}}}} with one of: {self._known()}.",
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
        if not self.is_behind_encoder:
            self.tokens = self.sample.get(names[0])
        elif names[0] != "input_ids" and names[0] in self.sample:
            self.tokens = self.sample[names[0]]
        elif "decoder_input_ids" in self.sample:
            self.tokens = self.sample["decoder_input_ids"]
        elif self.start is not None:
            self.tokens = np.full((self.batch, 1), self.start, np.int64)
        if self.tokens is None:
            raise CalibrationError(
                f"The first tokens of the decoder '{piece}' are not known.",
                where=f"model '{piece}', input '{names[0]}'",
                fix="Give start_token=, or 'decoder_input_ids' in every sample.",
            )
        return self.tokens

    def _linked(self, spec: InputSpec, name: str) -> Array | None:
        """The value that the caller linked to an input; where it is still to be computed, an empty cache."""
        for known in (self.values, self.sample):
            if name in known:
                return known[name]
        return self._empty(spec)

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
        for known in (self.values, self.sample):
            if name in known:
                return known[name]
        return self._of_encoder(spec) if self.is_behind_encoder else None

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
        alike = [v for v in self._first.values() if v.dtype == spec.dtype and v.ndim == (rank or 3)]
        return alike[0] if len(alike) == 1 else None

    def behind_encoder(self, outputs: Values) -> None:
        """Takes the outputs of the first piece in, which reads no tokens of ours."""
        self.is_behind_encoder = True
        self._first = dict(outputs)
        self.values.update(outputs)

    def _empty(self, spec: InputSpec) -> Array | None:
        if spec.shape is None or spec.dtype is None:
            return None
        sizes = [d if isinstance(d, int) else self.batch if axis == 0 else 0 for axis, d in enumerate(spec.shape)]
        return np.zeros(sizes, spec.dtype)

    def _known(self) -> str:
        return ", ".join(sorted({*self.values, *self.sample})) or "none"
