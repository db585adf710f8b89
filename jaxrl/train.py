"""python -m jaxrl.train: see `jaxrl.cli.train`; in Python, `jaxrl.train` is a function."""

import sys

from jaxrl.cli.train import main

if __name__ == "__main__":
    sys.exit(main())
else:
    raise ImportError("jaxrl.train is a function and a command: import jaxrl, or jaxrl.cli.train")
