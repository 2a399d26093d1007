"""One case: a mutated model goes through one of the public doors; what came of it is classified.

Runs in a process of its own, which the model may crash, hang or fill; see `farm`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime as ort
from google.protobuf.message import DecodeError
from onnx import helper

import kenosis_ort
from kenosis_ort import KenosisError
from kenosis_ort.cli.main import main as command
from kenosis_ort.runtime.limits import runtime_limits
from tests.fuzz import seeds, structure
from tests.models import Array, Feed, FeedReader

OLD: Final = b"what stood here before"
ALLOWED: Final = ("int8", "float", "refused", "done", "step failed")
"""Classes of results that are right; all others are defects. Of a step that failed the report asks for a bug report."""

_MUST_RESULT: Final = ("quantize_static", "in memory", "quantize")
_CALLERS: Final = ("AlreadyQuantizedError", "OptionError", "ArgumentTypeError")
"""Errors about what the caller gave, whatever the runtime makes of the model."""

_BYTES_SHARE: Final = 0.15
_SANE_DB: Final = 10.0
_TOLD_DB: Final = 6.0
_LARGEST_FEED: Final = 2**20

DOORS: Final = (
    *["quantize_static"] * 14,
    *("cli quantize", "cli quantize", "cli report", "preview", "preview", "calibrate", "calibrate", "quantize"),
    *("verify_fusion", "compare", "compare", "bench", "cli verify", "cli explain", "cli inspect"),
    *("cli compare", "synthetic", "closed loop", "in memory", "in memory"),
)
_OPTIONS: Final[tuple[dict[str, Any], ...]] = (
    *({}, {}, {}, {"promise": False}, {"promise": False}, {"promise": False}),
    *({"recipe": "plain", "promise": False}, {"recipe": "plain", "promise": False}),
    *({"evidence": "full", "promise": False}, {"recipe": "accurate", "promise": False}),
    *({"use_external_data_format": True, "promise": False}, {"stages": kenosis_ort.Stages.none()}),
    {"promise": False, "extra_options": {"ForceQuantizeNoInputCheck": True}},
)


@dataclass
class Case:
    """What is done, decided by the dice of its seed and number alone.

    Attributes:
        seed: Seed of the series.
        number: Number in it.
        net: Name of the seed model.
        door: The public call.
        changes: What was done to the model.
        options: Options of the call.
    """

    seed: int
    number: int
    net: str = ""
    door: str = ""
    changes: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    model: bytes = b""
    data: bytes = b""
    feeds: list[Feed] = field(default_factory=list)

    def told(self) -> dict[str, Any]:
        """Returns what identifies the case, for a log."""
        return {
            "case": f"{self.seed}/{self.number}",
            "net": self.net,
            "door": self.door,
            "changes": self.changes,
            "options": sorted(self.options),
        }


def make_case(seed: int, number: int) -> Case:
    """Returns a case, the same for the same seed and number."""
    dice = Random(f"{seed}/{number}")
    case = Case(seed, number, net=dice.choice(sorted(seeds.SEEDS)), door=dice.choice(DOORS))
    case.options = dict(dice.choice(_OPTIONS))
    model = seeds.seed_model(case.net)
    case.feeds = seeds.seed_feeds(case.net)
    case.data = seeds.split_data(model)
    if dice.random() < _BYTES_SHARE:
        case.model, said = structure.damage(model.SerializeToString(), dice)
        case.changes = [said]
    else:
        case.changes = structure.mutate(model, dice)
        case.model = model.SerializeToString()
        if dice.random() < 0.7:
            case.feeds = _fitted(model, case.feeds)
    if case.data and dice.random() < 0.2:
        case.data, said = structure.damage(case.data, dice)
        case.changes.append(f"data file: {said}")
    return case


def _fitted(model: onnx.ModelProto, feeds: list[Feed]) -> list[Feed]:
    """Returns feeds for what the mutated model declares, so that more cases come through to the end."""
    held = {tensor.name for tensor in model.graph.initializer}
    rng = np.random.default_rng(0)
    found: list[Feed] = []
    for feed in feeds:
        fitted: Feed = {}
        for value in model.graph.input:
            tensor = value.type.tensor_type
            if value.name in held:
                continue
            shape = [d.dim_value if d.dim_value > 0 else 2 for d in tensor.shape.dim]
            known = feed.get(value.name)
            try:
                dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
            except KeyError:
                return feeds
            if known is not None and known.dtype == dtype and list(known.shape) == shape:
                fitted[value.name] = known
            elif dtype.kind not in "fiub" or np.prod(shape, dtype=np.float64) > _LARGEST_FEED:
                return feeds
            else:
                numbers = rng.normal(0, 1, shape) if dtype.kind == "f" else rng.integers(0, 2, shape)
                fitted[value.name] = np.asarray(numbers).astype(dtype)
        found.append(fitted)
    return found


# ---- the doors --------------------------------------------------------------------------------------------------


@dataclass
class Work:
    """The folder of a case and what its doors need.

    Attributes:
        case: The case.
        folder: An empty folder of its own.
        old: Whether a file stands at the output already.
    """

    case: Case
    folder: Path
    old: bool

    @property
    def model(self) -> Path:
        return self.folder / "model.onnx"

    @property
    def out(self) -> Path:
        return self.folder / "out" / "out.onnx"

    def lay_out(self) -> None:
        """Writes the input files."""
        (self.folder / "out").mkdir()
        (self.folder / "tmp").mkdir()
        self.model.write_bytes(self.case.model)
        if self.case.data:
            (self.folder / seeds.DATA_NAME).write_bytes(self.case.data)
        if self.old:
            self.out.write_bytes(OLD)
        if self.case.door.startswith("cli"):
            names = sorted({name for feed in self.case.feeds for name in feed if "/" not in name and "\0" not in name})
            arrays = {name: np.stack([feed[name] for feed in self.case.feeds]) for name in names}
            np.savez(self.folder / "feeds.npz", **{f"{name}": value for name, value in arrays.items()})


def _quantize_static(work: Work, source: Any = None) -> Any:
    return kenosis_ort.quantize_static(source or work.model, work.out, FeedReader(work.case.feeds), **work.case.options)


def _in_memory(work: Work) -> Any:
    try:
        model = onnx.load_model_from_string(work.case.model)
    except DecodeError as error:  # the caller's own call fails before ours
        raise KenosisError(f"no model: {error}") from error
    before = model.SerializeToString(deterministic=True)
    report = _quantize_static(work, model)
    if model.SerializeToString(deterministic=True) != before:
        raise AssertionError("the caller's model was changed")
    return report


def _quantize(work: Work) -> Any:
    from onnxruntime.quantization import StaticQuantConfig

    config = StaticQuantConfig(FeedReader(work.case.feeds))
    return kenosis_ort.quantize(work.model, work.out, config, promise=False)


def _calibrate(work: Work) -> Any:
    return kenosis_ort.calibrate(work.model, work.out.with_suffix(".json"), FeedReader(work.case.feeds))


def _synthetic(work: Work) -> Any:
    reader = kenosis_ort.SyntheticReader(work.model, samples=4)
    return kenosis_ort.quantize_static(work.model, work.out, reader, promise=False)


def _closed_loop(work: Work) -> Any:
    reader = kenosis_ort.ClosedLoopReader(work.model, FeedReader(work.case.feeds))
    return kenosis_ort.quantize_static(work.model, work.out, reader, promise=False)


def _compare(work: Work) -> Any:
    other = work.folder / "other.onnx"
    other.write_bytes(seeds.seed_bytes(work.case.net))
    pair = (work.model, other) if work.case.number % 2 else (other, work.model)
    return kenosis_ort.compare(*pair, FeedReader(work.case.feeds), samples=2)


def _bench(work: Work) -> Any:
    return kenosis_ort.bench(work.model, FeedReader(work.case.feeds), rounds=2, budget_s=0.3)


def _cli(*words: str) -> Callable[[Work], Any]:
    def run(work: Work) -> Any:
        places = {
            "MODEL": work.model,
            "OUT": work.out,
            "DATA": work.folder / "feeds.npz",
            "REPORT": work.folder / "out" / "report.html",
        }
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                code = command([str(places.get(word, word)) for word in words])
        except SystemExit as leaving:
            code = leaving.code
        text = said.getvalue()
        if code == 2:
            errors = [line for line in text.splitlines() if line.startswith("kenosis-ort: error")]
            if len(errors) != 1 or text.splitlines()[-1] != errors[0]:
                raise AssertionError(f"exit code 2 with {text[-500:]!r}")
            raise KenosisError(text.splitlines()[-1])
        if code not in (0, 1):
            raise AssertionError(f"exit code {code!r}: {text[-500:]}")
        return None

    return run


_RUN: Final[dict[str, Callable[[Work], Any]]] = {
    "quantize_static": _quantize_static,
    "in memory": _in_memory,
    "quantize": _quantize,
    "calibrate": _calibrate,
    "synthetic": _synthetic,
    "closed loop": _closed_loop,
    "preview": lambda work: kenosis_ort.preview(work.model),
    "verify_fusion": lambda work: kenosis_ort.verify_fusion(work.model).to_dict(),
    "compare": _compare,
    "bench": _bench,
    "cli quantize": _cli("quantize", "MODEL", "OUT", "--data", "DATA", "--no-promise"),
    "cli report": _cli("quantize", "MODEL", "OUT", "--data", "DATA", "--no-promise", "--report", "REPORT"),
    "cli verify": _cli("verify", "MODEL"),
    "cli explain": _cli("explain", "MODEL"),
    "cli inspect": _cli("inspect", "MODEL"),
    "cli compare": _cli("compare", "MODEL", "MODEL", "--data", "DATA"),
}


# ---- what came of it --------------------------------------------------------------------------------------------


def run_case(case: Case, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Runs one case in an empty folder.

    Args:
        case: The case.
        folder: An empty folder.
        say: Told the phase that begins, so that a crash can be placed.

    Returns:
        What identifies the case, ``class`` and ``detail``.
    """
    work = Work(case, folder, old=Random(f"old {case.seed}/{case.number}").random() < 0.5)
    work.lay_out()
    os.chdir(folder)
    tempfile.tempdir = str(folder / "tmp")
    os.environ["TMPDIR"] = tempfile.tempdir
    inputs = _contents(folder, work)
    say(f"door {case.door}")
    output = io.StringIO()
    report: Any = None
    try:
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(output):
            warnings.simplefilter("always")
            report = _RUN[case.door](work)
    except KenosisError as error:
        found = "raw exception" if "\n" in str(error) or _odd(str(error)) else "refused"
        found = "internal error" if type(error).__name__ == "InternalError" else found
        detail = f"{type(error).__name__}: {error}"
        if found == "internal error":
            detail += "\n" + "".join(traceback.format_exception(error))
    except Exception:  # the very thing that is looked for
        found, detail = "raw exception", traceback.format_exc()
    else:
        strange = [w for w in caught if not issubclass(w.category, (kenosis_ort.KenosisWarning, DeprecationWarning))]
        found, detail = (
            ("raw warning", f"{strange[0].filename}:{strange[0].lineno}: {strange[0].message}")
            if strange
            else ("done", "")
        )
        texts = [output.getvalue(), *(str(w.message) for w in caught), *([str(report)] if report is not None else [])]
        if any(map(_odd, texts)):
            found, detail = "raw exception", f"control characters in {next(t for t in texts if _odd(t))!r}"
    if found == "refused" and work.out.exists() != work.old:
        found, detail = "output of a failing run", detail
    if found == "refused" and work.old and work.out.read_bytes() != OLD:
        found, detail = "output replaced", detail
    if found in ("refused", "done"):
        left = _leftovers(work, inputs)
        if left:
            found, detail = "leftovers", ", ".join(left)
    if (
        found == "refused"
        and case.door in _MUST_RESULT
        and not (case.door == "in memory" and case.data)
        and "stages" not in case.options
        and not detail.startswith(_CALLERS)
    ):
        say("judge")
        found = "needless refusal" if _runs(work) else found
    if found == "done" and work.out.exists() and (not work.old or work.out.read_bytes() != OLD):
        say("judge")
        found, detail = _judged(work, report)
    return {**case.told(), "class": found, "detail": detail}


def _odd(text: str) -> bool:
    """Tells whether a text holds control characters (but line breaks) or marks that change the reading order."""
    return any(
        (ord(c) < 32 and c != "\n")
        or ord(c) in (0x7F, *range(0x80, 0xA0), 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
        for c in text
    )


def _contents(folder: Path, work: Work) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def _leftovers(work: Work, inputs: dict[Path, bytes]) -> list[str]:
    """Returns files that are new or no longer what they were, but for the output and what belongs to it."""
    found = [p.name for p in work.folder.iterdir() if p.is_file() and p not in inputs and p.name != "other.onnx"]
    found += [f"{p.name} changed" for p, content in inputs.items() if not p.exists() or p.read_bytes() != content]
    beside = {"out.onnx", "out.onnx.data", "out.json", "report.html", "out.recipe.toml"}
    found += [
        p.name for p in (work.folder / "out").iterdir() if p.name not in beside and not p.name.startswith("out.onnx.")
    ]
    return found + [f"tmp/{p.name}" for p in (work.folder / "tmp").iterdir()]


def _judged(work: Work, report: Any) -> tuple[str, str]:
    """Classifies a written model by what the runtime makes of it, against the float model."""
    if not report:
        return "done", ""
    feeds = work.case.feeds
    other_data = work.case.door in ("synthetic", "closed loop") or "stages" in work.case.options
    try:
        want, again, runs_optimized = _references(work)
    except Exception:  # any class of the runtime's: a dead giant, for one, that quantization takes out
        return "done", ""
    try:
        got = _outputs(work.out, feeds)
    except Exception as error:
        return ("wrong result", f"the written model does not run: {error}") if runs_optimized else ("done", "")
    written = onnx.load_model(work.out, load_external_data=False)
    integer = any(node.op_type == "DequantizeLinear" for node in written.graph.node)
    random = any(node.op_type.startswith("Random") for node in written.graph.node)
    said = {quality.name: quality.sqnr_db for quality in getattr(report, "outputs", ())}
    texts = " ".join([*getattr(report, "warnings", ()), *getattr(report, "notes", ())])
    for name in want:
        if name not in got:
            return "wrong result", f"output {name!r} is missing"
        if other_data or random or not _same(want[name], again[name]):
            continue
        found = [
            _sqnr_db(want[name][::step], got[name][::step]) for step in (1, 2)
        ]  # the report takes every other feed
        measured = None if None in found else max(db for db in found if db is not None)
        if measured is None:
            return "wrong result", f"output {name!r} has another shape or type"
        told = said.get(name)
        is_told = name in texts or (told is not None and told <= max(measured, -40) + _TOLD_DB)
        if measured < _SANE_DB and not is_told:
            return "wrong result", f"output {name!r} has {measured:.1f} dB, the report says {told}"
    failed = [text for text in getattr(report, "warnings", ()) if "report this" in text]
    return ("step failed", "\n".join(failed)) if failed else ("int8" if integer else "float", "")


def _references(work: Work) -> tuple[dict[str, list[Array]], dict[str, list[Array]], bool]:
    """Returns two runs of the float model, and whether the runtime's own fusions leave it fit to be run."""
    path = _as_it_loads(work)
    try:
        return _outputs(path, work.case.feeds), _outputs(path, work.case.feeds), True
    except Exception:  # any class of the runtime's
        found = _outputs(path, work.case.feeds, optimize=False)
        return found, _outputs(path, work.case.feeds, optimize=False), False


def _runs(work: Work) -> bool:
    """Tells whether the runtime runs the float model as it came, to finite results."""
    try:
        outputs = _outputs(work.model, work.case.feeds)
    except Exception:  # any class of the runtime's
        return False
    arrays = [a for values in outputs.values() for a in values if isinstance(a, np.ndarray) and a.dtype.kind == "f"]
    return all(bool(np.isfinite(a).all()) for a in arrays)


def _as_it_loads(work: Work) -> Path:
    """Returns the float model's path; of a copy with other node names and header where the runtime wants these."""
    copy = onnx.load_model(work.model, load_external_data=False)
    limits = runtime_limits()
    names = [node.name for node in copy.graph.node if node.name]
    newest = max(entry.version for entry in copy.opset_import)
    if len(set(names)) == len(names) and newest <= limits.max_opset and copy.ir_version <= limits.max_ir:
        return work.model
    for at, node in enumerate(copy.graph.node):
        node.name = f"{node.name}#{at}"
    for entry in copy.opset_import:
        entry.version = min(entry.version, limits.max_opset)
    copy.ir_version = min(copy.ir_version, limits.max_ir)
    path = work.folder / "renamed.onnx"
    path.write_bytes(copy.SerializeToString())
    return path


def _outputs(path: Path, feeds: list[Feed], *, optimize: bool = True) -> dict[str, list[Array]]:
    options = ort.SessionOptions()
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    wanted = {value.name for value in session.get_inputs()} | {v.name for v in session.get_overridable_initializers()}
    results = [session.run(None, {k: v for k, v in feed.items() if k in wanted}) for feed in feeds]
    return {name: [result[at] for result in results] for at, name in enumerate(names)}


def _same(a: list[Any], b: list[Any]) -> bool:
    def equal(x: Any, y: Any) -> bool:
        if not isinstance(x, np.ndarray) or not isinstance(y, np.ndarray) or x.dtype.kind not in "fiub":
            return str(x) == str(y)
        return bool(np.array_equal(x, y, equal_nan=x.dtype.kind == "f"))

    return all(map(equal, a, b))


def _sqnr_db(want: list[Any], got: list[Any]) -> float | None:
    """Returns the signal against the error over all feeds, None where shape or type differ."""
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


def result_line(result: dict[str, Any]) -> str:
    """Returns a result as one line of JSON."""
    return json.dumps(result, default=str)


__all__ = ["ALLOWED", "Case", "asdict", "make_case", "result_line", "run_case"]
