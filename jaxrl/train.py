"""python -m jaxrl.train: see `jaxrl.cli.train`; in Python, `jaxrl.train` is a function."""

import signal
import sys

import jaxrl

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while modules are imported ends without a traceback
    from jaxrl.cli.train import main

    raise SystemExit(main())
# `import jaxrl.train` would else put this module in the place of the function
sys.modules[__name__] = jaxrl.train  # type: ignore[assignment]
