"""python -m jaxrl.evaluate: see `jaxrl.cli.evaluate`; in Python, `jaxrl.evaluate` is a function."""

import sys

import jaxrl
from jaxrl.cli.evaluate import main

if __name__ == "__main__":
    raise SystemExit(main())
# `import jaxrl.evaluate` would else put this module in the place of the function
sys.modules[__name__] = jaxrl.evaluate  # type: ignore[assignment]
