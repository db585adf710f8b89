"""python -m jaxrl: see `jaxrl.cli.main`."""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while modules are imported ends without a traceback
    from jaxrl.cli.main import main

    raise SystemExit(main())
