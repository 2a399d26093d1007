"""The package's types as a user's type checker sees them."""

from pathlib import Path

import pytest

import kenosis_ort

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / ".mypy_cache" / "typing"


def test_the_package_says_that_it_is_typed():
    assert (Path(kenosis_ort.__file__).parent / "py.typed").is_file()


def test_user_code_type_checks(monkeypatch, tmp_path):
    """What users write is accepted, and the marked mistakes are refused: an unused mark is an error too."""
    api = pytest.importorskip("mypy.api")
    found = Path(kenosis_ort.__file__).parents[1]
    if found.name != "site-packages":  # mypy finds an installed package itself
        monkeypatch.setenv("MYPYPATH", str(found))
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "mypy.ini"
    config.write_text(
        "[mypy]\nstrict = True\ndisallow_subclassing_any = False\nfollow_imports = silent\n"
        "[mypy-onnxruntime.*]\nignore_missing_imports = True\n"
        "[mypy-google.*]\nignore_missing_imports = True\n"
    )
    files = [str(HERE / name) for name in ("user_code.py", "wrong_code.py")]
    printed, complaints, code = api.run(["--config-file", str(config), "--cache-dir", str(CACHE), *files])
    assert code == 0, printed + complaints
