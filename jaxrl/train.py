"""python -m jaxrl.train: see `jaxrl.cli.train`; in Python, `jaxrl.train` is a function."""

import sys

import jaxrl
from jaxrl.cli.train import main

if __name__ == "__main__":
    raise SystemExit(main())
# `import jaxrl.train` would else put this module in the place of the function
sys.modules[__name__] = jaxrl.train  # type: ignore[assignment]
