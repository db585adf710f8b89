"""python -m jaxrl.export: see `jaxrl.cli.export`; in Python, `jaxrl.export` is a function."""

import signal
import sys

import jaxrl

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while modules are imported ends without a traceback
    from jaxrl.cli.export import main

    raise SystemExit(main())
# `import jaxrl.export` would else put this module in the place of the function
sys.modules[__name__] = jaxrl.export  # type: ignore[assignment]
