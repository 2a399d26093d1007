"""Calibration without data: feeds made up from what the model's inputs are for."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from kenosis_ort.calibration.images import Array, IndexedReader
from kenosis_ort.calibration.part_session import SessionSettings
from kenosis_ort.calibration.synthetic.choice import Wishes, make_makers
from kenosis_ort.calibration.synthetic.kinds import (
    SAMPLES_A_SEQUENCE,
    STEPS_A_SAMPLE,
    Feedback,
    InputInfo,
    InputKind,
    classify,
    find_links,
)
from kenosis_ort.calibration.synthetic.maker import Maker, SyntheticSample
from kenosis_ort.calibration.synthetic.pictures import ImageMaker, shows_writing
from kenosis_ort.calibration.synthetic.real import real_feeds
from kenosis_ort.calibration.synthetic.settling import find_shapes, shapes_of
from kenosis_ort.calibration.table_format import Provenance
from kenosis_ort.errors import CalibrationError, did_you_mean, last_gate
from kenosis_ort.graph.load import LoadedModel, load_model

_log = logging.getLogger(__name__)

Numbers = float | Sequence[float]


class SyntheticReader(IndexedReader):
    """Feeds made up without data: natural-looking images, tokens, masks, sound, features, states.

    The same model, seed and index give the same feed, bit for bit on every platform; only states that the model itself
    computed differ by its rounding. What was assumed is in `assumptions`; how far the ranges can be trusted that rest
    on it, `kenosis_ort.calibration.trust` says.

    Args:
        model: The model or its path.
        samples: Number of feeds, each with one sample where the batch size is not fixed.
        seed: Of the random numbers.
        kinds: Kind by input name, one of the values of `InputKind`, where names, types and shapes do not tell.
        input_ranges: Lowest and highest value by input name; an input named here never counts as unknown.
        input_shapes: Shape by input name, for inputs of dynamic shape.
        input_range: What black and white pixels are, for the images that ``input_ranges`` does not name.
        mean: Then subtracted from the pixels, one number or one a channel, as in `ImageFolderReader`.
        std: Divided by at last, the same. With ``mean`` or ``std`` but no ``input_range``, pixels are taken for 0 to
            255 where a number in them is above 10, for 0 to 1 otherwise.
        real: A reader, or an iterable of feeds, of a handful of real samples: they come first, beyond ``samples``, and
            the scale of what is made up follows them where the caller does not say it.
        custom_op_libraries: Shared libraries with custom operators; the model runs where its states, the sizes of its
            inputs or their scale have to be found out.

    Raises:
        CalibrationError: What an input is for, or its shape, cannot be told; the message names the argument to give.
            Or a name or kind is unknown, or a number out of range.
        ModelLoadError: The model cannot be loaded.
    """

    @last_gate
    def __init__(
        self,
        model: str | os.PathLike[str] | onnx.ModelProto | LoadedModel,
        samples: int = 32,
        *,
        seed: int = 0,
        kinds: Mapping[str, str] | None = None,
        input_ranges: Mapping[str, tuple[float, float]] | None = None,
        input_shapes: Mapping[str, Sequence[int]] | None = None,
        input_range: tuple[float, float] | None = None,
        mean: Numbers | None = None,
        std: Numbers | None = None,
        real: Any = None,
        custom_op_libraries: Sequence[str] = (),
    ) -> None:
        if samples < 1:
            raise CalibrationError(f"The number of synthetic samples, {samples}, is not positive.")
        if seed < 0:
            raise CalibrationError(f"The seed, {seed}, is negative.")
        proto = load_model(model, ask_runtime=False).proto
        self._samples, self._seed = samples, seed
        settings = SessionSettings((), tuple(custom_op_libraries), threads=1, optimize=False)
        infos = classify(proto)
        _check_names([info.name for info in infos], kinds, input_ranges, input_shapes)
        self._infos = tuple(_of_kind(info, kinds) for info in infos)
        wishes = Wishes.parse(input_ranges, input_range, mean, std)
        wishes.check(self._infos)
        self._real = real_feeds(real, proto) if real is not None else []
        given = shapes_of(self._real[0], self._infos) if self._real else {}
        given.update({name: tuple(int(d) for d in shape) for name, shape in (input_shapes or {}).items()})
        links = {name: out for name, out in find_links(proto, self._infos).items() if name not in wishes.ranges}
        self._feedback: Feedback | None = None

        def make(shapes: dict[str, tuple[int, ...]]) -> dict[str, Maker]:
            return make_makers(proto, self._infos, shapes, wishes, links=links, real=self._real, settings=settings)

        def first_feed(shapes: dict[str, tuple[int, ...]]) -> dict[str, Array]:
            return {name: maker.make(SyntheticSample(seed, 0)) for name, maker in make(shapes).items()}

        self._makers = make(find_shapes(proto, self._infos, given, first_feed, settings))
        for maker in self._makers.values():
            if isinstance(maker, ImageMaker):
                maker.writing = shows_writing(proto, list(self._makers.values()), settings)
        if links:
            warm = any(i.kind is InputKind.PAST for i in self._infos)
            self._feedback = Feedback(proto, links, settings, warm=warm)
        for text in self.assumptions:
            _log.info("synthetic data: %s", text)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What was assumed about each input, one sentence each."""
        return tuple(
            f"input '{m.info.name}' of shape {m.shape} is taken for {m.says}; the scale is {m.known.value}"
            for m in self._makers.values()
        )

    @property
    def seed(self) -> int:
        """The seed of the random numbers."""
        return self._seed

    @property
    def provenance(self) -> Provenance:
        """What was assumed, and how well it is known."""
        return Provenance(
            inputs=self.assumptions,
            known={name: maker.known for name, maker in self._makers.items()},
            natural=all(maker.natural for maker in self._makers.values()),
            real=len(self._real),
        )

    def __len__(self) -> int:
        return self._samples + len(self._real)

    def feed(self, index: int) -> dict[str, Array]:
        if index < len(self._real):
            return {name: np.array(value) for name, value in self._real[index].items()}
        index -= len(self._real)
        if self._feedback is None:
            return self._make(SyntheticSample(self._seed, index))
        sequence, step = divmod(index, SAMPLES_A_SEQUENCE)
        step *= STEPS_A_SAMPLE
        return {**self._step(sequence, step), **self._feedback.states(sequence, step, self._step)}

    def _step(self, sequence: int, step: int) -> dict[str, Array]:
        return self._make(SyntheticSample(self._seed, sequence, step, SAMPLES_A_SEQUENCE * STEPS_A_SAMPLE))

    def _make(self, sample: SyntheticSample) -> dict[str, Array]:
        return {name: maker.make(sample) for name, maker in self._makers.items()}


def _check_names(names: Sequence[str], *given: Mapping[str, Any] | None) -> None:
    for name in (name for mapping in given for name in mapping or {}):
        if name not in names:
            raise CalibrationError(
                f"The model has no input '{name}'.{did_you_mean(name, names)}",
                fix=f"Its inputs: {', '.join(names)}.",
            )


def _of_kind(info: InputInfo, kinds: Mapping[str, str] | None) -> InputInfo:
    if kinds is None or info.name not in kinds or not info.element_type:
        return info
    wanted = str(getattr(kinds[info.name], "value", kinds[info.name])).replace("_", " ")
    known = [kind.value for kind in InputKind]
    if wanted not in known:
        raise CalibrationError(
            f"The kind '{wanted}' is not known.{did_you_mean(wanted, known)}",
            where=f"input '{info.name}'",
            fix=f"One of: {', '.join(known)}.",
        )
    return info.taken_for(InputKind(wanted))
