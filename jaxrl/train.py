"""python -m jaxrl.train: see `jaxrl.cli.train`; in Python, `jaxrl.train` is a function."""

from jaxrl.cli.train import main

if __name__ == "__main__":
    raise SystemExit(main())
else:
    raise ImportError("jaxrl.train is a function and a command: import jaxrl, or jaxrl.cli.train")
