"""The tests. One thread of linear algebra each: others spin, here and in started processes, where a test could run."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy is loaded
