"""``python -m docs.generate [NAME]``: prints a generated part of the documentation, or the names of all."""

from __future__ import annotations

import sys

from . import SECTIONS

if __name__ == "__main__":
    asked = sys.argv[1:]
    unknown = [name for name in asked if name not in SECTIONS]
    if unknown:
        sys.exit(f"no part '{unknown[0]}'; there are: {', '.join(SECTIONS)}")
    text = "\n\n".join(SECTIONS[name]() for name in asked) if asked else "\n".join(SECTIONS)
    sys.stdout.write(f"{text}\n")
