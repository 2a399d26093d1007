"""The tests. What costs every run a share of its time is settled here, before anything else is imported."""

import os
import sys

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # others spin, here and in started processes
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # started processes compile the package once,
sys.dont_write_bytecode = False  # and asserts of a test file are rewritten once
