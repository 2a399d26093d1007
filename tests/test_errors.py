"""Errors and warnings: one printable line, and defects of our own told apart from mistakes."""

import ast
import operator
import warnings
from pathlib import Path

import numpy as np
import pytest

from kenosis_ort import KenosisError, KenosisWarning, OptionError, bench, errors, preview, quantize_static
from kenosis_ort.calibration.collector import _Adder
from kenosis_ort.errors import InternalError, UnsupportedModelError, callers_own, last_gate, printable
from tests import models


@pytest.mark.parametrize(("text", "shown"), [
    ("plain 'name' [x]", "plain 'name' [x]"), ("Größe, 数, 😀", "Größe, 数, 😀"), ("\x1b[2J", "\\x1b[2J"),
    ("a\u202eb\u2066", "a\\u202eb\\u2066"), ("tab\tbell\a\x7f\x9b", "tab\\tbell\\x07\\x7f\\x9b"),
    ("two\nlines", "two\nlines"), ("\ud800", "\\ud800"), ("\u2028", "\\u2028"),
])  # fmt: skip
def test_control_characters_are_spelled_out(text, shown):
    assert printable(text) == shown


def test_an_error_is_one_line_of_printable_text():
    error = KenosisError("two\nlines", where="\x1b[31m", fix="none\u202e")
    assert str(error) == "two lines [at: \\x1b[31m] Fix: none\\u202e"
    assert error.where == "\x1b[31m"  # data stay data
    with pytest.warns(KenosisWarning, match=r"a\\x1bb"):
        warnings.warn("a\x1bb", KenosisWarning, stacklevel=1)


class CancelledError(Exception):
    pass


def test_what_the_callers_own_code_raises_comes_out_as_it_was(tmp_path):
    def cancel(*_):
        raise CancelledError

    model = models.residual_block()
    with pytest.raises(CancelledError):
        quantize_static(model, tmp_path / "out.onnx", models.reader(model), progress=cancel)
    with pytest.raises(CancelledError):
        bench(model, models.feeds(model), rounds=1, progress=cancel)
    assert list(tmp_path.iterdir()) == []


@last_gate
def door(do):
    """A public call."""
    return do()


def fail(error):
    raise error


def test_defects_are_reported_as_such_and_memory_as_memory():
    with pytest.raises(InternalError, match=r"KeyError: 'x'.*report this as a bug") as caught:
        door(lambda: fail(KeyError("x")))
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(UnsupportedModelError, match="Memory ran out"):
        door(lambda: fail(MemoryError()))
    with pytest.raises(OptionError, match="mine"):
        door(lambda: fail(OptionError("mine")))
    with pytest.raises(TypeError, match="argument") as wrong:
        door()
    assert not isinstance(wrong.value, KenosisError)


def test_a_warning_that_the_caller_makes_an_error_stays_one():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KenosisWarning, match="mine"):
            door(lambda: warnings.warn("mine", KenosisWarning, stacklevel=2))


def test_numpy_neither_warns_nor_raises_within_a_call():
    def divide():
        return float(np.float32(1.0) / np.float32(0.0))

    with np.errstate(all="raise"):
        assert door(divide) == np.inf
        with pytest.raises(FloatingPointError):
            divide()


def test_threads_of_a_call_do_not_warn_of_numbers_either():
    def overflows(_, array):
        return bool(np.isinf(array * np.float32(3e38)).all())

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("error")
        assert not _Adder(threads=2).add({name: np.full(2**19, 3e38, np.float32) for name in "ab"}, overflows)


def test_of_one_public_call_made_by_another_the_outer_one_reports():
    def handled():
        with pytest.raises(KeyError):
            door(lambda: fail(KeyError("x")))
        return "handled"

    assert door(handled) == "handled"


def test_callers_own_keeps_results_and_names_and_a_misspelt_option_is_a_type_error():
    negated = callers_own(operator.neg)
    assert (negated(4), negated.__name__) == (-4, "neg")
    with pytest.raises(TypeError, match="nodes_to_exlude"):
        preview(models.residual_block(), nodes_to_exlude=["x"])


def test_names_are_spelled_out_in_all_texts(tmp_path):
    model, odd = models.residual_block(), "\x1b[31mred\u202e<b>"
    for node in model.graph.node:
        node.name = f"{node.name}{odd}"
    model.graph.node[-1].output[0] = model.graph.output[0].name = odd
    report = quantize_static(model, tmp_path / "out.onnx", models.reader(model), promise=False)
    plan = report.plan
    texts = [str(report), report.to_html(), report._repr_html_(), str(report.fusion), plan.explain(plan.nodes[0].node)]
    assert not any(odd in text for text in texts for odd in ("\x1b", "\u202e"))
    assert ("\\x1b[31mred\\u202e" in texts[0], "&lt;b&gt;" in texts[1]) == (True, True)
    assert np.isfinite([o.sqnr_db for o in report.outputs]).all()


WITHOUT_A_FIX = {
    ("flow/call.py", "RewriteMismatchError"): "the call undoes the rewrite, goes on, and tells that with a fix"
}
"""Errors that come without a fix, by file and class, and why."""
PACKAGE = Path(errors.__file__).parent


def test_every_error_says_what_to_do():
    """An error that the package raises names a fix: what the caller can do about it."""
    trees = {
        file.relative_to(PACKAGE).as_posix(): [*ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
        for file in PACKAGE.rglob("*.py")
    }
    known = {"KenosisError"}
    classes = [node for nodes in trees.values() for node in nodes if isinstance(node, ast.ClassDef)]
    while more := {c.name for c in classes if known & {ast.unparse(b).split(".")[-1] for b in c.bases}} - known:
        known |= more
    calls = [(file, node) for file, nodes in trees.items() for node in nodes if isinstance(node, ast.Call)]
    made = [(file, ast.unparse(call.func).removeprefix("errors."), call) for file, call in calls]
    made = [(file, name, call) for file, name, call in made if name in known]  # not argparse.ArgumentTypeError, for one
    assert len(made) > 350
    without = {(f, name): call.lineno for f, name, call in made if not any(k.arg == "fix" for k in call.keywords)}
    assert {key: line for key, line in without.items() if key not in WITHOUT_A_FIX} == {}
    assert without.keys() == WITHOUT_A_FIX.keys()
