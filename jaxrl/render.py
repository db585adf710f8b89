"""python -m jaxrl.render: see `jaxrl.cli.render`."""

import sys

from jaxrl.cli.render import main

if __name__ == "__main__":
    sys.exit(main())
