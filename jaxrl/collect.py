"""python -m jaxrl.collect: see `jaxrl.cli.collect`."""

import sys

from jaxrl.cli.collect import main

if __name__ == "__main__":
    sys.exit(main())
