"""``python -m kenosis_ort`` is the ``kenosis-ort`` command."""

import sys

from kenosis_ort.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
