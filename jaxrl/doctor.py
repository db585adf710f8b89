"""python -m jaxrl.doctor: see `jaxrl.cli.doctor`."""

import sys

from jaxrl.cli.doctor import main

if __name__ == "__main__":
    sys.exit(main())
