"""python -m jaxrl.export: see `jaxrl.cli.export`."""

import sys

from jaxrl.cli.export import main

if __name__ == "__main__":
    sys.exit(main())
