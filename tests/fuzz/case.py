"""One case: a mutated model goes through one of the public doors; what came of it is classified.

Runs in a process of its own, which the model may crash, hang or fill; see `isolated`.
"""

import contextlib
import io
import os
import tempfile
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from hypothesis import strategies as st
from onnxruntime.quantization import StaticQuantConfig

import kenosis_ort
from kenosis_ort import KenosisError
from kenosis_ort.cli.main import main as command
from tests import models
from tests.fuzz import seeds, structure
from tests.fuzz.gentle import GENTLE
from tests.models import Feed, FeedReader

OLD = b"what stood here before"
ALLOWED = ("int8", "float", "refused", "done", "step failed")
"""Classes of results that are right; all others are defects. Of a step that failed the report asks for a bug report."""

_MUST_RESULT = ("quantize_static", "in memory", "quantize")
_CALLERS = ("AlreadyQuantizedError", "OptionError", "ArgumentTypeError")
"""Errors about what the caller gave, whatever the runtime makes of the model."""
_ON_PURPOSE = ("is not UTF-8 text.", "'utf-8' codec can't decode")
"""What refusals of names say that the runtime takes: protobuf hands them out as bytes, its Python form refuses them."""

_SANE_DB = 10.0
_TOLD_DB = 6.0
_LARGEST_FEED = 2**20
_SHOWN = 200  # characters of a change, which may name a field of any length

_OPTIONS = (
    *({}, {}, {}, {"stages": kenosis_ort.Stages.none()}),
    *({"promise": False, **more} for more in ({}, {}, {}, {"recipe": "plain"}, {"recipe": "plain"})),
    *({"promise": False, **more} for more in ({"evidence": "full"}, {"recipe": "accurate"})),
    *({"promise": False, "extra_options": {"ForceQuantizeNoInputCheck": True}},),
    *({"promise": False, "use_external_data_format": True},),
)


@dataclass
class Case:
    """What is done.

    Attributes:
        net: Name of the seed model.
        door: The public call.
        options: Options of the call.
        changes: What was done to the model.
        model: Its file.
        data: Its file of weights, if it has one.
        feeds: Samples.
        old: A file stands at the output already; of two models, the changed one is the second.
    """

    net: str
    door: str
    options: dict[str, Any]
    changes: list[str] = field(default_factory=list)
    model: bytes = b""
    data: bytes = b""
    feeds: list[Feed] = field(default_factory=list)
    old: bool = False

    def __repr__(self):
        changes = (change if len(change) <= _SHOWN else f"{change[:_SHOWN]}..." for change in self.changes)
        return f"{self.net} by {self.door} with {sorted(self.options)}: {'; '.join(changes)}"


@st.composite
def cases(draw):
    """Cases: most changes leave a model that the runtime loads, some damage its bytes."""
    doors = [name for name, (often, _) in DOORS.items() for _ in range(often)]
    net = draw(st.sampled_from(sorted(seeds.SEEDS)))
    case = Case(net, draw(st.sampled_from(doors)), dict(draw(st.sampled_from(_OPTIONS))), old=draw(st.booleans()))
    dice = draw(st.randoms(use_true_random=False))
    model = seeds.seed_model(net)
    case.feeds, case.data = seeds.seed_feeds(net), seeds.split_data(model)
    gentle = st.lists(st.sampled_from(GENTLE), min_size=1, max_size=6)
    coarse = st.lists(st.sampled_from(structure.STRUCTURAL), min_size=1, max_size=4)
    kinds = draw(st.one_of(gentle, gentle, gentle, coarse, st.just([])))
    case.changes = [said for change in kinds if (said := change(model, dice)) is not None]
    case.model = model.SerializeToString()
    if not kinds:
        case.model, said = structure.damage(case.model, dice)
        case.changes.append(said)
    elif dice.random() < 0.7:
        case.feeds = _fitted(model, case.feeds)
    if case.data and dice.random() < 0.2:
        case.data, said = structure.damage(case.data, dice)
        case.changes.append(f"data file: {said}")
    return case


def _fitted(model, feeds):
    """Feeds for what the mutated model declares, so that more cases come through to the end."""
    shapes = [[d.dim_value for d in value.type.tensor_type.shape.dim] for value in model.graph.input]
    if any(np.prod(shape, dtype=np.float64) > _LARGEST_FEED for shape in shapes):
        return feeds
    try:
        return models.feeds(model, len(feeds))
    except (KeyError, ValueError, TypeError):  # no type or shape that there is
        return feeds


# ---- the doors --------------------------------------------------------------------------------------------------


@dataclass
class Work:
    """The folder of a case and what its doors need."""

    case: Case
    folder: Path

    def __post_init__(self):
        self.model, self.out = self.folder / "model.onnx", self.folder / "out" / "out.onnx"
        self.reader = FeedReader(self.case.feeds)

    def lay_out(self):
        """Writes the input files; their contents."""
        (self.folder / "out").mkdir()
        (self.folder / "tmp").mkdir()
        self.model.write_bytes(self.case.model)
        (self.folder / "other.onnx").write_bytes(seeds.seed_bytes(self.case.net))
        if self.case.data:
            (self.folder / seeds.DATA_NAME).write_bytes(self.case.data)
        if self.case.old:
            self.out.write_bytes(OLD)
        if self.case.door.startswith("cli"):
            names = sorted({name for feed in self.case.feeds for name in feed if "/" not in name and "\0" not in name})
            np.savez(self.folder / "feeds.npz", **{n: np.stack([f[n] for f in self.case.feeds]) for n in names})
        return {path: path.read_bytes() for path in sorted(self.folder.iterdir()) if path.is_file()}


def _quantize_static(work, source=None, reader=None, **options):
    given = (source or work.model, work.out, work.reader if reader is None else reader)
    return kenosis_ort.quantize_static(*given, **(options or work.case.options))


def _in_memory(work):
    try:
        model = onnx.load_model_from_string(work.case.model)
    except DecodeError as error:  # the caller's own call fails before ours
        raise KenosisError(f"no model: {error}") from error
    before = model.SerializeToString(deterministic=True)
    report = _quantize_static(work, model)
    if model.SerializeToString(deterministic=True) != before:
        raise AssertionError("the caller's model was changed")
    return report


def _compare(work):
    pair = [work.model, work.folder / "other.onnx"]
    return kenosis_ort.compare(*(pair[::-1] if work.case.old else pair), work.reader, samples=2)


def _cli(words):
    def run(work):
        places = {"MODEL": work.model, "OUT": work.out, "DATA": work.folder / "feeds.npz",
                  "REPORT": work.folder / "out" / "report.html"}  # fmt: skip
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                code = command([str(places.get(word, word)) for word in words.split()])
        except SystemExit as leaving:
            code = leaving.code
        lines = said.getvalue().splitlines()
        errors = [line for line in lines if line.startswith("kenosis-ort: error")]
        if code not in (0, 1, 2) or (code == 2 and lines[-1:] != errors):
            raise AssertionError(f"exit code {code!r} with {lines[-5:]!r}")
        if code == 2:
            raise KenosisError(lines[-1])

    return run


DOORS = {
    "quantize_static": (14, _quantize_static), "in memory": (2, _in_memory),
    "quantize": (1, lambda work: kenosis_ort.quantize(work.model, work.out, StaticQuantConfig(work.reader),
                                                      promise=False)),
    "calibrate": (2, lambda work: kenosis_ort.calibrate(work.model, work.out.with_suffix(".json"), work.reader)),
    "synthetic": (1, lambda work: _quantize_static(work, reader=kenosis_ort.SyntheticReader(work.model, samples=4),
                                                   promise=False)),
    "closed loop": (1, lambda work: _quantize_static(
        work, reader=kenosis_ort.ClosedLoopReader(work.model, work.reader), promise=False)),
    "preview": (2, lambda work: kenosis_ort.preview(work.model)),
    "verify_fusion": (1, lambda work: kenosis_ort.verify_fusion(work.model).to_dict()), "compare": (2, _compare),
    "bench": (1, lambda work: kenosis_ort.bench(work.model, work.reader, rounds=2, budget_s=0.3)),
    "cli quantize": (2, _cli("quantize MODEL OUT --data DATA --no-promise")),
    "cli report": (1, _cli("quantize MODEL OUT --data DATA --no-promise --report REPORT")),
    "cli verify": (1, _cli("verify MODEL")), "cli explain": (1, _cli("explain MODEL")),
    "cli inspect": (1, _cli("inspect MODEL")), "cli compare": (1, _cli("compare MODEL MODEL --data DATA")),
}  # fmt: skip
"""The public calls, and how often each is tried."""


# ---- what came of it --------------------------------------------------------------------------------------------


def run_case(case, folder, say):
    """Runs one case in an empty folder.

    Args:
        case: The case.
        folder: An empty folder.
        say: Told the phase that begins, so that a crash can be placed.

    Returns:
        ``class`` and ``detail``.
    """
    work = Work(case, folder)
    inputs = work.lay_out()
    os.chdir(folder)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")
    say(f"door {case.door}")
    output, report = io.StringIO(), None
    try:
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(output):
            warnings.simplefilter("always")
            report = DOORS[case.door][1](work)
    except KenosisError as error:
        found = "raw exception" if "\n" in str(error) or _odd(str(error)) else "refused"
        detail = f"{type(error).__name__}: {error}"
        if type(error).__name__ == "InternalError":
            found, detail = "internal error", detail + "\n" + "".join(traceback.format_exception(error))
    except Exception:  # the very thing that is looked for
        found, detail = "raw exception", traceback.format_exc()
    else:
        found, detail = "done", ""
        texts = [output.getvalue(), *(str(w.message) for w in caught), *([str(report)] if report is not None else [])]
        for warned in caught:
            if not issubclass(warned.category, (kenosis_ort.KenosisWarning, DeprecationWarning)):
                found, detail = "raw warning", f"{warned.filename}:{warned.lineno}: {warned.message}"
        if any(map(_odd, texts)):
            found, detail = "raw exception", f"control characters in {next(t for t in texts if _odd(t))!r}"
    stands = work.out.exists()
    left = _leftovers(work, inputs)
    if found == "refused" and stands != case.old:
        found = "output of a failing run"
    elif found == "refused" and case.old and work.out.read_bytes() != OLD:
        found = "output replaced"
    elif found in ("refused", "done") and left:
        found, detail = "leftovers", ", ".join(left)
    elif found == "refused" and _has_to_work(case, detail):
        say("judge")
        found = "needless refusal" if _runs(work) else found
    elif found == "done" and stands and (not case.old or work.out.read_bytes() != OLD):
        say("judge")
        found, detail = _judged(work, report)
    return {"class": found, "detail": detail}


def _has_to_work(case, detail):
    """Whether a refusal is right only where the runtime refuses the model too."""
    apart = case.door == "in memory" and case.data
    meant = detail.startswith(_CALLERS) or any(said in detail for said in _ON_PURPOSE)
    return case.door in _MUST_RESULT and not apart and "stages" not in case.options and not meant


def _odd(text):
    """Whether a text holds control characters (but line breaks) or marks that change the reading order."""
    return any(
        (ord(c) < 32 and c != "\n")
        or ord(c) in (0x7F, *range(0x80, 0xA0), 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
        for c in text
    )


def _leftovers(work, inputs):
    """Files that are new or no longer what they were, but for the output and what belongs to it."""
    found = [p.name for p in work.folder.iterdir() if p.is_file() and p not in inputs]
    found += [f"{p.name} changed" for p, content in inputs.items() if not p.exists() or p.read_bytes() != content]
    beside = {"out.onnx", "out.onnx.data", "out.json", "report.html", "out.recipe.toml"}
    found += [
        p.name for p in (work.folder / "out").iterdir() if p.name not in beside and not p.name.startswith("out.onnx.")
    ]
    return found + [f"tmp/{p.name}" for p in (work.folder / "tmp").iterdir()]


def _judged(work, report):
    """Classifies a written model by what the runtime makes of it, against the float model."""
    if not report:
        return "done", ""
    feeds = work.case.feeds
    other_data = work.case.door in ("synthetic", "closed loop") or "stages" in work.case.options
    try:
        want, again = (_outputs(work.model, feeds) for _ in range(2))
    except Exception:  # any class of the runtime's: a dead giant, for one, that quantization takes out
        return "done", ""
    try:
        got = _outputs(work.out, feeds)
    except Exception as error:
        return "wrong result", f"the written model does not run: {error}"
    written = onnx.load_model(work.out, load_external_data=False)
    integer = any(node.op_type == "DequantizeLinear" for node in written.graph.node)
    random = any(node.op_type.startswith("Random") for node in written.graph.node)
    said = {quality.name: quality.sqnr_db for quality in getattr(report, "outputs", ())}
    texts = " ".join([*getattr(report, "warnings", ()), *getattr(report, "notes", ())])
    for name in want:
        if name not in got:
            return "wrong result", f"output {name!r} is missing"
        if other_data or random or _sqnr_db(want[name], again[name]) != np.inf:
            continue
        found = [_sqnr_db(want[name][::step], got[name][::step]) for step in (1, 2)]  # the report: every other feed
        if None in found:
            return "wrong result", f"output {name!r} has another shape or type"
        measured, told = max(db for db in found if db is not None), said.get(name)
        is_told = name in texts or (told is not None and told <= max(measured, -40) + _TOLD_DB)
        if measured < _SANE_DB and not is_told:
            return "wrong result", f"output {name!r} has {measured:.1f} dB, the report says {told}"
    failed = [text for text in getattr(report, "warnings", ()) if "report this" in text]
    return ("step failed", "\n".join(failed)) if failed else ("int8" if integer else "float", "")


def _runs(work):
    """Whether the runtime runs the float model as it came, to finite results."""
    try:
        outputs = _outputs(work.model, work.case.feeds)
    except Exception:  # any class of the runtime's
        return False
    arrays = [a for values in outputs.values() for a in values if isinstance(a, np.ndarray) and a.dtype.kind == "f"]
    return all(bool(np.isfinite(a).all()) for a in arrays)


def _outputs(path, feeds):
    session = models.session(path)
    names = [value.name for value in session.get_outputs()]
    wanted = {value.name for value in session.get_inputs()} | {v.name for v in session.get_overridable_initializers()}
    results = [session.run(None, {k: v for k, v in feed.items() if k in wanted}) for feed in feeds]
    return {name: [result[at] for result in results] for at, name in enumerate(names)}


def _sqnr_db(want, got):
    """The signal against the error over all feeds, None where shape or type differ."""
    signal = noise = 0.0
    for a, b in zip(want, got, strict=True):
        if not isinstance(a, np.ndarray) or a.dtype.kind not in "fiub":
            continue
        if not isinstance(b, np.ndarray) or a.dtype != b.dtype or a.ndim != b.ndim:
            return None
        if a.shape != b.shape:  # how many rows there are may depend on the data
            continue
        x, y = a.astype(np.float64), b.astype(np.float64)
        ok = np.isfinite(x) & np.isfinite(y)
        if (np.isfinite(x) & ~np.isfinite(y)).any():
            return -np.inf
        with np.errstate(over="ignore"):
            signal += float((x[ok] ** 2).sum())
            noise += float(((x[ok] - y[ok]) ** 2).sum())
    if noise <= 1e-12 * max(signal, 1e-30) or noise < 1e-30:
        return np.inf
    return float(10 * np.log10(signal / noise)) if signal else -np.inf
