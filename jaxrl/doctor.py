"""python -m jaxrl.doctor: see `jaxrl.cli.doctor`."""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while modules are imported ends without a traceback
    from jaxrl.cli.doctor import main

    raise SystemExit(main())
