import sys
from pathlib import Path

import pytest

from kenosis_ort.errors import RuntimeEndedError
from kenosis_ort.runtime.child import Child

_SQUARES = """
import json, os, signal, sys
for line in sys.stdin:
    asked = json.loads(line)["n"]
    print("asked", asked, file=sys.stderr, flush=True)
    if asked == 3:
        os.kill(os.getpid(), signal.SIGABRT)
    print(json.dumps({"square": asked**2}), flush=True)
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "squares.py").write_text(_SQUARES)
    return [sys.executable, str(tmp_path / "squares.py")]


def test_it_answers_and_says_in_the_end_what_it_printed(command: list[str]) -> None:
    with Child(command, "squares") as child:
        assert [child.ask({"n": n})["square"] for n in (1, 2, 4)] == [1, 4, 16]
        assert child.runs
    assert not child.runs
    assert child.log.split("\n") == ["asked 1", "asked 2", "asked 4", ""]


@pytest.mark.parametrize(
    ("killed", "said"), [(False, "squares ended its process, with code -6: .*asked 3"), (True, "code -9")]
)
def test_its_death_is_told_with_code_and_last_words(killed: bool, said: str, command: list[str]) -> None:
    child = Child(command, "squares")
    assert child.ask({"n": 5}) == {"square": 25}
    if killed:
        child._process.kill()
    with pytest.raises(RuntimeEndedError, match=said):
        child.ask({"n": 3})
    assert not child.runs
    child.close()
