"""python -m jaxrl.runs: see `jaxrl.cli.runs`."""

import sys

from jaxrl.cli.runs import main

if __name__ == "__main__":
    sys.exit(main())
