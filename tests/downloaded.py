"""Nets that are downloaded, no part of the repository: tests of them run where ``KENOSIS_NETS`` names their folder."""

import os
from pathlib import Path

_FOLDER = Path(os.environ.get("KENOSIS_NETS", "no downloaded nets"))
ZOO = _FOLDER / "zoo"
QUANTIZED = _FOLDER / "corpus" / "quantized"
