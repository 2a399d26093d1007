"""``python -m kenosis_ort`` is the ``kenosis-ort`` command; with a script's path it runs that, see `cli.main`."""

import sys

from kenosis_ort.cli.main import is_script, main, run_script

if __name__ == "__main__":
    sys.exit(run_script(sys.argv[1:]) if is_script(sys.argv[1:]) else main())
