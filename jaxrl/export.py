"""python -m jaxrl.export: see `jaxrl.cli.export`; in Python, `jaxrl.export` is a function."""

import sys

import jaxrl
from jaxrl.cli.export import main

if __name__ == "__main__":
    raise SystemExit(main())
# `import jaxrl.export` would else put this module in the place of the function
sys.modules[__name__] = jaxrl.export  # type: ignore[assignment]
