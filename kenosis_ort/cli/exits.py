"""Exit codes of the ``kenosis-ort`` command."""

from __future__ import annotations

from typing import Final

SUCCESS: Final = 0
NOT_INTEGER: Final = 1
"""The model is fine, but the proof shows float kernels where integer ones were wanted."""
LEFT_OUT: Final = 1
"""The benchmark is done, but without a model that does not load or run."""
ERROR: Final = 2
"""Bad usage or a KenosisError; nothing was written."""
INTERRUPTED: Final = 130

EPILOG: Final = """\
exit codes:
  0    done
  1    done, but the fusion proof shows float kernels where integer ones were
       planned (quantize) or demanded (verify --strict), or a model did not load
       or run and is left out (bench)
  2    error: bad usage, bad model, bad data, output not writable; the reason is
       one line on stderr, and an existing output file is untouched
  130  interrupted
"""
