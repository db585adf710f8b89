"""python -m jaxrl.evaluate: see `jaxrl.cli.evaluate`; in Python, `jaxrl.evaluate` is a function."""

from jaxrl.cli.evaluate import main

if __name__ == "__main__":
    raise SystemExit(main())
else:
    raise ImportError("jaxrl.evaluate is a function and a command: import jaxrl, or jaxrl.cli.evaluate")
