"""python -m jaxrl.evaluate: see `jaxrl.cli.evaluate`; in Python, `jaxrl.evaluate` is a function."""

import signal
import sys

import jaxrl

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while modules are imported ends without a traceback
    from jaxrl.cli.evaluate import main

    raise SystemExit(main())
# `import jaxrl.evaluate` would else put this module in the place of the function
sys.modules[__name__] = jaxrl.evaluate  # type: ignore[assignment]
